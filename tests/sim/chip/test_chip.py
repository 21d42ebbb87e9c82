"""The chip agrees: an H200 and the simulator execute the same programs, with the same bits.

Every case is compared bit for bit, sums of tensor cores included: how Hopper cuts them off is known
(`sim/hopper.py`), so there is no tolerance. Recordings (`h200/*.npz`) are made by `hardware.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import Finding
from tests.sim.chip import hardware, recording, simulated
from tests.sim.chip.case import Array, Case
from tests.sim.chip.cases import CASES, GROUPS
from tests.sim.chip.recording import Outcome

_RECORDINGS = {
    group: recording.load(Path(__file__).with_name("h200") / f"{group}.npz") for group in GROUPS
}
_RECORDED = {name: found for r in _RECORDINGS.values() for name, found in r.cases.items()}


def _recorded(case: Case) -> Outcome:
    digest, outcome = _RECORDED[case.name]
    assert digest == case.digest, f"{case.name} has changed since it was recorded: record it again"
    return outcome


def _difference(case: Case, got: Outcome, wanted: Outcome) -> str:
    """Where two outcomes differ first; "" if nowhere."""
    if isinstance(got, str) or isinstance(wanted, str):
        return "" if got == wanted else f"{case.name}: {got!r}, not {wanted!r}"
    outputs = [i for i, a in enumerate(case.arguments) if isinstance(a, Array) and a.output]
    for argument, a, b in zip(outputs, got, wanted, strict=True):
        different = np.flatnonzero(a != b)
        if different.size:
            at = int(different[0]) & ~3
            return (
                f"{case.name}: argument {argument} differs in {different.size} of {a.size} bytes, "
                f"first at {at}: {a[at : at + 4].tobytes().hex()}, "
                f"not {b[at : at + 4].tobytes().hex()}"
            )
    return ""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.faults])
def test_the_simulator_computes_what_the_chip_did(name: str) -> None:
    case = CASES[name]
    wanted = _recorded(case)
    assert not isinstance(wanted, str), f"the chip did not run {name}: {wanted}"
    assert _difference(case, simulated.run(case), wanted) == ""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.faults])
def test_what_faults_on_the_chip_is_found(name: str) -> None:
    case = CASES[name]
    assert "CUDA_ERROR" in _recorded(case)
    with pytest.raises(Finding):
        simulated.run(case)


def test_recordings_are_of_these_cases_and_say_where_they_come_from() -> None:
    assert set(_RECORDED) == set(CASES)
    for found in _RECORDINGS.values():
        assert found.about["gpu and driver"].startswith("NVIDIA H200")
        assert {"date", "command", "commit"} <= set(found.about)


def test_every_output_is_written() -> None:
    """A case whose outputs keep their initial bytes would agree whatever it did."""
    for name, (_, outcome) in _RECORDED.items():
        if not isinstance(outcome, str):
            initial = [a.data for a in CASES[name].arguments if isinstance(a, Array) and a.output]
            changed = [not np.array_equal(a, b) for a, b in zip(initial, outcome, strict=True)]
            outside = name.startswith(("store 5d", "store past")) and "past" in name
            assert any(changed) or outside, name


@pytest.mark.gpu
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_the_live_chip_does_what_was_recorded(group: str) -> None:
    if hardware.capability() != (9, 0):
        pytest.skip("the recordings are of sm_90a; this GPU is another")
    cases = GROUPS[group]
    found = zip(cases, hardware.run_all(cases), strict=True)
    assert [text for c, o in found if (text := _difference(c, o, _recorded(c)))] == []
