"""Headers, parameters, variables, registers, scopes and labels become the data they declare."""

from __future__ import annotations

import pytest

from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.ptx.program import (
    Address,
    Guard,
    Parameter,
    Program,
    Register,
    Symbol,
    Variable,
)
from tests.sim.ptx.printing import HEADER, entry_of, module


def variables(text: str) -> tuple[Variable, ...]:
    return parse(HEADER + text).variables


def test_heading_and_comments() -> None:
    text = "// Generated\n/* two\nlines */ .version 9.0\n.target sm_90a, debug\n.address_size 64\n"
    assert parse(text) == Program("9.0", "sm_90a", {}, ())


def test_debug_lines_and_hints_are_stepped_over() -> None:
    text = (
        HEADER
        + '.file 1 "/a//b.py"\n.pragma "enable_smem_spilling";\n'
        + ".entry k() { .reg .b32 %r<2>;\n"
        + ".loc 1 17 3\n.loc 1 5 0, function_name $L__info0, inlined_at 1 3 4\n"
        + '.pragma "nounroll", "frequency 3"; ;\n$L__tmp0: ret; // done: a; b\n}\n'
        + ".section .debug_str\n{\n$L__info0:\n.b8 107, 0 // k\n}\n"
    )
    entry = parse(text).entries["k"]
    assert [(i.opcode, i.line) for i in entry.instructions] == [("ret", 10)]
    assert entry.labels == {"$L__tmp0": 0}


def test_parameters_are_laid_out_by_their_alignment() -> None:
    entry = entry_of(
        "ret;",
        parameters="""
        .param .u8 flag,
        .param .align 64 .b8 map[128],
        .param .u64 .ptr .global .align 16 a,
        .param .u64 .ptr .align 1 b,
        .param .f32 scale,
        .param .align 8 .b8 shape[0x18],
        .param .b16 last[3]""",
    )
    assert entry.parameters == (
        Parameter("flag", 1, 1, 0),
        Parameter("map", 128, 64, 64),
        Parameter("a", 8, 8, 192),
        Parameter("b", 8, 8, 200),
        Parameter("scale", 4, 4, 208),
        Parameter("shape", 24, 8, 216),
        Parameter("last", 6, 2, 240),
    )


def test_an_entry_without_parameters_needs_no_parentheses() -> None:
    entries = parse(HEADER + ".weak .entry a { ret; } .visible .entry b() { exit; }").entries
    assert {n: (e.parameters, e.instructions[0].opcode) for n, e in entries.items()} == {
        "a": ((), "ret"),
        "b": ((), "exit"),
    }


def test_directives_of_the_header() -> None:
    text = (
        HEADER
        + ".entry k() .maxntid 256\n.reqntid 512, 1, 1 .minnctapersm 1 .maxnctapersm 2"
        + " .maxnreg 168 .explicitcluster .reqnctapercluster 2, 1, 1 .maxclusterrank 8"
        + ' .blocksareclusters .pragma "nounroll"; { ret; }'
    )
    assert parse(text).entries["k"].directives == {
        "maxntid": (256,),
        "reqntid": (512, 1, 1),
        "minnctapersm": (1,),
        "maxnctapersm": (2,),
        "maxnreg": (168,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
        "maxclusterrank": (8,),
        "blocksareclusters": (),
    }


def test_registers_by_range_list_and_name() -> None:
    entry = entry_of(".reg .pred \t%p<2>; .reg .b32 lo, hi, x<2>; .reg .b64 %SPL; .reg .b128 %rq;")
    predicates = {"%p0": "pred", "%p1": "pred"}
    words = {"lo": "b32", "hi": "b32", "x0": "b32", "x1": "b32"}
    assert entry.registers == predicates | words | {"%SPL": "b64", "%rq": "b128"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (".extern .shared .align 1024 .b8 dyn[];", Variable("dyn", "shared", 1024, 0)),
        (".shared .align 8 .b64 bars[4];", Variable("bars", "shared", 8, 32)),
        (".shared .v4 .f32 x[2][3];", Variable("x", "shared", 16, 96)),
        (".visible .global .u32 n;", Variable("n", "global", 4, 4)),
        (".global .u16 n = 0x102;", Variable("n", "global", 2, 2, b"\x02\x01")),
        (".global .s8 n[3] = {-1, 255};", Variable("n", "global", 1, 3, b"\xff\xff\0")),
        (".const .b8 s[] = {72, 105, 0};", Variable("s", "const", 1, 3, b"Hi\0")),
        (
            ".const .b16 m[2][2] = {{1}, {2, 3}};",
            Variable("m", "const", 2, 8, b"\1\0\0\0\2\0\3\0"),
        ),
        (".const .v2 .b8 v = {1, 2};", Variable("v", "const", 2, 2, b"\1\2")),
        (".const .f32 f[2] = {0f3F800000, 1.0};", Variable("f", "const", 4, 8, b"\0\0\x80?" * 2)),
        (".const .b32 f = 0f3F800000;", Variable("f", "const", 4, 4, b"\0\0\x80?")),
        (".const .f64 d = 0d3FF0000000000000;", Variable("d", "const", 8, 8, b"\0" * 6 + b"\xf0?")),
    ],
)
def test_variables_of_module_scope(text: str, found: Variable) -> None:
    assert variables(text) == (found,)


