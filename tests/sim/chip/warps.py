"""Cases of instructions of a warp, of barriers, of atomics, and of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.sim.chip.case import (
    Array,
    Case,
    array,
    choose,
    output,
    random_words,
    recorded,
    render,
    wait,
)

_FULL = 0xFFFFFFFF


def _warp(name: str, instruction: str, sources: np.ndarray, mask: int = _FULL) -> Case:
    text = render("warp", instruction=instruction, mask=f"{mask:#x}")
    return Case(name, text, (array(sources), output(256)))


def _sources(name: str, first: np.ndarray | None = None) -> np.ndarray:
    """Four random words a lane; the first ones given."""
    words = random_words(name, 128).reshape(32, 4)
    if first is not None:
        words[:, 0] = first
    return words


def _shuffles() -> list[Case]:
    cases = []
    for mode in ("up", "down", "bfly", "idx"):
        shuffle = f"shfl.sync.{mode}.b32 %r5|%p1, %r1, %r2, %r3, {_FULL:#x};"
        for amount in (0, 1, 3, 16, 31, 32, 37, 0xFFFFFFFF):
            for limit in (0, 31, 0x1F00, 0x181F, 0x1C03, 0x0C07, 0x1E1E, 0xFFFFFFFF):
                words = _sources(f"shfl {mode}")
                words[:, 1], words[:, 2] = amount, limit
                name = f"shfl.{mode} by {amount:#x} within {limit:#x}"
                cases.append(_warp(name, shuffle, words))
        cases.append(_warp(f"shfl.{mode} by anything", shuffle, _sources(f"any {mode}")))
    # One program, many operands: as one case each would be as many launches.
    return _joined(cases)


def _joined(cases: list[Case]) -> list[Case]:
    """Cases of the same program one after the other in one launch of several CTAs."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.ptx, []).append(case)
    joined = []
    for ptx, same in found.items():
        first = same[0]
        text = ptx.replace(
            "    mov.u32 %r0, %tid.x;\n",
            "    mov.u32 %r0, %tid.x;\n    mov.u32 %r1, %ctaid.x;\n"
            "    mad.wide.u32 %rd0, %r1, 512, %rd0;\n    mad.wide.u32 %rd1, %r1, 256, %rd1;\n",
        )
        sources = np.concatenate([_data(case.arguments[0]) for case in same])
        name = first.name.split(" of ")[0].split(" by ")[0]
        joined.append(Case(name, text, (Array(sources), output(256 * len(same))), ctas=len(same)))
    return joined


def _data(argument: object) -> np.ndarray:
    assert isinstance(argument, Array)
    return argument.data


def _votes() -> list[Case]:
    cases = []
    some = choose("votes", 32, [0, 0, 1])
    patterns = {"some": some, "all": np.ones(32), "none": np.zeros(32), "few": np.arange(32) < 5}
    masks = (_FULL, 0x0000FFF0, 0x80000001, 0x2A2A0F00)
    for mask in masks:
        for label, pattern in patterns.items():
            words = _sources("vote", pattern.astype(np.uint32))
            for mode in ("all", "any", "uni"):
                for sign in ("", "!"):
                    line = f"vote.sync.{mode}.pred %p1, {sign}%p0, {mask:#x};"
                    cases.append(
                        _warp(f"vote.{mode}{sign} {mask:#x} of {label}", line, words, mask)
                    )
            line = f"vote.sync.ballot.b32 %r5, %p0, {mask:#x};"
            cases.append(_warp(f"vote.ballot {mask:#x} of {label}", line, words, mask))
            for kind, register in (("b32", "%r1"), ("b64", "%rd2")):
                equal = _sources("match", choose(f"match {label}", 32, [3, 5, 9]).astype(np.uint32))
                equal[:, 1] = choose("upper", 32, [1, 2])
                if label == "all":
                    equal[:, :2] = 7
                line = f"match.sync.any.{kind} %r5, {register}, {mask:#x};"
                cases.append(_warp(f"match.any.{kind} {mask:#x} of {label}", line, equal, mask))
                line = f"match.sync.all.{kind} %r5|%p1, {register}, {mask:#x};"
                cases.append(_warp(f"match.all.{kind} {mask:#x} of {label}", line, equal, mask))
        line = f"elect.sync %r5|%p1, {mask:#x};"
        cases.append(_warp(f"elect {mask:#x}", line, _sources("elect"), mask))
        for operation in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32",
                          "and.b32", "or.b32", "xor.b32"):  # fmt: skip
            line = f"redux.sync.{operation} %r5, %r1, {mask:#x};"
            cases.append(_warp(f"redux.{operation} {mask:#x}", line, _sources("redux"), mask))
        line = f"activemask.b32 %r5;\n    bar.warp.sync {mask:#x};"
        cases.append(_warp(f"bar.warp {mask:#x}", line, _sources("bar"), mask))
    return _joined(cases)


# ------------------------------------------------------------------------------------ matrices


