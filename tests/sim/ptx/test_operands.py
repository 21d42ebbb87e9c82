"""Each form of operand, guard and literal is read as the very data that it stands for."""

from __future__ import annotations

import struct

import pytest

from flash_attn_fp8.sim.ptx.program import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from tests.sim.ptx.printing import entry_of

DECLARED = """.reg .pred %p<9>; .reg .pred p, q; .reg .b16 %rs<9>; .reg .b32 %r<99>;
.reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .b128 %rq<2>; .shared .align 16 .b8 smem[64];"""
PARAMETERS = ".param .u64 in, .param .align 64 .b8 map[128]"


def r(n: int) -> Register:
    return Register(f"%r{n}")


def rd(n: int) -> Register:
    return Register(f"%rd{n}")


def p(n: int) -> Register:
    return Register(f"%p{n}")


def one(text: str) -> Instruction:
    """The only instruction of a kernel that says `text`."""
    (instruction,) = entry_of(text, DECLARED.replace("\n", " "), PARAMETERS).instructions
    assert (instruction.line, instruction.text) == (5, " ".join(text.split()))
    return instruction


def f64(value: float) -> Immediate:
    return Immediate(struct.unpack("<Q", struct.pack("<d", value))[0], "f64")


@pytest.mark.parametrize(
    ("text", "opcode", "operands"),
    [
        ("ret;", "ret", ()),
        ("bar.sync \t0;", "bar.sync", (Immediate(0),)),
        ("add.s32 %r1, %r2, -1;", "add.s32", (r(1), r(2), Immediate(-1))),
        ("add.s32 %r1,%r2,%r3 ;", "add.s32", (r(1), r(2), r(3))),
        ("mov.u32 %r1, %tid.x;", "mov.u32", (r(1), Special("%tid.x"))),
        ("mov.u32 %r1, %cluster_ctarank;", "mov.u32", (r(1), Special("%cluster_ctarank"))),
        ("mov.u32 %r1, WARP_SZ;", "mov.u32", (r(1), Immediate(32))),
        ("mov.u64 %rd1, smem;", "mov.u64", (rd(1), Symbol("smem"))),
        ("mov.u64 %rd1, smem+16;", "mov.u64", (rd(1), Symbol("smem", 16))),
        ("mov.b64 %rd1, map;", "mov.b64", (rd(1), Symbol("map"))),
        ("ld.param.b64 %rd1, [in];", "ld.param.b64", (rd(1), Address(Symbol("in")))),
        ("ld.param.b64 %rd1, [map+8];", "ld.param.b64", (rd(1), Address(Symbol("map"), 8))),
        ("ld.shared.b32 %r1, [%r2];", "ld.shared.b32", (r(1), Address(r(2)))),
        ("ld.shared.b32 %r1, [%r2+4];", "ld.shared.b32", (r(1), Address(r(2), 4))),
        ("ld.global.b32 %r1, [%rd2+-8];", "ld.global.b32", (r(1), Address(rd(2), -8))),
        ("ld.global.b32 %r1, [%rd2-8];", "ld.global.b32", (r(1), Address(rd(2), -8))),
        ("ld.global.b32 %r1, [ %rd2 + 0x10 ];", "ld.global.b32", (r(1), Address(rd(2), 16))),
        ("ld.shared.b32 %r1, [128];", "ld.shared.b32", (r(1), Address(None, 128))),
        ("mov.b64 {%r1, %r2}, %rd1;", "mov.b64", (Vector((r(1), r(2))), rd(1))),
        ("mov.b64{%r1,_},%rd1;", "mov.b64", (Vector((r(1), Sink())), rd(1))),
        (
            "mov.b128 %rq0, {%rd1, %rd2};",
            "mov.b128",
            (Register("%rq0"), Vector((rd(1), rd(2)))),
        ),
        (
            "st.shared.v4.b32 [%r1+16], {0, %r2, 0f3F800000, -1};",
            "st.shared.v4.b32",
            (
                Address(r(1), 16),
                Vector((Immediate(0), r(2), Immediate(0x3F800000, "f32"), Immediate(-1))),
            ),
        ),
        ("elect.sync %r1|%p2, -1;", "elect.sync", (Pair(r(1), p(2)), Immediate(-1))),
        ("elect.sync _|p, -1;", "elect.sync", (Pair(Sink(), Register("p")), Immediate(-1))),
        (
            "setp.lt.and.s32 p | q, %r1, %r2, !%p3;",
            "setp.lt.and.s32",
            (Pair(Register("p"), Register("q")), r(1), r(2), Negated(p(3))),
        ),
        (
            "mbarrier.arrive.shared::cluster.b64 _, [%r1], 1;",
            "mbarrier.arrive.shared::cluster.b64",
            (Sink(), Address(r(1)), Immediate(1)),
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%r1], [%rd1, {%r2, 0}], [%r3+8];",
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes",
            (Address(r(1)), Address(rd(1), 0, (r(2), Immediate(0))), Address(r(3), 8)),
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], [%r2 + 0x8], %rd1, %r3, 1;",
            "tcgen05.mma.cta_group::1.kind::f8f6f4",
            (Address(r(1)), Address(r(2), 8), rd(1), r(3), Immediate(1)),
        ),
        ("tcgen05.wait::st.sync.aligned;", "tcgen05.wait::st.sync.aligned", ()),
        (
            "ld.global.L1::no_allocate.b32\n%r1,\n[%rd1];",
            "ld.global.L1::no_allocate.b32",
            (r(1), Address(rd(1))),
        ),
    ],
)
def test_operands(text: str, opcode: str, operands: tuple[Operand, ...]) -> None:
    instruction = one(text)
    assert (instruction.opcode, instruction.operands) == (opcode, operands)
    assert instruction.guard is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Immediate(0)),
        ("-0", Immediate(0)),
        ("4294967295", Immediate(2**32 - 1)),
        ("-9223372036854775808", Immediate(-(2**63))),
        ("18446744073709551615", Immediate(2**64 - 1)),
        ("0xFEFFFFFF", Immediate(0xFEFFFFFF)),
        ("0Xfu", None),
        ("0xffU", Immediate(255)),
        ("7U", Immediate(7)),
        ("-0x10", Immediate(-16)),
        ("017", Immediate(15)),
        ("0b101", Immediate(5)),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("0Fff800000", Immediate(0xFF800000, "f32")),
        ("0d3FF0000000000000", Immediate(0x3FF0000000000000, "f64")),
        ("0D8000000000000000", Immediate(1 << 63, "f64")),
        ("1.0", f64(1)),
        ("-2.5e-3", f64(-2.5e-3)),
        (".5", f64(0.5)),
        ("1.", f64(1)),
        ("1E3", f64(1000)),
    ],
)
def test_literals(text: str, value: Immediate | None) -> None:
    if value is None:  # the manual's suffix is a capital U
        with pytest.raises(ValueError, match="no operand"):
            one(f"mov.b64 %rd1, {text};")
    else:
        assert one(f"mov.b64 %rd1, {text};").operands == (rd(1), value)


