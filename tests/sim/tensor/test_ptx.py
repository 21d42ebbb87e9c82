"""Whole PTX programs: products on each target, with every line of synchronisation left out once."""

from __future__ import annotations

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import (
    Deadlock,
    Finding,
    OutOfBounds,
    Race,
    TensorMemoryMisuse,
    Uninitialised,
    Unmodelled,
)
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.schedule import Adversarial
from tests.sim.programs import aligned, run
from tests.sim.tensor.build import element_address, number

N, K = 32, 128
A_AT, B_AT, END = 0, 128 * K, (128 + N) * K  # in the image of operands that the kernels copy


def operands(rows: int, seed: int, kind: str = "e4m3", size: int = 1) -> tuple[np.ndarray, ...]:
    """An image of A (rows) and B (N) for shared memory, K-major 128B, and their exact product."""
    rng = np.random.default_rng(seed)
    image = aligned((END,), np.uint8)
    columns = K // size
    values = []
    for base, height in ((A_AT, rows), (B_AT, N)):
        if kind == "e4m3":
            codes = rng.integers(0x38, 0x50, (height, columns), dtype=np.uint8)
        else:
            codes = rng.integers(-4, 5, (height, columns)).astype("<f4").view("<u4") >> 16
            codes = codes.astype("<u2")
        raw = np.ascontiguousarray(codes).view(np.uint8).reshape(height, K)
        for row in range(height):
            for byte in range(0, K, 16):
                at = base + element_address(0, 16, 1024, "128", False, row, byte, 1)
                image[at : at + 16] = raw[row, byte : byte + 16]
        flat = codes.reshape(-1)
        values.append(np.array([number(c.tobytes(), kind) for c in flat]).reshape(height, columns))
    return image, values[0] @ values[1].T


# %r0: barriers, %r1: operands, %r3: thread, %r4: warp, %p1: warp 0, %p2: thread 0
PROLOGUE = f"""
    mov.u32 %r0, dynamic;
    add.u32 %r1, %r0, 1024;
    mov.u32 %r3, %tid.x;
    shr.u32 %r4, %r3, 5;
    setp.eq.u32 %p1, %r4, 0;
    setp.eq.u32 %p2, %r3, 0;
    ld.param.u64 %rd0, [a0];
    ld.param.u64 %rd1, [a1];
    @%p2 mbarrier.init.shared.b64 [%r0], 1;
    @%p2 fence.mbarrier_init.release.cluster;
    shl.b32 %r5, %r3, 4;
COPY:
    cvt.u64.u32 %rd2, %r5;
    add.u64 %rd3, %rd0, %rd2;
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd3];
    add.u32 %r6, %r1, %r5;
    st.shared.v4.b32 [%r6], {{%r20, %r21, %r22, %r23}};
    add.u32 %r5, %r5, 2048;
    setp.lt.u32 %p3, %r5, {END};
    @%p3 bra COPY;
"""

# Lines marked `!` are what the program cannot do without.
TCGEN05 = (
    PROLOGUE
    + """
!   fence.proxy.async;
    @!%p1 bra READY;
    mov.u32 %r7, 32;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+16], %r7;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
READY:
!   bar.sync 0;
    ld.shared.b32 %r8, [%r0+16];
    @!%p2 bra ISSUED;
    shr.u32 %r9, %r1, 4;
    or.b32 %r9, %r9, 65536;
    add.u32 %r10, %r9, 1024;
    mov.b32 %r11, 0x40004040;
    mov.b32 %r12, 0x08080010;
    mov.b64 %rd4, {%r9, %r11};
    mov.b64 %rd5, {%r10, %r11};
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r8], %rd4, %rd5, %r12, 0;
    mov.u32 %r13, 1;
MORE:
    add.s64 %rd4, %rd4, 2;
    add.s64 %rd5, %rd5, 2;
    setp.ne.b32 %p4, %r13, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r8], %rd4, %rd5, %r12, %p4;
    add.u32 %r13, %r13, 1;
    setp.lt.u32 %p5, %r13, 4;
    @%p5 bra MORE;
!   tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];
ISSUED:
!   { .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r0], 0; @!q bra W; }
    shl.b32 %r14, %r4, 21;
    add.u32 %r14, %r14, %r8;
    tcgen05.ld.sync.aligned.32x32b.x32.b32 LOADED, [%r14];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd6, %r3, 128;
    add.u64 %rd1, %rd1, %rd6;
    STORED
!   bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, %r7;
""".replace("LOADED", "{" + ", ".join(f"%r{100 + i}" for i in range(32)) + "}").replace(
        "STORED",
        "\n".join(
            f"st.global.v4.b32 [%rd1+{16 * i}], "
            f"{{%r{100 + 4 * i}, %r{101 + 4 * i}, %r{102 + 4 * i}, %r{103 + 4 * i}}};"
            for i in range(8)
        ),
    )
)

