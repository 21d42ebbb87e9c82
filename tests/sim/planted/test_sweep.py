"""Each synchronising instruction of our kernels, left out: found, or redundant for a reason."""

from __future__ import annotations

import pytest

from tests.sim.planted import sweep
from tests.sim.planted.mutants import flips, removals

_FENCE = "by design: shipped kernels have no tcgen05.fence where an mbarrier stands between"
_USED = "the registers are used before the accumulator is released, and that waits for the load"
REDUNDANT = {
    "gemm": {
        "tcgen05.fence::after_thread_sync;": _FENCE,
        "tcgen05.fence::before_thread_sync;": _FENCE,
        "tcgen05.wait::ld.sync.aligned;": _USED,
        "bar.warp.sync 0xFFFFFFFF;": "lanes of a warp are not judged against each other, and the "
        "loads of tensor memory before it are the whole warp's",
    },
    "chain": {
        "tcgen05.wait::ld.sync.aligned;": _USED,
        "mbarrier.try_wait.parity.shared::cta.b64 %ready, [%o_empty], %opposite;": "each warp says "
        "that P is ready after it has read the O before, so waiting for P is enough",
    },
}
KERNELS = {"gemm": sweep.gemm, "chain": sweep.chain}


@pytest.mark.parametrize("name", KERNELS)
def test_all_but_the_redundant_are_found_by_round_robin(name):
    """And what is redundant changes no number, under any of four schedules."""
    results = list(sweep.outcomes(KERNELS[name]()))
    assert all(o.executed for o in results)
    for outcome in results:
        expected = outcome.instruction in REDUNDANT[name] and outcome.kind != "flipped parity"
        assert (outcome.verdict == "missed") == expected, outcome
        assert outcome.wrong == 0 or outcome.found, outcome
        if outcome.found:
            assert "no finding" not in outcome.found, outcome
            assert outcome.runs == 1, outcome
    missed = {o.instruction for o in results if not o.found}
    assert missed == set(REDUNDANT[name])
    assert sweep.summary(results).splitlines()[-1].startswith("all")


def test_a_mutant_differs_in_one_line():
    text = sweep.gemm().text
    before = text.split("\n")
    found = [*removals(text), *flips(text)]
    assert len(found) == 37
    for mutant in found:
        after = mutant.text.split("\n")
        changed = [
            i for i, pair in enumerate(zip(before, after, strict=True), 1) if len(set(pair)) > 1
        ]
        assert changed == [mutant.line]
