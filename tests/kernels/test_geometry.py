"""The SM100 kernel's sizes: they fit the chip, and docs/kernel_sm100.md has the table of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.kernels.sm100 import geometry as sizes
from flash_attn_fp8.kernels.sm100.geometry import Geometry
from flash_attn_fp8.specs import Sm100Spec
from flash_attn_fp8.support import FORWARD_HEAD_DIMS

DOC = Path(__file__).parents[2] / "docs" / "kernel_sm100.md"
MARK = "<!-- geometry -->\n"


def spec_of(fmt: str, dims: tuple[int, int], seqlen_q: int = 256) -> Sm100Spec:
    q, k, v = (torch.empty(1, seqlen_q, 1, d) for d in (dims[0], *dims))
    q, k, v = (x.to(FORMATS[fmt].dtype) for x in (q, k, v))
    spec = fa.explain(fa.flash_attn_func, q, k, v, impl="sim").plan.spec
    assert isinstance(spec, Sm100Spec)
    return spec


def all_geometries() -> list[tuple[str, Geometry]]:
    """Each format's width and head dims, alone and as a pair where they are paired."""
    found = []
    for fmt in ("e4m3", "bf16"):
        for dims in FORWARD_HEAD_DIMS:
            alone, many_rows = (Geometry(spec_of(fmt, dims, n)) for n in (128, 257))
            label = "fp8" if fmt == "e4m3" else "16 bits"
            label += f", {dims[0]}" if dims[0] == dims[1] else f", {dims[0]} of v {dims[1]}"
            found.append((label, alone))
            if many_rows.spec.pair:
                found.append((f"{label}, pair", many_rows))
    return found


@pytest.mark.parametrize(("name", "g"), all_geometries())
def test_everything_fits(name: str, g: Geometry) -> None:
    used = g.q_slots * g.q_bytes + g.kv_slots * g.kv_bytes + g.staging_bytes
    assert used <= sizes.SHARED_MEMORY - 8 * 1024, "barriers and scales need room, too"
    assert g.o_column(g.q_stage - 1) + g.head_dim_v <= sizes.TMEM_COLUMNS
    registers = g.registers
    second = registers.softmax if g.q_stage == 2 else registers.idle
    assert registers.softmax + second + registers.correction + registers.others <= 512
    assert g.kv_slots >= 2, "K and V of one tile must be there together"
    assert g.head_dim % g.chunk(g.head_dim) == 0 == g.v_columns % g.chunk(g.v_columns)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 16, 48, 127, 128])
def test_a_tile_has_whole_tokens(group: int) -> None:
    spec = spec_of("e4m3", (128, 128))
    g = Geometry(Sm100Spec(spec.traits, group=group))
    assert 0 < g.rows <= 128 < g.rows + group, "no room for another token is left"


def table() -> str:
    lines = [
        "| | query tiles at once | Q in shared memory | K, V in shared memory |",
        "|---|---|---|---|",
    ]
    for name, g in all_geometries():
        q, kv = g.q_bytes // 1024, g.kv_bytes // 1024
        lines.append(f"| {name} | {g.q_stage} | {g.q_slots} x {q} KB | {g.kv_slots} x {kv} KB |")
    return "\n".join(lines) + "\n"


def test_the_document_has_the_sizes() -> None:
    text = DOC.read_text()
    assert MARK + "\n" + table() in text, f"put this after {MARK!r}:\n{table()}"
