"""Properties of problems, plans, policies and their texts, for any sizes and any options."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.call import Call
from flash_attn_fp8.check_options import MAX_SPLITS
from flash_attn_fp8.checks import examine, problem_of
from flash_attn_fp8.explanation import parse_call
from flash_attn_fp8.formats import FORMATS, format_of
from flash_attn_fp8.plan import Split, TiledSpec, plan_for
from flash_attn_fp8.problem import DETERMINISTIC_KEYS_PER_SPLIT, Problem
from flash_attn_fp8.specs import CacheSpec, Sm100Spec
from flash_attn_fp8.target import Target, target_named

MANY = settings(deadline=None, derandomize=True, database=None, max_examples=120)
TARGETS = st.sampled_from([Target("cpu"), Target("sm_100a", 148), Target("sm_90a", 132)])


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Everything of a call that may choose a kernel."""

    formats: tuple[str, str]
    group: int
    head_dims: tuple[int, int]
    layout: str
    per: str | None
    causal: bool
    bounded: tuple[bool, bool]
    softcap: bool
    sink: bool
    lse: bool


@dataclasses.dataclass(frozen=True)
class Extent:
    """Everything of a call that may not."""

    batch: int
    rows: int
    keys: int
    heads_kv: int
    page_size: int
    bounds: tuple[int, int]
    softcap: float
    softmax_scale: float


KINDS = st.builds(
    Kind,
    formats=st.sampled_from([("e4m3", "e4m3"), ("e5m2", "e5m2"), ("bf16", "bf16"),
                             ("bf16", "e4m3"), ("fp16", "e5m2")]),
    group=st.sampled_from([1, 2, 5, 8]),
    head_dims=st.tuples(st.sampled_from([8, 64, 128]), st.sampled_from([64, 128])),
    layout=st.sampled_from(["dense", "varlen", "paged", "cache"]),
    per=st.sampled_from([None, "tensor", "head", "batch_head", "token_head"]),
    causal=st.booleans(),
    bounded=st.tuples(st.booleans(), st.booleans()),
    softcap=st.booleans(),
    sink=st.booleans(),
    lse=st.booleans(),
)  # fmt: skip
EXTENTS = st.builds(
    Extent,
    batch=st.integers(1, 100),
    rows=st.integers(1, 5000),
    keys=st.integers(1, 10**6),
    heads_kv=st.integers(2, 16),  # a single head's scale is one per tensor
    page_size=st.integers(1, 256),
    bounds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    softcap=st.floats(0.125, 100),
    softmax_scale=st.floats(2.0**-20, 2.0**20),
)


