"""Formats, policies and peers on a GPU: python -m benchmarks.perf_parity; minutes.

The microbenchmark of the reference fix (Dao-AILab/flash-attention PR #2717): b2, 32 query heads
over 2 KV heads, d128, 4096 queries and keys, median of RUNS event-timed calls; full and causal.
Ours in e4m3, e5m2 and bf16, under every named policy; beside it what is installed of flash-attn-4
(`flash_attn.cute`), FA3 (`flash_attn_interface`) and cuDNN (`cudnn`). Calls take turns, so that
what the clock does for a second meets all alike. One query head's last rows are compared with the
exact attention of the same codes: a fast wrong call must show.

Any CUDA device will do; a contender that the device or the environment lacks is left out, and
said so. Without a device it measures nothing and exits with NO_DEVICE. On a machine without the
compiler: `--bundle FOLDER` makes a bundle of the kernels (no GPU needed), and
FLASH_ATTN_FP8_BUNDLE=FOLDER uses it.

Writes benchmarks/results/perf_parity_DEVICE.{json,md}.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT, bundles, peers
from benchmarks.peers import Attention
from flash_attn_fp8.accuracy.measure import exact, rel_l2
from flash_attn_fp8.plan import policy_of
from flash_attn_fp8.policy import POLICIES
from flash_attn_fp8.results import Results, Row, write
from flash_attn_fp8.specs import Spec

NO_DEVICE = 3  # exit status
RUNS, WARM_UP, TURNS = 200, 10, 10
SECONDS = 60.0  # after which a contender has no further turn: the emulation, where no kernel runs
CHECKED_ROWS = 64
OURS = "flash_attn_fp8"
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Of the problem."""

    batch: int = 2
    heads: int = 32
    kv_heads: int = 2
    head_dim: int = 128
    seqlen: int = 4096

    def flops(self, causal: bool) -> float:
        """Of both products; causal counts as half."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if causal else full


@dataclass(frozen=True)
class Inputs:
    """q, k, v in a format, and the descales that go with them; none in 16 bits."""

    tensors: tuple[Tensor, Tensor, Tensor]
    descales: tuple[Tensor, ...]

    def named(self) -> dict[str, Any]:
        """The descales as keywords of a flash-attention."""
        return {f"{x}_descale": s for x, s in zip("qkv", self.descales, strict=False)}

    def error(self, out: Tensor, causal: bool) -> float:
        """Of the last rows of the first head, against the exact attention of the same codes."""
        q, k, v = (x[:1, :, :1] for x in self.tensors)
        scales = {n: s if s.ndim == 0 else s[:1, :1] for n, s in self.named().items()}
        rows = min(CHECKED_ROWS, q.shape[1])
        wanted = exact(q[:, -rows:], k, v, causal=causal, **scales)
        return rel_l2(out[:1, -rows:, :1].float(), wanted)


def inputs(shape: Shape, fmt: str, per: Any, device: str) -> Inputs:
    """N(0, 1), quantised by the absolute maximum of each `per`."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int) -> Tensor:
        size = (shape.batch, shape.seqlen, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device)

    q, k, v = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
    if fmt == "bf16":
        return Inputs((q.bfloat16(), k.bfloat16(), v.bfloat16()), ())
    quantize = partial(fa.quantize, dtype=_DTYPES[fmt], per=per)
    q8 = quantize(q, nheads_kv=shape.kv_heads) if per == "batch_head" else quantize(q)
    k8, v8 = quantize(k), quantize(v)
    return Inputs((q8.values, k8.values, v8.values), (q8.descale, k8.descale, v8.descale))


# ------------------------------------------------------------------------------ the kernels


def specs_of(
    shape: Shape, dtype: torch.dtype, causal: bool, policy: fa.Fp8Policy | None, arch: str
) -> Sequence[Spec]:
    """Kernels that our call of a shape launches on an architecture (`sm_90a:132`)."""

    def tensor(heads: int) -> Tensor:
        size = shape.batch, shape.seqlen, heads, shape.head_dim
        return torch.empty(size, dtype=dtype, device="meta")

    scales = {}
    if dtype.itemsize == 1:
        scale = torch.empty(shape.batch, shape.kv_heads, device="meta")
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), scale)
    q = tensor(shape.heads)
    if shape.heads == 1:
        q = q[:, :128]
    plan = fa.explain(
        fa.flash_attn_func, q, tensor(shape.kv_heads), tensor(shape.kv_heads), causal=causal,
        fp8_policy=policy, target=arch, impl="cute", **scales,
    ).plan  # fmt: skip
    return () if plan is None else plan.kernels


