"""Tensor copies, written out element by element: what the tests compare with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from flash_attn_fp8.sim.tensormap import TensorMap


def swizzled(address: int, m: TensorMap) -> int:
    """SIMULATOR.md 13 and the manual's tables, bit by bit."""

    def bit(i: int) -> int:
        return address >> i & 1

    flips = {
        ("none", "16B"): {},
        ("32B", "16B"): {4: 7},
        ("64B", "16B"): {4: 7, 5: 8},
        ("128B", "16B"): {4: 7, 5: 8, 6: 9},
        ("128B", "32B"): {5: 7, 6: 8},
        ("128B", "32B+8B"): {3: 7, 5: 7, 6: 8},
        ("128B", "64B"): {6: 7},
    }[m.swizzle, m.atom]
    for to, source in flips.items():
        address ^= bit(source) << to
    return address


def elements(m: TensorMap, coordinates: tuple[int, ...], shared: int):
    """(global offset or None where out of bounds, shared address) of each element of the box."""
    steps = (1, *m.element_strides[1:])
    ranges = [range(-(-b // s)) for b, s in zip(m.box, steps, strict=True)]
    row_bytes = m.box[0] * m.size
    pitch = row_bytes if m.swizzle == "none" else int(m.swizzle[:-1])
    for row, outer in enumerate(itertools.product(*reversed(ranges[1:]))):
        index = outer[::-1]
        for i in ranges[0]:
            at = [coordinates[0] + i]
            at += [c + k * s for c, k, s in zip(coordinates[1:], index, steps[1:], strict=True)]
            inside = all(0 <= a < d for a, d in zip(at, m.dims, strict=True))
            offset = at[0] * m.size + sum(a * s for a, s in zip(at[1:], m.strides, strict=True))
            yield (offset if inside else None), swizzled(shared + row * pitch + i * m.size, m)


def load(m: TensorMap, data: np.ndarray, coordinates: tuple[int, ...], image: np.ndarray, at: int):
    """Copy the box from `data` (the tensor's bytes) into `image`, shared memory."""
    fill = np.zeros(m.size, np.uint8)
    if m.fill == "nan":
        fill = np.resize(np.array([0xF7, 0x7F], np.uint8), m.size)
    for source, target in elements(m, coordinates, at):
        value = fill if source is None else data[source : source + m.size]
        image[target : target + m.size] = value


def store(m: TensorMap, data: np.ndarray, coordinates: tuple[int, ...], image: np.ndarray, at: int):
    """Copy the box from `image` to `data`; rows end where 16 bytes do."""
    units = 16 // m.size
    wide = replace(m, dims=(-(-m.dims[0] // units) * units, *m.dims[1:]))
    for target, source in elements(wide, coordinates, at):
        if target is not None:
            data[target : target + m.size] = image[source : source + m.size]
