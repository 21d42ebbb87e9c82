"""flash-attn-4's forward as a table of cases: how to call it, and what it should answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flash_attn_fp8 import sim
from flash_attn_fp8.sim.machine import Run
from flash_attn_fp8.sim.memory import Checks
from flash_attn_fp8.sim.schedule import RoundRobin, Schedule
from tests.sim.foreign import model

E4M3, E5M2, BF16, F16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16

# The bounds of `Errors`. The first has the output's rounding in it, at most 2^-8 for bf16, and an
# fp8 P that was rounded the other way: half of a key's weight, times 2^-3 or 2^-2.
OUT_BOUND = {BF16: 4e-3, F16: 6e-4, E4M3: 8e-3, E5M2: 1e-2}
BEYOND_BOUND = 2e-5
LSE_BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """One call. Sequences: `batch` of equal lengths, or those of `lengths_q` and `lengths_k`.

    `used_q`, `used_k` are seqused_q, seqused_k. `page` is a page's tokens. `two_ctas` says whether
    pairs of CTAs work together: False as with FA_DISABLE_2CTA=1; True is checked, None leaves it to
    flash-attn-4. `tile` is the keys of a tile.
    """

    name: str
    dtype: torch.dtype = E4M3
    head_dim: int = 128
    head_dim_v: int | None = None
    batch: int = 1
    seqlen_q: int = 256
    seqlen_k: int = 384
    heads: int = 1
    kv_heads: int = 1
    mask: model.Mask = field(default_factory=model.Mask)
    pack_gqa: bool | None = None
    page: int | None = None
    splits: int = 1
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    two_ctas: bool | None = None
    tile: int = 128
    sm_count: int = 2
    checks: Checks = field(default_factory=Checks)

    def changed(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass
class Inputs:
    """Tensors as flash-attn-4 takes them, and the sequences in them: (q, k, v) of each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass
class Answer:
    """What came out; `runs` of its launches."""

    out: torch.Tensor
    lse: torch.Tensor
    runs: list[Run]


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def inputs(case: Case) -> Inputs:
    """Normal values, the same for the same name."""
    made = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(case.dtype)

    head_dim_v = case.head_dim_v or case.head_dim
    options: dict[str, Any] = {}
    if case.lengths_q:
        q = tensor(sum(case.lengths_q), case.heads, case.head_dim)
        options["cu_seqlens_q"] = _offsets(case.lengths_q)
        options["max_seqlen_q"] = max(case.lengths_q)
        queries = list(q.split(case.lengths_q))
    else:
        q = tensor(case.batch, case.seqlen_q, case.heads, case.head_dim)
        queries = list(q)
    dims = (case.head_dim, head_dim_v)
    if case.lengths_k:
        k, v = (tensor(sum(case.lengths_k), case.kv_heads, d) for d in dims)
        options["cu_seqlens_k"] = _offsets(case.lengths_k)
        options["max_seqlen_k"] = max(case.lengths_k)
        keys, values = (list(t.split(case.lengths_k)) for t in (k, v))
    elif case.page:
        count = case.seqlen_k // case.page
        pages = case.batch * count + 1  # one that nobody uses
        k, v = (tensor(pages, case.page, case.kv_heads, d) for d in dims)
        order = torch.randperm(pages, generator=made)[: case.batch * count]
        table = order.to(torch.int32).reshape(case.batch, count)
        options["page_table"] = table
        keys, values = ([t[row.long()].flatten(0, 1) for row in table] for t in (k, v))
    else:
        k, v = (tensor(case.batch, case.seqlen_k, case.kv_heads, d) for d in dims)
        keys, values = list(k), list(v)
    for name, used, sequences in (
        ("seqused_q", case.used_q, (queries,)), ("seqused_k", case.used_k, (keys, values))
    ):  # fmt: skip
        if used:
            options[name] = torch.tensor(used, dtype=torch.int32)
            for parts in sequences:
                parts[:] = [t[:n] for t, n in zip(parts, used, strict=True)]
    if case.dtype in (E4M3, E5M2):
        for name in ("q_descale", "k_descale", "v_descale"):
            descale = torch.rand(len(queries), case.kv_heads, generator=made) + 0.5
            options[name] = descale
    sequences = list(zip(queries, keys, values, strict=True))
    return Inputs(q, k, v, options, sequences)


