"""The public forward functions: signatures, documentation, and the `Call` that each describes.

A public function's body only describes its call; the decorator runs it. `explain` asks the same
function for the same description and runs nothing, so there is one reading of every argument.

Names, keywords, positional order and results are flash-attn-4's; this package's own arguments come
after its, by keyword only. FA4's positional order is safe for callers of older generations too:
what they have in fourth place (FA2's dropout_p, FA3's softmax_scale, FA2's cu_seqlens_q) meets
`qv`, which is refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.entry import Window, bounds, public, refused
from flash_attn_fp8.policy import Fp8Policy


@public
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: None = None,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    fp8_policy: Fp8Policy | str | None = None,
    output_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    impl: str | None = None,
) -> Call:
    """Attention of batched sequences: softmax(q k^T * softmax_scale) v, forward only.

    Formula: O = sum_j exp(S_ij - LSE_i) v_j with S = softmax_scale (q q_descale)(k k_descale)^T
    and v_j times v_descale (FlashAttention-2, Dao 2023, eq. 1, with the scales of FA3's fp8 path).

    Args:
        q: (batch, seqlen_q, nheads, head_dim): e4m3, e5m2, bf16 or fp16.
        k: (batch, seqlen_k, nheads_kv, head_dim), q's dtype; e4m3, e5m2 or int8 under 16-bit q.
        v: (batch, seqlen_k, nheads_kv, head_dim_v), k's dtype. nheads is a multiple of nheads_kv;
            query head h reads KV head h // (nheads // nheads_kv). Head dims are multiples of 8 up
            to 256. Any strides, contiguous in the last dimension.
        softmax_scale: positive; default 1 / sqrt(head_dim).
        causal: row i sees key j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window_size: (left, right); row i at p = i + seqlen_k - seqlen_q sees keys p - left to
            p + right, both included. None is unbounded; so is (-1, -1), and -1 beside causal=True.
        learnable_sink: (nheads,) bf16, fp16 or fp32: one more logit in the denominator.
        softcap: c > 0 replaces each scaled score s by c tanh(s / c).
        num_splits: parts that each sequence's keys are divided into; 0 lets the plan choose.
        pack_gqa: pack the query heads of a KV head into one tile; None lets the plan choose.
        deterministic: let no number of splits depend on batch or device (with num_splits=0).
        return_lse: also return the log-sum-exp.
        q_descale, k_descale, v_descale: fp32; real value = stored value * descale. The number of
            dimensions is the granularity: () per tensor, (heads,), (batch, heads), or
            (batch, seqlen, heads) per token. heads is nheads_kv, for q also nheads. Absent: 1.
        fp8_policy: how P is put into q's format: an `Fp8Policy`, a name, or None for the default.
        output_scale: one positive element, for fp8 outputs: stored = real / output_scale.
        out_dtype: bf16, fp16, fp32, e4m3 or e5m2. Default: q's dtype if it has 16 bits, else bf16;
            e4m3 where output_scale is given.
        out: (batch, seqlen_q, nheads, head_dim_v), written in place and returned.
        lse: (batch, nheads, seqlen_q) fp32, written in place and returned.
        seqlen_k_per_split: keys in each split, a multiple of 128, instead of num_splits; large
            enough for 256 splits to hold the longest sequence.
        impl: "cute", "tiled", "reference", "sim", or None for the best that this machine has. An
            explicit choice never falls back. `explain` says what None chose and why.

    Other arguments are FA4's; they are refused unless they have their neutral value.

    Returns:
        (out, lse): lse is (batch, nheads, seqlen_q) fp32 in natural log, None unless asked for. A
        row that sees no key has out 0 and lse -inf (lse = sink where there is one).

    Raises:
        InvalidArguments: (a ValueError and a TypeError) with every fault of the arguments.
        Unsupported: (a NotImplementedError) the arguments are legal, and nothing executes them.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> x = torch.randn(3, 1, 16, 2, 64)
        >>> q, k, v = (fa.quantize(t, per="batch_head") for t in x)
        >>> out, lse = fa.flash_attn_func(
        ...     q.values, k.values, v.values, causal=True, return_lse=True,
        ...     q_descale=q.descale, k_descale=k.descale, v_descale=v.descale)
        >>> out.shape, out.dtype, lse.shape
        (torch.Size([1, 16, 2, 64]), torch.bfloat16, torch.Size([1, 2, 16]))
    """
    left, right = bounds(window_size)
    return Call(
        "flash_attn_func",
        Operands(
            q,
            k,
            v,
            learnable_sink=learnable_sink,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            output_scale=output_scale,  # type: ignore[arg-type]
            out=out,
            lse=lse,
        ),
        Options(
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            num_splits=num_splits,
            seqlen_k_per_split=seqlen_k_per_split,
            pack_gqa=pack_gqa,
            deterministic=deterministic,
            return_lse=return_lse,
            out_dtype=out_dtype,
            fp8_policy=fp8_policy,
            impl=impl,
        ),
        refused(
            qv=qv,
            gather_kv_indices=gather_kv_indices,
            score_mod=score_mod,
            score_mod_bwd=score_mod_bwd,
            mask_mod=mask_mod,
            aux_tensors=aux_tensors,
            aux_scalars=aux_scalars,
            block_sparse_tensors=block_sparse_tensors,
            block_sparse_tensors_bwd=block_sparse_tensors_bwd,
            gather_bwd_token_chunk=gather_bwd_token_chunk,
        )
        + refused(False, gather_bwd_recompute_p=gather_bwd_recompute_p),
    )


@public
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    return_lse: bool = False,
    scheduler_metadata: None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: None = None,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    fp8_policy: Fp8Policy | str | None = None,
    output_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: str | None = None,
) -> Call:
    """Attention of sequences of different lengths: packed, partly used, or in a paged cache.

    Everything that is not said here is as in `flash_attn_func`.

    Args:
        q: (total_q, nheads, head_dim) with cu_seqlens_q, else (batch, seqlen_q, nheads, head_dim).
        k, v: (total_k, nheads_kv, head_dim[_v]) with cu_seqlens_k; (num_pages, page_size,
            nheads_kv, head_dim[_v]) with page_table; else (batch, seqlen_k, nheads_kv, ...).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32: sequence b's rows are those from
            cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; they spare a GPU from reading.
        min_seqlen_k: lower bound of the key lengths; checked, and of no other use here.
        seqused_q, seqused_k: (batch,) int32: rows and keys in use, from each sequence's start.
            Slots past them are never read. Rows past seqused_q come out as 0 with lse -inf.
        page_table: (batch, pages) int32: sequence b's key j is row j % page_size of page
            page_table[b, j // page_size]. Any page size. Entries past the length may hold anything.
        q_descale: per token (1, total_q, heads) where q is packed.
        k_descale, v_descale: per token (1, total_k, nheads_kv) where packed, (num_pages,
            page_size, nheads_kv) where paged, any strides.
        scheduler_metadata: None; plans need none here.
        disable_scheduler_metadata: recorded in the plan.
        out: as q, with head_dim_v.
        lse: (nheads, total_q) where q is packed, else (batch, nheads, seqlen_q).

    Returns:
        (out, lse), as `flash_attn_func`.

    Raises:
        InvalidArguments, Unsupported: as `flash_attn_func`. Values of cu_seqlens, seqused,
            page_table and descales are checked on the CPU, and on CUDA with
            FLASH_ATTN_FP8_DEBUG=1; otherwise they are the caller's duty there.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> q = torch.randn(5, 4, 64).to(torch.float8_e4m3fn)
        >>> pages = torch.randn(8, 16, 2, 64).to(torch.float8_e4m3fn)
        >>> out, _ = fa.flash_attn_varlen_func(
        ...     q, pages, pages, cu_seqlens_q=torch.tensor([0, 1, 5], dtype=torch.int32),
        ...     seqused_k=torch.tensor([20, 9], dtype=torch.int32),
        ...     page_table=torch.tensor([[3, 5], [0, -1]], dtype=torch.int32), causal=True)
        >>> out.shape
        torch.Size([5, 4, 64])
    """
    left, right = bounds(window_size)
    return Call(
        "flash_attn_varlen_func",
        Operands(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            page_table=page_table,
            learnable_sink=learnable_sink,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            output_scale=output_scale,  # type: ignore[arg-type]
            out=out,
            lse=lse,
        ),
        Options(
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            min_seqlen_k=min_seqlen_k,
            num_splits=num_splits,
            seqlen_k_per_split=seqlen_k_per_split,
            pack_gqa=pack_gqa,
            deterministic=deterministic,
            disable_scheduler_metadata=disable_scheduler_metadata,
            return_lse=return_lse,
            out_dtype=out_dtype,
            fp8_policy=fp8_policy,
            impl=impl,
        ),
        refused(
            qv=qv,
            gather_kv_indices=gather_kv_indices,
            score_mod=score_mod,
            score_mod_bwd=score_mod_bwd,
            mask_mod=mask_mod,
            aux_tensors=aux_tensors,
            aux_scalars=aux_scalars,
            block_sparse_tensors=block_sparse_tensors,
            scheduler_metadata=scheduler_metadata,
            gather_bwd_token_chunk=gather_bwd_token_chunk,
        )
        + refused(False, gather_bwd_recompute_p=gather_bwd_recompute_p),
    )


@public
def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: None = None,
    mma_pv_is_rs: None = None,
    intra_wg_overlap: None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: None = None,
    score_mod: None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: None = None,
    scheduler_metadata: None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    *,
    fp8_policy: Fp8Policy | str | None = None,
    output_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Call:
    """FA4's private forward, in its positional order, for callers that use it for its descales.

    Arguments, errors and formula as `flash_attn_varlen_func`; a softcap of None is none. What FA4
    lets callers tune (tile_mn, mma_pv_is_rs, intra_wg_overlap, num_threads, _arch) is chosen by
    the plan and refused unless it has its default.

    Returns:
        (out, lse), lse None unless return_lse or `lse` asks for it. FA4 returns further tensors
        after these two, which belong to its MLA kernels.
    """
    call: Call = flash_attn_varlen_func.describe_call(  # type: ignore[attr-defined]
        q,
        k,
        v,
        qv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        min_seqlen_k,
        seqused_q,
        seqused_k,
        gather_kv_indices,
        page_table,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        learnable_sink,
        0.0 if softcap is None else softcap,
        num_splits,
        pack_gqa,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        return_lse=return_lse,
        scheduler_metadata=scheduler_metadata,
        seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        fp8_policy=fp8_policy,
        output_scale=output_scale,
        out_dtype=out_dtype,
        out=out,
        lse=lse,
        impl=impl,
    )
    tuning = refused(
        tile_mn=tile_mn, mma_pv_is_rs=mma_pv_is_rs, intra_wg_overlap=intra_wg_overlap, _arch=_arch
    ) + refused(384, num_threads=num_threads)
    return call._replace(function="_flash_attn_fwd", refused=call.refused + tuning)
