"""The static model: what two runs differ in, for a score tile; and the bars it is held to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import static_report, static_sm100
from benchmarks.static_model import KEYS, ROWS, TILE, Case, Execution, Measured
from benchmarks.static_sm100 import CODES, OURS, Bar
from flash_attn_fp8.results import Results, check

TILES = ROWS // TILE * (KEYS[1] - KEYS[0]) // TILE
CASE = Case("e4m3", 128, causal=False)
# Line, opcode, warp, executions before the tiles, executions in each of them by all warps.
EXECUTED = [
    (1, "ex2.approx.ftz.f32", 0, 300, 400), (2, "fma.rn.ftz.f32x2", 0, 7, 64),
    (3, "mov.b32", 0, 9, 10), (4, "tcgen05.ld.sync.aligned.32x32b.x32.b32", 0, 0, 4),
    (5, "tcgen05.ld.sync.aligned.32x32b.x32.b32", 8, 3, 8), (6, "mul.rn.ftz.f32x2", 8, 0, 64),
    (7, "tcgen05.st.sync.aligned.32x32b.x32.b32", 8, 0, 8),
    (8, "tcgen05.mma.cta_group::1.kind::f8f6f4", 12, 0, 8),
    (9, "cp.async.bulk.tensor.4d.shared::cta.global.tile", 13, 5, 1),
    (10, "mbarrier.init.shared.b64", 13, 40, 0),
]  # fmt: skip
MMA = "tcgen05.mma kind::f8f6f4 128x128x32"


def executed(keys: int, tiles: int, loads: int = 1) -> Execution:
    """A run of so many tiles, each K and V tile loaded `loads` times for two query tiles."""
    counts = Counter({(line, w): before + n * tiles for line, _, w, before, n in EXECUTED})
    instructions = [SimpleNamespace(line=line, opcode=o) for line, o, *_ in EXECUTED]
    rows = [
        SimpleNamespace(who=w, opcode=o, executed=before + n * tiles)
        for _, o, w, before, n in EXECUTED
    ]
    traffic = Counter({
        MMA: 8 * tiles,
        "shared bytes read by tcgen05.mma": 49152 * tiles,
        "bulk tensor bytes global to shared": 65536 + 16384 * tiles * loads,
        "shared bytes read": 512 * tiles,
        "tensor memory bytes loaded": 1000 + 65536 * tiles,
    })  # fmt: skip
    run: Any = SimpleNamespace(
        entry=SimpleNamespace(instructions=instructions),
        instructions=counts,
        traffic=traffic,
        rows=lambda: rows,
    )
    launch: Any = SimpleNamespace(cluster=(1, 1, 1), grid=(2, 1, 1), dynamic_smem=1024)
    return Execution(keys, launch, run)


def measured(loads: int = 1) -> Measured:
    return Measured(CASE, executed(KEYS[0], TILES, loads), executed(KEYS[1], 2 * TILES, loads))


def test_roles_are_found_by_what_warps_do() -> None:
    assert measured().roles == {0: "softmax", 8: "correction", 12: "MMA", 13: "load"}


def test_what_is_executed_once_is_not_part_of_a_tile() -> None:
    m = measured()
    assert m.tiles == TILES
    assert m.per_tile("softmax") == 478
    assert m.per_tile("softmax", "mov") == 10
    assert m.per_tile("softmax", "fma.f32x2") == 64
    assert m.per_tile("load", "cp.async.bulk") == 1
    assert m.per_tile("load", "mbarrier.init") == 0
    assert m.exp2_in_ptx == 100
    assert m.mbarriers == 20  # of two CTAs


def test_a_tile_of_two_fp8_products_keeps_the_tensor_core_busy_for_512_cycles() -> None:
    assert measured().tensor_cycles == 512


def test_bytes_and_cycles_of_shared_and_tensor_memory() -> None:
    m = measured()
    assert m.shared_bytes == {"MMA operands": 49152, "TMA": 16384, "generic": 512}
    assert m.shared_cycles == 516
    # Q K^T reads two operands of 16 KB from shared memory, P V one; P comes from tensor memory.
    assert m.tensor_memory_bytes == {"loads": 65536, "stores": 0, "MMA operands": 16384}


@pytest.mark.parametrize("loads", [1, 2])
def test_a_tile_that_is_loaded_again_shows(loads: int) -> None:
    assert measured(loads).loaded(query_tiles=2) == loads


def test_a_bar_is_kept_at_its_limit() -> None:
    assert Bar("bar", CASE, 1.0, 1.0).kept
    assert not Bar("bar", CASE, 1.01, 1.0).kept


def test_missed_bars_are_printed_with_their_note(capsys: pytest.CaptureFixture[str]) -> None:
    bars = [Bar("spills", CASE, 0, 0), Bar("softmax", CASE, 1000, 798, "bound by ALU")]
    static_sm100.print_bars(bars)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "e4m3 hd128 full: spills: 0, limit 0: kept"
    assert second.endswith("MISSED: bound by ALU")
    page = static_report.markdown(Results((), "command"), [], bars)
    assert "| softmax | e4m3 hd128 full | 1,000 | 798 | **missed** |" in page
    assert "- e4m3 hd128 full, softmax: bound by ALU" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_kernels_are_measured_and_agree_with_their_cubins() -> None:
    pair = static_sm100.measure(Case("e4m3", 64, causal=False))
    for impl, m in pair.items():
        assert m.exp2_in_sass == m.exp2_in_ptx
        assert (m.exp2_in_ptx > 64) == (impl != CODES)
        assert m.tensor_cycles == (288 if impl == CODES else 256)  # with columns of ones
        assert set(m.roles.values()) >= {"softmax", "correction", "MMA", "load"}
        assert m.bound[1] >= m.loop("softmax").bound[1]
    check(static_sm100.rows(pair))
    assert pair[OURS].loaded(static_sm100.query_tiles(pair[OURS].case)) == 1
    assert list(static_sm100.bars(pair))
