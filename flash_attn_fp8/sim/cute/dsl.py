"""CuTe DSL, made to compile for the simulated device and to run its host code without a driver.

Everything here is a replacement of an attribute that `Patches` puts back:

- the target: `arch` of each DSL object, and `CUTE_DSL_ARCH` for who reads the environment;
- `Compiler.compile`: asks for the PTX and the cubin too, and leads the module's calls into the CUDA
  runtime to ours (`splice.py`);
- the ways into a compiled function: they tell the session the arguments (for names and buffers),
  present CPU tensors as CUDA's to TVM FFI, and raise what the launch callback raised;
- `HardwareInfo`, which would ask a driver;
- caches, so that code which belongs to this process and this device never meets real code.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cutlass.base_dsl.compiler as dsl_compiler
import cutlass.base_dsl.dsl as base_dsl
import cutlass.base_dsl.env_manager as env_manager
import cutlass.base_dsl.jit_executor as jit_executor
import cutlass.cute.runtime as cute_runtime
import cutlass.cutlass_dsl.cuda_jit_executor as cuda_executor
import torch
from cutlass.base_dsl.cache_helpers import JitCacheDict
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cutlass import CuteExperimentalDSL
from cutlass.utils import HardwareInfo

from .arguments import SOURCE, Memory, replace_tensors
from .dlpack import CudaClaim
from .patching import Patches
from .runtime import RUNTIME, Image
from .splice import splice

_PIPELINE = "cute-to-nvvm{"
_CHIP = re.compile(r"cubin-chip=(\w+)")
_DUMP = re.compile(r"dump-(ptx|cubin)-path='?([^'\s}]+)'?")

# Modules that remember the device (lru_cache) and compiled functions: neither may cross the border.
_CACHING_PACKAGES = ("flash_attn.cute", "quack")
_CACHE_SWITCHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "QUACK_CACHE_ENABLED")
# Variables that would tell these packages of another device than the simulated one.
_OVERRIDES = ("FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS", "QUACK_ARCH")

# By (arch, sm_count): both are compiled into host code.
_jit_caches: dict[tuple[str, int], dict[Any, Any]] = {}


# Whether what is compiled now is left as a GPU would have it, to be exported (`exporting`).
_exports = False


class _NotExportable(RuntimeError):
    """A simulated function was to be written to disk."""


@contextmanager
def exporting() -> Iterator[None]:
    """Compiles for a GPU, also inside `sim.device`, what is to be exported and not to be called."""
    global _exports
    before, _exports = _exports, True
    try:
        yield
    finally:
        _exports = before


def patch_dsl(patches: Patches, memory: Memory, arch: str, sm_count: int) -> None:
    """Applies every change of this module."""
    # All of them, and before the environment changes: each reads it once, when it is made.
    dsls = [kind._get_dsl() for kind in (CuTeDSL, CuteExperimentalDSL)]
    for dsl in dsls:
        _patch_target(patches, dsl, arch, sm_count)
    patches.environment("CUTE_DSL_ARCH", arch)
    for name in _OVERRIDES:
        patches.environment(name, None)
    patches.undo(env_manager.get_str_env_var.cache_clear)
    _patch_caches(patches, arch, sm_count)
    _patch_compiler(patches, arch)
    _patch_tensors(patches, memory)
    _patch_calls(patches, memory)
    _patch_device(patches, sm_count)


def _patch_target(patches: Patches, dsl: Any, arch: str, sm_count: int) -> None:
    if dsl.envar.compiler_backend != "legacy":
        raise RuntimeError(
            f"CUTE_DSL_COMPILER_BACKEND is {dsl.envar.compiler_backend!r}; the simulator's bridge "
            "knows the DSL's default backend, 'legacy': unset the variable"
        )
    patches.attribute(dsl.envar, "_arch", arch)
    patches.attribute(dsl.envar, "disable_file_caching", True)
    store = _jit_caches.setdefault((arch, sm_count), {})
    patches.attribute(dsl, "jit_cache", store.setdefault(type(dsl), JitCacheDict()))


# ---------------------------------------------------------------------------------- compiling


def _patch_compiler(patches: Patches, arch: str) -> None:
    original = dsl_compiler.Compiler.compile

    @functools.wraps(original)
    def compile(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        if _PIPELINE not in pipeline or _exports:
            return original(self, module, pipeline, *args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="flash_attn_fp8-sim-") as folder:
            pipeline, paths = _with_dumps(pipeline, Path(folder) / "kernel")
            compiled = original(self, module, pipeline, *args, **kwargs)
            chip = _CHIP.search(pipeline)
            _register_image(paths, chip[1] if chip else arch)
        splice(compiled, RUNTIME.address_of)
        return compiled

    patches.attribute(dsl_compiler.Compiler, "compile", compile)


def _with_dumps(pipeline: str, stem: Path) -> tuple[str, dict[str, str]]:
    """The pipeline with dumps of PTX and cubin, where the user did not ask for them, and where."""
    paths = dict(_DUMP.findall(pipeline))
    for kind in ("ptx", "cubin"):
        if kind not in paths:
            paths[kind] = str(stem)
            option = f"{_PIPELINE}dump-{kind}-path='{stem}' "
            pipeline = pipeline.replace(_PIPELINE, option, 1)
    return pipeline, paths


def _register_image(paths: dict[str, str], arch: str) -> None:
    found = {}
    for kind, stem in paths.items():
        # The compiler appends the chip. The newest, since a user's folder may hold older ones.
        files = list(Path(stem).parent.glob(f"{Path(stem).name}.*{kind}"))
        if not files:
            return  # a program without kernels
        found[kind] = max(files, key=lambda file: file.stat().st_mtime_ns)
    RUNTIME.add_image(Image(found["ptx"].read_text(), found["cubin"].read_bytes(), arch))


# ------------------------------------------------------------------------------------- tensors


def _patch_tensors(patches: Patches, memory: Memory) -> None:
    tensor_class = cute_runtime._Tensor
    original = tensor_class.__init__

    @functools.wraps(original)
    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not _is_fake(tensor):
            original(self, CudaClaim(tensor), *args, **kwargs)
            setattr(self, SOURCE, tensor)
            memory.seen(tensor)
        else:
            original(self, tensor, *args, **kwargs)

    patches.attribute(tensor_class, "__init__", init)


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


# --------------------------------------------------------------------------------------- calls


@contextmanager
def calling(memory: Memory, arguments: list[tuple[str, Any]]) -> Iterator[None]:
    """A call of compiled code; raises in place of any other error what a callback kept."""
    memory.push(arguments)
    try:
        yield
    except BaseException:
        pending = RUNTIME.take_pending()
        if pending is None:
            raise
        raise pending from None
    finally:
        memory.pop()
    pending = RUNTIME.take_pending()
    if pending is not None:
        raise pending


def _named(signature: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments with their parameters' names, or `arg3` where those cannot be known."""
    names = list(signature.parameters) if isinstance(signature, inspect.Signature) else []
    if len(names) < len(args):
        names += [f"arg{i}" for i in range(len(names), len(args))]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _patch_calls(patches: Patches, memory: Memory) -> None:
    def around(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        patches.attribute(owner, name, functools.wraps(original)(wrap(original)))

    def compiled(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            execution = getattr(self, "execution_args", None)
            execution = execution or getattr(self.jit_module, "execution_args", None)
            named = _named(getattr(execution, "signature", None), args, kwargs)
            with calling(memory, named):
                return original(self, *args, **kwargs)

        return call

    def through_ffi(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            named = _named(self.execution_args.signature, args, kwargs)
            args = tuple(replace_tensors(a, ffi_tensor) for a in args)
            kwargs = {k: replace_tensors(a, ffi_tensor) for k, a in kwargs.items()}
            with calling(memory, named):
                return original(self, *args, **kwargs)

        return call

    def implicit(original: Any) -> Any:
        def call(self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
            with calling(memory, _named(inspect.signature(body), args, kwargs)):
                return original(self, body, *args, **kwargs)

        return call

    around(base_dsl.BaseDSL, "_func", implicit)
    around(cuda_executor.CudaDialectJitCompiledFunction, "__call__", compiled)
    around(jit_executor.JitExecutor, "__call__", compiled)
    _patch_ffi_calls(patches, around, through_ffi)


def _patch_ffi_calls(patches: Patches, around: Any, through_ffi: Any) -> None:
    try:
        import cutlass.cutlass_dsl.tvm_ffi_provider as ffi
    except ImportError:
        return  # apache-tvm-ffi is not installed: no such function can exist
    for owner in (ffi.TVMFFIJitCompiledFunction, ffi.TVMFFIJitCompiledFunctionWithKwargs):
        around(owner, "__call__", through_ffi)

    def refusing(original: Any) -> Any:
        def export(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _exports:
                return original(self, *args, **kwargs)
            raise _NotExportable(
                "a function compiled inside `sim.device` holds addresses of this process and "
                "cannot be exported; compile it outside"
            )

        return export

    around(ffi.TVMFFIJitCompiledFunctionBase, "export_to_c", refusing)
    around(jit_executor.JitCompiledFunction, "export_to_c", refusing)


def ffi_tensor(tensor: torch.Tensor) -> Any:
    """A CPU tensor as TVM FFI passes a CUDA tensor on."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(CudaClaim(tensor))


# -------------------------------------------------------------------------------------- device


def _patch_device(patches: Patches, sm_count: int) -> None:
    def clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return max(1, sm_count // cluster_size)

    def init(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    patches.attribute(HardwareInfo, "__init__", init)
    patches.attribute(HardwareInfo, "get_max_active_clusters", clusters)
    patches.attribute(HardwareInfo, "get_device_multiprocessor_count", lambda self: sm_count)
    patches.attribute(HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: 126 << 20)

    owner = cuda_executor.CudaDialectJitCompiledFunction
    load = owner._load_cuda_library

    def load_without_handles(self: Any) -> list[Any]:
        load(self)
        return []  # a real driver must never be asked to unload our handles, not even years later

    patches.attribute(owner, "num_devices", property(lambda self: 1))
    patches.attribute(owner, "_load_cuda_library", load_without_handles)


# -------------------------------------------------------------------------------------- caches


def _patch_caches(patches: Patches, arch: str, sm_count: int) -> None:
    store = _jit_caches.setdefault((arch, sm_count), {})
    for switch in _CACHE_SWITCHES:
        patches.environment(switch, "0")
    if "quack.cache" in sys.modules:
        patches.attribute(sys.modules["quack.cache"], "CACHE_ENABLED", False)
    known = set()
    for function, cache in _compile_caches():
        key = (function.__module__, function.__qualname__)
        # Without the persistent subclass: this one is never on disk.
        patches.attribute(function, "compile_cache", store.setdefault(key, _memory_cache(cache)))
        known.add(key)

    def forget_newcomers() -> None:
        for function, cache in _compile_caches():
            if (function.__module__, function.__qualname__) not in known:
                cache.cache.clear()  # its module was imported inside: simulated functions

    patches.undo(forget_newcomers)
    _clear_memos()
    patches.undo(_clear_memos)


def _caching_modules() -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and name.startswith(_CACHING_PACKAGES)
    ]


def _compile_caches() -> Iterator[tuple[Any, Any]]:
    """Functions with a cache of compiled functions as their attribute (flash-attn-4's habit)."""
    for module in _caching_modules():
        for value in list(vars(module).values()):
            if inspect.isfunction(value) and hasattr(value, "compile_cache"):
                yield value, value.compile_cache


def _memory_cache(cache: Any) -> Any:
    for kind in reversed(type(cache).__mro__):
        if kind is not object:
            return kind()
    raise TypeError(f"a compile cache of type {type(cache)} is not understood")


def _clear_memos() -> None:
    for module in _caching_modules():
        for value in list(vars(module).values()):
            clear = getattr(value, "cache_clear", None)
            if callable(clear) and not isinstance(value, type):
                clear()