def _described(kind: Kind, x: Extent) -> Call:
    q_dtype, kv_dtype = (FORMATS[name].dtype for name in kind.formats)
    heads, (d, dv) = x.heads_kv * kind.group, kind.head_dims
    pages = -(-x.keys // x.page_size)
    q_lead = (x.batch * x.rows,) if kind.layout == "varlen" else (x.batch, x.rows)
    kv_lead = {
        "varlen": (x.batch * x.keys,),
        "paged": (x.batch * pages, x.page_size),
    }.get(kind.layout, (x.batch, x.keys))
    index = {name: _meta(x.batch + extra, dtype=torch.int32) for name, extra in (
        {"varlen": [("cu_seqlens_q", 1), ("cu_seqlens_k", 1)], "dense": []}.get(
            kind.layout, [("seqused_k", 0)]))}  # fmt: skip
    if kind.layout == "paged":
        index["page_table"] = _meta(x.batch, pages, dtype=torch.int32)
    left, right = (n if on else None for n, on in zip(x.bounds, kind.bounded, strict=True))
    arguments: dict[str, Any] = {
        "q": _meta(*q_lead, heads, d, dtype=q_dtype),
        "k": _meta(*kv_lead, x.heads_kv, d, dtype=kv_dtype),
        "v": _meta(*kv_lead, x.heads_kv, dv, dtype=kv_dtype),
        "causal": kind.causal,
        "window_size": (left, right),
        "softcap": x.softcap if kind.softcap else 0.0,
        "softmax_scale": x.softmax_scale,
        "learnable_sink": _meta(heads, dtype=torch.bfloat16) if kind.sink else None,
        "return_lse": kind.lse,
        **index,
        **{f"{n}_descale": _descale(kind.per, x, q_lead if n == "q" else kv_lead)
           for n in "qkv" if kind.per and FORMATS[kind.formats[n != "q"]].is_8bit},
    }  # fmt: skip
    call: Call = fa.flash_attn_varlen_func.describe_call(**arguments)
    return call


def _descale(per: str | None, x: Extent, lead: tuple[int, ...]) -> Tensor:
    shape = {
        "tensor": (),
        "head": (x.heads_kv,),
        "batch_head": (x.batch, x.heads_kv),
        "token_head": (*((1,) if len(lead) == 1 else ()), *lead, x.heads_kv),
    }[str(per)]
    return _meta(*shape, dtype=torch.float32)


# ------------------------------------------------------------------------------- problems and plans


@MANY
@given(KINDS, EXTENTS, EXTENTS)
def test_sizes_never_choose_a_kernel(kind: Kind, one: Extent, other: Extent) -> None:
    first, second = (problem_of(_described(kind, x)) for x in (one, other))
    assert first.traits == second.traits
    assert hash(first.traits) == hash(second.traits)
    plans = [plan_for(problem, Target("sm_100a", 148)) for problem in (first, second)]
    assert _of_traits(plans[0].spec) == _of_traits(plans[1].spec)
    assert plans[0].impl == plans[1].impl


def _of_traits(spec: object) -> object:
    """A spec without what the number of rows decides: pairs of CTAs, the cache kernel's tile."""
    if isinstance(spec, Sm100Spec):
        return dataclasses.replace(spec, pair=False)
    if isinstance(spec, CacheSpec):
        return spec.traits, spec.split
    return spec


@MANY
@given(KINDS, KINDS, EXTENTS)
def test_what_may_choose_a_kernel_is_in_the_traits(kind: Kind, other: Kind, x: Extent) -> None:
    """Two kinds have equal traits only where they mean the same."""

    def meaning(k: Kind) -> object:
        scaled = k.per if "e4m3" in k.formats or "e5m2" in k.formats else None
        right = True if k.causal else k.bounded[1]
        return dataclasses.replace(k, per=scaled, causal=False, bounded=(k.bounded[0], right))

    one, two = (problem_of(_described(k, x)).traits for k in (kind, other))
    assert (one == two) == (meaning(kind) == meaning(other))


@MANY
@given(KINDS, EXTENTS, TARGETS, st.integers(0, 5), st.booleans())
def test_plans_are_pure_and_remembered(
    kind: Kind, x: Extent, target: Target, num_splits: int, deterministic: bool
) -> None:
    def problem() -> Problem:
        call = _described(kind, x)
        options = call.options._replace(num_splits=num_splits, deterministic=deterministic)
        return problem_of(call._replace(options=options))

    most = MAX_SPLITS * DETERMINISTIC_KEYS_PER_SPLIT
    if deterministic and num_splits == 0 and problem().sizes.seqlen_k > most:
        with pytest.raises(fa.Unsupported, match="can be combined: write seqlen_k_per_split="):
            plan_for(problem(), target)
        return
    plan = plan_for(problem(), target)
    assert plan_for(problem(), dataclasses.replace(target)) is plan
    assert plan_for.__wrapped__(problem(), target) == plan
    assert hash(plan) == hash(plan_for.__wrapped__(problem(), target))


@MANY
@given(st.integers(1, 300) | st.none(), st.integers(1, 40), st.integers(0, 10**7))
def test_splits_cover_the_keys_once_in_whole_tiles(
    num_splits: int | None, tiles: int, keys: int
) -> None:
    tile_n = 128
    split = Split(num_splits) if num_splits else Split(keys=tiles * tile_n)
    width, parts = split.keys_per_split(keys, tile_n), split.parts(keys)
    assert width % tile_n == 0
    assert width * parts >= keys
    assert num_splits is None or parts == num_splits
    lengths = torch.tensor([keys, 0])
    assert int(split.keys_per_split(lengths, tile_n)[0]) == width


# ----------------------------------------------------------------------------------------- policies

_NUMBERS = st.floats(0, 20) | st.integers(0, 16) | st.sampled_from([1 / 3, 8.807354922057604])
_FIELDS = {
    "p_format": st.sampled_from(["e4m3", "e5m2", "bf16", "fp16"]),
    "max_offset": _NUMBERS,
    "rescale_threshold": _NUMBERS,
    "row_sum": st.sampled_from(["exact", "quantized"]),
    "exp2": st.sampled_from(["exact", "code", "code_quadratic"]),
    "promote_every": st.none() | st.integers(1, 8).map(lambda n: 32 * n),
}
POLICIES = st.fixed_dictionaries(_FIELDS)


@MANY
@given(POLICIES)
def test_a_policy_keeps_its_budget_or_is_refused(fields: dict[str, Any]) -> None:
    fmt = FORMATS[fields["p_format"]]
    top = fields["max_offset"] + fields["rescale_threshold"]
    legal = fields["exp2"] == "exact" or fmt.is_fp8
    try:
        policy = fa.Fp8Policy(**fields)
    except fa.InvalidArguments:
        assert top > fmt.log2_max or not legal
        return
    assert legal
    assert policy.headroom_log2 >= 0
    largest = torch.exp2(torch.tensor(top, dtype=torch.float64))
    assert float(largest) <= fmt.max * (1 + fmt.unit_roundoff)
    assert policy.tail_log2 < -policy.max_offset + 1


@MANY
@given(POLICIES, st.booleans())
def test_a_policy_is_what_its_text_says(fields: dict[str, Any], unsafe: bool) -> None:
    try:
        policy = (fa.Fp8Policy.breaking_the_budget if unsafe else fa.Fp8Policy)(**fields)
    except fa.InvalidArguments:
        return
    text = str(policy)
    assert fa.Fp8Policy.parse(text) == policy
    assert hash(fa.Fp8Policy.parse(text)) == hash(policy)
    assert text.startswith("UNSAFE ") == unsafe


@MANY
@given(st.sampled_from(["e4m3", "e5m2"]), st.data())
def test_no_probability_saturates(name: str, data: st.DataObject) -> None:
    """Scores that rise by anything from tile to tile: the maximum lags, P stays in range."""
    fmt = FORMATS[name]
    offset = data.draw(st.floats(0, fmt.log2_max))
    policy = fa.Fp8Policy(name, offset, data.draw(st.floats(0, fmt.log2_max - offset)))
    rises = data.draw(st.lists(st.floats(-2, 12), min_size=1, max_size=12))
    running, largest = float("-inf"), 0.0
    for score in torch.tensor(rises).cumsum(0).tolist():
        if score - running > policy.rescale_threshold:
            running = score
        largest = max(largest, score - running + policy.max_offset)
    assert largest <= policy.max_offset + policy.rescale_threshold <= fmt.log2_max


def test_a_policy_that_may_saturate_is_never_an_accident() -> None:
    """No argument, no change and no text but UNSAFE makes one; copies stay what they are."""
    with pytest.raises(TypeError, match="allow_saturation"):
        fa.Fp8Policy("e4m3", 8, 4, allow_saturation=True)
    safe = fa.policy_for("e4m3")
    for change in ({"allow_saturation": True}, {"rescale_threshold": 4}):
        with pytest.raises(ValueError, match=r"allow_saturation|saturate"):
            safe.replace(**change)
    broken = fa.Fp8Policy.breaking_the_budget("e4m3", 8, 4)
    assert str(broken).startswith("UNSAFE e4m3 ")
    assert repr(broken).startswith("UNSAFE Fp8Policy(p_format='e4m3', max_offset=8.0, ")
    assert broken != safe.replace(max_offset=8, rescale_threshold=0)
    for same in (copy.copy(broken), pickle.loads(pickle.dumps(broken)), broken.replace()):
        assert same == broken
        assert same.allow_saturation
    assert broken.replace(row_sum="exact").allow_saturation


@pytest.mark.parametrize("make", [fa.Fp8Policy, fa.Fp8Policy.breaking_the_budget])
@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"p_format": ["e4m3"]}, "p_format=['e4m3'] is not one of e4m3, e5m2, fp16, bf16"),
        ({"p_format": "int8"}, "p_format='int8' is not one of e4m3, e5m2, fp16, bf16"),
        ({"p_format": None}, "p_format=None is not one of e4m3, e5m2, fp16, bf16"),
        ({"max_offset": [1]}, "max_offset=[1] must be a finite number >= 0 (log2 units)"),
        ({"max_offset": True}, "max_offset=True must be a finite number >= 0 (log2 units)"),
        ({"max_offset": 10**309},
         f"max_offset={10**309} must be a finite number >= 0 (log2 units)"),
        ({"rescale_threshold": float("inf")},
         "rescale_threshold=inf must be a finite number >= 0 (log2 units)"),
        ({"row_sum": ["exact"]}, "row_sum=['exact'] is not one of exact, quantized"),
        ({"exp2": {}}, "exp2={} is not one of exact, code, code_quadratic"),
        ({"promote_every": 48}, "promote_every=48 must be None or a positive multiple of 32 keys"),
    ],
)  # fmt: skip
def test_a_policy_of_anything_else_is_refused(
    make: Callable[..., fa.Fp8Policy], fields: dict[str, Any], fault: str
) -> None:
    with pytest.raises(fa.InvalidArguments) as refused:
        make(**{"p_format": "e4m3", "max_offset": 1, "rescale_threshold": 0} | fields)
    assert refused.value.reasons == (fault,)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"tile_n": 0}, "tile_n=0 must be a positive number of keys, such as 128"),
        ({"tile_n": 64.0}, "tile_n=64.0 must be a positive number of keys, such as 128"),
        ({"tile_n": 40, "accumulator": "sm90_fp8"},
         "tile_n=40 must be a multiple of the 32 keys of one instruction of the sm90_fp8 "
         "accumulator, such as 128"),
        ({"accumulator": "fp16"}, "accumulator='fp16' is not one of 'fp32', 'sm90_fp8'"),
        ({"policy": "e4m3"}, "policy='e4m3' must be an Fp8Policy, such as policy_for('e4m3')"),
    ],
)  # fmt: skip
def test_a_spec_of_anything_else_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(fa.InvalidArguments) as refused:
        TiledSpec(**{"policy": fa.policy_for("e4m3")} | fields)
    assert refused.value.reasons == (fault,)


