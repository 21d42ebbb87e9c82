"""Cases of tensor copies and bulk copies, through maps that `sim/tensormap.py` encodes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from flash_attn_fp8.sim.tensormap import TensorMap, encode
from tests.sim.chip.case import (
    Array,
    Case,
    Map,
    array,
    choose,
    output,
    random_bytes,
    random_words,
    render,
    wait,
)

_COORDINATES = ["%c0", "%c1", "%c2", "%c3", "%c4"]
# As hardware versions go: what the driver's own encoder writes for an H200.
_VERSION = "sm_90"


def _map(type_: str, dims, box, swizzle="none", pad=0, steps=None, fill="zero") -> TensorMap:  # type: ignore[no-untyped-def]
    """A map of a dense tensor whose rows are padded by `pad` bytes and to multiples of 16."""
    size = TensorMap(0, type_, (1,), (), (16,), (1,)).size
    strides, row = [], -(-dims[0] * size // 16) * 16 + pad
    for dim in dims[1:]:
        strides.append(row)
        row *= dim
    steps = steps or (1,) * len(dims)
    return TensorMap(
        0, type_, tuple(dims), tuple(strides), tuple(box), steps,
        swizzle=swizzle, fill=fill, version=_VERSION,
    )  # fmt: skip


def _nbytes(m: TensorMap) -> int:
    if m.rank == 1:
        return -(-m.dims[0] * m.size // 16) * 16
    return m.strides[-1] * m.dims[-1]


def _coordinates(at: tuple[int, ...]) -> Array:
    return array(np.array([*at, 0, 0, 0, 0][:5], np.int32))


def _at(rank: int) -> str:
    return "{" + ", ".join(_COORDINATES[:rank]) + "}"


def _counting(nbytes: int) -> Array:
    """A tensor whose 16-bit words say where they are, with both bytes odd-looking."""
    return array((np.arange(nbytes // 2, dtype=np.uint32) * 257 + 0x0102).astype(np.uint16))


def _load(name: str, m: TensorMap, at: tuple[int, ...], offset: int = 0, data=None) -> Case:  # type: ignore[no-untyped-def]
    rows = math.prod(m.counts[1:])
    bytes_ = -(-(offset + rows * m.pitch) // 1024) * 1024
    text = render(
        "tma_load", rank=m.rank, at=_at(m.rank), offset=offset, expected=m.box_bytes,
        bytes=bytes_, wait=wait("%r2"),
    )  # fmt: skip
    tensor = _counting(_nbytes(m)) if data is None else array(data)
    return Case(
        f"load {name}", text, (Map(m, 1), tensor, _coordinates(at), output(bytes_)),
        threads=128, smem=bytes_ + 16,
    )  # fmt: skip


def _loads() -> list[Case]:
    cases = []
    for swizzle, columns in (("none", 24), ("32B", 16), ("64B", 32), ("128B", 64)):
        one = columns * 2
        shapes = {
            1: ((100,), (columns,), (8,)),
            2: ((100, 30), (columns, 24), (8, 3)),
            3: ((72, 12, 5), (columns, 6, 3), (8, 2, 1)),
            4: ((72, 5, 4, 3), (columns, 3, 2, 2), (0, 1, 1, 0)),
            5: ((72, 4, 3, 3, 2), (columns, 2, 2, 2, 2), (8, 1, 0, 1, 0)),
        }
        for rank, (dims, box, at) in shapes.items():
            m = _map("bf16", dims, box, swizzle)
            cases.append(_load(f"{rank}d {swizzle}", m, at))
            outside = tuple(d - b // 2 for d, b in zip(dims, box, strict=True))
            outside = (outside[0] // 8 * 8, *outside[1:])
            cases.append(_load(f"{rank}d {swizzle} past the end", m, outside))
            negative = (-8, *(-(b // 2) for b in box[1:]))
            cases.append(_load(f"{rank}d {swizzle} negative", m, negative))
        m = _map("bf16", (100, 30), (columns, 24), swizzle)
        cases.append(_load(f"2d {swizzle} at 128", m, (0, 0), offset=128))
        cases.append(_load(f"2d {swizzle} at 640", m, (8, 1), offset=640))
        cases.append(_load(f"2d {swizzle} far away", m, (0, 1000)))
        cases.append(_load(f"2d {swizzle} far before", m, (-1024, 2)))
        if swizzle != "none":
            m = _map("bf16", (100, 30), (one // 4, 12), swizzle)
            cases.append(_load(f"2d {swizzle} of half its span", m, (8, 1)))
    for type_, box in (("u8", 64), ("u16", 32), ("s32", 16), ("u32", 16), ("u64", 8), ("s64", 8),
                       ("f16", 32), ("f32", 16), ("f64", 8)):  # fmt: skip
        m = _map(type_, (box + 16, 20), (box, 8), "64B")
        cases.append(_load(f"of {type_}", m, (16, 14)))
    for type_, box in (("f16", 32), ("bf16", 32), ("f32", 16), ("f64", 8)):
        m = _map(type_, (box + 16, 20), (box, 8), "64B", fill="nan")
        cases.append(_load(f"of {type_} with NaN", m, (16, 14)))
    floats = random_words("tf32", 48 * 20)
    floats[:40] = choose("near", 40, np.array([0x3F801000, 0x3F800FFF, 0x3F803000, 0xBF801000,
        0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7F800001, 0x00000FFF, 0x00001000, 0x80001800,
        0x007FFFFF, 0x00800000], np.uint32))  # fmt: skip
    for type_ in ("tf32", "f32.ftz", "tf32.ftz"):
        m = _map(type_, (48, 20), (16, 8), "64B")
        cases.append(_load(f"of {type_}", m, (0, 0), data=floats))
        cases.append(_load(f"of {type_} past the end", m, (40, 16), data=floats))
    for steps in ((1, 2), (1, 3), (1, 8)):
        m = _map("bf16", (64, 40), (32, 24), "64B", steps=steps)
        cases.append(_load(f"every {steps[1]}. row", m, (8, 1)))
        cases.append(_load(f"every {steps[1]}. row past the end", m, (8, 31)))
    m = _map("bf16", (64, 9, 9), (16, 6, 5), "32B", steps=(1, 2, 3))
    cases.append(_load("3d with steps", m, (8, 1, 1)))
    m = _map("bf16", (40, 16), (32, 8), "64B", pad=32)
    cases.append(_load("padded rows", m, (16, 4)))
    m = _map("u8", (256, 300), (16, 256), "none")
    cases.append(_load("256 rows of 16 bytes", m, (32, 7)))
    return cases


def _store(name, m, at, operation="", *, source=None, before=None, offset=0) -> Case:  # type: ignore[no-untyped-def]
    rows = math.prod(m.counts[1:])
    bytes_ = -(-(offset + rows * m.pitch) // 1024) * 1024
    reduces = bool(operation)
    text = render(
        "tma_store", rank=m.rank, at=_at(m.rank), offset=offset, bytes=bytes_,
        opcode="cp.reduce.async.bulk.tensor" if reduces else "cp.async.bulk.tensor",
        operation=operation and f".{operation}",
    )  # fmt: skip
    image = (
        _counting(bytes_) if source is None else array(np.resize(source, bytes_ // source.itemsize))
    )
    nbytes = _nbytes(m)
    initial = None if before is None else np.resize(before, nbytes // before.itemsize)
    return Case(
        f"{'reduce ' + operation if reduces else 'store'} {name}", text,
        (Map(m, 1), output(nbytes, initial), _coordinates(at), image),
        threads=128, smem=bytes_,
    )  # fmt: skip


_SPECIAL_32 = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF,
     0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x33800000, 0x4B000001, 5], np.uint32,
)  # fmt: skip
_SPECIAL_F16 = np.array(
    [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0x7C01,
     0x1400, 0x6801, 0x3555], np.uint16,
)  # fmt: skip
_SPECIAL_BF16 = (_SPECIAL_32 >> 16).astype(np.uint16)


def _values(type_: str, seed: str, count: int) -> np.ndarray:
    """Every edge value with every other over two of these of one seed, then random bits."""
    special = {"f16": _SPECIAL_F16, "bf16": _SPECIAL_BF16}.get(type_, _SPECIAL_32)
    if type_ in ("u64", "s64", "b64", "f64"):
        return random_bytes(seed, 8 * count).view(np.uint64) % np.uint64(1 << 63 | 12345)
    n = special.size
    grid = np.repeat(special, n) if seed.endswith("a") else np.tile(special, n)
    rest = random_bytes(seed, grid.itemsize * max(0, count - n * n)).view(grid.dtype)
    return np.concatenate([grid, rest])[:count]


_REDUCTIONS = (
    ("add", ("u32", "s32", "u64", "f32", "f16", "bf16")),
    ("min", ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("max", ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("inc", ("u32",)),
    ("dec", ("u32",)),
    ("and", ("u32", "u64")),
    ("or", ("u32", "u64")),
    ("xor", ("u32", "u64")),
)


def _stores() -> list[Case]:
    cases = []
    for swizzle, columns in (("none", 24), ("32B", 16), ("64B", 32), ("128B", 64)):
        for rank, (dims, box, at) in {
            1: ((100,), (columns,), (8,)),
            2: ((100, 20), (columns, 12), (8, 3)),
            3: ((72, 6, 4), (columns, 4, 3), (8, 1, 0)),
            5: ((72, 3, 2, 2, 2), (columns, 2, 2, 1, 2), (8, 1, 0, 1, 0)),
        }.items():
            m = _map("bf16", dims, box, swizzle)
            cases.append(_store(f"{rank}d {swizzle}", m, at))
            outside = tuple(d - b // 2 for d, b in zip(dims, box, strict=True))
            outside = (outside[0] // 8 * 8, *outside[1:])
            cases.append(_store(f"{rank}d {swizzle} past the end", m, outside))
        m = _map("bf16", (100, 20), (columns, 12), swizzle)
        cases.append(_store(f"2d {swizzle} from 384", m, (0, 0), offset=384))
    m = _map("bf16", (64, 20), (32, 12), "64B", steps=(1, 2))
    cases.append(_store("every 2. row", m, (8, 1)))
    m = _map("bf16", (36, 20), (32, 8), "64B")
    cases.append(_store("a row that ends within 16 bytes", m, (16, 4)))
    for type_, dim, columns in (("bf16", 33, 32), ("u8", 21, 32), ("f32", 13, 16), ("u64", 5, 8),
                                ("u8", 17, 16)):  # fmt: skip
        m = _map(type_, (dim, 20), (columns, 8), "none", pad=32)
        cases.append(_store(f"{dim} of {type_} in a row", m, (0, 3)))
        operation = "max" if type_ == "u64" else "add"
        if type_ != "u8":
            kind = {"bf16": np.uint16, "f32": np.float32, "u64": np.uint64}[type_]
            before = np.arange(_nbytes(m) // m.size).astype(kind)
            cases.append(_store(f"{dim} of {type_} in a row", m, (0, 3), operation, before=before))
    m = _map("bf16", (33, 20), (32, 8), "none", pad=32)
    cases.append(_store("past a row's last 16 bytes", m, (40, 3)))
    cases.append(_store("from a row's last 16 bytes", m, (32, 3)))
    m = _map("bf16", (33, 6, 3), (64, 4, 2), "128B", pad=32)
    cases.append(_store("3d of 33 in a row", m, (0, 4, 1)))
    for operation, types in _REDUCTIONS:
        for type_ in types:
            size = TensorMap(0, type_, (1,), (), (16,), (1,)).size
            m = _map(type_, (64 // size, 32), (64 // size, 32), "64B")
            count = 2048 // size
            cases.append(
                _store(
                    type_, m, (0, 0), operation,
                    source=_values(type_, f"{operation} a", count),
                    before=_values(type_, f"{operation} b", count),
                )
            )  # fmt: skip
    m = _map("f32", (40, 20), (32, 8), "128B")
    source, before = np.arange(512, dtype=np.float32), np.full(1024, 3, np.float32)
    cases.append(_store("f32 past the end", m, (16, 14), "add", source=source, before=before))
    return cases


def _multicasts() -> list[Case]:
    m = _map("bf16", (64, 40), (64, 16), "128B")
    tensor = _counting(_nbytes(m))
    cases = []
    # Each box is 2,048 bytes; a CTA expects what the masks of both send it.
    for masks, expected in (((3, 3), (4096, 4096)), ((1, 2), (2048, 2048)), ((2, 1), (2048, 2048)),
                            ((3, 1), (4096, 2048))):  # fmt: skip
        text = render(
            "tma_multicast", wait=wait("%r2"), mask0=masks[0], mask1=masks[1],
            expected0=expected[0], expected1=expected[1],
        )  # fmt: skip
        cases.append(
            Case(
                f"multicast to {masks[0]} and {masks[1]}", text, (Map(m, 1), tensor, output(8192)),
                threads=128, ctas=2, cluster=2, smem=4112,
            )
        )  # fmt: skip
    return cases


def _replacements() -> list[Case]:
    """The map in memory has other fields than the copy needs; `tensormap.replace` changes them."""
    wrong = TensorMap(16, "f16", (16, 3), (32,), (8, 2), (1, 1), version=_VERSION)
    head = "tensormap.replace.tile."
    tail = ".shared::cta.b1024.b32 [%r2], "
    changes = [
        f"{head}rank{tail}1;",
        f"{head}box_dim{tail}0, 32;",
        f"{head}box_dim{tail}1, 12;",
        f"{head}global_dim{tail}0, 40;",
        f"{head}global_dim{tail}1, 10;",
        f"{head}global_stride.shared::cta.b1024.b64 [%r2], 0, 96;",
        f"{head}element_stride{tail}1, 1;",
        f"{head}elemtype{tail}10;",
        f"{head}interleave_layout{tail}0;",
        f"{head}swizzle_mode{tail}2;",
        f"{head}fill_mode{tail}1;",
    ]
    text = render("tensormap_replace", expected=768, replacements="\n    ".join(changes),
                  wait=wait("%r2"))  # fmt: skip
    data = np.frombuffer(encode(wrong), np.uint8)
    return [
        Case(
            "tensormap.replace", text, (Array(data.copy()), _counting(960), output(768)),
            smem=3088,
        )
    ]  # fmt: skip


_BULK = (
    *((o, t, f".{o}.{t}") for o, ts in _REDUCTIONS for t in ts),
    ("add", "f64", ".add.f64"),
)


def _bulks() -> list[Case]:
    cases = []
    for nbytes in (16, 1040):
        text = render("bulk", bytes=nbytes, opcode="cp.async.bulk", operation="", wait=wait("%r2"))
        cases.append(
            Case(f"bulk {nbytes}", text, (_counting(nbytes), output(nbytes)), smem=nbytes + 16)
        )
    for operation, type_, suffix in _BULK:
        if operation in ("and", "or", "xor"):
            suffix = suffix.replace(".u", ".b")
        if operation == "add" and type_ in ("f16", "bf16"):
            suffix = f".add.noftz.{type_}"
        size = TensorMap(0, type_, (1,), (), (16,), (1,)).size
        a, b = (_values(type_, f"bulk {operation} {end}", 1024 // size) for end in "ab")
        if type_ == "f64":
            a, b = (np.abs(x.astype(np.int64)).astype(np.float64) / 3 for x in (a, b))
        text = render("bulk", bytes=1024, opcode="cp.reduce.async.bulk", operation=suffix,
                      wait=wait("%r2"))  # fmt: skip
        cases.append(
            Case(f"bulk reduce {operation} {type_}", text, (array(a), output(1024, b)), smem=1040)
        )
    for operation in (
        "", ".add.u32", ".add.s32", ".add.u64", ".min.u32", ".min.s32", ".max.u32", ".max.s32",
        ".inc.u32", ".dec.u32", ".and.b32", ".or.b32", ".xor.b32",
    ):  # fmt: skip
        opcode = "cp.reduce.async.bulk" if operation else "cp.async.bulk"
        text = render("bulk_cluster", opcode=opcode, operation=operation, wait=wait("%r2"),
                      wait2=wait("%r9"))  # fmt: skip
        source = random_words("bulk in a cluster", 512) % np.uint32(6000)
        cases.append(
            Case(
                f"bulk in a cluster{operation}", text, (array(source), output(8192)),
                ctas=2, cluster=2, smem=4112,
            )
        )  # fmt: skip
    return cases


def _faults() -> list[Case]:
    m = _map("bf16", (100, 30), (16, 4), "32B")
    cases = [
        _load("from the middle of 16 bytes", m, (4, 0)),
        _load("to the middle of 128 bytes", m, (0, 0), offset=64),
        _store("at negative coordinates", m, (8, -1)),
        _store("before a row", m, (-8, 1)),
        _store("from the middle of 128 bytes", m, (8, 1), offset=64),
    ]
    three = _map("bf16", (100, 5, 3), (16, 4, 2), "32B")
    wrong = _load("2d of a 3d tensor", m, (0, 0))
    cases.append(replace(wrong, arguments=(Map(three, 1), *wrong.arguments[1:])))
    return [replace(case, name=f"fault: {case.name}", faults=True) for case in cases]


CASES = [*_loads(), *_stores(), *_multicasts(), *_replacements(), *_bulks(), *_faults()]
