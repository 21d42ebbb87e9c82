"""The package on a CUDA device: same results as on the CPU, no synchronisation, graphs, streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import ops
from flash_attn_fp8.target import target_of
from tests.budget import assert_within_budget, rel_l2
from tests.data import normal, paged

pytestmark = pytest.mark.gpu

# How many of a result's elements may differ between devices: exp2 and the order of fp32 sums
# differ by an ulp there, which flips a rounding of P now and then.
DEVICE_REL_L2 = 2e-3


@contextmanager
def synchronisation_raises() -> Iterator[None]:
    """Anything that makes the host wait for the device raises a RuntimeError."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _to(device: str, *tensors: Tensor) -> list[Tensor]:
    return [t.to(device) for t in tensors]


Thunk = Callable[[], tuple[Tensor, Tensor]]


def _dense(device: str, fmt: str, impl: str) -> Thunk:
    x = normal(seqlen_q=100, seqlen_k=333, fmt=fmt, device=device)
    kwargs = dict(causal=True, return_lse=True, impl=impl, **x.scales)
    return partial(fa.flash_attn_func, x.q, x.k, x.v, **kwargs)


def _varlen(device: str, fmt: str, impl: str) -> Thunk:
    x = normal(batch=1, seqlen_q=70, seqlen_k=200, fmt=fmt, per=None, device=device)
    cu_q, cu_k = (
        torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 1, 1, 70], [0, 90, 95, 200])
    )
    kwargs = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, impl=impl)
    return partial(fa.flash_attn_varlen_func, x.q[0], x.k[0], x.v[0], **kwargs)


def _paged(device: str, fmt: str, impl: str) -> Thunk:
    x = normal(seqlen_q=3, seqlen_k=100, fmt=fmt, per=None, device="cpu")
    k, table = paged(x.k, 16)
    v, _ = paged(x.v, 16)
    q, k, v, table, used = _to(device, x.q, k, v, table, torch.tensor([100, 7], dtype=torch.int32))
    kwargs = dict(page_table=table, seqused_k=used, causal=True, return_lse=True, impl=impl)
    return partial(fa.flash_attn_varlen_func, q, k, v, **kwargs)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "bf16", "fp16"])
