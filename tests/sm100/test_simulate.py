"""`simulate` gives the bits of impl='sim' and says what ran; it refuses what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8 import compiled, sim
from flash_attn_fp8.sim.errors import Finding
from flash_attn_fp8.simulation import Settings, settings
from tests.api.calls import same_bits
from tests.data import normal

# 3 tiles of rows over two heads and 2 of keys: more units of work than one multiprocessor.
INPUTS = normal(batch=1, seqlen_q=300, seqlen_k=200, nheads=2, nheads_kv=2, d=64)
QKV = INPUTS.q, INPUTS.k, INPUTS.v
CALL: dict[str, Any] = {"return_lse": True, **INPUTS.scales}


@pytest.fixture(scope="module")
def plain() -> Any:
    return fa.flash_attn_func(*QKV, impl="sim", **CALL)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "random", "seed": 3},
        {"schedule": "adversarial", "seed": 1},
        {"schedule": lambda: sim.Random(5), "target": "sm_100a:1"},
        {"checks": sim.Checks(False, False, False, False, False), "target": "sm_100a"},
        {"workers": 2},
    ],
    ids=["plain", "random", "adversarial", "a schedule", "unchecked", "processes"],
)
def test_the_bits_of_impl_sim_whatever_the_settings(options: dict[str, Any], plain: Any) -> None:
    result, runs = fa.simulate(fa.flash_attn_func, *QKV, **options, **CALL)
    assert same_bits(result, plain)
    (run,) = runs
    assert "forward" in run.kernel
    # What is copied and multiplied does not depend on who does it: Q, and K and V for each pair of
    # query tiles, in whole tiles of 128 rows of 64 bytes, for 2 heads.
    tiles = 2 * (4 + 2 * 2 * 2)
    assert run.traffic["bulk tensor bytes global to shared"] == tiles * 128 * 64


def test_another_target_has_the_scalars_of_each_call() -> None:
    """Two problems with equal plans: a launch is remembered by problem and by target."""
    for softmax_scale in (0.125, 0.5):
        call = CALL | {"softmax_scale": softmax_scale}
        result, _ = fa.simulate(fa.flash_attn_func, *QKV, target="sm_100a:2", **call)
        assert same_bits(result, fa.flash_attn_func(*QKV, impl="sim", **call))


def test_a_seed_replays(plain: Any) -> None:
    def waits(seed: int) -> Any:
        _, (run,) = fa.simulate(fa.flash_attn_func, *QKV, schedule="random", seed=seed, **CALL)
        return run.waits

    assert waits(3) == waits(3)
    assert waits(3) != waits(4)


def test_splits_are_two_launches() -> None:
    """The kernel, and the one that merges the parts."""
    _, runs = fa.simulate(fa.flash_attn_func, *QKV, num_splits=2, **CALL)
    assert [("forward" in run.kernel, "combine" in run.kernel) for run in runs] == [
        (True, False),
        (False, True),
    ]


def test_a_timeline_has_the_roles_of_the_kernel_or_the_callers(tmp_path: Path) -> None:
    def names(**options: Any) -> set[str]:
        file = tmp_path / "trace.json"
        fa.simulate(fa.flash_attn_func, *QKV, trace=file, **options, **CALL)
        events = json.loads(file.read_text())["traceEvents"]
        return {e["args"]["name"] for e in events if e["name"] == "thread_name"}

    assert {"warp  0 (softmax 0)", "warp 12 (mma)", "warp 13 (load)"} <= names()
    assert {"warp  0", "warp 12 (tensor core)"} <= names(roles={12: "tensor core"})


def test_a_trace_is_collected_where_it_is_given() -> None:
    trace = sim.Trace()
    fa.simulate(fa.flash_attn_func, *QKV, trace=trace, **CALL)
    assert any(e["name"] == "tcgen05.mma" for e in trace.events)


def test_what_was_found_comes_out_and_the_settings_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding is the caller's to see; later calls are plain again."""

    def finding(*_: Any) -> None:
        assert settings().target.sm_count == 2
        raise Finding("planted")

    monkeypatch.setattr(compiled, "_launch", finding)
    with pytest.raises(Finding, match="planted"):
        fa.simulate(fa.flash_attn_func, *QKV, target="sm_100a:2", **CALL)
    assert settings() == Settings()


def test_other_functions_that_take_impl(plain: Any) -> None:
    def mine(q: Any, k: Any, v: Any, *, impl: str, **more: Any) -> Any:
        return fa.flash_attn_func(q, k, v, impl=impl, **more), impl

    (result, impl), runs = fa.simulate(mine, *QKV, **CALL)
    assert impl == "sim"
    assert same_bits(result, plain)
    assert len(runs) == 1


def _refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"fn": 3}, "fn=3 must be a function, such as flash_attn_func"
    yield (
        {"fn": fa.flash_attn_combine},
        "fn=flash_attn_combine has no argument impl; pass flash_attn_func or another that has",
    )
    yield {"impl": "tiled"}, "impl='tiled': simulate runs impl='sim'; leave impl out"
    yield (
        {"target": "sm_75"},
        "target='sm_75': the simulator knows sm_80, sm_86, sm_89, sm_90a, sm_100a",
    )
    yield {"target": 4}, "target=4 is no device; write sm_100a or sm_100a:SMS"
    yield (
        {"target": "sm_100a:0"},
        "target='sm_100a:0' has no multiprocessor; write sm_100a:1 or more",
    )
    yield (
        {"schedule": "fifo"},
        "schedule='fifo' is none of 'round_robin', 'random', 'adversarial', nor something that "
        "makes a schedule",
    )
    yield {"schedule": "random", "seed": -1}, "seed=-1 must be an integer of at least 0"
    yield (
        {"seed": 3},
        "seed=3 has no effect on schedule='round_robin'; use schedule='random'",
    )
    yield {"checks": True}, "checks=True must be a sim.Checks"
    yield {"trace": 1}, "trace=1 must be a path or a sim.Trace"
    yield {"roles": {0: "a"}}, "roles name warps in a trace; pass trace, too"
    yield {"workers": 0}, "workers=0 must be an integer of at least 1"
    yield {"workers": 2, "trace": "t.json"}, "workers=2: a trace needs 1"


@pytest.mark.parametrize(
    ("wrong", "reason"), list(_refusals()), ids=lambda x: x[:60] if isinstance(x, str) else ""
)
def test_refused_to_the_letter(wrong: dict[str, Any], reason: str) -> None:
    fn = wrong.pop("fn", fa.flash_attn_func)
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.simulate(fn, *QKV, **wrong)
    assert refusal.value.reasons == (reason,)


def test_all_faults_are_listed() -> None:
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.simulate(3, target="cpu", workers=0)  # type: ignore[arg-type]
    assert len(refusal.value.reasons) == 3


def test_not_within_itself() -> None:
    def nested(*, impl: str) -> Any:
        return fa.simulate(fa.flash_attn_func, *QKV, **CALL)

    with pytest.raises(fa.InvalidArguments, match="calls simulate itself"):
        fa.simulate(nested)


def test_what_the_kernel_cannot_do_is_refused_by_name() -> None:
    q = torch.zeros(1, 4, 1, 40).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"head dims 64, .* not \(40, 40\)"):
        fa.simulate(fa.flash_attn_func, q, q, q)
