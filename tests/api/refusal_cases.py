"""Calls that are refused for what they are, and what the refusal says, to the letter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import flash_attn_fp8 as fa
from tests.api.calls import BASES, Arguments, codes, dense, ints


@dataclass(frozen=True, eq=False)  # tensors have no truth to compare by
class Case:
    """A base call, what is changed in it, and the reasons against the result, in order."""

    function: str
    base: str
    changes: dict[str, Any]
    reasons: tuple[str, ...]

    @property
    def arguments(self) -> Arguments:
        return BASES[self.base]() | self.changes

    def __str__(self) -> str:
        return f"{self.base}: {self.reasons[0][:40]}"


def _on(function: str, base: str) -> Callable[..., Case]:
    def case(*reasons: str, **changes: object) -> Case:
        return Case(function, base, changes, tuple(" ".join(r.split()) for r in reasons))

    return case


DENSE = _on("flash_attn_func", "dense")
BATCHED = _on("flash_attn_varlen_func", "dense")
PACKED = _on("flash_attn_varlen_func", "packed")
PAGED = _on("flash_attn_varlen_func", "paged_pool")
PRIVATE = _on("_flash_attn_fwd", "packed")
CACHE = _on("flash_attn_with_kvcache", "cache")


def fp32(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def _int8(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int8)


# The arguments of the cache's function by its own names.
_CHOSEN = torch.zeros(2, 2, 3, dtype=torch.int32)
_CACHE = (
    CACHE(
        "selection_lens says how long selection is, which is missing",
        selection_lens=ints(1, 1, 1, 1).view(2, 2),
    ),
    CACHE("selection=int64[2, 2, 3] must be int32: selection.int()", selection=_CHOSEN.long()),
    CACHE(
        "selection=int32[2, 3] must be (batch, nheads_kv, entries) with nheads_kv 2",
        selection=_CHOSEN[:, 0].contiguous(),
    ),
    CACHE("select_pages=1 must be a bool", selection=_CHOSEN, select_pages=1),
    CACHE("select_pages says what selection holds, which is missing", select_pages=True),
    CACHE(
        "select_pages needs a page_table, whose columns are selected",
        selection=_CHOSEN,
        select_pages=True,
    ),
    CACHE(
        "cache_batch_idx must be one-dimensional, got shape [2, 1]",
        cache_batch_idx=ints(1, 0)[:, None],
    ),
    CACHE(
        "cache_batch_idx must be int32, got int64: cache_batch_idx.int()",
        cache_batch_idx=ints(1, 0).long(),
    ),
    CACHE("cache_batch_idx must be a torch.Tensor, got list [1, 0]", cache_batch_idx=[1, 0]),
    CACHE(
        "page_table must be (batch, max_pages), got shape [2]",
        page_table=ints(1, 0),
    ),
    CACHE("q=e4m3[] must be (batch, seqlen, nheads, head_dim)", q=codes(1)[0], cache_seqlens=9),
    CACHE(
        "cu_seqlens_q must be a torch.Tensor, got list [0, 4, 12]",
        q=codes(12, 4, 16),
        cu_seqlens_q=[0, 4, 12],
        cache_seqlens=9,
    ),
    CACHE(
        "cu_seqlens_q must be one-dimensional, got shape []",
        q=codes(12, 4, 16),
        cu_seqlens_q=torch.tensor(12, dtype=torch.int32),
        cache_seqlens=9,
    ),
    CACHE(
        "cache_seqlens=1099511627776 must be from 0 to the cache's room",
        "cache_seqlens=1099511627776, but k_cache has room for 40 keys of each sequence",
        cache_seqlens=2**40,
    ),
    CACHE("cache_seqlens=-1 must be from 0 to the cache's room", cache_seqlens=-1),
    CACHE("cache_seqlens=41, but k_cache has room for 40 keys of each sequence", cache_seqlens=41),
    CACHE("cache_seqlens must be a number or a torch.Tensor, got float 9.0", cache_seqlens=9.0),
    CACHE(
        "cache_seqlens must be int32, got int64: cache_seqlens.int()",
        cache_seqlens=ints(9, 9).long(),
    ),
    CACHE(
        """q=e4m3[2, 6, 4, 16] is a batch of 2, k_cache=e4m3[3, 40, 2, 16] one of 3""",
        "q=e4m3[2, 6, 4, 16] is a batch of 2, cache_seqlens=int32[1] one of 1",
        k_cache=codes(3, 40, 2, 16),
        v_cache=codes(3, 40, 2, 16),
        cache_seqlens=ints(9),
    ),
    CACHE(
        "q=e4m3[2, 6, 4, 16] is a batch of 2, cache_batch_idx=int32[1] one of 1",
        cache_batch_idx=ints(1),
    ),
    CACHE(
        """k_cache=e4m3[2, 40, 2, 24] and v_cache=e4m3[2, 41, 2, 16] must agree in all dimensions
        but the last""",
        "q has head_dim 16 and k_cache 24; they must be equal",
        k_cache=codes(2, 40, 2, 24),
        v_cache=codes(2, 41, 2, 16),
    ),
    CACHE(
        """q has 3 heads and k_cache, v_cache have 2: the first must be a positive multiple of the
        second""",
        """v_cache has stride 2 in its last dimension; it must be contiguous there (any stride is
        fine elsewhere): v_cache.contiguous()""",
        q=codes(2, 6, 3, 16),
        v_cache=codes(2, 40, 16, 2).transpose(2, 3),
    ),
    CACHE(
        "k_cache and v_cache must have one dtype, got q=e4m3, k_cache=e4m3, v_cache=bf16",
        v_cache=bf16(2, 40, 2, 16),
    ),
    CACHE("return_softmax_lse=1 must be True or False", return_softmax_lse=1),
)

# Wrong shapes, dtypes and options: no data is read.
INVALID = (
    DENSE("q must be a torch.Tensor, got NoneType None", q=None),
    DENSE("k must be a torch.Tensor, got list [1]", k=[1]),
    DENSE(
        "q is on cpu, but v on meta; all tensors must be on one device",
        v=codes(2, 40, 2, 16).to("meta"),
    ),
    PAGED(
        "page_table and cu_seqlens_k exclude each other: a paged cache takes seqused_k",
        cu_seqlens_k=ints(0, 40, 57),
    ),
    DENSE(
        """q=e4m3[12, 4, 16] must be (batch, seqlen, nheads, head_dim); packed sequences need
        cu_seqlens_q""",
        q=codes(12, 4, 16),
    ),
    DENSE(
        "k=e4m3[1, 2, 40, 2, 16] must be (batch, seqlen, nheads, head_dim)",
        k=codes(1, 2, 40, 2, 16),
    ),
    PACKED(
        """q=e4m3[2, 6, 4, 16] must be (total, nheads, head_dim); drop cu_seqlens_q for batched
        sequences""",
        q=codes(2, 6, 4, 16),
    ),
    PAGED(
        "k=e4m3[40, 2, 16] must be (num_pages, page_size, nheads_kv, head_dim)", k=codes(40, 2, 16)
    ),
    PACKED(
        "cu_seqlens_q must be int32, got int64: cu_seqlens_q.int()",
        cu_seqlens_q=ints(0, 4, 12).long(),
    ),
    PACKED(
        "cu_seqlens_q must be one-dimensional, got shape [1, 3]", cu_seqlens_q=ints(0, 4, 12)[None]
    ),
    PAGED("page_table must be (batch, max_pages), got shape [2]", page_table=ints(0, 1)),
    PACKED("cu_seqlens_q must hold batch + 1 offsets, got none", cu_seqlens_q=ints()),
    PACKED(
        "cu_seqlens_q must be contiguous in its last dimension",
        cu_seqlens_q=ints(0, 9, 4, 9, 12)[::2],
    ),
    DENSE(
        """q has stride 4 in its last dimension; it must be contiguous there (any stride is
        fine elsewhere): q.contiguous()""",
        q=codes(2, 6, 16, 4).transpose(2, 3),
    ),
    DENSE(
        """k=e4m3[2, 40, 2, 16] and v=e4m3[2, 41, 2, 16] must agree in all dimensions but the
        last""",
        v=codes(2, 41, 2, 16),
    ),
    DENSE("q has head_dim 16 and k 24; they must be equal", k=codes(2, 40, 2, 24)),
    DENSE(
        """head_dim=20 is not supported; it must be a multiple of 8 from 8 to 256: 8, 16, ...,
        256""",
        q=codes(2, 6, 4, 20),
        k=codes(2, 40, 2, 20),
    ),
    DENSE(
        """head_dim_v=264 is not supported; it must be a multiple of 8 from 8 to 256: 8, 16,
        ..., 256""",
        v=codes(2, 40, 2, 264),
    ),
    PAGED("page_size=0 must be at least 1", k=codes(13, 0, 2, 16), v=codes(13, 0, 2, 16)),
    DENSE(
        "q has 3 heads and k, v have 2: the first must be a positive multiple of the second",
        q=codes(2, 6, 3, 16),
    ),
    DENSE(
        "learnable_sink must have one logit per query head, shape [4], got [3]",
        learnable_sink=fp32(3),
    ),
    DENSE(
        "learnable_sink must be bf16, fp16 or fp32, got float64", learnable_sink=fp32(4).double()
    ),
    DENSE(
        "q=e4m3[2, 6, 4, 16] is a batch of 2, k=e4m3[3, 40, 2, 16] one of 3",
        k=codes(3, 40, 2, 16),
        v=codes(3, 40, 2, 16),
    ),
    PACKED(
        "cu_seqlens_q=int32[3] is a batch of 2, cu_seqlens_k=int32[2] one of 1",
        "cu_seqlens_q=int32[3] is a batch of 2, seqused_q=int32[3] one of 3",
        cu_seqlens_k=ints(0, 80),
        seqused_q=ints(1, 1, 1),
    ),
    DENSE(
        "k and v must have one dtype, got q=e4m3, k=e4m3, v=bf16", v=codes(2, 40, 2, 16).bfloat16()
    ),
    DENSE(
        """q=e5m2, k=e4m3, v=e4m3 is no supported mix: q, k and v all e4m3, e5m2, bf16 or fp16,
        or bf16/fp16 q over e4m3, e5m2 or int8 k and v (torch.uint8 codes: use .view(dtype))""",
        q=codes(2, 6, 4, 16).to(torch.float8_e5m2),
    ),
    DENSE(
        """q=uint8, k=uint8, v=uint8 is no supported mix: q, k and v all e4m3, e5m2, bf16 or
        fp16, or bf16/fp16 q over e4m3, e5m2 or int8 k and v (torch.uint8 codes: use
        .view(dtype))""",
        **({n: t.view(torch.uint8) for n, t in dense().items()}),
    ),
    DENSE("out is bf16, out_dtype asks for fp16", out_dtype=torch.float16, out=bf16(2, 6, 4, 16)),
    DENSE(
        "output cannot be float64; it can be bf16, fp16, fp32, e4m3, e5m2", out_dtype=torch.float64
    ),
    DENSE(
        "out_dtype='bf16' must be a torch.dtype: that of bf16, fp16, fp32, e4m3, e5m2",
        out_dtype="bf16",
    ),
    DENSE(
        """window_size left=1180591620717411303424 means 'unlimited', as every bound from 2^30 on,
        which it is not for 1073741825 rows; write None for unlimited, or a smaller bound""",
        q=codes(2, 1, 4, 8),
        k=codes(2, 1, 2, 8).expand(2, 2**30 + 1, 2, 8),
        v=codes(2, 1, 2, 8).expand(2, 2**30 + 1, 2, 8),
        window_size=(2**70, 0),
    ),
    DENSE("window_size: 7 is no pair; write (left, right)", window_size=7),
    DENSE("window_size left=7.0 must be an int or None", window_size=(7.0, None)),
    DENSE("window_size: (1, 2, 3) is no pair; write (left, right)", window_size=(1, 2, 3)),
    DENSE(
        """window_size=(256, -1) with causal=False: -1 means 'unlimited' in FA2 and FA3 and 'up
        to the key before the query' in FA4; write None for unlimited, or causal=True""",
        window_size=(256, -1),
    ),
    DENSE(
        """window_size left=-5: negative bounds mean 'unlimited' in FA2 and FA3 and an offset
        in FA4; write None for unlimited, or a bound >= 0""",
        window_size=(-5, None),
        causal=True,
    ),
    DENSE(
        "softmax_scale=-0.1 must be a positive finite number (negate q for a negative one)",
        softmax_scale=-0.1,
    ),
    DENSE(
        "softmax_scale=nan must be a positive finite number (negate q for a negative one)",
        softmax_scale=math.nan,
    ),
    DENSE(
        "softmax_scale=fp32[] must be a Python number: float(softmax_scale)",
        "softcap=fp32[1] must be a Python number: float(softcap)",
        softmax_scale=torch.tensor(0.3),
        softcap=fp32(1),
    ),
    DENSE(
        "softmax_scale=np.float32(0.5) must be a Python number: float(softmax_scale)",
        softmax_scale=np.float32(0.5),
    ),
    DENSE(
        "softmax_scale=-1.0 must be a positive finite number (negate q for a negative one)",
        softmax_scale=np.float64(-1.0),
    ),
    *(
        DENSE(
            f"softmax_scale={scale!r} is {what} in fp32; scale q, or its descale, instead",
            softmax_scale=scale,
        )
        for scale, what in (
            (1e-60, "0"),
            (2.0**-150, "0"),
            (3.5e38, "infinite"),
            (10**50, "infinite"),
        )
    ),
    *(
        DENSE(
            f"""softcap={softcap!r} must be from 2^-126 to 2^126, so that fp32 holds scores over
            it; 0 means none""",
            softcap=softcap,
        )
        for softcap in (1e-60, 1e-40, 3e38, 10**50)
    ),
    DENSE("softcap=-1.0 must be a finite number >= 0; 0 means none", softcap=-1.0),
    DENSE(
        "causal=1 must be True or False",
        "deterministic=None must be True or False",
        "return_lse='yes' must be True or False",
        causal=1,
        deterministic=None,
        return_lse="yes",
    ),
    DENSE("causal=fp32[2, 2] must be True or False", causal=fp32(2, 2)),
    DENSE("pack_gqa=1 must be True, False or None", pack_gqa=1),
    PACKED(
        """max_seqlen_q=8.0 must be an int from 0 to 2147483647 (a tensor would cost a
        synchronisation)""",
        """max_seqlen_k=int32[1] must be an int from 0 to 2147483647 (a tensor would cost a
        synchronisation)""",
        """min_seqlen_k=-1 must be an int from 0 to 2147483647 (a tensor would cost a
        synchronisation)""",
        max_seqlen_q=8.0,
        max_seqlen_k=ints(50),
        min_seqlen_k=-1,
    ),
    PACKED(
        """max_seqlen_q=1180591620717411303424 must be an int from 0 to 2147483647 (a tensor would
        cost a synchronisation)""",
        """max_seqlen_k=2147483648 must be an int from 0 to 2147483647 (a tensor would cost a
        synchronisation)""",
        max_seqlen_q=2**70,
        max_seqlen_k=2**31,
    ),
    DENSE("num_splits=257 must be an int from 0 (chosen for you) to 256", num_splits=257),
    DENSE("num_splits=True must be an int from 0 (chosen for you) to 256", num_splits=True),
    DENSE(
        "seqlen_k_per_split=100 must be a positive multiple of 128 below 2^31",
        seqlen_k_per_split=100,
    ),
    DENSE(
        "seqlen_k_per_split=2147483648 must be a positive multiple of 128 below 2^31",
        seqlen_k_per_split=2**31,
    ),
    DENSE(
        "num_splits=2 and seqlen_k_per_split=128 exclude each other",
        seqlen_k_per_split=128,
        num_splits=2,
    ),
    DENSE("impl='triton' is not one of None, 'cute', 'sim', 'tiled', 'reference'", impl="triton"),
    DENSE(
        """fp8_policy: e4m3 has no policy 'best'; it has default, reference_fix, eager_rescale,
        balanced, sm90. Any Fp8Policy can be passed as well""",
        fp8_policy="best",
    ),
    DENSE(
        """fp8_policy: Fp8Policy: max_offset 8 + rescale_threshold 4 = 12 exceeds log2(448) =
        8.807 of e4m3: the largest probabilities would saturate while the row sum does not.
        Lower either by 3.193, or see Fp8Policy.breaking_the_budget for experiments""",
        fp8_policy="e4m3 max_offset=8 rescale_threshold=4",
    ),
    DENSE(
        "fp8_policy=8 must be an Fp8Policy, a name such as 'default', or None",
        fp8_policy=8,
    ),
    DENSE(
        """fp8_policy is for P in e5m2; with q in e4m3 and v in e4m3 P is e4m3:
        policy_for('e4m3')""",
        fp8_policy=fa.policy_for("e5m2"),
    ),
    DENSE(
        """fp8_policy has exp2='code' and v_descale is per token: the row sum needs P before it is
        rounded, and codes made straight from the exponent have none. Write exp2='exact', or give
        v_descale per batch and head""",
        fp8_policy=fa.policy_for("e4m3").replace(exp2="code", row_sum="exact"),
        v_descale=fp32(2, 40, 2),
    ),
    DENSE(
        """fp8_policy has row_sum='quantized' and v_descale is per token: keys whose scale is small
        are zero in the rounded P whatever their share of the row sum. Write row_sum='exact', or
        give v_descale per batch and head""",
        fp8_policy="e4m3 max_offset=6 rescale_threshold=2.75",
        v_descale=fp32(2, 40, 2),
    ),
    PAGED("max_seqlen_k=41 does not fit in page_table's 5 pages x 8 = 40 keys", max_seqlen_k=41),
    BATCHED(
        "max_seqlen_q=5, but every sequence has length 6",
        "max_seqlen_k=39, but every sequence has length 40",
        "min_seqlen_k=41, but every sequence has length 40",
        max_seqlen_q=5,
        max_seqlen_k=39,
        min_seqlen_k=41,
    ),
    DENSE("out must have shape [2, 6, 4, 16], got [2, 6, 4, 8]", out=bf16(2, 6, 4, 8)),
    DENSE("out must be contiguous in its last dimension", out=bf16(2, 6, 16, 4).transpose(2, 3)),
    DENSE(
        """out has strides [0, 64, 16, 1], in which elements of its shape [2, 6, 4, 16] share
        memory; clone it""",
        out=bf16(1, 6, 4, 16).expand(2, -1, -1, -1),
    ),
    DENSE("lse must have shape [2, 4, 6], got [2, 6, 4]", lse=fp32(2, 6, 4)),
    DENSE(
        """out has strides [383, 64, 16, 1], in which elements of its shape [2, 6, 4, 16] share
        memory; clone it""",
        out=bf16(800).as_strided((2, 6, 4, 16), (383, 64, 16, 1)),
    ),
    DENSE(
        """lse has strides [4, 1, 0], in which elements of its shape [2, 4, 6] share memory; clone
        it""",
        lse=fp32(2, 4, 1).expand(2, 4, 6),
    ),
    DENSE(
        """lse has strides [24, 6, 3], in which elements of its shape [2, 4, 6] share memory; clone
        it""",
        lse=fp32(80).as_strided((2, 4, 6), (24, 6, 3)),
    ),
    DENSE("lse must be fp32, got bf16", lse=bf16(2, 4, 6)),
    DENSE(
        """v_descale missing: int8 has no range of its own; give the fp32 scales that the codes
        were made with (see quantize)""",
        q=codes(2, 6, 4, 16).bfloat16(),
        k=_int8(2, 40, 2, 16),
        v=_int8(2, 40, 2, 16),
        k_descale=torch.tensor(1.0),
    ),
    DENSE(
        """q_descale is given, but q have 16 bits (bf16): a scale belongs to 8-bit codes. Fold
        it into softmax_scale, or quantize first""",
        q=codes(2, 6, 4, 16).bfloat16(),
        q_descale=torch.tensor(1.0),
    ),
    DENSE(
        """v_descale is given, but k and v have 16 bits (bf16): a scale belongs to 8-bit codes.
        Fold it into softmax_scale, or quantize first""",
        **({n: t.bfloat16() for n, t in dense().items()} | dict(v_descale=torch.tensor(1.0))),
    ),
    DENSE("k_descale must be fp32, got bf16", k_descale=bf16(2)),
    DENSE(
        """q_descale has shape [3]; wanted [] or [1] (per tensor), or [2], [4], [2, 2], [2, 4],
        [2, 6, 2], [2, 6, 4] (per head; per batch and head; per token and head)""",
        """k_descale has shape [2, 40]; wanted [] or [1] (per tensor), or [2], [2, 2], [2, 40,
        2] (per head; per batch and head; per token and head)""",
        q_descale=fp32(3),
        k_descale=fp32(2, 40),
    ),
    PACKED(
        """v_descale has shape [80, 2]; wanted [] or [1] (per tensor), or [2], [2, 2], [1, 80,
        2] (per head; per batch and head; per token and head)""",
        v_descale=fp32(80, 2),
    ),
    PAGED(
        """k_descale has shape [2, 40, 2]; wanted [] or [1] (per tensor), or [2], [2, 2], [13,
        8, 2] (per head; per batch and head; per token and head)""",
        k_descale=fp32(2, 40, 2),
    ),
    DENSE(
        """output_scale belongs to an fp8 output; out is bf16. Ask for
        out_dtype=torch.float8_e4m3fn, or drop output_scale""",
        output_scale=2.0,
        out_dtype=torch.bfloat16,
    ),
    DENSE(
        "output_scale must be one fp32 element of shape [] or [1], got bf16[2]",
        output_scale=bf16(2),
    ),
    DENSE(
        "output_scale must be one fp32 element of shape [] or [1], got fp32[1, 1, 1, 1, 1, 1]",
        output_scale=fp32(1, 1, 1, 1, 1, 1),
    ),
    DENSE("output_scale must be a number or a torch.Tensor, got str '2'", output_scale="2"),
    DENSE("output_scale must be a number or a torch.Tensor, got bool True", output_scale=True),
    *(
        DENSE(
            f"output_scale={scale} must be positive and finite in fp32: real / stored",
            output_scale=scale,
        )
        for scale in (-2.0, 0, math.inf, math.nan, 1e-60, 10**50)
    ),
    PACKED("cu_seqlens_q must be a torch.Tensor, got list [0, 4, 12]", cu_seqlens_q=[0, 4, 12]),
    PACKED("seqused_k must be a torch.Tensor, got int 30", seqused_k=30),
    PACKED(
        "disable_scheduler_metadata='no' must be True or False", disable_scheduler_metadata="no"
    ),
    DENSE(
        "num_splits=-1 must be an int from 0 (chosen for you) to 256",
        "softcap=-1.0 must be a finite number >= 0; 0 means none",
        "q has 3 heads and k, v have 2: the first must be a positive multiple of the second",
        """fp8_policy: e4m3 has no policy 'best'; it has default, reference_fix, eager_rescale,
        balanced, sm90. Any Fp8Policy can be passed as well""",
        "output cannot be int8; it can be bf16, fp16, fp32, e4m3, e5m2",
        """score_mod=<built-in function abs>: not supported yet; softcap, window_size and
        learnable_sink are""",
        q=codes(2, 6, 3, 16),
        softcap=-1.0,
        num_splits=-1,
        fp8_policy="best",
        score_mod=abs,
        out_dtype=torch.int8,
    ),
    DENSE(
        "q must be a torch.Tensor, got NoneType None",
        "softcap=-1.0 must be a finite number >= 0; 0 means none",
        q=None,
        softcap=-1.0,
    ),
    *_CACHE,
)
