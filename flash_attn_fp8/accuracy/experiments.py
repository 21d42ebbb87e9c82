"""The two accuracy benchmarks as a command runs them: their parts, sizes, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flash_attn_fp8.accuracy.policies import Comparison, VScale, cases
from flash_attn_fp8.accuracy.published import SETTINGS, SOURCE, Table
from flash_attn_fp8.results import Plot, Results, ResultsError, Row, plot, write


class Part(Protocol):
    """Something that yields the rows of one step after another; its length is their number."""

    def __len__(self) -> int: ...

    def rows(self) -> Iterator[list[Row]]: ...


@dataclass(frozen=True)
class Experiment:
    """A named benchmark: its tables spread across `columns`, on a terminal across `shown`."""

    name: str
    parts: Sequence[Part]
    columns: Sequence[str]
    shown: Sequence[str]
    picture: Plot

    def __len__(self) -> int:
        """Number of steps of `rows`."""
        return sum(len(part) for part in self.parts)

    def rows(self) -> Iterator[list[Row]]:
        """The rows of each step in turn."""
        for part in self.parts:
            yield from part.rows()

    def save(self, results: Results, folder: Path) -> tuple[list[Path], str | None]:
        """Write JSON, Markdown and PNG; their paths, and why there is no PNG (None: there is)."""
        path = write(results, self.name, folder, self.columns)
        written = [path, path.with_suffix(".md")]
        try:
            written.append(plot(results.rows, self.picture, path.with_suffix(".png")))
        except ResultsError as missing:
            return written, str(missing)
        return written, None


def table(quick: bool, impl: str = "tiled") -> Experiment:
    """The published table. Quick: not 4096 tokens, 128 rows a head, not the last column.

    A kernel's (`impl`) is never of 4096 tokens: simulating a cell of those takes half an hour.
    Quick: 32 rows a head.
    """
    name, who = "accuracy", "emulated"
    if impl != "tiled":
        name, who = f"accuracy_{impl}", f"the kernel, impl='{impl}',"
        part = Table((256, 1024), SETTINGS, rows_per_head=32 if quick else None, impl=impl)
    else:
        part = Table((256, 1024), SETTINGS[:-1], rows_per_head=128) if quick else Table()
    what = Plot(
        metric="rel_l2",
        x=("seqlen", "inputs"),
        series=("setting",),
        points=SOURCE,
        title=f"Error of fp8 attention: {who} here (bars), published for a B200 (points)",
    )
    across = ("setting", "tile")
    return Experiment(name, (part,), across, across, what)


def policies(quick: bool) -> Experiment:
    """The evidence for the default policies. Quick: short sequences, few rows."""
    lengths, scores = ((256, 1024), 1 << 15) if quick else ((256, 1024, 8192, 65536), 1 << 21)
    what = Plot(
        metric="rel_l2",
        x=("keys",),
        series=("policy",),
        panels=("scores",),
        where={"row_sum": "quantized"},
        title="Error of the output when only P is rounded (row sum of the quantised P)",
    )
    parts = (Comparison(cases(lengths, scores)), VScale())
    return Experiment("policies", parts, ("policy", "v_scale"), ("scores", "v_scale"), what)


def published_deviation(rows: Sequence[Row]) -> float | None:
    """Largest distance in % from a published figure, None where none was recomputed."""
    found = [abs(row.value) for row in rows if row.metric == "deviation from published"]
    return max(found, default=None)
