"""Every one of a format's 256 codes comes through the kernel exactly, as a key and as a value.

A row that sees one key, with a score of 0, has O = V, to the bit: P, its sum and the reciprocal are
powers of two. A query that is 1 in one place has K's number there for a score, and so for an LSE.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from tests.api.calls import ints
from tests.budget import FP32_EPS, FP32_STEPS

# Last keys of sequences, the ones that are seen: rows of an MMA's halves and pairs, and of tiles.
LENGTHS = (1, 2, 11, 36)
HEADS_KV = 4  # each has a quarter of the codes
HARDWARE, SHIFTS = "sm_100a:4", "sm_80:4"  # with the instruction that converts fp8, and without
WARPGROUPS = "sm_90a:4"  # where codes are the first operands of products


def all_codes(fmt: str, width: int) -> Tensor:
    """(sequence, key, KV head, width): all codes in the last key's row, at every place of a word.

    Other rows are full of the largest number: no key that counts.
    """
    head, column = torch.arange(HEADS_KV)[:, None] * 64, torch.arange(width)
    codes = torch.full((len(LENGTHS), max(LENGTHS), HEADS_KV, width), 0x7B, dtype=torch.uint8)
    for b, length in enumerate(LENGTHS):
        codes[b, length - 1] = ((head + column + b) % 256).to(torch.uint8)
    return codes.view(FORMATS[fmt].dtype)


def finite(x: Tensor) -> Tensor:
    """The same with 0 for what is not finite."""
    return torch.where(x.float().isfinite(), x.float(), 0.0).to(x.dtype)


def only_last_key(
    q: Tensor, k: Tensor, v: Tensor, target: str, **options: object
) -> tuple[Tensor, Tensor]:
    """Attention of one query token that sees the last key of its sequence."""
    scales = {name: torch.ones(()) for name in ("k_descale", "v_descale")}
    result, _ = fa.simulate(
        fa.flash_attn_varlen_func, q, k, v, seqused_k=ints(*LENGTHS), window_size=(0, 0),
        return_lse=True, out_dtype=torch.float32, target=target, **scales, **options,
    )  # fmt: skip
    return result


def one_hot(dtype: torch.dtype, d: int) -> Tensor:
    """(sequence, 1, head, d): head i of a KV head has its 1 in place i; of head 0 all is 0."""
    eye = torch.eye(d)
    eye[0] = 0
    return eye.repeat(HEADS_KV, 1).expand(len(LENGTHS), 1, -1, -1).to(dtype).contiguous()


def last_rows(x: Tensor) -> Tensor:
    """(sequence, KV head, width): the row of the last key."""
    return torch.stack([x[b, length - 1].float() for b, length in enumerate(LENGTHS)])


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def assert_scores(lse: Tensor, k: Tensor) -> None:
    """Each LSE but the first is its number of K, within what fp32 rounds of the way back."""
    lse, k = lse[..., 1:], k[..., 1:]
    error = (lse - k).abs()
    assert bool((error <= FP32_STEPS * FP32_EPS * (1 + k.abs())).all()), error.max()


@lru_cache(maxsize=len(FORMATS))
def results(fmt: str, q_name: str, target: str) -> tuple[Tensor, Tensor]:
    """All codes as V, and those that are finite as K."""
    k, v = finite(all_codes(fmt, 64)), all_codes(fmt, 64)
    return only_last_key(one_hot(FORMATS[q_name].dtype, 64), k, v, target, softmax_scale=1.0)


# bf16 queries are scaled on their way to the tensor core, fp16 ones are not.
CASES = [
    ("e4m3", "bf16", HARDWARE),
    ("e4m3", "bf16", SHIFTS),
    ("e5m2", "fp16", HARDWARE),
    ("int8", "bf16", HARDWARE),
    ("e4m3", "bf16", WARPGROUPS),
    ("int8", "fp16", WARPGROUPS),
    pytest.param("e4m3", "fp16", SHIFTS, marks=pytest.mark.slow),
    pytest.param("e5m2", "bf16", WARPGROUPS, marks=pytest.mark.slow),
    pytest.param("e5m2", "bf16", SHIFTS, marks=pytest.mark.slow),
    pytest.param("int8", "fp16", SHIFTS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("fmt", "q_name", "target"), CASES)
def test_every_code_of_v(fmt: str, q_name: str, target: str) -> None:
    """NaN and infinities stay in their columns."""
    out, _ = results(fmt, q_name, target)
    v = last_rows(all_codes(fmt, 64))
    assert_same_numbers(out[:, 0, ::64], v)


@pytest.mark.parametrize(("fmt", "q_name", "target"), CASES)
def test_every_finite_code_of_k(fmt: str, q_name: str, target: str) -> None:
    """The spacing of codes is thousands of times the bound: fp32's roundings of the LSE."""
    _, lse = results(fmt, q_name, target)
    k = last_rows(finite(all_codes(fmt, 64)))
    assert_scores(lse[:, :, 0].unflatten(1, (HEADS_KV, 64)), k)