WGMMA = (
    PROLOGUE
    + """
!   fence.proxy.async;
!   bar.sync 0;
    shr.u32 %r9, %r1, 4;
    or.b32 %r9, %r9, 65536;
    add.u32 %r10, %r9, 1024;
    mov.b32 %r11, 0x40000040;
    mov.b64 %rd4, {%r9, %r11};
    mov.b64 %rd5, {%r10, %r11};
!   wgmma.fence.sync.aligned;
    mov.u32 %r13, 0;
MORE:
    setp.ne.b32 %p4, %r13, 0;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 SUMS, %rd4, %rd5, %p4, 1, 1, 0, 0;
    add.s64 %rd4, %rd4, 2;
    add.s64 %rd5, %rd5, 2;
    add.u32 %r13, %r13, 1;
    setp.lt.u32 %p5, %r13, 4;
    @%p5 bra MORE;
    wgmma.commit_group.sync.aligned;
!   wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd6, %r3, 64;
    add.u64 %rd1, %rd1, %rd6;
    STORED
""".replace("SUMS", "{" + ", ".join(f"%r{100 + i}" for i in range(16)) + "}").replace(
        "STORED", "\n".join(f"st.global.b32 [%rd1+{4 * i}], %r{100 + i};" for i in range(16))
    )
)


def without(program: str, left_out: int | None) -> str:
    """The program without one of its marked lines."""
    lines, marked = [], 0
    for line in program.splitlines():
        if line.startswith("!"):
            if marked != left_out:
                lines.append(line[1:])
            marked += 1
        else:
            lines.append(line)
    return "\n".join(lines)


def d_fragments(out: np.ndarray) -> np.ndarray:
    """D (64, 32) of what each thread of a warpgroup held."""
    found = np.zeros((64, N))
    for thread in range(128):
        for i in range(16):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i >> 1 & 1)
            found[row, 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)] = out[thread, i]
    return found


@pytest.mark.parametrize("schedule", [None, lambda: Adversarial(3)])
def test_tcgen05_product(schedule):
    image, wanted = operands(128, 0)
    out = aligned((128, N), np.float32)
    machine = Machine(schedule=schedule) if schedule else None
    made = run(without(TCGEN05, None), image, out, warps=4, machine=machine)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))
    assert made.traffic["tcgen05.mma kind::f8f6f4 128x32x32"] == 4
    assert made.traffic["tensor memory bytes loaded"] == 128 * N * 4


@pytest.mark.parametrize(
    ("left_out", "finding"),
    [
        (0, Race),
        (1, (Race, Uninitialised)),
        (2, Deadlock),
        (3, Race),
        (4, (Race, OutOfBounds)),
    ],
    ids=["proxy fence", "barrier before", "commit", "wait", "barrier before freeing"],
)
def test_tcgen05_product_without_a_line(left_out, finding):
    image, _ = operands(128, 0)
    with pytest.raises(finding):
        run(without(TCGEN05, left_out), image, aligned((128, N), np.float32), warps=4)


def test_tensor_memory_that_is_never_freed():
    program = without(TCGEN05, None).replace("@%p1 tcgen05.dealloc", "// tcgen05.dealloc")
    image, _ = operands(128, 0)
    with pytest.raises(TensorMemoryMisuse, match="32 columns"):
        run(program, image, aligned((128, N), np.float32), warps=4)


@pytest.mark.parametrize("schedule", [None, lambda: Adversarial(5)])
def test_wgmma_product(schedule):
    image, wanted = operands(64, 1, "bf16", 2)
    out = aligned((128, 16), np.float32)
    machine = Machine("sm_90a", schedule=schedule) if schedule else Machine("sm_90a")
    made = run(without(WGMMA, None), image, out, warps=4, machine=machine)
    np.testing.assert_array_equal(d_fragments(out), wanted)
    assert made.traffic["wgmma warps m64n32 bf16"] == 16


