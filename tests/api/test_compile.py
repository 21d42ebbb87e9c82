"""Compilers and exporters see each function as one opaque node, from the first call on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_attn_fp8 as fa
from tests.api.calls import BASES, Arguments, codes, ints, same_bits
from tests.data import normal

COARSE = fa.Fp8Policy("e4m3", max_offset=1 / 3, rescale_threshold=20 / 3, row_sum="exact")
SCALES = {f"{n}_descale": torch.tensor([[0.5, 2.0], [3.0, 0.25]]) for n in "qkv"}
TOKENS = {f"{n}_descale": torch.rand(2, 40, 2) + 0.5 for n in "kv"}


def _out() -> Tensor:
    return torch.empty(2, 6, 4, 16, dtype=torch.bfloat16)


# Function, base call, and what is added to it. Buffers are made anew for each run.
CALLS: dict[str, tuple[str, str, Arguments]] = {
    "dense": ("flash_attn_func", "dense", {}),
    "all options": (
        "flash_attn_func",
        "dense",
        {
            "softmax_scale": 0.3,
            "causal": True,
            "window_size": (9, 0),
            "softcap": 5.0,
            "learnable_sink": torch.ones(4),
            "num_splits": 2,
            "pack_gqa": False,
            "deterministic": True,
            "return_lse": True,
        },
    ),
    "descales": ("flash_attn_func", "dense", SCALES),
    "token descales": ("flash_attn_func", "dense", TOKENS),
    "policy object": ("flash_attn_func", "dense", {"fp8_policy": COARSE}),
    "policy name": ("flash_attn_func", "dense", {"fp8_policy": "reference_fix"}),
    "fp8 out": ("flash_attn_func", "dense", {"output_scale": 0.3}),
    "fp8 out by tensor": (
        "flash_attn_func",
        "dense",
        {"output_scale": torch.tensor([0.3]), "out_dtype": torch.float8_e5m2},
    ),
    "out": ("flash_attn_func", "dense", {"out": _out}),
    "out, lse": (
        "flash_attn_func",
        "dense",
        {"out": _out, "lse": lambda: torch.empty(2, 4, 6)},
    ),
    "out, return_lse": ("flash_attn_func", "dense", {"out": _out, "return_lse": True}),
    "lse": ("flash_attn_func", "dense", {"lse": lambda: torch.empty(2, 4, 6)}),
    "reference": ("flash_attn_func", "dense", {"impl": "reference"}),
    "varlen": ("flash_attn_varlen_func", "packed", {"return_lse": True}),
    "varlen bounds": (
        "flash_attn_varlen_func",
        "packed",
        {"max_seqlen_q": 8, "max_seqlen_k": 50, "min_seqlen_k": 30, "seqused_k": ints(30, 45)},
    ),
    "paged": ("flash_attn_varlen_func", "paged_pool", {"causal": True, "return_lse": True}),
    "private": ("_flash_attn_fwd", "packed", {"window_size_left": 5, "causal": True}),
    "cache": ("flash_attn_with_kvcache", "cache", {"return_softmax_lse": True}),
    "cache, one length": ("flash_attn_with_kvcache", "cache", {"cache_seqlens": 9}),
    "cache, other sequences": (
        "flash_attn_with_kvcache",
        "cache",
        {"cache_batch_idx": ints(1, 0)},
    ),
    "combine": ("flash_attn_combine", "partials", {}),
    "combine into out": (
        "flash_attn_combine",
        "partials",
        {"out": lambda: torch.empty(2, 5, 4, 16), "seqused": ints(5, 2)},
    ),
    "combine packed": (
        "flash_attn_combine",
        "packed_partials",
        {"out_dtype": torch.bfloat16, "return_lse": False},
    ),
    "quantize": ("quantize", "raw", {}),
    "quantize smooth int8": ("quantize", "raw", {"dtype": torch.int8, "smooth": True}),
    "quantize packed": ("quantize", "packed_raw", {"smooth": True}),
    "quantize tensor": ("quantize", "raw", {"per": "tensor", "dtype": torch.float8_e5m2}),
}
FORWARD = [name for name, (function, _, _) in CALLS.items() if function != "quantize"]


def _call(name: str) -> tuple[Callable[..., Any], Arguments]:
    function, base, more = CALLS[name]
    arguments = BASES[base]() | more
    return getattr(fa, function), {n: x() if callable(x) else x for n, x in arguments.items()}


def _compiled(fn: Callable[..., Any], backend: Any, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda **kw: fn(**kw), fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("name", CALLS)
def test_the_first_compiled_call_equals_eager(name: str) -> None:
    fn, arguments = _call(name)
    got = _compiled(fn, "aot_eager")(**arguments)
    assert same_bits(got, fn(**_call(name)[1]))


@pytest.mark.parametrize("name", [n for n in CALLS if "out" in CALLS[n][2] or "lse" in CALLS[n][2]])
def test_buffers_are_written_in_place(name: str) -> None:
    fn, arguments = _call(name)
    buffers = {n: arguments[n].fill_(9.0) for n in ("out", "lse") if n in arguments}
    got = _compiled(fn, "aot_eager")(**arguments)
    for buffer in buffers.values():
        assert any(t is not None and t.data_ptr() == buffer.data_ptr() for t in got)
        assert not bool((buffer == 9.0).any())


# Inductor imports torch.jit, parts of which are deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_with_inductor() -> None:
    """What inductor generates before and after the node meets its layouts."""

    def layer(x: Tensor) -> Any:
        q, k, v = (fa.quantize(t, per="batch_head") for t in (2 * x).unbind(2))
        out, lse = fa.flash_attn_func(
            q.values, k.values, v.values, causal=True, return_lse=True, q_descale=q.descale,
            k_descale=k.descale, v_descale=v.descale,
        )  # fmt: skip
        return out * 2, lse

    x = torch.randn(2, 24, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    assert same_bits(torch.compile(layer, fullgraph=True)(x), layer(x))


FIRST = """
import torch, flash_attn_fp8 as fa
q = torch.ones(1, 4, 2, 16, dtype=torch.float8_e4m3fn)
for call in (
    lambda q: fa.flash_attn_func(q, q, q, causal=True, return_lse=True),
    lambda q: fa.flash_attn_combine(q.float()[None], q.float().sum(-1)[None]),
    lambda q: fa.quantize(q.float()),
):
    first = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert str(first) == str(call(q)), first
