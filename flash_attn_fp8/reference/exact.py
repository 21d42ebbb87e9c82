"""Attention by its definition, in fp64, on the dequantised operands. Nothing fast, nothing tiled.

With scales qs, ks, vs (1 where absent), row i of a sequence, its key position p = i + Sk - Sq:

    S_ij = softmax_scale * (q_i qs_i) . (k_j ks_j);   S <- c tanh(S / c) with a softcap c
    visible: 0 <= j < Sk,  p - left <= j <= p + right
    LSE_i = log(sum_j exp S_ij + exp(sink));   O_i = sum_j exp(S_ij - LSE_i) v_j vs_j

A row without keys has O = 0 and LSE = -inf, or LSE = sink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.reference import nonfinite
from flash_attn_fp8.reference.blocks import Block, blocks
from flash_attn_fp8.reference.output import Output

# Elements of one score block: at fp64 and about four live copies, 0.5 GiB.
_SCORES_AT_ONCE = 1 << 24


def run(problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None) -> None:
    """Fill `out` and `lse` (None: not wanted) with the exact attention of the stored operands."""
    output = Output(operands, problem, out, lse)
    for block in blocks(operands, problem, _SCORES_AT_ONCE, keys_at_once=None):
        output.store(block, *attend(block, problem))
    output.finish()


def attend(block: Block, problem: Problem) -> tuple[Tensor, Tensor]:
    """O (n, hk, g, r, dv) and LSE (n, hk, g, r) of one block, in fp64."""
    sizes = problem.sizes
    lo, hi = block.key_lo, block.key_hi
    q = _dequantise(block.q, block.q_scale)
    k = _dequantise(block.k[:, :, lo:hi], _columns(block.k_scale, lo, hi))
    v = _dequantise(block.v[:, :, lo:hi], _columns(block.v_scale, lo, hi))
    s = torch.einsum("nhgrd,nhsd->nhgrs", q, k) * sizes.softmax_scale
    if sizes.softcap:
        s = sizes.softcap * torch.tanh(s / sizes.softcap)
    visible = block.visible(lo, hi, sizes.window_left, sizes.window_right)
    s.masked_fill_(~visible, float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    if block.sink is not None:
        lse = torch.logaddexp(lse, block.sink.double())
    # A row without keys has only -inf scores: any finite LSE makes its weights zero.
    p = torch.exp(s - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    out = torch.einsum("nhgrs,nhsd->nhgrd", p, nonfinite.without(v))
    terms = nonfinite.terms(p, visible, v)
    # + 0: a sum of zeros has the sign that the padding's terms happen to have.
    return out + (0.0 if terms is None else terms), lse


def _dequantise(codes: Tensor, scale: Tensor | None) -> Tensor:
    x = codes.double()
    return x if scale is None else x * scale.double()


def _columns(scale: Tensor | None, lo: int, hi: int) -> Tensor | None:
    if scale is None:
        return None
    return (scale if scale.shape[-1] == 1 else scale[..., lo:hi])[..., None]
