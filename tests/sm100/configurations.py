"""Ten varied configurations of the kernel, each a few tiles of work for several CTAs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import flash_attn_fp8 as fa
from tests.plan.sequences import Form, arranged, sequence

LENGTHS = ((130, 300), (40, 513), (3, 0), (257, 129))  # rows and keys


@dataclass(frozen=True)
class Configuration:
    """Sequences of these formats and lengths in one layout, and the options of the call."""

    name: str
    fmt: str = "e4m3"
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (64, 64)
    layout: str = "varlen"  # or padded, paged, or dense: one length, the first
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    page_size: int = 16
    per_token: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def arguments(self) -> dict[str, Any]:
        """Of `flash_attn_varlen_func`."""
        form = Form(self.fmt, self.fmt, *self.heads, *self.head_dims, scaled=self.per_token)
        all_of_them = [sequence(form, *size, seed=i) for i, size in enumerate(self.lengths)]
        arguments: dict[str, Any] = {"return_lse": True, **self.options}
        if self.layout != "dense":
            return arguments | arranged(form, all_of_them, self.layout, self.page_size, seed=1)
        return arguments | {name: getattr(all_of_them[0], name)[None] for name in "qkv"}


CAUSAL: dict[str, Any] = {"causal": True}
SINK: dict[str, Any] = {"learnable_sink": torch.linspace(-1, 2, 4)}
CONFIGURATIONS = (
    Configuration("dense, full, d128, a pair of CTAs", layout="dense", lengths=((400, 400),),
                  head_dims=(128, 128)),
    Configuration(
        "dense, causal, packed GQA, d192/128", layout="dense", lengths=((150, 333),), heads=(4, 2),
        head_dims=(192, 128), options=CAUSAL,
    ),
    Configuration("varlen, e5m2, window, sink, packed GQA", "e5m2", heads=(4, 2),
                  options={"window_size": (70, 30), **SINK}),
    Configuration("paged 16, causal, splits, packed GQA", heads=(4, 2), layout="paged",
                  options={**CAUSAL, "num_splits": 3}),
    Configuration("padded, bf16, softcap, d128", "bf16", layout="padded", head_dims=(128, 128),
                  options={"softcap": 5.0}),
    Configuration("varlen, d256, causal, MQA", head_dims=(256, 256), heads=(3, 1), options=CAUSAL),
    Configuration("paged 256, d192/128", layout="paged", page_size=256, head_dims=(192, 128)),
    Configuration("varlen, scales per token, packed GQA", heads=(4, 2), per_token=True,
                  options=CAUSAL),
    Configuration("paged 8, fp16, window, d96", "fp16", layout="paged", page_size=8,
                  head_dims=(96, 96), options={"window_size": (100, None)}),
    Configuration("paged 64, one query, splits by length, sink", heads=(4, 1), layout="paged",
                  page_size=64, lengths=((1, 700), (1, 0), (1, 129), (1, 513)),
                  options={"seqlen_k_per_split": 256, **SINK}),
)  # fmt: skip


@lru_cache(maxsize=2)
def arguments_and_results(configuration: Configuration) -> tuple[dict[str, Any], Any]:
    """The call, and what impl='sim' gives for it."""
    arguments = configuration.arguments()
    return arguments, fa.flash_attn_varlen_func(**arguments, impl="sim")
