"""Bugs planted in our own kernels, one a test: the finding has the right name and says where.

A plant is an edit of a section of the PTX. `says` are patterns that the message must have, among
them the PTX lines that one would want: given as the start of the instruction's text, they stand for
`PTX line N: text` with the number that the line has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from flash_attn_fp8.sim.errors import (
    BarrierMisuse,
    Deadlock,
    Finding,
    OutOfBounds,
    Race,
    TensorMemoryMisuse,
    Uninitialised,
)
from flash_attn_fp8.sim.launch import Buffer
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.schedule import Adversarial, Random
from tests.sim.kernels import chain, gemm
from tests.sim.planted.mutants import edit, line_of, section, without

LOAD_A = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%to_a]"
LOAD_B = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%to_b]"
STORE_C = "@%storer cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map_c"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%d]"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
STORE_SHARED = "st.shared.v4.b32 [%to_b]"
ACC_LOAD = "tcgen05.ld.sync.aligned.32x32b.x8.b32"
TRY_WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %ready, "
PASSES = "setp.eq.u32 %ready, 0, 0;"
ARRIVE_ACC = "@%leader mbarrier.arrive.shared::cta.b64 _, [%acc_empty];"


@dataclass(frozen=True)
class Plant:
    """A bug: `damage` makes the text, `tamper` changes the problem before it runs."""

    kind: type[Finding]
    damage: Callable[[str], str]
    says: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    tamper: Callable[[gemm.Problem], None] = field(default=lambda problem: None)


def left_out(name: str, instruction: str) -> Callable[[str], str]:
    return lambda text: without(text, name, instruction)


def changed(name: str, old: str, new: str) -> Callable[[str], str]:
    return lambda text: edit(text, name, old, new)


def not_waiting(name: str, operands: str) -> Callable[[str], str]:
    return changed(name, TRY_WAIT + operands, PASSES)


def flipped(name: str, operands: str) -> Callable[[str], str]:
    """The wait for the phase of the other parity."""
    barrier, parity = operands.removesuffix(";").split(", ")
    new = f"xor.b32 %scratch, {parity}, 1; {TRY_WAIT}{barrier}, %scratch;"
    return changed(name, TRY_WAIT + operands, new)


def moved(instruction: str, out_of: str, before: str, into: str) -> Callable[[str], str]:
    """`instruction` of one section goes before another instruction, on its line."""

    def damage(text: str) -> str:
        return edit(without(text, out_of, instruction), into, before, f"{instruction} {before}")

    return damage


def both(*damages: Callable[[str], str]) -> Callable[[str], str]:
    def damage(text: str) -> str:
        for one in damages:
            text = one(text)
        return text

    return damage


def shrink(index: int, nbytes: int) -> Callable[[gemm.Problem], None]:
    """The buffer ends earlier than the matrix."""

    def tamper(problem: gemm.Problem) -> None:
        b = problem.buffers[index]
        problem.buffers[index] = Buffer(b.name, b.address, b.nbytes - nbytes, b.writable)

    return tamper


def taller_map(problem: gemm.Problem) -> None:
    """C's tensor map says one tile of rows more, and starts one row later."""
    m = problem.maps["c"]
    rows = m.dims[1]
    problem.maps["c"] = replace(m, address=m.address + m.strides[0], dims=(m.dims[0], rows))


