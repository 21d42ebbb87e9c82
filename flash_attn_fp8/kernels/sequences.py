"""Where a sequence lies in its tensors, how long it is, and which keys its queries see."""

from __future__ import annotations

import cutlass
from cutlass import Int32


def queries_of(t, batch):
    """(offset in packed rows, rows in use, rows of the output) of a sequence."""
    if t.cu_seqlens_q is not None:
        offset = t.cu_seqlens_q[batch]
        length = t.cu_seqlens_q[batch + 1] - offset
    else:
        offset, length = Int32(0), Int32(t.q.shape[1])
    used = length if t.seqused_q is None else t.seqused_q[batch]
    return offset, used, length


def keys_of(t, rows, batch):
    """(offset in packed rows, keys in use) of a sequence.

    `rows`: the second extent of K or V, rows of a sequence or of a page.
    """
    offset = Int32(0)
    if t.cu_seqlens_k is not None:
        offset = t.cu_seqlens_k[batch]
        length = t.cu_seqlens_k[batch + 1] - offset
    elif t.page_table is not None:
        length = Int32(t.page_table.shape[1]) * Int32(rows)
    else:
        length = Int32(rows)
    if t.seqused_k is not None:
        length = t.seqused_k[batch]
    return offset, length


def band(traits, scalars, token, seqlen_q, seqlen_k):
    """Keys [lo, hi) of a sequence that its query `token` sees; the ends are aligned."""
    shift = seqlen_k - seqlen_q
    lo, hi = Int32(0), seqlen_k
    if traits.bounded_right:
        hi = cutlass.min(hi, token + shift + scalars.window_right + 1)
    if traits.bounded_left:
        lo = cutlass.max(lo, token + shift - scalars.window_left)
    return lo, hi
