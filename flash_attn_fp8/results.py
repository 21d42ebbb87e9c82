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

    Without a root it is this file's own checkout, never one that it was installed inside of. Dirty
    means that anything but the results folder differs from the commit, untracked files included: a
    module that was never committed cannot be found again either.
    """
    here = Path(__file__).resolve()
    at = here.parent if root is None else root
    described = _git(at, "describe", "--always", "--tags")
    top = _git(at, "rev-parse", "--show-toplevel")
    if described is None or top is None:
        return "unknown"
    if root is None and here.parent.parent != Path(top).resolve():
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
    _replace(folder / f"{name}.md", markdown(results, name, columns))
    _replace(path, _dumped(results.as_json()))
    return path


def _dumped(content: dict[str, Any]) -> str:
    """The JSON text, a row a line, so that a changed row is a changed line."""

    def text(x: object) -> str:
        return json.dumps(x, ensure_ascii=False, allow_nan=False)

    head = [f"{text(k)}: {text(v)}" for k, v in content.items() if k != "rows"]
    rows = ",\n".join(map(text, content["rows"]))
    return "{\n" + ",\n".join([*head, f'"rows": [\n{rows}\n]']) + "\n}\n"


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
    lines or bars, `panels` the separate plots. Each names case entries or "impl"; several are
    joined. Rows of the impl `points` are drawn as points on the bars that they belong to.
    """

    metric: str
    x: Sequence[str]
    series: Sequence[str]
    panels: Sequence[str] = ()
    where: Mapping[str, Scalar] = field(default_factory=dict)  # only rows with these entries
    points: str | None = None
    title: str = ""
    panels_across: int = 4


def plot(rows: Sequence[Row], what: Plot, path: Path) -> Path:
    """Draw a PNG with a logarithmic value axis.

    Raises:
        ResultsError: matplotlib is missing, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ResultsError(
            "plots need matplotlib: pip install matplotlib (or '.[bench]' in a checkout)"
        ) from missing
    chosen = [
        row
        for row in rows
        if row.metric == what.metric and all(row.at(k) == v for k, v in what.where.items())
    ]
    if not chosen:
        raise ResultsError(f"no row has the metric {what.metric!r} and {dict(what.where)}")
    panels = list(dict.fromkeys(_joined(row, what.panels) for row in chosen))
    series = list(dict.fromkeys(_joined(row, what.series) for row in chosen))
    across = min(len(panels), what.panels_across)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(9.0, 4.0 * across), 3.4 * down + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        inside = [row for row in chosen if _joined(row, what.panels) == panel]
        _draw(axis, inside, what, series)
        axis.set_title(panel, fontsize=10)
        axis.set_ylabel(f"{what.metric} ({inside[0].unit})", fontsize=8)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(_tick)
        axis.tick_params(labelsize=8, which="both")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    named = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
    order = sorted(named, key=lambda n: series.index(n) if n in series else len(series))
    figure.legend([named[n] for n in order], order, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(what.title or what.metric, fontsize=11)
    figure.savefig(path, dpi=120)
    return path


def _joined(row: Row, names: Sequence[str]) -> str:
    return " · ".join(str(row.at(name)) for name in names if row.at(name) is not None)


def _tick(value: float, _: int) -> str:
    """The label of a minor tick of a logarithmic axis: 2, 3 and 5 of a decade have one."""
    text = f"{value:.0e}"
    return f"{value:g}" if text[0] in "235" else ""


def _draw(axis: Any, rows: Sequence[Row], what: Plot, series: Sequence[str]) -> None:
    """Lines where every x is a number, bars in groups otherwise; one colour a series."""
    first = what.x[0]
    numeric = len(what.x) == 1 and all(not isinstance(row.at(first), (str, bool)) for row in rows)
    axis.set_yscale("log")
    axis.grid(axis="y", which="both", alpha=0.3)
    if not numeric:
        _draw_bars(axis, rows, what, series)
        return
    for i, name in enumerate(series):
        mine = [row for row in rows if _joined(row, what.series) == name and row.value > 0]
        points = sorted((float(row.at(first) or 0), row.value) for row in mine)
        if points:
            marker, style = "osD^vPX*"[i % 8], ("-", "--", ":")[i // 10 % 3]
            axis.plot(*zip(*points, strict=True), style, marker=marker, color=f"C{i}", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel(first, fontsize=8)


def _draw_bars(axis: Any, rows: Sequence[Row], what: Plot, series: Sequence[str]) -> None:
    places = list(dict.fromkeys(_joined(row, what.x) for row in rows))
    width = 0.85 / len(series)

    def place(row: Row) -> float:
        within = series.index(_joined(row, what.series)) + 0.5
        return places.index(_joined(row, what.x)) + within * width - 0.425

    for i, name in enumerate(series):
        mine = [r for r in rows if _joined(r, what.series) == name and r.impl != what.points]
        at, heights = [place(row) for row in mine], [row.value for row in mine]
        axis.bar(at, heights, width * 0.9, color=f"C{i}", label=name)
    points = [row for row in rows if row.impl == what.points]
    if points:
        at, heights = [place(row) for row in points], [row.value for row in points]
        axis.plot(at, heights, "D", color="black", markersize=5, label=what.points)
    axis.set_xticks(range(len(places)), places)
