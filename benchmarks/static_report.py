"""The Markdown of `benchmarks.static_sm100`: bars first, then what they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import sass
from benchmarks.static_model import CONSTANTS, KEYS, ROWS, Measured
from flash_attn_fp8.results import Results

if TYPE_CHECKING:
    from benchmarks.static_sm100 import Bar

_FEW = 1.0  # instructions of a class that a row is worth


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; numbers with four digits."""
    text = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*text, *("| " + " | ".join(map(_cell, line)) + " |" for line in lines), ""]


def amount(x: float) -> str:
    """Whole numbers whole, others with four digits."""
    return f"{x:,.0f}" if x == round(x) or x >= 1e4 else f"{x:.4g}"


def _cell(x: object) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def markdown(results: Results, pairs: list[dict[str, Measured]], bars: Sequence[Bar]) -> str:
    """The whole page."""
    about = [
        ("command", f"`{results.command}`"),
        ("machine", _listed(results.machine)),
        ("versions", _listed(results.versions)),
        ("commit", results.commit),
    ]
    text = ["# static_sm100", "", *(f"- {key}: {value}" for key, value in about), ""]
    text += [
        "A static model, not a measurement: no clock ran. A score tile is 128 query rows x 128",
        f"keys on the SM that computes it. Counts are what one head of {ROWS} queries costs more",
        f"with {KEYS[1]} keys than with {KEYS[0]} (q, k, v normal; if causal, the diagonal is at",
        "the end, so that the further tiles are whole). benchmarks/static_model.py is the model.",
        "",
    ]
    return "\n".join(text + _bars(bars) + _cycles(pairs) + _moved(pairs) + _held(pairs)
                     + _classes(pairs) + _ptx(pairs) + _model())  # fmt: skip


def _listed(entries: Mapping[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in entries.items() if v is not None)


def _bars(bars: Sequence[Bar]) -> list[str]:
    lines = [
        (b.name, b.case, amount(b.found), amount(b.limit), "kept" if b.kept else "**missed**")
        for b in bars
    ]
    lines.sort(key=lambda line: str(line[0]))
    text = ["## Bars", "", *table(("bar", "case", "found", "limit", "verdict"), lines)]
    missed = [b for b in bars if not b.kept and b.note]
    if missed:
        text += ["Missed, and where it goes:", ""]
        text += [f"- {b.case}, {b.name}: {b.note}" for b in missed]
        text.append("")
    return text


def _lines(pairs: list[dict[str, Measured]]) -> list[tuple[str, str, Measured]]:
    return [(str(m.case), impl, m) for pair in pairs for impl, m in pair.items()]


def _cycles(pairs: list[dict[str, Measured]]) -> list[str]:
    header = ("case", "kernel", "softmax", *(f"softmax {p}" for p in ("issue", *sass.PIPES)),
              "correction", "both on a sub-partition", "MMA warp", "load warp", "tensor core",
              "shared memory", "an SM is bound by")  # fmt: skip
    lines = []
    for case, impl, m in _lines(pairs):
        softmax = m.loop("softmax")
        lines.append((
            case, impl, "{} {:.0f}".format(*softmax.bound), *softmax.pipes.values(),
            "{} {:.0f}".format(*m.loop("correction").bound),
            "{} {:.0f}".format(*sass.bound(m.sub_partition)),
            float(m.loop("MMA").pipes["issue"]), float(m.loop("load").pipes["issue"]),
            m.tensor_cycles, m.shared_cycles, "{} {:.0f}".format(*m.bound),
        ))  # fmt: skip
    return ["## Modelled cycles for a score tile", "", *table(header, lines)]


def _moved(pairs: list[dict[str, Measured]]) -> list[str]:
    header = ("case", "kernel", "shared: MMA operands", "TMA", "generic", "all",
              "tensor memory: loads", "stores", "MMA operands")  # fmt: skip
    lines = [
        (case, impl, *(f"{n:.0f}" for n in m.shared_bytes.values()),
         f"{sum(m.shared_bytes.values()):.0f}",
         *(f"{n:.0f}" for n in m.tensor_memory_bytes.values()))
        for case, impl, m in _lines(pairs)
    ]  # fmt: skip
    return ["## Bytes for a score tile", "", *table(header, lines)]


def _held(pairs: list[dict[str, Measured]]) -> list[str]:
    header = ("case", "kernel", "CTAs", "registers at launch", "by role", "stack bytes",
              "LDL + STL", "shared memory bytes", "mbarriers")  # fmt: skip
    lines = []
    for case, impl, m in _lines(pairs):
        r = m.resources
        by_role = ", ".join(f"{role} {n}" for role, n in sorted(m.registers.items()))
        lines.append(
            (case, impl, m.long.launch.cluster[0], r["REG"], by_role, r["STACK"],
             sum(m.spills.values()), r["dynamic shared memory"], f"{m.mbarriers:.0f}")
        )  # fmt: skip
    return ["## Held", "", *table(header, lines)]


def _classes(pairs: list[dict[str, Measured]]) -> list[str]:
    """Of the full cases: causal ones run the same loop between their masked tiles."""
    full = [(case, impl, m.loop("softmax").classes) for case, impl, m in _lines(pairs)
            if not m.case.causal]  # fmt: skip
    names = {n for _, _, c in full for n, count in c.items() if count >= _FEW}
    total = {n: sum(c.get(n, 0) for _, _, c in full) for n in names}
    lines = [
        (name, *(f"{c.get(name, 0):.4g}" for _, _, c in full))
        for name in sorted(names, key=lambda n: -total[n])
    ]
    header = ("class", *(f"{case.removesuffix(' full')} {impl}" for case, impl, _ in full))
    title = "## The softmax loop: SASS instructions of a warp for a score tile, full"
    checks = [
        "MUFU.EX2 there against ex2 executed in the simulator: "
        + ", ".join(f"{m.exp2_in_sass:.4g} and {m.exp2_in_ptx:.4g}" for _, _, m in _lines(pairs)
                    if not m.case.causal) + ".",
        "",
    ]  # fmt: skip
    return [title, "", *table(header, lines), *checks]


def _ptx(pairs: list[dict[str, Measured]]) -> list[str]:
    roles = ("softmax", "correction", "MMA", "load")
    lines = [
        (case, impl, *(f"{m.per_tile(r):.0f} ({m.per_tile(r) - m.per_tile(r, 'mov'):.0f})"
                       for r in roles))
        for case, impl, m in _lines(pairs)
    ]  # fmt: skip
    title = "## PTX warp instructions executed for a score tile, all warps of a role (without mov)"
    return [title, "", *table(("case", "kernel", *roles), lines)]


def _model() -> list[str]:
    text = ["## The model", ""]
    text += [f"- {what}: {cost}." for what, cost in CONSTANTS.items()]
    text += [
        "- A role's cycles: the longest of its pipes, for one warp. Four warps share a score tile,",
        "  one on each sub-partition, in softmax and correction; MMA and load are single warps.",
        "- The uniform data path, loads of constants and control flow count as issue alone; waits",
        "  are not modelled, nor what latency leaves idle: the model is a lower bound.",
        "",
    ]
    return text