def _matrices() -> list[Case]:
    image = array((np.arange(1024) * 40503 % 65521).astype(np.uint16))
    rows = (np.arange(32) * 7 % 64) * 32  # 16 bytes each, everywhere, no two the same
    same = np.zeros(32, np.int64)
    values = random_words("matrices", 128)
    cases = []
    for count in (1, 2, 4):
        registers = "{" + ", ".join(f"%v{i}" for i in range(count)) + "}"
        for trans in ("", ".trans"):
            for label, offsets in (("", rows), (" of one row", same)):
                line = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r4];"
                name = f"ldmatrix.x{count}{trans}{label}"
                cases.append(_matrix(name, line, image, offsets, values))
            line = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r4], {registers};"
            cases.append(_matrix(f"stmatrix.x{count}{trans}", line, image, rows, values))
    line = "movmatrix.sync.aligned.m8n8.trans.b16 %v0, %v1;"
    cases.append(_matrix("movmatrix", line, image, rows, values))
    return cases


def _matrix(name: str, line: str, image: Array, offsets: np.ndarray, values: np.ndarray) -> Case:
    text = render("matrices", instruction=line)
    arguments = (image, array(offsets.astype(np.uint32)), array(values), output(2560))
    return Case(name, text, arguments, smem=2048)


# ------------------------------------------------------------------------- atomics and copies

_OPERATIONS = (
    *((o, t) for o in ("add", "min", "max") for t in ("u32", "s32", "u64", "s64")),
    *((o, t) for o in ("and", "or", "xor", "exch", "cas") for t in ("b32", "b64")),
    ("inc", "u32"), ("dec", "u32"), ("add", "f32"), ("add", "f64"),
    ("add.noftz", "f16x2"), ("add.noftz", "bf16x2"), ("add.noftz", "f16"), ("add.noftz", "bf16"),
    ("cas", "b16"),
)  # fmt: skip
_REGISTERS = {"32": ("%r8", "%r6", "%r7"), "64": ("%rd8", "%rd6", "%rd7")}


def _atomics() -> list[Case]:
    cases = []
    cells = np.arange(32)[::-1]
    for operation, kind in _OPERATIONS:
        if (operation, kind) == ("add", "s64"):
            continue  # PTX has none
        for space, address in (("global", "[%rd5]"), ("shared", "[%r5]")):
            for opcode in ("atom", "red"):
                if opcode == "red" and operation in ("exch", "cas"):
                    continue
                line = _atomic_line(opcode, space, address, operation, kind)
                name = f"{opcode}.{space}.{operation}.{kind}"
                cases.append(_atomic(name, line, cells, space, kind))
    for space, register in (("global", "%rd5"), ("shared", "g")):
        line = f"atom.add.f32 %f0, [{register}], %f6;"
        if space == "shared":
            line = f"{{ .reg .b64 g; cvt.u64.u32 g, %r5; cvta.shared.u64 g, g; {line} }}"
        cases.append(_atomic(f"atom.add.f32 in {space}", line, cells, space, "f32"))
    # All lanes in one cell: only what does not depend on their order can be compared.
    for operation, kind in (("add", "u32"), ("max", "s32"), ("xor", "b64"), ("inc", "u32")):
        for space, address in (("global", "[%rd5]"), ("shared", "[%r5]")):
            line = _atomic_line("red", space, address, operation, kind)
            cells_of_few = np.arange(32) % 3
            cases.append(
                _atomic(
                    f"red.{space}.{operation}.{kind} in few cells", line, cells_of_few, space, kind
                )
            )
    return cases


def _atomic_line(opcode: str, space: str, address: str, operation: str, kind: str) -> str:
    digits = "64" if "64" in kind else "32"
    d, b, c = _REGISTERS[digits]
    if kind in ("f32", "f64"):
        d, b = {"f32": ("%f0", "%f6"), "f64": ("%fd0", "%fd2")}[kind]
    before, after = "", ""
    if kind in ("f16", "bf16", "b16"):
        before = "{ .reg .b16 h0, h1, h2; cvt.u16.u32 h1, %r6; cvt.u16.u32 h2, %r7;\n    "
        d, b, c = "h0", "h1", "h2"
        after = " cvt.u32.u16 %r8, h0; }" if opcode == "atom" else " }"
    operands = f"{address}, {b}" + (f", {c}" if operation == "cas" else "")
    if opcode == "atom":
        operands = f"{d}, {operands}"
    return f"{before}{opcode}.{space}.{operation}.{kind} {operands};{after}"


def _atomic(name: str, line: str, cells: np.ndarray, space: str, kind: str) -> Case:
    text, rows = recorded(render("atomics", instruction=line), 32)
    memory = random_words(f"memory {kind}", 64).copy()
    sources = random_words(f"sources {kind}", 256).reshape(32, 8)
    if kind[0] in "fb" and "b32" not in kind and "b64" not in kind:
        memory, sources = _floats(kind, memory), _floats(kind, sources)
    sources[:, 0] = cells
    if ".cas" in name:  # half of them find what they compare with
        own = memory.reshape(32, 2)[cells]
        sources[::2, 2:4] = own[::2]
    if ".inc" in name or ".dec" in name:
        memory[::4] %= np.uint32(50)
        sources[::3, 2] = memory.reshape(32, 2)[cells][::3, 0] + 1
    return Case(name, text, (output(256, memory), array(sources), output(128 * rows)), smem=256)


