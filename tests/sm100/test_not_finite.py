"""What is not finite in a row makes all of it NaN, wherever it lies; other rows keep their bits."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8 import ops
from tests.api.calls import same_bits
from tests.data import normal

NAN, INF = math.nan, math.inf
KEYS, D = 128, 64


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("key", [0, 6])
def test_an_infinite_score_makes_its_row_nan(key: int, num_splits: int) -> None:
    """Key 0's exponential is the special function unit's, key 6's is made by FMA."""
    random = torch.Generator().manual_seed(0)
    k = torch.rand(1, 2 * KEYS, 1, D, generator=random)
    k[0, key, 0, 3] = INF
    q = torch.rand(1, 4, 1, D, generator=random) + 0.5
    q[0, 1] = -q[0, 1]  # whose score is -inf: that key has no weight in its row
    q, k, v = (x.to(torch.float8_e5m2) for x in (q, k, torch.ones(1, 2 * KEYS, 1, D)))
    out, lse = fa.flash_attn_func(
        q, k, v, impl="sim", return_lse=True, num_splits=num_splits, out_dtype=torch.float32
    )
    rows = [0, 2, 3]
    assert bool(out[0, rows].isnan().all())
    assert bool(lse[0, 0, rows].isnan().all())
    assert bool(out[0, 1].isfinite().all())
    assert bool(lse[0, 0, 1].isfinite())


def test_a_sink_of_nan_makes_its_head_nan() -> None:
    """But for rows without keys, which are 0, whether or not others of their tile have keys."""
    x = normal(batch=1, seqlen_q=300, seqlen_k=40, nheads=2, nheads_kv=2, d=D)
    out, lse = fa.flash_attn_func(
        x.q, x.k, x.v, impl="sim", causal=True, return_lse=True, **x.scales,
        learnable_sink=torch.tensor([NAN, 0.0], dtype=torch.bfloat16),
    )  # fmt: skip
    sees = torch.arange(300) >= 260
    assert bool(out[0, sees, 0].isnan().all())
    assert bool((out[0, ~sees] == 0).all())
    assert bool(lse[0, 0].isnan().all())
    assert bool(out[0, :, 1].isfinite().all())
    assert bool(lse[0, 1].isfinite().all())


@pytest.mark.parametrize("operand", "qkv")
def test_a_descale_of_nan_makes_its_head_nan(operand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device nobody looks at the values of scales before the kernel does."""
    monkeypatch.setattr(ops, "check_values", lambda *_: None)
    x = normal(batch=1, seqlen_q=9, seqlen_k=140, nheads=2, nheads_kv=2, d=D)
    ones = {f"{name}_descale": torch.ones(1, 2) for name in "qkv"}
    damaged = ones | {f"{operand}_descale": torch.tensor([[NAN, 1.0]])}
    (wanted, want_lse), (out, lse) = (
        fa.flash_attn_func(x.q, x.k, x.v, impl="sim", return_lse=True, **scales)
        for scales in (ones, damaged)
    )
    assert bool(out[:, :, 0].isnan().all())
    assert operand == "v" or bool(lse[:, 0].isnan().all())
    assert same_bits((out[:, :, 1], lse[:, 1]), (wanted[:, :, 1], want_lse[:, 1]))
