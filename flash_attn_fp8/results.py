"""The one schema of every benchmark: what was measured, by which command, where, at which commit.

`benchmarks/results/NAME.json` holds

    {"command": str, "machine": {...}, "versions": {...}, "commit": str, "rows": [
        {"case": {...}, "impl": str, "metric": str, "unit": str, "value": x, "runs": [x, ...]}]}

A case is a flat object of text, numbers and booleans; `value` is the median of `runs`, every
measurement in the order taken (one for what is computed, not timed). A row is found again by its
case, impl and metric, which is how a benchmark resumes and how runs on several machines merge.
NAME.md beside it holds the same rows as tables, NAME.png a plot of them.

This module imports nothing of the package, so that anything may write results.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Scalar = str | int | float | bool
FOLDER = Path("benchmarks/results")  # relative to the root of a checkout
_FIELDS = ("command", "machine", "versions", "commit", "rows")
_ROW_FIELDS = ("case", "impl", "metric", "unit", "value", "runs")


class ResultsError(ValueError):
    """Rows or a file that do not fit the schema, or a tool that is missing to write them."""


@dataclass(frozen=True)
class Row:
    """One figure. `runs` holds every measurement, `value` their median, both in `unit`."""

    case: Mapping[str, Scalar]
    impl: str
    metric: str
    unit: str
    value: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, case: Mapping[str, Scalar], impl: str, metric: str, unit: str, *runs: float) -> Row:
        """A row whose value is the median of `runs`."""
        value = statistics.median(runs) if runs else math.nan
        return cls(dict(case), impl, metric, unit, float(value), tuple(float(r) for r in runs))

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a row among others: case, impl and metric."""
        return (*sorted(self.case.items()), self.impl, self.metric)

    def at(self, column: str) -> Scalar | None:
        """The row's `impl`, `metric`, `unit`, or the case's entry of that name."""
        if column in ("impl", "metric", "unit"):
            return str(getattr(self, column))
        return self.case.get(column)


@dataclass(frozen=True)
class Results:
    """Rows and where they come from; the content of one JSON file."""

    rows: tuple[Row, ...]
    command: str = ""
    machine: Mapping[str, Scalar | None] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    commit: str = "unknown"

    @classmethod
    def here(cls, rows: Iterable[Row], command: str, root: Path | None = None) -> Results:
        """Rows with this machine's description; `root` is the checkout that they belong to."""
        return cls(tuple(rows), command, machine(), versions(), commit(root))

    def as_json(self) -> dict[str, Any]:
        """The plain object that the file holds."""
        rows = [
            {name: getattr(row, name) for name in _ROW_FIELDS}
            | {"case": dict(row.case), "runs": list(row.runs)}
            for row in self.rows
        ]
        return {
            "command": self.command,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "commit": self.commit,
            "rows": rows,
        }


# ------------------------------------------------------------------------------ where it ran


def machine() -> dict[str, Scalar | None]:
    """CPU model, cores that this process may use, and the first GPU's name (None without one)."""
    return {"cpu": _cpu_model(), "cores": _usable_cores(), "gpu": _gpu_name()}