def _floats(kind: str, words: np.ndarray) -> np.ndarray:
    """Numbers of like magnitudes, so that sums round; some zeros, subnormals and infinities."""
    flat = words.reshape(-1)
    if kind == "f64":
        numbers = (flat[::2].astype(np.float64) - 2.0**31) * 2.0**-20
        out = numbers.view(np.uint32).copy()
    elif kind == "f32":
        out = ((flat.astype(np.float64) - 2.0**31) * 2.0**-20).astype(np.float32).view(np.uint32)
        out[3::11], out[5::13] = 0x00000123, 0x80700000
    else:
        half = 0x3C00 if "bf" not in kind else 0x3F80
        halves = flat.view(np.uint16)
        out = ((halves & 0x83FF) | half).astype(np.uint16)
        out[3::11], out[5::13], out[7::17] = 0x0003, 0x8001, 0x7C00
        out = out.view(np.uint32)
    return out.reshape(words.shape)


def _copies() -> list[Case]:
    cases = []
    for size, caching in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        head = f"cp.async.{caching}.shared.global [%r4], [%rd0], {size}"
        used = choose(f"sizes {size}", 32, np.arange(size + 1))
        whole = np.full(32, size)
        finish = "\n    cp.async.commit_group;\n    cp.async.wait_group 0;"
        alternatives = {
            "": (f"{head};{finish}", whole),
            " zero fill": (f"{head}, %r2;{finish}", used),
            " ignoring some": (f"{head}, %p0;\n    cp.async.wait_all;", np.arange(32) % 3),
            " with a hint": (f"{head.replace('global', 'global.L2::128B')};{finish}", whole),
        }
        for label, (line, sizes) in alternatives.items():
            text, rows = recorded(render("cp_async", instruction=line), 32)
            source = array(random_words("cp.async", 128))
            arguments = (source, array(sizes.astype(np.uint32)), output(128 * rows))
            cases.append(Case(f"cp.async.{caching} {size}{label}", text, arguments, smem=512))
    for noinc, count, arrive in (
        (".noinc", 32, ""),
        ("", 32, "mbarrier.arrive.shared::cta.b64 _, [%r2];"),
    ):
        text, rows = recorded(
            render("cp_async_mbarrier", noinc=noinc, count=count, arrive=arrive, wait=wait("%r2")),
            32,
        )
        source = array(random_words("cp.async", 128))
        name = f"cp.async.mbarrier.arrive{noinc}"
        cases.append(Case(name, text, (source, output(128 * rows)), smem=528))
    return cases


# ------------------------------------------------------------------------- barriers, clusters


def _recording(
    file: str, threads: int, *arguments, name="", ctas=1, cluster=1, smem=2048, **values
):  # type: ignore[no-untyped-def]
    text, rows = recorded(render(file, **values), threads * ctas)
    return Case(
        name or file, text, (*arguments, output(4 * threads * ctas * rows)),
        threads=threads, ctas=ctas, cluster=cluster, smem=smem,
    )  # fmt: skip


def _others() -> list[Case]:
    from tests.sim.chip.case import Word

    return [
        _recording("mbarrier", 1),
        _recording(
            "mbarrier_warps", 64, wait_empty=wait("%r10", "%r11"), wait_full=wait("%r10", "%r11")
        ),
        _recording("barriers", 128),
        _recording("cluster", 32, name="cluster of 2", ctas=4, cluster=2, wait=wait("%r2")),
        _recording("cluster", 32, name="cluster of 4", ctas=4, cluster=4, wait=wait("%r2")),
        _recording("special", 96, ctas=3, smem=300),
        _recording("special", 96, name="special of 628", smem=500),
        _recording("memory", 32, array(random_words("memory", 256)), Word(0x9A8B7F01)),
    ]


def _faults() -> list[Case]:
    line = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%v0}, [%r4];"
    image, values = array(np.zeros(1024, np.uint16)), np.zeros(128, np.uint32)
    cases = [_matrix("ldmatrix of 8 bytes", line, image, np.arange(32) * 16 + 8, values)]
    lines = {
        "atom.shared of half a word": "atom.shared.add.u32 %r8, [%r5+2], %r6;",
        "atom.global of half a word": "atom.global.add.u32 %r8, [%rd5+2], %r6;",
        "st.shared of half a vector": "st.shared.v2.u32 [%r5+4], {%r6, %r7};",
        "st.global of half a vector": "st.global.v2.u32 [%rd5+4], {%r6, %r7};",
        "trap": "trap;",
    }
    cells = np.arange(32)
    cases += [_atomic(name, line, cells, "global", "u32") for name, line in lines.items()]
    return [replace(case, name=f"fault: {case.name}", faults=True) for case in cases]


CASES = [*_shuffles(), *_votes(), *_matrices(), *_atomics(), *_copies(), *_others(), *_faults()]
