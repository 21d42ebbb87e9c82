"""Random sequences, computed alone or together in any layout: what properties of bits compare.

A `Sequence` owns its queries, keys and scales. `together` packs several into one call; whatever is
not theirs there (padding, spare pages, gaps) holds NaN codes and NaN scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from tests.api.calls import ints

Results = tuple[Tensor, Tensor]
LAYOUTS = ("varlen", "padded", "paged")


@dataclass(frozen=True)
class Form:
    """What all sequences of a call share."""

    q_format: str
    kv_format: str
    nheads: int
    nheads_kv: int
    d: int
    dv: int
    scaled: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def scaled_operands(self) -> str:
        """Which of q, k, v have a scale for each token and head."""
        if not FORMATS[self.kv_format].is_8bit or not (self.scaled or self.kv_format == "int8"):
            return ""
        return "qkv" if FORMATS[self.q_format].is_8bit else "kv"


@dataclass(frozen=True)
class Sequence:
    """q (rows, heads, d), k and v (keys, heads, d), scales (rows or keys, heads) by operand."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]


FORMATS_OF_Q_AND_KV = (
    ("e4m3", "e4m3"), ("e5m2", "e5m2"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3"),
    ("fp16", "int8"),
)  # fmt: skip
_BOUND = st.none() | st.integers(0, 150)


@st.composite
def forms(draw: st.DrawFn, impl: str) -> Form:
    q_format, kv_format = draw(st.sampled_from(FORMATS_OF_Q_AND_KV))
    nheads, nheads_kv = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    options: dict[str, Any] = {
        "impl": impl,
        "causal": draw(st.booleans()),
        "window_size": (draw(_BOUND), draw(_BOUND)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.7])),
        "out_dtype": torch.float32,
    }
    if impl == "tiled":
        options["num_splits"] = draw(st.sampled_from([1, 1, 2, 5]))
        if options["num_splits"] == 1 and draw(st.booleans()):
            options["seqlen_k_per_split"] = 128
        if FORMATS[q_format].is_8bit:
            named = fa.POLICIES[q_format].items()  # codes exclude V's scales per token
            known = sorted(name for name, policy in named if policy.exp2 == "exact")
            options["fp8_policy"] = draw(st.sampled_from(known))
    if draw(st.booleans()):
        options["learnable_sink"] = torch.linspace(-1, 2, nheads)
    return Form(
        q_format,
        kv_format,
        nheads,
        nheads_kv,
        d=draw(st.sampled_from([8, 16, 40])),
        dv=draw(st.sampled_from([8, 24])),
        scaled=draw(st.booleans()),
        options=options,
    )


def lengths(max_rows: int = 40, max_keys: int = 300) -> st.SearchStrategy[tuple[int, int]]:
    """Rows and keys: the edges of tiles, or spread evenly (hypothesis prefers small ones)."""
    edges = [n for n in (0, 1, 127, 128, 129, 256) if n <= max_keys]
    even = st.integers(0, 2**30).map(lambda x: x * 2654435761 // 1024 % (max_keys + 1))
    return st.tuples(st.integers(0, max_rows), st.sampled_from(edges) | even | even)


def sequence(form: Form, rows: int, keys: int, seed: int) -> Sequence:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (rows, form.nheads, form.d),
        "k": (keys, form.nheads_kv, form.d),
        "v": (keys, form.nheads_kv, form.dv),
    }
    values, scales = {}, {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g) * (1 + torch.rand(shape[:2], generator=g))[..., None]
        dtype = FORMATS[form.q_format if name == "q" else form.kv_format].dtype
        if name in form.scaled_operands:
            codes = fa.quantize(x[None], dtype=dtype)
            values[name], scales[name] = codes.values[0], codes.descale[0]
        else:
            values[name] = x.to(dtype)
    return Sequence(values["q"], values["k"], values["v"], scales)


def alone(form: Form, s: Sequence, **more: Any) -> Results:
    """out (rows, heads, dv) and lse (heads, rows) of a batched call with one sequence."""
    scales = {f"{name}_descale": scale[None] for name, scale in s.scales.items()}
    out, lse = fa.flash_attn_func(
        s.q[None], s.k[None], s.v[None], return_lse=True, **scales, **form.options | more
    )
    return out[0], lse[0]


def together(
    form: Form, all_of_them: list[Sequence], layout: str, page_size: int, seed: int
) -> list[Results]:
    """Each sequence's results from one call with all of them."""
    arguments = arranged(form, all_of_them, layout, page_size, seed)
    out, lse = fa.flash_attn_varlen_func(**arguments, return_lse=True, **form.options)
    return each_one(out, lse, all_of_them, layout)