def kernels(arch: str) -> Iterator[Spec]:
    """All that measuring launches."""
    for fmt, dtype in _DTYPES.items():
        for policy in POLICIES[fmt].values():
            for causal in (False, True):
                yield from specs_of(Shape(), dtype, causal, policy, arch)


# ------------------------------------------------------------------------------- contenders


@dataclass
class Contender:
    """One column of the result: how it is named, what it is given, and the call."""

    impl: str
    format: str
    policy: str
    causal: bool
    given: Inputs
    attention: Attention

    @property
    def fields(self) -> dict[str, str]:
        mask = "causal" if self.causal else "full"
        return {"format": self.format, "policy": self.policy, "mask": mask}

    def __str__(self) -> str:
        return " ".join((self.impl, *self.fields.values()))


def _out(result: Any) -> Tensor:
    """The output, of functions that return their LSE too."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def ours(given: Inputs, fmt: str, policy: str, causal: bool, impl: str | None) -> Attention:
    """This package's call under a named policy."""
    call = partial(
        fa.flash_attn_func, *given.tensors, causal=causal, fp8_policy=POLICIES[fmt][policy],
        impl=impl, **given.named(),
    )  # fmt: skip
    return lambda: _out(call())


def _flash_attn_4(given: Inputs, causal: bool) -> Attention:
    forward = peers.flash_attn_4()._flash_attn_fwd
    return lambda: _out(forward(*given.tensors, causal=causal, **given.named()))


def _flash_attn_3(given: Inputs, causal: bool) -> Attention:
    forward = peers.flash_attn_3().flash_attn_func
    return lambda: _out(forward(*given.tensors, causal=causal, **given.named()))


def _cudnn(given: Inputs, causal: bool) -> Attention:
    return peers.cudnn_attention(*given.tensors, causal, given.descales)


# A contender's name, policy and inputs, and what makes its call.
Maker = tuple[str, str, Inputs, Callable[[], Attention]]

# By name: how a peer is made, and what shares a scale with it.
PEERS: dict[str, tuple[Callable[[Inputs, bool], Attention], str]] = {
    "flash-attn-4": (_flash_attn_4, "batch_head"),
    "FA3": (_flash_attn_3, "batch_head"),
    "cuDNN": (_cudnn, "tensor"),
}


def contenders(
    shape: Shape, device: str, say: Callable[[str], object], impl: str | None = None
) -> Iterator[Contender]:
    """Every call that works here, once called; `say` hears of the others, with the reason."""
    for fmt in _DTYPES:
        by_head = inputs(shape, fmt, "batch_head", device)
        whole = by_head if fmt == "bf16" else inputs(shape, fmt, "tensor", device)
        for causal in (False, True):
            makers: list[Maker] = [
                (OURS, name, by_head, partial(ours, by_head, fmt, name, causal, impl))
                for name in POLICIES[fmt]
            ]
            for peer, (make, per) in PEERS.items():
                given = whole if per == "tensor" else by_head
                makers.append((peer, "its own", given, partial(make, given, causal)))
            yield from those_that_work(makers, fmt, causal, say)


def those_that_work(
    makers: Sequence[Maker], fmt: str, causal: bool, say: Callable[[str], object]
) -> Iterator[Contender]:
    """Contenders, once called; `say` hears of the others, with the reason."""
    for name, policy, given, maker in makers:
        try:
            attention = maker()
            attention()
        except Exception as reason:  # of a peer, any: whatever it lacks, it is left out
            if name == OURS and not isinstance(reason, NotImplementedError):
                raise
            first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            mask = "causal" if causal else "full"
            say(f"left out: {name} {fmt} {mask}: {first[:160]}")
            continue
        yield Contender(name, fmt, policy, causal, given, attention)


# ------------------------------------------------------------------------------------ times


def event_timed(attention: Attention, count: int) -> list[float]:
    """Milliseconds of calls on the current CUDA device, each between two events."""
    event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    pairs = [(event(), event()) for _ in range(count)]
    for start, end in pairs:
        start.record()
        attention()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


