"""Varied configurations of the SM90 kernel, each a few tiles of work for two multiprocessors.

Queries and keys are small whole numbers, whose scores Hopper's 8-bit tensor cores have exactly:
what is left to differ from the emulation, which has scores in fp32, is P and what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.policy import Fp8Policy
from tests.sm100.configurations import CAUSAL, SINK
from tests.sm100.configurations import Configuration as OnAnyTarget

TARGET = "sm_90a:2"
LARGEST = 2  # of the whole numbers


@dataclass(frozen=True)
class Configuration(OnAnyTarget):
    """As for SM100, with whole numbers as queries and keys; a softmax scale keeps rows flat."""

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        for seed, name in enumerate("qk"):
            arguments[name] = _whole(arguments[name], seed)
        if arguments["q"].dtype.itemsize == 1:  # exponentials, which the budget has a model of
            policy = fa.policy_for(arguments["q"].dtype)
            if self.per_token:
                policy = policy.replace(row_sum="exact")
            arguments = {"fp8_policy": policy, **arguments}
        return {"softmax_scale": 0.1, **arguments}

    def __hash__(self) -> int:
        return hash(self.name)


def _whole(x: Tensor, seed: int) -> Tensor:
    """Whole numbers in place of those that are finite; what nobody may read stays NaN."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-LARGEST, LARGEST + 1, x.shape, generator=g).float()
    return torch.where(x.float().isnan(), x.float(), numbers).to(x.dtype)


CODES: dict[str, Any] = {"fp8_policy": Fp8Policy("e4m3", 8, 0.75, exp2="code")}
ROUNDED: dict[str, Any] = {
    "fp8_policy": Fp8Policy("fp16", 7, 8, row_sum="quantized", promote_every=None)
}
SHORT = ((130, 200), (33, 129))
CONFIGURATIONS = (
    Configuration("varlen, e4m3, causal, splits, packed GQA of 3", heads=(3, 1), lengths=SHORT,
                  options={**CAUSAL, "num_splits": 2}),
    Configuration("paged 16, bf16, causal, packed GQA of 3", "bf16", heads=(3, 1), layout="paged",
                  lengths=SHORT, options=CAUSAL),
    Configuration("paged 8, e5m2, window, sink, packed GQA", "e5m2", heads=(4, 2), layout="paged",
                  page_size=8, options={"window_size": (70, 30), **SINK}),
    Configuration("varlen, scales per token, packed GQA", heads=(4, 2), per_token=True,
                  options=CAUSAL),
    Configuration("padded, fp16, softcap, d256", "fp16", layout="padded", head_dims=(256, 256),
                  lengths=SHORT, options={"softcap": 5.0}),
    Configuration("dense, e4m3, d128, full", layout="dense", lengths=((300, 400),),
                  head_dims=(128, 128)),
    Configuration("dense, bf16, d192/128, causal, splits", "bf16", layout="dense",
                  lengths=((150, 333),), head_dims=(192, 128), options={**CAUSAL, "num_splits": 2}),
    Configuration("varlen, bf16, d192, window, MQA of 12", "bf16", heads=(12, 1),
                  head_dims=(192, 192), lengths=SHORT, options={"window_size": (50, 20)}),
    Configuration("paged 64, one query, splits by length, sink", heads=(4, 1), layout="paged",
                  page_size=64, lengths=((1, 700), (1, 0), (1, 129), (1, 513)),
                  options={"seqlen_k_per_split": 256, **SINK}),
    Configuration("paged 256, fp16, rounded sums, d96", "fp16", layout="paged", page_size=256,
                  head_dims=(96, 96), options=ROUNDED),
    Configuration("paged 8, scales per token, softcap, splits", heads=(6, 2), layout="paged",
                  page_size=8, per_token=True, options={"softcap": 3.0, "num_splits": 3}),
    Configuration("more rows than keys, bf16, causal", "bf16", heads=(2, 1),
                  lengths=((300, 200), (200, 0)), options=CAUSAL),
    Configuration("more rows than keys, e4m3, causal", heads=(70, 1), lengths=((30, 20), (5, 0)),
                  options={**CAUSAL, "pack_gqa": False}),
)  # fmt: skip
# No exponentials in P: `tests/budget.py` has no model for it.
WITH_CODES = (
    Configuration("varlen, codes, splits, d128", head_dims=(128, 128), lengths=SHORT,
                  options={**CODES, "num_splits": 2}),
    Configuration("paged 16, codes, causal, sink, packed GQA", heads=(4, 2), layout="paged",
                  options={**CODES, **CAUSAL, **SINK}),
)  # fmt: skip


def simulated(configuration: Configuration, **how: Any) -> Any:
    """The call's results."""
    arguments = configuration.arguments()
    return fa.simulate(fa.flash_attn_varlen_func, **arguments, **{"target": TARGET, **how})[0]


@lru_cache(maxsize=2)
def results(configuration: Configuration) -> Any:
    """The call's results under the plain schedule."""
    return simulated(configuration)
