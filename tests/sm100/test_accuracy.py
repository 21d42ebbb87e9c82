"""The published accuracy table from the kernel itself: the old constants' fault, and its cure.

Part of each head's rows; `flash-attn-fp8 accuracy --impl sim --full` is the whole table, committed
as benchmarks/results/accuracy_sim.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import flash_attn_fp8 as fa
from flash_attn_fp8.accuracy import published
from flash_attn_fp8.accuracy.published import BROKEN, E4M3_ONLY, SETTINGS, Setting
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.results import read
from tests.accuracy.test_accuracy import REPRODUCES_WITHIN
from tests.budget import KERNEL_ERROR_SHARE

RESULTS = Path(__file__).parents[2] / "benchmarks/results/accuracy_sim.json"
OURS = next(s for s in SETTINGS if s.policy == fa.policy_for("e4m3"))
LINES = [(256, "uniform"), (1024, "uniform"), (1024, "peaked")]
# Query rows of each of the 64 heads. The figures are those of these rows: within 13 % of the whole,
# which the committed table has, so that here the kernel is compared on the very same rows.
ROWS_PER_HEAD = 32
# Issue 4's: the policy's error over that of rounding each of q, k, v and P once.
FLOOR = 1.02
CODES_FLOOR = 1.05  # issue 6's, of P's codes without an exponential


def _cell(line: tuple[int, str], setting: Setting, impl: str = "sim") -> float:
    return published.error_of(*line, setting, ROWS_PER_HEAD, impl)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", LINES, ids=str)
def test_the_old_constants_saturate_in_the_kernel(line: tuple[int, str]) -> None:
    """Offset 8 and threshold 4, forced: the emulation's error, which is the published one."""
    assert BROKEN.policy == Fp8Policy.breaking_the_budget("e4m3", 8, 4, row_sum="exact")
    ours, emulated = _cell(line, BROKEN), _cell(line, BROKEN, "tiled")
    assert abs(ours / emulated - 1) <= KERNEL_ERROR_SHARE
    assert ours > 2 * _cell(line, OURS, "tiled")


@pytest.mark.parametrize("line", LINES, ids=str)
def test_the_policy_lands_on_the_floor_of_quantisation(line: tuple[int, str]) -> None:
    """No more than 1.02 times the error of the formats themselves, on the same data and rows."""
    floor = _cell(line, replace(E4M3_ONLY, numpy=False), "tiled")
    assert _cell(line, OURS) <= FLOOR * floor


@pytest.mark.parametrize("line", LINES, ids=str)
def test_codes_come_near_it(line: tuple[int, str]) -> None:
    floor = _cell(line, replace(E4M3_ONLY, numpy=False), "tiled")
    codes = replace(OURS, policy=fa.policy_for("e4m3", "sm90"))
    assert _cell(line, codes) <= CODES_FLOOR * floor


def test_the_committed_table_shows_both() -> None:
    """Every cell of the whole table, from the kernel."""
    results = read(RESULTS)
    assert "--impl sim" in results.command
    errors = {
        ((r.case["seqlen"], r.case["inputs"]), r.case["setting"], r.impl): r.value
        for r in results.rows
        if r.metric == "rel_l2"
    }
    for line in LINES:
        for setting in SETTINGS:
            theirs = published.published(*line, setting)  # type: ignore[arg-type]
            if theirs is not None and not setting.one_shot:
                assert abs(errors[line, setting.name, "sim"] / theirs - 1) <= REPRODUCES_WITHIN
        floor = errors[line, E4M3_ONLY.name, "tiled"]
        assert errors[line, OURS.name, "sim"] <= FLOOR * floor
