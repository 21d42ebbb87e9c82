"""What `sim.device` refuses, what it pretends, and that it leaves nothing behind."""

import ctypes
import functools
import os
import sys
import types
import warnings

import cutlass.base_dsl.compiler as dsl_compiler
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.utils import HardwareInfo

from flash_attn_fp8 import sim
from flash_attn_fp8.sim.cute import runtime
from flash_attn_fp8.sim.errors import Deadlock
from tests.sim.bridge import programs
from tests.sim.bridge.test_capture import _abc, _compiled, _implicit, _tvm_ffi
from tests.sim.programs import run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def ignore(_launch):
    pass


def _state():
    dsl = CuTeDSL._get_dsl()
    owners = [torch.cuda, torch.Tensor, dsl_compiler.Compiler, HardwareInfo, dsl.envar]
    attributes = [(o, name, id(value)) for o in owners for name, value in vars(o).items()]
    return attributes, dict(os.environ), id(dsl.jit_cache), torch.zeros(1).device


@pytest.mark.parametrize("failing", [False, True])
def test_everything_is_as_before_on_exit(failing):
    _implicit_once()  # so that what is loaded lazily is loaded
    before = _state()
    try:
        with sim.device("sm_100a", ignore):
            assert torch.cuda.is_available()
            _implicit(*_abc())
            if failing:
                raise KeyError("inside")
    except KeyError:
        assert failing
    assert _state() == before
    assert not torch.zeros(1).is_cuda


def _implicit_once():
    with sim.device("sm_100a", ignore):
        _implicit(*_abc())


def test_a_failed_entry_leaves_nothing(monkeypatch):
    before = _state()
    monkeypatch.setattr("flash_attn_fp8.sim.cute.device.patch_torch_cuda", None)
    with pytest.raises(TypeError), sim.device("sm_100a", ignore):
        pass
    assert _state() == before
    monkeypatch.undo()
    with sim.device("sm_100a", ignore):
        assert torch.cuda.is_available()


def test_is_not_reentrant():
    with (
        sim.device("sm_100a", ignore),
        pytest.raises(RuntimeError, match="active already; leave it"),
        sim.device("sm_100a", ignore),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"arch": "sm_75"}, "arch is 'sm_75'; the simulator knows sm_100a, sm_80, sm_86"),
        ({"arch": "sm_100a", "sm_count": 0}, "sm_count is 0; a device has at least 1"),
    ],
)
def test_refuses(arguments, text):
    with pytest.raises(ValueError, match=text), sim.device(on_launch=ignore, **arguments):
        pass


@pytest.mark.parametrize("route", [_compiled, _tvm_ffi])
def test_an_unknown_runtime_function_fails_by_its_name(route, monkeypatch):
    monkeypatch.delitem(runtime._FUNCTIONS, "_cudaLaunchKernelEx")
    monkeypatch.setattr(runtime.RUNTIME, "_thunks", {})
    message = "calls _cudaLaunchKernelEx, which the stand-in CUDA runtime does not have; it has"
    with pytest.raises(runtime.StandInError, match=message), sim.device("sm_100a", ignore):
        route(*_abc())


def test_impossible_launches_are_refused():
    with (
        pytest.raises(runtime.StandInError, match="grid is no multiple of the cluster"),
        sim.device("sm_100a", ignore),
    ):
        programs.oversized(from_dlpack(torch.zeros(32)))


def test_limits_of_a_launch():
    ok = {"grid": (2, 1, 1), "block": (1024, 1, 1), "cluster": (2, 1, 1)}
    runtime.refuse_impossible("k", **ok, dynamic_smem=100, shared_optin=100)
    for change, text in [
        ({"grid": (0, 1, 1)}, "a dimension is 0"),
        ({"block": (1024, 2, 1)}, "2048 threads a block, at most 1024"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "32 CTAs a cluster"),
        ({"dynamic_smem": 101}, "101 bytes of dynamic shared memory, at most 100"),
    ]:
        arguments = {**ok, "dynamic_smem": 100, "shared_optin": 100, **change}
        with pytest.raises(runtime.StandInError, match=text):
            runtime.refuse_impossible("k", **arguments)


def test_code_of_another_architecture_is_refused():
    a, b = from_dlpack, torch.zeros(32)
    with sim.device("sm_90a", ignore):
        program = cute.compile(programs.fill_twice, a(b), a(b))
    with (
        pytest.raises(runtime.StandInError, match="compiled for sm_90a, and the device is sm_100a"),
        sim.device("sm_100a", ignore),
    ):
        program(a(b), a(b))


def test_outside_a_simulated_function_says_why_it_fails():
    b = torch.zeros(32)
    with sim.device("sm_100a", ignore):
        arguments = from_dlpack(b), from_dlpack(b)
        program = cute.compile(programs.fill_twice, *arguments)
        program(*arguments)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match="719"):
            program(*arguments)
    assert any("compiled inside `sim.device` is called outside it" in str(w.message) for w in said)


def test_a_simulated_function_is_not_exported(tmp_path):
    b = torch.zeros(32)
    with sim.device("sm_100a", ignore):
        program = cute.compile(programs.fill_twice, from_dlpack(b), from_dlpack(b))
        with pytest.raises(RuntimeError, match="holds addresses of this process"):
            program.export_to_c(str(tmp_path), "program")