@pytest.mark.parametrize("call", [_dense, _varlen, _paged])
def test_same_as_cpu(
    call: Callable[..., Thunk], fmt: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device gives what the CPU gives, up to an ulp of exp2 that flips a rounding.

    The CPU plans for the device here: on its own it would not emulate SM90's accumulator.
    """
    out, lse = call("cuda", fmt, impl)()
    monkeypatch.setattr(ops, "target_of", lambda device: target_of(out.device))
    monkeypatch.setattr(ops, "_memo", {})
    want, want_lse = call("cpu", fmt, impl)()
    assert rel_l2(out.cpu(), want) <= DEVICE_REL_L2
    assert torch.equal(lse.cpu().isneginf(), want_lse.isneginf())
    seen = ~want_lse.isneginf()
    assert rel_l2(lse.cpu()[seen], want_lse[seen]) <= DEVICE_REL_L2


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_within_budget(fmt: str) -> None:
    """The budget holds on the device too."""
    x = normal(seqlen_q=300, seqlen_k=1000, fmt=fmt, device="cuda")
    call = dict(causal=True, return_lse=True, impl="tiled", **x.scales)
    out, lse = fa.flash_attn_func(x.q, x.k, x.v, **call)
    described = fa.flash_attn_func.describe_call(x.q, x.k, x.v, **call)
    assert_within_budget(described, out, lse)


@pytest.mark.parametrize("call", [_dense, _varlen, _paged])
def test_no_synchronisation(call: Callable[..., Thunk], impl: str) -> None:
    """Nothing is read back from the device: lengths, tables and scales stay there."""
    run = call("cuda", "e4m3", impl)
    with synchronisation_raises():
        out, _ = run()
    assert torch.isfinite(out.float()).all()


def test_graph_replays_follow_their_inputs(impl: str) -> None:
    """A captured decode, replayed on new queries, cache bytes, scales, lengths and page table."""
    kinds = dict(seqlen_q=1, seqlen_k=64, fmt="bf16", kv_fmt="e4m3", per="token_head")

    def inputs(seed: int) -> dict[str, Tensor]:
        x = normal(seed=seed, **kinds)
        k, table = paged(x.k, 16, seed)
        v, _ = paged(x.v, 16, seed)
        ks, _ = paged(x.scales["k_descale"], 16, seed)
        vs, _ = paged(x.scales["v_descale"], 16, seed)
        used = torch.tensor([64 - seed, 5 + seed], dtype=torch.int32)
        made = dict(q=x.q, k=k, v=v, page_table=table, seqused_k=used, k_descale=ks, v_descale=vs)
        return {name: t.cuda() for name, t in made.items()}

    def run(x: dict[str, Tensor]) -> Tensor:
        return fa.flash_attn_varlen_func(**x, impl=impl)[0]

    static = inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for seed in range(1, 6):
        fresh = inputs(seed)
        for name, t in static.items():
            raw = t.view(torch.uint8) if t.element_size() == 1 else t
            raw.copy_(fresh[name].view(raw.dtype) if t.element_size() == 1 else fresh[name])
        graph.replay()
        assert torch.equal(captured, run(fresh))


def test_fallback_is_said_once() -> None:
    """No kernel on this device: one warning that names the executor and the reason."""
    x = normal(device="cuda", seqlen_q=8)
    explanation = fa.explain(fa.flash_attn_func, x.q, x.k, x.v, **x.scales)
    if explanation.plan.impl == "cute":
        pytest.skip("a kernel runs here")
    from flash_attn_fp8.run import _warn_of_fallback

    _warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match="no compiled kernel for"):
        fa.flash_attn_func(x.q, x.k, x.v, **x.scales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa.flash_attn_func(x.q, x.k, x.v, **x.scales)


def test_devices_may_not_mix() -> None:
    """Every tensor that is elsewhere is named."""
    x = normal(device="cuda", seqlen_q=8)
    with pytest.raises(ValueError, match="k on cpu"):
        fa.flash_attn_func(x.q, x.k.cpu(), x.v)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("per", ["tensor", "head", "batch_head", "token_head"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_quantize_has_the_same_bits(
    dtype: torch.dtype, per: str, smooth: bool, packed: bool
) -> None:
    """Codes, scales and means are equal, bit for bit, on CPU and device."""
    x = torch.randn(2, 77, 3, 64) * torch.logspace(-30, 3, 77)[:, None, None]
    how = dict(dtype=dtype, per=per, smooth=smooth)
    on_device = dict(how)
    if packed:
        x = x.flatten(0, 1)
        if smooth or per == "batch_head":
            bounds = torch.tensor([0, 70, 70, 150], dtype=torch.int32)
            how["cu_seqlens"], on_device["cu_seqlens"] = bounds, bounds.cuda()
    here, there = fa.quantize(x, **how), fa.quantize(x.cuda(), **on_device)
    assert torch.equal(here.descale, there.descale.cpu())
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))
    if smooth:
        assert torch.equal(here.mean, there.mean.cpu())
    assert torch.equal(here.dequantize(), there.dequantize().cpu())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_cast_is_the_hardwares(dtype: torch.dtype) -> None:
    """torch's device cast of clamped values agrees with the CPU's over every fp16 value."""
    from flash_attn_fp8.formats import format_of, saturating_cast

    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    fmt = format_of(dtype)
    here, there = saturating_cast(x, fmt), saturating_cast(x.cuda(), fmt).cpu()
    nan = x.isnan()
    assert torch.equal(here.view(torch.uint8)[~nan], there.view(torch.uint8)[~nan])
    assert there.float()[nan].isnan().all()


def test_compiled_on_device() -> None:
    """torch.compile(fullgraph=True) equals eager on the device, bitwise."""
    x = normal(device="cuda", seqlen_q=33)
    function = torch.compile(fa.flash_attn_func, fullgraph=True)
    out, lse = function(x.q, x.k, x.v, return_lse=True, impl="tiled", **x.scales)
    want, want_lse = fa.flash_attn_func(x.q, x.k, x.v, return_lse=True, impl="tiled", **x.scales)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


FAULTS = {
    "k_descale": torch.full((2, 2), torch.nan),
    "seqused_k": torch.tensor([64, 65], dtype=torch.int32),
    "page_table": torch.full((2, 4), 99, dtype=torch.int32),
}


def _decode(impl: str, **changes: Tensor) -> Thunk:
    """A paged decode on the device with one of its index or scale tensors replaced."""
    x = normal(seqlen_q=1, seqlen_k=64, fmt="e4m3", device="cpu")
    k, table = paged(x.k, 16)
    v, _ = paged(x.v, 16)
    used = torch.tensor([64, 7], dtype=torch.int32)
    call = dict(q=x.q, k=k, v=v, page_table=table, seqused_k=used, **x.scales) | changes
    on_device = {name: t.cuda() for name, t in call.items()}
    return partial(fa.flash_attn_varlen_func, **on_device, return_lse=True, impl=impl)


@pytest.mark.parametrize("name", FAULTS)
def test_debug_mode_reads_values(name: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASH_ATTN_FP8_DEBUG=1 refuses what the CPU refuses; a good call is unchanged."""
    monkeypatch.setenv("FLASH_ATTN_FP8_DEBUG", "1")
    with pytest.raises(fa.InvalidArguments, match=name):
        _decode(impl, **{name: FAULTS[name]})()
    debugged = _decode(impl)()
    monkeypatch.setenv("FLASH_ATTN_FP8_DEBUG", "0")
    for a, b in zip(debugged, _decode(impl)(), strict=True):
        assert torch.equal(a, b)


def test_without_debug_mode_no_value_is_read(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mode costs is not paid without it: a bad scale goes through, unsynchronised."""
    monkeypatch.delenv("FLASH_ATTN_FP8_DEBUG", raising=False)
    run = _decode(impl, k_descale=FAULTS["k_descale"])
    with synchronisation_raises():
        out, _ = run()
    assert bool(out.float().isnan().any())