@pytest.mark.parametrize(
    ("left_out", "finding"),
    [(0, Race), (1, (Race, Uninitialised)), (2, Race), (3, Race)],
    ids=["proxy fence", "barrier", "wgmma.fence", "wait_group"],
)
def test_wgmma_product_without_a_line(left_out, finding):
    image, _ = operands(64, 1, "bf16", 2)
    program = without(WGMMA, left_out)
    with pytest.raises(finding):
        run(program, image, aligned((128, 16), np.float32), warps=4, machine=Machine("sm_90a"))


PAIR = """
    mov.u32 %r0, dynamic;
    mov.u32 %r3, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    setp.eq.u32 %p2, %r3, 0;
    setp.lt.u32 %p1, %r3, 32;
    ld.param.u64 %rd1, [a0];
    @%p2 mbarrier.init.shared.b64 [%r0], 1;
    @%p2 fence.mbarrier_init.release.cluster;
    add.u32 %r5, %r2, 0x38;
    prmt.b32 %r5, %r5, 0, 0;
    mad.lo.u32 %r6, %r3, 128, %r0;
    mov.u32 %r7, 0;
FILL:
    st.shared.v4.b32 [%r6+1024], {%r5, %r5, %r5, %r5};
    add.u32 %r6, %r6, 16;
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p3, %r7, 8;
    @%p3 bra FILL;
    fence.proxy.async;
    mov.u32 %r7, 64;
    @%p1 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r0+16], %r7;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.shared.b32 %r8, [%r0+16];
    setp.eq.u32 %p4, %r2, 0;
    and.pred %p4, %p4, %p2;
    @!%p4 bra ISSUED;
    add.u32 %r9, %r0, 1024;
    shr.u32 %r9, %r9, 4;
    mov.b32 %r11, 0x40004040;
    mov.b32 %r12, 0x10080010;
    mov.b64 %rd4, {%r9, %r11};
    tcgen05.mma.cta_group::2.kind::f8f6f4 [%r8], %rd4, %rd4, %r12, 0;
    mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
        [%r0], %h1;
ISSUED:
    { .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r0], 0; @!q bra W; }
    shr.u32 %r14, %r3, 5;
    shl.b32 %r14, %r14, 21;
    add.u32 %r14, %r14, %r8;
    tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r15}, [%r14], 31;
    mad.lo.u32 %r16, %r2, 128, %r3;
    mul.wide.u32 %rd6, %r16, 4;
    add.u64 %rd1, %rd1, %rd6;
    st.global.b32 [%rd1], %r15;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    @%p1 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r8, %r7;
"""


def test_a_pair_of_ctas():
    """CTA c has 1 + c/8 everywhere (e4m3 0x38 + c): D's rows are A's CTA, its columns B's."""
    out = aligned((2, 128), np.float32)
    run(PAIR, out, warps=4, grid=2, cluster=2)
    wanted = np.empty((2, 128))
    for cta in range(2):
        for thread in range(128):
            other = thread % 32 // 16  # columns 0 and 31: of the lower, of the upper half of N
            wanted[cta, thread] = 32 * (1 + cta / 8) * (1 + other / 8)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


AMPERE = """
    mov.u32 %r0, dynamic;
    mov.u32 %r3, %tid.x;
    ld.param.u64 %rd0, [a0];
    ld.param.u64 %rd1, [a1];
    mul.wide.u32 %rd2, %r3, 16;
    add.u64 %rd0, %rd0, %rd2;
    shl.b32 %r4, %r3, 4;
    add.u32 %r5, %r0, %r4;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd0];
    st.shared.v4.b32 [%r5], {%r20, %r21, %r22, %r23};
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd0+512];
    st.shared.v4.b32 [%r5+512], {%r20, %r21, %r22, %r23};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r5];
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r34, %r35}, [%r5+512];
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r40, %r41, %r42, %r43},
        {%r30, %r31, %r32, %r33}, {%r34, %r35}, {%r50, %r50, %r50, %r50};
    movmatrix.sync.aligned.m8n8.trans.b16 %r36, %r34;
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r36};
    bar.warp.sync -1;
    add.u64 %rd1, %rd1, %rd2;
    st.global.v4.b32 [%rd1], {%r40, %r41, %r42, %r43};
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5];
    st.global.v4.b32 [%rd1+512], {%r20, %r21, %r22, %r23};
""".replace("    mov.f32 %f0, 0f00000000;\n", "")


