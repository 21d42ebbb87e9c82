"""Every executor stays within the budget of the fp8 sweep: a pairwise-covering sample in CI.

`pytest tests/sweep --sweep full` runs every case; `python -m tests.sweep` does the same with
progress, resumes where it stopped, and writes the result file.
"""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import EXECUTORS
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


def test_sample_covers_every_pair() -> None:
    """No two values of any two axes are left out of what CI runs."""

    def pairs(cases: list[grid.Case]) -> set[tuple[object, ...]]:
        rows = (sorted(case.as_row().items()) for case in cases)
        return set(itertools.chain.from_iterable(itertools.combinations(row, 2) for row in rows))

    assert pairs(grid.sample()) == pairs(grid.full())
    assert len(grid.sample()) >= 60
