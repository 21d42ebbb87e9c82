"""The cache kernel with products of warpgroups, on SM90, beside the emulation and the definition.

`on_either` runs other modules of this folder on it as well.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.cache_tile import DECODE_ROWS, warpgroup_tile_for
from flash_attn_fp8.kernels.cached.warpgroup.geometry import WarpgroupGeometry
from flash_attn_fp8.plan import FEW_ROWS_OF_CODES
from flash_attn_fp8.specs import CacheSpec, WarpgroupTile
from flash_attn_fp8.target import SHARED_MEMORY
from tests.budget import rel_l2
from tests.cached.checks import check_configuration
from tests.cached.configurations import KEYS, Configuration, configurations
from tests.compiled_code import check_code

TARGET = "sm_90a:4"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))


def runs_here(c: Configuration) -> bool:
    """Over codes, of head dims that fill products, and not converted first.

    Packed queries are planned for as if one of the sequences might have them all.
    """
    of_codes = c.formats[1] in ("e4m3", "e5m2", "int8")
    few = c.group * c.tokens * len(KEYS) <= FEW_ROWS_OF_CODES
    return of_codes and c.head_dims in HEAD_DIMS and few


EVERY = 4  # of those that take little, one in so many is in the default run
POSSIBLE = [c for c in configurations() if runs_here(c)]
CHEAP = [c for c in POSSIBLE if c.group * c.tokens <= DECODE_ROWS]
CASES = [c if c in CHEAP[::EVERY] else pytest.param(c, marks=pytest.mark.slow) for c in POSSIBLE]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_the_emulation_and_within_the_budget(case: Configuration) -> None:
    check_configuration(case, TARGET)


LN2 = 0.6931471824645996  # with it as softmax_scale a score is K's scale, in log2 units


def one_hot_keys(rows: list[int], keys: dict[int, tuple[int, float]]) -> dict[str, Any]:
    """Queries that are 1 in a place each, and keys, which have a scale; others are 1 in place 0."""
    q = torch.zeros(1, 1, len(rows), 64)
    q[0, 0, range(len(rows)), rows] = 1
    k, scale = torch.zeros(1, 256, 1, 64), torch.ones(1, 256, 1)
    k[..., 0] = 1
    for key, (place, of_key) in keys.items():
        k[0, key, 0] = 0
        k[0, key, 0, place], scale[0, key, 0] = 1, of_key
    v = torch.randn(1, 256, 1, 64, generator=torch.Generator().manual_seed(0))
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    return {
        "q": q.bfloat16(), "k": k, "v": v, "k_descale": scale, "softmax_scale": LN2,
        "out_dtype": torch.float32, "return_lse": True, "num_splits": 1,
    }  # fmt: skip


def on_sm90(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    result, _ = fa.simulate(fa.flash_attn_varlen_func, **call, target=TARGET)
    return result


def test_probabilities_stay_in_range_where_maxima_are_far_apart() -> None:
    """A maximum 16 above another, whose sum with the threshold of 8 rounds to the same number."""
    call = one_hot_keys([0], {255: (0, 2.0**27 + 16), 70: (0, 2.0**27 + 32)})
    out, lse = on_sm90(call)
    assert rel_l2(out[0, 0, 0], call["v"][0, 70, 0].float()) < 2 * 2.0**-16  # the other's weight
    assert bool(lse.isfinite().all())


def test_a_row_is_not_raised_because_another_is() -> None:
    """A maximum that lags by the threshold but for a rounding, and a row that is raised."""
    keys = {255: (0, 24.0000057220459), 70: (0, 32.00000762939453), 80: (1, 200.0)}
    alone, alone_lse = on_sm90(one_hot_keys([0], keys))
    out, lse = on_sm90(one_hot_keys([0, 1], keys))
    assert torch.equal(out[:, :, :1], alone)
    assert torch.equal(lse[:, :1], alone_lse)


@pytest.mark.parametrize(("scale", "softmax_scale"), [(1e31, 1e-34), (-1.0, 2e38)])
def test_scores_at_the_ends_of_fp32(scale: float, softmax_scale: float) -> None:
    """Scales whose product with codes' sums is beyond fp32, and scores that are nearly -inf."""
    call = one_hot_keys([0], {})
    call |= {"q": call["q"].copysign(torch.tensor(scale)), "softmax_scale": softmax_scale}
    call["k_descale"] = call["k_descale"] * abs(scale)
    out, lse = on_sm90(call)
    assert rel_l2(out[0, 0, 0], call["v"].float().mean(1)[0, 0]) < 1e-5
    assert bool(lse.isfinite().all())


def spec_of(rows: int, head_dims: tuple[int, int], **options: Any) -> CacheSpec:
    """Of decode over a paged cache of e4m3 with scales per token, `rows` a KV head."""
    dtype = options.pop("dtype", torch.float8_e4m3fn)
    q = torch.empty(2, 1, rows, head_dims[0], dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(64, 16, 1, d, dtype=dtype, device="meta") for d in head_dims)
    scale = torch.empty(64, 16, 1, device="meta")
    table = torch.empty(2, 32, dtype=torch.int32, device="meta")
    explained = fa.explain(
        fa.flash_attn_with_kvcache, q, k, v, k_descale=scale, v_descale=scale, page_table=table,
        cache_seqlens=torch.empty(2, dtype=torch.int32, device="meta"), target="sm_90a", **options,
    )  # fmt: skip
    spec = explained.plan.spec if explained.plan else None
    assert isinstance(spec, CacheSpec), str(explained)
    assert isinstance(spec.tile, WarpgroupTile)
    return spec


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_all_rows_fit_and_divide_keys_alike(head_dims: tuple[int, int]) -> None:
    """As many CTAs as are to fit do, with two stages or three."""
    memory = SHARED_MEMORY["sm_90a"]
    spec = spec_of(8, head_dims)
    divisions = set()
    for rows in (*range(1, 2 * DECODE_ROWS), 1000):
        for full in (False, True):
            tile = warpgroup_tile_for(rows, *head_dims, memory, full=full, scattered=False)
            g = WarpgroupGeometry(replace(spec, tile=tile))
            assert tile.ctas * (g.shared_bytes + 1024) <= memory, tile
            assert tile.stages in (2, 3)
            assert tile.block_m >= rows or rows > DECODE_ROWS, "decode reads a cache once"
            assert tile.block_m in range(8, DECODE_ROWS + 1, 8)
            divisions.add((tile.key_warps, tile.n_block))
    assert len(divisions) == 1


KINDS: dict[str, tuple[int, tuple[int, int], dict[str, Any]]] = {
    "16 rows": (16, (128, 128), {}),
    "64 rows, splits": (64, (128, 128), {"num_splits": 2, "causal": True}),
    "24 rows, int8, chosen": (
        24, (128, 128),
        {"dtype": torch.int8, "selection": torch.empty(2, 1, 99, dtype=torch.int32, device="meta")},
    ),
    "32 rows, window, softcap": (32, (64, 64), {"window_size": (99, 0), "softcap": 3.0}),
    "64 rows, window, softcap": (64, (192, 128), {"window_size": (99, 0), "softcap": 3.0}),
}  # fmt: skip
FEW = ("16 rows", "64 rows, splits")


@pytest.mark.skipif(sys.platform == "darwin", reason="nvdisasm is not made for macOS")
@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in KINDS]
)
def test_registers_do_and_products_are_not_serialised(name: str) -> None:
    rows, head_dims, options = KINDS[name]
    check_code(spec_of(rows, head_dims, **options))
