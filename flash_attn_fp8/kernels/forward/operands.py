"""What a launch hands to the kernel, bundled, and what a role is handed: `Context`."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32


class Tensors(NamedTuple):
    """Global tensors. None: the spec has no use for it."""

    q: cute.Tensor  # (b, s, h, d) or (total, h, d)
    k: cute.Tensor  # (b, s, h, d), (total, h, d) or (pages, page_size, h, d)
    v: cute.Tensor
    out: cute.Tensor  # (b, s, h, dv) or (total, h, dv); with splits in front, in fp32
    lse: cute.Tensor | None  # (b, h, s) or (h, total); with splits in front
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    page_table: cute.Tensor | None  # (b, pages of a sequence)
    sink: cute.Tensor | None  # (h,)
    q_descale: cute.Tensor | None
    k_descale: cute.Tensor | None
    v_descale: cute.Tensor | None
    output_scale: cute.Tensor | None  # (1,)
    counter: cute.Tensor | None = None  # (1,), 0: units of work that CTAs have claimed
    # (b, h, tiles, 2), or (1, ...) of packed keys: K's unit of a tile, log2 of V's; sm90/widen.py
    units: cute.Tensor | None = None


class TmaOperands(NamedTuple):
    """What TMA loads: atoms and coordinate tensors, made on the host."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor


class Scalars(NamedTuple):
    """Values that vary from call to call."""

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    max_seqlen_q: Int32
    num_splits: Int32
    keys_per_split: Int32  # 0: equal parts of each sequence
    heads_at_once: Int32  # (head, batch, split) triples whose tiles are neighbours in the schedule
    num_ctas: Int32
