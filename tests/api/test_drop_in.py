"""A program that calls FA4's forward, or FA3's cache function, runs with its import changed.

Signatures are those of flash-attn-4 4.0.0b36 and of FA3's `hopper/flash_attn_interface.py`, written
out here; where flash-attn-4 is installed its own are compared too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from tests.api.calls import dense, ints, packed, paged_pool, partials, same_bits

THEIRS = {
    "flash_attn_func": """
        q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap
        num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars
        block_sparse_tensors block_sparse_tensors_bwd return_lse gather_bwd_recompute_p
        gather_bwd_token_chunk""",
    "flash_attn_varlen_func": """
        q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q
        seqused_k gather_kv_indices page_table softmax_scale causal window_size learnable_sink
        softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod
        block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata
        seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p
        gather_bwd_token_chunk""",
    "flash_attn_combine": """
        out_partial lse_partial out out_dtype cu_seqlens seqused virtual_batch_idx return_lse""",
    "_flash_attn_fwd": """
        q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k
        min_seqlen_k page_table softmax_scale causal softcap window_size_left window_size_right
        learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits pack_gqa _arch
        score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars q_descale
        k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split
        disable_scheduler_metadata gather_bwd_recompute_p""",
    "flash_attn_with_kvcache": """
        q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad
        page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale
        v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved
        scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse""",
}
# What is not None among their defaults.
THEIR_DEFAULTS: dict[str, dict[str, Any]] = {
    "flash_attn_func": {
        "causal": False,
        "window_size": (None, None),
        "softcap": 0.0,
        "num_splits": 1,
        "deterministic": False,
        "return_lse": False,
        "gather_bwd_recompute_p": False,
    },
    "flash_attn_combine": {"return_lse": True},
    "_flash_attn_fwd": {
        "causal": False,
        "num_threads": 384,
        "num_splits": 1,
        "return_lse": False,
        "disable_scheduler_metadata": False,
        "gather_bwd_recompute_p": False,
    },
    "flash_attn_with_kvcache": {
        "causal": False,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
        "return_softmax_lse": False,
    },
}
THEIR_DEFAULTS["flash_attn_varlen_func"] = {
    **THEIR_DEFAULTS["flash_attn_func"],
    "disable_scheduler_metadata": False,
}


@pytest.mark.parametrize("name", THEIRS)
def test_parameters_are_theirs_in_their_order_before_ours(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    ours = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert positional == THEIRS[name].split()
    assert len(positional) + len(ours) == len(parameters)
    assert all(p.default is None or p.default is False for p in ours)


@pytest.mark.parametrize("name", THEIRS)
def test_defaults_are_theirs(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    optional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = {p.name: p.default for p in optional if p.default not in (None, p.empty)}
    assert found == THEIR_DEFAULTS[name]


@pytest.mark.parametrize("name", sorted(set(THEIRS) - {"flash_attn_with_kvcache"}))
def test_an_installed_fa4_still_has_these_signatures(name: str) -> None:
    """Its source is read: importing it needs triton."""
    try:
        theirs = metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")
    source = Path(str(theirs.locate_file("flash_attn/cute/interface.py"))).read_text("utf-8")
    (function,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    parameters = [a.arg for a in function.args.args]
    assert parameters == THEIRS[name].split()
    assert [*function.args.posonlyargs, *function.args.kwonlyargs] == []
    defaults = [ast.literal_eval(d) for d in function.args.defaults]
    named = zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    assert {n: d for n, d in named if d is not None} == THEIR_DEFAULTS[name]


def test_the_module_exports_what_theirs_does() -> None:
    assert set(THEIRS) <= set(fa.__all__)


D, P, S = dense(), packed(), partials()
SINK = torch.linspace(-1, 1, 4).to(torch.bfloat16)
NONE2 = (None, None)
Form = Callable[[], object]


def _as_fa4_varlen_caller() -> object:
    """As vLLM's and SGLang's backends call it: keywords only, paged, unused ones spelled out."""
    x = paged_pool()
    return fa.flash_attn_varlen_func(
        q=x["q"].flatten(0, 1),
        k=x["k"],
        v=x["v"],
        cu_seqlens_q=ints(0, 6, 12),
        cu_seqlens_k=None,
        max_seqlen_q=6,
        max_seqlen_k=40,
        seqused_k=x["seqused_k"],
        page_table=x["page_table"],
        softmax_scale=16**-0.5,
        causal=True,
        window_size=(-1, -1),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        score_mod=None,
        aux_tensors=None,
        return_lse=True,
    )


def _as_fa4_varlen_twin() -> object:
    x = paged_pool()
    out, lse = fa.flash_attn_varlen_func(
        x["q"], x["k"], x["v"], seqused_k=x["seqused_k"], page_table=x["page_table"], causal=True,
        return_lse=True,
    )  # fmt: skip
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


# A form that other people's programs use, and the same call in the fewest keywords.
FORMS: dict[str, tuple[Form, Form]] = {
    "FA4 three tensors": (
        lambda: fa.flash_attn_func(D["q"], D["k"], D["v"]),
        lambda: fa.flash_attn_func(**D),
    ),
    "FA4 all positional": (
        lambda: fa.flash_attn_func(
            D["q"], D["k"], D["v"], None, None, 0.1, True, (9, 0), SINK, 5.0, 2, True, True,
            None, None, None, None, None, None, None, True, False, None,
        ),
        lambda: fa.flash_attn_func(
            **D, softmax_scale=0.1, causal=True, window_size=(9, 0), learnable_sink=SINK,
            softcap=5.0, num_splits=2, pack_gqa=True, deterministic=True, return_lse=True,
        ),
    ),
    "FA4 as its tests": (
        lambda: fa.flash_attn_func(
            D["q"], D["k"], D["v"], qv=None, causal=True, window_size=NONE2, softcap=15.0,
            learnable_sink=SINK, pack_gqa=False, num_splits=3, deterministic=True,
        ),
        lambda: fa.flash_attn_func(
            **D, causal=True, softcap=15.0, learnable_sink=SINK, num_splits=3
        ),
    ),
    "FA4 varlen positional": (
        lambda: fa.flash_attn_varlen_func(
            P["q"], P["k"], P["v"], None, P["cu_seqlens_q"], P["cu_seqlens_k"], 8, 50, 30,
            ints(4, 5), ints(30, 40), None, None, 0.2, True, (8, 0), SINK, 3.0, 1, None, False,
            None, None, None, None, None, None, True, None, None, False, False, None,
        ),
        lambda: fa.flash_attn_varlen_func(
            **P, max_seqlen_q=8, max_seqlen_k=50, min_seqlen_k=30, seqused_q=ints(4, 5),
            seqused_k=ints(30, 40), softmax_scale=0.2, causal=True, window_size=(8, 0),
            learnable_sink=SINK, softcap=3.0, return_lse=True,
        ),
    ),
    "FA4 varlen as its tests": (
        lambda: fa.flash_attn_varlen_func(
            P["q"], P["k"], P["v"], cu_seqlens_q=P["cu_seqlens_q"], cu_seqlens_k=P["cu_seqlens_k"],
            seqused_q=None, seqused_k=None, softmax_scale=1.0 / 16**0.5, causal=False,
            window_size=NONE2, learnable_sink=None, softcap=0.0, pack_gqa=None,
        ),
        lambda: fa.flash_attn_varlen_func(**P),
    ),
    "FA4 varlen as a server": (_as_fa4_varlen_caller, _as_fa4_varlen_twin),
    "FA4 private [0]": (
        lambda: fa._flash_attn_fwd(
            D["q"], D["k"], D["v"], softmax_scale=0.2, causal=True, softcap=2.0,
            window_size_left=7, window_size_right=None, q_descale=torch.full((2, 2), 0.5),
        )[0],
        lambda: fa.flash_attn_func(
            **D, softmax_scale=0.1, causal=True, softcap=2.0, window_size=(7, None)
        )[0],
    ),
    "FA4 private positional": (
        lambda: fa._flash_attn_fwd(
            P["q"], P["k"], P["v"], None, P["cu_seqlens_q"], P["cu_seqlens_k"], None, None, 8, 50,
            None, None, 0.2, True, None, 7, 0, SINK, None, None, None, 384, 2, None, None, None,
            None, None, True,
        ),
        lambda: fa.flash_attn_varlen_func(
            **P, softmax_scale=0.2, causal=True, window_size=(7, 0), learnable_sink=SINK,
            num_splits=2, return_lse=True,
        ),
    ),
    "FA4 combine": (
        lambda: fa.flash_attn_combine(
            S["out_partial"], S["lse_partial"], None, torch.bfloat16, None, ints(5, 3), None, True
        ),
        lambda: fa.flash_attn_combine(
            **S, out_dtype=torch.bfloat16, seqused=ints(5, 3), return_lse=True
        ),
    ),
    "FA4 combine into out": (
        lambda: fa.flash_attn_combine(
            S["out_partial"], S["lse_partial"], torch.empty(2, 5, 4, 16), return_lse=False
        ),
        lambda: (fa.flash_attn_combine(**S)[0], None),
    ),
    "FA3 cache": (
        lambda: fa.flash_attn_with_kvcache(
            D["q"], D["k"], D["v"], cache_seqlens=17, causal=True, window_size=(-1, -1)
        ),
        lambda: fa.flash_attn_varlen_func(**D, seqused_k=ints(17, 17), causal=True)[0],
    ),
    "FA3 cache positional": (
        lambda: fa.flash_attn_with_kvcache(
            D["q"], D["k"], D["v"], None, None, None, None, None, ints(17, 9), None, None, None,
            None, None, None, None, torch.full((2, 2), 0.5), None, None, 0.2, True, (-1, -1), 0,
            4.0, True, None, 1, None, 0, True,
        ),
        lambda: fa.flash_attn_varlen_func(
            **D, seqused_k=ints(17, 9), softmax_scale=0.1, causal=True, softcap=4.0,
            return_lse=True,
        ),
    ),
    "FA3 cache, other sequences": (
        lambda: fa.flash_attn_with_kvcache(
            D["q"], D["k"], D["v"], cache_seqlens=ints(9, 40), cache_batch_idx=ints(1, 0)
        ),
        lambda: fa.flash_attn_varlen_func(
            D["q"], D["k"].flip(0), D["v"].flip(0), seqused_k=ints(9, 40)
        )[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_means_what_its_keywords_say(form: str) -> None:
    theirs, ours = (f() for f in FORMS[form])
    assert same_bits(theirs, ours)


def test_the_result_unpacks_with_a_star() -> None:
    out, lse, *rest = fa._flash_attn_fwd(**D, return_lse=True)
    assert (out.shape, lse.shape, rest) == ((2, 6, 4, 16), (2, 4, 6), [])


def test_the_private_functions_descales_are_where_fa4_has_them() -> None:
    scales = {"q_descale": 0.5, "k_descale": 3.0, "v_descale": 7.0}
    given = D | {name: torch.tensor(x) for name, x in scales.items()}
    names = THEIRS["_flash_attn_fwd"].split()
    values = THEIR_DEFAULTS["_flash_attn_fwd"] | given
    theirs = fa._flash_attn_fwd(*(values.get(n) for n in names))
    assert same_bits(theirs, fa.flash_attn_func(**given))


@pytest.mark.parametrize(
    ("kwargs", "means"),
    [
        ({"window_size": (-1, -1)}, {}),
        ({"window_size": [None, None]}, {}),
        ({"causal": True, "window_size": (-1, 0)}, {"causal": True}),
        ({"causal": True, "window_size": (5, -1)}, {"window_size": (5, 0)}),
        ({"causal": True, "window_size": (5, 9)}, {"window_size": (5, 0)}),
        ({"causal": True, "window_size": (None, None)}, {"window_size": (None, 0)}),
    ],
)
def test_windows_on_which_all_generations_agree(kwargs: Any, means: Any) -> None:
    assert same_bits(fa.flash_attn_func(**D, **kwargs), fa.flash_attn_func(**D, **means))


# What older generations have in these places means something else here, and must not bind.
OLD_FORMS: dict[str, tuple[str, Callable[[], object]]] = {
    "FA2 dropout_p fourth": ("qv=0.0", lambda: fa.flash_attn_func(*D.values(), 0.0, 0.125, True)),
    "FA3 softmax_scale fourth": ("qv=0.125", lambda: fa.flash_attn_func(*D.values(), 0.125, True)),
    "FA3 descales after a default scale": (
        "gather_kv_indices=True",
        lambda: fa.flash_attn_func(*D.values(), None, True, None, *[torch.ones(2, 2)] * 3),
    ),
    "FA2 varlen cu_seqlens fourth": (
        "qv=int32[3]",
        lambda: fa.flash_attn_varlen_func(
            P["q"], P["k"], P["v"], P["cu_seqlens_q"], P["cu_seqlens_k"], 8, 50
        ),
    ),
    "FA2 cache_seqlens eighth": (
        "rotary_sin=int32[2]",
        lambda: fa.flash_attn_with_kvcache(*D.values(), None, None, None, None, ints(9, 9)),
    ),
    "one-sided -1": ("window_size=(-1, 0)", lambda: fa.flash_attn_func(**D, window_size=(-1, 0))),
}


@pytest.mark.parametrize("form", OLD_FORMS)
def test_an_older_generations_positions_are_refused(form: str) -> None:
    names, call = OLD_FORMS[form]
    with pytest.raises(fa.FlashAttnFp8Error) as refusal:
        call()
    assert any(reason.startswith(names) for reason in refusal.value.reasons)


@pytest.mark.parametrize("keyword", ["dropout_p", "alibi_slopes", "return_attn_probs"])
def test_an_older_generations_keywords_are_unknown(keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        fa.flash_attn_func(**D, **{keyword: None})
