"""Rows of a packed output that belong to no sequence are written, each once, by whichever CTA."""

from __future__ import annotations

import pytest
import torch

import flash_attn_fp8 as fa

ROWS, USED, HEADS = 70, 43, 3


@pytest.mark.parametrize(("head_dim", "num_splits"), [(96, 1), (128, 2)])
def test_rows_of_no_sequence_are_zero_with_lse_of_minus_infinity(
    head_dim: int, num_splits: int
) -> None:
    """12 stores of 16 bytes a row, of which a warp makes two rows' at once; 32, with splits."""
    q = torch.ones(ROWS, HEADS, head_dim).to(torch.float8_e4m3fn)
    starts = torch.tensor([0, 20, USED], dtype=torch.int32)
    out = torch.full((ROWS, HEADS, head_dim), 7.0, dtype=torch.bfloat16)
    (_, lse), _ = fa.simulate(
        fa.flash_attn_varlen_func, q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, out=out,
        return_lse=True, num_splits=num_splits, target="sm_100a:3", schedule="random", seed=3,
    )  # fmt: skip
    assert bool((out[USED:] == 0).all())
    assert bool((lse[:, USED:] == -torch.inf).all())
    assert bool((out[:USED] == 1).all())