GEMM: dict[str, Plant] = {
    # -------------------------------------------------------------------- waits that are missing
    "load does not wait for the buffer": Plant(
        Race,
        not_waiting("load_wait", "[%empty], %parity;"),
        (r"shared memory\+0x\w+ is written by a copy that completes on mbarrier full\[0\], which "
         r"nothing orders after it was written by a copy that completes on mbarrier full\[0\]",),
        (LOAD_A,),
    ),
    "MMA does not wait for the load": Plant(
        Race,
        not_waiting("mma_wait_full", "[%full], %parity;"),
        (r"read by the tensor core operations of warp 5",
         r"written by a copy that completes on mbarrier full\[0\]"),
        (MMA, LOAD_A),
    ),
    "MMA does not wait for an empty accumulator": Plant(
        Race,
        not_waiting("mma_wait_accumulator", "[%acc_empty], %acc_parity;"),
        (r"tensor memory lanes \d+-\d+ column \d+ is written by the tensor core operations of "
         "warp 5", "read by a tcgen05.ld of warp [0-3]"),
        (MMA, ACC_LOAD),
    ),
    "epilogue does not wait for the accumulator": Plant(
        Uninitialised,
        not_waiting("epilogue_wait_accumulator", "[%acc_full], %acc_parity;"),
        (r"tensor memory lane \d+ column 0 is read by a tcgen05.ld of warp [0-3]",),
        (ACC_LOAD,),
    ),
    # -------------------------------------------------------------------------- flipped phases
    "load's parity is flipped": Plant(
        Deadlock,
        flipped("load_wait", "[%empty], %parity;"),
        (r"warp 4 waits: for the end of phase 0 of mbarrier empty\[0\]", "1 of 1 arrivals"),
        (f"{TRY_WAIT}[%empty]",),
    ),
    "MMA's parity is flipped": Plant(
        Finding,  # a race or a deadlock: which depends on whether the load was first
        flipped("mma_wait_full", "[%full], %parity;"),
        (r"mbarrier full\[\d\]", "warp 5"),
    ),
    "epilogue's parity is flipped": Plant(
        Uninitialised,
        flipped("epilogue_wait_accumulator", "[%acc_full], %acc_parity;"),
        ("tcgen05.ld of warp [0-3]",),
        (ACC_LOAD,),
    ),
    # ---------------------------------------------------------------------------- proxy fences
    "no proxy fence before the TMA store": Plant(
        Race,
        left_out("epilogue_store", "fence.proxy.async.shared::cta;"),
        (r"read by bulk copies of warp 0", "written by warp [0-3]"),
        (STORE_C, STORE_SHARED),
    ),
    "no fence of mbarrier.init": Plant(
        Race,
        left_out("init", "fence.mbarrier_init.release.cluster;"),
        (r"mbarrier \w+ ?\w*\[\d\] is used by warp \d",
         "initialisation by mbarrier.init of warp 4 visible to the asynchronous proxy"),
    ),
    # ------------------------------------------------------------------------------- expect-tx
    "2 bytes too many are expected": Plant(
        Deadlock,
        changed("load_copy", "24576", "24578"),
        (r"mbarrier full\[0\] phase 0 lacks 2 bytes; so far warp 4", "warp 5 waits"),
        (f"{TRY_WAIT}[%full]",),
    ),
    "2 bytes too few are expected": Plant(
        Deadlock,
        changed("load_copy", "24576", "24574"),
        (r"mbarrier full\[0\] phase 0 lacks -2 bytes; so far warp 4", "warp 5 waits"),
        (f"{TRY_WAIT}[%full]",),
    ),
    "nothing is expected": Plant(
        Finding,
        changed("load_copy", "24576", "0"),
        (r"mbarrier full\[\d\]",),
    ),
    # --------------------------------------------------------------------------- tensor memory
    "the two accumulators overlap": Plant(
        Race,
        both(
            changed("mma", "mad.lo.u32 %d, %acc, 64, %tmem;", "mad.lo.u32 %d, %acc, 32, %tmem;"),
            changed("epilogue", "mad.lo.u32 %source, %acc, 64", "mad.lo.u32 %source, %acc, 32"),
        ),
        ("tensor memory lanes .* column 3[2-9]|tensor memory lanes .* column [45]",
         "the tensor core operations of warp 5"),
    ),
    "the tensor memory is not given back": Plant(
        TensorMemoryMisuse,
        left_out("finish", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 128;"),
        (r"cta\(0, 0, 0\) exits with 128 columns of tensor memory allocated",),
    ),
    "half of the tensor memory is given back": Plant(
        TensorMemoryMisuse,
        changed("finish", "%tmem, 128;", "%tmem, 64;"),
        ("64 columns from 0 are freed; allocated are 128 from 0", "warp 5"),
        ("tcgen05.dealloc",),
    ),
    "it is given back before the last load": Plant(
        Race,
        left_out("finish", "bar.sync 0;"),
        ("tensor memory lanes .* is freed by warp 5", "it was read by a tcgen05.ld of warp [0-3]"),
        ("tcgen05.dealloc", ACC_LOAD),
    ),
    "too few columns are allocated": Plant(
        OutOfBounds,
        both(
            changed("allocate", "[%scratch], 128;", "[%scratch], 64;"),
            changed("finish", "%tmem, 128;", "%tmem, 64;"),
        ),
        ("tensor memory column 64 is (read|written), and is not allocated", "64 columns"),
        (MMA,),
    ),
    "columns that are not allocated are read": Plant(
        OutOfBounds,
        changed("epilogue_chunk", "}, [%source];", "}, [%source+128];"),
        ("tensor memory column 128 is read, and is not allocated", "warp [0-3]"),
        (ACC_LOAD,),
    ),
    "another warp's lanes are read": Plant(
        OutOfBounds,
        changed("epilogue", "shl.b32 %source, %warp, 21;", "mov.u32 %source, 0;"),
        (r"warp [1-3] addresses lanes \[0, 32\)", r"its own are \[\d+, \d+\)"),
        (ACC_LOAD,),
    ),
    # ----------------------------------------------------------------------------- early, late
    "the buffer is released before it is read": Plant(
        Race,
        moved(f"{COMMIT}[%empty];", "mma_release", "shr.u32 %a_low, %to_a, 4;", "mma_issue"),
        ("written by a copy that completes on mbarrier full", "read by the tensor core operations"),
        (LOAD_A, MMA),
    ),
    "the buffer is released by an arrival instead of a commit": Plant(
        Race,
        changed("mma_release", f"{COMMIT}[%empty];",
                "mbarrier.arrive.shared::cta.b64 _, [%empty];"),
        ("written by a copy that completes on mbarrier full", "read by the tensor core operations"),
        (LOAD_A, MMA),
    ),
    "the accumulator is released before it is read": Plant(
        Race,
        moved(ARRIVE_ACC, "epilogue_release", "tcgen05.fence::after_thread_sync;",
              "epilogue_wait_accumulator"),
        ("is written by the tensor core operations of warp 5", "read by a tcgen05.ld of warp"),
        (MMA, ACC_LOAD),
    ),
    "the last load is not waited for, nor used, before the accumulator is released": Plant(
        Race,
        both(
            left_out("epilogue_chunk", "tcgen05.wait::ld.sync.aligned;"),
            changed("epilogue_release", "tcgen05.fence::before_thread_sync;",
                    f"{ACC_LOAD} {{%v8, %v9, %v10, %v11, %v12, %v13, %v14, %v15}}, [%source+-8];"),
        ),
        ("is written by the tensor core operations of warp 5", "read by a tcgen05.ld of warp"),
        (MMA,),
    ),
    "the accumulator is announced before the last MMA": Plant(
        Race,
        moved(f"{COMMIT}[%acc_full];", "mma_commit", "tcgen05.fence::after_thread_sync;",
              "mma_wait_accumulator"),
        ("read by a tcgen05.ld of warp", "written by the tensor core operations of warp 5"),
        (ACC_LOAD, MMA),
    ),
    "the buffer's release is not committed": Plant(
        Deadlock,
        left_out("mma_release", f"{COMMIT}[%empty];"),
        (r"warp 4 waits: for the end of phase 0 of mbarrier empty\[0\] phase 0 lacks 1 of 1",),
        (f"{TRY_WAIT}[%empty]",),
    ),
    "the accumulator is not committed": Plant(
        Deadlock,
        left_out("mma_commit", f"{COMMIT}[%acc_full];"),
        (r"warp 0 waits: .* mbarrier accumulator full\[0\] phase 0 lacks 1 of 1 arrivals",),
        (f"{TRY_WAIT}[%acc_full]",),
    ),
    # ---------------------------------------------------------------------------------- counts
    "an mbarrier expects too many arrivals": Plant(
        Deadlock,
        changed("init", "[%barriers+64], 4;", "[%barriers+64], 5;"),
        (r"warp 5 waits: .* mbarrier accumulator empty\[0\] phase 0 lacks 1 of 5 arrivals; so far "
         "warp [0-3]",),
        (f"{TRY_WAIT}[%acc_empty]",),
    ),
    "an mbarrier expects too few arrivals": Plant(
        Race,
        changed("init", "[%barriers+64], 4;", "[%barriers+64], 3;"),
        ("is written by the tensor core operations of warp 5", "read by a tcgen05.ld of warp"),
        (MMA, ACC_LOAD),
    ),
    "all lanes arrive": Plant(
        BarrierMisuse,
        changed("epilogue_release", "@%leader mbarrier", "mbarrier"),
        (r"mbarrier accumulator empty\[0\] \(phase 0\) expects 4 arrivals, and warp \d makes 32",),
        ("mbarrier.arrive.shared::cta.b64 _, [%acc_empty]",),
    ),
    "an mbarrier is not initialised": Plant(
        BarrierMisuse,
        left_out("init", "mbarrier.init.shared::cta.b64 [%barriers+56], 1;"),
        (r"no mbarrier is initialised at shared memory\+0x16438; the nearest is mbarrier",),
        (f"{COMMIT}[%acc_full]",),
    ),
    "a named barrier does not wait for all warps": Plant(
        Uninitialised,
        changed("epilogue_store", "bar.sync 1, 128;", "bar.sync 1, 96;"),
        (r"shared memory\+0x\w+ is read by bulk copies of warp 0, and nothing has written it",),
        (STORE_C,),
    ),
    "warps differ in a named barrier's number of threads": Plant(
        BarrierMisuse,
        changed("epilogue_store", "bar.sync 1, 128;",
                "mad.lo.u32 %scratch, %warp, 32, 64; bar.sync 1, %scratch;"),
        (r"barrier 1: warp \d expects \d+ threads, those before \d+",),
        ("mad.lo.u32 %scratch, %warp, 32, 64; bar.sync 1",),
    ),
    "a named barrier waits for a warp that never comes": Plant(
        Deadlock,
        both(
            changed("epilogue_store", "bar.sync 1, 128;", "bar.sync 1, 160;"),
            changed("epilogue_wait_store", "bar.sync 1, 128;", "bar.sync 1, 160;"),
        ),
        ("barrier 1 has 128 of 160 threads; so far warp 0, warp 1, warp 2, warp 3|"
         "barrier 1 has 128 of 160 threads; so far warp",),
        ("bar.sync 1, 160;",),
    ),
    # ------------------------------------------------------------------------------ out of bounds
    "a TMA store past the end of C": Plant(
        OutOfBounds,
        lambda text: text,
        (r"global access of \d+ bytes at 0x\w+ is outside every buffer; the nearest is C "
         r"\(65536 bytes\), passed by 128 bytes", "row 127 of the box at", "tensor map at"),
        (STORE_C,),
        taller_map,
    ),
    "a TMA store at a negative row": Plant(
        OutOfBounds,
        both(
            changed("epilogue_store", "{%column, %row}", "{%column, %scratch}"),
            changed("epilogue_store", "bar.sync 1, 128;",
                    "bar.sync 1, 128; sub.u32 %scratch, %row, 1;"),
        ),
        (r"a store or reduction at negative coordinates: box at \[0, -1\]",),
        (STORE_C,),
    ),
    "a plain store past the end": Plant(
        OutOfBounds,
        lambda text: text,
        (r"global access of 4 bytes at 0x\w+ is outside every buffer; the nearest is row_max "
         r"\(2044 bytes\), passed by 4 bytes", "warp 3"),
        ("st.global.f32 [%at], %largest;",),
        shrink(4, 4),
    ),
    "a plain load past the end": Plant(
        OutOfBounds,
        lambda text: text,
        (r"global access of 16 bytes at 0x\w+ is outside every buffer; the nearest is bias "
         r"\(508 bytes\), passed by 4 bytes", "warp [0-3]"),
        ("ld.global.nc.v4.f32 {%b0, %b1, %b2, %b3}, [%at+16]",),
        shrink(3, 4),
    ),
    "a TMA load past the end of A": Plant(
        OutOfBounds,
        lambda text: text,
        (r"the nearest is A \(131056 bytes\), passed by 16 bytes", "row 127 of the box", "warp 4"),
        (LOAD_A,),
        shrink(0, 16),
    ),
    "a store to A, which is read-only": Plant(
        OutOfBounds,
        lambda text: text,
        ("write to A, which is read-only", "warp 0"),
        (STORE_C,),
        lambda problem: problem.maps.update(
            c=replace(problem.maps["c"], address=problem.a.ctypes.data)
        ),
    ),
    # -------------------------------------------------------------------------------- descriptors
    "a matrix descriptor's stride reaches into the next stage": Plant(
        Race,
        changed("mma_issue", "mov.b64 %b_desc, {%b_low, 0x40004040};",
                "mov.b64 %b_desc, {%b_low, 0x40004080};"),
        (r"shared memory\+0x\w+ is read by the tensor core operations of warp 5, which nothing "
         r"orders after it was written by a copy that completes on mbarrier full\[1\]",),
        (MMA, LOAD_B),
    ),
    "a matrix descriptor's stride reaches what nobody has written": Plant(
        Uninitialised,
        changed("mma_issue", "mov.b64 %b_desc, {%b_low, 0x40004040};",
                "mov.b64 %b_desc, {%b_low, 0x40004100};"),
        (r"shared memory\+0x\w+ is read by the tensor core operations of warp 5, and nothing has",),
        (MMA,),
    ),
    # -------------------------------------------------------------------------------- bulk groups
    "the last store's reads are not waited for": Plant(
        Race,
        left_out("epilogue_wait_store", "@%storer cp.async.bulk.wait_group.read 0;"),
        ("is written by warp [0-3]", "read by bulk copies of warp 0"),
        (STORE_SHARED, STORE_C),
    ),
    "the other warps do not know of that wait": Plant(
        Race,
        left_out("epilogue_wait_store", "bar.sync 1, 128;"),
        ("is written by warp [1-3]", "read by bulk copies of warp 0"),
        (STORE_SHARED, STORE_C),
    ),
    "the store is not committed to a group": Plant(
        Race,
        left_out("epilogue_store", "@%storer cp.async.bulk.commit_group;"),
        ("is written by warp [0-3]", "read by bulk copies of warp 0"),
        (STORE_SHARED, STORE_C),
    ),
    "the CTA exits while its last store reads": Plant(
        Race,
        left_out("epilogue_end", "@%storer cp.async.bulk.wait_group 0;"),
        (r"cta\(0, 0, 0\) exits while shared memory\+0x\w+ may still be read by bulk copies of "
         "warp 0",),
        (STORE_C,),
    ),
    "others store after the TMA store has begun": Plant(
        Finding,
        left_out("epilogue_store", "bar.sync 1, 128;"),
        ("bulk copies of warp 0",),
        (STORE_C,),
    ),
}  # fmt: skip

CHAIN_P = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%low]"
CHAIN_O = "tcgen05.mma.cta_group::1.kind::f16 [%at_o]"
CHAIN_S = "tcgen05.mma.cta_group::1.kind::f16 [%at_s]"
CHAIN: dict[str, Plant] = {
    "no proxy fence before an MMA reads what threads stored": Plant(
        Race,
        left_out("threads_v", "fence.proxy.async.shared::cta;"),
        ("read by the tensor core operations of warp 5", "written by warp [0-3]"),
        (CHAIN_O, "st.shared.v4.b32 [%place+24576]"),
    ),
    "no tcgen05.wait::st": Plant(
        Race,
        left_out("threads_p_release", "tcgen05.wait::st.sync.aligned;"),
        ("tensor memory lanes .* is read by the tensor core operations of warp 5",
         "written by a tcgen05.st of warp [0-3]"),
        (CHAIN_O, CHAIN_P),
    ),
    "MMA does not wait for P": Plant(
        Race,
        not_waiting("mma_wait_p", "[%p_full], %parity;"),
        ("read by the tensor core operations of warp 5", "written by warp [0-3]"),
        (CHAIN_O, "st.shared.v4.b32 [%place+24576]"),
    ),
    "P lies over a part of S that is still to be read": Plant(
        Race,
        changed("start", "add.u32 %at_p, %tmem, 64;", "add.u32 %at_p, %tmem, 32;"),
        ("tensor memory lanes .* column 3[2-9] is read by a tcgen05.ld of warp [0-3]",
         "written by a tcgen05.st of warp [0-3]"),
        ("tcgen05.ld.sync.aligned.32x32b.x8.b32", CHAIN_P),
    ),
    "P lies over O": Plant(
        TensorMemoryMisuse,
        changed("start", "add.u32 %at_p, %tmem, 64;", "add.u32 %at_p, %tmem, 160;"),
        (r"reads A from columns \[160, 168\) and writes D to \[128, 192\): they overlap", "warp 5"),
        (CHAIN_O,),
    ),
    "P is announced before S has been read": Plant(
        Race,
        moved("@%leader mbarrier.arrive.shared::cta.b64 _, [%p_full];", "threads_p_release",
              "mov.u32 %count, 0;", "threads_p"),
        ("tensor memory", "tensor core operations of warp 5", "tcgen05.(ld|st) of warp"),
    ),
    "S is not waited for": Plant(
        Uninitialised,
        not_waiting("threads_wait_s", "[%s_full], %parity;"),
        ("tensor memory lane .* is read by a tcgen05.ld of warp [0-3]",),
        ("tcgen05.ld.sync.aligned.32x32b.x8.b32",),
    ),
}  # fmt: skip


