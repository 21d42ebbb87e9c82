"""Recordings: what a GPU made of cases, in one .npz a group.

Outputs lie one after the other in `data`; `index` is JSON: provenance, and for each case its name,
its digest, and the sizes of its outputs or the error that it ended with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.sim.chip.case import Bytes

Outcome = list[Bytes] | str


@dataclass(frozen=True)
class Recording:
    about: dict[str, str]
    cases: dict[str, tuple[str, Outcome]]  # digest and outcome


def save(path: Path, about: dict[str, str], cases: dict[str, tuple[str, Outcome]]) -> None:
    index = [
        (name, digest, outcome if isinstance(outcome, str) else [part.size for part in outcome])
        for name, (digest, outcome) in cases.items()
    ]
    parts = [p for _, outcome in cases.values() if not isinstance(outcome, str) for p in outcome]
    text = json.dumps({"about": about, "cases": index}).encode()
    np.savez_compressed(
        path,
        index=np.frombuffer(text, np.uint8),
        data=np.concatenate(parts) if parts else np.empty(0, np.uint8),
    )


def load(path: Path) -> Recording:
    with np.load(path) as file:
        data, index = file["data"], json.loads(file["index"].tobytes())
    cases: dict[str, tuple[str, Outcome]] = {}
    at = 0
    for name, digest, outcome in index["cases"]:
        if not isinstance(outcome, str):
            parts = []
            for size in outcome:
                parts.append(data[at : at + size])
                at += size
            outcome = parts
        cases[name] = (digest, outcome)
    return Recording(index["about"], cases)
