"""Checks that read data: lengths, page ids and scales.

They run for every call on CPU tensors, and on CUDA where FLASH_ATTN_FP8_DEBUG=1 (each costs a
synchronisation there; without it these values are the caller's duty). Slots past a sequence's
length are never looked at: they may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.packed import sequence_of_rows
from flash_attn_fp8.problem import Problem, Sizes


def check_values(call: Call, problem: Problem) -> None:
    """Raise InvalidArguments with every fault of the values of index and scale tensors."""
    refusal = Refusal(names=call.names)
    o, sizes = call.operands, problem.sizes
    q_len = _lengths("q", o.cu_seqlens_q, o.seqused_q, sizes.total_q, sizes.seqlen_q, refusal)
    capacity = sizes.seqlen_k
    if sizes.page_size is not None and o.page_table is not None:
        capacity = o.page_table.shape[1] * sizes.page_size
    k_len = _lengths("k", o.cu_seqlens_k, o.seqused_k, sizes.total_k, capacity, refusal)
    if not refusal.invalid:
        _check_bounds(q_len, k_len, call.options, refusal)
        _check_pages(o, k_len, sizes, refusal)
        _check_selection(o, refusal)
    if not refusal.invalid:
        _check_scales(o, problem, q_len, k_len, refusal)
    if refusal.reasons:
        raise refusal.error(str(call))


def _check_selection(o: Operands, refusal: Refusal) -> None:
    """Entries may be anything: those that name no key are skipped. Their number may not."""
    if o.selection is None or o.selection_lens is None or o.selection_lens.numel() == 0:
        return
    entries, lens = o.selection.shape[2], o.selection_lens
    if bool((lens < 0).any()) or bool((lens > entries).any()):
        low, high = int(lens.min()), int(lens.max())
        refusal.invalid.append(
            f"selection_lens must be from 0 to the {entries} entries of selection, and has {low} "
            f"to {high}"
        )


def _lengths(
    side: str,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    total: int | None,
    capacity: int,
    refusal: Refusal,
) -> Tensor | None:
    """Rows in use of each sequence; None where all have `capacity`."""
    room: Tensor | int = capacity
    used = None
    if cu_seqlens is not None:
        used = room = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0:
            refusal.invalid.append(f"cu_seqlens_{side} must start at 0, got {int(cu_seqlens[0])}")
        if bool((used < 0).any()):
            at = int((used < 0).nonzero()[0])
            refusal.invalid.append(
                f"cu_seqlens_{side} must not decrease, but goes from {int(cu_seqlens[at])} to "
                f"{int(cu_seqlens[at + 1])} at sequence {at}"
            )
        if total is not None and int(cu_seqlens[-1]) > total:
            refusal.invalid.append(
                f"cu_seqlens_{side} ends at {int(cu_seqlens[-1])}, past the {total} rows of the "
                f"packed tensor"
            )
    if seqused is not None:
        bad = (seqused < 0) | (seqused > room)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            limit = room if isinstance(room, int) else int(room[at])
            refusal.invalid.append(
                f"{refusal.name(f'seqused_{side}')}[{at}]={int(seqused[at])} must be from 0 to the "
                f"{limit} rows that sequence {at} has"
            )
        used = seqused
    return used


def _check_bounds(
    q_len: Tensor | None, k_len: Tensor | None, options: Options, refusal: Refusal
) -> None:
    for name, lengths in (("max_seqlen_q", q_len), ("max_seqlen_k", k_len)):
        bound = getattr(options, name)
        if bound is not None and lengths is not None and bool((lengths > bound).any()):
            refusal.invalid.append(
                f"{name}={bound}, but sequence {int((lengths > bound).nonzero()[0])} has "
                f"{int(lengths.max())} rows: those beyond would not be computed"
            )
    bound = options.min_seqlen_k
    if bound is not None and k_len is not None and bool((k_len < bound).any()):
        refusal.invalid.append(
            f"min_seqlen_k={bound}, but sequence {int((k_len < bound).nonzero()[0])} has "
            f"{int(k_len.min())} keys"
        )


def _check_pages(o: Operands, k_len: Tensor | None, sizes: Sizes, refusal: Refusal) -> None:
    if o.page_table is None or sizes.page_size is None:
        return
    pages = o.page_table
    if k_len is not None:
        column = torch.arange(pages.shape[1], device=pages.device) * sizes.page_size
        needed = column < k_len[:, None]
    else:
        needed = torch.ones_like(pages, dtype=torch.bool)
    bad = needed & ((pages < 0) | (pages >= (sizes.num_pages or 0)))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        name = refusal.name("page_table")
        at = (
            f"{row}, {column}" if name == "page_table" else f"{row}"
        )  # a cache_batch_idx is one row
        refusal.invalid.append(
            f"{name}[{at}]={int(pages[row, column])} is in use and must be from 0 to "
            f"{(sizes.num_pages or 0) - 1}"
        )


def _check_scales(
    o: Operands, problem: Problem, q_len: Tensor | None, k_len: Tensor | None, refusal: Refusal
) -> None:
    traits = problem.traits
    for name, kind in (
        ("q_descale", traits.q_descale),
        ("k_descale", traits.k_descale),
        ("v_descale", traits.v_descale),
    ):
        scale = getattr(o, name)
        if scale is None or kind is None:
            continue
        if kind.per_token:
            scale = (
                _used_rows(scale, o.cu_seqlens_q, q_len, o, paged=False)
                if name == "q_descale"
                else _used_rows(scale, o.cu_seqlens_k, k_len, o, paged=o.page_table is not None)
            )
        _check_positive(name, scale, refusal)
    if o.output_scale is not None:
        _check_positive("output_scale", o.output_scale, refusal)


# A row of zeros has no scale of its own. V's, per token, may lead the exponent that P is made with.
_ZERO_ROWS = {
    "q_descale": " (all-zero rows may have any)",
    "k_descale": " (all-zero rows may have any)",
    "v_descale": " (of an all-zero row: no larger than its neighbours')",
}


def _check_positive(name: str, scale: Tensor, refusal: Refusal) -> None:
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        refusal.invalid.append(
            f"{name} must be finite and positive, found {float(scale[bad].flatten()[0])}"
            + _ZERO_ROWS.get(name, "")
        )


def _used_rows(
    scale: Tensor, cu_seqlens: Tensor | None, used: Tensor | None, o: Operands, paged: bool
) -> Tensor:
    """The per-token scales of rows in use, (rows, heads)."""
    if paged and o.page_table is not None:
        page_size = scale.shape[1]
        slot = torch.arange(o.page_table.shape[1] * page_size, device=scale.device)
        page = o.page_table.long()[:, slot // page_size]
        slot = slot.expand_as(page)
        if used is None:
            return scale[page, slot % page_size].flatten(0, 1)
        seen = slot < used[:, None]
        return scale[page[seen], (slot % page_size)[seen]]
    if cu_seqlens is not None and used is not None:
        slot = torch.arange(scale.shape[1], device=scale.device)
        if used.shape[0] == 0:
            return scale[0, :0]
        owner = sequence_of_rows(cu_seqlens, scale.shape[1])
        seen = (slot - cu_seqlens[owner] < used[owner]) & (slot < cu_seqlens[-1])
        return scale[0][seen]
    if used is None:
        return scale.flatten(0, 1)
    seen = torch.arange(scale.shape[1], device=scale.device) < used[:, None]
    return scale[seen]
