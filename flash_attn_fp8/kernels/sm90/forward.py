"""The SM90 forward kernel: host entry, and a body that reads as its set of warp roles.

docs/kernel_sm90.md draws the pipeline: who waits for whom, and what lies where.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.fill import fill
from flash_attn_fp8.kernels.forward.boxes import Box, Loads, by_key, by_query
from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.geometry import TOKEN_SCALE_KINDS, TOKEN_SCALE_SLOTS
from flash_attn_fp8.kernels.forward.operands import Scalars, Tensors, TmaOperands
from flash_attn_fp8.kernels.forward.schedule import Schedule
from flash_attn_fp8.kernels.forward.shared_memory import write_ones, zero_rows
from flash_attn_fp8.kernels.forward.tail import tail_role
from flash_attn_fp8.kernels.forward.token_scales import token_scale_role
from flash_attn_fp8.kernels.sm90.attend import attend_role
from flash_attn_fp8.kernels.sm90.barriers import Barriers
from flash_attn_fp8.kernels.sm90.context import Buffers, Products
from flash_attn_fp8.kernels.sm90.geometry import (
    FILL_WARP,
    LOAD_WARP,
    ROWS,
    SCALE_WARP,
    SUM_COLUMNS,
    TAIL_WARP,
    UNIT_SLOTS,
    Geometry,
)
from flash_attn_fp8.kernels.sm90.load import load_role
from flash_attn_fp8.kernels.sm90.units import Claims, claim, hear
from flash_attn_fp8.specs import Sm90Spec

_CONSUMERS = 4  # the first consumer warp


class Sm90Forward:
    """The kernel of one spec."""

    def __init__(self, spec: Sm90Spec) -> None:
        self.spec = spec
        self.geometry = Geometry(spec)
        self.dtype = DTYPES[spec.traits.q_format]
        self.k_dtype = DTYPES[spec.traits.kv_format]
        self.v_dtype = DTYPES[spec.v_format]
        self.out_dtype = DTYPES[spec.out_format]

    @cute.jit
    def __call__(self, tensors: Tensors, scalars: Scalars, stream):
        """Host code: descriptors for TMA, and the launch."""
        g = self.geometry
        boxes = self._boxes(Products(g))
        v = _transposed(tensors.v) if const_expr(g.transposes_v) else by_key(tensors.v)
        tma = TmaOperands(
            *boxes.q.atom(by_query(tensors.q, self.spec.group)),
            *boxes.k.atom(by_key(tensors.k)),
            *boxes.v.atom(v),
        )
        schedule = Schedule.of(g, tensors, scalars)
        grid = cutlass.max(cutlass.min(scalars.num_ctas, schedule.total), 1)
        self.kernel.set_name_prefix("flash_attn_fp8_sm90_forward")
        self.kernel(tensors, scalars, tma).launch(
            grid=(grid, 1, 1),
            block=(g.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=g.follows,
        )

    def _boxes(self, products: Products) -> Loads:
        """Boxes of q, k and v: `width` columns and `rows` of a tile."""
        g = self.geometry

        def box(width: int, rows: tuple[int, ...], tile_rows: int, layout) -> Box:
            chunk = g.chunk(width)
            return Box(chunk, width // chunk, rows, tile_rows, layout.inner)

        keys = (g.key_rows(g.tile_n),)
        q = box(g.head_dim, (self.spec.group, g.tokens), g.tile_m, products.q_layout)
        k = box(g.head_dim, keys, g.tile_n, products.k_layout)
        if g.transposes_v:
            return Loads(q, k, box(g.tile_n, (g.head_dim_v,), g.v_rows, products.v_layout(0)))
        return Loads(q, k, box(g.head_dim_v, keys, g.tile_n, products.v_layout(0)))

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars, tma: TmaOperands):
        """Device code: set up, then each warp plays its role to the end."""
        g = self.geometry
        products = Products(g)
        boxes = self._boxes(products)
        buffers, barriers = self._shared_memory()
        # In each role anew: what is computed before them would have to be kept through all.
        context = partial(self._context, tensors, scalars, buffers, barriers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self._set_up(buffers, barriers, warp, (tma.q_atom, tma.k_atom, tma.v_atom))
        producer, consumer = g.registers

        if warp < _CONSUMERS:
            cute.arch.setmaxregister_decrease(producer)
            if const_expr(self.spec.widened):
                cute.arch.griddepcontrol_wait()  # K, V and their scales are not there yet
            if warp == LOAD_WARP:
                load_role(context(claims=True), Loads.of(tma, boxes))
            elif warp == SCALE_WARP:
                if const_expr(g.scales_per_token):
                    token_scale_role(context())
            elif warp == TAIL_WARP:
                if const_expr(g.cleans_tail):
                    tail_role(context(), partial(_first_values, g, buffers, barriers))
            elif warp == FILL_WARP:
                if const_expr(self.spec.traits.q_layout == "varlen"):
                    fill(context().unwritten)
        else:
            cute.arch.setmaxregister_increase(consumer)
            if const_expr(self.spec.widened):
                cute.arch.griddepcontrol_wait()  # nor units of tiles
            attend_role(context(), products, warp // _CONSUMERS - 1)

    def _shared_memory(self) -> tuple[Buffers, Barriers]:
        g = self.geometry
        smem = SmemAllocator()
        barriers = Barriers.of(smem, g)
        of_keys = cute.make_layout((g.tile_n, TOKEN_SCALE_KINDS, TOKEN_SCALE_SLOTS))
        tiles = partial(smem.allocate_array, byte_alignment=1024)
        buffers = Buffers(
            token_scale=smem.allocate_tensor(Float32, of_keys, 16),
            units=smem.allocate_tensor(Int32, cute.make_layout(UNIT_SLOTS), 16),
            q_unit=smem.allocate_tensor(Float32, cute.make_layout((ROWS, g.q_stage)), 16),
            q=tiles(self.dtype, g.q_bytes // g.element * g.q_stage),
            k=tiles(self.k_dtype, g.k_bytes // g.element * g.stages),
            v=tiles(self.v_dtype, g.v_bytes // g.element * g.stages),
        )
        return buffers, barriers

    def _context(self, tensors, scalars, buffers, barriers, claims=False) -> Context:
        def following(index, count):
            if not self.spec.claims_units:
                return index + cute.arch.grid_dim()[0]
            units = Claims(barriers.units, buffers.units, tensors.counter)
            return claim(units, count) if claims else hear(units, count)

        return Context(
            geometry=self.geometry,
            out_dtype=self.out_dtype,
            tensors=tensors,
            scalars=scalars,
            schedule=Schedule.of(self.geometry, tensors, scalars),
            buffers=buffers,
            barriers=barriers,
            first=cute.arch.block_idx()[0],
            following=following,
        )

    @cute.jit
    def _set_up(self, buffers, barriers, warp, atoms):
        g = self.geometry
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        if const_expr(g.sums_by_mma):
            self._write_ones(buffers)
        if const_expr(g.rows < g.tile_m):
            self._zero_unused_rows(buffers)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

    @cute.jit
    def _zero_unused_rows(self, buffers):
        """Rows of query tiles that no token has: the tensor core reads what TMA never writes."""
        g = self.geometry
        for stage in cutlass.range_constexpr(g.q_stage):
            tile = buffers.q + stage * (g.q_bytes // g.element)
            thread = cute.arch.thread_idx()[0]
            zero_rows(g, tile, g.tile_m, g.head_dim, g.rows, thread, g.threads)

    @cute.jit
    def _write_ones(self, buffers):
        """Rows of ones under V^T in each of its slots: TMA leaves them alone."""
        g = self.geometry
        chunk = g.chunk(g.tile_n)
        size = chunk * SUM_COLUMNS
        for column in cutlass.range_constexpr(g.stages * g.tile_n // chunk):
            start = buffers.v + (column + 1) * g.v_rows * chunk - size
            thread = cute.arch.thread_idx()[0]
            write_ones(self.spec.traits.kv_format, start, size, thread, g.threads)


def _transposed(v):
    """(b, h, dv, columns) or (h, dv, columns) as (columns, dv, h[, b])."""
    rank = len(v.shape)
    return cute.make_tensor(v.iterator, cute.select(v.layout, mode=list(range(rank - 1, -1, -1))))


def _first_values(g, buffers, barriers, work, tiles):
    return buffers.v + barriers.v.slot(tiles) * (g.v_bytes // g.element)