# -------------------------------------------------------------------------------------------- texts

_DTYPES = st.sampled_from([*(f.dtype for f in FORMATS.values()), torch.float64, torch.int32])
_SIZES = st.sampled_from([0, 1, 2, 3, 8, 64])


@st.composite
def _tensors(draw: st.DrawFn, ranks: tuple[int, ...] = (3, 4)) -> Tensor:
    shape = draw(st.sampled_from(ranks).flatmap(lambda n: st.lists(_SIZES, min_size=n, max_size=n)))
    x = _meta(*shape, dtype=draw(_DTYPES))
    return x.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else x


_ANY = (0, 1, 2, 3, 4)
_OPTION_VALUES = {
    "softmax_scale": st.none() | st.floats() | st.integers(-2, 2) | _tensors(_ANY),
    "causal": st.booleans() | st.integers(0, 1) | st.text(max_size=3),
    "window_size": st.tuples(*[st.none() | st.integers(-2, 9)] * 2) | st.integers() | st.none(),
    "softcap": st.floats() | st.booleans(),
    "max_seqlen_q": st.none() | st.integers(-1, 99) | st.floats(),
    "max_seqlen_k": st.none() | st.integers(-1, 99) | _tensors(_ANY),
    "min_seqlen_k": st.none() | st.integers(-1, 99),
    "num_splits": st.integers(-1, 300) | st.booleans() | st.text(max_size=3),
    "seqlen_k_per_split": st.none() | st.sampled_from([0, 1, 128, 300]),
    "pack_gqa": st.none() | st.booleans() | st.integers(0, 2),
    "deterministic": st.booleans(),
    "disable_scheduler_metadata": st.booleans(),
    "return_lse": st.booleans(),
    "out_dtype": st.none() | _DTYPES | st.sampled_from(["bf16", "x y", "it's", 'a "b"']),
    "fp8_policy": st.none() | st.sampled_from(["balanced", "no, such", "(", "it's"])
    | st.sampled_from([fa.policy_for("e5m2"), fa.Fp8Policy("e4m3", 1 / 3, 1 / 7)]),
    "impl": st.none() | st.sampled_from(["tiled", "reference", "cute", "sim", "no, 'such"]),
    "qv": st.none() | _tensors(_ANY),
    "score_mod": st.none() | st.sampled_from([abs, len, (1, 2), [3, [4]], {"a": 1}]),
    "scheduler_metadata": st.none() | st.integers(),
    "gather_bwd_recompute_p": st.booleans(),
}  # fmt: skip
_OPERANDS = {
    "cu_seqlens_q": _tensors(_ANY),
    "cu_seqlens_k": _tensors(_ANY),
    "seqused_q": _tensors(_ANY),
    "seqused_k": _tensors(_ANY),
    "page_table": _tensors(_ANY),
    "learnable_sink": _tensors(_ANY),
    "q_descale": _tensors(_ANY),
    "k_descale": _tensors(_ANY),
    "v_descale": _tensors(_ANY),
    "output_scale": _tensors(_ANY),
    "out": _tensors(_ANY),
    "lse": _tensors(_ANY),
}
ARGUMENTS = st.fixed_dictionaries(
    {name: _tensors() for name in "qkv"}, optional=_OPTION_VALUES | _OPERANDS
)


