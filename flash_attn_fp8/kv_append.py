"""What an append to a quantised cache is: its faults, and who carries it out.

Everything is checked before anything is written. What shapes, types and memory show is always
checked; slots, scales and numbers (`value_faults`) are data, which costs a synchronisation on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_fp8 import sim
from flash_attn_fp8.call import describe, literal
from flash_attn_fp8.check_buffers import overlaps
from flash_attn_fp8.checks import check_autograd
from flash_attn_fp8.errors import FlashAttnFp8Error, Refusal, Unsupported
from flash_attn_fp8.formats import (
    INT8,
    QUANTIZED,
    Format,
    dtype_name,
    format_of,
    saturating_cast,
)
from flash_attn_fp8.overlap import share_memory
from flash_attn_fp8.packed import spread
from flash_attn_fp8.quantization import quantize
from flash_attn_fp8.simulation import settings
from flash_attn_fp8.specs import AppendSpec
from flash_attn_fp8.target import compute_capability, has_fp8, target_of

Nonfinite = Literal["raise", "keep"]
Granularity = Literal["token_head", "head", "tensor"]

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
IMPLS = (None, "cute", "sim", "reference")
MAX_HEAD_DIM = 256
_VECTOR = 16  # bytes
_INT32 = 2**31
_MAX_GRID = 2**16 - 1  # of a grid's third dimension
_OLDEST = 80  # compute capability


class Append(NamedTuple):
    """New tokens, where they go, and the scales: one kind of the two is given.

    k, v: (batch, s, heads, d[v]) or (tokens, heads, d[v]). slots: one a token.
    """

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale_cache: Tensor | None = None
    v_scale_cache: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def per(self) -> Granularity:
        return granularity(self.k_scale_cache, self.k_scale, self.v_scale)

    @property
    def format(self) -> Format:
        found = format_of(self.k_cache.dtype)
        if found is None:
            raise FlashAttnFp8Error(f"an append that was not checked: {describe(self.k_cache)}")
        return found

    @property
    def num_slots(self) -> int:
        return self.k_cache.shape[0] * self.k_cache.shape[1]

    def described(self, function: str, names: dict[str, str]) -> str:
        """`append_kv(k=bf16[4, 2, 64], ...)`."""
        given = {n: t for n, t in self._asdict().items() if t is not None}
        shown = (f"{names.get(name, name)}={describe(t)}" for name, t in given.items())
        return f"{function}({', '.join(shown)})"


def granularity(
    written: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> Granularity:
    """What shares a scale, as `quantize` names it."""
    if written is not None:
        return "token_head"
    sizes = [s.numel() for s in (k_scale, v_scale) if s is not None]
    return "head" if max(sizes, default=1) > 1 else "tensor"


# ------------------------------------------------------------------------------ metadata


Ranges = tuple[tuple[int, int], ...]

_right: dict[tuple[object, ...], Ranges] = {}  # what right appends look like, and where they write
_MEMO_LIMIT = 4096


def check_metadata(a: Append, refusal: Refusal) -> None:
    """Every fault that needs no data; a look-up for an append like one that was right."""
    key = _metadata(a)
    written = None if key is None else _right.get(key)
    if written is not None and _reads_elsewhere(a, written):
        return
    _check_all(a, refusal)
    if key is not None and not refusal.reasons:
        if len(_right) >= _MEMO_LIMIT:
            _right.clear()
        caches = (a.k_cache, a.v_cache, a.k_scale_cache, a.v_scale_cache)
        _right[key] = tuple(_range(t) for t in caches if t is not None)


def _metadata(a: Append) -> tuple[object, ...] | None:
    """All that the checks look at but the addresses of what is read; None: look again."""
    if forward_ad._current_level >= 0:
        return None
    key: list[object] = []
    for t in a:
        if t is None:
            key.append(None)
        elif type(t) is not Tensor or t.requires_grad or t.is_meta:
            return None
        else:
            key += (t.shape, t.stride(), t.dtype, t.device)
    for t in (a.k_cache, a.v_cache, a.k_scale_cache, a.v_scale_cache):
        key.append(None if t is None else t.data_ptr())
    return tuple(key)


def _range(t: Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _reads_elsewhere(a: Append, written: Ranges) -> bool:
    """Whether no storage that is read is one that is written; if one is, only a search can tell."""
    for t in (a.k, a.v, a.slots, a.k_scale, a.v_scale):
        if t is not None:
            start, end = _range(t)
            if any(start < other_end and other < end for other, other_end in written):
                return False
    return True


def _check_all(a: Append, refusal: Refusal) -> None:
    names = refusal.name
    bad = refusal.invalid.append
    optional = ("k_scale_cache", "v_scale_cache", "k_scale", "v_scale")
    for name, t in a._asdict().items():
        if not isinstance(t, Tensor) and not (t is None and name in optional):
            bad(f"{names(name)} must be a torch.Tensor, got {describe(t)}")
    if refusal.invalid:
        return
    _check_source(a, refusal)
    _check_cache(a, refusal)
    if refusal.invalid:
        return
    _check_scales(a, refusal)
    tokens = a.k.shape[:-2].numel()
    if a.slots.dtype not in (torch.int32, torch.int64) or a.slots.shape != (tokens,):
        bad(
            f"{names('slots')} must be a vector of int32 or int64 with an element for each of the "
            f"{tokens} tokens, got {describe(a.slots)}"
        )
    for name, t in a._asdict().items():
        if t is not None and t.device != a.k_cache.device:
            bad(f"{names(name)} is on {t.device}, {names('k_cache')} on {a.k_cache.device}")
    check_autograd({names(n): t for n, t in a._asdict().items() if t is not None}, refusal)
    if not refusal.reasons:
        _check_memory(a, refusal)


def _check_source(a: Append, refusal: Refusal) -> None:
    bad = refusal.invalid.append
    for name, t in (("k", a.k), ("v", a.v)):
        if t.dtype not in SOURCES:
            bad(f"{name} is {dtype_name(t.dtype)}; new tokens are bf16, fp16 or fp32")
        if t.ndim not in (3, 4):
            bad(f"{name} must be (tokens, nheads_kv, head_dim), or batched, got {describe(t)}")
        elif t.shape[-1] > 1 and t.stride(-1) != 1:
            bad(f"{name} must be contiguous in its last dimension, got {describe(t)}")
    if a.k.dtype != a.v.dtype:
        bad(f"k is {dtype_name(a.k.dtype)} and v {dtype_name(a.v.dtype)}; give them one dtype")
    if a.k.shape[:-1] != a.v.shape[:-1]:
        bad(f"k {list(a.k.shape)} and v {list(a.v.shape)} must agree in all but the head dim")


def _check_cache(a: Append, refusal: Refusal) -> None:
    bad, names = refusal.invalid.append, refusal.name
    for name, cache, new in (("k_cache", a.k_cache, a.k), ("v_cache", a.v_cache, a.v)):
        if format_of(cache.dtype) not in QUANTIZED:
            bad(f"{names(name)} is {dtype_name(cache.dtype)}; a cache has e4m3, e5m2 or int8 codes")
        if cache.ndim != 4:
            bad(
                f"{names(name)} must be (num_pages, page_size, nheads_kv, head_dim), got "
                f"{describe(cache)}"
            )
            continue
        bad_dim = cache.shape[-1] % 8 or not 8 <= cache.shape[-1] <= MAX_HEAD_DIM
        if bad_dim:
            bad(
                f"{names(name)} has head dim {cache.shape[-1]}; it must be a multiple of 8 up to "
                f"{MAX_HEAD_DIM}"
            )
        if cache.shape[-1] > 1 and cache.stride(-1) != 1:
            bad(f"{names(name)} must be contiguous in its last dimension, got {describe(cache)}")
        if new.ndim in (3, 4) and new.shape[-2:] != cache.shape[-2:]:
            bad(
                f"{name[0]} has {list(new.shape[-2:])} (heads, head dim) and {names(name)} "
                f"{list(cache.shape[-2:])}"
            )
        if cache.shape[:2].numel() >= _INT32:
            bad(f"{names(name)} has 2**31 slots or more; a pool may have fewer")
    if a.k_cache.dtype != a.v_cache.dtype or a.k_cache.shape[:-1] != a.v_cache.shape[:-1]:
        bad(
            f"{names('k_cache')} {describe(a.k_cache)} and {names('v_cache')} "
            f"{describe(a.v_cache)} must agree in dtype and in all but the head dim"
        )
    if a.k.ndim in (3, 4) and a.k.shape[-3] * a.k.shape[-2] >= _INT32:
        bad("k has 2**31 rows or more; append them in parts")


def _check_scales(a: Append, refusal: Refusal) -> None:
    bad, names = refusal.invalid.append, refusal.name
    written, static = (a.k_scale_cache, a.v_scale_cache), (a.k_scale, a.v_scale)
    given = [all(t is not None for t in kind) for kind in (written, static)]
    partly = [any(t is not None for t in kind) for kind in (written, static)]
    if given != partly or sum(given) != 1:
        bad(
            f"give either {names('k_scale_cache')} and {names('v_scale_cache')}, which are "
            f"written (one scale a token and head), or {names('k_scale')} and {names('v_scale')}, "
            f"which are read"
        )
        return
    heads = a.k_cache.shape[2]
    for name, t in a._asdict().items():
        if "scale" not in name or t is None:
            continue
        if t.dtype != torch.float32:
            bad(f"{names(name)} must be fp32, got {dtype_name(t.dtype)}")
        if name.endswith("cache"):
            if t.shape != a.k_cache.shape[:3]:
                bad(f"{names(name)} must have shape {list(a.k_cache.shape[:3])}, got {describe(t)}")
        elif t.shape not in ((), (1,), (heads,)):
            bad(f"{names(name)} must have shape [], [1] or [{heads}], got {describe(t)}")


def _check_memory(a: Append, refusal: Refusal) -> None:
    names = refusal.name
    written = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    tensors = {name: t for name, t in a._asdict().items() if t is not None}
    seen: set[str] = set()
    for name in written:
        t = tensors.get(name)
        if t is None:
            continue
        seen.add(name)
        if overlaps(t):
            refusal.invalid.append(
                f"{names(name)} has strides {list(t.stride())}, in which elements of its shape "
                f"{list(t.shape)} share memory; clone it"
            )
            continue
        for other, u in tensors.items():
            if other not in seen and share_memory(t, u):
                refusal.invalid.append(
                    f"{names(name)} shares memory with {names(other)}; give it memory of its own"
                )


def check_options(nonfinite: object, check: object, impl: object, refusal: Refusal) -> None:
    """Faults of what is no tensor."""
    if nonfinite not in get_args(Nonfinite):
        refusal.invalid.append(f"nonfinite={literal(nonfinite)} must be 'raise' or 'keep'")
    if not isinstance(check, bool):
        refusal.invalid.append(f"check={literal(check)} must be True or False")
    if impl not in IMPLS:
        refusal.invalid.append(f"impl={literal(impl)} must be None, 'cute', 'sim' or 'reference'")


def check_executor(a: Append, impl: str | None, refusal: Refusal) -> None:
    """Whether the executor that was asked for runs on this device."""
    device = a.k_cache.device
    if impl == "cute" and device.type != "cuda":
        refusal.unsupported.append(f"impl='cute' runs on CUDA tensors, these are on {device}")
    if impl == "sim" and device.type != "cpu":
        refusal.unsupported.append(f"impl='sim' simulates with CPU tensors, these are on {device}")


# ---------------------------------------------------------------------------------- data


def value_faults(a: Append, nonfinite: Nonfinite, names: dict[str, str]) -> Iterator[str]:
    """Faults of slots, static scales and numbers, with one synchronisation where there are none."""
    slots = a.slots.long()
    skipped = slots < 0
    ordered = slots.sort().values
    faults = {
        "beyond": slots >= a.num_slots,
        "twice": (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0),
    }
    for name, x in (("k", a.k), ("v", a.v)):
        tokens = slots.shape[0], -1
        if nonfinite == "raise":
            faults[name] = ~(x.isfinite().reshape(tokens).all(-1) | skipped)
        elif a.format is INT8 and a.per != "token_head":
            faults[name] = x.isnan().reshape(tokens).any(-1) & ~skipped
    least, largest = a.format.descale_limits
    for name, scale in (("k_scale", a.k_scale), ("v_scale", a.v_scale)):
        if scale is not None:
            flat = scale.reshape(-1)
            faults[name] = ~((flat >= least) & (flat <= flat.new_tensor(largest)))
    found = torch.stack([mask.any() for mask in faults.values()]).tolist()
    for (kind, mask), there in zip(faults.items(), found, strict=True):
        if there:
            yield _fault_of_value(kind, int(mask.nonzero()[0]), a, ordered, nonfinite, names)


def _fault_of_value(
    kind: str, at: int, a: Append, ordered: Tensor, nonfinite: Nonfinite, names: dict[str, str]
) -> str:
    slots = names.get("slots", "slots")
    if kind == "beyond":
        return (
            f"{slots}[{at}]={int(a.slots[at])} is past the {a.num_slots} slots of "
            f"{a.k_cache.shape[0]} pages of {a.k_cache.shape[1]}"
        )
    if kind == "twice":
        slot = int(ordered[at])
        tokens = (a.slots == slot).nonzero().flatten().tolist()
        return f"{slots} has slot {slot} for tokens {tokens}; each goes to a slot of its own"
    if kind in ("k", "v"):
        what = "an infinity or NaN" if nonfinite == "raise" else "a NaN, which int8 does not have"
        remedy = "; nonfinite='keep' takes it" if nonfinite == "raise" else ""
        return f"{kind} has {what} in token {at}{remedy}"
    scale = getattr(a, kind).reshape(-1)
    least, largest = a.format.descale_limits
    return (
        f"{names.get(kind, kind)}[{at}]={float(scale[at])} must be from {least:.3g} to "
        f"{largest:.3g}, a normal number with which {a.format.name} codes do not overflow"
    )


# ----------------------------------------------------------------------------- execution


def execute(a: Append, impl: str | None = None) -> None:
    """Writes codes, and scales where they are not static, of a checked append."""
    if a.slots.shape[0] == 0 or a.k_cache.shape[2] == 0:
        return
    if impl is None:
        impl = "cute" if a.k_cache.device.type == "cuda" else "reference"
    if impl == "reference":
        _by_torch(a)
    elif impl == "sim":
        _simulate(a, settings().target.arch)
    else:
        with torch.cuda.device_of(a.k_cache):  # type: ignore[no-untyped-call]
            _launch(a, target_of(a.k_cache.device).arch)


def _by_torch(a: Append) -> None:
    keep = (a.slots >= 0) & (a.slots < a.num_slots)
    slot = a.slots[keep].long()
    page, offset = slot // a.k_cache.shape[1], slot % a.k_cache.shape[1]
    made = []
    for x, cache, written, static in (
        (a.k, a.k_cache, a.k_scale_cache, a.k_scale),
        (a.v, a.v_cache, a.v_scale_cache, a.v_scale),
    ):
        rows = x.reshape(-1, *x.shape[-2:])[keep]
        if static is None:
            codes, scale, *_ = quantize(rows, dtype=cache.dtype)
            made.append((cache, written, codes, scale[0]))
        else:
            made.append((cache, None, _by_static(rows, static, a.format), static))
    for cache, written, codes, scale in made:  # nothing is written before all is there
        cache.view(torch.uint8)[page, offset] = codes.view(torch.uint8)
        if written is not None:
            written[page, offset] = scale


def _by_static(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Codes of x / scale; int8 has 0 for NaN."""
    scaled = x.float() / spread(scale.reshape(()) if scale.numel() == 1 else scale, x)
    if fmt is INT8:
        scaled = torch.where(scaled.isnan(), 0.0, scaled)
    return saturating_cast(scaled, fmt)


