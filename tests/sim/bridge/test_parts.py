"""The parts that need no compiler: PTX parameter lists, containers, declarations, patches."""

import ctypes
import os
import struct

import pytest

from flash_attn_fp8.sim.cute import cubin
from flash_attn_fp8.sim.cute.patching import Patches
from flash_attn_fp8.sim.cute.splice import RUNTIME_SYMBOL, definition
from flash_attn_fp8.sim.launch import param_sizes

PTX = """
.visible .entry one(
	.param .align 64 .b8 one_param_0[128],
	.param .u64 .ptr .global .align 16 one_param_1,
	.param .f32 one_param_2,
	.param .u8 one_param_3
)
.visible .entry one_more()
{ }
"""


def test_parameters_have_their_declared_sizes():
    assert param_sizes(PTX, "one") == (128, 8, 4, 1)
    assert param_sizes(PTX, "one_more") == ()
    with pytest.raises(ValueError, match=r"no \.entry two; it has \['one', 'one_more'\]"):
        param_sizes(PTX, "two")


def test_what_is_no_image_is_refused():
    noise = ctypes.create_string_buffer(b"\1\2\3\4" * 8)
    with pytest.raises(cubin.CubinError, match="starts with 0x04030201; expected a fatbin"):
        cubin.cubins_at(ctypes.addressof(noise))


def test_a_compressed_cubin_is_refused():
    entry = struct.pack("<HHIQ", 2, 0x101, 16, 4) + b"zstd"
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    with pytest.raises(cubin.CubinError, match="not a plain ELF file"):
        cubin.cubins_in_fatbin(fatbin)


@pytest.mark.parametrize(
    ("declaration", "address", "lines"),
    [
        (
            "llvm.func @_cudaLaunchKernelEx(!llvm.ptr, i32) -> i32",
            4096,
            [
                "llvm.func internal @_cudaLaunchKernelEx(%a0: !llvm.ptr, %a1: i32) -> i32 {",
                "llvm.call %callee(%a0, %a1) : !llvm.ptr, (!llvm.ptr, i32) -> i32",
                "llvm.return %result : i32",
            ],
        ),
        (
            'llvm.func @cuda_dialect_unload_library_once(!llvm.ptr) attributes {x = "external"}',
            None,
            [
                "llvm.func internal @cuda_dialect_unload_library_once(%a0: !llvm.ptr) {",
                "  llvm.ret",
            ],
        ),
        (
            "llvm.func @_cudaDeviceSynchronize() -> i32",
            None,
            ["%zero = llvm.mlir.zero : i32", "llvm.return %zero : i32"],
        ),
    ],
)
def test_a_declaration_becomes_a_jump(declaration, address, lines):
    text = definition(declaration, lambda name: address)
    assert all(line in text for line in lines), text


def test_only_runtime_functions_are_led_away():
    theirs = "printf", "TVMFFIEnvGetStream", "cuda_dialect_get_error_name", "cuda_init", "custom"
    ours = "_cudaGraphLaunch", "_cuTensorMapEncodeTiled", "cuda_dialect_init_library_once"
    assert not any(map(RUNTIME_SYMBOL.fullmatch, theirs))
    assert all(map(RUNTIME_SYMBOL.fullmatch, ours))


def test_patches_are_undone_in_reverse_order_after_an_error(monkeypatch):
    class Base:
        value = 1

    class Derived(Base):
        pass

    monkeypatch.setenv("BRIDGE_TEST", "before")

    def fail():
        with Patches() as patches:
            patches.attribute(Derived, "value", 2)
            patches.attribute(Derived, "value", 3)
            patches.environment("BRIDGE_TEST", None)
            assert Derived.value == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Derived.value == 1
    assert "value" not in vars(Derived)
    assert os.environ["BRIDGE_TEST"] == "before"
