"""Every operation gives the same bits compiled and as plain Python."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from flash_attn_fp8.sim import decode
from flash_attn_fp8.sim.isa import compiled
from flash_attn_fp8.sim.isa.table import (
    FORMS,
    OPERATIONS,
    RELU,
    SAT,
    SATFINITE,
    SELECTOR_SHIFT,
    WIDTH,
    Operation,
)

_EDGES = {
    1: [0, 1],
    8: [0, 1, 0x7E, 0x7F, 0x80, 0xFF],
    16: [0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7C00, 0xFC01, 0x3C00, 0x0400, 0x7F80, 0x3F80, 0x0080],
    32: [0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000],
}
_EDGES[32] += [0x3F800000, 0xBF800000, 0x00800000, 0x007FFFFF, 0x80000001, 0x7F7FFFFF, 0xCF000000]
_EDGES[64] = [*_EDGES[32], 1 << 63, (1 << 63) - 1, (1 << 64) - 1]
_EDGES[64] += [word << 48 for word in (0x7FF0, 0xFFF0, 0x3FF0, 0x10, 0x43E0, 0xC3E0, 0x43F0)]


def _value(rng: random.Random, kind: str) -> int:
    width = WIDTH[kind]
    if rng.random() < 0.5:
        return rng.choice(_EDGES[width])
    if kind in ("f32", "f32x2") and rng.random() < 0.7:
        numbers = [rng.uniform(-4, 4) * 10.0 ** rng.randint(-3, 3) for _ in range(2)]
        packed = struct.pack("<2f", *numbers)
        return int.from_bytes(packed[: width // 8], "little")
    return rng.getrandbits(width) >> rng.choice([0, 0, rng.randrange(width)])


def _mode(rng: random.Random, name: str) -> int:
    """Mode bits that the operation can meet."""
    part = rng.choice([8, 16, 32])
    selectors = {
        "_join.b64": part,
        "_part.b64": part | rng.choice([0, 8, 16, 24, 32]) << 6,
        "_lop3.b32": rng.randrange(256),
        "_cvt.b64": rng.randrange(64),
        "_pack.b32": rng.choice([0, 1, 4, 5]),
    }
    stem = name.split(".")[0]
    if name in selectors:
        return selectors[name] << SELECTOR_SHIFT | rng.choice([0, SAT if stem == "_cvt" else 0])
    if stem == "_compare":
        return rng.randrange(14 if "f" in name.split(".")[1] else 6) << SELECTOR_SHIFT
    if stem == "_to_integer":
        return rng.randrange(16) << SELECTOR_SHIFT | rng.randrange(4)
    if stem == "_integral":
        return rng.randrange(4) << SELECTOR_SHIFT
    if stem in ("_pair", "_to_f64", "_float"):
        return rng.randrange(5) | rng.choice([0, RELU]) | rng.choice([0, SATFINITE])
    bits = {
        bit
        for forms in FORMS.values()
        for form in forms
        for signature in form.types.values()
        if signature.operation == name
        for bit in form.modifiers.values()
    }
    mode = sum(bit for bit in bits if 8 <= bit < 1 << SELECTOR_SHIFT and rng.random() < 0.3)
    mode |= rng.choice([0, *(bit for bit in bits if bit < 8)])
    return mode | rng.choice([0, *(bit for bit in bits if bit >= 1 << SELECTOR_SHIFT)])


@pytest.fixture(scope="module")
def pure() -> dict[str, Any]:
    """The generated module, run without numba."""
    text = compiled.generate()
    marker = "from numba import njit"
    assert marker in text
    names: dict[str, Any] = {"__name__": "pure"}
    exec(text.replace(marker, "njit = lambda *a, **k: (lambda function: function)"), names)
    return names


def _group(operation: Operation) -> tuple[str, np.int32]:
    number = decode.operation_number(operation.name)
    name = f"group_{(number - decode.FIRST_LANE_OPERATION) // compiled._GROUP}"
    return name, np.int32(number)  # as the loop calls it, which is compiled already


@pytest.mark.parametrize("stem", sorted({name.split(".")[0] for name in OPERATIONS}))
def test_compiled_and_plain_python_agree(stem: str, pure: dict[str, Any]) -> None:
    module = compiled.load()
    rng = random.Random(stem)
    for name, operation in OPERATIONS.items():
        if name.split(".")[0] != stem:
            continue
        group, number = _group(operation)
        for _ in range(60):
            words = [_value(rng, kind) for kind in operation.sources]
            words += [0] * (4 - len(words))
            mode = _mode(rng, name)
            with np.errstate(all="ignore"):
                plain = int(pure[group](number, mode, *words))
            fast = int(getattr(module, group)(number, mode, *(np.uint64(word) for word in words)))
            assert plain == fast, f"{name} mode {mode:#x} of {[hex(word) for word in words]}"


def test_loops_over_a_warp_give_what_single_lanes_give() -> None:
    module = compiled.load()
    rng = random.Random(3)
    checked = 0
    for name, operation in OPERATIONS.items():
        if not (operation.hot or operation.fast):
            continue
        group, number = _group(operation)
        registers = np.zeros(5 * 32, dtype=np.uint64)
        for row, kind in enumerate(operation.sources, 1):
            for lane in range(32):
                registers[row * 32 + lane] = _value(rng, kind)
        mode = 0 if operation.fast else _mode(rng, name)
        rows = [np.uint64(32 * row) for row in range(4)]
        getattr(module, f"warp_{number}")(registers, *rows, mode)
        for lane in range(32):
            words = [registers[row * 32 + lane] for row in range(1, 5)]
            alone = getattr(module, group)(number, mode, *words)
            assert int(alone) == int(registers[lane]), (name, [hex(word) for word in words])
        checked += 1
    assert checked > 20
