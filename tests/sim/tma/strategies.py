"""Tensor maps and coordinates for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from flash_attn_fp8.sim.tensormap import TensorMap

_SIZES = {"u8": 1, "bf16": 2, "f16": 2, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_SWIZZLES = [
    ("none", "16B"), ("32B", "16B"), ("64B", "16B"), ("128B", "16B"),
    ("128B", "32B"), ("128B", "32B+8B"), ("128B", "64B"),
]  # fmt: skip


@st.composite
def maps(draw: st.DrawFn) -> TensorMap:
    """Any tile-mode map whose tensor has at most some 100 KB; the address is 0."""
    type_ = draw(st.sampled_from(sorted(_SIZES)))
    size, rank = _SIZES[type_], draw(st.integers(1, 5))
    swizzle, atom = draw(st.sampled_from(_SWIZZLES))
    span = 128 if swizzle == "none" else int(swizzle[:-1])
    box = [draw(st.integers(1, span // 16)) * 16 // size]
    box += [draw(st.integers(1, (9, 5, 3, 2)[rank - 2])) for _ in range(rank - 1)]
    steps = [1, *(draw(st.sampled_from([1, 1, 2, 3])) for _ in box[1:])]
    dims = [draw(st.integers(1, 2 * b + 1)) for b in box]
    strides, extent = [], dims[0] * size
    for dim in dims[1:]:
        strides.append(-(-extent // 16) * 16 + 16 * draw(st.integers(0, 2)))
        extent = strides[-1] * dim
    fill = draw(st.sampled_from(["zero", "nan"])) if type_[0] in "bf" else "zero"
    return TensorMap(
        0, type_, tuple(dims), tuple(strides), tuple(box), tuple(steps),
        swizzle=swizzle, atom=atom, fill=fill,
    )  # fmt: skip


@st.composite
def coordinates(draw: st.DrawFn, m: TensorMap, lowest: int | None = None) -> tuple[int, ...]:
    """Coordinates around the tensor; the first one at a multiple of 16 bytes."""
    step = 16 // m.size
    low = -m.box[0] // step - 1 if lowest is None else lowest
    first = step * draw(st.integers(low, m.dims[0] // step + 1))
    rest = [
        draw(st.integers(-b - 1 if lowest is None else lowest, d + 1))
        for b, d in zip(m.box[1:], m.dims[1:], strict=True)
    ]
    return (first, *rest)


def extent(m: TensorMap) -> int:
    """Bytes from the tensor's first to its last."""
    last = [(d - 1) * s for d, s in zip(m.dims[1:], m.strides, strict=True)]
    return m.dims[0] * m.size + sum(last)


def at(m: TensorMap, address: int) -> TensorMap:
    return replace(m, address=address)
