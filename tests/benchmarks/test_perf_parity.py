"""The GPU benchmark: refused politely without one; what it would time gives right answers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import typer

from benchmarks import perf_parity
from benchmarks.peers import Attention
from benchmarks.perf_parity import OURS, PEERS, Contender, Shape
from flash_attn_fp8.policy import POLICIES
from flash_attn_fp8.results import check
from tests.budget import rel_l2

SMALL = Shape(batch=2, heads=4, kv_heads=2, head_dim=64, seqlen=128)


@cache
def found_on_the_cpu() -> tuple[list[Contender], list[str]]:
    heard: list[str] = []
    return list(perf_parity.contenders(SMALL, "cpu", heard.append, impl="tiled")), heard


def ticking(attention: Attention, count: int) -> list[float]:
    """A clock that calls nothing; each call takes a millisecond longer than the last."""
    return [float(i + 1) for i in range(count)]


def test_without_a_device_it_says_so_and_exits_with_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.Exit) as left:
        perf_parity.main()
    assert left.value.exit_code == perf_parity.NO_DEVICE != 0
    printed = capsys.readouterr()
    assert "CUDA device" in printed.err
    assert "benchmarks.static_sm100" in printed.err
    assert not printed.out


def test_every_policy_is_a_contender_and_every_peer_is_there_or_excused() -> None:
    found, heard = found_on_the_cpu()
    mine = {(c.format, c.policy, c.causal) for c in found if c.impl == OURS}
    wanted = {
        (fmt, policy, causal)
        for fmt in ("e4m3", "e5m2", "bf16")
        for policy in POLICIES[fmt]
        for causal in (False, True)
    }
    assert mine == wanted
    for peer in PEERS:
        there = sum(c.impl == peer for c in found)
        excused = sum(line.startswith(f"left out: {peer} ") for line in heard)
        assert there + excused == 6  # formats x masks


def test_a_fault_of_ours_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(perf_parity.fa, "flash_attn_func", broken)
    with pytest.raises(ValueError, match="broken"):
        next(perf_parity.contenders(SMALL, "cpu", lambda _: None))


def test_rows_hold_every_run_and_the_error_of_the_call() -> None:
    contender = next(c for c in found_on_the_cpu()[0] if c.format == "bf16" and c.causal)
    rows = perf_parity.rows([contender], SMALL, ticking, runs=20)
    check(rows)
    time, rate, error = rows
    assert len(time.runs) == len(rate.runs) == 20
    assert time.value == 1.5  # two calls in each of ten turns
    assert rate.runs[0] == SMALL.flops(causal=True) / 1e9
    assert error.value == contender.given.error(contender.attention(), causal=True) > 0


def test_the_error_sees_a_wrong_mask_and_a_lost_scale() -> None:
    for contender in found_on_the_cpu()[0]:
        if contender.impl != OURS or contender.policy != "default":
            continue
        given, out = contender.given, contender.attention()
        right = given.error(out, contender.causal)
        assert given.error(2 * out, contender.causal) > 10 * right
        if not contender.causal:
            shifted = out.roll(1, dims=1)
            assert rel_l2(shifted[:1, -64:, :1], out[:1, -64:, :1]) > 10 * right
            assert given.error(shifted, causal=False) > 10 * right


def test_a_slow_contender_gives_up_its_turns() -> None:
    contender = next(iter(found_on_the_cpu()[0]))

    def slow(attention: Attention, count: int) -> list[float]:
        return [perf_parity.SECONDS * 1e3 / 4] * count

    (times,) = perf_parity.in_turns([contender], 200, slow)
    assert len(times) == 4


def test_times_are_compared_with_ours_in_e4m3() -> None:
    found = [c for c in found_on_the_cpu()[0] if c.policy == "default" and not c.causal]
    policy = perf_parity.own_policy(found)
    assert policy == "default"  # of the emulation; SM90 has its own
    made = perf_parity.rows(found, SMALL, ticking, runs=10)
    lines = list(perf_parity.comparison(made, policy))
    assert len(lines) == len(found)
    assert all("median of 10" in line for line in lines)
    assert all(line.endswith("1.000 x e4m3's (default)") for line in lines)
