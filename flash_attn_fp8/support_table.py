"""The support table: every combination of formats, layouts, head dims and features is asked.

Nothing is written here about what works. A grid of calls on meta tensors is put through the checks
and rules that calls go through, and the answers are condensed: one line for each value of an axis
with the other axes at their first value, then the pairs that are refused although each half works
alone. That this explains the whole grid is checked while it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.api import flash_attn_varlen_func
from flash_attn_fp8.checks import examine
from flash_attn_fp8.entry import REMEDY
from flash_attn_fp8.formats import BF16, E4M3, E5M2, FORMATS, FP16, INT8, Format, format_of_p
from flash_attn_fp8.policy import policy_for
from flash_attn_fp8.support import reasons_against
from flash_attn_fp8.target import target_named

# (executor, target): the columns. The CPU executors run on any target alike.
COLUMNS = (
    ("cute", "sm_100a"),
    ("cute", "sm_90a"),
    ("cute", "sm_80"),
    ("sim", "sm_100a"),
    ("tiled", "cpu"),
    ("reference", "cpu"),
)

_FORMATS: dict[str, tuple[Format, Format]] = {
    "e4m3": (E4M3, E4M3),
    "e5m2": (E5M2, E5M2),
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    **{
        f"{q.name} q over {kv.name} k, v": (q, kv)
        for q, kv in product((BF16, FP16), (E4M3, E5M2, INT8))
    },
    "int8": (INT8, INT8),
}
_LAYOUTS = ("batched", "packed", "batched, partly used", "paged", "packed q over pages")
_HEAD_DIMS: dict[str, tuple[int, int]] = {
    **{f"{d}": (d, d) for d in (128, 8, 64, 72, 96, 192, 256)},
    "192, of v 128": (192, 128),
    "36": (36, 36),
    "512": (512, 512),
}
_FEATURES = (
    "none",
    "causal",
    "window",
    "softcap",
    "learnable sink",
    "LSE returned",
    "8 query heads a KV head",
    "num_splits > 1",
    "seqlen_k_per_split",
    "deterministic",
    "fp8_policy given",
    "fp8 output with output_scale",
    "scales per tensor",
    "scales per head",
    "scales per (batch, head)",
    "scales per (token, head)",
)
AXES: dict[str, tuple[str, ...]] = {
    "format": tuple(_FORMATS),
    "layout": _LAYOUTS,
    "head dim": tuple(_HEAD_DIMS),
    "feature": _FEATURES,
}

Point = tuple[str, ...]  # a value of each axis, in order
Answer = tuple[tuple[str, ...], ...]  # reasons against, of each column; empty: it runs


@dataclass(frozen=True)
class SupportTable:
    """The condensed answers. `lines` maps (axis, value) and `pairs` two of them to an answer."""

    lines: Mapping[tuple[str, str], Answer]
    pairs: Mapping[tuple[tuple[str, str], tuple[str, str]], Answer]
    points: int
    reasons: dict[str, int] = field(default_factory=dict)  # footnote numbers, from 1

    def cell(self, reasons: tuple[str, ...]) -> str:
        """`yes`, or the numbers of the reasons against."""
        if not reasons:
            return "yes"
        return " ".join(f"[{self.reasons[reason]}]" for reason in reasons)

    def combinations(self) -> list[tuple[str, Answer]]:
        """The pairs, those with equal answers in one line."""
        alike: dict[tuple[str, Answer], list[str]] = {}
        for (one, other), answer in self.pairs.items():
            alike.setdefault((one[1], answer), []).append(other[1])
        return [(f"{one} with {'; '.join(others)}", a) for (one, a), others in alike.items()]


@cache
def support_table() -> SupportTable:
    """Ask the whole grid and condense the answers.

    Raises:
        RuntimeError: lines and pairs do not explain an answer of the grid.
    """
    base = tuple(values[0] for values in AXES.values())
    lines = {
        (axis, value): _ask(_moved(base, (axis, value)))
        for axis, values in AXES.items()
        for value in values
    }
    pairs = {}
    for one, other in _pairs():
        answer = _beyond(_ask(_moved(base, one, other)), lines[one], lines[other])
        if any(answer):
            pairs[one, other] = answer
    points = 0
    for point in product(*AXES.values()):
        points += 1
        _check_explained(point, lines, pairs)
    footnotes: dict[str, int] = {}
    for answer in (*lines.values(), *pairs.values()):
        for reason in (reason for column in answer for reason in column):
            footnotes.setdefault(reason, len(footnotes) + 1)
    return SupportTable(lines, pairs, points, footnotes)


def refused_arguments() -> dict[str, str]:
    """Arguments of FA3's and FA4's functions that are refused, and what to use instead."""
    return dict(REMEDY)


def _pairs() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for (one, ones), (other, others) in combinations(AXES.items(), 2):
        for value, another in product(ones[1:], others[1:]):
            yield (one, value), (other, another)


def _moved(base: Point, *choices: tuple[str, str]) -> Point:
    chosen = dict(zip(AXES, base, strict=True)) | dict(choices)
    return tuple(chosen.values())


def _beyond(answer: Answer, *known: Answer) -> Answer:
    """What of an answer the known ones do not say already.

    Nothing where one of them refuses in all columns alike: such a call is invalid, and its other
    half is not looked at.
    """
    if any(all(column for column in one) and len(set(one)) == 1 for one in known):
        return tuple(() for _ in answer)
    return tuple(
        tuple(reason for reason in column if not any(reason in one[i] for one in known))
        for i, column in enumerate(answer)
    )


def _check_explained(
    point: Point,
    lines: Mapping[tuple[str, str], Answer],
    pairs: Mapping[tuple[tuple[str, str], tuple[str, str]], Answer],
) -> None:
    at = list(zip(AXES, point, strict=True))
    known = [lines[choice] for choice in at]
    known += [pairs[both] for both in combinations(at, 2) if both in pairs]
    left = _beyond(_ask(point), *known)
    if any(left):
        raise RuntimeError(f"the support table does not explain {point}: {left}")


def _ask(point: Point) -> Answer:
    arguments = _arguments(*point)
    call = flash_attn_varlen_func.describe_call(**arguments)  # type: ignore[attr-defined]
    problem, refusal = examine(call)
    if problem is None:
        return tuple(refusal.reasons for _ in COLUMNS)
    return tuple(reasons_against(impl, problem, target_named(on)) for impl, on in COLUMNS)


# Sizes are of no matter to what runs: one batch of small ones stands for all.
_BATCH, _SEQLEN, _HEADS, _PAGES, _PAGE = 2, 128, 8, 8, 32


def _meta(fmt: Format, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=fmt.dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _arguments(formats: str, layout: str, head_dim: str, feature: str) -> dict[str, Any]:
    """The keyword arguments of one point's call, on meta tensors."""
    (q, kv), (d, dv) = _FORMATS[formats], _HEAD_DIMS[head_dim]
    heads_kv = 1 if feature.startswith("8 query heads") else _HEADS
    rows: tuple[int, ...] = (_BATCH, _SEQLEN)
    keys: tuple[int, ...] = rows
    found: dict[str, Any] = {}
    if layout.startswith("packed"):
        rows = (_BATCH * _SEQLEN,)
        found["cu_seqlens_q"] = _int32(_BATCH + 1)
    if layout == "packed":
        keys = rows
        found["cu_seqlens_k"] = _int32(_BATCH + 1)
    if layout == "batched, partly used":
        found |= {"seqused_q": _int32(_BATCH), "seqused_k": _int32(_BATCH)}
    if "page" in layout:
        keys = (_PAGES, _PAGE)
        found |= {"page_table": _int32(_BATCH, _PAGES // _BATCH), "seqused_k": _int32(_BATCH)}
    found |= {
        "q": _meta(q, *rows, _HEADS, d),
        "k": _meta(kv, *keys, heads_kv, d),
        "v": _meta(kv, *keys, heads_kv, dv),
    }
    if kv is INT8:  # codes without a range of their own
        found |= _scales("scales per (batch, head)", q, kv, rows, keys, heads_kv)
    return found | _feature(feature, q, kv) | _scales(feature, q, kv, rows, keys, heads_kv)


def _feature(feature: str, q: Format, kv: Format) -> dict[str, Any]:
    p_format = format_of_p(q, kv)
    arguments: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window_size": (64, 64)},
        "softcap": {"softcap": 30.0},
        "learnable sink": {"learnable_sink": _meta(BF16, _HEADS)},
        "LSE returned": {"return_lse": True},
        "num_splits > 1": {"num_splits": 2},
        "seqlen_k_per_split": {"seqlen_k_per_split": 128},
        "deterministic": {"deterministic": True},
        "fp8_policy given": {"fp8_policy": None if p_format is INT8 else policy_for(p_format.name)},
        "fp8 output with output_scale": {"output_scale": _meta(FORMATS["fp32"], 1)},
    }
    return arguments.get(feature, {})


def _scales(
    feature: str, q: Format, kv: Format, rows: tuple[int, ...], keys: tuple[int, ...], heads_kv: int
) -> dict[str, Any]:
    """Scales of the granularity that a feature names, for the operands that have 8 bits."""
    granularity = feature.removeprefix("scales per ")
    if granularity == feature:
        return {}
    found = {}
    for name, fmt, leading, heads in (
        ("q", q, rows, _HEADS),
        ("k", kv, keys, heads_kv),
        ("v", kv, keys, heads_kv),
    ):
        shape: dict[str, tuple[int, ...]] = {
            "tensor": (),
            "head": (heads,),
            "(batch, head)": (_BATCH, heads),
            "(token, head)": (*(leading if len(leading) == 2 else (1, *leading)), heads),
        }
        # Scales of 16-bit operands are refused: so that the table says it, all or none get them.
        if fmt.is_8bit or not kv.is_8bit:
            found[f"{name}_descale"] = _meta(FORMATS["fp32"], *shape[granularity])
    return found


def as_markdown(table: SupportTable) -> str:
    """The page docs/support.md."""
    heads = [f"{impl} on {on}" for impl, on in COLUMNS]
    text = [
        "# What runs where",
        "",
        "Written by `flash-attn-fp8 support --markdown` from the checks and rules that calls go "
        "through; not edited by hand.",
        f"{table.points:,} combinations were asked. In each table the other axes stand at "
        f"{', '.join(values[0] for values in AXES.values())}. A number is a reason against, listed "
        f"below.",
        "",
    ]
    for axis, values in AXES.items():
        text += _markdown_table(
            (axis, *heads),
            [(v, *(table.cell(reasons) for reasons in table.lines[axis, v])) for v in values],
        )
    if table.pairs:
        text += ["Refused together, though each works alone:", ""]
        text += _markdown_table(
            ("combination", *heads),
            [
                (name, *(table.cell(r) if r else "" for r in answer))
                for name, answer in table.combinations()
            ],
        )
    text += ["Reasons:", ""]
    text += [f"{number}. {reason}" for reason, number in table.reasons.items()]
    text += ["", "Arguments of FA3 and FA4 that are refused unless neutral:", ""]
    text += _markdown_table(
        ("argument", "instead"), [(f"`{name}`", why) for name, why in refused_arguments().items()]
    )
    return "\n".join(text)


def _markdown_table(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(" --- " for _ in header) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]
