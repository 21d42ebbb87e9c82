"""Every executor stays within the budget of the fp8 sweep: a pairwise-covering sample in CI.

`pytest tests/sweep --sweep full` runs every case; `python -m tests.sweep` does the same with
progress, resumes where it stopped, and writes the result file.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flash_attn_fp8.reference import exact
from flash_attn_fp8.results import read
from tests.conftest import EXECUTORS
from tests.sweep import __main__ as sweep
from tests.sweep import check, grid


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--sweep") == "full"
        cases = grid.full() if whole else grid.sample()
        points = list(itertools.product(cases, EXECUTORS))  # executors inside: they share a budget
        metafunc.parametrize("case, impl", points, ids=lambda value: str(value))


def test_within_budget(case: grid.Case, impl: str) -> None:
    """Output and LSE of a case stay within the budget derived from its own operands."""
    outcome = check.run(case, impl)
    assert outcome.rel_l2 >= 0


@pytest.mark.parametrize(
    ("what", "factor"), [("out", 1.02), ("out", 1 + 2.0**-7), ("lse", 1 + 2.0**-21)]
)
def test_a_reference_that_is_off_is_found(
    what: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget, which allows for fp8's P, would not see these."""
    attend = exact.attend

    def off(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*args)
        return (out * factor, lse) if what == "out" else (out, lse * factor)

    case = next(c for c in grid.sample() if c.fmt == "e5m2" and c.mask == "full")
    check.run(case, "reference")
    monkeypatch.setattr(exact, "attend", off)
    with pytest.raises(AssertionError, match="from the exact value"):
        check.run(case, "reference")


def test_the_page_counts_cases_that_were_not_run(tmp_path: Path) -> None:
    """A page written of an unfinished sweep says what is missing, even of a group without any."""
    first, *others = grid.full()
    done = {str(first): {"rel_l2": 0.01, "budget": 0.02, "lse_error": 0.0}}
    sweep._write([first, *others], done, "tiled", "cpu", tmp_path)
    rows = read(tmp_path / "sweep_tiled_cpu.json").rows
    counts = {
        what: sum(row.value for row in rows if row.metric == f"cases {what}")
        for what in ("passed", "failed", "not run")
    }
    assert counts == {"passed": 1, "failed": 0, "not run": len(others)}


def test_sample_covers_every_pair() -> None:
    """No two values of any two axes are left out of what CI runs."""

    def pairs(cases: list[grid.Case]) -> set[tuple[object, ...]]:
        rows = (sorted(case.as_row().items()) for case in cases)
        return set(itertools.chain.from_iterable(itertools.combinations(row, 2) for row in rows))

    assert pairs(grid.sample()) == pairs(grid.full())
    assert len(grid.sample()) >= 60