def test_an_image_whose_compilation_was_not_seen_is_refused(monkeypatch):
    b = torch.zeros(32)
    with sim.device("sm_100a", ignore):
        program = cute.compile(programs.fill_twice, from_dlpack(b), from_dlpack(b))
        monkeypatch.setattr(runtime.RUNTIME, "_images", {})
        with pytest.raises(runtime.StandInError, match="whose compilation was not seen"):
            program(from_dlpack(b), from_dlpack(b))


def test_the_first_error_is_kept_and_nothing_runs_after_it():
    own = runtime.Runtime()
    own.session = object()
    out = ctypes.c_int32(7)
    assert own._make_thunk("_cudaSetDevice")(1) == runtime.LAUNCH_FAILED
    assert own._make_thunk("_cudaGetDevice")(ctypes.addressof(out)) == runtime.LAUNCH_FAILED
    assert out.value == 7
    assert "device 1 is selected" in str(own.take_pending())
    assert own._make_thunk("_cudaGetDevice")(ctypes.addressof(out)) == runtime.SUCCESS
    assert out.value == 0


class _CompileCache:
    def __init__(self):
        self.cache = {}


def test_caches_of_compiled_functions_are_a_devices_own(monkeypatch):
    """flash-attn-4's keys hold neither the number of SMs nor that the device is simulated."""

    def compile():
        return compile.compile_cache.cache

    library = types.ModuleType("flash_attn.cute.pretended")
    library.compile, compile.compile_cache = compile, _CompileCache()
    library.memo = functools.lru_cache(lambda: torch.cuda.is_available())
    monkeypatch.setitem(sys.modules, library.__name__, library)
    real = compile()
    assert library.memo() is False
    found = {}
    for visit, (arch, sm_count) in enumerate([("sm_100a", 2), ("sm_100a", 3), ("sm_90a", 2)] * 2):
        with sim.device(arch, ignore, sm_count=sm_count):
            assert library.memo() is True
            assert compile() is not real
            assert compile().setdefault("code", visit) == visit % 3
            found[arch, sm_count] = compile()
    assert compile() is real
    assert real == {}
    assert len({id(cache) for cache in found.values()}) == 3
    assert library.memo() is False


def test_caches_that_were_made_inside_are_emptied(monkeypatch):
    def compile():
        pass

    compile.compile_cache = _CompileCache()
    with sim.device("sm_100a", ignore):
        library = types.ModuleType("flash_attn.cute.imported_inside")
        library.compile = compile
        monkeypatch.setitem(sys.modules, library.__name__, library)
        compile.compile_cache.cache["key"] = "simulated code"
    assert compile.compile_cache.cache == {}


def test_torch_sees_a_device():
    a = torch.zeros(3)
    with sim.device("sm_90a", ignore, sm_count=3):
        assert a.is_cuda
        assert not a.is_cpu
        assert a.device == torch.device("cuda", 0)
        assert a.get_device() == 0
        assert a.__dlpack_device__() == (2, 0)
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 3
        assert torch.cuda.current_stream().cuda_stream == 0
        assert HardwareInfo().get_max_active_clusters(2) == 1
        torch.manual_seed(0)
        torch.cuda.synchronize()
        made = [
            torch.empty(5, device="cuda"),
            torch.ones(5, device=torch.device("cuda", 0), pin_memory=False),
            torch.tensor([1.0], device=a.device),
            a.to("cuda:0", dtype=torch.bfloat16),
            torch.empty_like(a, dtype=torch.float64),
            torch.rand(1000),
        ]
        assert all(t.is_cuda and t.data_ptr() % 256 == 0 for t in made)
        assert made[0].untyped_storage().nbytes() == 20  # alignment leaves no slack behind
        assert a.cuda() is a
        host = a.cpu()
        host += 1
        assert a.sum() == 0
        assert "tensor" in repr(a)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.Event().record()
        with pytest.raises(RuntimeError, match="no clock"):
            torch.cuda.Event().elapsed_time(torch.cuda.Event())
    assert not a.is_cuda


def test_the_number_of_sms_is_compiled_in():
    """Host code holds it, so code for 2 SMs must not serve a device of 3."""
    grids = []
    a = torch.zeros(32)
    for sm_count in (2, 3, 2):
        with sim.device("sm_100a", lambda launch: grids.append(launch.grid), sm_count=sm_count):
            programs.one_block_an_sm(from_dlpack(a))
    assert grids == [(2, 1, 1), (3, 1, 1), (2, 1, 1)]


def test_contiguous_stays_the_same_tensor():
    a = torch.zeros(100)[1:]
    with sim.device("sm_100a", ignore):
        assert a.contiguous() is a or a.contiguous().data_ptr() == a.data_ptr()


def test_the_callback_sees_the_host():
    seen = []
    with sim.device("sm_100a", lambda launch: seen.append(torch.zeros(1).device.type)):
        _implicit(*_abc())
    assert seen == ["cpu"]


def test_warps_and_barriers_have_the_callers_names():
    b = torch.zeros(32)
    trace = sim.Trace()
    names = {"barrier_names": {1024: "full"}, "roles": {"fill": [0]}}
    with sim.device("sm_100a", **names, trace=trace) as gpu:
        programs.fill_twice(from_dlpack(b), from_dlpack(b))
    assert {row.who for row in gpu.runs[0].role_rows()} == {"fill"}
    assert trace.names == {0: "fill"}
    waits = "mov.u32 %r1, dynamic; mbarrier.init.shared.b64 [%r1], 2;\nWAIT: "
    waits += "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;"
    with pytest.raises(Deadlock, match=r"warp 0 \(fill\) waits: .*mbarrier full"):
        run(waits, machine=gpu.machine)
