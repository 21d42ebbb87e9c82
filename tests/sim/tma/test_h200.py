"""What an H200 (driver 580.159) did with the same copies; `h200_copies.json` has its answers.

Boxes: source bytes from `default_rng(seed)`, shared memory filled from `default_rng(seed + 1)`
before; the hash is of 24 KB of shared memory after, padding of swizzled rows included. Where the
hash is null the chip answered with an illegal instruction. Edges: destination a[i, j] = edges[i],
source b[i, j] = edges[j].
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from flash_attn_fp8.sim import tensormap
from flash_attn_fp8.sim.errors import Misaligned, OutOfBounds, Unmodelled
from flash_attn_fp8.sim.memory import PARAM_WINDOW
from flash_attn_fp8.sim.tensormap import FILLS, SWIZZLES, TensorMap, encode
from tests.sim.tma.rig import BARRIER, Rig, aligned

H200 = json.loads((Path(__file__).parent / "h200_copies.json").read_text())
_ORIGIN = 0x800  # offset 0 of the chip's 24 KB; like there a multiple of 1024
_IMAGE = 24576

LOAD = (
    "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r0], [%rd0, {{{c}}}], [%r1];"
)
STORE = "cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group [%rd0, {{{c}}}], [%r0];"
REDUCE = (
    "cp.reduce.async.bulk.tensor.{n}d.global.shared::cta.{op}.tile.bulk_group "
    "[%rd0, {{{c}}}], [%r0];"
)


def _random(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def _issue(rig: Rig, template: str, coordinates: list[int], offset: int, op: str = "") -> None:
    n = len(coordinates)
    names = [f"r{10 + i}" for i in range(n)]
    text = template.format(n=n, c=", ".join(f"%{name}" for name in names), op=op)
    values = dict(zip(names, coordinates, strict=True)) | {"rd0": PARAM_WINDOW, "r0": offset}
    rig.run(text, **values, **({"r1": BARRIER} if template is LOAD else {}))


def _id(case: dict[str, object]) -> str:
    return "-".join(str(case[k]) for k in ("type", "box", "coordinates")).replace(" ", "")


@pytest.mark.parametrize("case", H200["boxes"], ids=_id)
def test_boxes(case):
    data = aligned(1 << 19, None)
    data[:] = _random(case["seed"], data.size)
    m = TensorMap(
        data.ctypes.data, case["type"], tuple(case["dims"]), tuple(case["strides"]),
        tuple(case["box"]), tuple(case["element_strides"]), swizzle=SWIZZLES[case["swizzle"]],
        fill=FILLS[case["fill"]], version="sm_90",
    )  # fmt: skip
    rig = Rig(data, params=encode(m))
    image = rig.shared[_ORIGIN : _ORIGIN + _IMAGE]
    image[:] = _random(case["seed"] + 1, _IMAGE)
    if case["sha256"] is None:
        with pytest.raises(Misaligned):
            _issue(rig, LOAD, case["coordinates"], _ORIGIN + case["offset"])
        return
    _issue(rig, LOAD, case["coordinates"], _ORIGIN + case["offset"])
    assert hashlib.sha256(image.tobytes()).hexdigest() == case["sha256"]
    assert rig.barrier().tx == -case["bytes"]


# The chip does these, and the manual's table of reductions does not have them.
_NOT_IN_THE_MANUAL = {("add", "tf32"), ("add", "f64")}


@pytest.mark.parametrize(
    "case", H200["edges"], ids=lambda c: f"{c['operation']}-{c['type']}-{c['first']}"
)
def test_edge_values(case):
    kind = np.dtype(f"u{case['width'] // 8}")
    edges = np.array([int(v, 16) for v in case["edges"]], kind)
    n = edges.size
    data = aligned(n * n * kind.itemsize, None)
    data.view(kind)[:] = np.repeat(edges, n)
    source = np.tile(edges, n)
    size = 1 if case["type"] == "u8" else kind.itemsize
    row = n * kind.itemsize
    shape = (row // size, n)
    m = TensorMap(data.ctypes.data, case["type"], shape, (row,), shape, (1, 1), version="sm_90")
    rig = Rig(data, params=encode(m))
    rig.write(_ORIGIN, source)
    rig.warp().fence_proxy_async()
    operation = case["operation"]
    template = {"load": LOAD, "store": STORE}.get(operation, REDUCE)
    coordinates = [case["first"], 0]
    unmodelled = (operation, case["type"]) in _NOT_IN_THE_MANUAL
    if case["result"] is None or unmodelled:
        with pytest.raises((Unmodelled, Misaligned, OutOfBounds)):
            _issue(rig, template, coordinates, _ORIGIN, operation)
        return
    _issue(rig, template, coordinates, _ORIGIN, operation)
    got = rig.shared[_ORIGIN : _ORIGIN + n * row] if operation == "load" else data
    assert got.tobytes().hex() == case["result"]


@pytest.mark.parametrize("case", H200["replace"], ids=lambda c: f"{c['field']}-{c['value']}")
def test_replace(case):
    raw = bytes.fromhex(H200["template"]) + bytes(64)
    changed = tensormap.replace(raw, case["field"], case["ordinal"], case["value"])
    assert changed[:64].hex() == case["map"]
