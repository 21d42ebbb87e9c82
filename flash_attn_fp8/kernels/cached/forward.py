"""The cache kernel: 16-bit queries over a quantised KV cache; decode, extend, chosen cells.

docs/kernel_cache.md has the data flow. Any GPU from sm_80 on: asynchronous copies, `mma.sync`; over
codes on SM90 `wgmma` (`warpgroup/`).
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from flash_attn_fp8.kernels.cached.attend import attend_tile, new_state
from flash_attn_fp8.kernels.cached.context import Context, Divisors, Rows, m_blocks_of, work_of
from flash_attn_fp8.kernels.cached.geometry import CacheGeometry
from flash_attn_fp8.kernels.cached.merge import finish, scale_of
from flash_attn_fp8.kernels.cached.operands import Scalars, Tensors
from flash_attn_fp8.kernels.cached.queries import load_queries, shared_queries
from flash_attn_fp8.kernels.cached.walk import each_tile
from flash_attn_fp8.kernels.cached.warpgroup import attend as warpgroup_attend
from flash_attn_fp8.kernels.cached.warpgroup import finish as warpgroup_finish
from flash_attn_fp8.kernels.cached.warpgroup.geometry import WarpgroupGeometry
from flash_attn_fp8.kernels.cached.warpgroup.products import Shared
from flash_attn_fp8.kernels.cached.warpgroup.queries import share_queries
from flash_attn_fp8.kernels.codes import bias_log2
from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.fill import Unwritten, fill
from flash_attn_fp8.policy import LOG2E
from flash_attn_fp8.specs import CacheSpec, WarpgroupTile


class CacheForward:
    """The kernel of one spec."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.in_warpgroups = isinstance(spec.tile, WarpgroupTile)
        self.geometry = WarpgroupGeometry(spec) if self.in_warpgroups else CacheGeometry(spec)

    @cute.jit
    def __call__(self, tensors: Tensors, scalars: Scalars, stream):
        """Host code: the launch."""
        batch = tensors.q.shape[0]
        if const_expr(tensors.cu_seqlens_q is not None):
            batch = tensors.cu_seqlens_q.shape[0] - 1
        heads = tensors.k.shape[len(tensors.k.shape) - 2]
        m_blocks = m_blocks_of(self.spec, scalars)
        ctas = heads * m_blocks * scalars.num_splits * batch
        by = heads, scalars.num_splits, m_blocks, tensors.k.shape[1]
        # 0 where there is nothing to do: not to be divided by, on the host.
        at_least_1 = [Uint32(cutlass.max(Int32(x), 1)) for x in by]
        divisors = Divisors(*map(cute.FastDivmodDivisorV2, at_least_1))
        self.kernel.set_name_prefix("flash_attn_fp8_cache_forward")
        self.kernel(tensors, scalars, divisors).launch(
            grid=(cutlass.max(ctas, 1), 1, 1),
            block=(self.geometry.threads, 1, 1),
            min_blocks_per_mp=self.spec.tile.ctas if self.in_warpgroups else 0,
            preferred_smem_carveout=100,  # or the compiler asks a device for what it has
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars, divisors: Divisors):
        """Device code."""
        if const_expr(self.spec.split and self.spec.overlaps):
            cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end
        smem = SmemAllocator()
        ctx = self._context(tensors, scalars, divisors, smem)
        if const_expr(self.in_warpgroups):
            memory = Shared.allocated(smem, self.geometry)
            state = warpgroup_attend.new_state(ctx, memory)
            queries = partial(self._share_queries, memory)
            each_tile(ctx, queries, warpgroup_attend.attend_tile, state)
            warpgroup_finish.finish(ctx, state)
        else:
            state = new_state(ctx)
            each_tile(ctx, self._queries, attend_tile, state)
            finish(ctx, state)
        if const_expr(self.spec.traits.q_layout == "varlen"):
            if cute.arch.warp_idx() == 0:
                fill(self._unwritten(ctx))

    def _unwritten(self, ctx: Context) -> Unwritten:
        """Output rows of no CTA."""
        t, spec = ctx.tensors, self.spec
        rows = m_blocks_of(spec, ctx.scalars) * spec.tile.block_m
        return Unwritten(
            out=t.out,
            lse=t.lse,
            starts=t.cu_seqlens_q,
            covered=rows // spec.traits.q_heads_per_kv_head if spec.traits.seqused_q else None,
            parts=ctx.scalars.num_splits if spec.split else None,
            dtype=ctx.out_dtype,
        )

    def _context(self, tensors, scalars, divisors, smem) -> Context:
        g = self.geometry
        rings = smem.allocate_array(cutlass.Uint8, g.rings_bytes, byte_alignment=128)
        queries = None
        if not self.in_warpgroups and g.q_in_shared_memory:
            queries = smem.allocate_array(cutlass.Uint8, g.q_bytes, byte_alignment=128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work = work_of(g, tensors, scalars, divisors, cute.arch.block_idx()[0])
        paged = tensors.page_table is not None
        per_token = g.scales_per_token
        scales = [
            Rows.of(x, work, 2, paged) if of_key else None
            for x, of_key in zip((tensors.k_descale, tensors.v_descale), per_token, strict=True)
        ]
        return Context(
            geometry=g,
            out_dtype=DTYPES[self.spec.out_format],
            tensors=tensors,
            scalars=scalars,
            divisors=divisors,
            work=work,
            k=Rows.of(tensors.k, work, 3, paged),
            v=Rows.of(tensors.v, work, 3, paged),
            k_scales=scales[0],
            v_scales=scales[1],
            rings=rings,
            queries=queries,
            key_warp=warp // self.spec.tile.m_warps,
            m_warp=warp % self.spec.tile.m_warps,
            lane=cute.arch.lane_idx(),
        )

    @cute.jit
    def _share_queries(self, memory: cutlass.Constexpr, ctx: Context):
        common = self._score_factor(ctx)
        return None, share_queries(ctx, memory, common)

    @cute.jit
    def _queries(self, ctx: Context):
        """(fragments (4, k_steps, m_tiles), factor of scores to log2 units (half, m_tile))."""
        g, m_tiles = self.geometry, self.spec.tile.m_tiles
        factors = cute.make_rmem_tensor(cute.make_layout((2, m_tiles)), Float32)
        common = self._score_factor(ctx)
        if const_expr(g.q_in_shared_memory):
            queries = shared_queries(ctx)
        else:
            layout = cute.make_layout((4, g.k_steps, m_tiles))
            queries = cute.make_rmem_tensor(layout, cutlass.Uint32)
        for m in cutlass.range_constexpr(m_tiles):
            fragment, of_rows = load_queries(ctx, m)
            for half in cutlass.range_constexpr(2):
                factors[half, m] = of_rows[half] * common
            if const_expr(g.q_in_shared_memory):
                if ctx.key_warp == 0:  # the groups have the same rows
                    self._keep(fragment, queries, m)
            else:
                self._keep(fragment, queries, m)
        if const_expr(g.q_in_shared_memory and self.spec.tile.key_warps > 1):
            cute.arch.sync_threads()
        return queries, factors

    def _keep(self, fragment, queries, m: int) -> None:
        for step in range(self.geometry.k_steps):
            cute.autovec_copy(fragment[None, step], queries[None, step, m])

    @cute.jit
    def _score_factor(self, ctx: Context):
        """softmax_scale, and K's scale where it has none for each token; log2 e but for softcap."""
        traits = self.spec.traits
        kind = traits.k_descale
        factor = ctx.scalars.softmax_scale * 2.0 ** -bias_log2(traits.kv_format, self.spec.has_fp8)
        if const_expr(kind is not None and not kind.per_token):
            factor = factor * scale_of(ctx, kind.granularity, ctx.tensors.k_descale)
        if const_expr(not traits.softcap):
            factor = factor * LOG2E
        return factor
