"""Cases 51, 61, 66: calls do not remember others, offsets are 64-bit, imports need no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_fp8 as fa
from tests.cases.arrange import MIXES, Mix, int32
from tests.cases.limits import assert_bitwise
from tests.cases.sequence import CALLS, Result
from tests.conftest import EXECUTORS

ROOT = Path(__file__).parents[2]


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter on this source tree, one thread."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ case 51


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Result]:
    """Each call's result in a process that made no other call."""
    folder = tmp_path_factory.mktemp("alone")
    done = in_a_process("-m", "tests.cases.sequence", str(folder))
    assert done.returncode == 0, done.stderr
    return {
        (impl, name): torch.load(folder / f"{impl}-{i}.pt")
        for impl in EXECUTORS
        for i, name in enumerate(CALLS)
    }


def assert_equal(got: Result, expected: Result) -> None:
    assert_bitwise(got[0], expected[0])
    assert (got[1] is None) == (expected[1] is None)
    if got[1] is not None and expected[1] is not None:
        assert_bitwise(got[1], expected[1])


@pytest.mark.parametrize("first", CALLS)
def test_case_51_after_another_call(
    impl: str, first: str, alone: dict[tuple[str, str], Result]
) -> None:
    """Case 51: right after any other call, every call gives the bits of a fresh process."""
    for second in CALLS:
        assert_equal(CALLS[first](impl), alone[impl, first])
        assert_equal(CALLS[second](impl), alone[impl, second])


def test_case_51_calls_differ(alone: dict[tuple[str, str], Result]) -> None:
    """Case 51: the calls have different results, so that a mix-up would show."""
    results = [alone["tiled", name][0] for name in CALLS]
    same = [
        (a, b)
        for a in range(len(results))
        for b in range(a)
        if results[a].shape == results[b].shape
        and torch.equal(results[a].float(), results[b].float())
    ]
    names = list(CALLS)
    known = {"stride-0 batch", "packed k", "k in a pool", "lse"}  # one question in four disguises
    assert {n for pair in same for n in (names[pair[0]], names[pair[1]])} <= known


# ------------------------------------------------------------------------------------ case 61

INT32 = 2**31


def far_pool(mix: Mix, pages: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pools of more than 2**31 elements, whose memory is touched in the last pages only."""
    pools = []
    for seed in (0, 1):
        total = INT32 // (rows * 128) + pages
        pool = torch.empty(total, rows, 1, 128, dtype=mix.kv)
        values = torch.randn(pages, rows, 1, 128, generator=torch.Generator().manual_seed(seed))
        pool.view(torch.uint8)[-pages:] = values.to(mix.kv).view(torch.uint8)
        pools.append(pool)
    return pools[0], pools[1]


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[4]], ids=str)
def test_case_61_pages_past_2_31_elements(execution: dict[str, object], mix: Mix) -> None:
    """Case 61's kind: pages whose offset needs more than 32 bits, against copies at the start."""
    k, v = far_pool(mix, 4, 16)
    assert k.numel() > INT32
    q = torch.randn(1, 2, 2, 128, generator=torch.Generator().manual_seed(2)).to(mix.q)
    table = torch.arange(4, dtype=torch.int32)[None]
    options = {"return_lse": True, **execution}
    near = fa.flash_attn_varlen_func(q, k[-4:].clone(), v[-4:].clone(), page_table=table, **options)
    far = fa.flash_attn_varlen_func(q, k, v, page_table=table + len(k) - 4, **options)
    assert_equal(far, near)


def test_case_61_cache_slots_past_2_31_elements(impl: str) -> None:
    """Case 61's kind: the last sequence of a batched cache."""
    k, v = far_pool(MIXES[0], 1, 64)
    q = torch.randn(1, 2, 2, 128, generator=torch.Generator().manual_seed(2)).to(MIXES[0].q)
    options = {"return_softmax_lse": True, "impl": impl, "num_splits": 1}
    near = fa.flash_attn_with_kvcache(q, k[-1:].clone(), v[-1:].clone(), **options)
    far = fa.flash_attn_with_kvcache(q, k, v, cache_batch_idx=int32(len(k) - 1), **options)
    assert_equal(far, near)


def test_case_61_packed_keys_past_2_31_elements(impl: str) -> None:
    """Case 61's kind: a packed sequence that starts there, behind one that nobody asks about."""
    k, v = (pool.flatten(0, 1) for pool in far_pool(MIXES[0], 1, 64))
    q = torch.randn(2, 2, 128, generator=torch.Generator().manual_seed(2)).to(MIXES[0].q)
    options = {"return_lse": True, "impl": impl}
    near = fa.flash_attn_func(q[None], k[None, -64:].clone(), v[None, -64:].clone(), **options)
    far = fa.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=int32(0, 0, 2), cu_seqlens_k=int32(0, len(k) - 64, len(k)), **options
    )
    assert_bitwise(far[0], near[0][0])
    assert_bitwise(far[1], near[1][0])


