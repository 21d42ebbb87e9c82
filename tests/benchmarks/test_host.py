"""The benchmark of the host's share measures whole calls, and nothing but the host's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import host
from flash_attn_fp8 import ops

CALLS = host.calls("cpu")


@pytest.mark.parametrize("name", CALLS)
def test_a_measured_call_is_a_real_one(name: str) -> None:
    """With its executor it gives finite results."""
    result = CALLS[name]()
    out = result[0] if isinstance(result, tuple) else result
    assert bool(out.float().isfinite().all())
    assert bool(out.any())


@pytest.mark.parametrize("read_values", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_measured_call_goes_as_far_as_the_executor(
    name: str, read_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the executor once, with results allocated, and reads values where it says so."""
    reached: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *_: reached.append(what)

    monkeypatch.setattr(host, "_nothing", note("executed"))
    monkeypatch.setattr(ops, "check_values", note("read"))
    with host.idle_executor(read_values):
        result: Any = CALLS[name]()
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    # Where values are not to be read, the reader is the same idle function as the executor.
    assert reached == (["read", "executed"] if read_values else ["executed", "executed"])


def test_rows_have_every_run_in_microseconds() -> None:
    found = host.rows("cpu", runs=3, count=2)
    assert [row.case["call"] for row in found[::2]] == list(CALLS)
    assert all(len(row.runs) == 3 and row.unit == "us" and min(row.runs) > 0 for row in found)
    assert ops.execute.__module__ == "flash_attn_fp8.run"  # put back