"""


def test_the_first_calls_of_a_process_may_be_compiled() -> None:
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


# ------------------------------------------------------------------------------- dynamic lengths


def _with_lengths(name: str, n: int) -> tuple[Callable[..., Any], Arguments]:
    x = normal(batch=1, seqlen_q=n, seqlen_k=n, nheads=1, nheads_kv=1, d=16)
    dense = {"q": x.q, "k": x.k, "v": x.v, **x.scales, "causal": True, "return_lse": True}
    if name == "dense":
        return fa.flash_attn_func, dense
    if name == "token descales":
        scales = {f"{i}_descale": torch.rand(1, n, 1) + 0.5 for i in "qkv"}
        return fa.flash_attn_func, dense | scales
    if name == "out":
        out = torch.empty(1, n, 1, 16, dtype=torch.bfloat16)
        return fa.flash_attn_func, dense | {"out": out, "lse": torch.empty(1, 1, n)}
    if name == "varlen":
        packed = {i: t.flatten(0, 1) for i, t in zip("qkv", (x.q, x.k, x.v), strict=True)}
        bounds = {"cu_seqlens_q": ints(0, 100, n), "cu_seqlens_k": ints(0, 90, n)}
        return fa.flash_attn_varlen_func, packed | bounds
    if name == "max_seqlen":
        fn, packed = _with_lengths("varlen", n)
        return fn, packed | {"max_seqlen_q": n, "max_seqlen_k": n}
    if name == "paged":
        pages = -(-n // 16)
        pool = codes(pages, 16, 1, 16)
        table = torch.randperm(pages).to(torch.int32)[None]
        paged = {"q": x.q, "k": pool, "v": pool, "page_table": table, "seqused_k": ints(n)}
        return fa.flash_attn_varlen_func, paged
    if name == "cache":
        cache = {"q": x.q[:, :1], "k_cache": x.k, "v_cache": x.v, "cache_seqlens": ints(n - 3)}
        return fa.flash_attn_with_kvcache, cache
    if name == "combine":
        parts = torch.randn(2, 1, n, 2, 16), torch.randn(2, 1, n, 2)
        return fa.flash_attn_combine, {"out_partial": parts[0], "lse_partial": parts[1]}
    return fa.quantize, {"x": torch.randn(1, n, 2, 16)}


LENGTHS = (
    "dense", "token descales", "out", "varlen", "max_seqlen", "paged", "cache", "combine",
    "quantize",
)  # fmt: skip


def _compiles(name: str, dynamic: bool | None) -> list[int]:
    """How many compilations there were after each of three lengths."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = None, []
    for n in (128, 129, 1000):
        fn, arguments = _with_lengths(name, n)
        compiled = compiled or _compiled(fn, counter, dynamic=dynamic)
        assert same_bits(compiled(**arguments), fn(**arguments))
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("name", LENGTHS)
def test_new_lengths_compile_once_more_at_most(name: str) -> None:
    assert _compiles(name, None)[-1] <= 2


