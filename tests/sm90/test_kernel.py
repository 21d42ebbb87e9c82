"""What the SM90 kernel writes where there is nothing to attend to, when it runs, its names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import FEW_ROWS
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.specs import CacheSpec, Sm90Spec, TransposeSpec
from tests.sm90.configurations import TARGET

FORWARD = "sm90_forward"


def _ones(fmt: str, *shape: int) -> Any:
    return torch.ones(shape).to(FORMATS[fmt].dtype)


@pytest.mark.parametrize("fmt", ["e4m3", pytest.param("bf16", marks=pytest.mark.slow)])
def test_rows_of_no_sequence_and_no_keys(fmt: str) -> None:
    """They are 0 with an LSE of -inf, in a buffer of the caller's; the others are not."""
    q = _ones(fmt, 90, 3, 64)
    starts = torch.tensor([0, 70, 80], dtype=torch.int32)
    keys = torch.tensor([0, 70, 70], dtype=torch.int32)
    out = torch.full((90, 3, 64), 7.0, dtype=torch.bfloat16)
    (_, lse), runs = fa.simulate(
        fa.flash_attn_varlen_func, q, q, q, cu_seqlens_q=starts, cu_seqlens_k=keys, out=out,
        return_lse=True, target=TARGET, schedule="random", seed=3,
    )  # fmt: skip
    assert any(FORWARD in run.kernel for run in runs)
    assert bool((out[70:] == 0).all())
    assert bool((lse[:, 70:] == -math.inf).all())
    assert bool((out[:70] == 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
def test_no_keys_at_all(fmt: str) -> None:
    q, k = _ones(fmt, 1, 100, 2, 64), _ones(fmt, 1, 0, 2, 64)
    (out, lse), _ = fa.simulate(
        fa.flash_attn_func, q, k, k, return_lse=True, target=TARGET,
        learnable_sink=torch.tensor([1.0, 2.0]),
    )  # fmt: skip
    assert bool((out == 0).all())
    assert bool((lse == torch.tensor([1.0, 2.0])[:, None]).all())


def test_roles_in_a_timeline(tmp_path: Path) -> None:
    q = _ones("e4m3", 1, 130, 1, 64)
    fa.simulate(fa.flash_attn_func, q, q, q, trace=tmp_path / "t.json", target=TARGET)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp  0 (load)", "warp  4 (attend 0)", "warp  8 (attend 1)"} <= names


def _plan(
    fmt: str, seqlen_q: int, group: int = 1, page_size: int | None = None, **more: Any
) -> Any:
    keys = (2, 256) if page_size is None else (8, page_size)
    q, k = (torch.empty(*s, 64, dtype=FORMATS[fmt].dtype, device="meta")
            for s in ((2, seqlen_q, 2 * group), (*keys, 2)))  # fmt: skip
    if page_size:
        more["page_table"] = torch.empty(2, 4, dtype=torch.int32, device="meta")
        more["seqused_k"] = torch.empty(2, dtype=torch.int32, device="meta")
    explained = fa.explain(fa.flash_attn_varlen_func, q, k, k, target="sm_90a", **more)
    return explained.plan or explained


def test_fp8_has_v_transposed_before() -> None:
    kinds = [type(spec) for spec in _plan("e4m3", 1).kernels]
    assert kinds == [TransposeSpec, Sm90Spec]


@pytest.mark.parametrize(
    ("seqlen_q", "group", "page_size", "kind"),
    [
        (FEW_ROWS, 1, None, CacheSpec),
        (FEW_ROWS + 1, 1, None, Sm90Spec),
        (FEW_ROWS // 8, 8, 16, CacheSpec),
        (FEW_ROWS // 8 + 1, 8, 16, Sm90Spec),
        (1000, 1, 48, CacheSpec),  # pages that TMA boxes do not divide
        (1000, 65, None, CacheSpec),  # heads that no tile of 64 rows has room for
    ],
)
def test_which_kernel_takes_16_bits(
    seqlen_q: int, group: int, page_size: int | None, kind: type
) -> None:
    """Few query rows are the cache kernel's, and what the forward kernel cannot do."""
    plan = _plan("bf16", seqlen_q, group, page_size)
    assert isinstance(plan.spec, kind)
    assert plan.impl == "cute"


def test_what_it_cannot_do_is_refused_by_name() -> None:
    def why(**options: Any) -> str:
        return str(_plan("e4m3", 100, **options, impl="cute"))

    assert "65 query heads of a KV head do not fit a tile of 64 rows" in why(group=65)
    assert isinstance(_plan("e4m3", 100, group=65, pack_gqa=False).spec, Sm90Spec)
    quadratic = Fp8Policy("e4m3", 8, 0.75, exp2="code_quadratic")
    assert "its kernel has no exp2='code_quadratic'" in why(fp8_policy=quadratic)
    for every in (64, None):
        other = Fp8Policy("e4m3", 8, 0.75, promote_every=every)
        assert f"not as promote_every={every}" in why(fp8_policy=other)
    assert "reads pages of 8, 16, 32, 64, 128, 256 tokens, not 48" in why(page_size=48)


def test_no_unit_is_claimed_before_the_counter_is_0() -> None:
    """The kernel before makes it 0, and may still run: not seen by a simulator of one at a time."""
    spec = _plan("e4m3", 100, causal=True).spec
    ptx = (cache.keep(spec, "sm_90a", "simulator") / link.PTX).read_text()
    before, *claims = ptx.split("\tatom.")
    assert len(claims) == 1
    assert before.rfind("griddepcontrol.wait") > before.rfind("mbarrier.try_wait") > 0
