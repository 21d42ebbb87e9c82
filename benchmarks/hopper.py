"""The SM90 forward kernel beside FA3 and cuDNN, in one run: python -m benchmarks.hopper; minutes.

Shapes of b·s = 16,384 tokens and h·d = 2,048, and the seed geometry (b2, 32 query heads over 2 KV
heads, d128, s4096), full and causal. Ours in e4m3, with exponentials and with codes straight from
the logarithm, and in bf16; FA3 (`flash_attn_interface`, PyPI tokenspeed-fa3) and cuDNN
(`nvidia-cudnn-frontend`) in both formats. All contenders of a shape take turns, a few calls each,
since the power limit decides the clock. Times are of whole calls between two events: of ours, the
kernel that transposes V too. Then accuracy over long sequences, where Hopper's fp8 tensor cores
lose what is not promoted: q = 0 and V = 0.75, and noise around 0.5.

On a machine without the compiler: `--bundle FOLDER` makes a bundle of the kernels (no GPU needed),
and FLASH_ATTN_FP8_BUNDLE=FOLDER uses it.

Writes benchmarks/results/hopper_DEVICE.{json,md,png}.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT, bundles
from benchmarks.perf_parity import (
    NO_DEVICE,
    OURS,
    PEERS,
    Contender,
    Inputs,
    Shape,
    event_timed,
    in_turns,
    inputs,
    refusal,
    specs_of,
    those_that_work,
)
from flash_attn_fp8.accuracy.measure import rel_l2
from flash_attn_fp8.results import Plot, Results, ResultsError, Row, plot, write
from flash_attn_fp8.specs import Spec

SEED = Shape()
SHAPES = (
    *(Shape(16384 // s, 2048 // d, 2048 // d, d, s)
      for d, lengths in ((64, (4096, 16384)), (128, (1024, 4096, 16384)), (256, (4096, 16384)))
      for s in lengths),
    SEED,
)  # fmt: skip
RUNS = 60
PICTURE = Plot("rate", x=("s", "b"), series=("impl", "format", "policy"), panels=("d", "mask"),
               title="SM90: TFLOP/s, causal as half")  # fmt: skip
KEYS = (1024, 8192, 32768, 131072)
POLICIES = {
    "code": fa.policy_for("e4m3", "sm90"),
    "exact": fa.policy_for("e4m3", "eager_rescale"),
}


def _ours(given: Inputs, policy: fa.Fp8Policy | None, causal: bool) -> Tensor:
    out, _ = fa.flash_attn_func(
        *given.tensors, causal=causal, fp8_policy=policy, impl="cute", **given.named()
    )
    return out


def contenders(shape: Shape, causal: bool, device: str) -> Iterator[Contender]:
    """Every call of a shape that works here."""
    for fmt in ("e4m3", "bf16"):
        by_head = inputs(shape, fmt, "batch_head", device)
        whole = by_head if fmt == "bf16" else inputs(shape, fmt, "tensor", device)
        makers = [
            (OURS, name, by_head, partial(partial, _ours, by_head, policy, causal))
            for name, policy in (POLICIES.items() if fmt == "e4m3" else [("exact", None)])
        ]
        for peer in ("FA3", "cuDNN"):
            make, per = PEERS[peer]
            given = whole if per == "tensor" else by_head
            makers.append((peer, "its own", given, partial(make, given, causal)))
        say = partial(print, shape, file=sys.stderr)
        yield from those_that_work(makers, fmt, causal, say)


def _named(shape: Shape) -> dict[str, int]:
    return {
        "d": shape.head_dim, "s": shape.seqlen, "b": shape.batch, "h": shape.heads,
        "hkv": shape.kv_heads,
    }  # fmt: skip


def times(shapes: Sequence[Shape], device: str) -> list[Row]:
    """Time, rate, error of every contender, and ours against the better peer."""
    made = []
    for shape in shapes:
        for causal in (False, True):
            found = list(contenders(shape, causal, device))
            taken = in_turns(found, RUNS, event_timed)
            for c, ms in zip(found, taken, strict=True):
                case = {**_named(shape), **c.fields}
                rates = [shape.flops(causal) / t / 1e9 for t in ms]
                made.append(Row.of(case, c.impl, "rate", "TFLOP/s, causal as half", *rates))
                error = c.given.error(c.attention(), causal)
                made.append(Row.of(case, c.impl, "error of the last rows", "rel_l2", error))
            del found
            torch.cuda.empty_cache()
    return made


def ratios(made: Sequence[Row]) -> list[Row]:
    """Our rates over the better peer's, of each shape, mask and format."""
    rates = [row for row in made if row.metric == "rate"]
    found = []
    for row in (r for r in rates if r.impl == OURS):
        same = {k: v for k, v in row.case.items() if k != "policy"}
        peers = [
            r.value for r in rates
            if r.impl != OURS and {k: v for k, v in r.case.items() if k != "policy"} == same
        ]  # fmt: skip
        if peers:
            found.append(Row.of(row.case, OURS, "rate over the better peer's", "ratio",
                                row.value / max(peers)))  # fmt: skip
    return found


