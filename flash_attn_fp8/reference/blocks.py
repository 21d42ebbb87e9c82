"""Any layout to padded batches: dense, packed and paged operands as `Block`s of codes.

Both executors of this folder compute on a `Block`: a few sequences of similar lengths with a few KV
heads, gathered from wherever their rows lie, and padded with zeros. What lies in unused slots (NaN
codes, stale pages, wild page ids) is never read into the arithmetic.

On the CPU the lengths are read, sequences of similar lengths share a block, and key tiles that no
row sees are skipped. On other devices nothing is read back: one group, padded to the bounds that
the host knows. Neither changes a result: masked keys contribute nothing (`nonfinite.py` sees to
NaN and infinity in V), and tiles without a visible key change no state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.problem import Descale, Problem

_GROUP_TILE = 128  # sequences share a block if their keys fill the same number of these


@dataclass(frozen=True)
class Block:
    """Sequences `n`, KV heads `hk`, `g` query heads each, `r` query rows, `s` key slots.

    q (n, hk, g, r, d), k (n, hk, s, d), v (n, hk, s, dv) hold stored codes in their own dtypes.
    Scales are fp32 and broadcast: q_scale against (n, hk, g, r, 1), k_scale and v_scale against
    (n, hk, s); None is 1. `position` (n, r) is each row's key position (bottom-right aligned),
    `keys` (n,) the slots in use, `rows_used` (n, r) which rows exist. Rows of the block see no
    slot outside [key_lo, key_hi). `token` (n, s) is the position of the key in each slot, -1 where
    it does not count; None: the slots are the positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    sink: Tensor | None
    position: Tensor
    keys: Tensor
    token: Tensor | None
    rows_used: Tensor
    key_lo: int
    key_hi: int
    heads_kv: slice
    sequences: Tensor
    row_start: int

    def visible(self, lo: int, hi: int, left: int | None, right: int | None) -> Tensor:
        """Which keys of [lo, hi) each row sees, (n, 1, 1, r, hi - lo)."""
        key = torch.arange(lo, hi, device=self.q.device)
        seen = (key < self.keys[:, None])[:, None, :].expand(-1, self.position.shape[1], -1)
        if self.token is not None:
            key = self.token[:, None, lo:hi]
            seen = seen & (key >= 0)
        p = self.position[..., None]
        if left is not None:
            seen = seen & (key >= p - left)
        if right is not None:
            seen = seen & (key <= p + right)
        return seen[:, None, None]


@dataclass(frozen=True)
class Lengths:
    """Where each sequence's rows and keys start and how many are in use, each (batch,) int64.

    `keys` are those that rows look at, at the most: of any KV head where they are chosen.
    """

    q_start: Tensor
    q_len: Tensor
    k_start: Tensor
    k_len: Tensor
    keys: Tensor

    @classmethod
    def of(cls, o: Operands, problem: Problem) -> Lengths:
        sizes, device = problem.sizes, o.q.device
        zeros = torch.zeros(sizes.batch, dtype=torch.int64, device=device)
        q_start, q_len = zeros, zeros + sizes.seqlen_q
        if o.cu_seqlens_q is not None:
            q_start, q_len = o.cu_seqlens_q[:-1].long(), o.cu_seqlens_q.long().diff()
        if o.seqused_q is not None:
            q_len = o.seqused_q.long()
        k_start, k_len = zeros, zeros + sizes.seqlen_k
        if o.cu_seqlens_k is not None:
            k_start, k_len = o.cu_seqlens_k[:-1].long(), o.cu_seqlens_k.long().diff()
        if o.seqused_k is not None:
            k_len = o.seqused_k.long()
        keys = k_len
        if o.selection is not None:
            keys = _selected(o, problem).amax(1) if sizes.nheads_kv else zeros
        return cls(q_start, q_len, k_start, k_len, keys)


@dataclass(frozen=True)
class _Group:
    """Sequences that share blocks: their indices and the padded extents."""

    sequences: Tensor
    rows: int
    keys: int
    # bounds over the group of seqlen_k - seqlen_q, for skipping keys that no row sees
    shift_lo: int | None
    shift_hi: int | None


def _selected(o: Operands, problem: Problem) -> Tensor:
    """How many slots the chosen keys of each (sequence, KV head) have, (batch, hk) int64."""
    if o.selection is None:
        raise ValueError("nothing is selected")
    per_entry = o.k.shape[1] if problem.traits.selection == "pages" else 1
    if o.selection_lens is not None:
        return o.selection_lens.long() * per_entry
    entries = o.selection.shape[2]
    return torch.full(
        o.selection.shape[:2], entries * per_entry, dtype=torch.int64, device=o.selection.device
    )


