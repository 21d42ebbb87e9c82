"""Decoding: operands become the right rows and bits, and what is not modelled is refused."""

from __future__ import annotations

import numpy as np
import pytest

from flash_attn_fp8.sim import decode
from flash_attn_fp8.sim.errors import Unmodelled
from flash_attn_fp8.sim.ptx.program import Symbol
from tests.sim.lane.running import program, run_lines

_REGISTERS = {
    "%r1": "b32",
    "%r2": "b32",
    "%r3": "b32",
    "%rs1": "b16",
    "%rs2": "b16",
    "%rd1": "b64",
    "%rd2": "b64",
    "%rq1": "b128",
    "%rq2": "b128",
    "%p1": "pred",
}


def _one(line: str, result: str) -> int:
    return int(run_lines([line], [], [result], np.zeros((1, 0), dtype=np.uint64))[0, 0])


@pytest.mark.parametrize(
    ("line", "result", "bits"),
    [
        ("mov.b32 $0, -1", "b32", 0xFFFFFFFF),
        ("mov.b16 $0, -2", "b16", 0xFFFE),
        ("mov.u64 $0, -1", "b64", 0xFFFFFFFFFFFFFFFF),
        ("mov.f32 $0, 0f3F800000", "f32", 0x3F800000),
        ("mov.b32 $0, 0fFF800000", "b32", 0xFF800000),
        ("mov.b64 $0, 0d3FF0000000000000", "b64", 0x3FF0000000000000),
        ("add.f32 $0, 0f3F800000, 0d3FF0000000000000", "f32", 0x40000000),
        ("add.f64 $0, 0f3F800000, 0d3FF0000000000000", "f64", 0x4000000000000000),
        ("add.s32 $0, 0x7fffffff, 1", "b32", 0x80000000),
        ("mul.wide.s32 $0, -3, 5", "b64", (1 << 64) - 15),
        ("mov.b32 $0, %tid.x", "b32", 0),
    ],
)
def test_immediates(line: str, result: str, bits: int) -> None:
    assert _one(line, result) == bits


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.b32 %r1, %r2",
        "add.s32.wild %r1, %r2, %r3",
        "add.s32 %r1, %r2",
        "add.s32 %r1, %r2, %rd1",
        "add.s64 %rd1, %r2, %rd2",
        "add.f32 %r1, %r2, 1",
        "fma.rn.f16x2 %r1, %r2, %r2, 0f3F800000",
        "fma.f32 %r1, %r2, %r2, %r3",
        "fma.rn.rz.f32 %r1, %r2, %r2, %r3",
        "add.rz.f64 %rd1, %rd1, %rd2",
        "cvt.rs.bf16x2.f32 %r1, %r2, %r3, %r1",
        "cvt.f16.f32 %rs1, %r1",
        "cvt.s32.f32 %r1, %r2",
        "cvt.rn.e4m3x2.f32 %rs1, %r1, %r2",
        "setp.lt.b32 %p1, %r1, %r2",
        "setp.equ.s32 %p1, %r1, %r2",
        "mov.b32 %r1, %pm0",
        "mov.b32 %r1, {%r2, %r3}",
        "mov.b32 %r1, %undeclared",
        "mov.b16 %rs1, 65536",
        "vadd.s32.s32.s32 %r1, %r2, %r3",
        "bra nowhere",
        "_mov.b64 %rd1, %rd2",
        "_max3.f32 %r1, %r1, %r2, %r3",
        "xor.f32 %r1, %r2, %r3",
        "prmt.b32.f5e %r1, %r2, %r3, %r1",
    ],
)
def test_what_is_not_modelled_names_the_line(line: str) -> None:
    with pytest.raises(Unmodelled, match="line 2: ") as caught:
        decode.decode(program("mov.b32 %r1, 0\n" + line, _REGISTERS))
    assert line.split()[0] in str(caught.value)


def test_constants_share_rows_and_registers_get_rows_only_where_used() -> None:
    code = decode.decode(program("add.s32 %r1, %r1, 7\nadd.s32 %r2, %r1, 7\nret", _REGISTERS))
    assert code.n_rows == 3
    assert sorted(code.rows) == ["%r1", "%r2"]
    assert [source for _, source in code.constants] == [7]


def test_special_registers_and_addresses_are_filled_per_warp() -> None:
    code = decode.decode(program("mov.u32 %r1, %tid.x\nmov.u64 %rd1, buffer\nret", _REGISTERS))
    seen = []

    def resolve(source: object) -> object:
        seen.append(source)
        return 0x1000 if isinstance(source, Symbol) else np.arange(64, 96, dtype=np.uint64)

    rows = code.registers(resolve)  # type: ignore[arg-type]
    assert len(seen) == 2
    assert any((row == np.arange(64, 96)).all() for row in rows)
    assert any((row == 0x1000).all() for row in rows)


def test_moves_of_vectors_and_b128() -> None:
    inputs = np.array([[0x1122334455667788, 0x99AABBCCDDEEFF00]], dtype=np.uint64)
    lines = [
        "mov.b64 {$0, $1}, %0",
        "mov.b64 {$2, _}, %1",
        "mov.b64 $3, {$1, $0}",
    ]
    got = run_lines(lines, ["b64", "b64"], ["b32", "b32", "b32", "b64"], inputs)[0]
    assert [hex(value) for value in got] == [
        "0x55667788",
        "0x11223344",
        "0xddeeff00",
        "0x5566778811223344",
    ]
    lines = ["mov.b128 $0, {%0, %1}", "mov.b128 {$2, $1}, $0"]
    # The kernel's b128 register is no result of its own: its halves are.
    got = run_lines(lines, ["b64", "b64"], ["b128", "b64", "b64"], inputs)[0]
    assert got[2] == inputs[0, 0]
    assert got[1] == inputs[0, 1]


def test_swapping_the_halves_of_a_pair_of_registers() -> None:
    code = decode.decode(
        program("mov.b128 %rq1, {%rd1, %rd2}\nmov.b128 {%rd2, %rd1}, %rq1\nret", _REGISTERS)
    )
    assert code.rows["%rq1"] + 1 not in code.rows.values()


def test_the_first_micro_operation_counts_and_the_others_do_not() -> None:
    code = decode.decode(program("setp.eq.and.b32 %p1, %r1, %r2, %p1\nret", _REGISTERS))
    counts = code.micro[:, decode.COUNTS]
    assert counts.tolist() == [1, *[0] * (len(counts) - 3), 1, 0]
    assert code.instruction(len(counts) - 1) is None
    first = code.instruction(0)
    assert first is not None
    assert first.opcode == "setp.eq.and.b32"
