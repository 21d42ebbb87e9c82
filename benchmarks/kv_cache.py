"""Attention over quantised KV caches on a GPU: python -m benchmarks.kv_cache; two minutes.

Decode, speculative decode, chosen keys, pages and chunked prefill, ours in e4m3, int8 and bf16
beside FA3 in bf16 and e4m3 (`flash_attn_interface`) where it is installed. Each contender's call is
captured in a CUDA graph of LAUNCHES launches over buffers that together exceed the L2, so that
neither the host nor a warm cache is timed; graphs take turns, and the median of TURNS counts.
Bytes are those of codes and scales. `read` is what a sum over 4 GiB reaches in the same run.

On a machine without the compiler: `--bundle FOLDER` makes a bundle of the kernels (no GPU needed),
which FLASH_ATTN_FP8_BUNDLE then names there. Without a device it measures nothing and exits with
NO_DEVICE. Writes benchmarks/results/kv_cache_DEVICE.{json,md}.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT, append, bundles, peers
from flash_attn_fp8.results import Results, Row, Scalar, write
from flash_attn_fp8.specs import AppendSpec

NO_DEVICE = 3  # exit status
LAUNCHES, TURNS = 20, 9
DECODE_QUERIES = 8  # more are a chunk, bound by arithmetic: 3 launches over one set of tensors
ROTATED_BYTES = 300 * 2**20  # several times an H200's L2
_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
}
_SLICE = 1 << 26  # elements that are filled at once


@dataclass(frozen=True)
class Shape:
    """Of one call; `page` None: contiguous. `chosen`: keys that are read of `keys`."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    queries: int = 1
    head_dim: int = 128
    page: int | None = None
    chosen: int | None = None

    @property
    def case(self) -> dict[str, Scalar]:
        """As a row of results names it."""
        named = {"b": self.batch, "h": self.heads, "hkv": self.kv_heads, "keys": self.keys}
        named |= {"queries": self.queries}
        if self.page is not None:
            named["page"] = self.page
        if self.chosen is not None:
            named["chosen"] = self.chosen
        return dict(named)

    @property
    def flops(self) -> float:
        """Of both products, causal."""
        seen = self.keys - (self.queries - 1) / 2
        return 4.0 * self.batch * self.heads * self.queries * seen * self.head_dim


@dataclass(frozen=True)
class Contender:
    """Who attends: `ours` with a cache of `fmt` and scales of a granularity, or FA3."""

    name: str
    fmt: str
    per: str = "token_head"  # or "tensor"
    is_fa3: bool = False

    def bytes_read(self, shape: Shape) -> int:
        """Codes and scales, each once."""
        rows = shape.batch * shape.kv_heads * (shape.chosen or shape.keys)
        scales = 8 if self.per == "token_head" and self.fmt != "bf16" and not self.is_fa3 else 0
        return rows * (2 * shape.head_dim * _DTYPES[self.fmt].itemsize + scales)


OURS = (
    Contender("e4m3", "e4m3"),
    Contender("e4m3, one scale", "e4m3", per="tensor"),
    Contender("int8", "int8"),
    Contender("bf16", "bf16"),
)
FA3 = (Contender("FA3 e4m3", "e4m3", is_fa3=True), Contender("FA3 bf16", "bf16", is_fa3=True))
E4M3, BF16 = OURS[0], OURS[3]

DECODE = (
    Shape(16, 32, 8, 8192),
    Shape(16, 32, 8, 32768),
    Shape(64, 32, 8, 8192),
    Shape(1, 32, 8, 131072),
    Shape(128, 64, 8, 2048, page=64),
    *(Shape(16, 16, 2, keys) for keys in (77, 512, 2048, 8192)),
    Shape(64, 16, 2, 8192),
)
PAGES = tuple(Shape(64, 16, 2, 8192, page=page) for page in (1, 16, 64, 128))
SPECULATIVE = tuple(
    Shape(32, heads, 8, 8192, queries=n, page=64) for heads in (32, 64) for n in (1, 2, 4, 8)
)
CHOSEN = tuple(
    Shape(16, 96, 8, 32768, queries=n, page=64, chosen=cells)
    for cells in (600, 2051) for n in (1, 2, 3, 4)
)  # fmt: skip
EXTEND = tuple(Shape(1, 32, 8, prefix + 2048, queries=2048) for prefix in (32768, 65536, 98304))

PLAN: tuple[tuple[str, Sequence[Shape], Sequence[Contender]], ...] = (
    ("decode", DECODE, (*OURS, *FA3)),
    ("pages", PAGES, (E4M3, BF16)),
    ("speculative", SPECULATIVE, (E4M3, BF16, *FA3)),
    ("chosen", CHOSEN, (OURS[2],)),
    ("extend", EXTEND, (E4M3, BF16, FA3[1])),
)


# ------------------------------------------------------------------------------------ calls


