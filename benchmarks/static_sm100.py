"""The SM100 kernel beside flash-attn-4, without the hardware: python -m benchmarks.static_sm100.

Both compile for sm_100a and run in the simulator; what they issue and move for one score tile, and
how many cycles a static model gives that, is set side by side (benchmarks/static_model.py has the
model and its constants). Ten minutes; `--only e4m3 128` measures one format and head dimension
and writes nothing. Needs flash-attn-4 and nvdisasm: pip install -e '.[dev]'.
Writes benchmarks/results/static_sm100.{json,md,png}.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT, static_report
from benchmarks.peers import flash_attn_4
from benchmarks.static_model import KEYS, ROWS, Case, Forward, Measured, execute
from flash_attn_fp8.kernels.sm100.geometry import Geometry
from flash_attn_fp8.results import Plot, Results, Row, plot, write
from flash_attn_fp8.specs import Sm100Spec

OURS, CODES, FA4 = "flash_attn_fp8", "flash_attn_fp8, codes", "flash-attn-4"
CASES = [Case(*c) for c in product(("e4m3", "bf16"), (64, 128, 256), (False, True))]
ROLES = {"softmax": 4, "correction": 4, "MMA": 1, "load": 1}  # warps that share a score tile
SOFTMAX_SHARE = 0.95  # of flash-attn-4's modelled cycles, e4m3 hd128
_PICTURED = ("softmax warps", "tensor core", "shared memory")
WORTH_A_ROW = 2  # instructions of a class for a warp and score tile
_PACKAGES = (FA4, "nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump")


def _scales(q: Tensor) -> dict[str, Any]:
    if q.dtype == torch.bfloat16:
        return {}
    return {f"{name}_descale": torch.ones(1, 1) for name in "qkv"}


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> object:
    return fa.flash_attn_func(q, k, v, causal=causal, num_splits=1, **_scales(q))


def _codes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> object:
    """With P's codes straight from the scores, under the policy that is best for them."""
    policy = fa.policy_for("e4m3", "sm90")
    scales = _scales(q)
    return fa.flash_attn_func(q, k, v, causal=causal, num_splits=1, fp8_policy=policy, **scales)


def _flash_attn_4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> object:
    return flash_attn_4()._flash_attn_fwd(q, k, v, causal=causal, **_scales(q))


KERNELS: dict[str, Forward] = {OURS: _ours, CODES: _codes, FA4: _flash_attn_4}
Pair = dict[str, Measured]  # a case's, by kernel


def measure(case: Case) -> Pair:
    """The kernels in one case; codes are fp8's."""
    with warnings.catch_warnings():  # the DSL's, about flash-attn-4's arguments
        warnings.simplefilter("ignore")
        return {
            impl: Measured(case, *(execute(forward, case, keys) for keys in KEYS))
            for impl, forward in KERNELS.items()
            if impl != CODES or case.format == "e4m3"
        }


# ------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    """A bar of the issue in one case: what was found, and the limit."""

    name: str
    case: Case
    found: float
    limit: float
    note: str = ""

    @property
    def kept(self) -> bool:
        return self.found <= self.limit


def query_tiles(case: Case) -> int:
    """Query tiles that a CTA of ours holds at once."""
    dtype = torch.bfloat16 if case.format == "bf16" else torch.float8_e4m3fn
    q, k = (torch.empty(1, n, 1, case.head_dim, dtype=dtype) for n in (ROWS, KEYS[1]))
    plan = fa.explain(
        fa.flash_attn_func, q, k, k, causal=case.causal, num_splits=1, impl="sim", **_scales(q)
    ).plan
    if plan is None or not isinstance(plan.spec, Sm100Spec):
        raise RuntimeError(f"{case}: no compiled kernel is planned")
    return Geometry(plan.spec).q_stage


def bars(pair: Pair) -> Iterator[Bar]:
    """Every bar that the case is held to."""
    ours, theirs = pair[OURS], pair[FA4]
    case = ours.case
    spilt = ", ".join(f"{n} in {role}" for role, n in ours.spills.items())
    yield Bar("spills (LDL and STL in the kernel)", case, sum(ours.spills.values()), 0, spilt)
    if (case.format, case.head_dim) == ("e4m3", 128):
        (pipe, mine), (_, other) = ours.loop("softmax").bound, theirs.loop("softmax").bound
        name = f"softmax warps, cycles a score tile, at most {SOFTMAX_SHARE} x flash-attn-4's"
        yield Bar(name, case, mine, SOFTMAX_SHARE * other, _softmax_note(pair, pipe))
    if CODES in pair:
        yield from _bars_of_codes(pair)
    found, limit = (sum(m.shared_bytes.values()) for m in (ours, theirs))
    yield Bar("shared memory bytes a score tile", case, found, limit, _shared_note(pair))
    loaded = ours.loaded(query_tiles(case))
    yield Bar("TMA bytes of K and V over the tiles' own", case, loaded, 1.0)


def _bars_of_codes(pair: Pair) -> Iterator[Bar]:
    codes, ours = pair[CODES], pair[OURS]
    spilt = ", ".join(f"{n} in {role}" for role, n in codes.spills.items())
    name = "spills (LDL and STL in the kernel), codes"
    yield Bar(name, ours.case, sum(codes.spills.values()), 0, spilt)
    (pipe, mine), (_, other) = (m.loop("softmax").bound for m in (codes, ours))
    name = "softmax warps, cycles a score tile, codes at most exponentials'"
    yield Bar(name, ours.case, mine, other, f"bound by {pipe}")