def each_one(out: Tensor, lse: Tensor, all_of_them: list[Sequence], layout: str) -> list[Results]:
    """Each sequence's rows of what a call with all of them gave."""
    results, start = [], 0
    for b, s in enumerate(all_of_them):
        rows = s.q.shape[0]
        if layout == "padded":
            results.append((out[b, :rows], lse[b, :, :rows]))
        else:
            results.append((out[start : start + rows], lse[:, start : start + rows]))
        start += rows
    return results


def arranged(
    form: Form, all_of_them: list[Sequence], layout: str, page_size: int, seed: int
) -> dict[str, Any]:
    """Arguments of `flash_attn_varlen_func` that have all sequences in one of LAYOUTS."""
    arrange = {"varlen": _packed, "padded": _padded, "paged": _paged}[layout]
    return arrange(form, all_of_them, page_size, seed)


def _nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """NaN where the format has one; int8, which has none, gets its extreme."""
    if like.element_size() == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(like.dtype)
    return torch.full(shape, float("nan"), dtype=like.dtype)


def _cat(parts: list[Tensor]) -> Tensor:
    """torch.cat, which has no kernel for some 8-bit types."""
    if parts[0].element_size() == 1:
        return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)
    return torch.cat(parts)


def _cumulated(parts: list[Tensor]) -> Tensor:
    sizes = torch.tensor([0, *(x.shape[0] for x in parts)])
    return sizes.cumsum(0).to(torch.int32)


def _packed(form: Form, all_of_them: list[Sequence], _: int, seed: int) -> dict[str, Any]:
    del seed
    arguments: dict[str, Any] = {}
    for name in "qkv":
        parts = [getattr(s, name) for s in all_of_them]
        arguments[name] = _cat([*parts, _nan((3, *parts[0].shape[1:]), parts[0])])
        if name in form.scaled_operands:
            scales = [s.scales[name] for s in all_of_them]
            tail = _nan((3, *scales[0].shape[1:]), scales[0])
            arguments[f"{name}_descale"] = torch.cat([*scales, tail])[None]
    bounds = {f"cu_seqlens_{n}": _cumulated([getattr(s, n) for s in all_of_them]) for n in "qk"}
    return arguments | bounds


def _padded(form: Form, all_of_them: list[Sequence], _: int, seed: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in "qkv":
        parts = [getattr(s, name) for s in all_of_them]
        arguments[name] = _pad(parts, seed)
        if name in form.scaled_operands:
            arguments[f"{name}_descale"] = _pad([s.scales[name] for s in all_of_them], seed)
    used = {f"seqused_{n}": ints(*(getattr(s, n).shape[0] for s in all_of_them)) for n in "qk"}
    return arguments | used


def _pad(parts: list[Tensor], seed: int) -> Tensor:
    longest = max(x.shape[0] for x in parts) + seed % 5
    return torch.stack([
        _cat([x, _nan((longest - x.shape[0], *x.shape[1:]), x)]).view(*_bytes(x)) for x in parts
    ]).view(parts[0].dtype)  # fmt: skip


def _bytes(x: Tensor) -> tuple[torch.dtype]:
    return (torch.uint8 if x.element_size() == 1 else x.dtype,)


def _paged(form: Form, all_of_them: list[Sequence], page_size: int, seed: int) -> dict[str, Any]:
    packed = _packed(form, all_of_them, page_size, seed)
    needed = [-(-s.k.shape[0] // page_size) for s in all_of_them]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(needed), max(needed) + 1), -7, dtype=torch.int32)
    at = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[at : at + count]
        at += count
    arguments = {n: packed[n] for n in ("q", "cu_seqlens_q", "q_descale") if n in packed}
    for name in "kv":
        parts = [getattr(s, name) for s in all_of_them]
        arguments[name] = _pages(parts, table, page_size, len(order))
        if name in form.scaled_operands:
            scales = [s.scales[name] for s in all_of_them]
            arguments[f"{name}_descale"] = _pages(scales, table, page_size, len(order))
    keys = ints(*(s.k.shape[0] for s in all_of_them))
    return arguments | {"page_table": table, "seqused_k": keys}


def _pages(parts: list[Tensor], table: Tensor, page_size: int, count: int) -> Tensor:
    pool = _nan((count, page_size, *parts[0].shape[1:]), parts[0])
    for b, x in enumerate(parts):
        for j in range(-(-x.shape[0] // page_size)):
            rows = x[j * page_size : (j + 1) * page_size]
            pool[int(table[b, j]), : rows.shape[0]] = rows
    return pool