def arguments(shape: Shape, who: Contender, device: str, seed: int = 0) -> dict[str, Any]:
    """Of `flash_attn_with_kvcache`: random codes, scales near 1 / 100, pages anywhere."""
    dims = shape.kv_heads, shape.head_dim
    lead: tuple[int, ...] = (shape.batch, shape.keys)
    more: dict[str, Any] = {}
    if shape.page is not None:
        pages = -(-shape.keys // shape.page)
        lead = (shape.batch * pages, shape.page)
        order = torch.arange(lead[0]) if device == "meta" else torch.randperm(lead[0])
        more["page_table"] = order.int().reshape(shape.batch, pages).to(device)
    k, v = (_codes((*lead, *dims), who.fmt, device, seed + n) for n in range(2))
    q = torch.empty(shape.batch, shape.queries, shape.heads, shape.head_dim, device=device)
    q = q.normal_().bfloat16() if device != "meta" else q.bfloat16()
    if who.fmt != "bf16":
        size = (1,) if who.per == "tensor" else (*lead, shape.kv_heads)
        more |= {n: _scales(size, device) for n in ("k_descale", "v_descale")}
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
    if shape.chosen is not None:
        size = shape.batch, shape.kv_heads, shape.keys
        order = (
            torch.empty(size, device=device) if device == "meta" else torch.rand(size).to(device)
        )
        more["selection"] = order.argsort(-1)[..., : shape.chosen].int().contiguous()
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "causal": True, **more}


