"""flash-attn-4's forward, unmodified, executed: the right numbers, and nothing to report.

All checks are on, but for what shipped kernels are known to do (`cases.py`). The cases that always
run take about a minute; all of them: `pytest tests/sim/foreign -m 'slow or not slow'`.
"""

from __future__ import annotations

import functools

import pytest
import torch

from flash_attn_fp8.sim.errors import Race, Uninitialised
from flash_attn_fp8.sim.memory import Checks
from flash_attn_fp8.sim.schedule import Adversarial, Random
from tests.sim.foreign import cases, model
from tests.sim.foreign.fa4 import BEYOND_BOUND, LSE_BOUND, OUT_BOUND, errors, inputs, run

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the compiler, about FA4's arguments
    pytest.mark.timeout(600),
]
SLOW = pytest.mark.slow


def _parameters(some, marks=()):
    return [pytest.param(case, id=case.name, marks=marks) for case in some]


@pytest.fixture(scope="module")
def answer_to(fa4):
    """What a case gives under the usual schedule, once for all tests."""
    return functools.cache(lambda case: run(fa4, case, inputs(case)))


@pytest.mark.parametrize("case", _parameters(cases.CI) + _parameters(cases.SLOW, SLOW))
def test_the_right_numbers_without_a_finding(answer_to, case):
    answer = answer_to(case)
    found = errors(case, inputs(case), answer)
    assert found.out <= OUT_BOUND[case.dtype], found
    assert found.beyond <= BEYOND_BOUND, found
    assert found.lse <= LSE_BOUND, found
    forward, *others = answer.runs
    assert "FlashAttentionForward" in forward.kernel or "hd256" in forward.kernel
    assert ["FlashAttentionForwardCombine" in x.kernel for x in others] == [True] * (
        case.splits > 1
    )
    if case.two_ctas is not None:
        # An MMA of two CTAs has M = 256.
        shapes = [key for key in forward.traffic if key.startswith("tcgen05.mma")]
        assert all((" 256x" in shape) is case.two_ctas for shape in shapes), shapes


def test_the_comparison_notices_another_rounding_of_p(answer_to, monkeypatch):
    case = cases.CI[0]
    monkeypatch.setattr(model, "_rounded", lambda p, dtype: p)
    assert errors(case, inputs(case), answer_to(case)).beyond > 10 * BEYOND_BOUND


def test_the_comparison_notices_another_offset(answer_to, monkeypatch):
    """2^4 in place of 2^8 rounds only those P otherwise that are subnormal then."""
    case = cases.CI[0]
    monkeypatch.setattr(model, "_MAX_OFFSET", 4)
    assert errors(case, inputs(case), answer_to(case)).beyond > 10 * BEYOND_BOUND


@pytest.mark.parametrize(
    "case", _parameters([cases.PAGED_CP_ASYNC]) + _parameters([cases.GQA_3], SLOW)
)
def test_the_missing_proxy_fence_of_cp_async_is_found(fa4, case):
    """`cp.async` writes in the generic proxy, the tensor core reads in the asynchronous one."""
    case = case.changed(checks=Checks(uninitialised=case.checks.uninitialised))
    text = r"is read by the tensor core.* nothing orders after it was written by cp\.async copies"
    with pytest.raises(Race, match=text) as caught:
        run(fa4, case, inputs(case))
    assert "FlashAttentionForwardSm100" in str(caught.value).partition(":")[0]


@pytest.mark.slow
def test_rows_of_q_that_nobody_wrote_are_found(fa4):
    case = cases.GQA_3.changed(checks=Checks(proxies=False))
    with pytest.raises(Uninitialised, match="is read by the tensor core"):
        run(fa4, case, inputs(case))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("kind", [Random, Adversarial])
@pytest.mark.parametrize(
    "case", _parameters(cases.SCHEDULED[:1]) + _parameters(cases.SCHEDULED[1:], SLOW)
)
def test_any_schedule_gives_the_same_bits(fa4, answer_to, case, kind, seed):
    usual = answer_to(case)
    other = run(fa4, case, inputs(case), schedule=functools.partial(kind, seed))
    assert torch.equal(usual.out, other.out)
    assert torch.equal(usual.lse, other.lse)
