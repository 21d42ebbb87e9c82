"""CuTe-DSL programs of our own. (No postponed annotations: the DSL reads them as objects.)"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

THREADS = 64


@cute.kernel
def _scaled_sum(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(a):
        c[i] = a[i] + b[i] * scale


@cute.jit
def scaled_sum(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    scale: cutlass.Float32,
    stream: cuda.CUstream,
):
    _scaled_sum(a, b, c, scale).launch(
        grid=[cute.ceil_div(cute.size(a), THREADS), 1, 1],
        block=[THREADS, 1, 1],
        cluster=[2, 1, 1],
        smem=1024,
        stream=stream,
    )


def named_twice(subtract: bool):
    """A program whose kernel has one name and two bodies."""

    @cute.kernel
    def twin(a: cute.Tensor, b: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        b[thread] = a[thread] - b[thread] if cutlass.const_expr(subtract) else a[thread] + b[thread]

    @cute.jit
    def program(a: cute.Tensor, b: cute.Tensor):
        twin(a, b).launch(grid=[1, 1, 1], block=[32, 1, 1])

    return program


@cute.kernel
def _fill(a: cute.Tensor, value: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = value


@cute.jit
def fill_twice(a: cute.Tensor, b: cute.Tensor):
    _fill(a, cutlass.Float32(1.0)).launch(grid=[1, 1, 1], block=[32, 1, 1])
    _fill(b, cutlass.Float32(2.0)).launch(grid=[1, 1, 1], block=[16, 1, 1])


@cute.jit
def fill_at(a: cute.Pointer):
    tensor = cute.make_tensor(a, cute.make_layout(32))
    _fill(tensor, cutlass.Float32(1.0)).launch(grid=[1, 1, 1], block=[32, 1, 1])


@cute.jit
def oversized(a: cute.Tensor):
    _fill(a, cutlass.Float32(1.0)).launch(grid=[3, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1])


@cute.jit
def one_block_an_sm(a: cute.Tensor):
    sms = cutlass.utils.HardwareInfo().get_device_multiprocessor_count()
    _fill(a, cutlass.Float32(1.0)).launch(grid=[sms, 1, 1], block=[32, 1, 1])
