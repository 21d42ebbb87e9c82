"""No schedule finds a fault in the kernel, or other bits: who runs next, and how late copies are.

Every run looks for races between proxies, deadlocks, accesses out of bounds, reads of what nothing
wrote, phases that overtake a wait, and work that outlives its CTA (docs/simulator.md).
"""

from __future__ import annotations

import pytest

import flash_attn_fp8 as fa
from tests.api.calls import same_bits
from tests.sm100.configurations import CONFIGURATIONS, Configuration, arguments_and_results

RANDOM, ADVERSARIAL = 20, 4  # schedules of each kind
# A few that have most of what is synchronised: a pair of CTAs; the tail warp, splits and pages; the
# scale warp.
IN_CI = [CONFIGURATIONS[n] for n in (0, 3, 7)]


def _check_schedule(configuration: Configuration, schedule: str, seed: int) -> None:
    arguments, expected = arguments_and_results(configuration)
    result, runs = fa.simulate(fa.flash_attn_varlen_func, schedule=schedule, seed=seed, **arguments)
    assert same_bits(result, expected)
    assert runs


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_clean_and_the_same_bits_under_many_schedules(configuration: Configuration) -> None:
    for seed in range(RANDOM):
        _check_schedule(configuration, "random", seed)
    for seed in range(ADVERSARIAL):
        _check_schedule(configuration, "adversarial", seed)


@pytest.mark.parametrize("configuration", IN_CI, ids=str)
def test_clean_and_the_same_bits_under_a_few_schedules(configuration: Configuration) -> None:
    for seed in range(2):
        _check_schedule(configuration, "random", seed)
    _check_schedule(configuration, "adversarial", 0)