def test_mma_sync_with_ldmatrix():
    """A as four 8x8 matrices (rows 0-7, 8-15, then their second half of K); B by its K rows."""
    rng = np.random.default_rng(4)
    a, b = rng.integers(-8, 8, (16, 16)), rng.integers(-8, 8, (16, 8))
    image = aligned((1024,), np.uint8)
    tiles = [a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:], b[:8], b[8:]]
    packed = np.concatenate([tile.astype("<f2").reshape(-1) for tile in tiles]).view(np.uint8)
    image[: packed.size] = packed
    out = aligned((1024,), np.uint8)
    made = run(AMPERE, image, out, machine=Machine("sm_80"))
    found = out[:512].view(np.float32).reshape(32, 4)
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
            assert found[lane, i] == (a @ b)[row, column]
    # `ldmatrix.trans` and `movmatrix.trans` cancel.
    np.testing.assert_array_equal(out[512:640].view("<f2").reshape(8, 8), b[:8].astype("<f2"))
    assert made.traffic["mma.sync m16n8k16 f16"] == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r0], %rd0, %rd1, %r1, 0;", "weight-stationary"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %rd0, %rd1, [%r2], %r1, 0;", "sparse"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r0], %rd0, %rd1, %r1, [%r2], "
            "[%r3], 0;",
            "kind::mxf8f6f4",
        ),
        ("tcgen05.mma.cta_group::1.kind::mxf4 [%r0], %rd0, %rd1, %r1, 0;", "kind::mxf4"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r0], [%r2], %rd1, %r1, 0;", "shifted A"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r0], %rd0, %rd1, %r1, 0, 3;", "scale-input-d"),
        ("tcgen05.mma.cta_group::3.kind::f16 [%r0], %rd0, %rd1, %r1, 0;", "cta_group::3"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r0], %rd0, %rd1, %r1, {%r2, %r3}, 0;", "2 words"),
        ("tcgen05.shift.cta_group::1.down [%r0];", "tcgen05.shift"),
        ("tcgen05.cp.cta_group::1.4x256b [%r0], %rd0;", "shape .4x256b"),
        ("tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r0], %rd0;", "64x128b"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.b32 {%r0, %r1}, %r2, [%r3];", "modifier .red"),
        ("tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r0, %r1, %r2}, [%r3];", "x3"),
        ("tcgen05.ld.sync.aligned.16x128b.x128.b32 {%r0, %r1}, [%r3];", "x128"),
        ("tcgen05.ld.sync.aligned.16x64b.x2.b32 {%r0}, [%r3];", "1 registers"),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r3];", "only m8n8"),
        ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r0};", "only m8n8"),
        (
            "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%r0, %r1, %r2, %r3}, "
            "{%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};",
            "row.row",
        ),
        (
            "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r0, %r1}, {%r2}, {%r3}, {%r0, %r1};",
            "m8n8k16",
        ),
        (
            "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32 {%r0, %r1, %r2, "
            "%r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};",
            "kind::f8f6f4",
        ),
        (
            "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, "
            "%rd1, %r4, 0, 1, 1, 1, 0, 0;",
            "form .sp",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd1, "
            "1, 1, 1, 0, 0;",
            "shape m64n8k32",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r0, %r1, %r2, %r3}, %rd0, "
            "%rd1, 1, 1, 1, 0, 1;",
            "4 immediates, not 2",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(line, says):
    with pytest.raises(Unmodelled, match=says) as refused:
        run(line)
    assert "line " in str(refused.value)


def test_sums_used_before_the_wait_are_reported_where_they_stand():
    program = (
        without(WGMMA, None)
        .replace("    wgmma.commit_group", "    mov.b32 %r200, %r105;\n    wgmma.commit_group")
        .replace("    @%p5 bra MORE;\n", "")
    )
    image, _ = operands(64, 1, "bf16", 2)
    with pytest.raises(Finding, match=r"%r105 is an accumulator of the wgmma"):
        run(program, image, aligned((128, 16), np.float32), warps=4, machine=Machine("sm_90a"))
