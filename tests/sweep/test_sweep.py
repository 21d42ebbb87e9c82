"""Every executor stays within the budget of the fp8 sweep: a pairwise-covering sample in CI.

`pytest tests/sweep --sweep full` runs every case; `python -m tests.sweep` does the same with
progress, resumes where it stopped, and writes the result file.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.reference import exact
from flash_attn_fp8.results import read
from tests.budget import KERNEL_REL_L2, assert_like_emulation
from tests.conftest import EXECUTORS, KERNELS
from tests.sweep import __main__ as sweep
from tests.sweep import check, grid


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--sweep") == "full"
        cases = grid.full() if whole else grid.sample()
        points = list(itertools.product(cases, EXECUTORS))  # executors inside: they share a budget
        kernel_cases = grid.proof() if whole else grid.kernel_sample()
        points += itertools.product(kernel_cases, KERNELS)
        metafunc.parametrize("case, impl", points, ids=lambda value: str(value))


def test_within_budget(case: grid.Case, impl: str) -> None:
    """Output and LSE of a case stay within the budget derived from its own operands.

    A kernel's are also those of the emulation of its tiles and policy, to issue 4's bars.
    """
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
    sweep._write([first, *others], done, ("tiled", "cpu", "full"), tmp_path)
    rows = read(tmp_path / "sweep_tiled_cpu.json").rows
    counts = {
        what: sum(row.value for row in rows if row.metric == f"cases {what}")
        for what in ("passed", "failed", "not run")
    }
    assert counts == {"passed": 1, "failed": 0, "not run": len(others)}


def _pairs(cases: list[grid.Case]) -> set[tuple[object, ...]]:
    rows = (sorted(case.as_row().items()) for case in cases)
    return set(itertools.chain.from_iterable(itertools.combinations(row, 2) for row in rows))


def test_sample_covers_every_pair() -> None:
    """No two values of any two axes are left out of what CI runs."""
    assert _pairs(grid.sample()) == _pairs(grid.full())
    assert len(grid.sample()) >= 60


def test_kernel_sample_covers_every_pair_of_short_cases() -> None:
    """CI runs on the kernel at least 60 cases, and no two values of dense axes are left out."""
    cases = grid.kernel_sample()
    short = [case for case in grid.full() if case.seqlens in grid.SHORT]
    assert _pairs(short) <= _pairs(cases)
    assert len(cases) >= 60
    assert {case.page_size for case in cases} > {8, 256}
    specs = [case.spec for case in cases if case.seqlens[1] < 300]
    runs = [spec for spec, _ in itertools.groupby(specs)]
    assert len(runs) == len(set(runs)), "the cases of a spec do not come together"


def test_the_grid_of_the_reference_fix() -> None:
    """420 cases, each short one with every pack_gqa and num_splits, the long ones with all in all.

    378 are left where head dim 256 has no sink: what that PR says has run.
    """
    cases = grid.reference_fix()
    points: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for c in cases:
        point = (c.seqlens, c.head_dims, c.mask, c.sink, c.heads)
        points.setdefault(point, set()).add((c.pack_gqa, c.num_splits))
    assert len(points) == 420
    assert sum(not (d == (256, 256) and sink) for _, d, _, sink, _ in points) == 378
    every = set(grid.PACKS_AND_SPLITS)
    assert all(ways == every for (sl, *_), ways in points.items() if sl[1] < 2048)
    for seqlens in ((2048, 2048), (4096, 4096)):
        assert set().union(*(w for (sl, *_), w in points.items() if sl == seqlens)) == every


def test_beyond_covers_every_pair_of_our_axes() -> None:
    """Each page size, layout, format, mask and head dim with each of the others."""
    cases = grid.beyond()
    for fmt, mask, (layout, size) in itertools.product(("e4m3", "e5m2"), grid.MASKS, grid.LAYOUTS):
        where = [c for c in cases if (c.layout, c.page_size) == (layout, size)]
        assert any(c.fmt == fmt for c in where)
        assert any(c.mask == mask for c in where)
        assert {c.head_dims for c in where} == set(grid.HEAD_DIMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": 1.004}, "from the emulation"),
        ({"lse": 1.2e-4}, "lse off by"),
        ({"emulated": 0.96}, "the emulation's is"),
    ],
    ids=str,
)
def test_a_kernel_that_is_off_is_found(change: dict[str, float], message: str) -> None:
    """The bars beside the emulation bite just past them; within them they do not."""
    case = next(c for c in grid.sample() if c.fmt == "e4m3" and max(c.seqlens) == 512)
    prepared = check._prepare(case.shared(), "cpu")
    call = fa.flash_attn_varlen_func
    exact, lse = prepared.budget.out, prepared.budget.lse
    emulated, _ = call(**prepared.arguments, impl="tiled", out_dtype=torch.float32)
    assert_like_emulation(emulated, lse, emulated, prepared.budget)
    wrong = {
        "out": emulated * change.get("out", 1.0),
        "lse": lse + change.get("lse", 0.0),
        "emulated": emulated
        if "emulated" not in change
        else torch.lerp(exact, emulated, change["emulated"]),
    }
    if "emulated" in change:  # as near to each other, and as near to the truth, as 3 % is not
        assert check.rel_l2(wrong["out"], wrong["emulated"]) < KERNEL_REL_L2
    with pytest.raises(AssertionError, match=message):
        assert_like_emulation(wrong["out"], wrong["lse"], wrong["emulated"], prepared.budget)


def test_a_kernels_finished_cases_are_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older kernel passed is run again."""
    state = tmp_path / "sim-cpu.jsonl"
    line = {"case": "one", "rel_l2": 0.01}
    state.write_text(json.dumps(line | {"sources": sweep._sources_of("sim")}) + "\n")
    assert set(sweep._load(state, "sim")) == {"one"}
    monkeypatch.setattr(sweep, "_sources_of", lambda impl: "others")
    assert not sweep._load(state, "sim")
