"""Calls that are refused for want of an executor, and for the values of their tensors."""

from __future__ import annotations

import math

import torch

from tests.api.calls import codes, ints
from tests.api.refusal_cases import BATCHED, CACHE, DENSE, PACKED, PAGED, PRIVATE, bf16, fp32

MANY_KEYS = {
    "q": codes(1, 1, 1, 8),
    "k": torch.zeros(1, 32769, 1, 8).to(torch.float8_e4m3fn),
    "v": torch.zeros(1, 32769, 1, 8).to(torch.float8_e4m3fn),
}

# Legal calls that nothing executes.
UNSUPPORTED = (
    DENSE(
        """impl='tiled': seqlen_k_per_split=128 cuts 32769 keys into 257 parts, and at most 256 can
        be combined: write seqlen_k_per_split=256 or more""",
        **MANY_KEYS,
        seqlen_k_per_split=128,
        impl="tiled",
    ),
    PACKED(
        """impl='tiled': num_splits=0 with deterministic=True (parts of 2048) cuts 524289 keys into
        257 parts, and at most 256 can be combined: write seqlen_k_per_split=2176 or more, or
        max_seqlen_k, if no sequence has all 524289 packed rows""",
        k=codes(1, 2, 16).expand(524289, 2, 16),
        v=codes(1, 2, 16).expand(524289, 2, 16),
        num_splits=0,
        deterministic=True,
        impl="tiled",
    ),
    PAGED(
        """impl='tiled': seqlen_k_per_split=128 cuts 40000 keys into 313 parts, and at most 256 can
        be combined: write seqlen_k_per_split=256 or more, or max_seqlen_k, if no sequence fills all
        40000 slots of its pages""",
        page_table=torch.zeros(2, 5000, dtype=torch.int32),
        seqlen_k_per_split=128,
        impl="tiled",
    ),
    DENSE(
        """learnable_sink require grad: this package is forward only; call it under
        torch.no_grad() or detach them""",
        learnable_sink=torch.ones(4, requires_grad=True),
    ),
    DENSE(
        """qv=bf16[2, 6, 4, 64]: MLA's second query is not supported; concatenate heads, or use
        flash_attn.cute""",
        qv=bf16(2, 6, 4, 64),
    ),
    DENSE(
        "gather_kv_indices=int32[1]: selecting cells is not supported yet",
        gather_kv_indices=ints(0),
    ),
    DENSE(
        """score_mod=<built-in function abs>: not supported yet; softcap, window_size and
        learnable_sink are""",
        score_mod=abs,
    ),
    DENSE(
        "mask_mod=<built-in function abs>: not supported yet; causal and window_size are",
        mask_mod=abs,
    ),
    DENSE(
        "aux_tensors=[1]: only score_mod and mask_mod read it, which are not supported yet",
        "aux_scalars=(1, 2): only score_mod and mask_mod read it, which are not supported yet",
        aux_tensors=[1],
        aux_scalars=(1, 2),
    ),
    DENSE("block_sparse_tensors=1: block sparsity is not supported", block_sparse_tensors=1),
    DENSE(
        "score_mod_bwd=1: this package is forward only",
        "block_sparse_tensors_bwd=2: this package is forward only",
        "gather_bwd_token_chunk=3: this package is forward only",
        "gather_bwd_recompute_p=True: this package is forward only",
        score_mod_bwd=1,
        block_sparse_tensors_bwd=2,
        gather_bwd_recompute_p=True,
        gather_bwd_token_chunk=3,
    ),
    DENSE(
        "gather_bwd_recompute_p=fp32[2]: this package is forward only",
        gather_bwd_recompute_p=fp32(2),
    ),
    CACHE(
        "attention_chunk=int32[2]: not supported; use window_size",
        "sm_margin=False: not supported",
        "rotary_interleaved=fp32[2]: rotary embedding is not supported; rotate q and k first",
        attention_chunk=ints(1, 2),
        sm_margin=False,
        rotary_interleaved=fp32(2),
    ),
    PACKED(
        "scheduler_metadata=1: plans need no metadata tensors here; leave it out",
        scheduler_metadata=1,
    ),
    PACKED(
        "scheduler_metadata=1: plans need no metadata tensors here; leave it out",
        scheduler_metadata=1,
        disable_scheduler_metadata=True,
    ),
    PRIVATE(
        "tile_mn=(128, 64): tiles are chosen by the plan",
        "mma_pv_is_rs=True: chosen by the plan",
        "intra_wg_overlap=False: chosen by the plan",
        "_arch=100: the architecture is the tensors'; explain(..., target=) plans for another",
        "num_threads=256: chosen by the plan",
        tile_mn=(128, 64),
        mma_pv_is_rs=True,
        intra_wg_overlap=False,
        num_threads=256,
        _arch=100,
    ),
    CACHE(
        """k=e4m3[2, 1, 2, 16]: appending in the same call is not supported yet; write the
        cache first""",
        """v=e4m3[2, 1, 2, 16]: appending in the same call is not supported yet; write the
        cache first""",
        """cu_seqlens_k_new=int32[2]: appending in the same call is not supported yet; write
        the cache first""",
        k=codes(2, 1, 2, 16),
        v=codes(2, 1, 2, 16),
        cu_seqlens_k_new=ints(0, 1),
    ),
    CACHE(
        "rotary_cos=fp32[9, 8]: rotary embedding is not supported; rotate q and k first",
        "rotary_sin=fp32[9, 8]: rotary embedding is not supported; rotate q and k first",
        "rotary_seqlens=int32[1]: rotary embedding is not supported; rotate q and k first",
        "rotary_interleaved=False: rotary embedding is not supported; rotate q and k first",
        rotary_cos=fp32(9, 8),
        rotary_sin=fp32(9, 8),
        rotary_seqlens=ints(1),
        rotary_interleaved=False,
    ),
    CACHE(
        """cache_leftpad=int32[2]: not supported; pass a page_table or slices that start at the
        first key""",
        "attention_chunk=64: not supported; use window_size",
        "sm_margin=4: not supported",
        cache_leftpad=ints(1, 1),
        attention_chunk=64,
        sm_margin=4,
    ),
    CACHE(
        "cache_batch_idx=int32[2]: selects sequences of an unpaged cache; drop page_table",
        cache_batch_idx=ints(1, 0),
        page_table=ints(0, 1)[:, None],
    ),
    DENSE("impl='cute': needs a CUDA device; the tensors are on the CPU", impl="cute"),
    DENSE(
        """impl='sim': its kernel has head dims 64, 96, 128, 192, 256, (192, 128), not (16, 16)""",
        impl="sim",
    ),
    DENSE(
        """impl='reference': it keeps P exact, so fp8_policy would have no effect; use
        impl='tiled'""",
        impl="reference",
        fp8_policy="default",
    ),
    DENSE(
        "impl='reference': it does not split the keys; use impl='tiled', or num_splits=1",
        impl="reference",
        num_splits=2,
    ),
)

