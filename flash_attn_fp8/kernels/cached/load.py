"""Key tiles from global to shared memory: asynchronous copies, some tiles ahead.

Where the keys of a paged cache lie is found out a tile before they are asked for, and which keys
are chosen a tile before that, each lane for the keys with its number (`Place`): so the loads that
this takes are waited for by nobody. The lanes that copy a row ask the lane that knows. Keys that do
not count are filled with zeros: what lies in unused slots is never read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass import select_ as select
from cutlass.cutlass_dsl import dsl_user_op

from flash_attn_fp8.kernels.cached.context import Context, Rows
from flash_attn_fp8.kernels.cached.geometry import CHUNK, Operand
from flash_attn_fp8.kernels.ptx import asm, mad_wide
from flash_attn_fp8.specs import WARP

INDEX = 2  # of a key's numbers in shared memory, behind K's scale and V's
_NO_KEY = -1
# Of a place: page, slot in it, number of the token (_NO_KEY: it does not count); next chosen entry.
_PAGE, _WITHIN, _TOKEN, _CHOSEN = range(4)


def new_place(ctx: Context):
    """Where the keys of a tile lie, (what, number of the lane's key)."""
    per_lane = -(-ctx.spec.tile.n_block // WARP)
    return cute.make_rmem_tensor(cute.make_layout((4, per_lane)), Int32)


@cute.jit
def choose(ctx: Context, n_block: Int32, place):
    """Ask which tokens the keys of tile `n_block` are."""
    if const_expr(ctx.traits.selection is not None):
        chosen = ctx.tensors.selection[ctx.work.batch, ctx.work.kv_head, None]
        for number in cutlass.range_constexpr(place.shape[1]):
            entry = _counted(ctx, _key(ctx, n_block, number))
            if const_expr(ctx.traits.selection == "pages"):
                entry, _ = ctx.divisors.of_page(entry)
            place[_CHOSEN, number] = chosen[entry]


@cute.jit
def locate(ctx: Context, n_block: Int32, place):
    """Ask where the keys of tile `n_block` lie; those chosen are there."""
    if const_expr(_has_places(ctx)):
        for number in cutlass.range_constexpr(place.shape[1]):
            token = _counted(ctx, _key(ctx, n_block, number))
            if const_expr(ctx.traits.selection is not None):
                token = _chosen_token(ctx, _key(ctx, n_block, number), place[_CHOSEN, number])
                place[_TOKEN, number] = token
                token = cutlass.max(token, 0)
            place[_WITHIN, number] = token
            if const_expr(ctx.tensors.page_table is not None):
                page, place[_WITHIN, number] = ctx.divisors.of_page(token)
                # Nothing is done with it here, or the warp would wait.
                place[_PAGE, number] = ctx.tensors.page_table[ctx.work.batch, page]


def _has_places(ctx) -> bool:
    """Whether keys lie elsewhere than one after another."""
    return ctx.tensors.page_table is not None or ctx.traits.selection is not None


def _key(ctx, n_block, number: int):
    return n_block * ctx.spec.tile.n_block + number * WARP + ctx.lane


def _counted(ctx, key):
    """A key of the work: this one, or the nearest."""
    return cutlass.max(cutlass.min(key, ctx.work.last - 1), ctx.work.first)


@cute.jit
def _chosen_token(ctx, key, chosen):
    """The token of an entry of the selection."""
    token = chosen
    counts = (key >= ctx.work.first) & (key < ctx.work.last) & (chosen >= 0)
    if const_expr(ctx.traits.selection == "pages"):
        _, within = ctx.divisors.of_page(_counted(ctx, key))
        token = chosen * Int32(ctx.tensors.k.shape[1]) + within
        # The tokens of a page far past the end have positions of more than 32 bits.
        counts = counts & (chosen < Int32(ctx.tensors.page_table.shape[1]))
    counts = counts & (token < ctx.work.seqlen_k)
    return select(counts, token, Int32(_NO_KEY))


@cute.jit
def copy_tile(ctx: Context, n_block: Int32, stage: Int32, place):
    """Ask for the keys of tile `n_block`, which are at `place`: K, V, and their numbers."""
    g = ctx.geometry
    base = ctx.rings.toint() + slot_of(ctx, stage) * g.tile_bytes
    for operand, rows, target in ((g.k, ctx.k, base), (g.v, ctx.v, base + g.v_start)):
        _copy_rows(ctx, operand, rows, target, n_block, place)
    _copy_numbers(ctx, base + g.numbers_start, n_block, place)


@cute.jit
def _copy_rows(ctx, operand: cutlass.Constexpr, rows: cutlass.Constexpr, target, n_block, place):
    """Each thread has the same chunk of some rows, or one after another where that is not whole."""
    chunks, threads = operand.chunks, ctx.geometry.group_threads
    total = ctx.spec.tile.n_block * chunks
    thread = ctx.m_warp * WARP + ctx.lane
    known = _addresses(ctx, rows, n_block, place)
    for first in cutlass.range_constexpr(0, total, threads):
        row, chunk, swizzled_by = _row_and_chunk(first, thread, threads, chunks)
        key = n_block * ctx.spec.tile.n_block + row
        counts, address = _source(ctx, rows, key, known, place, row)
        used = select(counts, Int32(CHUNK), Int32(0))
        at = row * operand.row_bytes + chunk_at(ctx, operand, swizzled_by, chunk) * CHUNK
        if const_expr(total % threads == 0) or first + thread < total:
            copy_async(target + at, mad_wide(chunk, CHUNK, address), used, CHUNK)


def _row_and_chunk(first: int, thread, threads: int, chunks: int):
    """Of a tile, for copy number `first + thread`; and a number with the row's last three bits."""
    if threads % chunks:
        number = first + thread
        row = number // chunks
        return row, number % chunks, row
    before, row = first // chunks, thread // chunks
    return before + row, thread % chunks, (before + row if before % 8 else row)


def _addresses(ctx, rows: Rows, n_block, place):
    """Of a lane's own keys; None where keys lie one after another."""
    if not _has_places(ctx):
        return None
    found = []
    for number in range(place.shape[1]):
        _, page, within = _place_of(ctx, _key(ctx, n_block, number), place, number)
        found.append(rows.address(page, within))
    return found


def _source(ctx, rows: Rows, key, known, place, row):
    """(whether a key counts, its address), which the lane of key number `row` of the tile knows."""
    if known is None:
        return _counts(ctx, key), rows.address(None, cutlass.min(key, ctx.work.last - 1))
    counts = _counts(ctx, key)
    if ctx.traits.selection is not None:
        counts = _asked([place[_TOKEN, i] for i in range(len(known))], row) >= 0
    low, high = (_asked([Int32(x >> by) for x in known], row) for by in (0, 32))
    return counts, Int64(Uint32(low)) | Int64(high) << 32


def _asked(known: list, row):
    """What the lane of key number `row` of the tile knows."""
    answers = [cute.arch.shuffle_sync(x, row % WARP) for x in known]
    return answers[0] if len(answers) == 1 else select(row < WARP, answers[0], answers[1])


def _counts(ctx, key):
    """Whether a key of a tile is among those of the work. Parts begin on tiles, windows do not."""
    below = key < ctx.work.last
    return below & (key >= ctx.work.first) if ctx.traits.bounded_left else below


def _place_of(ctx, key, place, number: int):
    """(whether a lane's key counts, its page or None, its slot)."""
    counts, page, within = _counts(ctx, key), None, _counted(ctx, key)
    if _has_places(ctx):
        within = place[_WITHIN, number]
    if ctx.traits.selection is not None:
        counts = place[_TOKEN, number] >= 0
    if ctx.tensors.page_table is not None:
        # The id of a key that does not count may be anything.
        page = select(counts, place[_PAGE, number], Int32(0))
    return counts, page, within


def chunk_at(ctx, operand: Operand, row, chunk):
    """Where a chunk of a row lies in shared memory: see `Operand`.

    Readers ask for vectors, which are chunks where rows of a warp's products are swizzled: those
    are multiples of 128 bytes, of which a lane reads vectors of 16.
    """
    if operand.lanes == WARP:  # V of a warpgroup: four rows, two apart, of each a chunk or two
        return chunk ^ ((row >> 1 & 3) << int(operand.share > 2))
    if not operand.swizzled:
        return chunk
    if operand.lanes == 4:  # K: two rows are read at once
        return chunk ^ ((row & 1) << 2)
    low, high = (row >> 1) & 1, (row >> 2) & 1  # V: four rows, two apart
    places = {1: (1, 2), 2: (0, 2), 3: (1, 2), 4: (0, 1)}[operand.vectors]
    return chunk ^ ((low << places[0]) | (high << places[1]))


@cute.jit
def _copy_numbers(ctx, base, n_block, place):
    """Scales and indices of the tile's keys, as (K's scale, V's scale, index) arrays."""
    keys, per_token = ctx.spec.tile.n_block, ctx.geometry.scales_per_token
    for kind, rows in enumerate((ctx.k_scales, ctx.v_scales)):
        if const_expr(per_token[kind]):
            if ctx.m_warp == kind % ctx.spec.tile.m_warps:
                for number in cutlass.range_constexpr(place.shape[1]):
                    key = number * WARP + ctx.lane
                    counts, page, within = _place_of(ctx, _key(ctx, n_block, number), place, number)
                    used = select(counts, Int32(4), Int32(0))
                    if const_expr(keys % WARP == 0) or key < keys:
                        copy_async(
                            base + (kind * keys + key) * 4, rows.address(page, within), used, 4
                        )
    if const_expr(ctx.traits.selection is not None):
        if ctx.m_warp == 2 % ctx.spec.tile.m_warps:
            for number in cutlass.range_constexpr(place.shape[1]):
                key = number * WARP + ctx.lane
                if key < keys:
                    store_shared(base + (INDEX * keys + key) * 4, place[_TOKEN, number])


@dsl_user_op
def copy_async(target, source, used, size: int, *, loc=None, ip=None) -> None:
    """Copies `used` of `size` bytes to shared memory, zeros after them."""
    operands = [
        Int32(target).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        Int32(used).ir_value(loc=loc, ip=ip),
    ]
    how = "cg" if size == CHUNK else "ca"
    text = f"cp.async.{how}.shared.global [$0], [$1], {size}, $2;"
    asm(None, operands, text, "r,l,r,~{memory}", loc, ip, side_effects=True)


@dsl_user_op
def store_shared(target, value, *, loc=None, ip=None) -> None:
    """Stores 32 bits."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (target, value)]
    text = "st.shared.b32 [$0], $1;"
    asm(None, operands, text, "r,r,~{memory}", loc, ip, side_effects=True)


def slot_of(ctx: Context, stage):
    """The number of a group's stage among the key tiles of all rings."""
    return ctx.key_warp * ctx.spec.tile.stages + stage


def ring_view(ctx: Context, stage, operand: Operand, offset: int):
    """Rows of K or V of a tile in the ring: (word of a vector, vector of a row, row)."""
    g = ctx.geometry
    start = cute.recast_ptr(ctx.rings, dtype=Uint32)
    layout = cute.make_layout(
        (operand.words, operand.row_bytes // operand.vector, g.spec.tile.n_block, g.slots),
        stride=(1, operand.words, operand.row_bytes // 4, g.tile_bytes // 4),
    )
    return cute.make_tensor(start + offset // 4, layout)[None, None, None, slot_of(ctx, stage)]


def numbers_view(ctx: Context, stage, kind: int, dtype):
    """K's scales, V's scales or the indices of a tile's keys: (neighbour, pair of keys)."""
    g = ctx.geometry
    n_block = g.spec.tile.n_block
    offset = g.numbers_start // 4 + kind * n_block
    start = cute.recast_ptr(ctx.rings, dtype=dtype) + offset
    layout = cute.make_layout((2, n_block // 2, g.slots), stride=(1, 2, g.tile_bytes // 4))
    return cute.make_tensor(start, layout)[None, None, slot_of(ctx, stage)]