Clock = Callable[[Attention, int], list[float]]


def in_turns(found: Sequence[Contender], runs: int, clock: Clock) -> list[list[float]]:
    """Milliseconds of `runs` calls of each, a share of them each turn, after warming up.

    Fewer of a contender that has used its SECONDS.
    """
    for contender in found:
        clock(contender.attention, 1)
    quick = [clock(c.attention, 1)[0] * (WARM_UP + runs) < SECONDS * 1e3 for c in found]
    for contender, is_quick in zip(found, quick, strict=True):
        if is_quick:
            clock(contender.attention, WARM_UP)
    times: list[list[float]] = [[] for _ in found]
    share = -(-runs // TURNS)
    for _ in range(TURNS):
        for contender, mine, is_quick in zip(found, times, quick, strict=True):
            if sum(mine) < SECONDS * 1e3:
                mine += clock(contender.attention, min(share if is_quick else 1, runs - len(mine)))
    return times


def rows(
    found: Sequence[Contender], shape: Shape, clock: Clock = event_timed, runs: int = RUNS
) -> list[Row]:
    """Time, rate and error of each contender."""
    made = []
    for contender, times in zip(found, in_turns(found, runs, clock), strict=True):
        c, impl = contender, contender.impl
        made.append(Row.of(c.fields, impl, "time", "ms", *times))
        rates = [shape.flops(c.causal) / t / 1e9 for t in times]
        made.append(Row.of(c.fields, impl, "rate", "TFLOP/s, causal as half", *rates))
        error = c.given.error(c.attention(), c.causal)
        made.append(Row.of(c.fields, impl, "error of the last rows", "rel_l2", error))
    return made


def refusal() -> str | None:
    """Why nothing can be measured here; None if it can."""
    if torch.cuda.is_available():
        return None
    return (
        "perf_parity times kernels on a CUDA device, and torch sees none here: nothing was "
        "measured. Without one, `python -m benchmarks.static_sm100` compares with flash-attn-4 by "
        "what both kernels issue and move."
    )


def main(
    bundle: bundles.Folder = None,
    arch: bundles.Arch = bundles.H200,
    out: Annotated[Path, typer.Option(help="folder of the results")] = RESULTS,
) -> None:
    """Measure, save, and say how the times compare; or make the bundle that measuring needs."""
    if bundle is not None:
        typer.echo(bundles.make(bundle, arch, dict.fromkeys(kernels(arch))))
        return
    if (why := refusal()) is not None:
        typer.echo(why, err=True)
        raise typer.Exit(NO_DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("once")  # where no kernel runs, the fallback's is worth one line
        found = list(contenders(Shape(), "cuda", partial(typer.echo, err=True)))
        made = rows(found, Shape())
    device = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    results = Results.here(made, "python -m benchmarks.perf_parity", ROOT)
    out.mkdir(parents=True, exist_ok=True)
    typer.echo(write(results, f"perf_parity_{device}", out, ("impl",)).with_suffix(".md"))
    for line in comparison(made, own_policy(found)):
        typer.echo(line)


def own_policy(found: Sequence[Contender]) -> str:
    """Name of the policy that our e4m3 call without one runs under, here."""
    given = next(c.given for c in found if (c.impl, c.format) == (OURS, "e4m3"))
    told = fa.explain(fa.flash_attn_func, *given.tensors, **given.named())
    if told.problem is None or told.plan is None or told.plan.impl == "reference":
        return "default"
    policy = policy_of(told.problem, told.plan.target)
    return next(name for name, known in POLICIES["e4m3"].items() if known == policy)


def comparison(made: Sequence[Row], policy: str) -> Iterator[str]:
    """Each time beside that of our e4m3 under a policy."""
    times = [row for row in made if row.metric == "time"]
    base = {
        row.case["mask"]: row.value
        for row in times
        if (row.impl, row.case["format"], row.case["policy"]) == (OURS, "e4m3", policy)
    }
    for row in times:
        name = " ".join((row.impl, *map(str, row.case.values())))
        against = base.get(row.case["mask"])
        ratio = f", {row.value / against:.3f} x e4m3's ({policy})" if against else ""
        yield f"{name}: {row.value:.4g} ms (median of {len(row.runs)}){ratio}"


if __name__ == "__main__":
    typer.run(main)