def _codes(size: tuple[int, ...], fmt: str, device: str, seed: int) -> Tensor:
    codes = torch.empty(size, dtype=_DTYPES[fmt], device=device)
    if device == "meta":
        return codes
    generator, flat = torch.Generator(device).manual_seed(seed), codes.view(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        x = torch.randn(part.shape, device=device, generator=generator)
        if fmt != "bf16":  # NaN, which casts make of what is too large, would take other paths
            x = (x * 40).round().clamp(-127, 127) if fmt == "int8" else (x * 100).clamp(-448, 448)
        part.copy_(x)
    return codes


def _scales(size: tuple[int, ...], device: str) -> Tensor:
    scales = torch.empty(size, device=device)
    return scales if device == "meta" else scales.uniform_(0.005, 0.015)


def launcher(shape: Shape, who: Contender, given: dict[str, Any]) -> Callable[[], Tensor]:
    """The call that is timed."""
    if not who.is_fa3:
        return lambda: fa.flash_attn_with_kvcache(**given)
    interface = peers.flash_attn_3()
    own = {n: x for n, x in given.items() if not n.endswith("_descale")}
    if who.fmt != "bf16":
        own["q"] = own["q"].to(_DTYPES[who.fmt])
        one = torch.full((shape.batch, shape.kv_heads), 0.01, device=own["q"].device)
        own |= {f"{x}_descale": one for x in "qkv"}
    return lambda: interface.flash_attn_with_kvcache(**own)


class Clock:
    """A contender's graph: LAUNCHES calls over rotated buffers; `us` a call."""

    def __init__(self, shape: Shape, who: Contender) -> None:
        rounds = max(1, min(LAUNCHES, -(-ROTATED_BYTES // who.bytes_read(shape))))
        if shape.queries > DECODE_QUERIES:
            rounds = 1  # bound by arithmetic
        calls = [
            launcher(shape, who, arguments(shape, who, "cuda", seed)) for seed in range(rounds)
        ]
        launches = LAUNCHES if shape.queries <= DECODE_QUERIES else 3
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the tensors are being filled
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for i in range(launches):
                    calls[i % rounds]()
        self.launches = launches
        self.calls = calls
        self.us()  # warm

    def us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / self.launches * 1e3


# ----------------------------------------------------------------------------------- results


def measured(kind: str, shape: Shape, contenders: Sequence[Contender]) -> Iterator[Row]:
    """Rows of one shape: time, bandwidth or rate, and ratios of times."""
    clocks: dict[str, Clock] = {}
    case = {"what": kind, **shape.case}
    for who in contenders:
        try:
            clocks[who.name] = Clock(shape, who)
        except ImportError:
            continue  # said once by `main`
    runs: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(TURNS):
        for name, clock in clocks.items():
            runs[name].append(clock.us())
    for who in contenders:
        if who.name in runs:
            us = statistics.median(runs[who.name])
            yield Row.of(case, who.name, "time", "us", *runs[who.name])
            if shape.queries <= DECODE_QUERIES:
                yield Row.of(case, who.name, "read", "TB/s", who.bytes_read(shape) / us / 1e6)
            else:
                yield Row.of(case, who.name, "rate", "TFLOP/s", shape.flops / us / 1e6)


def read_bandwidth() -> Row:
    """Of a sum over 4 GiB."""
    x = torch.ones(1 << 30, device="cuda")
    times = []
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(4.0 * (1 << 30) / float(start.elapsed_time(end)) / 1e9)
    return Row.of({"what": "device"}, "torch", "read", "TB/s", *times)


ACCURACY = Shape(2, 16, 2, 4096, queries=4)


def accuracy() -> Iterator[Row]:
    """Error of the output that storage in a format costs, against bf16 storage, exact in fp64.

    Two canaries must fail what the format passes: V's scales 5 % too large, and the first token's
    scale for all.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = ACCURACY
    size = shape.batch, shape.keys, shape.kv_heads, shape.head_dim
    k, v = (torch.randn(size, device="cuda", generator=generator) for _ in range(2))
    v *= torch.rand(size[:3], device="cuda", generator=generator)[..., None] * 4 + 0.1
    q = torch.randn(
        shape.batch, shape.queries, shape.heads, shape.head_dim, device="cuda", generator=generator
    ).bfloat16()
    wanted = fa.flash_attn_func(
        q, k.bfloat16(), v.bfloat16(), causal=True, out_dtype=torch.float32, impl="reference"
    )[0]
    for fmt in ("e4m3", "e5m2", "int8"):
        kq, vq = (fa.quantize(x, dtype=_DTYPES[fmt], per="token_head") for x in (k, v))
        one = vq.descale[:, :1].expand_as(vq.descale).contiguous()
        for name, scales in (
            (fmt, vq.descale),
            (f"{fmt}, V's scales x 1.05", vq.descale * 1.05),
            (f"{fmt}, one token's scale for all", one),
        ):
            out = fa.flash_attn_func(
                q, kq.values, vq.values, causal=True, k_descale=kq.descale, v_descale=scales,
                out_dtype=torch.float32,
            )[0]  # fmt: skip
            error = float((out - wanted).norm() / wanted.norm())
            yield Row.of({"what": "accuracy", **shape.case}, name, "rel_l2", "ratio", error)


_APPENDED: tuple[Literal["token_head", "tensor"], ...] = ("token_head", "tensor")


def kernels(arch: str) -> dict[Any, None]:
    """Specs of all that is measured of ours, planned for an architecture, e.g. sm_90a:132.

    Those of `benchmarks.append` are among them.
    """
    found: dict[Any, None] = {}
    for _, shapes, contenders in PLAN:
        for shape in shapes:
            for who in contenders:
                if not who.is_fa3:
                    given = arguments(shape, who, "meta")
                    plan = fa.explain(fa.flash_attn_with_kvcache, target=arch, **given).plan
                    found.update(dict.fromkeys(() if plan is None else plan.kernels))
    for fmt in ("e4m3", "e5m2", "int8"):
        s = ACCURACY
        q = torch.empty(
            s.batch, s.queries, s.heads, s.head_dim, device="meta", dtype=torch.bfloat16
        )
        size = s.batch, s.keys, s.kv_heads, s.head_dim
        codes = torch.empty(size, dtype=_DTYPES[fmt], device="meta")
        scales = torch.empty(size[:3], device="meta")
        plan = fa.explain(
            fa.flash_attn_func, q, codes, codes, causal=True, k_descale=scales, v_descale=scales,
            out_dtype=torch.float32, target=arch,
        ).plan  # fmt: skip
        found.update(dict.fromkeys(() if plan is None else plan.kernels))
    for fmt, dim, per in product(("e4m3", "e5m2", "int8"), append.HEAD_DIMS, _APPENDED):
        found[AppendSpec("bf16", fmt, dim, dim, per, wide_slots=True)] = None
    return found


def main(
    bundle: bundles.Folder = None,
    arch: bundles.Arch = bundles.H200,
    only: Annotated[str, typer.Option(help="one part: decode, pages, ...")] = "",
    out: Annotated[Path, typer.Option(help="folder of the result file")] = RESULTS,
) -> None:
    """Measure, or make the bundle that measuring needs."""
    if bundle is not None:
        typer.echo(bundles.make(bundle, arch, kernels(arch)))
        return
    if not torch.cuda.is_available():
        typer.echo("no CUDA device: nothing was measured")
        sys.exit(NO_DEVICE)
    device = torch.cuda.get_device_name()
    try:
        peers.flash_attn_3()
    except ImportError as absent:
        typer.echo(f"left out: FA3 ({absent})")
    rows = [read_bandwidth()]
    for kind, shapes, contenders in PLAN:
        for shape in shapes if only in ("", kind) else ():
            rows += measured(kind, shape, contenders)
            torch.cuda.empty_cache()
            typer.echo(_line(rows, {"what": kind, **shape.case}))
    rows += accuracy() if only in ("", "accuracy") else ()
    name = f"kv_cache_{re.sub('[^a-z0-9]+', '_', device.lower()).removeprefix('nvidia_')}"
    write(Results.here(rows, "python -m benchmarks.kv_cache", ROOT), name, out)


def _line(rows: Sequence[Row], case: dict[str, Scalar]) -> str:
    mine = [row for row in rows if dict(row.case) == case]
    times = {row.impl: row.value for row in mine if row.metric == "time"}
    read = {row.impl: row.value for row in mine if row.metric in ("read", "rate")}
    shown = ", ".join(f"{n} {us:.1f} us ({read[n]:.3g})" for n, us in times.items())
    return f"{' '.join(f'{n}={x}' for n, x in case.items())}: {shown}"


if __name__ == "__main__":
    typer.run(main)
