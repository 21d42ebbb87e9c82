"""Long chunks over 8-bit caches on SM90: codes become 16 bits once, and wgmma reads those.

With a scale a token the result is that of attention over a cache of fp16 numbers, codes times
scales; with other scales codes stay exact. Both are calls with budgets of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import compiled, sim
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.kernels.sm90.transposed import first_column
from flash_attn_fp8.plan import FEW_ROWS_OF_CODES, WIDENED_BYTES, Plan, copied_bytes
from flash_attn_fp8.specs import TILE, CacheSpec, Sm90Spec, WidenSpec
from tests.api.calls import same_bits
from tests.budget import (
    FP32_EPS,
    FP32_STEPS,
    assert_like_emulation,
    budget_of,
    check_within,
    rel_l2,
)
from tests.cached.configurations import Configuration
from tests.cached.test_accuracy import CHECK
from tests.plan.sequences import (
    LAYOUTS,
    Form,
    Results,
    Sequence,
    arranged,
    each_one,
    sequence,
)

TARGET = "sm_90a:2"
PLAIN = Configuration(
    formats=("bf16", "e4m3"), head_dims=(64, 64), layout="dense", scales="token_head",
    mask="causal", softcap=0.0, sink=False, group=3, tokens=130, splits="one", seqused=False,
    out_format="bf16",
)  # fmt: skip
CONFIGURATIONS = (
    PLAIN,
    replace(PLAIN, formats=("fp16", "int8"), layout="pages of 3", seqused=True, sink=True),
    replace(PLAIN, formats=("bf16", "e5m2"), layout="packed", mask="window", out_format="fp32"),
    replace(PLAIN, layout="pages of 16", scales="batch_head", softcap=5.0, head_dims=(128, 128)),
)
SLOW_CONFIGURATIONS = (
    replace(PLAIN, formats=("fp16", "e5m2"), layout="pages of 1", scales="head", mask="none"),
    replace(PLAIN, formats=("bf16", "int8"), layout="packed", scales="tensor", seqused=True),
    replace(PLAIN, head_dims=(192, 128), layout="pages of 128", splits="three", softcap=5.0),
    replace(PLAIN, head_dims=(256, 256), layout="packed", seqused=True, sink=True),
    replace(PLAIN, formats=("fp16", "e4m3"), head_dims=(96, 96), group=8, tokens=70,
            layout="pages of 16", splits="by length", mask="window"),
    replace(PLAIN, formats=("bf16", "int8"), head_dims=(192, 192), group=8, tokens=70),
    replace(PLAIN, formats=("bf16", "e5m2"), head_dims=(128, 128), layout="pages of 128",
            seqused=True, out_format="fp16"),
)  # fmt: skip
CASES = [*CONFIGURATIONS, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_CONFIGURATIONS)]


def planned(call: dict[str, Any], target: str = TARGET) -> Plan:
    plan = fa.explain(fa.flash_attn_varlen_func, **call, target=target).plan
    assert plan is not None
    return plan


def simulated(call: dict[str, Any], **how: Any) -> Any:
    assert planned(call).widen is not None
    return fa.simulate(fa.flash_attn_varlen_func, **call, **{"target": TARGET, **how})[0]


def over_fp16(call: dict[str, Any]) -> dict[str, Any]:
    """The same attention over codes times scales, rounded to fp16: with a scale for each token."""
    scales = {n: call[f"{n}_descale"] for n in "kv"}
    lead = call["k"].dim() - 1
    numbers = {n: (call[n].float() * scales[n].reshape(call[n].shape[:lead])[..., None]).half()
               for n in "kv"}  # fmt: skip
    rest = {n: x for n, x in call.items() if n not in ("k_descale", "v_descale")}
    return {**rest, **numbers, "q": call["q"].half()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_the_emulation_and_within_the_budget(case: Configuration) -> None:
    call = case.arguments()
    if case.scales == "token_head":  # no product is subnormal in fp16, as none is in units of tiles
        call["v_descale"] = call["v_descale"] * 2.0**8
    out, lse = simulated(call)
    same = over_fp16(call) if case.scales == "token_head" else call
    budget = budget_of(fa.flash_attn_varlen_func.describe_call(**same))
    check_within(budget, out, lse)
    emulated, _ = fa.flash_attn_varlen_func(**same, impl="tiled")
    assert_like_emulation(out, lse, emulated, budget, own_tiles=True)
    exact = {k: v for k, v in call.items() if k not in ("num_splits", "seqlen_k_per_split")}
    exact["out_dtype"] = torch.float32
    reference, reference_lse = fa.flash_attn_varlen_func(**exact, impl="reference")
    assert torch.equal(reference_lse.isneginf(), lse.isneginf())
    if case.out_format == "fp32":
        assert rel_l2(out, reference) < CHECK


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_eager(backend: str) -> None:
    """One node of a graph, of fake tensors that have the results' shapes, and the same bits."""
    call = {**CONFIGURATIONS[1].arguments(), "impl": "sim"}
    expected = simulated(call)
    torch._dynamo.reset()
    compiled = torch.compile(fa.flash_attn_varlen_func, fullgraph=True, backend=backend)
    found, runs = fa.simulate(compiled, **call, target=TARGET)
    assert same_bits(found, expected)
    assert len(runs) == 2  # the conversion, and attention


