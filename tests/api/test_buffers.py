"""Buffers that a call writes may share memory with nothing that it reads.

Whether two strided tensors overlap is decided by their elements, not by the spans of their bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.overlap import overlaps_itself, share_memory
from tests.api.calls import Arguments, codes, dense, ints, packed, paged_pool, same_bits

# ------------------------------------------------------------------------- against index sets


def _shapes_and_strides(rank: int, extent: int, stride: int) -> Any:
    axis = st.tuples(st.integers(0, extent), st.integers(0, stride))
    return st.lists(axis, max_size=rank).map(
        lambda axes: tuple(zip(*axes, strict=True)) or ((), ())
    )


LAYOUTS = _shapes_and_strides(4, 4, 20)


def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    index = torch.zeros((), dtype=torch.int64)
    for n, step in zip(shape, strides, strict=True):
        index = index[..., None] + torch.arange(n) * step
    return index.flatten().tolist()


@given(LAYOUTS)
@settings(max_examples=500, deadline=None)
def test_an_overlap_in_itself_is_what_the_indices_say(layout: Any) -> None:
    places = _places(*layout)
    assert overlaps_itself(*layout) == (len(set(places)) < len(places))


@given(LAYOUTS, LAYOUTS, st.integers(0, 120), st.integers(0, 30), st.booleans())
@settings(max_examples=500, deadline=None)
def test_shared_memory_is_what_the_bytes_say(
    one: Any, other: Any, at: int, other_at: int, mixed: bool
) -> None:
    buffer = torch.zeros(2048, dtype=torch.uint8)
    a = buffer.as_strided(*one, at)
    b = buffer.view(torch.int32 if mixed else torch.uint8).as_strided(*other, other_at)
    size = b.element_size()
    wide = {size * (other_at + p) + byte for p in _places(*other) for byte in range(size)}
    expected = bool({at + p for p in _places(*one)} & wide)
    assert share_memory(a, b) == share_memory(b, a) == expected


def test_what_is_not_decided_in_bounded_time_counts_as_shared() -> None:
    """Eight strides near 10000 reach only near its multiples, which no range or divisor tells."""
    shape, strides = (5,) * 8, (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
    places = set(_places(shape, strides))
    memory = torch.zeros(max(places) + 1, dtype=torch.uint8)
    comb = memory.as_strided(shape, strides)
    assert 165_000 not in places
    assert share_memory(comb, memory[165_000:165_001])
    assert not share_memory(comb, memory[5_000:5_001])


# ------------------------------------------------------------------------------------- in calls


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_is_an_input_is_refused(name: str) -> None:
    x = {n: codes(2, 6, 4, 16).bfloat16() for n in "qkv"}
    before = x[name].clone()
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_func(**x, out=x[name])
    assert refusal.value.reasons == (f"out shares memory with {name}; give it memory of its own",)
    assert torch.equal(x[name], before)


def test_an_out_beside_its_inputs_in_one_buffer_is_fine() -> None:
    qkvo = torch.randn(4, 2, 6, 4, 16).bfloat16()
    got, _ = fa.flash_attn_func(*qkvo[:3], out=qkvo[3])
    assert same_bits(got, fa.flash_attn_func(*qkvo[:3].clone())[0])


def test_an_out_between_its_inputs_heads_is_fine() -> None:
    """A fused projection has q, k and v as heads of one buffer; out may be the heads after them."""
    fused = torch.randn(2, 6, 4, 16).bfloat16()
    wanted, _ = fa.flash_attn_func(*fused.clone()[:, :, :3].split(1, 2))
    q, k, v, out = fused.split(1, 2)
    before = fused[:, :, :3].clone()
    got, _ = fa.flash_attn_func(q, k, v, out=out)
    assert got is out
    assert same_bits(got, wanted)
    assert same_bits(fused[:, :, :3], before)
    with pytest.raises(fa.InvalidArguments, match="out shares memory with v;"):
        fa.flash_attn_func(q, k, v, out=fused[:, :, 2:3])


def _everything() -> tuple[Any, Arguments]:
    """A call with an operand of every kind but cu_seqlens_k."""
    tokens = {f"{n}_descale": torch.ones(13, 8, 2) for n in "kv"}
    more = {"q_descale": torch.ones(2, 4), "learnable_sink": torch.ones(4)}
    call = paged_pool() | tokens | more | {"seqused_q": ints(6, 6)}
    return fa.flash_attn_varlen_func, call | {
        "output_scale": torch.ones(1), "out_dtype": torch.float8_e4m3fn
    }  # fmt: skip


def _operands() -> list[str]:
    return [n for n, t in _everything()[1].items() if isinstance(t, Tensor)]


@pytest.mark.parametrize("buffer", ["out", "lse"])
@pytest.mark.parametrize("name", _operands())
def test_a_buffer_over_any_other_tensor_is_refused(buffer: str, name: str) -> None:
    """The memory of the operand, in the middle of the buffer's."""
    fn, arguments = _everything()
    t = arguments[name]
    shape, dtype = (
        ((2, 6, 4, 16), torch.float8_e4m3fn) if buffer == "out" else ((2, 4, 6), torch.float32)
    )
    memory = torch.zeros(8192, dtype=torch.uint8)
    memory[128 : 128 + t.nbytes] = t.flatten().view(torch.uint8)
    inside = memory[128 : 128 + t.nbytes].view(t.dtype).view(t.shape)
    count = torch.Size(shape).numel()
    over = memory[64:].view(dtype)[:count].view(shape)
    with pytest.raises(fa.InvalidArguments) as refusal:
        fn(**arguments | {name: inside, buffer: over})
    assert refusal.value.reasons == (
        f"{buffer} shares memory with {name}; give it memory of its own",
    )


def test_lengths_of_packed_keys_are_not_written_over() -> None:
    memory = torch.zeros(48, dtype=torch.int32)
    memory[:3] = ints(0, 30, 80)
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_varlen_func(
            **packed() | {"cu_seqlens_k": memory[:3]}, lse=memory.view(torch.float32).view(4, 12)
        )
    assert refusal.value.reasons == (
        "lse shares memory with cu_seqlens_k; give it memory of its own",
    )


def test_out_and_lse_share_nothing() -> None:
    memory = torch.zeros(768, dtype=torch.float32)
    out, lse = memory.view(2, 6, 4, 16), memory[:48].view(2, 4, 6)
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_func(**dense(), out=out, lse=lse)
    assert refusal.value.reasons == ("out shares memory with lse; give it memory of its own",)