def _groups(problem: Problem, lengths: Lengths) -> Iterator[_Group]:
    sizes = problem.sizes
    if lengths.q_len.device.type != "cpu":
        everything = torch.arange(sizes.batch, device=lengths.q_len.device)
        fixed = (
            problem.traits.q_layout == "dense"
            and problem.traits.kv_layout == "dense"
            and not (problem.traits.seqused_q or problem.traits.seqused_k)
            and problem.traits.selection is None
        )
        shift = sizes.seqlen_k - sizes.seqlen_q if fixed else None
        yield _Group(everything, sizes.seqlen_q, problem.keys, shift, shift)
        return
    members: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for i, (rows, keys) in enumerate(torch.stack([lengths.q_len, lengths.keys], 1).tolist()):
        if rows:
            padded_rows = 1 << (rows - 1).bit_length()
            members[padded_rows, -(-keys // _GROUP_TILE)].append((i, rows, keys))
    for group in members.values():
        index, rows, keys = zip(*group, strict=True)
        shifts: list[int | None] = [k - r for r, k in zip(rows, keys, strict=True)]
        if problem.traits.selection is not None:
            shifts = [None]  # slots say nothing about positions
        lo, hi = min(shifts), max(shifts)  # type: ignore[type-var]
        yield _Group(torch.tensor(index), max(rows), max(keys), lo, hi)


def blocks(o: Operands, problem: Problem, budget: int, keys_at_once: int | None) -> Iterator[Block]:
    """Cut a call into blocks whose score tile has at most about `budget` elements.

    `keys_at_once` is the width of the score tile that the caller works on; None for all keys.
    """
    lengths = Lengths.of(o, problem)
    group_size, nheads_kv = problem.traits.q_heads_per_kv_head, problem.sizes.nheads_kv
    for group in _groups(problem, lengths):
        width = max(1, group.keys if keys_at_once is None else min(keys_at_once, group.keys))
        rows = min(group.rows, max(1, budget // (width * group_size)))
        heads = min(nheads_kv, max(1, budget // (width * group_size * rows)))
        if problem.traits.selection is not None:
            heads = 1  # each has keys of its own
        count = max(1, budget // (width * group_size * rows * heads))
        for n in range(0, len(group.sequences), count):
            sequences = group.sequences[n : n + count]
            for h in range(0, nheads_kv, heads):
                gathered = _Gathered.of(o, problem, lengths, group, sequences, slice(h, h + heads))
                for r in range(0, group.rows, rows):
                    yield gathered.block(problem, group, r, min(r + rows, group.rows))


@dataclass(frozen=True)
class _Gathered:
    """All rows and keys of some sequences and heads, as dense tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    sink: Tensor | None
    q_len: Tensor
    k_len: Tensor
    keys: Tensor
    token: Tensor | None
    sequences: Tensor
    heads_kv: slice

    @classmethod
    def of(
        cls,
        o: Operands,
        problem: Problem,
        lengths: Lengths,
        group: _Group,
        sequences: Tensor,
        heads: slice,
    ) -> _Gathered:
        traits, g = problem.traits, problem.traits.q_heads_per_kv_head
        q_heads = slice(heads.start * g, heads.stop * g)
        rows = _Rows.of_q(o, lengths, sequences, group.rows)
        token, count = None, lengths.keys[sequences]
        if o.selection is not None:
            count = _selected(o, problem)[sequences, heads.start]
            token = _tokens(o, problem, lengths, sequences, heads.start, group.keys)
        keys = _Rows.of_kv(o, lengths, sequences, group.keys, token)
        return cls(
            q=rearrange(rows.take(o.q[..., q_heads, :]), "n r (hk g) d -> n hk g r d", g=g),
            k=rearrange(keys.take(o.k[..., heads, :]), "n s hk d -> n hk s d"),
            v=rearrange(keys.take(o.v[..., heads, :]), "n s hk d -> n hk s d"),
            q_scale=_q_scale(o, traits.q_descale, rows, sequences, heads, g),
            k_scale=_kv_scale(o.k_descale, traits.k_descale, keys, sequences, heads),
            v_scale=_kv_scale(o.v_descale, traits.v_descale, keys, sequences, heads),
            sink=None
            if o.learnable_sink is None
            else rearrange(o.learnable_sink[q_heads].float(), "(hk g) -> hk g 1", g=g),
            q_len=lengths.q_len[sequences],
            k_len=lengths.k_len[sequences],
            keys=count,
            token=token,
            sequences=sequences,
            heads_kv=heads,
        )

    def block(self, problem: Problem, group: _Group, start: int, stop: int) -> Block:
        row = torch.arange(start, stop, device=self.q.device)
        lo, hi = 0, group.keys
        if group.shift_lo is not None and group.shift_hi is not None:
            left, right = problem.sizes.window_left, problem.sizes.window_right
            if left is not None:
                lo = max(lo, start + group.shift_lo - left)
            if right is not None:
                hi = min(hi, stop + group.shift_hi + right)
        q_scale = self.q_scale
        if q_scale is not None and q_scale.shape[-2] > 1:
            q_scale = q_scale[..., start:stop, :]
        return Block(
            q=self.q[..., start:stop, :],
            k=self.k,
            v=self.v,
            q_scale=q_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            sink=self.sink,
            position=row + (self.k_len - self.q_len)[:, None],
            keys=self.keys,
            token=self.token,
            rows_used=row < self.q_len[:, None],
            key_lo=lo,
            key_hi=max(lo, hi),
            heads_kv=self.heads_kv,
            sequences=self.sequences,
            row_start=start,
        )


def _tokens(
    o: Operands, problem: Problem, lengths: Lengths, sequences: Tensor, head: int, count: int
) -> Tensor:
    """Positions of the chosen keys of a KV head, (n, count); -1 where an entry does not count."""
    if o.selection is None:
        raise ValueError("nothing is selected")
    slot = torch.arange(count, device=o.selection.device)
    per_entry = o.k.shape[1] if problem.traits.selection == "pages" else 1
    entries = o.selection[sequences, head].long()[:, slot // per_entry]
    token = entries * per_entry + slot % per_entry
    counts = (entries >= 0) & (token < lengths.k_len[sequences][:, None])
    counts &= slot < _selected(o, problem)[sequences, head][:, None]
    return torch.where(counts, token, -1)


@dataclass(frozen=True)
class _Rows:
    """Index of `count` rows of each sequence in an operand's leading dimensions.

    `index` has one (n, count) tensor per leading dimension; `used` says which rows exist. Gathering
    reads before it can choose, so where a packed row or a page does not exist (its index may be
    wild) the index is 0: an operand that is not empty has a row 0, `_take` gathers nothing from an
    empty one, and whatever row 0 holds is replaced by `fill` before any arithmetic.
    """

    index: tuple[Tensor, ...]
    used: Tensor

    @classmethod
    def of_q(cls, o: Operands, lengths: Lengths, sequences: Tensor, count: int) -> _Rows:
        packed = o.cu_seqlens_q is not None
        start, length = lengths.q_start[sequences], lengths.q_len[sequences]
        return cls._at(sequences, start, length, count, packed)

    @classmethod
    def of_kv(
        cls, o: Operands, lengths: Lengths, sequences: Tensor, count: int, token: Tensor | None
    ) -> _Rows:
        """Of the keys at positions `token` (n, count), or at all."""
        length = lengths.k_len[sequences]
        if token is None and o.page_table is None:
            packed = o.cu_seqlens_k is not None
            return cls._at(sequences, lengths.k_start[sequences], length, count, packed)
        slot = torch.arange(count, device=length.device) if token is None else token.clamp(min=0)
        used = slot < length[:, None] if token is None else token >= 0
        if o.page_table is None:
            return cls((sequences[:, None].expand_as(used), slot), used)
        page_size = o.k.shape[1]
        table = o.page_table[sequences].long()
        page = table[:, slot // page_size] if token is None else table.gather(1, slot // page_size)
        return cls((torch.where(used, page, 0), (slot % page_size).expand_as(used)), used)

    @classmethod
    def _at(
        cls, sequences: Tensor, start: Tensor, length: Tensor, count: int, packed: bool
    ) -> _Rows:
        slot = torch.arange(count, device=length.device)
        used = slot < length[:, None]
        if packed:
            return cls((torch.where(used, start[:, None] + slot, 0),), used)
        return cls((sequences[:, None].expand_as(used), slot.expand_as(used)), used)

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """Rows of `x`, (n, count, ...), with `fill` where no row exists."""
        if x.element_size() == 1:
            codes = x.view(torch.uint8)  # indexing kernels exist for bytes on every device
            return self._take(codes, 0).view(x.dtype)
        return self._take(x, fill)

    def _take(self, x: Tensor, fill: float) -> Tensor:
        n, count = self.used.shape
        if count == 0 or x.shape[: len(self.index)].numel() == 0:
            return x.new_full((n, count, *x.shape[len(self.index) :]), fill)
        taken = x[self.index]
        used = self.used.reshape(n, count, *([1] * (taken.ndim - 2)))
        return torch.where(used, taken, fill)


def _q_scale(
    o: Operands, kind: Descale | None, rows: _Rows, sequences: Tensor, heads: slice, g: int
) -> Tensor | None:
    if kind is None or o.q_descale is None:
        return None
    scale = o.q_descale
    if kind.granularity == "tensor":
        return scale.reshape(1, 1, 1, 1, 1)
    picked = slice(heads.start * g, heads.stop * g) if kind.per_query_head else heads
    scale = _rows_of_scale(scale[..., picked], kind, rows, sequences)
    return rearrange(scale, "n r (hk g) -> n hk g r 1", g=g if kind.per_query_head else 1)


def _kv_scale(
    scale: Tensor | None, kind: Descale | None, keys: _Rows, sequences: Tensor, heads: slice
) -> Tensor | None:
    if kind is None or scale is None:
        return None
    if kind.granularity == "tensor":
        return scale.reshape(1, 1, 1)
    return rearrange(_rows_of_scale(scale[..., heads], kind, keys, sequences), "n s hk -> n hk s")


def _rows_of_scale(scale: Tensor, kind: Descale, rows: _Rows, sequences: Tensor) -> Tensor:
    """(n, rows or 1, heads) of any granularity but "tensor"; 1.0 where no row exists."""
    if kind.granularity == "head":
        return repeat(scale, "h -> n 1 h", n=len(sequences))
    if kind.granularity == "batch_head":
        return scale[sequences][:, None]
    if len(rows.index) == 1:  # packed: (1, total, heads)
        scale = scale[0]
    return rows.take(scale, fill=1.0)