@pytest.mark.parametrize(
    ("text", "guard"),
    [
        ("@%p1 ret;", Guard("%p1", False)),
        ("@!%p1 ret;", Guard("%p1", True)),
        ("@p\tret;", Guard("p", False)),
        ("@ ! q ret;", Guard("q", True)),
    ],
)
def test_guards(text: str, guard: Guard) -> None:
    assert one(text).guard == guard


def test_parts_keep_double_colons_together() -> None:
    assert one("ld.shared::cta.L2::128B.b32 %r1, [%r2];").parts == (
        "ld",
        "shared::cta",
        "L2::128B",
        "b32",
    )


def test_every_special_register_of_the_manual() -> None:
    names = [f"%{n}.{c}" for n in ("tid", "ntid", "ctaid", "nctaid") for c in "xyzw"]
    names += [f"%{n}.{c}" for n in ("clusterid", "nclusterid") for c in "xyz"]
    names += [f"%{n}.{c}" for n in ("cluster_ctaid", "cluster_nctaid") for c in "xyz"]
    names += ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock64"]
    names += ["%is_explicit_cluster", "%cluster_ctarank", "%cluster_nctarank", "%clock"]
    names += ["%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"]
    names += ["%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size", "%current_graph_exec"]
    names += [f"%reserved_smem_offset_{n}" for n in ("begin", "end", "cap", "0", "1")]
    names += [f"%lanemask_{n}" for n in ("eq", "le", "lt", "ge", "gt")]
    names += [f"%envreg{n}" for n in range(32)] + [f"%pm{n}" for n in range(8)] + ["%pm3_64"]
    for name in names:
        assert one(f"mov.b64 %rd1, {name};").operands[1] == Special(name)
