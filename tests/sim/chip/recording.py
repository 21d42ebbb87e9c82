"""Recordings: what a GPU made of cases, in one .npz a group.

`index` is JSON: provenance, and for each case its name, its digest, and the sizes of its outputs or
the error that it ended with. `data` are the outputs one after the other, as xz of four planes: of
every fourth byte, as most are words whose bytes are like the same bytes of other words.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.sim.chip.case import Bytes

Outcome = list[Bytes] | str

_NOTHING = np.empty(0, np.uint8)


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
    index_packed = np.frombuffer(lzma.compress(text), np.uint8)
    np.savez(path, index=index_packed, data=_packed(np.concatenate([*parts, _NOTHING])))


def _packed(data: Bytes) -> Bytes:
    padded = np.pad(data, (0, -data.size % 4))
    planes = np.ascontiguousarray(padded.reshape(-1, 4).T)
    return np.frombuffer(lzma.compress(planes.tobytes(), preset=9), np.uint8)


def _unpacked(packed: Bytes) -> Bytes:
    planes = np.frombuffer(lzma.decompress(packed.tobytes()), np.uint8)
    return np.ascontiguousarray(planes.reshape(4, -1).T).reshape(-1)


def load(path: Path) -> Recording:
    with np.load(path) as file:
        data, index = _unpacked(file["data"]), json.loads(lzma.decompress(file["index"].tobytes()))
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