@settings(MANY, max_examples=250)
@given(ARGUMENTS)
def test_any_arguments_are_a_problem_or_reasons_and_their_text_is_the_same_call(
    arguments: dict[str, Any],
) -> None:
    call: Call = fa.flash_attn_varlen_func.describe_call(**arguments)
    problem, refusal = examine(call)
    assert (problem is None) == bool(refusal.reasons)
    again, refusal_again = examine(parse_call(str(call)))
    assert str(parse_call(str(call))) == str(call)
    assert again == problem
    assert refusal_again.reasons == refusal.reasons


@MANY
@given(KINDS, EXTENTS)
def test_a_legal_call_is_what_its_text_says(kind: Kind, x: Extent) -> None:
    call = _described(kind, x)
    explanation = fa.explain(str(call))
    assert explanation.ok
    assert explanation.problem == problem_of(call)
    assert str(explanation.call) == str(call)


VALID = str(_described(
    Kind(("e4m3",) * 2, 2, (64, 64), "paged", "token_head", True, (True, False), True, True, True),
    Extent(2, 3, 40, 2, 16, (5, 5), 3.0, 0.5),
))  # fmt: skip
_PIECES = st.sampled_from([*"()[]{}=,'\" \n\\<>-0", "e4m3", "nan", "q=", "[1]", "{1, 1}", "9" * 30])