class _Operands(NamedTuple):
    """`kernels.append_operands.AppendTensors`, as torch tensors."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale: Tensor
    v_scale: Tensor


def _operands(a: Append) -> _Operands:
    k, v = _batched(a.k, a.v)
    heads = a.k_cache.shape[2]
    scales = []
    for written, static in ((a.k_scale_cache, a.k_scale), (a.v_scale_cache, a.v_scale)):
        if written is not None:
            scales.append(written)
        elif static is not None:
            scales.append(static.reshape(-1).expand(heads if a.per == "head" else 1))
    codes = (a.k_cache.view(torch.uint8), a.v_cache.view(torch.uint8))
    k, v, k_codes, v_codes = (_with_plain_strides(t) for t in (k, v, *codes))
    return _Operands(k, v, k_codes, v_codes, a.slots, scales[0], scales[1])


def _batched(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, s, heads, d), in as few batches as the strides allow."""
    if k.ndim == 3:
        return k[None], v[None]
    batch, seqlen = k.shape[:2]
    flat = all(batch == 1 or seqlen == 1 or t.stride(0) == seqlen * t.stride(1) for t in (k, v))
    if flat or batch > _MAX_GRID:
        return k.flatten(0, 1)[None], v.flatten(0, 1)[None]
    return k, v


