"""SASS as data: which instructions a loop executes in every round, and what they cost."""

from __future__ import annotations

import sys

import pytest

from benchmarks import sass

# A loop of three waits and halves: a retry out of line, a branch that is sometimes skipped, the
# jump back. Then a second version of the loop, longer, and a spill outside of both.
TEXT = """
	.section	.text.kernel_0,"ax",@progbits
.text.kernel_0:
        /*0000*/                   STL [R1], R2 (*"SpillRefill"*) ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0030*/                   LDTM.x32 R4, tmem[UR4] ;
        /*0040*/                   FFMA2 R4, R4.F32x2.HI_LO, R6.F32, R8.F32 ;
        /*0050*/                   MUFU.EX2 R4, R4 ;
        /*0060*/                   MUFU.EX2 R5, R5 ;
        /*0070*/                   BRA.U UP0, `(.L_x_2) ;
        /*0080*/                   FMUL2 R4, R4.F32x2.HI_LO, R6.F32 ;
        /*0090*/                   FMNMX R4, R4, -127, !PT ;
.L_x_2:
        /*00a0*/               @P1 FADD R7, R4, R5 ;
        /*00b0*/                   UIADD3 UR5, UPT, UPT, UR5, 0x1, URZ ;
        /*00c0*/               @P2 BRA `(.L_x_0) ;
.L_x_4:
        /*00d0*/                   MUFU.EX2 R4, R4 ;
        /*00e0*/                   MUFU.EX2 R4, R4 ;
        /*00f0*/                   FSEL R4, R4, R5, P0 ;
        /*0100*/                   ISETP.GE.AND P0, PT, R4, R5, PT ;
        /*0110*/                   LDL R5, [R1] ;
        /*0120*/                   IMAD R4, R4, R5, R6 ;
        /*0130*/                   F2FP.BF16.F32.PACK_AB R4, R5, R4 ;
        /*0140*/                   STS [R4], R5 ;
        /*0150*/                   MOV R4, R5 ;
        /*0160*/                   NOP ;
        /*0170*/              @!P2 BRA `(.L_x_4) ;
        /*0180*/                   EXIT ;
.L_x_3:
        /*0190*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*01a0*/              @!P0 BRA `(.L_x_3) ;
        /*01b0*/                   BRA `(.L_x_1) ;
	.section	.text.kernel_1,"ax",@progbits
.text.kernel_1:
        /*0000*/                   EXIT ;
"""


@pytest.fixture
def blocks() -> list[sass.Block]:
    return sass.functions(TEXT)["kernel_0"]


@pytest.fixture
def loop(blocks: list[sass.Block]) -> sass.Loop:
    found = sass.loop_with(blocks, {"MUFU.EX2": 2})
    if found is None:
        pytest.fail("the loop with MUFU.EX2 was not found")
    return found


def test_functions_are_kept_apart() -> None:
    kernels = sass.functions(TEXT)
    assert list(kernels) == ["kernel_0", "kernel_1"]
    assert [i.opcode for block in kernels["kernel_1"] for i in block.instructions] == ["EXIT"]


def test_the_shortest_version_of_a_loop_is_taken(blocks: list[sass.Block], loop: sass.Loop) -> None:
    assert ".L_x_0" in blocks[loop.header].labels
    assert sass.loop_with(blocks, {"MUFU.EX2": 3}) is None


def test_retries_and_skipped_blocks_are_not_executed_always(
    blocks: list[sass.Block], loop: sass.Loop
) -> None:
    always = sass.always_executed(blocks, loop)
    assert [i.address for i in always] == [
        0x10,
        0x20,
        0x30,
        0x40,
        0x50,
        0x60,
        0x70,
        0xA0,
        0xB0,
        0xC0,
    ]
    (skipped,) = sass.conditional(blocks, loop)
    assert [i.opcode for i in skipped] == ["FMUL2", "FMNMX"]


def test_classes_name_mnemonics_and_gather_the_rest(
    blocks: list[sass.Block], loop: sass.Loop
) -> None:
    assert sass.classes(sass.always_executed(blocks, loop)) == {
        "MUFU.EX2": 2, "SYNCS": 1, "control": 3, "LDTM": 1, "FFMA2": 1, "FADD": 1, "uniform": 1,
    }  # fmt: skip


def test_pipes_have_their_cycles(blocks: list[sass.Block], loop: sass.Loop) -> None:
    cycles = sass.pipes(sass.always_executed(blocks, loop))
    assert cycles == {"issue": 10, "MUFU": 16, "FMA": 3, "ALU": 0, "LSU": 0}
    assert sass.bound(cycles) == ("MUFU", 16)
    masked = next(found for found in sass.loops(blocks) if ".L_x_4" in blocks[found.header].labels)
    cycles = sass.pipes(sass.always_executed(blocks, masked))
    assert cycles == {"issue": 11, "MUFU": 16, "FMA": 2, "ALU": 8, "LSU": 4}


def test_spills_are_found_with_the_loop_that_they_are_in(blocks: list[sass.Block]) -> None:
    (masked,) = (n for n, block in enumerate(blocks) if ".L_x_4" in block.labels)
    assert sass.spills(blocks) == {None: 1, masked: 1}


def test_a_missing_tool_names_its_package() -> None:
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-none"):
        sass.tool("none")


@pytest.mark.skipif(sys.platform == "darwin", reason="the packages are not made for macOS")
@pytest.mark.parametrize("name", ["nvdisasm", "cuobjdump"])
def test_the_tools_are_where_their_packages_say(name: str) -> None:
    assert sass.tool(name).is_file()
