"""The tensor map: 128 opaque bytes that say how a tensor lies in global memory and how to copy it.

Two versions of the layout are known, told apart by bits 0-3 of the word at byte 8: `sm_90` (0),
compared with what the driver's `cuTensorMapEncodeTiled` writes for an H200 (580.159; the table is
`tests/sim/tma/h200_maps.json`), and `sm_100` (2), which CuTe DSL writes itself. They share

    bytes 0-7    address                 bytes 32-51  dims - 1, 32 bits each
    bytes 12-27  strides / 16, low part  bytes 52-53  element strides - 1, 3 bits each
    bytes 28-29  their upper 4 bits      bytes 55-59  box - 1, 8 bits each

and in the word at byte 8: rank - 1 (bits 4-6), element type (7-10), interleave (11-12), swizzle
(13-14), NaN fill (15), round to tf32 (16), L2 promotion (17-18). `sm_100` has in addition the
swizzle atom (19-20) and a cache hint (21-22). In `sm_100` fill and element strides were only seen
zero; their places are those of `sm_90`, as are those of all the fields around them.

The copy engine reads 64 bytes: CuTe DSL leaves whatever was on its stack in the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flash_attn_fp8.sim.errors import Misaligned, Unmodelled

NBYTES = 128
_READ_BYTES = 64
ALIGNMENT = 64  # of the map itself

# Codes of PTX `tensormap.replace`'s .elemtype; tf32 is f32 with a bit of its own.
TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16")
_TF32 = {"tf32": "f32", "tf32.ftz": "f32.ftz"}
_SIZES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f32.ftz": 4,
    "f64": 8, "bf16": 2, "tf32": 4, "tf32.ftz": 4,
}  # fmt: skip
INTERLEAVES = ("none", "16B", "32B")
SWIZZLES = ("none", "32B", "64B", "128B")
ATOMS = ("16B", "32B", "32B+8B", "64B")
FILLS = ("zero", "nan")
_PROMOTIONS = (0, 64, 128, 256)
VERSIONS = {"sm_90": 0, "sm_100": 2}


@dataclass(frozen=True)
class TensorMap:
    """A tensor map. Dimension 0 is innermost and contiguous.

    `dims`, `box` and `element_strides` are in elements, `strides` in bytes and of dimensions 1 and
    up. A copy takes every `element_strides[i]`-th element of `box[i]`. `atom` is the unit that a
    128B swizzle keeps together. `l2_promotion` (bytes) and `l2_hint` change no value.
    """

    address: int
    type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: str = "none"
    swizzle: str = "none"
    atom: str = "16B"
    fill: str = "zero"
    l2_promotion: int = 128
    l2_hint: int = 0
    version: str = "sm_100"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return _SIZES[self.type]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that a box copies, along each dimension."""
        steps = (1, *self.element_strides[1:])  # the first is ignored
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy completes on its mbarrier, whatever part is out of bounds."""
        return int(np.prod(self.counts, dtype=np.int64)) * self.size

    @property
    def span(self) -> int:
        """Bytes of the swizzle's pattern along dimension 0; 0 without swizzle."""
        return 0 if self.swizzle == "none" else int(self.swizzle.removesuffix("B"))

    @property
    def pitch(self) -> int:
        """Bytes from a row of the box to the next in shared memory; a swizzle pads rows."""
        return max(self.box[0] * self.size, self.span)

    def __str__(self) -> str:
        return (
            f"{self.type} tensor map at {self.address:#x}, dims {list(self.dims)}, strides "
            f"{list(self.strides)} bytes, box {list(self.box)}, swizzle {self.swizzle}"
        )


# ------------------------------------------------------------------------------------- encoding


def encode(m: TensorMap) -> bytes:
    """The 128 bytes of a map; the inverse of `decode`."""
    check(m)
    base = _TF32.get(m.type, m.type)
    word = VERSIONS[m.version] | (m.rank - 1) << 4 | TYPES.index(base) << 7
    word |= INTERLEAVES.index(m.interleave) << 11 | SWIZZLES.index(m.swizzle) << 13
    word |= FILLS.index(m.fill) << 15 | (m.type in _TF32) << 16
    word |= _PROMOTIONS.index(m.l2_promotion) << 17
    word |= ATOMS.index(m.atom) << 19 | m.l2_hint << 21
    raw = np.zeros(NBYTES, np.uint8)
    words = raw.view("<u4")
    raw[:8].view("<u8")[0] = m.address
    words[2] = word
    upper = 0
    for i, stride in enumerate(m.strides):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        upper |= stride >> 36 << 4 * i
    words[7] = upper
    for i, dim in enumerate(m.dims):
        words[8 + i] = dim - 1
    steps = sum(step - 1 << 3 * i for i, step in enumerate(m.element_strides))
    words[13] = steps
    raw[55 : 55 + m.rank] = np.array(m.box) - 1
    return raw.tobytes()


