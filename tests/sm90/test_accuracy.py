"""The SM90 kernel beside the emulation and the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.specs import Sm90Spec
from tests.budget import assert_codes_within, assert_like_emulation, budget_of, check_within
from tests.sm90.configurations import CONFIGURATIONS, TARGET, WITH_CODES, Configuration, results

IN_CI = tuple(CONFIGURATIONS[n] for n in (0, 1, 3))


def _slow_but_for(those: tuple[Configuration, ...]) -> list[Any]:
    every = CONFIGURATIONS
    return [c if c in those else pytest.param(c, marks=pytest.mark.slow) for c in every]


@pytest.mark.parametrize("configuration", _slow_but_for(IN_CI), ids=str)
def test_like_the_emulation_and_within_the_budget(configuration: Configuration) -> None:
    arguments = configuration.arguments()
    explained = fa.explain(fa.flash_attn_varlen_func, **arguments, target=TARGET)
    assert explained.plan, str(explained)
    assert isinstance(explained.plan.spec, Sm90Spec)
    out, lse = results(configuration)
    budget = budget_of(fa.flash_attn_varlen_func.describe_call(**arguments))
    check_within(budget, out, lse)
    emulated, _ = fa.flash_attn_varlen_func(**arguments, impl="tiled")
    assert_like_emulation(out, lse, emulated, budget, own_tiles=True)


@pytest.mark.parametrize(
    "configuration", [WITH_CODES[0], pytest.param(WITH_CODES[1], marks=pytest.mark.slow)], ids=str
)
def test_codes_within_their_budget(configuration: Configuration) -> None:
    arguments = configuration.arguments()
    exact = arguments | {"fp8_policy": arguments["fp8_policy"].replace(exp2="exact")}
    budget = budget_of(fa.flash_attn_varlen_func.describe_call(**exact))
    assert_codes_within(budget, *results(configuration))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_output_formats(fmt: str, name: str) -> None:
    """Each is the fp32 output, rounded once; with a scale of a power of two, in any format."""
    configuration = Configuration(name, fmt, lengths=((130, 200),))
    arguments = configuration.arguments() | {"return_lse": False}
    wanted, found = (
        fa.simulate(fa.flash_attn_varlen_func, **arguments, **more, target=TARGET)[0][0]
        for more in (
            {"out_dtype": torch.float32},
            {"out_dtype": getattr(torch, name), "output_scale": torch.tensor([0.25])}
            if "float8" in name
            else {"out_dtype": getattr(torch, name)},
        )
    )
    wanted = wanted * 4 if "float8" in name else wanted
    assert torch.equal(found.float(), wanted.to(found.dtype).float())
