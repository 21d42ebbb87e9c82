"""`flash_attn_with_kvcache`: FA3's cache interface over the same forward."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.entry import Window, bounds, public_as_fa3, refused
from flash_attn_fp8.policy import Fp8Policy

# What this function calls the fields of a call; its cache_batch_idx is a page_table of one column.
NAMES = MappingProxyType(
    {
        "k": "k_cache",
        "v": "v_cache",
        "seqused_k": "cache_seqlens",
        "return_lse": "return_softmax_lse",
    }
)
NAMES_WITH_SEQUENCES = MappingProxyType({**NAMES, "page_table": "cache_batch_idx"})


@public_as_fa3
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    fp8_policy: Fp8Policy | str | None = None,
    output_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    deterministic: bool = False,
    selection: Tensor | None = None,
    selection_lens: Tensor | None = None,
    select_pages: bool = False,
    impl: str | None = None,
) -> Call:
    """Attention of new queries over a cache, forward only, with FA3's keywords and results.

    Everything that is not said here is as in `flash_attn_varlen_func`.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with cu_seqlens_q.
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_kv, head_dim[_v]), or (num_pages,
            page_size, nheads_kv, head_dim[_v]) with page_table. Already holds the new tokens.
        cache_seqlens: (batch,) int32, or one int for all: keys in use.
        cache_batch_idx: (batch,) int32: which sequence of the cache each query reads.
        window_size: as `flash_attn_func`; FA3's (-1, -1) is unbounded.
        num_splits: 0, the default, lets the plan choose.
        selection: (batch, nheads_kv, entries) int32: which keys of its sequence each KV head
            reads, as positions in the sequence, or (select_pages) as columns of page_table.
            Entries that are negative, or past the sequence's end, are skipped; a key that is
            named twice counts twice. Masks go by the keys' positions.
        selection_lens: (batch, nheads_kv) int32: entries that count; None: all.
        select_pages: the entries of selection are pages, each of which stands for all its keys.

    Other arguments are FA3's (appending k and v, rotary embedding, left padding, chunks); they are
    refused unless they have their neutral value.

    Returns:
        out, or (out, lse) with return_softmax_lse.

    Raises:
        InvalidArguments, Unsupported: as `flash_attn_varlen_func`.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
        >>> cache = fa.quantize(torch.randn(2, 32, 2, 64), per="token_head")
        >>> out = fa.flash_attn_with_kvcache(
        ...     q, cache.values, cache.values, cache_seqlens=20,
        ...     k_descale=cache.descale, v_descale=cache.descale)
        >>> out.shape
        torch.Size([2, 1, 8, 64])
    """
    left, right = bounds(window_size)
    why = refused(
        k=k,
        v=v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        cache_leftpad=cache_leftpad,
        cu_seqlens_k_new=cu_seqlens_k_new,
        scheduler_metadata=scheduler_metadata,
    )
    why += refused(0, attention_chunk=attention_chunk, sm_margin=sm_margin)
    why += refused(True, rotary_interleaved=rotary_interleaved)
    names = NAMES
    if cache_batch_idx is not None and page_table is not None:
        why += refused(cache_batch_idx=cache_batch_idx)
    elif cache_batch_idx is not None:
        names, page_table = NAMES_WITH_SEQUENCES, cache_batch_idx
    return Call(
        "flash_attn_with_kvcache",
        Operands(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=cache_seqlens,  # type: ignore[arg-type]
            page_table=page_table,
            learnable_sink=learnable_sink,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            output_scale=output_scale,  # type: ignore[arg-type]
            selection=selection,
            selection_lens=selection_lens,
            out=out,
        ),
        Options(
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            max_seqlen_q=max_seqlen_q,
            num_splits=num_splits,
            pack_gqa=pack_gqa,
            deterministic=deterministic,
            return_lse=return_softmax_lse,
            out_dtype=out_dtype,
            fp8_policy=fp8_policy,
            impl=impl,
            select_pages=select_pages,
        ),
        why,
        names,
    )