def _with_plain_strides(t: Tensor) -> Tensor:
    """The same, with a stride that has every alignment where a dimension has one element."""
    if 1 not in t.shape[:-1]:
        return t
    strides = [0 if n == 1 else step for n, step in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, (*strides[:-1], 1))


def _alignment(*tensors: Tensor) -> int:
    """Of the rows of all, in bytes, up to a vector's."""
    bits = _VECTOR
    for t in tensors:
        bits |= t.data_ptr()
        for step in t.stride()[:-1]:
            bits |= step * t.element_size()
    return bits & -bits


def _spec(a: Append, o: _Operands, arch: str) -> AppendSpec:
    source = dtype_name(a.k.dtype)
    return AppendSpec(
        source=source,
        codes=a.format.name,
        head_dim=a.k.shape[-1],
        head_dim_v=a.v.shape[-1],
        per=a.per,
        source_bytes=_alignment(o.k, o.v),
        code_bytes=_alignment(o.k_cache, o.v_cache),
        wide_slots=a.slots.dtype == torch.int64,
        converts=a.format is INT8 or _converts(arch),
    )


def _converts(arch: str) -> bool:
    """Whether an architecture converts to fp8 in hardware.

    Raises:
        Unsupported: it is older than the kernel's oldest.
    """
    if compute_capability(arch) < _OLDEST:
        raise Unsupported(f"the append kernel runs from sm_80 on, this is {arch}; impl='reference'")
    return has_fp8(arch)


def _launch(a: Append, arch: str) -> None:
    from flash_attn_fp8.compiler import cache

    operands = _operands(a)
    cache.kernel(_spec(a, operands, arch), arch)(tuple(operands))


def _simulate(a: Append, arch: str) -> None:
    """On copies of the memory: what a kernel at fault leaves behind reaches no cache."""
    asked = settings()
    copies: dict[int, Tensor] = {}
    there = Append(*(None if t is None else _copied(t, copies) for t in a))  # type: ignore[arg-type]
    with sim.device(arch, **asked.device_options()) as gpu:
        gpu.runs = asked.runs
        _launch(there, arch)
    for mine in (a.k_cache, a.v_cache, a.k_scale_cache, a.v_scale_cache):
        if mine is not None and mine.numel():
            _bytes_of(mine).copy_(copies[mine.untyped_storage().data_ptr()])


def _copied(t: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """The same view of a copy of its storage, which is made once."""
    if t.untyped_storage().nbytes() == 0:
        return t
    memory = copies.setdefault(t.untyped_storage().data_ptr(), _bytes_of(t).clone())
    made = torch.empty(0, dtype=t.dtype)
    return made.set_(memory.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _bytes_of(t: Tensor) -> Tensor:
    """All of a tensor's storage."""
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