def decode(raw: bytes) -> TensorMap:
    """The map that 128 bytes encode.

    Raises:
        Unmodelled: a bit is set whose meaning is not known.
        Misaligned: an address, stride or box that the manual excludes.
    """
    if len(raw) != NBYTES:
        raise ValueError(f"a tensor map has {NBYTES} bytes, not {len(raw)}")
    return _decode(raw[:_READ_BYTES])


@functools.lru_cache(maxsize=4096)
def _decode(raw: bytes) -> TensorMap:
    words = [int(w) for w in np.frombuffer(raw, "<u4")]
    word = words[2]
    version = next((name for name, code in VERSIONS.items() if code == word & 0xF), None)
    if version is None:
        raise Unmodelled(f"tensor map of version {word & 0xF} (word at byte 8: {word:#010x})")
    rank = (word >> 4 & 7) + 1
    kind, interleave = word >> 7 & 0xF, word >> 11 & 3
    _known("element type", kind, len(TYPES), word)
    _known("interleave", interleave, len(INTERLEAVES), word)
    _known("rank - 1", rank - 1, 5, word)
    type_ = TYPES[kind]
    if word >> 16 & 1:
        if not type_.startswith("f32"):
            raise Unmodelled(f"rounding to tf32 of {type_} (word at byte 8: {word:#010x})")
        type_ = type_.replace("f32", "tf32")
    top = 19 if version == "sm_90" else 23
    if word >> top:
        raise Unmodelled(f"bits {word >> top << top:#010x} of a tensor map's word at byte 8")
    _unused_is_zero(words, raw, rank)
    upper, steps = words[7], words[13] & 0xFFFF
    m = TensorMap(
        address=words[0] | words[1] << 32,
        type=type_,
        dims=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=tuple((words[3 + i] | (upper >> 4 * i & 0xF) << 32) << 4 for i in range(rank - 1)),
        box=tuple(raw[55 + i] + 1 for i in range(rank)),
        element_strides=tuple((steps >> 3 * i & 7) + 1 for i in range(rank)),
        interleave=INTERLEAVES[interleave],
        swizzle=SWIZZLES[word >> 13 & 3],
        atom=ATOMS[word >> 19 & 3] if version == "sm_100" else "16B",
        fill=FILLS[word >> 15 & 1],
        l2_promotion=_PROMOTIONS[word >> 17 & 3],
        l2_hint=word >> 21 & 3,
        version=version,
    )
    check(m)
    return m


def _known(what: str, code: int, known: int, word: int) -> None:
    if code >= known:
        raise Unmodelled(f"{what} {code} in a tensor map (word at byte 8: {word:#010x})")


def _unused_is_zero(words: list[int], raw: bytes, rank: int) -> None:
    """Fields of dimensions that the map does not have, and bits with no meaning known."""
    unused = [(12 + 4 * i, words[3 + i]) for i in range(rank - 1, 4)]
    unused += [(32 + 4 * i, words[8 + i]) for i in range(rank, 5)]
    unused += [(55 + i, raw[55 + i]) for i in range(rank, 5)]
    unused += [(28, words[7] >> 4 * (rank - 1)), (52, (words[13] & 0xFFFF) >> 3 * rank)]
    unused += [(54, raw[54]), (60, words[15])]
    for at, value in unused:
        if value:
            raise Unmodelled(f"bits {value:#x} at byte {at} of a tensor map of rank {rank}")


# --------------------------------------------------------------------------------------- limits


def check(m: TensorMap) -> None:
    """The rules of `cuTensorMapEncodeTiled` and of PTX, beyond the widths of the fields."""
    if m.type not in _SIZES:
        raise Unmodelled(f"{m}: element type {m.type}")
    lengths = (len(m.strides) + 1, len(m.box), len(m.element_strides))
    if not 1 <= m.rank <= 5 or lengths != (m.rank,) * 3:
        raise ValueError(f"{m}: rank {m.rank} needs strides, box and element strides to match")
    for name, values, low, high in (
        ("dims", m.dims, 1, 1 << 32),
        ("strides", m.strides, 0, (1 << 40) - 1),
        ("box", m.box, 1, 256),
        ("element strides", m.element_strides, 1, 8),
    ):
        for i, v in enumerate(values):
            if not low <= v <= high:
                raise ValueError(f"{m}: {name}[{i}] = {v} is not {low} to {high}")
    if m.address % 16:
        raise Misaligned(f"{m}: the address is not a multiple of 16")
    for i, stride in enumerate(m.strides):
        if stride % 16:
            raise Misaligned(f"{m}: strides[{i}] = {stride} bytes is not a multiple of 16")
    inner = m.box[0] * m.size
    if m.interleave == "none" and inner % 16:
        raise Misaligned(f"{m}: a row of the box has {inner} bytes, not a multiple of 16")
    if m.interleave == "none" and m.span and inner > m.span:
        raise Misaligned(f"{m}: a row of the box has {inner} bytes, more than the swizzle's span")
    if m.atom != "16B" and (m.swizzle != "128B" or m.version == "sm_90"):
        raise Unmodelled(f"{m}: swizzle atom {m.atom}")
    if m.fill == "nan" and m.type[0] in "us":
        raise Unmodelled(f"{m}: NaN fill of integers")


