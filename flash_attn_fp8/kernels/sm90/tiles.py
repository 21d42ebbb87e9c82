"""What a consumer warpgroup multiplies: descriptors of shared memory, and registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.sm90.context import Products, shared
from flash_attn_fp8.kernels.sm90.geometry import ROWS, WARPGROUP


@dataclass(frozen=True)
class Tiles:
    """A lane has two rows of S, P and O, which are numbered (e, row, i).

    `s` so for key 8i + 2q + e, where q is the lane's number in its quad; `pv` and `o` for columns.
    `v` and `pv` have an entry for each part of V's columns; where the tensor core adds to O, `pv`
    is O. `rescale`: a factor for each row; `pv_rescale`: that of the P in `pv`, where P is made
    before P V is added.
    """

    products: Products
    q: Any
    k: Any
    v: tuple
    s: Any
    p: Any
    pv: tuple
    o: Any
    rescale: Any
    pv_rescale: Any

    @classmethod
    def of(cls, ctx: Context, products: Products) -> Tiles:
        g, b = ctx.geometry, ctx.buffers
        # A slice of the warpgroup as a whole: its descriptors have no part of a lane.
        qk = products.qk.get_slice(0)
        parts = range(g.v_parts)
        q = cute.recast_ptr(b.q, dtype=DTYPES[g.spec.traits.kv_format])
        if g.accumulates_in_mma:
            o = _product(g, products, 0)
            pv = (o,)
        else:
            o = _registers(ROWS * g.v_rows // WARPGROUP)
            pv = tuple(_product(g, products, n) for n in parts)
        p_shape = products.pv(0).partition_shape_A((ROWS, g.tile_n))
        return cls(
            products,
            q=products.qk.make_fragment_A(qk.partition_A(shared(q, products.q_layout))),
            k=products.qk.make_fragment_B(qk.partition_B(shared(b.k, products.k_layout))),
            v=tuple(_values(g, b, products, n) for n in parts),
            s=_registers(products.qk.partition_shape_C((ROWS, g.tile_n))),
            p=cute.make_rmem_tensor(p_shape, DTYPES[ctx.traits.policy.p_format]),
            pv=pv,
            o=o,
            rescale=_registers(2),
            pv_rescale=_registers(2),
        )


def _registers(shape):
    return cute.make_rmem_tensor(shape, Float32)


def _product(g, products: Products, part: int):
    return _registers(products.pv(part).partition_shape_C((ROWS, g.v_part_rows(part))))


def _values(g, buffers, products: Products, part: int):
    mma = products.pv(part)
    start = buffers.v + part * g.v_columns * g.chunk(g.tile_n)
    tile = shared(start, products.v_layout(part))
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))