def _found(kernel: object, plant: Plant, schedule: object = None) -> tuple[Finding, str]:
    problem = kernel.Problem()  # type: ignore[attr-defined]
    text = plant.damage(kernel.TEXT)  # type: ignore[attr-defined]
    plant.tamper(problem)
    extra = {} if schedule is None else {"schedule": schedule}
    machine = Machine(barrier_names=kernel.NAMES, instruction_limit=100_000, **extra)
    with pytest.raises(plant.kind) as e:
        problem.run(text, machine)
    return e.value, text


def check_found(kernel: object, plant: Plant) -> None:
    error, text = _found(kernel, plant)
    message = str(error)
    for pattern in plant.says:
        assert re.search(pattern, message), f"{pattern!r} is not in\n{message}"
    for start in plant.lines:
        wanted = f"PTX line {line_of(text, start)}: "
        assert wanted in message, f"{wanted!r} ({start}) is not in\n{message}"
    assert "PTX line" in message or "exits with" in message
    assert "schedule: round robin" in message or "exits" in message


@pytest.mark.parametrize("kernel", [gemm, chain], ids=["gemm", "chain"])
def test_the_kernel_itself_is_clean_and_right(kernel):
    """All checks on, whatever the schedule."""
    for make in (None, *(lambda s=s: Random(s) for s in range(3)),
                 *(lambda s=s: Adversarial(s) for s in range(3))):  # fmt: skip
        problem = kernel.Problem()
        extra = {} if make is None else {"schedule": make}
        problem.run(kernel.TEXT, Machine(barrier_names=kernel.NAMES, **extra))
        assert problem.wrong() == 0


def test_two_ctas_share_the_tiles():
    problem = gemm.Problem()
    problem.run(grid=2)
    assert problem.wrong() == 0


@pytest.mark.parametrize("name", GEMM)
def test_in_the_gemm(name):
    check_found(gemm, GEMM[name])


@pytest.mark.parametrize("name", CHAIN)
def test_in_the_two_products(name):
    check_found(chain, CHAIN[name])


@pytest.mark.parametrize("name", GEMM)
def test_any_schedule_finds_it(name):
    """Perhaps under another name: what is met first depends on who runs first."""
    plant = replace(GEMM[name], kind=Finding)
    for schedule in (lambda: Random(1), lambda: Adversarial(1)):
        error, _ = _found(gemm, plant, schedule)
        assert "PTX line" in str(error) or "exits" in str(error)


def test_edits_must_name_what_is_there():
    with pytest.raises(ValueError, match="0 times"):
        edit(gemm.TEXT, "init", "no such thing", "")
    assert "LOAD_WAIT" in section(gemm.TEXT, "load_wait")
