"""Buffers and products of the SM90 kernel. `Context` is that of all forward kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.sm90.geometry import ROWS, Geometry


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers to rings of tiles, and a small tensor."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    token_scale: cute.Tensor  # (key, kind, slot): see token_scales.py
    units: cute.Tensor  # (slot,): see units.py
    q_unit: cute.Tensor  # (row, query tile): see queries.py


@dataclass(frozen=True)
class Products:
    """The two products of a warpgroup, and the layouts of their operands in shared memory.

    `qk` and `pv` are made anew at each use: whether a product adds to its accumulator is a value
    that they hold, and one set inside a loop does not exist outside.
    """

    geometry: Geometry

    @property
    def _k_dtype(self):
        return DTYPES[self.geometry.spec.traits.kv_format]

    @property
    def _v_dtype(self):
        return DTYPES[self.geometry.spec.v_format]

    @property
    def qk(self) -> cute.TiledMma:
        k_major, shape = OperandMajorMode.K, (ROWS, self.geometry.tile_n)
        d = self._k_dtype
        return hopper.make_trivial_tiled_mma(d, d, k_major, k_major, Float32, (1, 1, 1), shape)

    def pv(self, part: int) -> cute.TiledMma:
        """P V, or its part of some of V's columns where it is made in parts."""
        g, d = self.geometry, self._v_dtype
        v_major = OperandMajorMode.K if g.transposes_v else OperandMajorMode.MN
        return hopper.make_trivial_tiled_mma(
            *(d, d, OperandMajorMode.K, v_major, Float32, (1, 1, 1), (ROWS, g.v_part_rows(part))),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def v_layout(self, part: int) -> cute.ComposedLayout:
        """What belongs to a part: rows of V^T, or in 16 bits all of V. Slots are of whole tiles."""
        g = self.geometry
        shape = g.v_part_rows(part), g.tile_n, 1
        layout = _rows(self._v_dtype, shape) if g.transposes_v else _columns(self._v_dtype, shape)
        rows, keys, _ = layout.outer.shape
        slot = g.v_bytes // g.element
        outer = cute.make_layout(
            (rows, keys, (1, g.stages)), stride=(*layout.outer.stride[:-1], (0, slot))
        )
        return cute.make_composed_layout(layout.inner, 0, outer)

    @property
    def q_layout(self) -> cute.ComposedLayout:
        g = self.geometry
        return _rows(self._k_dtype, (ROWS, g.head_dim, g.q_stage))

    @property
    def k_layout(self) -> cute.ComposedLayout:
        g = self.geometry
        return _rows(self._k_dtype, (g.tile_n, g.head_dim, g.stages))


def shared(pointer, layout):
    """A tensor of shared memory whose swizzle is its pointer's, as wgmma's descriptors want it."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)


def words_of(p):
    """A fragment of A as 32-bit words, numbered (row, half, step)."""
    words = cute.size(p) * p.element_type.width // 32
    return cute.make_tensor(cute.recast_ptr(p.iterator, dtype=Uint32), cute.make_layout(words))


@cute.jit
def multiply(mma: cute.TiledMma, acc, a, b, slot, adds: cutlass.Constexpr = False):
    """Start acc = a b, or acc += a b, as a group of its own."""
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, adds or step > 0)
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step, slot], acc)
    warpgroup.commit_group()


def _atom(dtype, width: int, major: str):
    """The swizzled atom of rows of `width` elements: the widest that divides them."""
    size = next(w for w in (128, 64, 32) if width * dtype.width // 8 % w == 0)
    kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_SW{size}")
    return warpgroup.make_smem_layout_atom(kind, dtype)


def _rows(dtype, shape):
    """(row, element, slot) K-major: columns of swizzled chunks, as `forward/boxes.py` fills it."""
    return cute.tile_to_shape(_atom(dtype, shape[1], "K"), shape, order=(0, 1, 2))


def _columns(dtype, shape):
    """(element, row, slot) of the same bytes, MN-major."""
    return cute.tile_to_shape(_atom(dtype, shape[0], "MN"), shape, order=(1, 0, 2))
