"""Cases of `wgmma` and `mma.sync`.

Operands are images of shared memory, or fragments, filled with elements anyhow: whatever an
instruction reads where, both sides must read the same. Exact cases have small integers, so that the
sums need no rounding; the others have the values that rounding depends on.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.sim.chip.case import Case, array, choose, output, random_bytes, random_words, render

_SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_INTEGERS = ("s8", "u8")
# Codes of -4, -3, ..., 4 and a few halves, exactly.
_NUMBERS = np.array([-4, -3, -2, -1, 0, 1, 2, 3, 4, 0.5, -0.5, 1.5], np.float32)
_SMALL_CODES = {
    "e4m3": [0xC8, 0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44, 0x48, 0x30, 0xB0, 0x3C],
    "e5m2": [0xC4, 0xC2, 0xC0, 0xBC, 0x00, 0x3C, 0x40, 0x42, 0x44, 0x38, 0xB8, 0x3E],
}


def small(kind: str, seed: str, count: int) -> np.ndarray:
    """Elements whose products and sums are exact, as their codes."""
    if kind in _INTEGERS:
        return random_bytes(seed, count)
    if kind in _SMALL_CODES:
        return choose(seed, count, np.array(_SMALL_CODES[kind], np.uint8))
    if kind == "f16":
        return choose(seed, count, _NUMBERS.astype(np.float16).view(np.uint16))
    bits = choose(seed, count, _NUMBERS.view(np.uint32))
    return bits if kind == "tf32" else (bits >> 16).astype(np.uint16)


def wide(kind: str, seed: str, count: int, spread: int, shift: int = 0) -> np.ndarray:
    """Finite elements of all significands, with exponents over `spread` binades below 2^(1+shift).

    Only bf16 and tf32 shift.
    """
    if kind in ("e4m3", "e5m2"):
        bias, mantissa = (7, 3) if kind == "e4m3" else (15, 2)
        codes = random_bytes(seed, count)
        exponent = (codes >> mantissa & 15) % spread
        field = np.maximum(bias - exponent.astype(np.int64), 0)
        low = (1 << mantissa) - 1
        return ((codes & (0x80 | low)) | (field << mantissa).astype(np.uint8)).astype(np.uint8)
    words = random_words(seed, count)
    exponent = (words >> 8 & 0xFF) % spread
    if kind == "f16":
        field = np.maximum(15 - exponent.astype(np.int64), 0).astype(np.uint32)
        return ((words & 0x83FF) | field << 10).astype(np.uint16)
    bits = (words & np.uint32(0x807FFFFF)) | (np.uint32(127 + shift) - exponent) << 23
    return bits if kind in ("tf32", "f32") else (bits >> 16).astype(np.uint16)


# ------------------------------------------------------------------------------------ wgmma

_SWIZZLE_CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
_SPANS = {"128B": 128, "64B": 64, "32B": 32}


def _descriptor(leading: int, stride: int, swizzle: str) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | _SWIZZLE_CODES[swizzle] << 62


def _layout(swizzle: str, mn_major: bool, rows: int, size: int) -> tuple[int, int, int, int]:
    """Leading and stride offset, bytes of an operand of one step, and bytes to the next step."""
    if not mn_major:
        if swizzle == "none":
            return 128, 256, rows * 32, rows * 32
        span = _SPANS[swizzle]
        return 16, 8 * span, rows * span, 32 if span > 32 else rows * span
    if swizzle == "none":
        chunks = rows * size // 16  # of 16 bytes along MN, 8 rows of K each
        return chunks * 128, 128, chunks * 256, chunks * 256
    span = _SPANS[swizzle]
    spans = -(-rows * size // span)
    return 16 * span, 8 * span, max(1, spans) * 16 * span, max(1, spans) * 16 * span


def wgmma(
    name: str, n: int, d: str, a: str, b: str, *, swizzle="128B", registers=False, steps=2,
    trans_a=False, trans_b=False, scales=(1, 1), a_data=None, b_data=None, c_data=None,
    scale_d=True, offset=0, saturate=False, stride=1,
) -> Case:  # fmt: skip  # type: ignore[no-untyped-def]
    """`steps` products of m64nNkK. `a_data` and so on make elements from a seed and a count."""
    size = _SIZES[a]
    a_lead, a_stride, a_one, a_step = _layout(swizzle, trans_a, 64, size)
    b_lead, b_stride, b_one, b_step = _layout(swizzle, trans_b, n, size)
    a_stride, b_stride = a_stride * stride, b_stride * stride
    a_one, b_one = a_one * stride, b_one * stride
    a_bytes = -(-(a_one + a_step * (steps - 1) + offset) // 2048) * 2048
    b_bytes = -(-(b_one + b_step * (steps - 1) + offset) // 2048) * 2048
    count = n // 4 if d == "f16" else n // 2
    kind = "f32" if d == "f32" else "b32"
    ds = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    immediates = "" if a in _INTEGERS else f", {scales[0]}, {scales[1]}"
    if size == 2:
        immediates += f", {int(trans_b)}" if registers else f", {int(trans_a)}, {int(trans_b)}"
    shape = f"m64n{n}k{32 // size}{'.satfinite' if saturate else ''}.{d}.{a}.{b}"
    products, load_a = [], []
    for step in range(steps):
        left = f"{{{', '.join(f'%a{4 * step + i}' for i in range(4))}}}" if registers else "%rd4"
        enable = "%p1" if step == 0 and not scale_d else "%p2"
        products.append(
            f"wgmma.mma_async.sync.aligned.{shape}\n        {ds},\n        "
            f"{left}, %rd5, {enable}{immediates};"
        )
        products.append(f"add.u64 %rd4, %rd4, {a_step >> 4};")
        products.append(f"add.u64 %rd5, %rd5, {b_step >> 4};")
        if registers:
            load_a += [
                f"ld.global.b32 %a{i}, [%rd9+{512 * i}];" for i in range(4 * step, 4 * step + 4)
            ]
    text = render(
        "wgmma", steps=steps, a_registers=max(1, 4 * steps if registers else 1), d_type=kind,
        d_registers=count, a_bytes=a_bytes, b_bytes=b_bytes, load_a="\n    ".join(load_a),
        load_c="\n    ".join(f"ld.global.{kind} %d{i}, [%rd2+{512 * i}];" for i in range(count)),
        store="\n    ".join(f"st.global.{kind} [%rd3+{512 * i}], %d{i};" for i in range(count)),
        products="\n    ".join(products), a_offset=offset, b_offset=a_bytes + offset,
        a_descriptor=f"{_descriptor(a_lead, a_stride, swizzle):#x}",
        b_descriptor=f"{_descriptor(b_lead, b_stride, swizzle):#x}",
    )  # fmt: skip
    left = (a_data or (lambda s, m: small(a, s, m)))(f"{name} a", a_bytes // size)
    right = (b_data or (lambda s, m: small(b, s, m)))(f"{name} b", b_bytes // size)
    if c_data is not None:
        c = c_data(f"{name} c", 128 * count)
    elif d == "s32":
        c = random_words(f"{name} c", 128 * count) % np.uint32(1 << 20)
    elif d == "f16":
        c = small("f16", f"{name} c", 256 * count).view(np.uint32)
    else:
        c = small("tf32", f"{name} c", 128 * count)
    return Case(
        f"wgmma {name}", text, (array(left), array(right), array(c), output(512 * count)),
        threads=128, smem=a_bytes + b_bytes,
    )  # fmt: skip


def _exact_wgmma() -> list[Case]:
    cases = [wgmma(f"bf16 n{n}", n, "f32", "bf16", "bf16") for n in (8, 16, 24, 64, 104, 128, 256)]
    for kind, d in (("bf16", "f32"), ("f16", "f32"), ("f16", "f16")):
        label = f"{kind} to {d}"
        for swizzle in ("none", "32B", "64B", "128B"):
            cases.append(wgmma(f"{label} {swizzle}", 16, d, kind, kind, swizzle=swizzle))
            for ta, tb in ((True, False), (False, True), (True, True)):
                if d == "f16" and not (ta and tb):
                    continue
                which = "A" * ta + "B" * tb
                name = f"{label} {swizzle} MN-major {which}"
                n = {"128B": 128, "64B": 64}.get(swizzle, 32) if tb else 16
                cases.append(wgmma(name, n, d, kind, kind, swizzle=swizzle, trans_a=ta, trans_b=tb))
            name = f"{label} {swizzle} A in registers"
            cases.append(wgmma(name, 16, d, kind, kind, swizzle=swizzle, registers=True, steps=3))
        name = f"{label} A in registers, MN-major B"
        cases.append(wgmma(name, 64, d, kind, kind, registers=True, trans_b=True))
    cases += [
        wgmma("bf16 n8 MN-major", 8, "f32", "bf16", "bf16", trans_b=True, swizzle="none"),
        wgmma("bf16 n8 MN-major 128B", 8, "f32", "bf16", "bf16", trans_b=True),
        wgmma("bf16 n24 MN-major 64B", 24, "f32", "bf16", "bf16", trans_b=True, swizzle="64B"),
        wgmma("bf16 wide strides", 32, "f32", "bf16", "bf16", stride=2),
        wgmma("bf16 wide strides 32B", 32, "f32", "bf16", "bf16", stride=3, swizzle="32B"),
        wgmma("bf16 negated A", 32, "f32", "bf16", "bf16", scales=(-1, 1)),
        wgmma("f16 negated B", 32, "f32", "f16", "f16", scales=(1, -1)),
        wgmma("bf16 without D", 32, "f32", "bf16", "bf16", scale_d=False),
        wgmma("bf16 from 256", 32, "f32", "bf16", "bf16", offset=256),
        wgmma("bf16 from 512 64B", 32, "f32", "bf16", "bf16", offset=512 + 128, swizzle="64B"),
        wgmma("bf16 from 32 in a span", 32, "f32", "bf16", "bf16", offset=32, steps=3),
        wgmma("bf16 eight steps in registers", 16, "f32", "bf16", "bf16", registers=True, steps=4),
        wgmma("tf32", 32, "f32", "tf32", "tf32"),
        wgmma("tf32 64B A in registers", 40, "f32", "tf32", "tf32", registers=True, swizzle="64B"),
        wgmma("tf32 of all bits", 32, "f32", "tf32", "tf32", steps=1, a_data=_tf32_bits),
    ]
    for a, b in (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3")):
        for d in ("f32", "f16"):
            cases.append(wgmma(f"{a} {b} to {d}", 16, d, a, b, steps=4))
            name = f"{a} {b} to {d} A in registers"
            cases.append(wgmma(name, 16, d, a, b, registers=True, steps=4))
    for n in (8, 72, 256):
        cases.append(wgmma(f"e4m3 n{n}", n, "f32", "e4m3", "e4m3"))
    for swizzle in ("none", "32B", "64B"):
        cases.append(wgmma(f"e4m3 {swizzle}", 48, "f32", "e4m3", "e4m3", swizzle=swizzle))
    for a in _INTEGERS:
        for b in _INTEGERS:
            cases.append(wgmma(f"{a} {b}", 32, "s32", a, b))
    cases.append(wgmma("s8 in registers", 48, "s32", "s8", "u8", registers=True))
    for saturate in (False, True):
        name = f"s8 near the end{' satfinite' if saturate else ''}"
        cases.append(wgmma(name, 32, "s32", "s8", "s8", saturate=saturate, c_data=_near_the_end))
    return cases


def _tf32_bits(seed: str, count: int) -> np.ndarray:
    """Powers of two with the 13 bits below tf32's set: they must not count."""
    return choose(
        seed, count, np.array([0x3F801FFF, 0xC0001FFF, 0x40001000, 0x3F000001], np.uint32)
    )