# -------------------------------------------------------------------------------------- swizzle


def swizzle(addresses: np.ndarray, span: int, atom: str = "16B") -> np.ndarray:
    """Where the bytes at absolute shared addresses go; `span` 0, 32, 64 or 128.

    The units of 16 bytes, of an atom's 32 or 64, are permuted within the span by the number of the
    128-byte line; the 8B flip also swaps the halves of 16 bytes in odd lines.
    """
    if span == 0:
        return addresses
    line = addresses >> 7
    flips: np.ndarray
    if atom == "16B":
        flips = (line & (span // 16 - 1)) << 4
    elif atom == "64B":
        flips = (line & 1) << 6
    else:
        flips = (line & 3) << 5
        if atom == "32B+8B":
            flips |= (line & 1) << 3
    moved: np.ndarray = addresses ^ flips
    return moved


# ----------------------------------------------------------------------------- tensormap.replace

# Field: (bit of the word at byte 8, bits, values); of `sm_100` where the versions differ.
_WORD_FIELDS = {
    "rank": (4, 3, 5),
    "elemtype": (7, 4, len(TYPES)),
    "interleave_layout": (11, 2, 3),
    "swizzle_mode": (13, 2, 4),
    "fill_mode": (15, 1, 2),
    "swizzle_atomicity": (19, 2, 4),
}
_DIMENSION_FIELDS = ("box_dim", "global_dim", "global_stride", "element_stride")


def replace(raw: bytes, field: str, ordinal: int | None, value: int) -> bytes:
    """What `tensormap.replace.tile.field [map], {ordinal,} value` makes of a map's 128 bytes."""
    out = np.frombuffer(raw, np.uint8).copy()
    words = out.view("<u4")
    version = int(words[2]) & 0xF
    if version not in VERSIONS.values():
        raise Unmodelled(f"tensormap.replace in a tensor map of version {version}")
    if field == "global_address":
        out[:8].view("<u8")[0] = value
    elif field in _WORD_FIELDS:
        bit, width, known = _WORD_FIELDS[field]
        if field == "elemtype" and value in (11, 12):  # tf32, tf32.ftz
            words[2] |= np.uint32(1 << 16)
            value -= 4
        elif field == "elemtype":
            words[2] &= ~np.uint32(1 << 16)
        if value >= known or (field == "swizzle_atomicity" and version == VERSIONS["sm_90"]):
            raise Unmodelled(f"tensormap.replace .{field} with {value}")
        mask = (1 << width) - 1 << bit
        words[2] = int(words[2]) & ~mask | value << bit
    elif field in _DIMENSION_FIELDS and ordinal is not None:
        _replace_dimension(out, field, ordinal, value)
    else:
        raise Unmodelled(f"tensormap.replace .{field}")
    return out.tobytes()


def _replace_dimension(out: np.ndarray, field: str, ordinal: int, value: int) -> None:
    words = out.view("<u4")
    last = 3 if field == "global_stride" else 4
    if not 0 <= ordinal <= last:
        raise Unmodelled(f"tensormap.replace .{field} of dimension {ordinal}")
    if field == "global_stride":
        if value % 16:
            raise Misaligned(f"tensormap.replace .global_stride {value}: not a multiple of 16")
        words[3 + ordinal] = value >> 4 & 0xFFFFFFFF
        mask = 0xF << 4 * ordinal
        words[7] = int(words[7]) & ~mask | (value >> 36 & 0xF) << 4 * ordinal
        return
    if value < 1:
        raise Unmodelled(f"tensormap.replace .{field} with {value}")
    if field == "global_dim":
        words[8 + ordinal] = value - 1
    elif field == "box_dim":
        out[55 + ordinal] = value - 1
    else:
        mask = 7 << 3 * ordinal
        words[13] = int(words[13]) & ~mask | (value - 1 & 7) << 3 * ordinal
