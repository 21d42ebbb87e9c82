"""Attention of tensors as they are, exactly and with only P rounded: what errors are measured with.

The front end takes 8- and 16-bit tensors. To know what quantising them costs, the same executors
must also run on the tensors before. So the problem is described by stand-ins of a dtype that the
front end takes, with the same shapes and strides, and is then executed on the real operands:
executors compute in fp64 on whatever they are handed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from flash_attn_fp8.api import flash_attn_varlen_func
from flash_attn_fp8.call import Call
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.entry import Window
from flash_attn_fp8.formats import format_of
from flash_attn_fp8.plan import TILE_N, Split, TiledSpec
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.reference import exact as definition
from flash_attn_fp8.reference import tiled
from flash_attn_fp8.results import Scalar
from flash_attn_fp8.values import check_values

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Scores(TypedDict, total=False):
    """Arguments of `flash_attn_varlen_func` that say which attention is meant."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    learnable_sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class ScaledScores(Scores, total=False):
    """The same, and what the codes stand for."""

    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


def exact(q: Tensor, k: Tensor, v: Tensor, **call: Unpack[ScaledScores]) -> Tensor:
    """The attention of q, k, v by its definition, computed in fp64; out in fp32.

    Shapes as `flash_attn_varlen_func`; any floating-point dtypes, fp64 included.
    """
    described = _describe(q, k, v, None, call)
    problem = problem_of(described)
    check_values(described, problem)
    operands = described.operands._replace(q=q, k=k, v=v)
    out = torch.empty(problem.out_shape, device=q.device)
    definition.run(problem, operands, out, None)
    return out


def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Fp8Policy,
    *,
    observer: tiled.Observer | None = None,
    tile_n: int = TILE_N,
    **call: Unpack[ScaledScores],
) -> Tensor:
    """Attention with P put into `policy.p_format` by the kernels' numerics; out in fp32.

    q, k, v are codes (of 8 bits, with their descales among `call`) or real numbers of any other
    dtype, which then enter unquantised. `observer` sees every tile of `tile_n` keys.
    """
    described = _describe(q, k, v, policy, call)
    problem = problem_of(described)
    check_values(described, problem)
    out, _ = emulate_problem(
        problem,
        described._replace(operands=described.operands._replace(q=q, k=k, v=v)),
        TiledSpec(problem.traits.policy, tile_n),
        observer,
    )
    return out


def emulation(tile_n: int | None = TILE_N) -> dict[str, Scalar]:
    """What `emulate` mirrors of a kernel, as entries of a result's case; None: all keys at once."""
    tile = "all keys in a tile" if tile_n is None else f"{tile_n} keys a tile"
    return {"tile": tile, "accumulator": TiledSpec.accumulator}


def emulate_problem(
    problem: Problem, call: Call, spec: TiledSpec, observer: tiled.Observer | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp32 of the emulated kernel that `spec` describes."""
    out = torch.empty(problem.out_shape, device=call.operands.q.device)
    lse = torch.empty(problem.lse_shape, device=out.device)
    tiled.run(problem, call.operands, out, lse, spec=spec, split=Split(), observer=observer)
    return out, lse


def _describe(
    q: Tensor, k: Tensor, v: Tensor, policy: Fp8Policy | None, options: ScaledScores
) -> Call:
    """The call on stand-ins: bf16, or P's format where a policy is given; codes stay."""
    dtype = torch.bfloat16 if policy is None else policy.format.dtype
    q, k, v = (x if _is_codes(x) else torch.empty_like(x, dtype=dtype) for x in (q, k, v))
    call: Call = flash_attn_varlen_func.describe_call(  # type: ignore[attr-defined]
        q, k, v, fp8_policy=policy, out_dtype=torch.float32, **options
    )
    return call


def _is_codes(x: Tensor) -> bool:
    fmt = format_of(x.dtype)
    return fmt is not None and fmt.is_8bit


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in fp64; the plain norm where `expected` is 0."""
    error = (actual.double() - expected.double()).norm()
    return float(error / (expected.double().norm() or 1.0))