# Wrong values in index and scale tensors.
VALUES = (
    CACHE(
        "selection_lens must be from 0 to the 3 entries of selection, and has -1 to 4",
        selection=torch.zeros(2, 2, 3, dtype=torch.int32),
        selection_lens=ints(-1, 4, 0, 3).view(2, 2),
    ),
    PACKED("cu_seqlens_q must start at 0, got 1", cu_seqlens_q=ints(1, 4, 12)),
    PACKED(
        "cu_seqlens_k must not decrease, but goes from 50 to 30 at sequence 1",
        cu_seqlens_k=ints(0, 50, 30),
    ),
    PACKED(
        "cu_seqlens_k ends at 81, past the 80 rows of the packed tensor",
        cu_seqlens_k=ints(0, 30, 81),
    ),
    PACKED(
        "seqused_q[1]=9 must be from 0 to the 8 rows that sequence 1 has",
        "seqused_k[0]=-1 must be from 0 to the 30 rows that sequence 0 has",
        seqused_q=ints(4, 9),
        seqused_k=ints(-1, 3),
    ),
    BATCHED(
        "seqused_k[1]=41 must be from 0 to the 40 rows that sequence 1 has", seqused_k=ints(40, 41)
    ),
    PAGED(
        "seqused_k[0]=41 must be from 0 to the 40 rows that sequence 0 has", seqused_k=ints(41, 1)
    ),
    PACKED(
        "max_seqlen_q=7, but sequence 1 has 8 rows: those beyond would not be computed",
        "max_seqlen_k=49, but sequence 1 has 50 rows: those beyond would not be computed",
        "min_seqlen_k=31, but sequence 0 has 30 keys",
        max_seqlen_q=7,
        max_seqlen_k=49,
        min_seqlen_k=31,
    ),
    PAGED(
        "page_table[0, 4]=13 is in use and must be from 0 to 12",
        page_table=torch.tensor([[0, 1, 2, 3, 13], [4, 5, 6, -1, -1]], dtype=torch.int32),
    ),
    DENSE(
        "q_descale must be finite and positive, found 0.0 (all-zero rows may have any)",
        q_descale=torch.zeros(()),
    ),
    DENSE(
        "k_descale must be finite and positive, found inf (all-zero rows may have any)",
        k_descale=torch.full((2, 2), float("inf")),
    ),
    DENSE(
        """v_descale must be finite and positive, found nan (of an all-zero row: no larger than its
        neighbours')""",
        v_descale=torch.full((2, 40, 2), math.nan),
    ),
    DENSE("output_scale must be finite and positive, found -2.0", output_scale=torch.tensor(-2.0)),
    CACHE(
        "cache_seqlens[1]=41 must be from 0 to the 40 rows that sequence 1 has",
        cache_seqlens=ints(40, 41),
    ),
    CACHE("cache_batch_idx[1]=2 is in use and must be from 0 to 1", cache_batch_idx=ints(0, 2)),
)