def test_one_declaration_of_several_variables() -> None:
    assert variables(".global .b8 a[2] = {1, 2}, b, c[2] = {3};") == (
        Variable("a", "global", 1, 2, b"\1\2"),
        Variable("b", "global", 1, 1),
        Variable("c", "global", 1, 2, b"\3\0"),
    )


def test_variables_of_function_scope_are_the_entrys() -> None:
    entry = entry_of(
        ".local .align 32 .b8 \t__local_depot0[192]; .extern .shared .align 16 .b8 dyn[];\n"
        "{ .shared .b32 x; ld.shared.b32 %r0, [x]; }\n{ .shared .b64 x; }",
        ".reg .b32 %r<1>;",
    )
    assert entry.variables == (
        Variable("__local_depot0", "local", 32, 192),
        Variable("dyn", "shared", 16, 0),
        Variable("x$1", "shared", 4, 4),
        Variable("x$2", "shared", 8, 8),
    )
    assert entry.instructions[0].operands[1] == Address(Symbol("x$1"))


WAIT = """{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r0], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
"""


def test_braces_scope_registers_and_labels() -> None:
    entry = entry_of(WAIT + WAIT + "ret;", ".reg .b32 %r<1>;")
    assert entry.registers == {"%r0": "b32", "P1$1": "pred", "P1$2": "pred"}
    assert entry.labels == {"LAB_WAIT$1": 0, "DONE$1": 3, "LAB_WAIT$2": 3, "DONE$2": 6}
    wait, leave, again = entry.instructions[3:6]
    assert wait.operands[0] == Register("P1$2")
    assert (leave.guard, leave.operands) == (Guard("P1$2", False), (Symbol("DONE$2"),))
    assert again.operands == (Symbol("LAB_WAIT$2"),)
    assert wait.text == "mbarrier.try_wait.parity.shared.b64 P1, [%r0], 0, 10000000;"


def test_an_inner_name_hides_the_outer_one_from_its_declaration_on() -> None:
    entry = entry_of(
        "mov.b32 x, 1; { mov.b32 x, 2; .reg .b32 x; mov.b32 x, 3; { mov.b32 x, 4; } }mov.b32 x, 5;",
        ".reg .b32 x;",
    )
    found = [i.operands[0] for i in entry.instructions]
    assert found == [Register(n) for n in ("x", "x", "x$1", "x$1", "x")]


def test_a_branch_goes_to_the_innermost_label_even_if_it_follows() -> None:
    entry = entry_of("L: bra L; { bra L; bra OUT; L: bra L; } OUT: ret;")
    targets = [i.operands[0] for i in entry.instructions[:-1]]
    assert targets == [Symbol(n) for n in ("L", "L$1", "OUT", "L$1")]
    assert entry.labels == {"L": 0, "L$1": 3, "OUT": 4}


def test_a_label_at_the_end_is_behind_the_last_instruction() -> None:
    assert entry_of("bra END; END:").labels == {"END": 1}


def test_unique_names_avoid_those_of_the_text() -> None:
    entry = entry_of("{ .reg .b32 x; } { .reg .b32 x; }", ".reg .b32 x$1;")
    assert entry.registers == {"x$1": "b32", "x$$1": "b32", "x$$2": "b32"}


def test_indirect_branches_and_their_lists() -> None:
    entry = entry_of(
        "{ ts: .branchtargets A, B, OUT; @%p0 brx.idx.uni %r0, ts; A: B: ret; } OUT: ret;",
        ".reg .b32 %r<1>; .reg .pred %p<1>;",
    )
    assert entry.instructions[0].operands == (Register("%r0"), Symbol("ts$1"))
    assert entry.branch_targets == {"ts$1": ("A$1", "B$1", "OUT")}
    assert entry.labels == {"A$1": 1, "B$1": 1, "OUT": 2}


def test_statements_may_share_lines_and_span_them() -> None:
    entry = entry_of("mov.b32 %r0, 1; mov.b32\n  %r0,\n  2; ret;", ".reg .b32 %r<1>;")
    found = [(i.line, i.text) for i in entry.instructions]
    assert found == [(5, "mov.b32 %r0, 1;"), (5, "mov.b32 %r0, 2;"), (7, "ret;")]


def test_names_of_different_entries_do_not_meet() -> None:
    body = "{ .reg .b32 %r<1>; .local .b8 d[4]; L: bra L; }"
    both = parse(HEADER + f".entry a() {body} .entry b() {body}").entries
    assert both["a"].labels == both["b"].labels == {"L": 0}
    assert both["a"].variables == both["b"].variables == (Variable("d", "local", 1, 4),)


def test_lines_of_windows() -> None:
    assert parse(module("ret;").replace("\n", "\r\n")).entries["k"].instructions[0].line == 5
