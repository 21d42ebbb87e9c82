"""The cache kernel beside the emulation and the definition, over pairs of all that it can do."""

from __future__ import annotations

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from tests.budget import (
    rel_l2,
)
from tests.cached.checks import check_configuration
from tests.cached.configurations import AXES, Configuration, configurations

EVERY = 5  # of the configurations that take little, one in so many is in the default run
CHEAP = [c for c in configurations() if c.group * c.tokens * sum(c.head_dims) <= 30_000]
CASES = [
    c if c in CHEAP[::EVERY] else pytest.param(c, marks=pytest.mark.slow) for c in configurations()
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_the_emulation_and_within_the_budget(case: Configuration) -> None:
    check_configuration(case, case.target)


def test_every_pair_is_there() -> None:
    """But for rows that a simulation would take minutes for."""
    found = set().union(*(c.pairs for c in configurations()))
    names = list(AXES)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            for x in AXES[one]:
                for y in AXES[other]:
                    pair = (one, x), (other, y)
                    rare = {one, other} == {"group", "tokens"} and x * y > 600
                    unscaled = (one, other) == ("formats", "scales") and x[0] == x[1]
                    assert pair in found or rare or unscaled, pair


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_wrong_scales_fail_the_check(fmt: str) -> None:
    """Two canaries: V's scales 5 % too large, and one token's scale for all."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 200, 2, 64, generator=generator) for _ in "kv")
    v *= torch.rand(2, 200, 2, 1, generator=generator) * 4 + 0.1
    q = torch.randn(2, 2, 8, 64, generator=generator).bfloat16()
    kq, vq = (fa.quantize(x, dtype=FORMATS[fmt].dtype, per="token_head") for x in (k, v))

    def call(scales: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
        return fa.flash_attn_func(
            q, kq.values, vq.values, causal=True, k_descale=kq.descale, v_descale=scales,
            out_dtype=torch.float32, return_lse=True, impl=impl,
        )  # fmt: skip

    wanted, _ = call(vq.descale, "reference")
    assert rel_l2(call(vq.descale, "sim")[0], wanted) < CHECK
    one = vq.descale[:, :1].expand_as(vq.descale).contiguous()
    for wrong in (vq.descale * 1.05, one):
        assert rel_l2(call(wrong, "sim")[0], wanted) > 10 * CHECK


CHECK = 1e-3  # of the output in fp32: P in fp16 errs by a few 1e-4
