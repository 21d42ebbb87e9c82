"""What the truth tables of synchronisation share: cases of two columns, and how each is judged.

A case is what its first and its second party execute, line by line; "!" marks a line that it cannot
do without. A table's kernel sends the second party to SECOND and ends at END.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.schedule import Adversarial, Random

Case = tuple[list[str], list[str]]
_SEEDS = 4


def arrive(barrier: int) -> str:
    return f"@%p1 mbarrier.arrive.shared.b64 _, [%r{barrier}];"


def wait(barrier: int, parity: int = 0) -> str:
    label = f"W{barrier}_{parity}"
    return (
        f"{{ .reg .pred q; {label}: mbarrier.try_wait.parity.shared.b64 q, [%r{barrier}], "
        f"{parity}; @!q bra {label}; }}"
    )


def columns(case: Case, without: int | None = None) -> str:
    """Both columns as PTX, less the line that `needed` numbers `without`."""
    kept = []
    for i, line in enumerate([*case[0], None, *case[1]]):
        if line is None:
            kept += ["    bra END;", "SECOND:"]
        elif i != without:
            kept.append("    " + line.removeprefix("!"))
    return "\n".join(kept)


def needed(cases: Mapping[str, Case]) -> list[tuple[str, int, str]]:
    """(case, number, text) of each marked line."""
    return [
        (name, i, line[1:].split(";")[0][-60:])
        for name, case in cases.items()
        for i, line in enumerate([*case[0], "", *case[1]])
        if line.startswith("!")
    ]


def check_clean(execute: Callable[[Machine], Run]) -> None:
    """No finding under round robin, nor under schedules that delay what they can."""
    assert execute(Machine()).warp_instructions > 0
    for seed in range(_SEEDS):
        for kind in (Random, Adversarial):
            execute(Machine(schedule=lambda kind=kind, seed=seed: kind(seed)))
