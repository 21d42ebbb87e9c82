"""Calls of the cache kernel that have every pair of values of any two axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.formats import FORMATS, saturating_cast
from flash_attn_fp8.plan import FEW_ROWS
from tests.api.calls import ints
from tests.data import DTYPES
from tests.plan.sequences import Form, Sequence, arranged

AXES: dict[str, tuple[Any, ...]] = {
    "formats": (
        ("bf16", "e4m3"), ("fp16", "e4m3"), ("bf16", "e5m2"), ("fp16", "e5m2"), ("bf16", "int8"),
        ("fp16", "int8"), ("bf16", "bf16"), ("fp16", "fp16"),
    ),
    "head_dims": ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)),
    "layout": ("dense", "packed", "pages of 1", "pages of 3", "pages of 16", "pages of 128"),
    "scales": ("tensor", "head", "batch_head", "token_head"),
    "mask": ("none", "causal", "window"),
    "softcap": (0.0, 5.0),
    "sink": (False, True),
    "group": (1, 3, 8, 71),
    "tokens": (1, 2, 8, 70, 130),
    "splits": ("one", "three", "by length"),
    "seqused": (False, True),
    "out_format": ("bf16", "fp16", "fp32"),
}  # fmt: skip
MOST_ROWS = 600  # of a KV head: to keep a simulation short
KEYS = (300, 0, 77)  # of the sequences of a call; of dense calls without seqused, the first


@dataclass(frozen=True)
class Configuration:
    """One value of each axis. Formats are those of q and of the cache; head dims K's and V's."""

    formats: tuple[str, str]
    head_dims: tuple[int, int]
    layout: str
    scales: str
    mask: str
    softcap: float
    sink: bool
    group: int
    tokens: int
    splits: str
    seqused: bool
    out_format: str

    def __str__(self) -> str:
        q, kv = self.formats
        d, dv = self.head_dims
        flags = f"cap{self.softcap:g}-" * bool(self.softcap) + "sink-" * self.sink
        layout = self.layout.replace(" ", "")
        return (
            f"{q}-{kv}-d{d}-{dv}-{layout}-{self.scales}-{self.mask}-{flags}g{self.group}-"
            f"t{self.tokens}-{self.splits.replace(' ', '')}-u{self.seqused:d}-{self.out_format}"
        )

    @property
    def is_possible(self) -> bool:
        return self.group * self.tokens <= MOST_ROWS

    @property
    def pairs(self) -> set[Any]:
        """Those that count: a 16-bit cache has no scales."""
        values = asdict(self)
        if self.formats[1] in ("bf16", "fp16"):
            del values["scales"]
        return set(itertools.combinations(values.items(), 2))

    @property
    def nheads_kv(self) -> int:
        return 1 if self.group >= 8 else 2

    @property
    def target(self) -> str:
        """A cache of q's own format has another kernel on sm_100a, and for many rows on sm_90a."""
        q, kv = self.formats
        if q == kv:
            few = self.group * self.tokens * len(KEYS) <= FEW_ROWS  # packed: of all sequences
            return "sm_90a:4" if few else "sm_89:4"
        return {"e4m3": "sm_100a:4", "e5m2": "sm_80:4", "int8": "sm_86:4"}[kv]

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Of `flash_attn_varlen_func`."""
        options: dict[str, Any] = {
            "causal": self.mask == "causal",
            "window_size": (50, 20) if self.mask == "window" else (None, None),
            "softcap": self.softcap,
            "out_dtype": DTYPES[self.out_format],
            "return_lse": True,
        }
        if self.sink:
            options["learnable_sink"] = torch.linspace(-1, 2, self.group * self.nheads_kv)
        if self.splits == "three":
            options["num_splits"] = 3
        if self.splits == "by length":
            options["seqlen_k_per_split"] = 128
        return options | self._operands(seed)

    def _operands(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        equal = self.layout == "dense" and not self.seqused
        sequences = [self._sequence(KEYS[0] if equal else n, generator) for n in KEYS]
        if equal:
            x = {name: torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"}
            x |= {
                f"{n}_descale": torch.stack([s.scales[n] for s in sequences])
                for n in sequences[0].scales
            }
        else:
            layout = {"dense": "padded", "packed": "varlen"}.get(self.layout, "paged")
            page_size = int(self.layout.split()[-1]) if layout == "paged" else 1
            x = arranged(self._form, sequences, layout, page_size, seed)
            if self.seqused and layout != "padded":
                x["seqused_q"] = ints(*(max(0, self.tokens - n) for n in (0, 1, 1)))
            if self.seqused and layout == "varlen":
                x["seqused_k"] = ints(*(max(0, n - 5) for n in KEYS))
        return x | self._scales(len(KEYS), generator)

    @property
    def _form(self) -> Form:
        """How tensors are laid out; int8's as fp8's."""
        q, kv = self.formats
        kv = "e5m2" if kv == "int8" else kv
        heads = self.group * self.nheads_kv, self.nheads_kv
        return Form(q, kv, *heads, *self.head_dims, scaled=self.scales == "token_head")

    def _sequence(self, keys: int, generator: torch.Generator) -> Sequence:
        q, kv = (FORMATS[name] for name in self.formats)
        d, dv = self.head_dims
        gain = 40.0 if kv.name == "int8" else 1.0
        heads = self.nheads_kv
        k, v = (
            saturating_cast(torch.randn(keys, heads, n, generator=generator) * gain, kv)
            for n in (d, dv)
        )
        scales = {}
        if self._form.scaled_operands:
            # Two octaves apart, and V's far from 1.
            scales = {n: torch.rand(keys, heads, generator=generator) * 3 + 1 for n in "kv"}
            scales = {"k": scales["k"] / gain / 2, "v": scales["v"] / gain / 64}
        rows = torch.randn(self.tokens, heads * self.group, d, generator=generator) * 2
        return Sequence(rows.to(q.dtype), k, v, scales)

    def _scales(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        if not FORMATS[self.formats[1]].is_8bit or self.scales == "token_head":
            return {}
        shape = {"tensor": (), "head": (self.nheads_kv,), "batch_head": (batch, self.nheads_kv)}
        unit = 1 / 40 if self.formats[1] == "int8" else 1.0
        return {
            f"{n}_descale": (torch.rand(shape[self.scales], generator=generator) + 0.5) * unit
            for n in "kv"
        }


DRAWN = 200


@lru_cache(maxsize=1)
def configurations(seed: int = 0) -> tuple[Configuration, ...]:
    """Until every possible pair is covered; each the best of many drawn."""
    rng = random.Random(seed)
    missing = set().union(*(c.pairs for c in _every_pair()))
    chosen = []
    while missing:
        drawn = [c for _ in range(DRAWN) if (c := _draw(rng)).is_possible]
        best = max(drawn, key=lambda c: len(c.pairs & missing))
        if best.pairs & missing:
            missing -= best.pairs
            chosen.append(best)
    return tuple(chosen)


def _draw(rng: random.Random) -> Configuration:
    return Configuration(**{name: rng.choice(values) for name, values in AXES.items()})


def _every_pair() -> Iterator[Configuration]:
    plain = Configuration(**{name: values[0] for name, values in AXES.items()})
    for one, other in itertools.combinations(AXES, 2):
        for x, y in itertools.product(AXES[one], AXES[other]):
            c = replace(plain, **{one: x, other: y})
            if c.is_possible:
                yield c
