"""`accuracy_report`: what fp8 attention costs on given tensors, where it comes from, what cures it.

Every error is ||out - exact|| / ||exact||, where exact is the attention of the tensors as given,
in fp64. By source: one operand quantised and everything else exact; P rounded as the policy says
and the operands exact; the exact output rounded to its dtype; everything together, which is what a
kernel gives. Sources are nearly independent: their squares add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flash_attn_fp8.accuracy.measure import Scores, emulate, emulation, exact, rel_l2
from flash_attn_fp8.api import flash_attn_varlen_func
from flash_attn_fp8.call import Call, describe
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import BF16, E4M3, E5M2, FP16, INT8, Format, dtype_name, format_of
from flash_attn_fp8.packed import sequence_of_rows, spread
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.quantization import Per, quantize

if TYPE_CHECKING:
    from typing_extensions import Unpack

_GRANULARITIES: tuple[Per, ...] = ("tensor", "head", "batch_head", "token_head")  # cheapest first
WORTH_A_CHANGE = 1.1  # a cure is recommended where the error falls by more than a tenth
WORST_TOKENS = 8


class Recipe(NamedTuple):
    """A way to quantise a call. `over_cache`: q keeps 16 bits, and P with it."""

    fmt: Format
    per: Per
    smooth_k: bool = False
    over_cache: bool = False

    def __str__(self) -> str:
        text = f"{self.fmt.name} per {self.per}" + (", K smoothed" if self.smooth_k else "")
        return f"16-bit q over {text}" if self.over_cache else text


class Token(NamedTuple):
    """One output row: sequence, position in it, query head, and its error.

    The error is ||out - exact|| of the row over the root mean square of ||exact|| over the rows of
    its head: on the scale of rel_l2, and not inflated where an output happens to be near 0.
    """

    sequence: int
    position: int
    head: int
    error: float


@dataclass(frozen=True)
class Report:
    """Errors of fp8 attention on given tensors; prints itself. All are relative l2 norms.

    `sources` maps "q", "k", "v" (quantised alone), "p" (rounded alone), "output" (rounded alone)
    and "everything" to errors; `by_head` the same to one error a query head; `worst` are the
    tokens with the largest errors of "everything"; `alternatives` maps what else could be done to
    the error of everything together.
    """

    tensors: str
    recipe: str
    policy: Fp8Policy
    out_dtype: torch.dtype
    sources: Mapping[str, float]
    by_head: Mapping[str, tuple[float, ...]]
    worst: tuple[Token, ...]
    alternatives: Mapping[str, float]
    recommendation: str

    def __str__(self) -> str:
        heads = range(len(self.by_head["everything"]))
        worst_heads = sorted(heads, key=lambda h: -self.by_head["everything"][h])[:WORST_TOKENS]
        what = {
            "q": "q quantised, all else exact",
            "k": "k quantised, all else exact",
            "v": "v quantised, all else exact",
            "p": "P rounded, all else exact",
            "output": f"output rounded to {dtype_name(self.out_dtype)}, all else exact",
            "everything": "everything",
        }
        lines = [
            f"accuracy of {self.recipe} attention on {self.tensors}",
            f"policy {self.policy}",
            "emulated with {tile}, {accumulator} accumulator".format_map(emulation()),
            "rel_l2 of the output against exact attention of the tensors as given",
            "",
            *_table(("by source", "error"), [(what[n], _e(x)) for n, x in self.sources.items()]),
            "",
            *_table(
                ("query head", *self.by_head),
                [(str(h), *(_e(x[h]) for x in self.by_head.values())) for h in worst_heads],
            ),
            *([f"(the worst {WORST_TOKENS} of {len(heads)})"] if len(heads) > WORST_TOKENS else []),
            "",
            *_table(
                ("worst: sequence", "position", "head", "error"),
                [(str(t.sequence), str(t.position), str(t.head), _e(t.error)) for t in self.worst],
            ),
            "",
            *_table(
                ("instead", "error"),
                [(name, _e(error)) for name, error in self.alternatives.items()],
            ),
            "",
            self.recommendation,
        ]
        return "\n".join(lines)


def _e(error: float) -> str:
    return f"{error:.4f}" if error >= 1e-3 else f"{error:.1e}"


def _table(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *lines)
    ]


def accuracy_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "batch_head",
    fp8_policy: Fp8Policy | str | None = None,
    **call: Unpack[Scores],
) -> Report:
    """Measure what quantising q, k and v to 8 bits does to their attention, and what would cure it.

    Runs the exact attention four times and the emulated kernel about ten times: a thousand tokens
    of some heads take seconds on a CPU, and time grows with the square of the length. Tensors on a
    GPU are measured there.

    Args:
        q, k, v: bf16, fp16 or fp32 in the shapes of `flash_attn_varlen_func`: (batch, seqlen,
            heads, d), or packed with cu_seqlens_q and cu_seqlens_k. No 8-bit tensors.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2 for all three; torch.int8 for k and v under
            a q that keeps 16 bits.
        per: granularity of the scales, as in `quantize`.
        fp8_policy: how P is rounded, as in the attention functions; None for the default.
        **call: softmax_scale, causal, window_size, softcap, learnable_sink, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k of `flash_attn_varlen_func`.

    Returns:
        A `Report`.

    Raises:
        InvalidArguments, Unsupported: the tensors or arguments do not describe such a call.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> q, k, v = torch.randn(3, 1, 64, 4, 64)
        >>> k[..., 5:7] += torch.tensor([40.0, 29.0])  # two outlier channels
        >>> report = fa.accuracy_report(q, k, v, causal=True)
        >>> report.sources["k"] > report.sources["v"], "smooth=True" in report.recommendation
        (True, True)
    """
    _check(q, k, v, call)
    fmt = format_of(dtype)
    if fmt not in (E4M3, E5M2, INT8):
        raise InvalidArguments(f"dtype={dtype} is none of e4m3, e5m2 and int8")
    recipe = Recipe(fmt, per, over_cache=fmt is INT8)
    subject = _Subject(q, k, v, call, fp8_policy, recipe)
    quantised = subject.quantised(recipe)
    policy = problem_of(quantised).traits.policy_in_force
    outputs = subject.by_source(policy)
    outputs["everything"] = subject.run(recipe)
    reference = outputs.pop("exact")
    sources = {name: rel_l2(out, reference) for name, out in outputs.items()}
    alternatives = {
        other: sources["everything"] if other == recipe else rel_l2(subject.run(other), reference)
        for other in _alternatives(recipe, bool(call.get("softcap")))
    }
    return Report(
        tensors=", ".join(f"{n}={describe(x)}" for n, x in (("q", q), ("k", k), ("v", v))),
        recipe=str(recipe),
        policy=policy,
        out_dtype=outputs["everything"].dtype,
        sources=sources,
        by_head={name: _by_head(out, reference) for name, out in outputs.items()},
        worst=_worst(outputs["everything"], reference, call.get("cu_seqlens_q")),
        alternatives={str(other): error for other, error in alternatives.items()},
        recommendation=_recommend(recipe, sources, alternatives),
    )


def _check(q: Tensor, k: Tensor, v: Tensor, call: Scores) -> None:
    faults = []
    known = Scores.__annotations__
    for name in call:
        if name not in known:
            raise TypeError(
                f"accuracy_report() has no argument {name!r}; it has {', '.join(known)}"
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in (BF16.dtype, FP16.dtype, torch.float32):
            faults.append(f"{name}={describe(x)} must be a bf16, fp16 or fp32 tensor")
        elif not bool(x.isfinite().all()):
            faults.append(f"{name}={describe(x)} holds NaN or infinity")
    if faults:
        raise InvalidArguments("accuracy_report: " + "; ".join(faults), tuple(faults))


@dataclass(frozen=True)
class _Subject:
    """The tensors and the attention that a report is about."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Scores
    fp8_policy: Fp8Policy | str | None
    asked: Recipe

    def by_source(self, policy: Fp8Policy) -> dict[str, Tensor]:
        """Outputs with one source of error each, and the exact one."""
        q, k, v = self.q, self.k, self.v
        q8, k8, v8 = (self._real(name, self.asked) for name in "qkv")
        reference = exact(q, k, v, **self.call)
        out_dtype = problem_of(self.quantised(self.asked)).traits.out_format
        rounded = reference.to({"bf16": torch.bfloat16, "fp16": torch.float16}[out_dtype])
        p = emulate(q.double(), k.double(), v.double(), policy, **self.call)
        return {
            "exact": reference,
            "q": exact(q8, k, v, **self.call),
            "k": exact(q, k8, v, **self.call),
            "v": exact(q, k, v8, **self.call),
            "p": p,
            "output": rounded,
        }

    def run(self, recipe: Recipe) -> Tensor:
        """The output of the emulated kernel, everything quantised as `recipe` says."""
        c = self.quantised(recipe)
        o, options = c.operands, c.options
        out, _ = flash_attn_varlen_func(
            o.q,
            o.k,
            o.v,
            q_descale=o.q_descale,
            k_descale=o.k_descale,
            v_descale=o.v_descale,
            fp8_policy=options.fp8_policy,
            impl="tiled",
            **self.call,
        )
        return out

    def quantised(self, recipe: Recipe) -> Call:
        """The call that a user of `recipe` would make."""
        scales: dict[str, Tensor] = {}
        codes = {}
        for name in "qkv":
            codes[name], descale = self._codes(name, recipe)
            if descale is not None:
                scales[f"{name}_descale"] = descale
        call: Call = flash_attn_varlen_func.describe_call(  # type: ignore[attr-defined]
            **codes,
            **scales,
            **self.call,
            fp8_policy=self._policy(recipe),
        )
        return call

    def _policy(self, recipe: Recipe) -> Fp8Policy | str | None:
        """What was given; for another recipe, as much of it as holds there."""
        same_p = recipe.fmt is self.asked.fmt and recipe.over_cache == self.asked.over_cache
        if recipe == self.asked or self.fp8_policy is None or not same_p:
            return self.fp8_policy if same_p else None
        policy = problem_of(self.quantised(self.asked)).traits.policy
        return policy.replace(row_sum="exact") if recipe.per == "token_head" else policy

    def _codes(self, name: str, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
        """Values and descale of one operand; q itself where it keeps 16 bits."""
        x: Tensor = getattr(self, name)
        if name == "q" and recipe.over_cache:
            return (x if x.dtype != torch.float32 else x.bfloat16()), None
        smooth = recipe.smooth_k and name == "k"
        packed = x.ndim == 3 and (smooth or recipe.per == "batch_head")
        bounds = self._bounds(name)
        codes = quantize(
            x,
            dtype=recipe.fmt.dtype,
            per=recipe.per,
            smooth=smooth,
            cu_seqlens=bounds if packed else None,
        )
        return codes.values, codes.descale

    def _bounds(self, name: str) -> Tensor | None:
        return self.call.get("cu_seqlens_q") if name == "q" else self.call.get("cu_seqlens_k")

    def _real(self, name: str, recipe: Recipe) -> Tensor:
        """The numbers that an operand's codes stand for, in fp64."""
        values, descale = self._codes(name, recipe)
        if descale is None:
            return values.double()
        return values.double() * spread(descale.double(), values, self._bounds(name))


def _alternatives(asked: Recipe, softcap: bool) -> list[Recipe]:
    """What is tried, cheapest first among equals in format; the recipe asked for is among them."""
    found = [asked._replace(per=per) for per in _GRANULARITIES]
    if not softcap:  # smoothing shifts scores by a constant, which softcap does not commute with
        found += [
            asked._replace(per=per, smooth_k=True)
            for per in dict.fromkeys((asked.per, "token_head"))
        ]
    other = E5M2 if asked.fmt is E4M3 else E4M3
    if not asked.over_cache:
        found.append(asked._replace(fmt=other))
    for fmt in (E4M3, INT8):
        found.append(Recipe(fmt, "token_head", over_cache=True))
    return list(dict.fromkeys(found))


def _by_head(out: Tensor, reference: Tensor) -> tuple[float, ...]:
    return tuple(rel_l2(out[..., h, :], reference[..., h, :]) for h in range(out.shape[-2]))


def _worst(out: Tensor, reference: Tensor, cu_seqlens: Tensor | None) -> tuple[Token, ...]:
    error = (out.double() - reference.double()).norm(dim=-1)  # (..., rows, heads)
    size = reference.double().norm(dim=-1).flatten(0, -2).square().mean(0).sqrt()
    relative = error / torch.where(size == 0, 1.0, size)
    count = min(WORST_TOKENS, relative.numel())
    sequences = None if cu_seqlens is None else sequence_of_rows(cu_seqlens, out.shape[0])
    found = []
    for flat in relative.flatten().topk(count).indices.tolist():
        *at, head = (int(i) for i in torch.unravel_index(torch.tensor(flat), relative.shape))
        value = float(relative.flatten()[flat])
        if cu_seqlens is not None and sequences is not None:
            sequence = int(sequences[at[0]])
            at = [sequence, at[0] - int(cu_seqlens[sequence])]
        found.append(Token(at[0], at[1], head, value))
    return tuple(found)


_SOURCE = {
    "q": "quantising q",
    "k": "quantising k",
    "v": "quantising v",
    "p": "rounding P",
    "output": "rounding the output",
}


def _recommend(
    asked: Recipe, sources: Mapping[str, float], alternatives: Mapping[Recipe, float]
) -> str:
    """What to change, if anything lowers the error by more than a tenth."""
    now = sources["everything"]
    main = max(_SOURCE, key=lambda name: sources[name])
    why = f"{_SOURCE[main].capitalize()} carries most of the error ({_e(sources[main])})."
    alike = {
        r: e
        for r, e in alternatives.items()
        if r.over_cache == asked.over_cache and r.fmt is asked.fmt
    }
    best = min(alike.values())
    if now <= WORTH_A_CHANGE * best:
        what = f"Keep {asked}: no other granularity is better by more than a tenth."
        if main == "p":
            what += " P's share depends on fp8_policy, not on scales."
    else:
        cure = next(
            r
            for r, error in alike.items()
            if error <= WORTH_A_CHANGE * best and error * WORTH_A_CHANGE < now
        )
        how = f"per={cure.per!r}" + (", smooth=True for k" if cure.smooth_k else "")
        what = f"Quantise with {how}: the error falls from {_e(now)} to {_e(alike[cure])}."
    others = {r: e for r, e in alternatives.items() if r not in alike and WORTH_A_CHANGE * e < best}
    if others:
        other = min(others, key=lambda r: others[r])
        what += f" {str(other)[0].upper()}{str(other)[1:]} would give {_e(others[other])}."
    return f"{why} {what}"
