"""What an H200 computed, instruction by instruction, is what the simulator computes.

`sm90_lanes.npz` holds, for each of some 1,400 instructions (opcode with modifiers and types), 24
lanes of sources (edge values, random bits, ordinary numbers) and the results: one kernel for each
instruction was assembled for sm_90a and run. NaNs count as equal, whatever their payload.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flash_attn_fp8.sim.isa.table import PACKED, WIDTH
from flash_attn_fp8.sim.numerics import FORMATS
from tests.sim.lane.running import run_lines

_FILE = Path(__file__).with_name("sm90_lanes.npz")
# Absolute and relative distance of two implementations that each keep the manual's bound for f32;
# of f16 and bf16, two steps of the format.
_BOUNDS = {
    "ex2": (2.0**-126, 2.0**-22),
    "lg2": (2.0**-22, 2.0**-22),
    "rcp": (2.0**-126, 2.0**-23),
    "sqrt": (2.0**-126, 2.0**-22),
    "rsqrt": (2.0**-126, 2.0**-22),
    "div": (2.0**-126, 2.0**-22),
    "sin": (2.0**-20, 0.0),
    "cos": (2.0**-20, 0.0),
    "tanh": (2.0**-126, 2.0**-10),
}


def _load() -> dict[str, list[tuple[Any, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]]:
    file = np.load(_FILE)
    groups = defaultdict(list)
    lanes, inputs, outputs = int(file["lanes"]), file["inputs"], file["outputs"]
    for entry in json.loads(file["instructions"].tobytes()):
        sizes = lanes * len(entry[2]), lanes * len(entry[3])
        given = inputs[: sizes[0]].reshape(lanes, -1)
        wanted = outputs[: sizes[1]].reshape(lanes, -1)
        inputs, outputs = inputs[sizes[0] :], outputs[sizes[1] :]
        groups[entry[0].split(".")[0].split(" ")[0]].append((entry, given, wanted))
    assert not len(inputs)
    assert not len(outputs)
    return groups


GROUPS = _load()


def _one_nan(bits: npt.NDArray[np.uint64], kind: str) -> npt.NDArray[np.uint64]:
    """Bits with every NaN of a float type (both halves of a packed one) made the same."""
    part = PACKED.get(kind, kind)
    layout = FORMATS.get(part)
    if layout is None or not layout.nan:
        return bits
    width, result = layout.width, np.zeros_like(bits)
    for shift in range(0, WIDTH[kind], width):
        code = (bits >> np.uint64(shift)) & np.uint64((1 << width) - 1)
        magnitude = code & np.uint64((1 << (width - 1)) - 1)
        nan = magnitude > np.uint64(layout.infinity << layout.shift)
        result |= np.where(nan, np.uint64(layout.nan << layout.shift), code) << np.uint64(shift)
    return result


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_bits_are_the_hardwares(group: str) -> None:
    wrong = []
    compared = 0
    for (name, lines, sources, results), given, wanted in GROUPS[group]:
        if ".approx" in name or ".full" in name:
            continue
        got = run_lines(lines, sources, results, given)
        compared += 1
        for index, kind in enumerate(results):
            differs = _one_nan(got[:, index], kind) != _one_nan(wanted[:, index], kind)
            for lane in np.nonzero(differs)[0][:2]:
                values = [hex(value) for value in given[lane]]
                wrong.append(
                    f"{name} of {values}: {got[lane, index]:#x}, H200 {wanted[lane, index]:#x}"
                )
    assert not wrong, "\n".join(wrong)
    assert compared or group in _BOUNDS


def _numbers(bits: npt.NDArray[np.uint64], kind: str) -> npt.NDArray[np.float64]:
    """The numbers in registers of a float type: float64[halves, n]."""
    part = PACKED.get(kind, kind)
    width = WIDTH[part]
    words = np.stack([bits >> np.uint64(shift) for shift in range(0, WIDTH[kind], width)])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if part == "bf16":
            return (words << np.uint64(16)).astype(np.uint32).view(np.float32).astype(np.float64)
        if part == "f16":
            return words.astype(np.uint16).view(np.float16).astype(np.float64)
        return words.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("group", sorted(_BOUNDS))
def test_approximations_are_as_near_the_hardware_as_the_manuals_bounds_say(group: str) -> None:
    compared = 0
    for (name, lines, sources, results), given, wanted in GROUPS[group]:
        if (".approx" not in name and ".full" not in name) or results[0] == "f64":
            continue
        kind = results[0]
        got = _numbers(run_lines(lines, sources, results, given)[:, 0], kind)
        truth = _numbers(wanted[:, 0], kind)
        absolute, relative = _BOUNDS[group]
        part = PACKED.get(kind, kind)
        if part != "f32":
            step = 2.0 ** -FORMATS[part].mantissa
            relative, absolute = max(2 * step, relative), max(absolute, 2.0**-24)
        given_numbers = _numbers(given[:, 0], PACKED.get(sources[0], sources[0]))
        in_range = np.ones_like(truth, dtype=bool)
        if group in ("sin", "cos"):
            in_range = np.abs(given_numbers) < np.pi
        with np.errstate(invalid="ignore"):
            near = np.abs(got - truth) <= absolute + relative * np.abs(truth)
        same = near | (got == truth) | (np.isnan(got) & np.isnan(truth))
        bad = np.nonzero(~same & in_range)
        assert not len(bad[0]), (name, given[bad[1][0]], got[bad][0], truth[bad][0])
        compared += 1
    assert compared
