"""The 128 bytes of a tensor map: fields, limits, and what the driver writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_attn_fp8.sim import tensormap
from flash_attn_fp8.sim.errors import Misaligned, Unmodelled
from flash_attn_fp8.sim.tensormap import TensorMap, decode, encode
from tests.sim.tma.strategies import maps

MAP = TensorMap(
    0x7F00_1234_5670, "bf16", (64, 32, 16, 8, 4), (128, 4096, 65536, 524288), (64, 2, 2, 2, 2),
    (1,) * 5, swizzle="128B",
)  # fmt: skip


@given(maps(), st.integers(0, (1 << 57) // 16 - 1), st.sampled_from([0, 64, 128, 256]))
def test_decoding_inverts_encoding(m, sixteenths, promotion):
    m = replace(m, address=16 * sixteenths, l2_promotion=promotion)
    assert decode(encode(m)) == m
    if m.atom == "16B":
        old = replace(m, version="sm_90")
        assert decode(encode(old)) == old


@pytest.mark.parametrize(
    "change",
    [
        {"strides": ((1 << 40) - 16, (1 << 36) + 16, 16, 0)},
        {"dims": (1 << 32, 1, 1 << 32, 1, 1 << 31)},
        {"box": (64, 256, 1, 255, 2)},
        {"element_strides": (1, 8, 2, 7, 3)},
        {"fill": "nan"},
        {"type": "tf32", "box": (32, 1, 1, 1, 1)},
        {"type": "tf32.ftz", "box": (32, 1, 1, 1, 1)},
        {"interleave": "16B"},
        {"l2_hint": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_keep_their_largest_values(change):
    m = replace(MAP, **change)
    assert decode(encode(m)) == m


def test_fields_are_where_simulator_md_says():
    words = np.frombuffer(encode(replace(MAP, l2_hint=1)), "<u4")
    assert words[2] == 2 | 4 << 4 | 10 << 7 | 3 << 13 | 1 << 18 | 1 << 21
    assert int(words[0]) | int(words[1]) << 32 == MAP.address
    assert words[3:8].tolist() == [8, 256, 4096, 32768, 0]
    assert words[8:13].tolist() == [63, 31, 15, 7, 3]
    assert encode(MAP)[55:60] == bytes([63, 1, 1, 1, 1])


def test_bytes_that_the_copy_engine_does_not_read_may_hold_anything():
    """CuTe DSL leaves its stack's contents there."""
    assert decode(encode(MAP)[:64] + bytes(range(64))) == MAP


@pytest.mark.parametrize("bit", [*range(23, 32)])
def test_unknown_bits_of_the_main_word_are_unmodelled(bit):
    raw = bytearray(encode(MAP))
    raw[8 + bit // 8] |= 1 << bit % 8
    with pytest.raises(Unmodelled, match="0x"):
        decode(bytes(raw))


@pytest.mark.parametrize("byte", [30, 31, 53, 54, 60, 61, 62, 63])
def test_unknown_bits_elsewhere_are_unmodelled(byte):
    raw = bytearray(encode(MAP))
    raw[byte] |= 0x80
    with pytest.raises(Unmodelled, match="bits 0x"):
        decode(bytes(raw))


@pytest.mark.parametrize("byte", [16, 20, 24, 40, 44, 48, 57, 58, 59])
def test_fields_of_dimensions_that_a_map_does_not_have_must_be_zero(byte):
    small = replace(MAP, dims=(64, 32), strides=(128,), box=(64, 2), element_strides=(1, 1))
    raw = bytearray(encode(small))
    raw[byte] = 1
    with pytest.raises(Unmodelled, match=f"at byte {byte}"):
        decode(bytes(raw))


@pytest.mark.parametrize("code", [1, 3, 4, 8, 15])
def test_other_versions_are_unmodelled(code):
    raw = bytearray(encode(MAP))
    raw[8] = raw[8] & 0xF0 | code
    with pytest.raises(Unmodelled, match=f"version {code}"):
        decode(bytes(raw))


@pytest.mark.parametrize("code", range(11, 16))
def test_other_element_types_are_unmodelled(code):
    word = int(np.frombuffer(encode(MAP), "<u4")[2]) & ~(0xF << 7) | code << 7
    raw = bytearray(encode(MAP))
    raw[8:12] = word.to_bytes(4, "little")
    with pytest.raises(Unmodelled, match=f"element type {code}"):
        decode(bytes(raw))


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"address": 8}, Misaligned, "multiple of 16"),
        ({"strides": (136, 4096, 65536, 524288)}, Misaligned, "strides\\[0\\] = 136"),
        ({"strides": (128, 1 << 40, 65536, 524288)}, ValueError, "strides\\[1\\]"),
        ({"box": (12, 1, 1, 1, 1)}, Misaligned, "24 bytes"),
        ({"box": (72, 1, 1, 1, 1)}, Misaligned, "144 bytes, more than the swizzle"),
        ({"box": (64, 257, 1, 1, 1)}, ValueError, "box\\[1\\] = 257"),
        ({"box": (64, 0, 1, 1, 1)}, ValueError, "box\\[1\\] = 0"),
        ({"dims": (64, 0, 1, 1, 1)}, ValueError, "dims\\[1\\] = 0"),
        ({"element_strides": (1, 9, 1, 1, 1)}, ValueError, "element strides\\[1\\] = 9"),
        ({"type": "s32", "box": (32, 1, 1, 1, 1), "fill": "nan"}, Unmodelled, "integers"),
        ({"swizzle": "64B", "box": (32, 1, 1, 1, 1), "atom": "32B"}, Unmodelled, "atom 32B"),
        ({"dims": (64, 32)}, ValueError, "rank 2"),
    ],
)
def test_limits_name_the_value(change, error, named):
    with pytest.raises(error, match=named):
        encode(replace(MAP, **change))


