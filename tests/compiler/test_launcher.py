"""What a launch hands to its kernel, and that its plan's share of the work is done once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8 import compiled, sim
from flash_attn_fp8.call import Operands
from flash_attn_fp8.plan import Plan
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.target import target_named


class Kernels:
    """Stands for the cache: each kernel notes what it is given, and writes ones."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.calls: list[tuple[Any, ...]] = []

    def kernel(self, spec: object, arch: str) -> Any:
        self.asked.append(spec)

        def run(*arguments: Any) -> None:
            self.calls.append(arguments)
            if len(arguments) == 2:
                arguments[0][3].fill_(1)

        return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(compiled, "_kernel", found.kernel)
    monkeypatch.setattr(compiled, "_launchers", {})
    return found


def planned(o: Operands, **options: Any) -> tuple[Plan, Problem]:
    named = {name: t for name, t in o._asdict().items() if t is not None}
    explained = fa.explain(fa.flash_attn_func, impl="sim", **named, **options)
    assert explained.plan is not None
    assert explained.problem is not None
    return explained.plan, explained.problem


def operands(**changes: torch.Tensor) -> Operands:
    q = torch.zeros(1, 8, 4, 64).to(torch.float8_e4m3fn)
    return Operands(q, q, q)._replace(**changes)


def output() -> torch.Tensor:
    return torch.zeros(1, 8, 4, 64, dtype=torch.bfloat16)


def test_aligned_tensors_are_handed_on_themselves(kernels: Kernels) -> None:
    o, out = operands(), output()
    plan, problem = planned(o)
    compiled._launch(plan, problem, o, out, None)
    tensors, _ = kernels.calls[0]
    assert [a is b for a, b in zip(tensors[:4], (*o[:3], out), strict=True)] == [True] * 4


def test_kernels_and_scalars_are_found_once_a_plan(kernels: Kernels) -> None:
    o, out = operands(), output()
    plan, problem = planned(o)
    for _ in range(3):
        compiled._launch(plan, problem, o, out, None)
    assert kernels.asked == [plan.spec]
    assert kernels.calls[0][1] is kernels.calls[2][1]
    other = planned(o, softmax_scale=0.5)
    compiled._launch(*other, o, out, None)
    assert (kernels.calls[0][1][0], kernels.calls[3][1][0]) == (0.125, 0.5)


def test_a_launch_on_another_target_has_scalars_of_its_own(kernels: Kernels) -> None:
    """`simulate(target=...)` on a plan of a device of another size."""
    o, out = operands(), output()
    plan, problem = planned(o)
    for target in (None, target_named("sm_100a:2"), None):
        compiled._launch(plan, problem, o, out, None, target)
    sms = [scalars[-1] for _, scalars in kernels.calls]
    assert sms == [plan.target.sm_count, 2, plan.target.sm_count]


@pytest.mark.parametrize("by", ["address", "stride"])
def test_unaligned_tensors_are_copied_each_time(kernels: Kernels, by: str) -> None:
    aligned, out = operands(), output()
    if by == "address":
        q = torch.zeros(1 + 8 * 4 * 64).to(torch.float8_e4m3fn)[1:].view(1, 8, 4, 64)
        target = torch.zeros(1 + 8 * 4 * 64, dtype=torch.bfloat16)[1:].view(1, 8, 4, 64)
    else:
        q = torch.zeros(1, 8, 4, 65).to(torch.float8_e4m3fn)[..., :64]
        target = torch.zeros(1, 8, 4, 65, dtype=torch.bfloat16)[..., :64]
    plan, problem = planned(aligned)
    # One plan for both: an aligned call before it, and after it, is not mistaken for it.
    for o, into in ((aligned, out), (aligned._replace(q=q), target), (aligned, out)):
        compiled._launch(plan, problem, o, into, None)
    given = [tensors[0] for tensors, _ in kernels.calls]
    assert given[0] is given[2] is aligned.q
    assert given[1].data_ptr() % 16 == 0
    assert given[1].is_contiguous()
    assert kernels.calls[1][0][3] is not target
    assert bool((target == 1).all())  # and copied back


def test_parts_are_merged_by_their_kernel(kernels: Kernels) -> None:
    o, out = operands(), output()
    plan, problem = planned(o, num_splits=3)
    compiled._launch(plan, problem, o, out, None)
    (tensors, scalars), (merging,) = kernels.calls
    assert tensors[3].shape == (3, 1, 8, 4, 64)
    assert tensors[4].shape == (3, 1, 4, 8)
    assert scalars[5] == 3
    assert [a is b for a, b in zip(merging[:3], (*tensors[3:5], out), strict=True)] == [True] * 3


def test_a_simulated_device_is_asked_for_kernels_of_its_own(kernels: Kernels) -> None:
    o, out = operands(), output()
    plan, problem = planned(o)
    compiled._launch(plan, problem, o, out, None)
    with sim.device("sm_100a", on_launch=print):
        compiled._launch(plan, problem, o, out, None)
    assert kernels.asked == [plan.spec] * 2


def test_a_scale_per_tensor_has_one_dimension(kernels: Kernels) -> None:
    o, out = operands(k_descale=torch.tensor(2.0)), output()
    compiled._launch(*planned(o), o, out, None)
    assert kernels.calls[0][0][12].shape == (1,)