def versions() -> dict[str, str | None]:
    """Versions of Python, torch and this package; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "flash-attn-fp8"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(root: Path | None = None) -> str:
    """`git describe --always` of the checkout at `root`, with -dirty; "unknown" outside of one.

    Dirty means that anything but the results folder differs from the commit, untracked files
    included: a module that was never committed cannot be found again either.
    """
    at = Path(__file__).resolve().parent if root is None else root
    described = _git(at, "describe", "--always", "--tags")
    top = _git(at, "rev-parse", "--show-toplevel")
    if described is None or top is None:
        return "unknown"
    changed = _git(Path(top), "status", "--porcelain", "--", ".", f":(exclude){FOLDER}")
    return f"{described}-dirty" if changed or changed is None else described


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


# ---------------------------------------------------------------------------------- schema


def check(rows: Iterable[Row]) -> None:
    """Raise ResultsError with every fault of the rows."""
    faults: list[str] = []
    seen: set[Any] = set()
    for i, row in enumerate(rows):
        found = _row_faults(row)
        if not found and row.key in seen:
            found = [f"has the case, impl and metric of an earlier row: {row.key}"]
        faults += [f"row {i} {fault}" for fault in found]
        if not found:
            seen.add(row.key)
    if faults:
        raise ResultsError("; ".join(faults))


def _row_faults(row: Row) -> list[str]:
    faults = []
    if not row.case or not isinstance(row.case, Mapping):
        faults.append(f"has no case, got {row.case!r}")
    else:
        for name, value in row.case.items():
            if not isinstance(name, str) or not isinstance(value, (str, int, float, bool)):
                faults.append(f"case {name!r}={value!r} must be text, a number or a boolean")
            elif name in _ROW_FIELDS:
                faults.append(f"case must not be keyed {name!r}, which is the row's own field")
    for name in ("impl", "metric", "unit"):
        text = getattr(row, name)
        if not isinstance(text, str) or not text:
            faults.append(f"{name}={text!r} must be text")
    return faults + _value_faults(row)


def _value_faults(row: Row) -> list[str]:
    if not row.runs:
        return ["has no runs; give every measurement"]
    numbers = (row.value, *row.runs)
    bad = [x for x in numbers if isinstance(x, bool) or not isinstance(x, (int, float))]
    if bad or not all(math.isfinite(x) for x in numbers):
        return [f"value={row.value!r}, runs={row.runs!r} must be finite numbers"]
    if row.value != statistics.median(row.runs):
        return [f"value={row.value!r} is not the median of runs={row.runs!r}"]
    return []


def merge(old: Iterable[Row], new: Iterable[Row]) -> tuple[Row, ...]:
    """Both, in order of first appearance; a new row replaces the old one of equal key."""
    rows = {row.key: row for row in old}
    rows.update({row.key: row for row in new})
    return tuple(rows.values())


def read(path: Path) -> Results:
    """Results back from a JSON file. A benchmark that resumes skips the `key` of every row.

    Raises:
        ResultsError: the file is not of this schema.
        FileNotFoundError: there is no such file.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as fault:
        raise ResultsError(f"{path} is no JSON: {fault}") from fault
    if not isinstance(data, dict) or set(data) != set(_FIELDS):
        raise ResultsError(f"{path} must hold exactly {', '.join(_FIELDS)}")
    rows = []
    for i, row in enumerate(data["rows"]):
        if not isinstance(row, dict) or set(row) != set(_ROW_FIELDS):
            raise ResultsError(f"{path}: row {i} must hold exactly {', '.join(_ROW_FIELDS)}")
        rows.append(Row(**(row | {"runs": tuple(row["runs"])})))
    check(rows)
    return Results(tuple(rows), data["command"], data["machine"], data["versions"], data["commit"])


