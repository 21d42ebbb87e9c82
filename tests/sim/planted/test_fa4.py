"""Bugs planted in flash-attn-4's e4m3 forward, which is captured here; needs flash-attn-4.

All are slow: a run takes about a second. `sweep.py` leaves out everything in turn.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import pytest

from flash_attn_fp8.sim.errors import (
    BarrierMisuse,
    Deadlock,
    Finding,
    OutOfBounds,
    Race,
    TensorMemoryMisuse,
    Uninitialised,
)
from flash_attn_fp8.sim.launch import Buffer
from flash_attn_fp8.sim.machine import Machine
from tests.sim.planted.mutants import removals

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None
        or importlib.util.find_spec("flash_attn") is None,
        reason="needs CuTe DSL and flash-attn-4",
    ),
]


@pytest.fixture(scope="session")
def launch():
    from tests.sim.planted.fa4 import captured

    return captured()


def _finding(launch, text: str) -> Finding:
    with pytest.raises(Finding) as e:
        launch.run(text, Machine(instruction_limit=2_000_000))
    return e.value


def test_the_kernel_itself_is_clean(launch):
    launch.run(launch.launch.ptx, Machine())
    assert launch.wrong() == 0


# Of these every single one must be noticed, under round robin, and as what.
@pytest.mark.parametrize(
    ("kind", "names", "says"),
    [
        ("proxy fence", (Race,), "read by .* written by"),
        ("tcgen05.wait::st", (Race,), "tensor core operations of .* written by a tcgen05.st of"),
        ("bulk wait_group", (Race,), "read by bulk copies of warp"),
        ("bulk commit_group", (Race,), "read by bulk copies of warp"),
        ("commit", (Deadlock,), "lacks 1 of 1 arrivals"),
        ("mbarrier_init fence", (Race,), "initialisation by mbarrier.init of warp"),
        ("dealloc", (TensorMemoryMisuse,), "exits with 512 columns"),
        ("mbarrier arrive", (Deadlock,), "arrivals"),
    ],
)
def test_left_out(launch, kind, names, says):
    for mutant in removals(launch.launch.ptx, (kind,)):
        error = _finding(launch, mutant.text)
        assert isinstance(error, names), (mutant.line, error)
        assert re.search(says, str(error), re.DOTALL), (mutant.line, error)
        assert "PTX line" in str(error) or "exits with" in str(error)


def _replaced(text: str, pattern: str, new: str, nth: int = 0) -> str:
    """The text with the nth line that matches replaced; `new` may name groups."""
    lines = text.split("\n")
    at = [i for i, line in enumerate(lines) if re.search(pattern, line)][nth]
    lines[at] = re.sub(pattern, new, lines[at])
    return "\n".join(lines)


_EXPECT = r"(mbarrier\.arrive\.expect_tx\S+ [^,]*, \[[^\]]*\]), (%\w+);"
_INIT = r"(mbarrier\.init\S+\s+\[[^\]]*\]), (%\w+);"


@pytest.mark.parametrize("change", [2, -2])
@pytest.mark.parametrize("nth", range(4))
def test_expected_bytes_off_by_one_element(launch, nth, change):
    new = rf"{{ .reg .b32 off; add.s32 off, \2, {change}; \1, off; }}"
    text = _replaced(launch.launch.ptx, _EXPECT, new, nth)
    error = _finding(launch, text)
    assert isinstance(error, Deadlock)
    assert f"{change} bytes" in str(error)
    assert "mbarrier.try_wait" in str(error)


@pytest.mark.parametrize("nth", [0, 2, 4, 12, 20])
def test_one_arrival_too_many_is_expected(launch, nth):
    new = r"{ .reg .b32 off; add.s32 off, \2, 1; \1, off; }"
    error = _finding(launch, _replaced(launch.launch.ptx, _INIT, new, nth))
    assert isinstance(error, Deadlock)
    assert re.search(r"lacks \d+ of \d+ arrivals", str(error))


def test_a_named_barrier_of_another_number_of_threads(launch):
    text = _replaced(launch.launch.ptx, r"barrier\.sync(\s+)2, 416;", r"barrier.sync\g<1>2, 448;")
    error = _finding(launch, text)
    assert isinstance(error, (BarrierMisuse, Deadlock))
    assert "barrier 2" in str(error)


def test_half_of_the_tensor_memory(launch):
    at = re.search(r"tcgen05\.alloc\S+\s+\[[^\]]*\], (%\w+);", launch.launch.ptx)
    new = f"{{ .reg .b32 half; shr.u32 half, {at[1]}, 1; {at[0].replace(at[1], 'half')} }}"
    error = _finding(launch, launch.launch.ptx.replace(at[0], new))
    assert isinstance(error, OutOfBounds)
    assert re.search(r"tensor memory column \d+ is written, and is not allocated", str(error))


@pytest.mark.parametrize(
    ("name", "says"),
    [("mO", "cp.async.bulk.tensor"), ("mLSE", "st.global"), ("mK", "cp.async.bulk.tensor")],
)
def test_a_buffer_that_ends_early(launch, name, says):
    def shorter(b: Buffer) -> Buffer:
        return replace(b, nbytes=b.nbytes - 4) if b.name.startswith(name) else b

    full = launch.launch
    launch.launch = replace(full, buffers=tuple(shorter(b) for b in full.buffers))
    try:
        error = _finding(launch, full.ptx)
    finally:
        launch.launch = full
    assert isinstance(error, OutOfBounds)
    assert f"the nearest is {name}" in str(error)
    assert says in str(error)


# ------------------------------------------------------------------------------------- waits


def test_waits_left_out(launch):
    """All but 13 of 42, which other waits of this kernel imply; none of those gives wrong numbers.

    Nine are the load warp's tail and two the last waits of softmax and of the epilogue: they keep
    the CTA from exiting, where all that they would tell is known from the last commits. Of a tile's
    loads, the second Q and the first V come after the wait for the first Q, whose commit is the
    tensor core's last use of all three.
    """
    missed, found = [], set()
    for mutant in removals(launch.launch.ptx, ("mbarrier wait",)):
        try:
            launch.run(mutant.text, Machine(instruction_limit=2_000_000))
        except Finding as e:
            found.add(type(e))
        else:
            missed.append(mutant)
            assert launch.wrong() == 0
    assert len(missed) == 13
    assert found <= {Race, Uninitialised, Deadlock, BarrierMisuse}
