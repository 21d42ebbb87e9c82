"""The bits of a row of the SM90 kernel follow from its own operands (as tests/sm100/test_bits.py).

All calls have more query rows of a KV head than the cache kernel takes, which has bits of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from tests.api.calls import same_bits
from tests.plan.sequences import LAYOUTS, Form, Results, Sequence, arranged, each_one, sequence

OPTIONS: dict[str, Any] = {"out_dtype": torch.float32, "return_lse": True}
FORMS = {
    "e4m3, causal, splits by length": Form(
        "e4m3", "e4m3", 4, 2, 64, 64, scaled=False,
        options={**OPTIONS, "causal": True, "seqlen_k_per_split": 128},
    ),
    "bf16, causal": Form(
        "bf16", "bf16", 4, 2, 64, 64, scaled=False, options={**OPTIONS, "causal": True}
    ),
    "e5m2, scales per token, window, sink": Form(
        "e5m2", "e5m2", 4, 2, 64, 64, scaled=True,
        options={**OPTIONS, "window_size": (100, 7), "learnable_sink": torch.linspace(-1, 2, 4)},
    ),
    "fp16, softcap, d192": Form(
        "fp16", "fp16", 2, 1, 192, 192, scaled=False, options={**OPTIONS, "softcap": 3.0}
    ),
}  # fmt: skip
SIZES = [(40, 300), (1, 129), (3, 0), (35, 257), (70, 5)]


def _together(
    form: Form, batch: list[Sequence], layout: str, page_size: int, seed: int, sms: int = 2
) -> list[Results]:
    """Each sequence's results from one call with all of them."""
    arguments = arranged(form, batch, layout, page_size, seed) | form.options
    (out, lse), _ = fa.simulate(fa.flash_attn_varlen_func, **arguments, target=f"sm_90a:{sms}")
    return each_one(out, lse, batch, layout)


def _check_bits(name: str, layout: str, page_size: int, order: list[int], sms: int = 2) -> None:
    form = FORMS[name]
    sequences = [sequence(form, *size, seed=i) for i, size in enumerate(SIZES)]
    expected = _together(form, sequences, "varlen", 16, seed=0)
    found = _together(form, [sequences[i] for i in order], layout, page_size, 5, sms)
    for i, result in zip(order, found, strict=True):
        assert same_bits(result, expected[i]), i


def test_in_other_company_on_other_pages() -> None:
    _check_bits("e4m3, causal, splits by length", "paged", 16, [3, 0])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMS)
def test_in_any_company(name: str, layout: str, page_size: int) -> None:
    if layout == "paged" or page_size == 8:
        _check_bits(name, layout, page_size, [4, 0, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_the_number_of_multiprocessors_is_nothing_to_a_row(name: str) -> None:
    for sms in (1, 3, 132):
        _check_bits(name, "varlen", 16, [0, 1, 2, 3, 4], sms)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_what_lies_past_a_sequence_is_nothing_to_it(name: str) -> None:
    """NaN between packed sequences' ends and in unused slots: `arranged` puts it there."""
    for layout in LAYOUTS:
        for out, lse in _together(
            FORMS[name],
            [sequence(FORMS[name], *size, seed=i) for i, size in enumerate(SIZES)],
            layout, 16, seed=1,
        ):  # fmt: skip
            assert bool(out.isfinite().all())
            assert not bool(lse.isnan().any())