def far_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """1 048 577 equal rows of 16 heads of 128, 2048 elements past 2**31, and 64 keys."""
    generator = torch.Generator().manual_seed(0)
    row, keys = (torch.randn(n, h, 128, generator=generator) for n, h in ((1, 16), (64, 1)))
    q = torch.empty(1_048_577, 16, 128, dtype=torch.float8_e4m3fn)
    q.view(torch.uint8)[:] = row.to(q.dtype).view(torch.uint8)
    return q, keys.to(q.dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_case_61a_rows_past_2_31_elements() -> None:
    """Case 61a: the last of 1 048 577 equal query rows is as the first. Needs 11 GB."""
    q, k = far_queries()
    out, _ = fa.flash_attn_func(q[None], k[None], k[None])
    assert out[0, 0].any()
    assert_bitwise(out[0, -1], out[0, 0])
    assert_bitwise(out[0, 1_000_000], out[0, 0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_61a_packed_rows_past_2_31_elements(impl: str) -> None:
    """Case 61a in each executor: the first and last packed row; those between are not in use."""
    q, k = far_queries()
    out, lse = fa.flash_attn_varlen_func(
        q, k.expand(3, 64, 1, 128), k.expand(3, 64, 1, 128), return_lse=True, impl=impl,
        cu_seqlens_q=int32(0, 1, len(q) - 1, len(q)), seqused_q=int32(1, 0, 1),
    )  # fmt: skip
    assert out[0].any()
    assert_bitwise(out[-1], out[0])
    assert_bitwise(lse[:, -1], lse[:, 0])


# ------------------------------------------------------------------------------------ case 66

WITHOUT_DSL = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cuda", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import flash_attn_fp8 as fa

x = torch.ones(1, 4, 2, 64).to(torch.float8_e4m3fn)
for impl in (None, "tiled", "reference"):
    out, _ = fa.flash_attn_func(x, x, x, impl=impl)
    assert torch.equal(out, torch.ones_like(out)), impl
fa.quantize(torch.ones(1, 4, 2, 64))
assert fa.explain(fa.flash_attn_func, x, x, x, target="sm_100a").plan
try:
    fa.flash_attn_func(x, x, x, impl="cute")
except NotImplementedError as refusal:
    assert "cute" in str(refusal)
else:
    raise SystemExit("impl='cute' ran without a compiler")
"""

LOADS_NOTHING = """
import sys, torch
before = set(sys.modules)  # what torch brings along is not ours
import flash_attn_fp8

loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"cutlass", "cuda", "triton"}, loaded
"""


@pytest.mark.parametrize("program", [WITHOUT_DSL, LOADS_NOTHING], ids=["without", "not loaded"])
def test_case_66_no_dsl_needed(program: str) -> None:
    """Case 66: without the DSL and without a GPU the package imports, and all but kernels runs."""
    done = in_a_process("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