def accumulation(device: str) -> list[Row]:
    """What is left of a mean over many keys: the answer to q = 0, V = 0.75, and error of noise."""
    made = []
    for keys in KEYS:
        generator = torch.Generator(device).manual_seed(keys)
        q = torch.randn(1, 128, 1, 128, generator=generator, device=device)
        k = torch.randn(1, keys, 1, 128, generator=generator, device=device)
        v = torch.randn(1, keys, 1, 128, generator=generator, device=device) + 0.5
        for what, tensors in (
            ("q = 0, V = 0.75", (q * 0, k, torch.full_like(v, 0.75))),
            ("noise", (q, k, v)),
        ):
            codes = tuple(x.to(torch.float8_e4m3fn) for x in tensors)
            one = torch.ones(1, 1, device=device)
            by_head = Inputs(codes, (one, one, one))
            whole = Inputs(codes, (one[0, 0], one[0, 0], one[0, 0]))
            wanted, _ = fa.flash_attn_func(*(x.double().float().bfloat16() for x in codes),
                                           impl="reference", out_dtype=torch.float32)  # fmt: skip
            calls = {
                (OURS, name): partial(_ours, by_head, p, False) for name, p in POLICIES.items()
            }
            for peer in ("FA3", "cuDNN"):
                make, per = PEERS[peer]
                try:
                    calls[peer, "its own"] = make(whole if per == "tensor" else by_head, False)
                except Exception as reason:
                    print(f"left out: {peer}: {str(reason)[:200]}", file=sys.stderr)
            for (impl, policy), call in calls.items():
                out = call().float()
                case = {"what": what, "keys": keys, "policy": policy}
                if what == "noise":
                    made.append(Row.of(case, impl, "error", "rel_l2", rel_l2(out, wanted)))
                else:
                    made.append(Row.of(case, impl, "mean", "0.75 is right", float(out.mean())))
    return made


def kernels(arch: str) -> Iterator[Spec]:
    """All that measuring launches."""
    for shape in SHAPES:
        for causal in (False, True):
            for policy in POLICIES.values():
                yield from specs_of(shape, torch.float8_e4m3fn, causal, policy, arch)
            yield from specs_of(shape, torch.bfloat16, causal, None, arch)
    for keys in KEYS:
        for policy in POLICIES.values():
            yield from specs_of(Shape(1, 1, 1, 128, keys), torch.float8_e4m3fn, False, policy, arch)


def main(
    bundle: bundles.Folder = None,
    arch: bundles.Arch = bundles.H200,
    only: Annotated[str, typer.Option(help="a head dim, or 'accumulation'")] = "",
    out: Annotated[Path, typer.Option(help="folder of the results")] = RESULTS,
) -> None:
    """Measure, or make the bundle that measuring needs."""
    if bundle is not None:
        typer.echo(bundles.make(bundle, arch, dict.fromkeys(kernels(arch))))
        return
    if (why := refusal()) is not None:
        typer.echo(why.replace("perf_parity", "hopper"), err=True)
        raise typer.Exit(NO_DEVICE)
    shapes = [s for s in SHAPES if only in ("", str(s.head_dim))]
    made = times(shapes, "cuda")
    made += ratios(made)
    if only in ("", "accumulation"):
        made += accumulation("cuda")
    results = Results.here(made, "python -m benchmarks.hopper", ROOT)
    out.mkdir(parents=True, exist_ok=True)
    json = write(results, "hopper_h200", out, ("impl", "policy"))
    for row in made:
        if row.metric in ("rate over the better peer's", "mean", "error"):
            typer.echo(f"{' '.join(map(str, row.case.values()))} {row.impl}: {row.value:.4g}")
    try:
        plot([r for r in made if r.metric == "rate"], PICTURE, json.with_suffix(".png"))
    except ResultsError as missing:  # no matplotlib: the JSON has all
        typer.echo(missing, err=True)


if __name__ == "__main__":
    typer.run(main)