def test_bits_do_not_depend_on_the_schedule() -> None:
    """Two kernels, the second of which begins while the first ends, on two multiprocessors."""
    call = CONFIGURATIONS[1].arguments()
    expected = simulated(call)
    assert same_bits(simulated(call, schedule="random", seed=0), expected)
    assert same_bits(simulated(call, schedule="adversarial", seed=0), expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", [*CONFIGURATIONS, *SLOW_CONFIGURATIONS[:4]], ids=str)
def test_bits_do_not_depend_on_many_schedules(case: Configuration) -> None:
    call = case.arguments()
    expected = simulated(call)
    for kind, seeds in (("random", 6), ("adversarial", 3)):
        for seed in range(seeds):
            assert same_bits(simulated(call, schedule=kind, seed=seed), expected)


def test_no_role_reads_units_before_they_are_there() -> None:
    """The kernel before makes them: not seen by a simulator of one kernel at a time.

    In both warpgroups' code, after what gives them their registers.
    """
    spec = planned(replace(PLAIN, layout="packed").arguments()).spec
    assert isinstance(spec, Sm90Spec)
    ptx = (cache.keep(spec, "sm_90a", "simulator") / link.PTX).read_text()
    _, *roles = ptx.split("setmaxnreg.")
    assert len(roles) == 2
    for role in roles:
        assert 0 < role.find("griddepcontrol.wait") < role.find("ld.global")


COMPANY = Form("bf16", "e4m3", 3, 1, 64, 64, scaled=True, options={"causal": True})
SIZES = ((130, 200), (100, 129))  # queries and keys


@lru_cache(maxsize=1)
def sequences_and_results() -> tuple[list[Sequence], list[Results]]:
    """Each alone in a call."""
    sequences = [sequence(COMPANY, *size, seed=i) for i, size in enumerate(SIZES)]
    return sequences, [in_company([s], "padded", 1, 0)[0] for s in sequences]


def in_company(sequences: list[Sequence], layout: str, page_size: int, seed: int) -> list[Results]:
    call = arranged(COMPANY, sequences, layout, page_size, seed)
    out, lse = simulated({**call, **COMPANY.options, "return_lse": True})
    return each_one(out, lse, sequences, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_company_as_alone(layout: str) -> None:
    """In other orders, with other pages of other sizes elsewhere; NaN in every slot between."""
    sequences, expected = sequences_and_results()
    for order, page_size, seed in (([1, 0], 16, 3), ([0, 1, 1], 7, 5)):
        results = in_company([sequences[i] for i in order], layout, page_size, seed)
        for i, result in zip(order, results, strict=True):
            assert same_bits(result, expected[i]), (i, order)


def test_scales_of_any_amplitude_are_right() -> None:
    """V's units go into the exponent, where fp32 rounds what they add to the scores."""
    call = replace(PLAIN, out_format="fp32").arguments()
    out, lse = simulated(call)
    for octaves in (-60, 50):
        scaled = {**call, "v_descale": call["v_descale"] * 2.0**octaves}
        other, other_lse = simulated(scaled)
        assert rel_l2(other * 2.0**-octaves, out) < CHECK
        assert rel_l2(other_lse, lse) <= FP32_STEPS * FP32_EPS


@pytest.mark.parametrize("outlier", [2.0**14, 2.0**-20])
def test_one_outlier_leaves_the_others_right(outlier: float) -> None:
    """A token whose V is far larger, or smaller, in a tile of its own or of others."""
    call = replace(PLAIN, out_format="fp32", mask="none").arguments()
    scales = call["v_descale"].clone()
    scales[:, 77] *= outlier
    call["k_descale"] = call["k_descale"].clone()
    call["k_descale"][:, 77] *= 2.0**-30  # its score is 0: it has a share like any other
    call["v_descale"] = scales
    out, _ = simulated(call)
    wanted, _ = fa.flash_attn_varlen_func(**call, impl="reference")
    assert rel_l2(out, wanted) < CHECK


def test_what_the_scale_of_a_hidden_token_does() -> None:
    """To rows that do not see it: of K, unless it takes bits, nothing; of V, fp32's roundings."""
    call = replace(PLAIN, out_format="fp32", tokens=90).arguments()
    out, lse = simulated(call)

    before = out[:, :-1], lse[..., :-1]
    for name in ("k_descale", "v_descale"):
        scales = call[name].clone()
        scales[:, -1] *= 2.0**6
        moved, moved_lse = simulated({**call, name: scales})
        after = moved[:, :-1], moved_lse[..., :-1]
        assert same_bits(after, before) == (name == "k_descale")
        assert rel_l2(after[0], before[0]) < CHECK
        assert rel_l2(after[1], before[1]) <= FP32_STEPS * FP32_EPS


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scales", ["token_head", "tensor"])
def test_scores_of_any_size_leave_p_in_its_format(scales: str, sign: int) -> None:
    """Where fp32 resolves octaves, and where it resolves less than P's format has; below 0 too.

    Against the definition over the numbers of the copy, whose roundings would choose other keys.
    """
    call = replace(PLAIN, scales=scales, out_format="fp32", tokens=90).arguments()
    call["q"], call["k"] = call["q"].abs(), (sign * call["k"].float().abs()).to(call["k"].dtype)
    if scales == "token_head":
        call["v_descale"] = call["v_descale"] * 2.0**8  # as above
    same = over_fp16(call) if scales == "token_head" else call
    for scale in (2.0**23, 2.0**26, 2.0**60):
        out, lse = simulated({**call, "softmax_scale": scale})
        wanted, wanted_lse = fa.flash_attn_varlen_func(
            **{**same, "softmax_scale": scale}, impl="reference"
        )
        assert rel_l2(out, wanted) < CHECK
        assert rel_l2(lse, wanted_lse) <= FP32_STEPS * FP32_EPS


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_every_code_is_exact(fmt: str, to: str) -> None:
    """The converting kernel alone: all codes of a format as K and as V, no scales."""
    spec = WidenSpec(fmt, to, "fp16", 64, 64, "dense")
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 1, 64).expand(2, 4, 3, 64)
    k, v, _ = widened(spec, codes.contiguous(), codes.flip(-1).contiguous())
    expected = codes.contiguous().view(FORMATS[fmt].dtype).float()
    for found, numbers in ((k, expected), (v, expected.flip(-1))):
        assert torch.equal(found.float().isnan(), numbers.isnan())
        assert torch.equal(found.float().nan_to_num(7), numbers.nan_to_num(7))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_scales_are_applied_in_units_of_a_tile(fmt: str) -> None:
    """Whatever their amplitude; NaN stays its token's; a tile ends in zeros where its keys end."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (1, 300, 2, 64), generator=generator).to(torch.uint8)
    scales = torch.rand(1, 300, 2, generator=generator) + 0.1
    scales[:, TILE:] *= 1e-25
    scales[0, 5, 1] = torch.nan
    spec = WidenSpec(
        fmt, "fp16", "fp16", 64, 64, "dense", k_scale=True, v_scale=True, seqused_k=True
    )
    k, v, units = widened(spec, codes, codes, scales, scales.flip(1).contiguous(), used=290)
    assert units is not None
    numbers = codes.view(FORMATS[fmt].dtype).float()
    tile = torch.arange(300) // TILE
    for found, scale, unit in (
        (k, scales, units[..., 0]), (v, scales.flip(1), 2.0 ** units[..., 1])
    ):  # fmt: skip
        of_keys = unit[0].T[tile][None, ..., None]
        wanted = numbers * scale[..., None]
        assert bool((unit.log2() == unit.log2().round()).all())
        assert not found[:, 290:].any()
        error = (found.float() * of_keys - wanted)[:, :290].abs()
        allowed = 2.0**-11 * wanted[:, :290].abs() + 2.0**-25 * of_keys[:, :290]
        assert torch.equal(error.isnan(), wanted[:, :290].isnan())
        assert bool((error <= allowed).nan_to_num(1).logical_or(error.isnan()).all())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_units_are_those_of_numbers(fmt: str) -> None:
    """Whatever the scale of zeros is, or one that is not finite: other rows keep their bits.

    Those rows themselves are 0, or NaN and infinity as the product is. Two warps share a row of 96.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 120, (1, 300, 2, 96), generator=generator).to(torch.uint8)
    codes[:, 7] = 0 if fmt == "int8" else 0x80  # minus 0
    codes[:, TILE : 2 * TILE] = 0
    codes[:, 290] = 0
    codes[:, 290, 0, 0] = 0x80 if fmt == "int8" else 1  # a number
    scales = torch.rand(1, 300, 2, generator=generator) + 0.1
    spec = WidenSpec(fmt, "fp16", "fp16", 96, 96, "dense", k_scale=True, v_scale=True)
    plain = widened(spec, codes, codes, scales, scales)
    strange = scales.clone()
    strange[:, 7], strange[:, 200] = 1e35, 1e-30
    strange[:, 20], strange[:, 30, 0] = torch.nan, torch.inf
    found = widened(spec, codes, codes, strange, strange)
    assert plain[2] is not None
    assert same_bits(found[2], plain[2])
    for wide, before in zip(found[:2], plain[:2], strict=True):
        products = codes[0, 20:31].view(FORMATS[fmt].dtype).float() * strange[0, 20:31, :, None]
        assert bool(wide[0, 20].isnan().all())
        assert torch.equal(wide[0, 30, 0].float(), products[10, 0])
        others = [n for n in range(300) if n not in (20, 30)]
        assert torch.equal(wide[:, others], before[:, others])
        assert bool(wide[0, 290, 0, 0] != 0)