def run(
    fa4: Any, case: Case, given: Inputs, schedule: Callable[[], Schedule] = RoundRobin
) -> Answer:
    """Calls flash-attn-4 on a simulated sm_100a; out and LSE start as NaN."""
    utils = fa4.utils
    before = utils._fa_disable_2cta_enabled  # what FA_DISABLE_2CTA=1 sets
    utils._fa_disable_2cta_enabled = case.two_ctas is False
    q, head_dim_v = given.q, case.head_dim_v or case.head_dim
    out_dtype = BF16 if case.dtype in (E4M3, E5M2) else case.dtype
    out = torch.full((*q.shape[:-1], head_dim_v), torch.nan, dtype=out_dtype)
    packed = bool(case.lengths_q)
    lse_shape = (case.heads, q.shape[0]) if packed else (q.shape[0], case.heads, q.shape[1])
    lse = torch.full(lse_shape, torch.nan)
    try:
        with sim.device(
            "sm_100a", sm_count=case.sm_count, checks=case.checks, schedule=schedule
        ) as device:
            # Not the test's own: the device places what it makes as a GPU's allocator would.
            out, lse = out.clone(), lse.clone()
            tensors = [t.clone() for t in (q, given.k, given.v)]
            fa4._flash_attn_fwd(
                *tensors,
                causal=case.mask.causal,
                window_size_left=case.mask.left,
                window_size_right=case.mask.right,
                pack_gqa=case.pack_gqa,
                num_splits=case.splits,
                out=out,
                lse=lse,
                **{n: t.clone() if torch.is_tensor(t) else t for n, t in given.options.items()},
            )
    finally:
        utils._fa_disable_2cta_enabled = before
    return Answer(out, lse, device.runs)


def expected(case: Case, given: Inputs) -> list[tuple[torch.Tensor, ...]]:
    """Of each sequence, O (seqlen_q, heads, head_dim_v), LSE (heads, seqlen_q), and O's slack."""
    answers = []
    for index, (q, k, v) in enumerate(given.sequences):
        seen = case.mask.of(q.shape[0], k.shape[0])
        heads = []
        for h in range(case.heads):
            kv = h * case.kv_heads // case.heads
            descales = tuple(
                float(given.options[f"{x}_descale"][index, kv])
                if f"{x}_descale" in given.options
                else 1.0
                for x in "qkv"
            )
            heads.append(
                model.head(
                    q[:, h], k[:, kv], v[:, kv], seen,
                    descales=descales, tile=case.tile, splits=case.splits,
                )
            )  # fmt: skip
        o, lse, slack = zip(*heads, strict=True)
        answers.append((torch.stack(o, 1), torch.stack(lse), torch.stack(slack, 1)))
    return answers


def sequences_of(case: Case, answer: Answer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The answer cut like `expected`: only the rows that hold a query."""
    out, lse = answer.out, answer.lse
    if case.lengths_q:
        parts = list(zip(out.split(case.lengths_q), lse.split(case.lengths_q, 1), strict=True))
    else:
        parts = list(zip(out, lse, strict=True))
    used = case.used_q or [None] * len(parts)
    return [(o[:n], x[:, :n]) for (o, x), n in zip(parts, used, strict=True)]


@dataclass(frozen=True)
class Errors:
    """The largest errors, infinite where something was not written.

    Of O as it is, and beyond its rounding and the model's slack, both over O's largest magnitude;
    of LSE.
    """

    out: float
    beyond: float
    lse: float


def errors(case: Case, given: Inputs, answer: Answer) -> Errors:
    """How far the answer is from what is expected."""
    found, wanted = sequences_of(case, answer), expected(case, given)
    o, lse = (torch.cat([part[i].flatten() for part in found]) for i in range(2))
    want_o, want_lse, slack = (torch.cat([part[i].flatten() for part in wanted]) for i in range(3))
    off = (o.double() - want_o).abs().nan_to_num(torch.inf, torch.inf)
    beyond = off - slack - _half_ulp(want_o.abs() + slack, o.dtype)
    lse_off = torch.where(lse == want_lse, 0.0, (lse - want_lse).abs())  # equal: -inf too
    scale = float(want_o.abs().max())
    return Errors(
        float(off.max()) / scale,
        float(beyond.max().clamp(min=0)) / scale,
        float(lse_off.nan_to_num(torch.inf, torch.inf).max()),
    )


def _half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding to `dtype` may change."""
    _, exponent = torch.frexp(values)
    return torch.ldexp(torch.tensor(torch.finfo(dtype).eps / 4, dtype=torch.float64), exponent)