def _softmax_note(pair: Pair, pipe: str) -> str:
    """Where the cycles go: each pipe's, and the classes that we issue more of."""
    ours, theirs = (pair[impl].loop("softmax") for impl in (OURS, FA4))
    pipes = ", ".join(f"{p} {n:.0f} ({theirs.pipes[p]:.0f})" for p, n in ours.pipes.items())
    names = {*ours.classes, *theirs.classes}
    more = {n: ours.classes.get(n, 0) - theirs.classes.get(n, 0) for n in names}
    largest = sorted(more.items(), key=lambda item: -item[1])[:6]
    excess = ", ".join(f"{name} +{n:.0f}" for name, n in largest if n >= 1)
    return f"bound by {pipe}; cycles (flash-attn-4's): {pipes}; more of: {excess}"


def _shared_note(pair: Pair) -> str:
    parts = [
        " + ".join(f"{n:.0f} {name}" for name, n in pair[impl].shared_bytes.items())
        for impl in (OURS, FA4)
    ]
    pairs = [m.long.launch.cluster[0] for m in pair.values()]
    return f"{parts[0]}, {pairs[0]} CTA; flash-attn-4 {parts[1]}, {pairs[1]} CTA"


# ------------------------------------------------------------------------------------- rows


def rows(pair: Pair) -> Iterator[Row]:
    """Everything that was counted and modelled, as result rows."""
    for impl, m in pair.items():
        yield from _cycles(m, impl)
        for role, warps in ROLES.items():
            for name, n in sorted(m.loop(role).classes.items()):
                if n < WORTH_A_ROW:
                    continue
                case = {**m.case.fields, "role": role, "class": name}
                yield Row.of(
                    case, impl, "SASS of the loop", "instructions a warp and score tile", n
                )
            for name, count in sorted(m.ptx[role].items()):
                if count >= WORTH_A_ROW * warps * m.tiles:
                    case = {**m.case.fields, "role": role, "class": name}
                    unit = "warp instructions a score tile"
                    yield Row.of(case, impl, "PTX executed", unit, count / m.tiles)
        moved = {f"shared, {k}": n for k, n in m.shared_bytes.items()}
        moved |= {f"tensor memory, {k}": n for k, n in m.tensor_memory_bytes.items()}
        for name, n in moved.items():
            yield Row.of({**m.case.fields, "of": name}, impl, "moved", "bytes a score tile", n)
        held = {
            **m.resources,
            "mbarriers": m.mbarriers,
            "CTAs of a cluster": m.long.launch.cluster[0],
        }
        held["spills"] = sum(m.spills.values())
        held |= {f"registers, {role}": n for role, n in m.registers.items()}
        for name, n in held.items():
            yield Row.of({**m.case.fields, "of": name}, impl, "held", "as named", n)


def _cycles(m: Measured, impl: str) -> Iterator[Row]:
    found: dict[str, float] = {
        "tensor core": m.tensor_cycles,
        "shared memory": m.shared_cycles,
    }
    for role in ROLES:
        found[f"{role} warps"] = m.loop(role).bound[1]
        found |= {f"{role} warps, {p}": n for p, n in m.loop(role).pipes.items()}
    found |= {f"sub-partition, {p}": n for p, n in m.sub_partition.items()}
    for name, n in found.items():
        case = {**m.case.fields, "of": name}
        yield Row.of(case, impl, "modelled cycles", "cycles a score tile", n)


def save(pairs: list[Pair]) -> None:
    """The three files."""
    found = [row for pair in pairs for row in rows(pair)]
    results = Results.here(found, "python -m benchmarks.static_sm100", ROOT)
    versions = {name: metadata.version(name) for name in _PACKAGES}
    results = replace(results, versions={**results.versions, **versions})
    json = write(results, "static_sm100", RESULTS)
    judged = [bar for pair in pairs for bar in bars(pair)]
    text = static_report.markdown(results, pairs, judged)
    json.with_suffix(".md").write_text(text, "utf-8")
    shown = [row for row in found if row.case.get("of") in _PICTURED]
    picture = Plot(
        "modelled cycles",
        x=("format", "head_dim"),
        series=("impl",),
        panels=("of", "mask"),
        panels_across=2,
        title="Modelled cycles of an SM for 128 query rows x 128 keys",
    )
    print(json, json.with_suffix(".md"), plot(shown, picture, json.with_suffix(".png")), sep="\n")


def main() -> None:
    """Measure, save, and say which bars are kept."""
    chosen = CASES
    if "--only" in sys.argv:
        fmt, head_dim = sys.argv[sys.argv.index("--only") + 1 :][:2]
        chosen = [c for c in CASES if (c.format, c.head_dim) == (fmt, int(head_dim))]
    pairs = []
    for case in chosen:
        print(case, file=sys.stderr, flush=True)
        pairs.append(measure(case))
    print_bars(bar for pair in pairs for bar in bars(pair))
    if chosen is CASES:
        save(pairs)


def print_bars(judged: Iterable[Bar]) -> None:
    """A line each."""
    for bar in judged:
        found, limit = static_report.amount(bar.found), static_report.amount(bar.limit)
        verdict = "kept" if bar.kept else f"MISSED: {bar.note}"
        print(f"{bar.case}: {bar.name}: {found}, limit {limit}: {verdict}")


if __name__ == "__main__":
    main()