def test_scales_of_zeros_take_no_bits_from_others() -> None:
    """Nor does a tile of zeros, which has a part of the row sum, beside far larger values."""
    call = replace(PLAIN, out_format="fp32", mask="none", tokens=90).arguments()
    for name in "kv":
        codes, scales = call[name].clone(), call[f"{name}_descale"].clone()
        codes[:, 77] = 0
        scales[:, 77] *= 2.0**40
        call |= {name: codes, f"{name}_descale": scales}
    call["v"][:, TILE : 2 * TILE] = 0
    call["v_descale"][:, 2 * TILE :] *= 2.0**30
    out, lse = simulated(call)
    wanted, wanted_lse = fa.flash_attn_varlen_func(**call, impl="reference")
    assert rel_l2(out, wanted) < CHECK
    assert rel_l2(lse, wanted_lse) < CHECK


def test_packed_sequences_begin_at_tiles_of_their_own() -> None:
    """More than a warp looks at at once, some empty; what lies before the first is nobody's."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 130, *torch.randint(0, 9, (37,), generator=generator).tolist(), 128]
    ends = torch.tensor([200, *lengths]).cumsum(0)
    codes = torch.randint(0, 120, (int(ends[-1]), 1, 64), generator=generator).to(torch.uint8)
    scales = torch.rand(len(codes), 1, generator=generator) + 0.1
    spec = WidenSpec("e4m3", "fp16", "fp16", 64, 64, "varlen", k_scale=True, v_scale=True)
    k, v, units = widened(spec, codes, codes, scales, scales, cu_seqlens=ends.int())
    assert units is not None
    for b, length in enumerate(lengths):
        begin, first = int(ends[b]), int(first_column(TILE, ends[b], b))
        numbers = codes[begin : begin + length].view(torch.float8_e4m3fn).float()
        tiles = -(-length // TILE)
        of_keys = units[0, 0, first // TILE :][:tiles].repeat_interleave(TILE, 0)
        for x, unit in ((k, of_keys[:, :1]), (v, 2.0 ** of_keys[:, 1:])):
            found = x[0, first:][: tiles * TILE]
            assert not found[length:].any()
            factors = scales[begin : begin + length, :, None] / unit[:length, :, None]
            assert torch.equal(found[:length], (numbers * factors).half())


def widened(
    spec: WidenSpec,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    used: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(K, V, units) by the converting kernel, of dense codes, or of packed ones (total, h, d)."""
    batch, keys, heads = (1, *k.shape)[-4:-1]
    if cu_seqlens is not None:
        keys += (len(cu_seqlens) - 1) * TILE
    with sim.device("sm_90a", sm_count=2):
        kernel = compiled._kernel(spec, "sm_90a")
        # Twins: memory that the device knows.
        k, v, k_scale, v_scale = (
            None if x is None else x.clone() for x in (k, v, k_scale, v_scale)
        )
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.clone()
        wide = [torch.full((batch, keys, heads, x.shape[-1]), torch.nan, dtype=FORMATS[fmt].dtype)
                for x, fmt in ((k, spec.k_format), (v, spec.v_format))]  # fmt: skip
        units = torch.full((batch, heads, -(-keys // TILE), 2), torch.nan) if spec.scales else None
        seqused = None if used is None else torch.full((batch,), used, dtype=torch.int32)
        counter = torch.ones(1, dtype=torch.int32)
        kernel((k, v, *wide, cu_seqlens, seqused, None, k_scale, v_scale, units, counter))
        assert not counter.any()
        return wide[0].clone(), wide[1].clone(), None if units is None else units.clone()


# ------------------------------------------------------------------------------------ the plan


def chunk(tokens: int, keys: int = 8192, batch: int = 1, **options: Any) -> Plan:
    """Of a chunk over a cache, 4 query heads a KV head."""

    def rows(n: int, heads: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, n, heads, 128, dtype=dtype, device="meta")

    k = rows(keys, 8, torch.float8_e4m3fn)
    scales = torch.empty(batch, keys, 8, device="meta")
    call = {"q": rows(tokens, 32, torch.bfloat16), "k": k, "v": k, "k_descale": scales,
            "v_descale": scales, "causal": True, **options}  # fmt: skip
    return planned(call, "sm_90a:132")


def test_chunks_are_converted_where_it_pays_and_fits() -> None:
    long = chunk(FEW_ROWS_OF_CODES // 4 + 1)
    assert isinstance(long.spec, Sm90Spec)
    assert [type(k) for k in long.kernels] == [WidenSpec, Sm90Spec]
    few = chunk(FEW_ROWS_OF_CODES // 4)
    narrow = chunk(256, 65536, causal=False, window_size=(512, 0))
    sequences = WIDENED_BYTES // (65536 * 8 * 512)
    assert isinstance(chunk(2048, 65536, sequences).spec, Sm90Spec)
    too_large = chunk(2048, 65536, sequences + 1)
    alone = chunk(2048, deterministic=True)  # bits must not depend on the batch
    for plan in (few, narrow, too_large, alone):
        assert isinstance(plan.spec, CacheSpec)
        assert plan.widen is None


def test_packed_caches_take_room_for_their_tokens() -> None:
    """And a tile for each sequence, whatever is known of how the tokens are divided."""
    sequences, total = 32, 65536
    cache = torch.empty(total, 8, 128, dtype=torch.int8, device="meta")
    scales = torch.empty(1, total, 8, device="meta")
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    call = {"q": torch.empty(16384, 32, 128, dtype=torch.bfloat16, device="meta"), "k": cache,
            "v": cache, "k_descale": scales, "v_descale": scales, "cu_seqlens_q": ends,
            "cu_seqlens_k": ends, "causal": True}  # fmt: skip
    for known in ({}, {"max_seqlen_k": 4096}):
        assert planned({**call, **known}, "sm_90a:132").widen is not None
        problem = fa.explain(fa.flash_attn_varlen_func, **call, **known, target="sm_90a").problem
        assert problem is not None
        assert copied_bytes(problem) == (total + sequences * TILE) * 8 * 512


def test_other_devices_have_the_cache_kernel() -> None:
    call = PLAIN.arguments()
    for target in ("sm_80:108", "sm_100a:148"):
        assert isinstance(planned(call, target).spec, CacheSpec)


def test_the_combine_kernel_comes_last() -> None:
    kernels = chunk(512, num_splits=2).kernels
    assert [type(k).__name__ for k in kernels] == ["WidenSpec", "Sm90Spec", "CombineSpec"]
