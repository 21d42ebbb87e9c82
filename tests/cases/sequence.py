"""Calls that differ in what a cache of kernels or plans might forget (case 51), by name.

`python -m tests.cases.sequence FOLDER` saves the result of each, made in a process of its own that
made no other call before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.cases.arrange import int32
from tests.conftest import EXECUTORS

Result = tuple[Tensor, Tensor | None]
E4M3 = torch.float8_e4m3fn


def _qkv(seqlen: int = 128, batch: int = 1, dtype: torch.dtype = E4M3) -> dict[str, Tensor]:
    x = torch.randn(3, batch, seqlen, 2, 64, generator=torch.Generator().manual_seed(seqlen))
    return dict(zip("qkv", x.to(dtype), strict=True))


def _stride_0(impl: str) -> Result:
    x = {n: t.as_strided(t.shape, (0, *t.stride()[1:])) for n, t in _qkv().items()}
    return fa.flash_attn_func(**x, impl=impl)


def _sliced(impl: str) -> Result:
    pool = torch.stack([*_qkv().values()], dim=2)  # (batch, rows, 3, heads, d)
    return fa.flash_attn_func(*pool.unbind(2), impl=impl)


def _paged(impl: str, **options: object) -> Result:
    x = _qkv()
    k, v = (x[n].reshape(8, 16, 2, 64) for n in "kv")
    table = torch.arange(8, dtype=torch.int32).flip(0)[None]
    options |= {"page_table": table, "causal": True, "impl": impl}
    return fa.flash_attn_varlen_func(x["q"], k, v, **options)


def _with(**options: object) -> Callable[[str], Result]:
    return lambda impl: fa.flash_attn_func(**_qkv(), **options, impl=impl)


SCALE = torch.tensor(0.5)
CALLS: dict[str, Callable[[str], Result]] = {
    "stride-0 batch": _stride_0,
    "batch of 3": lambda impl: fa.flash_attn_func(**_qkv(batch=3), impl=impl),
    "packed k": _with(),
    "k in a pool": _sliced,
    "lse": _with(return_lse=True),
    "sink": _with(learnable_sink=torch.tensor([0.5, 1.0])),
    "other sink": _with(learnable_sink=torch.tensor([-2.0, 3.0])),
    "pages": _paged,
    "pages, shorter": lambda impl: _paged(impl, seqused_k=int32(77)),
    "129 rows": lambda impl: fa.flash_attn_func(**_qkv(129), impl=impl),
    "bf16": lambda impl: fa.flash_attn_func(**_qkv(dtype=torch.bfloat16), impl=impl),
    "e5m2": lambda impl: fa.flash_attn_func(**_qkv(dtype=torch.float8_e5m2), impl=impl),
    "causal": _with(causal=True),
    "window": _with(window_size=(5, 0)),
    "wider window": _with(window_size=(50, 0)),
    "softmax_scale": _with(softmax_scale=0.25),
    "softcap": _with(softcap=3.0),
    "k_descale": _with(k_descale=SCALE),
    "v_descale per head": _with(v_descale=SCALE.expand(2).clone()),
    "fp32 output": _with(out_dtype=torch.float32),
}


def main(folder: str) -> None:
    """Save `CALLS` one by one, each from a child that inherits imports and no call."""
    for impl in EXECUTORS:
        for i, call in enumerate(CALLS.values()):
            child = os.fork()
            if not child:
                torch.save(call(impl), Path(folder) / f"{impl}-{i}.pt")
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                sys.exit(f"call {i} of {impl} failed")


if __name__ == "__main__":
    main(sys.argv[1])
