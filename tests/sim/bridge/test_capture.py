"""Launches of our own programs, by each way into compiled code."""

import struct

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack, make_ptr

from flash_attn_fp8 import sim
from tests.sim.bridge import programs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STREAM = cuda.CUstream(0)
COUNT = 250


def _abc():
    return tuple(torch.arange(COUNT, dtype=torch.float32) + i for i in range(3))


def _implicit(a, b, c):
    programs.scaled_sum(from_dlpack(a), from_dlpack(b), from_dlpack(c), 2.5, STREAM)


def _compiled(a, b, c):
    arguments = *map(from_dlpack, (a, b, c)), 2.5, STREAM
    cute.compile(programs.scaled_sum, *arguments)(*arguments)


def _executor(a, b, c):
    arguments = *map(from_dlpack, (a, b, c)), 2.5, STREAM
    cute.compile(programs.scaled_sum, *arguments).to(None)(*arguments)


def _torch_tensors(a, b, c):
    arguments = *map(from_dlpack, (a, b, c)), 2.5, STREAM
    cute.compile(programs.scaled_sum, *arguments)(a, b, c, 2.5, STREAM)


def _tvm_ffi(a, b, c):
    pytest.importorskip("tvm_ffi")
    tensors = (from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic() for t in (a, b, c))
    options = "--enable-tvm-ffi"
    cute.compile(programs.scaled_sum, *tensors, 2.5, STREAM, options=options)(a, b, c, 2.5, 0)


ROUTES = [_implicit, _compiled, _executor, _torch_tensors, _tvm_ffi]


@pytest.mark.parametrize("route", ROUTES)
def test_launch_is_captured(route):
    launches = []
    a, b, c = _abc()
    with sim.device("sm_100a", launches.append):
        route(a, b, c)
    (launch,) = launches
    assert (launch.grid, launch.block, launch.cluster) == ((4, 1, 1), (64, 1, 1), (2, 1, 1))
    assert launch.dynamic_smem == 1024
    assert launch.arch == "sm_100a"
    assert ".target sm_100a" in launch.ptx
    assert f".entry {launch.entry}" in launch.ptx
    assert 8 <= launch.launch_registers <= 64
    pointers = [struct.unpack_from("<Q", p)[0] for p in launch.params[:3]]
    assert pointers == [t.data_ptr() for t in (a, b, c)]
    assert struct.unpack("<f", launch.params[3]) == (2.5,)
    assert [x.name.split()[0] for x in launch.buffers[:3]] == ["a", "b", "c"]
    assert [(x.address, x.nbytes) for x in launch.buffers[:3]] == [(p, COUNT * 4) for p in pointers]
    # The kernel's name holds its tensors' memory space: they passed for CUDA's.
    assert launch.entry.count("gmem") == 3
    assert "generic" not in launch.entry


@pytest.mark.parametrize("route", ROUTES)
def test_an_exception_of_the_callback_comes_out_of_the_call(route):
    class Mine(Exception):
        pass

    def fail(_launch):
        raise Mine("by the callback")

    with (
        pytest.raises(Mine, match="by the callback"),
        sim.device("sm_100a", fail),
    ):
        route(*_abc())
    # and is not kept for a later one
    launches = []
    with sim.device("sm_100a", launches.append):
        route(*_abc())
    assert len(launches) == 1


def test_launches_come_in_order_while_the_host_code_runs():
    seen = []
    a, b = torch.zeros(32), torch.zeros(16)
    with sim.device("sm_100a", lambda launch: seen.append(launch.block[0])):
        programs.fill_twice(from_dlpack(a), from_dlpack(b))
        assert seen == [32, 16]


def test_after_a_failed_launch_the_same_program_launches_no_more():
    seen = []

    def fail(launch):
        seen.append(launch)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), sim.device("sm_100a", fail):
        programs.fill_twice(from_dlpack(torch.zeros(32)), from_dlpack(torch.zeros(16)))
    assert len(seen) == 1


def test_kernels_of_one_name_come_with_their_own_code():
    launches = []
    a, b = torch.zeros(32), torch.zeros(32)
    with sim.device("sm_100a", launches.append):
        add, subtract = (
            cute.compile(programs.named_twice(s), from_dlpack(a), from_dlpack(b))
            for s in (False, True)
        )
        for program in (add, subtract, add):
            program(from_dlpack(a), from_dlpack(b))
    assert len({launch.entry for launch in launches}) == 1
    assert ["sub." in launch.ptx for launch in launches] == [False, True, False]
    assert launches[0].ptx == launches[2].ptx


def test_memory_behind_a_bare_pointer_is_known():
    launches = []
    a = torch.zeros(32)
    with sim.device("sm_100a", launches.append):
        pointer = make_ptr(cutlass.Float32, a.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
        programs.fill_at(pointer)
    assert a.data_ptr() in [buffer.address for buffer in launches[0].buffers]


def test_views_give_their_whole_storage_once():
    launches = []
    whole = torch.zeros(96)
    with sim.device("sm_100a", launches.append):
        programs.fill_twice(from_dlpack(whole[32:64]), from_dlpack(whole[64:80]))
    (buffer,) = launches[0].buffers
    assert (buffer.address, buffer.nbytes) == (whole.data_ptr(), 96 * 4)
    assert buffer.name == "a f32[32]"


def test_compiles_for_the_asked_architecture():
    launches = []
    with sim.device("sm_90a", launches.append):
        _implicit(*_abc())
    assert launches[0].arch == "sm_90a"
    assert ".target sm_90a" in launches[0].ptx


def test_the_users_dumps_of_ptx_stay(tmp_path):
    launches = []
    a, b = torch.zeros(32), torch.zeros(16)
    with sim.device("sm_100a", launches.append):
        options = f"--keep-ptx --dump-dir={tmp_path}"
        program = cute.compile(programs.fill_twice, from_dlpack(a), from_dlpack(b), options=options)
        program(from_dlpack(a), from_dlpack(b))
    # The DSL cuts a C string's last byte off or not; the text is the same.
    assert program.__ptx__.rstrip("\0") == launches[0].ptx.rstrip("\0")
    assert list(tmp_path.glob("*.ptx"))