@pytest.mark.parametrize(
    ("fmt", "target"),
    [("e4m3", HARDWARE), ("e4m3", SHIFTS), ("e5m2", HARDWARE), ("e5m2", WARPGROUPS)],
)
def test_codes_of_k_that_are_not_finite(fmt: str, target: str) -> None:
    """NaN and +inf make rows NaN that see their key; a score of -inf has no weight."""
    codes = all_codes(fmt, 64)
    odd = codes.view(torch.uint8)[~codes.float().isfinite()].unique()
    assert (
        odd.tolist()
        == {"e4m3": [0x7F, 0xFF], "e5m2": [*range(0x7C, 0x80), *range(0xFC, 0x100)]}[fmt]
    )
    k = torch.zeros(len(LENGTHS), max(LENGTHS), HEADS_KV, 64, dtype=torch.uint8)
    placed = {}
    for n, code in enumerate(odd.tolist()):  # one sequence and KV head each
        b, head = n % len(LENGTHS), n // len(LENGTHS)
        k[b, LENGTHS[b] - 1, head, 5 * n] = code
        placed[b, head] = torch.tensor(code, dtype=torch.uint8).view(FORMATS[fmt].dtype).float()
    q = torch.ones(len(LENGTHS), 1, 64 * HEADS_KV, 64, dtype=torch.bfloat16)
    v = torch.ones(k.shape).to(FORMATS[fmt].dtype)
    out, lse = only_last_key(q, k.view(FORMATS[fmt].dtype), v, target, softmax_scale=1.0)
    for b in range(len(LENGTHS)):
        for head in range(HEADS_KV):
            rows = slice(64 * head, 64 * head + 64)
            score = placed.get((b, head), torch.zeros(()))
            if score.isneginf():
                assert bool(lse[b, rows].isneginf().all())
                assert not bool(out[b, 0, rows].any())
            elif score.isfinite():
                assert not bool(lse[b, rows].any())
                assert bool((out[b, 0, rows] == 1).all())
            else:
                assert bool(lse[b, rows].isnan().all())
                assert bool(out[b, 0, rows].isnan().all())


SLOW = pytest.mark.slow
PLACES = [
    (HARDWARE, (96, 96)),
    (HARDWARE, (256, 256)),
    (WARPGROUPS, (128, 128)),
    *(pytest.param(HARDWARE, d, marks=SLOW) for d in ((192, 128), (128, 128), (192, 192))),
    *(pytest.param(SHIFTS, d, marks=SLOW) for d in ((96, 96), (256, 256), (192, 128), (128, 128),
                                                    (192, 192))),
    pytest.param(WARPGROUPS, (192, 128), marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("target", "dims"), PLACES, ids=str)
def test_every_place_of_a_row_at_every_head_dim(target: str, dims: tuple[int, int]) -> None:
    """Rows are read in vectors of other sizes, permuted in other ways."""
    d, dv = dims
    k, v = finite(all_codes("e4m3", d)), all_codes("e4m3", dv)
    out, lse = only_last_key(one_hot(torch.bfloat16, d)[:, :, :d], k[:, :, :1], v[:, :, :1], target,
                             softmax_scale=1.0)  # fmt: skip
    assert_same_numbers(out[:, 0, 0], last_rows(v)[:, 0])
    assert_scores(lse[:, :, 0], last_rows(k)[:, 0])