H200 = json.loads((Path(__file__).parent / "h200_maps.json").read_text())
_ENUM = "u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32.ftz tf32 tf32.ftz b4x16 b4x16_p64 b6x16_p32"


def _of_driver(arguments: dict[str, object]) -> TensorMap:
    """Arguments of cuTensorMapEncodeTiled."""
    a = arguments
    swizzles = [("none", "16B"), ("32B", "16B"), ("64B", "16B"), ("128B", "16B")]
    swizzle, atom = swizzles[a["swizzle"]]
    return TensorMap(
        a["address"], a["type"], tuple(a["dims"]), tuple(a["strides"]), tuple(a["box"]),
        tuple(a["element_strides"]), tensormap.INTERLEAVES[a["interleave"]], swizzle, atom,
        tensormap.FILLS[a["fill"]], (0, 64, 128, 256)[a["l2_promotion"]], version="sm_90",
    )  # fmt: skip


@pytest.mark.parametrize("case", [c for c in H200 if c["map"]], ids=lambda c: c["id"])
def test_encoding_is_the_drivers(case):
    """cuTensorMapEncodeTiled of driver 580.159 on an H200: the 64 bytes that matter."""
    m = _of_driver(case["arguments"])
    assert encode(m)[:64].hex() == case["map"]
    assert decode(bytes.fromhex(case["map"]) + bytes(64)) == m


@pytest.mark.parametrize("case", [c for c in H200 if not c["map"]], ids=lambda c: c["id"])
def test_what_the_driver_refuses_is_refused(case):
    with pytest.raises((Unmodelled, Misaligned, ValueError, IndexError)):
        encode(_of_driver(case["arguments"]))


@pytest.mark.parametrize(
    ("field", "ordinal", "value", "expected"),
    [
        ("global_address", None, 0x1000, {"address": 0x1000}),
        ("rank", None, 4, {}),
        ("box_dim", 1, 100, {"box": (64, 100, 2, 2, 2)}),
        ("global_dim", 2, 1 << 20, {"dims": (64, 32, 1 << 20, 8, 4)}),
        ("global_stride", 1, (1 << 39) + 16, {"strides": (128, (1 << 39) + 16, 65536, 524288)}),
        ("element_stride", 3, 5, {"element_strides": (1, 1, 1, 5, 1)}),
        ("elemtype", None, 6, {"type": "f16"}),
        ("swizzle_mode", None, 3, {}),
        ("swizzle_atomicity", None, 3, {"atom": "64B"}),
        ("fill_mode", None, 1, {"fill": "nan"}),
    ],
)
def test_replace_changes_one_field(field, ordinal, value, expected):
    assert decode(tensormap.replace(encode(MAP), field, ordinal, value)) == replace(MAP, **expected)


def test_replace_by_tf32_and_back():
    raw = tensormap.replace(encode(replace(MAP, box=(32, 1, 1, 1, 1))), "elemtype", None, 11)
    assert decode(raw).type == "tf32"
    assert decode(tensormap.replace(raw, "elemtype", None, 8)).type == "f32.ftz"


@pytest.mark.parametrize(
    ("field", "ordinal", "value"),
    [("elemtype", None, 13), ("box_dim", 5, 1), ("global_stride", 4, 16), ("colour", None, 0)],
)
def test_replace_of_unknown_fields_and_values(field, ordinal, value):
    with pytest.raises(Unmodelled):
        tensormap.replace(encode(MAP), field, ordinal, value)
