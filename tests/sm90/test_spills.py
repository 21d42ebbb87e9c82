"""The SM90 kernel keeps everything in registers, and its products run side by side.

ptxas makes products wait for one another where it cannot prove that they may not: it says so
(C7510 and its neighbours), where there is a ptxas to ask.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.specs import Sm90Spec
from tests.compiled_code import check_code

pytestmark = [
    pytest.mark.skipif(sys.platform == "darwin", reason="nvdisasm is not made for macOS"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CODES = Fp8Policy("e4m3", 8, 0.75, exp2="code")
WINDOW: dict[str, Any] = {"window_size": (127, 0), "learnable_sink": torch.zeros(16, device="meta")}
KINDS: dict[str, dict[str, Any]] = {
    "e4m3, codes, full": {"fp8_policy": CODES},
    "bf16, a cache of small pages, split": {
        "fmt": "bf16", "heads": (3, 1), "page_size": 8, "causal": True, "num_splits": 2,
    },
}  # fmt: skip
SLOW_KINDS: dict[str, dict[str, Any]] = {
    "e4m3, full": {},
    "e4m3, a cache of small pages, split": {
        "heads": (3, 1), "page_size": 8, "causal": True, "num_splits": 2,
    },
    "e4m3, codes, split": {"fp8_policy": CODES, "num_splits": 2, "causal": True},
    "e4m3, d64, scales per token, window": {"per_token": True, "head_dims": (64, 64), **WINDOW},
    "e5m2, window, sink": {"fmt": "e5m2", "heads": (16, 2), **WINDOW},
    "bf16, full": {"fmt": "bf16"},
    "bf16, d64": {"fmt": "bf16", "head_dims": (64, 64)},
    "fp16, d192 and 128, pages of 8, window, split": {
        "fmt": "fp16", "head_dims": (192, 128), "heads": (16, 2), "page_size": 8, "num_splits": 2,
        **WINDOW,
    },
    "bf16, d192, causal": {"fmt": "bf16", "head_dims": (192, 192), "causal": True},
    "bf16, d256, pages of 8, softcap": {
        "fmt": "bf16", "head_dims": (256, 256), "page_size": 8, "causal": True, "softcap": 3.0,
    },
}  # fmt: skip


def spec_of(
    fmt: str = "e4m3",
    head_dims: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (16, 16),
    page_size: int | None = None,
    per_token: bool = False,
    **options: Any,
) -> Sm90Spec:
    """Of a batch of two; with pages, the last of which is partly used."""
    dtype = FORMATS[fmt].dtype
    keys = (2, 1024) if page_size is None else (64, page_size)

    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call = {
        "q": rows(2, 1024, heads[0], head_dims[0]),
        "k": rows(*keys, heads[1], head_dims[0]),
        "v": rows(*keys, heads[1], head_dims[1]),
        **options,
    }
    if FORMATS[fmt].is_8bit:
        shape = {
            n: (*call[n].shape[:2], heads[n != "q"]) if per_token else (2, heads[1]) for n in "qkv"
        }
        call |= {f"{n}_descale": torch.empty(s, device="meta") for n, s in shape.items()}
    if page_size:
        call["page_table"] = torch.empty(2, 32, dtype=torch.int32, device="meta")
        call["seqused_k"] = torch.empty(2, dtype=torch.int32, device="meta")
    explained = fa.explain(fa.flash_attn_varlen_func, **call, target="sm_90a")
    spec = explained.plan.spec if explained.plan else None
    assert isinstance(spec, Sm90Spec), str(explained)
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_spilt_and_no_product_waits(kind: str) -> None:
    check_code(spec_of(**KINDS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_nor_in_others(kind: str) -> None:
    check_code(spec_of(**SLOW_KINDS[kind]))


@pytest.mark.slow
@pytest.mark.xfail(
    raises=AssertionError,
    reason="with scales per token at head dim 128, O, P V, S and P leave a lane's other state 32 "
    "registers of 240: some of it is spilt, about ten accesses a tile",
)
@pytest.mark.parametrize("options", [{"causal": True}, WINDOW], ids=["causal", "window"])
def test_nor_with_scales_per_token(options: dict[str, Any]) -> None:
    check_code(spec_of(**{"per_token": True, **options}))
