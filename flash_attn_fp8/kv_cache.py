"""A quantised KV cache: codes in 8 bits, their fp32 scales, and the append that writes both.

    real value = code * scale

A scale belongs to a token and KV head, found when the token is appended (amax(|row|) / format max;
exactly what `quantize(per="token_head")` gives), or is static: one per head or per tensor, which
the caller calibrated, and which is read and never written. The cache is contiguous, (batch,
capacity, ...), or paged, (num_pages, page_size, ...) with a page table. docs/kv_cache.md has the
layouts in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.call import describe
from flash_attn_fp8.check_buffers import overlaps
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.formats import QUANTIZED, dtype_name, format_of
from flash_attn_fp8.kv_append import (
    MAX_HEAD_DIM,
    Append,
    Nonfinite,
    check_executor,
    check_metadata,
    check_options,
    execute,
    granularity,
    value_faults,
)
from flash_attn_fp8.overlap import share_memory
from flash_attn_fp8.packed import rows_in_use, sequence_of_rows
from flash_attn_fp8.quantization import Quantized

_ROW = 16  # bytes that a row with its scale behind it is a multiple of: a vector of the kernels
_SCALE = 4  # bytes

# What the two functions call the fields of an append.
_FUNCTION_NAMES = {"slots": "slot_mapping"}
_METHOD_NAMES = {
    "k_cache": "cache.k",
    "v_cache": "cache.v",
    "k_scale_cache": "cache.k_descale",
    "v_scale_cache": "cache.v_descale",
    "k_scale": "cache.k_descale",
    "v_scale": "cache.v_descale",
    "slots": "slot_mapping",
}


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    nonfinite: Nonfinite = "raise",
    check: bool = True,
    impl: str | None = None,
) -> None:
    """Quantise new keys and values into slots of a cache, in one pass over them.

    Give either the two scale caches, which are written, or the two static scales, which are read.
    What is in other slots is not touched, and a failed append writes nothing.

    Args:
        k, v: (tokens, nheads_kv, head_dim[_v]) or (batch, s, nheads_kv, head_dim[_v]); bf16, fp16
            or fp32, any strides, the last dimension contiguous.
        k_cache, v_cache: (num_pages, page_size, nheads_kv, head_dim[_v]) or (batch, capacity, ...),
            e4m3, e5m2 or int8, any strides, the last dimension contiguous. Head dims are multiples
            of 8 up to 256.
        slot_mapping: (tokens,) int32 or int64: page * page_size + offset, or sequence * capacity +
            position. Negative: the token is skipped, and may hold anything. No slot twice.
        k_scale_cache, v_scale_cache: (num_pages, page_size, nheads_kv) fp32, any strides.
        k_scale, v_scale: fp32, () or (1,) or (nheads_kv,). Larger numbers saturate.
        nonfinite: "raise" refuses tokens with an infinity or NaN. "keep" does with them what
            `quantize` does; static scales of int8 have nothing to mark a NaN with and refuse it.
        check: whether slots, static scales and numbers are looked at. On CUDA that is a
            synchronisation; without it (in CUDA graphs) slots past the pool are skipped, NaN is 0
            in int8 with static scales, and which of two tokens in a slot stays is undefined.
        impl: None (the kernel on CUDA, torch elsewhere), "cute", "sim" or "reference"; all have
            the same bits.

    Raises:
        InvalidArguments: with every fault, before anything is written.
        Unsupported: the tensors require grad, or the executor does not run on their device.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> k = torch.randn(3, 2, 64, dtype=torch.bfloat16)
        >>> cache = torch.zeros(8, 16, 2, 64, dtype=torch.float8_e4m3fn)
        >>> scales = torch.zeros(8, 16, 2)
        >>> slots = torch.tensor([37, -1, 5])
        >>> fa.append_kv(k, k, cache, cache.clone(), slots, k_scale_cache=scales,
        ...              v_scale_cache=scales.clone())
        >>> bool((scales[37 // 16, 37 % 16] == k[0].float().abs().amax(-1) / 448).all())
        True
    """
    append = Append(
        k, v, k_cache, v_cache, slot_mapping, k_scale_cache, v_scale_cache, k_scale, v_scale
    )
    refusal = Refusal(names=_FUNCTION_NAMES)
    _check(append, refusal, "append_kv", nonfinite, check, impl)
    execute(append, impl)


def _check(
    append: Append,
    refusal: Refusal,
    function: str,
    nonfinite: Nonfinite,
    check: bool,
    impl: str | None,
) -> None:
    names = dict(refusal.names)
    check_options(nonfinite, check, impl, refusal)
    check_metadata(append, refusal)
    if not refusal.reasons:
        check_executor(append, impl, refusal)
    if check and not refusal.reasons and append.slots.shape[0]:
        refusal.invalid.extend(value_faults(append, nonfinite, names))
    if refusal.reasons:
        raise refusal.error(append.described(function, names))


class QuantizedKVCache:
    """The keys and values of a batch of sequences in 8 bits, with their scales.

    Its tensors are what `flash_attn_with_kvcache` takes (`attention_arguments`), and stay the same
    objects, so that CUDA graphs may capture appends and attention:

        k, v          (batch, capacity, nheads_kv, head_dim[_v]) codes; paged (num_pages, page_size,
                      nheads_kv, head_dim[_v])
        k_descale,    fp32: (batch, capacity, nheads_kv), paged (num_pages, page_size, nheads_kv);
        v_descale     or static: () or (nheads_kv,)
        seqlens       (batch,) int32: tokens of each sequence; yours to set
        page_table    (batch, pages of a sequence) int32, negative where there is no page yet; yours
                      to set; None where the cache is contiguous

    Args:
        batch: sequences.
        capacity: tokens that each has room for; paged, it is rounded up to whole pages.
        nheads_kv: KV heads.
        head_dim: of k; a multiple of 8 up to 256.
        head_dim_v: of v; head_dim by default.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8 (`quantize` says which suits).
        page_size: tokens of a page, 1 or more; None: contiguous.
        num_pages: pages of the pool, which page_table is then to be filled with (it is -1). None:
            as many as all sequences need, given out in order.
        k_scale, v_scale: static scales, fp32, () or (1,) or (nheads_kv,); both or none.
        inline_scales: keep a row's scale right behind its codes, in rows of a multiple of 16 bytes.
        device: where the tensors are; that of k_scale, or torch's default.

    Raises:
        InvalidArguments: with every fault.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> cache = fa.QuantizedKVCache(2, 100, 2, 64, page_size=16)
        >>> k = torch.randn(2, 20, 2, 64, dtype=torch.bfloat16)
        >>> cache.append(k, k)
        >>> cache.append(k[:, :1], k[:, :1])
        >>> cache.seqlens.tolist(), cache.k.shape
        ([21, 21], torch.Size([14, 16, 2, 64]))
        >>> q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
        >>> fa.flash_attn_with_kvcache(q, **cache.attention_arguments()).shape
        torch.Size([2, 1, 8, 64])
    """

    k: Tensor
    v: Tensor
    k_descale: Tensor
    v_descale: Tensor
    seqlens: Tensor
    page_table: Tensor | None

    def __init__(
        self,
        batch: int,
        capacity: int,
        nheads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        page_size: int | None = None,
        num_pages: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        inline_scales: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        refusal = Refusal()
        counts = dict(batch=batch, capacity=capacity, nheads_kv=nheads_kv)
        optional = dict(page_size=page_size, num_pages=num_pages)
        counts |= {name: n for name, n in optional.items() if n is not None}
        _check_counts(counts, dict(head_dim=head_dim, head_dim_v=head_dim_v), refusal)
        if not isinstance(dtype, torch.dtype) or format_of(dtype) not in QUANTIZED:
            refusal.invalid.append(f"dtype={dtype} must be e4m3, e5m2 or int8, as torch names them")
        _check_static(k_scale, v_scale, nheads_kv, inline_scales, refusal)
        if num_pages is not None and page_size is None:
            refusal.invalid.append("num_pages is of a paged cache; give page_size")
        if refusal.reasons:
            raise refusal.error(f"QuantizedKVCache({batch}, {capacity}, {nheads_kv}, {head_dim})")
        if device is None and k_scale is not None:
            device = k_scale.device
        rows, table = (batch, capacity), None
        if page_size is not None:
            columns = -(-capacity // page_size)
            rows = (batch * columns if num_pages is None else num_pages, page_size)
            table = torch.full((batch, columns), -1, dtype=torch.int32, device=device)
            if num_pages is None:
                table.copy_(torch.arange(batch * columns).reshape(batch, columns))
        made = []
        for width, static in ((head_dim, k_scale), (head_dim_v, v_scale)):
            shape = (*rows, nheads_kv, width)
            codes, scale = _pool(shape, dtype, inline_scales, device)
            made.append((codes, scale if static is None else static))
        seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        (k, k_descale), (v, v_descale) = made
        self._take(k, v, k_descale, v_descale, seqlens, table)

    @classmethod
    def adopt(
        cls,
        k: Tensor,
        v: Tensor,
        *,
        k_descale: Tensor,
        v_descale: Tensor,
        seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
    ) -> QuantizedKVCache:
        """A cache in tensors that there are, whatever their strides: padded pages, inline scales.

        Args:
            k, v: codes, as the attributes; e4m3, e5m2 or int8, the last dimension contiguous.
            k_descale, v_descale: of three dimensions: a scale a token and head, written by appends;
                of none or one: static, read.
            seqlens: (batch,) int32; zeros by default.
            page_table: (batch, pages of a sequence) int32; None: the cache is contiguous.

        Raises:
            InvalidArguments: with every fault.

        Example:
            >>> import torch, flash_attn_fp8 as fa
            >>> pool = torch.zeros(4, 128, 2, 80, dtype=torch.uint8)  # 64 codes, a scale, a pad
            >>> codes = pool[..., :64].view(torch.int8)
            >>> scales = pool[..., 64:68].view(torch.float32)[..., 0]
            >>> pool_v = pool.clone()
            >>> cache = fa.QuantizedKVCache.adopt(
            ...     codes, pool_v[..., :64].view(torch.int8), k_descale=scales,
            ...     v_descale=pool_v[..., 64:68].view(torch.float32)[..., 0])
            >>> cache
            QuantizedKVCache(int8, per token_head, batch 4 of 128 tokens, 2 heads of 64)
        """
        cache = cls.__new__(cls)
        refusal = Refusal()
        given = dict(k=k, v=v, k_descale=k_descale, v_descale=v_descale)
        lengths = {
            n: t for n, t in dict(seqlens=seqlens, page_table=page_table).items() if t is not None
        }
        _check_adopted(given, lengths, refusal)
        if refusal.reasons:
            shown = ", ".join(f"{n}={describe(t)}" for n, t in (given | lengths).items())
            raise refusal.error(f"QuantizedKVCache.adopt({shown})")
        if seqlens is None:
            batch = k.shape[0] if page_table is None else page_table.shape[0]
            seqlens = torch.zeros(batch, dtype=torch.int32, device=k.device)
        cache._take(k, v, k_descale, v_descale, seqlens, page_table)
        return cache

    def _take(
        self,
        k: Tensor,
        v: Tensor,
        k_descale: Tensor,
        v_descale: Tensor,
        seqlens: Tensor,
        page_table: Tensor | None,
    ) -> None:
        self.k, self.v, self.k_descale, self.v_descale = k, v, k_descale, v_descale
        self.seqlens, self.page_table = seqlens, page_table

    def __repr__(self) -> str:
        pages = (
            "" if self.page_table is None else f" in {self.k.shape[0]} pages of {self.page_size}"
        )
        dims = {self.k.shape[3], self.v.shape[3]}
        return (
            f"QuantizedKVCache({dtype_name(self.k.dtype)}, per {self.per}, batch {self.batch} of "
            f"{self.capacity} tokens{pages}, {self.k.shape[2]} heads of "
            f"{' and '.join(map(str, sorted(dims, reverse=True)))})"
        )

    @property
    def batch(self) -> int:
        return self.seqlens.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        if self.page_table is None:
            return self.k.shape[1]
        return self.page_table.shape[1] * self.k.shape[1]

    @property
    def page_size(self) -> int | None:
        return None if self.page_table is None else self.k.shape[1]

    @property
    def per(self) -> str:
        """What shares a scale: "token_head", "head" or "tensor"."""
        if self.k_descale.ndim == 3:
            return "token_head"
        return str(granularity(None, self.k_descale, self.v_descale))

    def attention_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `flash_attn_with_kvcache` that are the cache's."""
        return dict(
            k_cache=self.k,
            v_cache=self.v,
            cache_seqlens=self.seqlens,
            page_table=self.page_table,
            k_descale=self.k_descale,
            v_descale=self.v_descale,
        )

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        slot_mapping: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        nonfinite: Nonfinite = "raise",
        check: bool = True,
        impl: str | None = None,
    ) -> None:
        """Quantise new tokens into the cache; those that it holds are not touched.

        Args:
            k, v: (batch, s, nheads_kv, head_dim[_v]): s tokens for each sequence, behind those that
                it has; or packed (total, nheads_kv, head_dim[_v]) with cu_seqlens or slot_mapping.
                bf16, fp16 or fp32, any strides, the last dimension contiguous.
            slot_mapping: (tokens,) int32 or int64, as in `append_kv`: where each token goes. Then
                `seqlens` stays as it is, and is yours to advance.
            cu_seqlens: (batch + 1,) int32: whose the packed rows are. Those of nobody are skipped.
            nonfinite: "raise" or "keep", as in `append_kv`.
            check: whether data is looked at: lengths, pages, slots, static scales, numbers. On CUDA
                that synchronises. Without it, tokens that have no place (past the capacity,
                on a page that is not there) are skipped, and lengths stop at the capacity.
            impl: as in `append_kv`.

        Raises:
            InvalidArguments: with every fault; then bytes, scales and lengths are as they were.
            Unsupported: as `append_kv`.
        """
        refusal = Refusal(names=_METHOD_NAMES)
        counts = None
        if slot_mapping is None:
            bounds_wanted = _check_new(self, k, v, cu_seqlens, refusal)
            if refusal.reasons:
                raise refusal.error(f"{self!r}.append(k={describe(k)}, v={describe(v)})")
            slot_mapping, counts = self._slots(k, cu_seqlens if bounds_wanted else None)
            if check:
                refusal.invalid += self._faults_of_places(counts, cu_seqlens, k.shape[0])
        elif cu_seqlens is not None:
            refusal.invalid.append("slot_mapping says where tokens go; leave cu_seqlens out")
        static = self.per != "token_head"
        scales = (self.k_descale, self.v_descale)
        append = Append(
            k, v, self.k, self.v, slot_mapping, *((None, None, *scales) if static else scales)
        )
        _check(append, refusal, "append", nonfinite, check, impl)
        execute(append, impl)
        if counts is not None:
            self.seqlens.add_(counts).clamp_(max=self.capacity)

    def _slots(self, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """(slot of each token, negative where it has no place; new tokens of each sequence)."""
        if cu_seqlens is None:
            number = torch.arange(k.shape[1], device=k.device)
            sequence = torch.arange(self.batch, device=k.device)[:, None].expand(-1, k.shape[1])
            position = (self.seqlens[:, None] + number).flatten().long()
            sequence = sequence.flatten()
            placed = (position >= 0) & (position < self.capacity)
            counts = self.seqlens.new_full((self.batch,), k.shape[1])
        else:
            total = k.shape[0]
            sequence = sequence_of_rows(cu_seqlens, total)
            number = torch.arange(total, device=k.device) - cu_seqlens[sequence]
            position = self.seqlens[sequence].long() + number
            placed = (position >= 0) & (position < self.capacity) & rows_in_use(cu_seqlens, total)
            counts = cu_seqlens.diff()
        position = position.clamp(0, max(self.capacity - 1, 0))
        if self.page_table is None:
            return torch.where(placed, sequence * self.capacity + position, -1), counts
        size = self.k.shape[1]
        if self.page_table.numel() == 0:
            return torch.full_like(position, -1), counts
        page = self.page_table[sequence, position // size].long()
        placed = placed & (page >= 0) & (page < self.k.shape[0])
        return torch.where(placed, page * size + position % size, -1), counts

    def _faults_of_places(self, counts: Tensor, cu_seqlens: Tensor | None, total: int) -> list[str]:
        """Why new tokens find no place."""
        faults: list[str] = []
        if cu_seqlens is not None:
            edges = cu_seqlens.tolist()
            if edges[0] != 0 or edges != sorted(edges) or edges[-1] > total:
                return [
                    f"cu_seqlens={edges} must start at 0, not decrease, and end within the "
                    f"{total} packed rows"
                ]
        length, more = self.seqlens.long(), counts.long()
        broken = (length < 0) | (length > self.capacity)
        full = ~broken & (length + more > self.capacity)
        homeless = torch.zeros_like(broken)[:, None]
        if self.page_table is not None:
            start = torch.arange(self.page_table.shape[1], device=length.device) * self.k.shape[1]
            end = start + self.k.shape[1]
            needed = (start < (length + more)[:, None]) & (end > length[:, None])
            there = (self.page_table >= 0) & (self.page_table < self.k.shape[0])
            homeless = needed & ~there & ~(broken | full | (more <= 0))[:, None]
        if not bool(torch.cat([broken, full, homeless.any(-1)]).any()):
            return faults
        for b in broken.nonzero().flatten().tolist():
            faults.append(f"cache.seqlens[{b}]={int(length[b])} must be from 0 to {self.capacity}")
        for b in full.nonzero().flatten().tolist():
            faults.append(
                f"sequence {b} has {int(length[b])} tokens and {int(more[b])} more do not fit: "
                f"its capacity is {self.capacity}"
            )
        for b in homeless.any(-1).nonzero().flatten().tolist():
            column = int(homeless[b].nonzero()[0])
            page = -1 if self.page_table is None else int(self.page_table[b, column])
            faults.append(
                f"sequence {b} is out of pages: cache.page_table[{b}, {column}]={page}, and pages "
                f"are from 0 to {self.k.shape[0] - 1}"
            )
        return faults

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """(k, v) in fp32, (batch, capacity, nheads_kv, head_dim[_v]); 0 past each length."""
        slot = torch.arange(self.capacity, device=self.k.device)
        used = slot < self.seqlens[:, None]
        found = []
        for codes, scale in ((self.k, self.k_descale), (self.v, self.v_descale)):
            if self.page_table is not None:
                size = self.k.shape[1]
                page = self.page_table[:, slot // size].long().clamp(0, self.k.shape[0] - 1)
                codes = codes.view(torch.uint8)[page, slot % size].view(codes.dtype)
                scale = scale[page, slot % size] if scale.ndim == 3 else scale
            if scale.numel() == 1 and scale.ndim < 3:
                scale = scale.reshape(())
            x = Quantized(codes, scale).dequantize()
            found.append(torch.where(used[..., None, None], x, 0.0))
        return found[0], found[1]


# ------------------------------------------------------------------- what a cache is made of


def _pool(
    shape: tuple[int, ...], dtype: torch.dtype, inline: bool, device: Any
) -> tuple[Tensor, Tensor]:
    """Codes of a shape, and a scale for each row."""
    if not inline:
        codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
        return codes, torch.zeros(shape[:-1], dtype=torch.float32, device=device)
    width = shape[-1]
    row = -(-(width + _SCALE) // _ROW) * _ROW
    pool = torch.zeros((*shape[:-1], row), dtype=torch.uint8, device=device)
    scales = pool[..., width : width + _SCALE].view(torch.float32)[..., 0]
    return pool[..., :width].view(dtype), scales


def _check_counts(counts: dict[str, int], dims: dict[str, int], refusal: Refusal) -> None:
    for name, n in (counts | dims).items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            refusal.invalid.append(f"{name}={n!r} must be an integer of at least 1")
        elif name in dims and (n % 8 or n > MAX_HEAD_DIM):
            refusal.invalid.append(f"{name}={n} must be a multiple of 8 up to {MAX_HEAD_DIM}")


def _check_static(
    k_scale: object, v_scale: object, heads: object, inline: object, refusal: Refusal
) -> None:
    bad = refusal.invalid.append
    if not isinstance(inline, bool):
        bad(f"inline_scales={inline!r} must be True or False")
    if (k_scale is None) != (v_scale is None):
        bad("give k_scale and v_scale, or neither")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if inline is True:
            bad(f"{name} is static, and inline_scales=True keeps a scale with each row; drop one")
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            bad(f"{name} must be an fp32 tensor, got {describe(scale)}")
        elif scale.shape not in ((), (1,), (heads,)):
            bad(f"{name} must have shape [], [1] or [{heads}], got {describe(scale)}")


def _check_adopted(given: dict[str, Tensor], lengths: dict[str, Tensor], refusal: Refusal) -> None:
    """Faults of a cache's tensors: those that an append finds, with no new tokens."""
    bad = refusal.invalid.append
    for name, t in (given | lengths).items():
        if not isinstance(t, Tensor):
            bad(f"{name} must be a torch.Tensor, got {describe(t)}")
    if refusal.invalid:
        return
    k, v, k_descale, v_descale = given.values()
    if k.ndim != 4 or v.ndim != 4:
        bad(f"k and v must be (batch, capacity, nheads_kv, head_dim) or pages, got {describe(k)}")
        return
    if (k_descale.ndim == 3) != (v_descale.ndim == 3):
        bad("k_descale and v_descale must both be per token and head, or both be static")
        return
    empty = [torch.empty(0, *t.shape[2:], dtype=torch.bfloat16, device=t.device) for t in (k, v)]
    slots = torch.empty(0, dtype=torch.int32, device=k.device)
    written = k_descale.ndim == 3
    scales = (k_descale, v_descale) if written else (None, None, k_descale, v_descale)
    renamed = {name: text.removeprefix("cache.") for name, text in _METHOD_NAMES.items()}
    inner = Refusal(names=renamed)
    check_metadata(Append(empty[0], empty[1], k, v, slots, *scales), inner)
    refusal.invalid += inner.invalid
    refusal.unsupported += inner.unsupported
    batch = k.shape[0]
    if "page_table" in lengths:
        batch = lengths["page_table"].shape[0] if lengths["page_table"].ndim == 2 else -1
        if lengths["page_table"].dtype != torch.int32 or batch < 0:
            bad(f"page_table must be a matrix of int32, got {describe(lengths['page_table'])}")
    seqlens = lengths.get("seqlens")
    if seqlens is not None and batch >= 0:
        if seqlens.dtype != torch.int32 or seqlens.shape != (batch,):
            bad(f"seqlens must be {batch} int32, got {describe(seqlens)}")
        elif overlaps(seqlens):
            bad("seqlens has elements that share memory; clone it")
    for name, t in lengths.items():
        if t.device != k.device:
            bad(f"{name} is on {t.device}, k on {k.device}")
        elif any(share_memory(t, u) for u in given.values()):
            bad(f"{name} shares memory with the cache; give it memory of its own")


def _check_new(
    cache: QuantizedKVCache, k: object, v: object, cu_seqlens: object, refusal: Refusal
) -> bool:
    """Faults that keep slots from being made; whether cu_seqlens bounds the new tokens."""
    bad = refusal.invalid.append
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            bad(f"{name} must be a torch.Tensor, got {describe(t)}")
        elif t.device != cache.k.device:
            bad(f"{name} is on {t.device}, the cache on {cache.k.device}")
    if refusal.invalid or not isinstance(k, Tensor):
        return False
    if cu_seqlens is None:
        if k.ndim != 4:
            bad("packed tokens need cu_seqlens or slot_mapping, which say where they go")
        elif k.shape[0] != cache.batch:
            bad(f"k has {k.shape[0]} sequences and the cache {cache.batch}")
        return False
    if k.ndim != 3:
        bad(f"cu_seqlens is for packed tokens, (total, nheads_kv, head_dim); k is {describe(k)}")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        bad(f"cu_seqlens must be a vector of int32, got {describe(cu_seqlens)}")
    elif cu_seqlens.shape != (cache.batch + 1,):
        bad(f"cu_seqlens must have {cache.batch + 1} elements, got {describe(cu_seqlens)}")
    elif cu_seqlens.device != cache.k.device:
        bad(f"cu_seqlens is on {cu_seqlens.device}, the cache on {cache.k.device}")
    return True