@pytest.mark.parametrize("name", ["dense", "paged"])
def test_lengths_declared_dynamic_never_recompile(name: str) -> None:
    first, *rest = _compiles(name, True)
    assert rest == [first, first]


@pytest.mark.parametrize(
    ("option", "numbers"),
    [
        ("window_size", [(3, None), (4, None), (7, None)]),
        ("softmax_scale", [0.1, 0.2, 0.3]),
        ("softcap", [1.0, 2.0, 3.0]),
        ("num_splits", [2, 3, 4]),
        ("seqlen_k_per_split", [128, 256, 384]),
        ("output_scale", [0.5, 0.25, 2.0]),
    ],
)
def test_numbers_may_change_between_calls(option: str, numbers: list[Any]) -> None:
    """Dynamo makes a number that changed symbolic: the checks must take it as one."""
    fn, arguments = _call("dense")
    compiled = _compiled(fn, "aot_eager")
    for number in numbers:
        given = arguments | {option: number}
        assert same_bits(compiled(**given), fn(**given))


# ---------------------------------------------------------------------- other ways of being traced


@pytest.mark.parametrize("name", FORWARD)
def test_fake_and_meta_tensors_have_the_shapes_and_dtypes(name: str) -> None:
    fn, arguments = _call(name)
    real = fn(**arguments)
    real = real if isinstance(real, tuple) else (real,)
    with FakeTensorMode() as mode:
        fake = fn(**{n: mode.from_tensor(x) if isinstance(x, Tensor) else x
                     for n, x in _call(name)[1].items()})  # fmt: skip
    meta = fn(**{n: x.to("meta") if isinstance(x, Tensor) else x
                 for n, x in _call(name)[1].items()})  # fmt: skip
    for got in (fake, meta):
        got = got if isinstance(got, tuple) else (got,)
        assert [_kind(t) for t in got] == [_kind(t) for t in real]


def _kind(t: Tensor | None) -> object:
    return None if t is None else (t.shape, t.dtype, t.stride())


@pytest.mark.parametrize("name", ["all options", "descales", "policy object", "paged", "combine"])
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx(name: str, tracing: str) -> None:
    fn, arguments = _call(name)
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    rest = {n: x for n, x in arguments.items() if n not in tensors}

    def positional(*given: Tensor) -> Any:
        return fn(**dict(zip(tensors, given, strict=True)), **rest)

    graph = make_fx(positional, tracing_mode=tracing)(*tensors.values())
    ours = [n for n in graph.graph.nodes if "flash_attn_fp8" in str(n.target)]
    assert len(ours) == 1
    assert same_bits(tuple(graph(*tensors.values())), fn(**arguments))


class _Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, return_lse=True, k_descale=scale)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict: bool) -> None:
    def inputs(n: int) -> tuple[Tensor, ...]:
        return (codes(1, n, 4, 16), codes(1, n, 2, 16, seed=1), codes(1, n, 2, 16, seed=2),
                torch.full((2,), 0.5))  # fmt: skip

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {n: {1: length} for n in "qkv"} | {"scale": None}
    program = torch.export.export(_Layer(), inputs(20), dynamic_shapes=shapes, strict=strict)
    for n in (20, 129, 300):
        assert same_bits(tuple(program.module()(*inputs(n))), _Layer()(*inputs(n)))


# ----------------------------------------------------------------------------------------- opcheck


def _recorded(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The op and arguments that a call comes down to."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "flash_attn_fp8":
                assert not kwargs
                found.append((func, args))
            return func(*args, **(kwargs or {}))

    fn, arguments = _call(name)
    with Recorder():
        fn(**arguments)
    (op,) = found
    return op


# Torch's schema test compares an op's inputs before and after, which it cannot where they are fp8.
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
IN_16_BITS = ("dense", "all options", "out, lse", "varlen", "paged", "combine", "combine packed")


@pytest.mark.parametrize("name", FORWARD)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(*_recorded(name), test_utils=FP8_CHECKS)


@pytest.mark.parametrize("name", IN_16_BITS)
def test_opcheck_with_the_schema(name: str) -> None:
    op, args = _recorded(name)
    torch.library.opcheck(op, tuple(_in_16_bits(x) for x in args))


def _in_16_bits(x: object) -> object:
    return x.bfloat16() if isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn else x


@pytest.mark.parametrize("name", FORWARD)
def test_a_dispatch_mode_changes_no_bit(name: str) -> None:
    fn, arguments = _call(name)

    class Transparent(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Transparent():
        got = fn(**arguments)
    assert same_bits(got, fn(**_call(name)[1]))


def test_every_op_is_checked() -> None:
    ops = {str(_recorded(name)[0]).split(".")[1] for name in FORWARD}
    assert ops == {"forward", "forward_out", "combine"}