def write(results: Results, name: str, folder: Path, columns: Sequence[str] = ("impl",)) -> Path:
    """Write NAME.json and NAME.md to `folder`, each whole or not at all; the JSON's path.

    `columns` names what becomes the columns of the tables: see `markdown`.
    """
    check(results.rows)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(results.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
    _replace(folder / f"{name}.md", markdown(results, name, columns))
    _replace(path, text + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    """Put `text` at `path` in one step: readers see the old file or the new one."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as part:
        part.write(text)
    try:
        os.chmod(part.name, 0o644)
        os.replace(part.name, path)
    except OSError:
        os.unlink(part.name)
        raise


# ---------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Rows of one metric, pivoted: `header`, then one line of cells a case."""

    title: str
    constant: Mapping[str, Scalar]
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def tables(rows: Sequence[Row], columns: Sequence[str] = ("impl",)) -> list[Table]:
    """One table a metric: a line for each case, a column for each value of `columns`.

    `columns` names case entries, or "impl"; several make columns of their combinations. What all
    rows of a table have in common is said once, in `constant`.
    """
    metrics = dict.fromkeys((row.metric, row.unit) for row in rows)
    return [
        _pivot(
            f"{metric} ({unit})", [r for r in rows if (r.metric, r.unit) == (metric, unit)], columns
        )
        for metric, unit in metrics
    ]


def _pivot(title: str, rows: Sequence[Row], columns: Sequence[str]) -> Table:
    names = dict.fromkeys(name for row in rows for name in (*row.case, "impl"))
    values = {name: dict.fromkeys(row.at(name) for row in rows) for name in names}
    constant = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    across = [name for name in columns if name in names and name not in constant]
    down = [name for name in names if name not in constant and name not in across]
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    heads: dict[str, None] = {}
    for row in rows:
        head = " · ".join(str(row.at(name)) for name in across if row.at(name) is not None)
        heads.setdefault(head or "value")
        line = tuple(row.at(name) for name in down)
        cells.setdefault(line, {})[head or "value"] = f"{row.value:.4g}"
    lines = tuple(
        (*("" if c is None else str(c) for c in line), *(found.get(h, "") for h in heads))
        for line, found in cells.items()
    )
    shown = {name: value for name, value in constant.items() if value is not None}
    return Table(title, shown, (*down, *heads), lines)


def markdown(results: Results, name: str, columns: Sequence[str] = ("impl",)) -> str:
    """The results as Markdown: where they come from, then `tables`."""
    about = [
        ("command", f"`{results.command}`"),
        ("machine", ", ".join(f"{k} {v}" for k, v in results.machine.items() if v is not None)),
        ("versions", ", ".join(f"{k} {v}" for k, v in results.versions.items() if v is not None)),
        ("commit", results.commit),
    ]
    text = [f"# {name}", "", *(f"- {key}: {value}" for key, value in about), ""]
    for table in tables(results.rows, columns):
        text += [f"## {table.title}", ""]
        if table.constant:
            text += [", ".join(f"{k} {v}" for k, v in table.constant.items()), ""]
        text.append("| " + " | ".join(map(_cell, table.header)) + " |")
        text.append("|" + "|".join(" --- " for _ in table.header) + "|")
        text += ["| " + " | ".join(map(_cell, line)) + " |" for line in table.lines]
        text.append("")
    return "\n".join(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ----------------------------------------------------------------------------------- plots


@dataclass(frozen=True)
class Plot:
    """What to draw of the rows of one metric.

    `x` is along the axis (numbers: lines over a log2 axis; text: bars in groups), `series` are the
    lines or bars, `panels` the separate plots side by side. Each names case entries or "impl";
    `series` and `panels` may name several, joined.
    """

    metric: str
    x: Sequence[str]
    series: Sequence[str]
    panels: Sequence[str] = ()
    title: str = ""
    panel_columns: int = 2


def plot(rows: Sequence[Row], what: Plot, path: Path) -> Path:
    """Draw a PNG with a logarithmic value axis.

    Raises:
        ResultsError: matplotlib is missing, or no row has the metric.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ResultsError(
            "plots need matplotlib, which the `bench` extra brings: "
            "pip install 'flash-attn-fp8[bench]'"
        ) from missing
    chosen = [row for row in rows if row.metric == what.metric]
    if not chosen:
        raise ResultsError(f"no row has the metric {what.metric!r}")
    panels = list(dict.fromkeys(_joined(row, what.panels) for row in chosen))
    across = min(len(panels), what.panel_columns)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.4 * across + 2.4, 3.6 * down + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).flatten()
    series = list(dict.fromkeys(_joined(row, what.series) for row in chosen))
    for axis, panel in zip(axes, panels, strict=False):
        inside = [row for row in chosen if _joined(row, what.panels) == panel]
        _draw(axis, inside, what, series)
        axis.set_title(panel, fontsize=10)
        axis.set_ylabel(f"{what.metric} ({inside[0].unit})")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = {h.get_label(): h for axis in axes for h in _handles(axis)}
    named = [name for name in series if name in handles]
    figure.legend([handles[n] for n in named], named, loc="outside right upper", fontsize=8)
    figure.suptitle(what.title or what.metric)
    figure.savefig(path, dpi=120)
    return path


def _joined(row: Row, names: Sequence[str]) -> str:
    return " · ".join(str(row.at(name)) for name in names if row.at(name) is not None)


def _handles(axis: Any) -> list[Any]:
    found: list[Any] = axis.get_legend_handles_labels()[0]
    return found


def _draw(axis: Any, rows: Sequence[Row], what: Plot, series: Sequence[str]) -> None:
    """Lines where every x is a number, bars in groups otherwise; one colour a series."""
    first = what.x[0]
    numeric = len(what.x) == 1 and all(not isinstance(row.at(first), (str, bool)) for row in rows)
    places = list(dict.fromkeys(_joined(row, what.x) for row in rows))
    for i, name in enumerate(series):
        mine = [row for row in rows if _joined(row, what.series) == name and row.value > 0]
        colour = f"C{i % 10}"
        if not mine:
            continue
        if numeric:
            marker, line = "osD^vPX*"[i % 8], ("-", "--", ":")[i // 10 % 3]
            points = sorted((float(row.at(first) or 0), row.value) for row in mine)
            axis.plot(*zip(*points, strict=True), line, marker=marker, color=colour, label=name)
        else:
            width = 0.8 / len(series)
            at = [places.index(_joined(row, what.x)) + (i + 0.5) * width - 0.4 for row in mine]
            axis.bar(at, [row.value for row in mine], width, color=colour, label=name)
    axis.set_yscale("log")
    if numeric:
        axis.set_xscale("log", base=2)
        axis.set_xlabel(first)
    else:
        axis.set_xticks(range(len(places)), places, fontsize=8)
    axis.grid(axis="y", which="both", alpha=0.3)