@st.composite
def _damaged(draw: st.DrawFn, text: str) -> str:
    """A text with some stretches replaced."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        upto = draw(st.integers(at, min(len(text), at + 12)))
        text = text[:at] + draw(_PIECES | st.text(max_size=4)) + text[upto:]
    return text


@settings(MANY, max_examples=250)
@given(st.text() | _damaged(VALID))
@example("flash_attn_func()")
@example("flash_attn_func(q=e4m3[1], k=e4m3[1], v=e4m3[1], causal={[]: 1})")
@example("flash_attn_func(q=e4m3[999999999, 999999999, 9], k=e4m3[1], v=e4m3[1])")
def test_text_is_a_call_or_invalid(text: str) -> None:
    try:
        call = parse_call(text)
    except fa.InvalidArguments:
        return
    problem, refusal = examine(call)
    assert (problem is None) == bool(refusal.reasons)
    assert str(fa.explain(text))


@MANY
@given(st.text() | _damaged(str(fa.policy_for("e4m3"))))
@example("")
@example("UNSAFE")
@example("e4m3 max_offset=8 rescale_threshold=4 allow_saturation=True")
@example("e4m3 max_offset=nan rescale_threshold=0")
def test_text_is_a_policy_or_invalid(text: str) -> None:
    try:
        policy = fa.Fp8Policy.parse(text)
    except fa.InvalidArguments:
        return
    assert policy.allow_saturation == text.split()[0].startswith("UNSAFE")
    assert fa.Fp8Policy.parse(str(policy)) == policy


@MANY
@given(st.text() | _damaged("sm_100a:12"))
def test_text_is_a_target_or_invalid(text: str) -> None:
    try:
        target = target_named(text)
    except fa.InvalidArguments:
        return
    assert text.startswith(target.arch)
    assert target.sm_count >= 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_dtype_and_its_name_are_one(name: str) -> None:
    assert format_of(FORMATS[name].dtype) is FORMATS[name]
