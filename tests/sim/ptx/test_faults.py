"""What is not PTX, or not modelled, is refused with the line's number, the reason and the line."""

from __future__ import annotations

import re

import pytest

from flash_attn_fp8.sim.errors import PtxSyntaxError, Unmodelled
from flash_attn_fp8.sim.ptx.parse import parse
from tests.sim.ptx.printing import HEADER, module

DECLARED = ".reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<2>;"


def message(error: type[Exception], text: str) -> str:
    with pytest.raises(error) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("add.s32 %r1, %r2, %r9;", "%r9 is not declared here"),
        ("add.s32 %r1, %r2, ;", "no operand: ''"),
        ("add.s32 %r1 %r2;", "no operand: '%r1 %r2'"),
        ("add.s32 %r1, %r2", "no statement"),
        ("Add.s32 %r1, %r2;", "no statement"),
        ("ld.shared.b32 %r1, [%r2;", "can't tell the operands"),
        ("ld.shared.b32 %r1, [%r2]4;", "can't tell the operands"),
        ("mov.b64 {%r1, %r2, %rd1;", "can't tell the operands"),
        ("ld.shared.b32 %r1, [%r2+%r3];", "no offset: '%r3'"),
        ("ld.shared.b32 %r1, [%r2, %r3];", "coordinates in braces"),
        ("ld.shared.b32 %r1, [];", "no operand: ''"),
        ("mov.b32 %r1, %r2+4;", "adds to a register outside brackets"),
        ("mov.b32 %r1, %r2.x;", "no operand: '%r2.x'"),
        ("mov.b32 %r1, %tid.v;", "no operand: '%tid.v'"),
        ("mov.b32 %r1, %tid;", "%tid is not declared here"),
        ("mov.b32 %r1, 08;", "no operand: '08'"),
        ("mov.b32 %r1, 18446744073709551616;", "does not fit into 64 bits"),
        ("mov.b32 %r1, 0f3F80;", "no operand: '0f3F80'"),
        ("mov.b32 %r1, (1 << 4);", "no operand"),
        ("setp.eq.s32 %p1|3, %r1, %r2;", "each side of `|`"),
        ("selp.b32 %r1, %r2, %r3, !4;", "takes a predicate register"),
        ("@%r1 ret;", "%r1 is no predicate register"),
        ("@%p7 ret;", "%p7 is no predicate register"),
        ("bra NOWHERE;", "no label 'NOWHERE'"),
        ("bra L, M;", "no label 'L, M'"),
        ("bra %r1;", "no label '%r1'"),
        (".reg .b32 %r1;", "%r1 is declared twice"),
        (".reg .b33 x;", "no type of registers: .b33"),
        (".reg .b32 x y;", "no name of a register: 'x y'"),
        (".reg b32;", "takes a type and names"),
        (".local .align 3 .b8 x[4];", ".align 3 is no power of two"),
        (".local .b8 x[];", "only an extern .shared array"),
        (".local .pred x;", "no type of memory: .pred"),
        (".shared .b32 x = 1;", "has no initialiser"),
        (".surprise 3;", "unknown directive .surprise"),
        (".branchtargets L;", "needs a label of its own"),
        (".pragma nounroll;", ".pragma takes a string"),
    ],
)
def test_syntax_errors_in_a_function(body: str, why: str) -> None:
    found = message(PtxSyntaxError, module(f"// a comment\n\t{body}", DECLARED))
    assert found.startswith("PTX line 6: ")
    assert why in found
    assert found.endswith(f": {body}")


