"""The SM100 forward kernel: host entry, and a body that reads as its set of warp roles.

docs/kernel_sm100.md draws the pipeline: who waits for whom, and what lies where.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.fill import fill
from flash_attn_fp8.kernels.forward.boxes import Box, Loads, by_key, by_query
from flash_attn_fp8.kernels.forward.geometry import TOKEN_SCALE_KINDS, TOKEN_SCALE_SLOTS
from flash_attn_fp8.kernels.forward.operands import Scalars, Tensors, TmaOperands
from flash_attn_fp8.kernels.forward.schedule import Schedule
from flash_attn_fp8.kernels.forward.shared_memory import write_ones, zero_rows
from flash_attn_fp8.kernels.forward.tail import tail_role
from flash_attn_fp8.kernels.forward.token_scales import token_scale_role
from flash_attn_fp8.kernels.sm100 import tensor_memory
from flash_attn_fp8.kernels.sm100.barriers import Barriers, v_use
from flash_attn_fp8.kernels.sm100.context import Buffers, Context
from flash_attn_fp8.kernels.sm100.correction import correction_role
from flash_attn_fp8.kernels.sm100.geometry import (
    CORRECTION_WARP,
    CORRECTION_WARPS,
    LOAD_WARP,
    MMA_WARP,
    SCALE_WARP,
    SOFTMAX_WARPS,
    SUM_COLUMNS,
    TAIL_WARP,
    THREADS,
    TMEM_COLUMNS,
    Geometry,
)
from flash_attn_fp8.kernels.sm100.load import load_role
from flash_attn_fp8.kernels.sm100.mma import Products, fragments, mma_role
from flash_attn_fp8.kernels.sm100.softmax import softmax_role
from flash_attn_fp8.specs import TILE, WARP, Sm100Spec

_TMEM_BARRIER = 1  # named barrier: tensor memory is allocated, or no longer in use


class Sm100Forward:
    """The kernel of one spec."""

    def __init__(self, spec: Sm100Spec) -> None:
        self.spec = spec
        self.geometry = Geometry(spec)
        self.q_dtype = DTYPES[spec.traits.q_format]
        self.out_dtype = DTYPES[spec.out_format]

    @cute.jit
    def __call__(self, tensors: Tensors, scalars: Scalars, stream):
        """Host code: descriptors for TMA, and the launch."""
        g = self.geometry
        products = self._products()
        boxes = self._boxes(products)
        tma = TmaOperands(
            *boxes.q.atom(by_query(tensors.q, self.spec.group)),
            *boxes.k.atom(by_key(tensors.k)),
            *boxes.v.atom(by_key(tensors.v)),
        )
        schedule = Schedule.of(g, tensors, scalars)
        grid = cutlass.max(cutlass.min(scalars.num_ctas // g.ctas, schedule.total), 1) * g.ctas
        self.kernel.set_name_prefix("flash_attn_fp8_sm100_forward")
        self.kernel(tensors, scalars, tma, products.qk, products.pv).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(g.ctas, 1, 1) if const_expr(self.spec.pair) else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _products(self) -> Products:
        g, d = self.geometry, self.q_dtype
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        rows, group = TILE * g.ctas, self._cta_group
        qk = blackwell.make_trivial_tiled_mma(d, d, k_major, k_major, Float32, group, (rows, TILE))
        pv = blackwell.make_trivial_tiled_mma(
            *(d, d, k_major, mn_major, Float32, group, (rows, g.head_dim_v)),
            tcgen05.OperandSource.TMEM,
        )
        return self._with_layouts(qk, pv)

    def _with_layouts(self, qk, pv) -> Products:
        g, d = self.geometry, self.q_dtype
        rows = TILE * g.ctas
        of_qk, of_pv = (rows, TILE, g.head_dim), (rows, g.head_dim_v, TILE)
        slot = g.kv_bytes // g.element
        sums, ones_layout = self._sums()
        return Products(
            qk,
            pv,
            sums,
            q_layout=blackwell.make_smem_layout_a(qk, of_qk, d, g.q_slots),
            k_layout=_strided(blackwell.make_smem_layout_b(qk, of_qk, d, g.kv_slots), slot),
            p_layout=blackwell.make_smem_layout_a(pv, of_pv, d, 1),
            v_layout=_strided(blackwell.make_smem_layout_b(pv, of_pv, d, g.kv_slots), slot),
            ones_layout=ones_layout,
        )

    def _sums(self):
        """The product of P and ones, and how the ones lie: K-major, or in any other way."""
        if not self.geometry.sums_by_mma:
            return None, None
        d, major = self.q_dtype, OperandMajorMode.K
        shape = TILE, SUM_COLUMNS
        sums = blackwell.make_trivial_tiled_mma(
            *(d, d, major, major, Float32, self._cta_group, shape), tcgen05.OperandSource.TMEM
        )
        return sums, blackwell.make_smem_layout_b(sums, (*shape, TILE), d, 1)

    @property
    def _cta_group(self):
        return tcgen05.CtaGroup.TWO if self.spec.pair else tcgen05.CtaGroup.ONE

    def _boxes(self, products: Products) -> Loads:
        """Boxes of q, k and v: whose `width` columns and `rows` of a tile a CTA holds."""
        g = self.geometry

        def box(width: int, rows: tuple[int, ...], tile_rows: int, layout) -> Box:
            chunk = g.chunk(width)
            return Box(chunk, width // chunk, rows, tile_rows, layout.inner, self._cta_group)

        return Loads(
            q=box(g.head_dim, (self.spec.group, g.tokens), TILE, products.q_layout),
            k=box(g.head_dim, (g.key_rows(g.k_rows),), g.k_rows, products.k_layout),
            v=box(g.v_columns, (g.key_rows(TILE),), TILE, products.v_layout),
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        scalars: Scalars,
        tma: TmaOperands,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
    ):
        """Device code: set up, then each warp plays its role to the end."""
        products = self._with_layouts(qk, pv)
        boxes, registers = self._boxes(products), self.geometry.registers
        buffers, barriers = self._shared_memory()
        # In each role anew: what is computed before them would have to be kept through all.
        context = partial(self._context, tensors, scalars, buffers, barriers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self._set_up(buffers, barriers, warp, (tma.q_atom, tma.k_atom, tma.v_atom))

        # Before the roles part: `setmaxnreg` is one instruction for all warps of a warpgroup.
        if warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(registers.others)

        if warp == LOAD_WARP:
            load_role(context(), Loads.of(tma, boxes))

        elif warp == MMA_WARP:
            cute.arch.alloc_tmem(TMEM_COLUMNS, buffers.tmem_address, self.spec.pair)
            tmem = self._tensor_memory(buffers)
            cute.arch.relinquish_tmem_alloc_permit(self.spec.pair)
            if self._rank() == 0:  # the leader issues for both CTAs
                ctx = context()
                mma_role(ctx, products, fragments(ctx, products, tmem))
            self._meet()

        elif warp == TAIL_WARP:
            if const_expr(self.geometry.cleans_tail):
                tail_role(context(), partial(_first_values, self.geometry, buffers, barriers))

        elif warp == SCALE_WARP:
            if const_expr(self.spec.traits.q_layout == "varlen"):
                fill(context().unwritten)
            if const_expr(self.geometry.scales_per_token):
                token_scale_role(context())

        elif warp >= CORRECTION_WARP:
            cute.arch.setmaxregister_decrease(registers.correction)
            correction_role(context(), self._tensor_memory(buffers))
            self._meet()

        elif warp < SOFTMAX_WARPS * self.geometry.q_stage:
            cute.arch.setmaxregister_increase(registers.softmax)
            softmax_role(context(), warp // SOFTMAX_WARPS, self._tensor_memory(buffers))
            self._meet()

        else:
            cute.arch.setmaxregister_decrease(registers.idle)

        self._tear_down(buffers, warp)

    def _shared_memory(self) -> tuple[Buffers, Barriers]:
        g = self.geometry
        smem = SmemAllocator()
        barriers = Barriers.of(smem, g)
        rows = cute.make_layout((TILE, g.q_stage))
        of_keys = cute.make_layout((TILE, TOKEN_SCALE_KINDS, TOKEN_SCALE_SLOTS))
        ones = None
        if g.sums_by_mma:
            ones = smem.allocate_array(self.q_dtype, SUM_COLUMNS * TILE, byte_alignment=1024)
        buffers = Buffers(
            tmem_address=smem.allocate_array(Int32, 1),
            row_scale=smem.allocate_tensor(Float32, rows, 16),
            token_scale=smem.allocate_tensor(Float32, of_keys, 16),
            staging=smem.allocate_array(cutlass.Uint8, g.staging_bytes, byte_alignment=128),
            ones=ones,
            q=smem.allocate_array(self.q_dtype, TILE * g.head_dim * g.q_slots, byte_alignment=1024),
            kv=smem.allocate_array(
                self.q_dtype, g.kv_bytes // g.element * g.kv_slots, byte_alignment=1024
            ),
        )
        return buffers, barriers

    def _context(self, tensors, scalars, buffers, barriers) -> Context:
        g = self.geometry
        return Context(
            geometry=g,
            out_dtype=self.out_dtype,
            tensors=tensors,
            scalars=scalars,
            schedule=Schedule.of(g, tensors, scalars, self._rank()),
            buffers=buffers,
            barriers=barriers,
            first=cute.arch.block_idx()[0] // g.ctas,
            following=lambda index, _: index + cute.arch.grid_dim()[0] // g.ctas,
        )

    def _rank(self):
        """Which CTA of a pair this is."""
        return cute.arch.block_idx()[0] % self.geometry.ctas

    @cute.jit
    def _set_up(self, buffers, barriers, warp, atoms):
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        if const_expr(self.geometry.rows < TILE):
            self._zero_unused_rows(buffers)
        if const_expr(self.geometry.sums_by_mma):
            self._write_ones(buffers)
        if const_expr(self.spec.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _tensor_memory(self, buffers):
        """The address of the CTA's tensor memory, once it is allocated."""
        self._meet()
        return cute.arch.retrieve_tmem_ptr(Float32, 16, buffers.tmem_address)

    def _meet(self) -> None:
        """Softmax, correction and MMA warps hand tensor memory over to one another."""
        users = SOFTMAX_WARPS * self.geometry.q_stage + CORRECTION_WARPS + 1
        tensor_memory.fence_before_arrive()
        # Not `cute.arch.barrier`: that is `.aligned`, for warps that execute the same instruction.
        number, threads = (Int32(n).ir_value() for n in (_TMEM_BARRIER, WARP * users))
        nvvm.barrier_cta_sync(number, thread_count=threads, aligned=False)
        tensor_memory.fence_after_wait()

    @cute.jit
    def _tear_down(self, buffers, warp):
        """Tensor memory is freed when nobody uses it, in either CTA of a pair."""
        if const_expr(self.spec.pair):
            tensor_memory.fence_before_arrive()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            tensor_memory.fence_after_wait()
        if warp == MMA_WARP:
            address = cute.arch.retrieve_tmem_ptr(Float32, 16, buffers.tmem_address)
            cute.arch.dealloc_tmem(address, TMEM_COLUMNS, self.spec.pair)

    @cute.jit
    def _write_ones(self, buffers):
        fmt, size = self.spec.traits.kv_format, SUM_COLUMNS * TILE
        write_ones(fmt, buffers.ones, size, cute.arch.thread_idx()[0], THREADS)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def _zero_unused_rows(self, buffers):
        """Rows of query tiles that no token has: the tensor core reads what TMA never writes."""
        g = self.geometry
        for slot in cutlass.range_constexpr(g.q_slots):
            tile = buffers.q + slot * (TILE * g.head_dim)
            zero_rows(g, tile, TILE, g.head_dim, g.rows, cute.arch.thread_idx()[0], THREADS)
        cute.arch.fence_view_async_shared()


def _first_values(g, buffers, barriers, work, tiles):
    slot = barriers.kv.slot(v_use(g, tiles, work.tiles, 0))
    return buffers.kv + slot * (g.kv_bytes // g.element)


def _strided(layout, slot: int):
    """A staged layout whose last mode, the slot, has a stride of `slot` elements.

    K and V share a ring; their rows may differ in length.
    """
    outer = layout.outer
    outer = cute.make_layout(outer.shape, stride=(*outer.stride[:-1], slot))
    return cute.make_composed_layout(layout.inner, 0, outer)