def _near_the_end(seed: str, count: int) -> np.ndarray:
    return choose(seed, count, np.array([0x7FFFFFF0, 0x80000010, 0x7FFFF000, 5], np.uint32))


def _like_sums(spread: int, top: int = 4):  # type: ignore[no-untyped-def]
    """Accumulators over `spread` binades below 2^top."""

    def make(seed: str, count: int) -> np.ndarray:
        words = random_words(seed, count)
        exponent = 127 + top - (words >> 8 & 0xFF) % spread
        return (words & np.uint32(0x807FFFFF)) | exponent << 23

    return make


def _halves(seed: str, count: int) -> np.ndarray:
    return wide("f16", seed, 2 * count, 12).view(np.uint32)


def _zeros(seed: str, count: int) -> np.ndarray:
    return np.zeros(count, np.uint32)


def _specials(kind: str):  # type: ignore[no-untyped-def]
    """Mostly zeros and ones; infinities and NaNs, few enough to leave some rows without."""
    codes = {
        "e4m3": [0x7F, 0xFF], "e5m2": [0x7C, 0xFC, 0x7D, 0xFF],
        "f16": [0x7C00, 0xFC00, 0x7C01, 0xFE00],
        "bf16": [0x7F80, 0xFF80, 0x7F81, 0xFFC0],
        "tf32": [0x7F800000, 0xFF800000, 0x7F802000, 0xFFC00000],
    }[kind]  # fmt: skip
    some = small(kind, "one", 64)

    def make(seed: str, count: int) -> np.ndarray:
        out = choose(seed, count, some)
        at = random_words(seed + " at", count) % 64 == 0
        return np.where(at, choose(seed + " s", count, np.array(codes, some.dtype)), out)

    return make


