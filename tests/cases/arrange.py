"""One dense question asked in every layout and mix of formats: what the cases are crossed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.call import Call
from flash_attn_fp8.formats import FORMATS
from tests.budget import assert_within_budget
from tests.data import paged

LAYOUTS = ("dense", "varlen", "paged")


@dataclass(frozen=True)
class Mix:
    """The formats of q and of k, v."""

    q_name: str
    kv_name: str

    def __str__(self) -> str:
        return self.q_name if self.q_name == self.kv_name else f"{self.q_name}-over-{self.kv_name}"

    @property
    def q(self) -> torch.dtype:
        return FORMATS[self.q_name].dtype

    @property
    def kv(self) -> torch.dtype:
        return FORMATS[self.kv_name].dtype

    @property
    def p_name(self) -> str:
        """Format of P: q's; bf16 where 16-bit queries read an 8-bit cache."""
        return self.q_name if self.q_name == self.kv_name else "bf16"

    @property
    def ones(self) -> dict[str, Tensor]:
        """Scales of 1 where the format cannot do without."""
        return {n: torch.ones(()) for n in ("k_descale", "v_descale") if self.kv_name == "int8"}

    @property
    def kv_is_8bit(self) -> bool:
        return FORMATS[self.kv_name].is_8bit

    def cast(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values that the formats hold exactly, as codes."""
        return q.to(self.q), k.to(self.kv), v.to(self.kv)

    def quantized(self, q: Tensor, k: Tensor, v: Tensor) -> Question:
        """Any values: cast once where the format is a float, scaled per head where it is int8."""
        if self.kv_name != "int8":
            return Question(*self.cast(q, k, v))
        k8, v8 = (fa.quantize(x, dtype=torch.int8, per="batch_head") for x in (k, v))
        scales = {"k_descale": k8.descale, "v_descale": v8.descale}
        return Question(q.to(self.q), k8.values, v8.values, scales)


MIXES = tuple(
    Mix(*names)
    for names in (
        ("e4m3", "e4m3"),
        ("e5m2", "e5m2"),
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("bf16", "e4m3"),
        ("bf16", "e5m2"),
        ("bf16", "int8"),
        ("fp16", "int8"),
    )
)
FP8_MIXES = MIXES[:2]
CACHED_MIXES = tuple(mix for mix in MIXES if mix.kv_is_8bit)


@dataclass(frozen=True)
class Question:
    """q (batch, seqlen_q, nheads, d) and k, v (batch, slots, nheads_kv, d[v]) with their scales."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)
    lengths: list[int] | None = None
    page_size: int = 16

    def ask(self, layout: str, *, poisoned: bool = False, **options: object) -> Answer:
        """Arrange the tensors as `layout` says, run, and bring the results back.

        `poisoned`: the output buffers are given, full of NaN, so that a hole cannot go unseen.
        """
        fn, arguments = _ARRANGE[layout](self)
        if poisoned:
            options |= _poison(arguments["q"], self.v, options.pop("out_dtype", torch.float32))
        options = {"return_lse": True, **arguments, **options}
        out, lse = fn(**options)
        return Answer(self, fn.describe_call(**options), out, lse)


@dataclass(frozen=True)
class Answer:
    """What came back, as it came (`raw_`) and dense."""

    question: Question
    call: Call
    raw_out: Tensor
    raw_lse: Tensor

    @property
    def out(self) -> Tensor:
        return self.raw_out.reshape(*self.question.q.shape[:-1], self.raw_out.shape[-1])

    @property
    def lse(self) -> Tensor:
        batch, seqlen_q, nheads, _ = self.question.q.shape
        if self.raw_lse.ndim == 3:
            return self.raw_lse
        return self.raw_lse.reshape(nheads, batch, seqlen_q).transpose(0, 1)

    def assert_within_budget(self) -> None:
        """The bounds of tests/budget.py, on this very call."""
        assert_within_budget(self.call, self.raw_out, self.raw_lse)


def offsets(lengths: list[int]) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def nan_like(x: Tensor) -> Tensor:
    """A buffer of x's shape and dtype, full of NaN."""
    return torch.full(x.shape, math.nan).to(x.dtype)


def _poison(q: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan).to(dtype)
    return {"out": out, "lse": torch.full(rows, math.nan)}


Arrangement = tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Tensor]]


def _dense(x: Question) -> Arrangement:
    arguments = {"q": x.q, "k": x.k, "v": x.v, **x.scales}
    if x.lengths is None:
        return fa.flash_attn_func, arguments
    return fa.flash_attn_varlen_func, {**arguments, "seqused_k": int32(*x.lengths)}


def _varlen(x: Question) -> Arrangement:
    batch, seqlen_q = x.q.shape[:2]
    lengths = [x.k.shape[1]] * batch if x.lengths is None else x.lengths

    def packed(t: Tensor) -> Tensor:
        return torch.cat([t[:0].flatten(0, 1), *(t[b, :n] for b, n in enumerate(lengths))])

    arguments = {"q": x.q.flatten(0, 1), "k": packed(x.k), "v": packed(x.v), **x.scales}
    for name, scale in x.scales.items():
        if scale.ndim == 3:
            rows = scale.flatten(0, 1) if name == "q_descale" else packed(scale)
            arguments[name] = rows[None]
    cu_seqlens = {"cu_seqlens_q": offsets([seqlen_q] * batch), "cu_seqlens_k": offsets(lengths)}
    return fa.flash_attn_varlen_func, {**arguments, **cu_seqlens}


def _paged(x: Question) -> Arrangement:
    lengths = [x.k.shape[1]] * x.k.shape[0] if x.lengths is None else x.lengths
    pages, table = paged(x.k, x.page_size)
    arguments = {"q": x.q, "k": pages, "v": paged(x.v, x.page_size)[0], **x.scales}
    for name, scale in x.scales.items():
        if scale.ndim == 3 and name != "q_descale":
            arguments[name] = paged(scale, x.page_size)[0]
    index = {"page_table": table, "seqused_k": int32(*lengths)}
    return fa.flash_attn_varlen_func, {**arguments, **index}


_ARRANGE: dict[str, Callable[[Question], Arrangement]] = {
    "dense": _dense,
    "varlen": _varlen,
    "paged": _paged,
}
