"""Rows of a cache lie beyond 2**31 elements, and 2**32 bytes: addresses have 64 bits.

The memory is asked for and never touched but for a few pages, so it costs none; the simulated
device is handed the tensors as they are, where `impl="sim"` would copy them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import compiled, sim
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.plan import plan_for
from flash_attn_fp8.target import CPU, SIMULATED
from tests.api.calls import ints, same_bits
from tests.data import Inputs, normal

PAGE_SIZE, HEADS_KV, D = 16, 1, 64
PAGE = PAGE_SIZE * HEADS_KV * D
FAR = (2**31 // PAGE + 1, 2**32 // PAGE + 3)  # pages


def _launch(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Results of a call whose cache is not copied."""
    described = fa.flash_attn_with_kvcache.describe_call(
        **call, impl="sim", num_splits=1, return_softmax_lse=True, out_dtype=torch.float32
    ).with_tensors()
    problem = problem_of(described)
    o = described.operands
    big = (o.k, o.v, o.k_descale, o.v_descale)
    with sim.device(SIMULATED.arch):
        launcher = compiled._Launcher(plan_for(problem, CPU), problem, SIMULATED)
        known = [x if x is None or any(x is y for y in big) else x.clone() for x in o]
        out, lse = torch.empty(problem.out_shape), torch.empty(problem.lse_shape)
        launcher.launch(type(o)(*known), out, lse)
        return out.clone(), lse.clone()


def _two_pages() -> Inputs:
    return normal(
        batch=2, seqlen_q=1, seqlen_k=PAGE_SIZE, nheads=4, nheads_kv=HEADS_KV, d=D, fmt="bf16",
        kv_fmt="e4m3", per=None,
    )  # fmt: skip


def _far_and_near() -> tuple[dict[str, Any], dict[str, Any]]:
    """One cache with its pages beyond what 32 bits address, and with them at the start."""
    x = _two_pages()
    memory = torch.empty((FAR[1] + 1) * PAGE, dtype=torch.uint8)
    pool = memory.view(x.k.dtype).view(-1, PAGE_SIZE, HEADS_KV, D)
    bytes_of_pool, pages = pool.view(torch.uint8), x.k.view(torch.uint8)
    for n, page in enumerate(FAR):
        bytes_of_pool[n] = bytes_of_pool[page] = pages[n]
    call = {
        "q": x.q[:1],
        "k_cache": pool,
        "v_cache": pool,
        "cache_seqlens": ints(2 * PAGE_SIZE - 3),
    }
    far, near = (torch.tensor([table], dtype=torch.int32) for table in (FAR, (0, 1)))
    return call | {"page_table": far}, call | {"page_table": near}


@pytest.mark.slow
def test_pages_beyond_32_bits() -> None:
    """Their bytes are beyond 2**31 and 2**32, and so are their elements."""
    far, near = _far_and_near()
    assert all(page * PAGE > limit for page, limit in zip(FAR, (2**31, 2**32), strict=True))
    assert same_bits(_launch(far), _launch(near))


def test_tokens_and_sequences_beyond_32_bits() -> None:
    """A batched cache whose sequences are far apart."""
    x = normal(batch=2, seqlen_q=1, seqlen_k=40, nheads=4, nheads_kv=1, d=D, fmt="bf16",
               kv_fmt="e4m3", per=None)  # fmt: skip
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    apart = memory.as_strided((2, 40, 1, D), (2**31, D, D, 1))
    apart.copy_(x.k.view(torch.uint8))
    k = apart.view(x.k.dtype)
    call: dict[str, Any] = {"q": x.q, "cache_seqlens": ints(40, 33)}
    found = _launch(call | {"k_cache": k, "v_cache": k})
    assert same_bits(found, _launch(call | {"k_cache": x.k, "v_cache": x.k}))


def test_pages_that_are_further_apart_than_32_bits() -> None:
    """The distance of two pages itself takes more than 31 bits."""
    x = _two_pages()
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    apart = memory.as_strided((2, PAGE_SIZE, 1, D), (2**31, D, D, 1))
    apart.copy_(x.k.view(torch.uint8))
    k = apart.view(x.k.dtype)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    call: dict[str, Any] = {"q": x.q[:1], "cache_seqlens": ints(30), "page_table": table}
    found = _launch(call | {"k_cache": k, "v_cache": k})
    assert same_bits(found, _launch(call | {"k_cache": x.k, "v_cache": x.k}))