def _few(kind: str):  # type: ignore[no-untyped-def]
    """Mostly zeros, the others of any size."""

    def make(seed: str, count: int) -> np.ndarray:
        some = wide(kind, seed, count, 15)
        return np.where(random_words(seed + " few", count) % 8 == 0, some, np.zeros_like(some))

    return make


def _subnormals(kind: str):  # type: ignore[no-untyped-def]
    def make(seed: str, count: int) -> np.ndarray:
        if kind in ("e4m3", "e5m2"):
            mantissa = 7 if kind == "e4m3" else 3
            return random_bytes(seed, count) & np.uint8(
                0x80 | mantissa | 1 << (mantissa.bit_length())
            )
        bits = random_words(seed, count)
        if kind == "f16":
            return (bits & 0x87FF).astype(np.uint16)
        bits = bits & np.uint32(0x80FFFFFF)
        return bits if kind == "tf32" else (bits >> 16).astype(np.uint16)

    return make


def _rounding_wgmma() -> list[Case]:
    cases = []
    for kind in ("e4m3", "e5m2", "f16", "bf16", "tf32"):
        fp8 = kind in ("e4m3", "e5m2")

        def make(spread: int, kind: str = kind):  # type: ignore[no-untyped-def]
            return lambda seed, count: wide(kind, seed, count, spread)

        def add(label: str, spread: int, c, d="f32", steps=1, left=None, right=None,
                kind: str = kind, make=make) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
            cases.append(
                wgmma(
                    f"{kind} {label}", 8, d, kind, kind, steps=steps, c_data=c,
                    a_data=left or make(spread), b_data=right or make(spread),
                )
            )  # fmt: skip

        add("near sums from 0", 2, _zeros)
        add("near sums", 2, _like_sums(4))
        add("wide sums from 0", 15, _zeros)
        add("wide sums", 9, _like_sums(20))
        add("large accumulators", 9, _like_sums(16, 20))
        add("small accumulators", 4, _like_sums(24, -8))
        add("four steps", 6, _like_sums(12), steps=4)
        add("specials", 2, _like_sums(4), left=_specials(kind), right=_specials(kind))
        add("subnormals", 4, _zeros, left=_subnormals(kind))
        add("subnormals twice", 4, _zeros, left=_subnormals(kind), right=_subnormals(kind))
        add(
            "subnormal sums",
            4,
            _like_sums(4, -125),
            left=_subnormals(kind),
            right=_subnormals(kind),
        )
        # Whether subnormals, and zeros, have the exponent of their value or the smallest one.
        scale, top = {"e4m3": (0, -8), "e5m2": (0, -15), "f16": (0, -14)}.get(kind, (100, -24))
        large = partial(wide, kind, spread=12, shift=scale)
        add("of subnormals", 12, _like_sums(24, top), left=_subnormals(kind), right=large)
        add("of few", 12, _like_sums(30, -16), left=_few(kind), right=_few(kind))
        if fp8:
            add("all codes", 31, _like_sums(40, 16))
            add("all codes, four steps", 31, _like_sums(40, 16), steps=4)
        if kind in ("bf16", "tf32"):
            tiny = partial(wide, kind, spread=12, shift=-60)
            add("tiny", 0, _like_sums(20, -118), left=tiny, right=tiny)
            large = partial(wide, kind, spread=3, shift=64)
            add("overflow", 0, _like_sums(4, 126), left=large, right=large)
        if fp8 or kind == "f16":
            add("to f16", 4, _halves, d="f16")
            add("to f16, four steps", 4, _halves, d="f16", steps=4)
            add("to f16, specials", 4, _halves, d="f16", left=_specials(kind))
            if kind != "e4m3":
                add(
                    "to f16, overflow",
                    1,
                    _halves,
                    d="f16",
                    steps=4,
                    left=_huge(kind),
                    right=_huge(kind),
                )
    return cases