@pytest.mark.parametrize(
    ("body", "line", "why"),
    [
        ("L: ret;\nL: ret;", 6, "label L is there twice"),
        ("{ L: ret; }\nbra L;", 6, "no label 'L'"),
        ("{ .reg .b32 x; }\nmov.b32 x, 1;", 6, "x is not declared here"),
        ("ts: .branchtargets L;\nL: bra ts;", 6, "bra takes a label"),
        ("L:\nbrx.idx %r1, L;", 6, "brx.idx a list"),
        ("ts: .branchtargets L;\nbrx.idx %r1, ts;", 5, "no label 'L'"),
        ("ret;\n/* not closed\n", 6, "no statement"),
        ("{\nret;\n", 4, "a `}` is missing"),
    ],
)
def test_syntax_errors_across_lines(body: str, line: int, why: str) -> None:
    found = message(PtxSyntaxError, module(body, DECLARED))
    assert found.startswith(f"PTX line {line}: ")
    assert why in found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "PTX line 1: a module begins with .version and .target"),
        (".version 8.8\n.entry k() { }", "PTX line 2: a module begins with"),
        (".version 8.8\n.version 8.8", "PTX line 2: .version is there twice"),
        (".version x", "PTX line 1: .version needs a value"),
        (HEADER + "ret;", "PTX line 4: a directive belongs outside functions: ret;"),
        (HEADER + ".nonsense 1", "PTX line 4: unknown directive .nonsense"),
        (HEADER + ".visible .version 8.8", "PTX line 4: .visible must be followed by"),
        (HEADER + ".section x", "PTX line 4: .section takes a name and braces"),
        (HEADER + ".entry k() { } .entry k() { }", "PTX line 4: entry k is there twice"),
        (HEADER + ".entry k() .maxntid 1, 1, 1, 1 { }", "PTX line 4: .maxntid is there twice or"),
        (HEADER + ".entry k() .explicitcluster 2 { }", "PTX line 4: .explicitcluster is"),
        (HEADER + ".entry k() .fast { }", "PTX line 4: unknown directive .fast of an entry"),
        (HEADER + ".entry k() .maxntid 1", "PTX line 4: the text ends before this entry's `{`"),
        (HEADER + ".entry k(.param .u64)", "PTX line 4: no parameter: '.param .u64'"),
        (HEADER + ".entry k(.param .b8 a, .param .b8 a) { }", "parameter a is there twice"),
        (HEADER + ".global .b8 a[1] = {1, 2};", "does not initialise 1 elements"),
        (HEADER + ".global .b8 a[2] = 1;", "2 elements need braces"),
        (HEADER + ".global .b8 a[2] = {1, 2;", "can't tell the variables"),
        (HEADER + ".global .b8 a b;", "no variable: 'a b'"),
        (HEADER + ".global .b8 a = 256;", "256 does not fit into .b8"),
        (HEADER + ".global .f32 a = 1;", "1 initialises a variable of type .f32"),
        (HEADER + ".global .b8 a; .global .b8 a;", "a is declared twice"),
        (HEADER + ".global .b8 a", "no ';' follows"),
    ],
)
def test_syntax_errors_of_modules(text: str, why: str) -> None:
    assert why in message(PtxSyntaxError, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEADER + ".func f() { }", 4),
        (HEADER + ".extern .func (.param .b32 r) vprintf (.param .b64 a);", 4),
        (HEADER + ".alias f, g;", 4),
        (HEADER + ".extern .entry k();", 4),
        (HEADER + ".extern .global .b8 x[4];", 4),
        (HEADER + ".common .global .b8 x;", 4),
        (HEADER + ".global .attribute(.managed) .b8 x;", 4),
        (HEADER + ".global .u64 x = k;", 4),
        (HEADER + ".global .texref t;", 4),
        (HEADER + ".global .b16 x = 1.0;", 4),
        (HEADER + '.pragma "surprise";', 4),
        (HEADER + ".global .b8 x; .entry k(.param .b8 x) { }", 4),
        (".version 8.8\n.target sm_10, map_f64_to_f32", 2),
        (".version 8.8\n.target sm_80\n.address_size 32", 3),
        (module("call.uni (r), f, (a);"), 5),
        (module(".param .b64 a;"), 5),
        (module(".callprototype _ ();"), 5),
        (module(".reg .v4 .f32 x;"), 5),
        (module('.pragma "surprise";'), 5),
    ],
)
def test_what_is_not_modelled(text: str, line: int) -> None:
    found = message(Unmodelled, text)
    assert re.match(rf"PTX line {line}: .+: .+", found)
    assert found.endswith(text.split("\n")[line - 1])