def _huge(kind: str):  # type: ignore[no-untyped-def]
    codes = {"e5m2": [0x5C, 0x5D, 0x58], "f16": [0x5C00, 0x5D12, 0x5803]}[kind]
    dtype = np.uint8 if kind == "e5m2" else np.uint16
    return lambda seed, count: choose(seed, count, np.array(codes, dtype))


# --------------------------------------------------------------------------------- mma.sync

_WARPS = 4


def mma(
    name: str, k: int, d: str, a: str, b: str, *, a_data=None, b_data=None, c_data=None,
    saturate=False,
) -> Case:  # fmt: skip  # type: ignore[no-untyped-def]
    """One m16n8kK a warp, in eight warps."""
    k_bytes = k * _SIZES[a]
    count = {"a": k_bytes // 8, "b": k_bytes // 16, "d": 2 if d == "f16" else 4}
    kind = "f32" if d == "f32" else "b32"
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col{'.satfinite' if saturate else ''}.{d}.{a}.{b}.{d}"

    def vector(letter: str) -> str:
        n = count["d" if letter == "c" else letter]
        return "{" + ", ".join(f"%{letter}{i}" for i in range(n)) + "}"

    loads = [f"ld.global.b32 %a{i}, [%rd0+{128 * i}];" for i in range(count["a"])]
    loads += [f"ld.global.b32 %b{i}, [%rd1+{128 * i}];" for i in range(count["b"])]
    loads += [f"ld.global.{kind} %c{i}, [%rd2+{128 * i}];" for i in range(count["d"])]
    stores = [f"st.global.{kind} [%rd3+{128 * i}], %d{i};" for i in range(count["d"])]
    text = render(
        "mma", d_type=kind, a_stride=32 * count["a"], b_stride=32 * count["b"],
        d_stride=32 * count["d"], loads="\n    ".join(loads), stores="\n    ".join(stores),
        opcode=opcode, d=vector("d"), a=vector("a"), b=vector("b"), c=vector("c"),
    )  # fmt: skip
    words = {letter: 32 * n * _WARPS for letter, n in count.items()}
    left = (a_data or (lambda s, m: small(a, s, m)))(f"{name} a", words["a"] * 4 // _SIZES[a])
    right = (b_data or (lambda s, m: small(b, s, m)))(f"{name} b", words["b"] * 4 // _SIZES[b])
    if c_data is not None:
        c = c_data(f"{name} c", words["d"])
    elif d == "s32":
        c = random_words(f"{name} c", words["d"]) % np.uint32(1 << 20)
    elif d == "f16":
        c = small("f16", f"{name} c", 2 * words["d"]).view(np.uint32)
    else:
        c = small("tf32", f"{name} c", words["d"])
    return Case(
        f"mma.sync {name}", text, (array(left), array(right), array(c), output(4 * words["d"])),
        threads=128, ctas=_WARPS // 4,
    )  # fmt: skip


def _mma() -> list[Case]:
    cases = []
    forms = [
        *((d, t, k) for d, t in (("f32", "f16"), ("f16", "f16"), ("f32", "bf16")) for k in (8, 16)),
        ("f32", "tf32", 4), ("f32", "tf32", 8), ("f32", "e4m3", 32), ("f32", "e5m2", 32),
        ("f32", "e4m3", 16), ("f32", "e5m2", 16), ("f16", "e4m3", 32), ("f16", "e5m2", 16),
        ("s32", "s8", 16), ("s32", "s8", 32), ("s32", "u8", 32),
    ]  # fmt: skip
    for d, kind, k in forms:
        cases.append(mma(f"{kind} k{k} to {d}", k, d, kind, kind))
        if d == "s32":
            continue

        def make(spread: int, kind: str = kind):  # type: ignore[no-untyped-def]
            return lambda seed, count: wide(kind, seed, count, spread)

        sums = _halves if d == "f16" else _like_sums(4)
        variants = [
            ("near", 2, sums), ("from 0", 2, _zeros),
            ("wide", 9, _halves if d == "f16" else _like_sums(20)),
        ]  # fmt: skip
        if d == "f32":
            variants.append(("large accumulators", 9, _like_sums(16, 20)))
        for label, spread, c in variants:
            name = f"{kind} k{k} to {d} {label}"
            cases.append(
                mma(
                    name,
                    k,
                    d,
                    kind,
                    kind,
                    a_data=make(spread),
                    b_data=make(spread),
                    c_data=c,
                )
            )
        name = f"{kind} k{k} to {d} specials"
        cases.append(mma(name, k, d, kind, kind, a_data=_specials(kind), b_data=_specials(kind)))
        for label, left in (("few", _few(kind)), ("of all", make(31 if kind == "e5m2" else 15))):
            name = f"{kind} k{k} to {d} {label}"
            c = _halves if d == "f16" else _like_sums(40, 8)
            cases.append(mma(name, k, d, kind, kind, a_data=left, b_data=left, c_data=c))
            if d == "f32":
                name += " from 0"
                cases.append(mma(name, k, d, kind, kind, a_data=left, b_data=left, c_data=_zeros))
        name = f"{kind} k{k} to {d} subnormals"
        cases.append(
            mma(
                name,
                k,
                d,
                kind,
                kind,
                a_data=_subnormals(kind),
                b_data=make(4),
                c_data=_zeros,
            )
        )
    cases += [
        mma("e4m3 e5m2", 32, "f32", "e4m3", "e5m2"),
        mma("e5m2 e4m3", 32, "f32", "e5m2", "e4m3"),
        mma("s8 u8", 32, "s32", "s8", "u8"),
        mma("u8 s8", 16, "s32", "u8", "s8"),
        mma("s8 near the end", 32, "s32", "s8", "s8", c_data=_near_the_end),
        mma(
            "s8 near the end satfinite", 32, "s32", "s8", "s8", c_data=_near_the_end, saturate=True
        ),
        mma(
            "u8 near the end satfinite", 32, "s32", "u8", "u8", c_data=_near_the_end, saturate=True
        ),
    ]
    return cases


WGMMA = [*_exact_wgmma(), *_rounding_wgmma()]
MMA = _mma()
