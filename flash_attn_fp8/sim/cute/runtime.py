"""The stand-in CUDA runtime: the functions that JIT'd host code calls, in Python.

One instance serves the process, because compiled code holds the addresses of its functions for as
long as it lives. A function that is called here either does its small part (handles for libraries
and kernels, attributes of the pretended device, copies) or, for a launch, gathers the launch and
gives it to the session that is active. ctypes callbacks swallow exceptions, so one is kept and an
error code returned in its place; whoever called the compiled function raises it (`dsl.py`).
"""

from __future__ import annotations

import ctypes
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flash_attn_fp8.sim.launch import Buffer, CapturedLaunch, param_sizes

from . import cubin
from .arguments import Memory

SUCCESS, LAUNCH_FAILED = 0, 719  # cudaSuccess, cudaErrorLaunchFailure

# Attributes of a device and of a launch, by CUDA's numbers.
_THREADS_PER_BLOCK, _SHARED_PER_BLOCK, _WARP, _SM_COUNT = 1, 8, 10, 16
_MAJOR, _MINOR, _SHARED_OPTIN = 75, 76, 97
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6
_KERNEL_SHARED_BYTES, _KERNEL_REGISTERS = 1, 4

_MAX_THREADS, _MAX_CLUSTER = 1024, 16  # of a block, of a cluster (more than 8 where asked for)

_STATIC_SHARED = re.compile(
    r"^\s*(?:\.visible\s+)?\.shared\s+(?:\.align\s+\d+\s+)?\.[bsuf](\d+)\s+[\w$]+\[(\d+)\]",
    re.MULTILINE,
)

_i32, _u32, _size, _pointer = ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p


class StandInError(RuntimeError):
    """The compiled host code asked for what the stand-in runtime does not have."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", _i32), ("_pad", _i32), ("value", ctypes.c_uint8 * 64))


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", _u32 * 3),
        ("block", _u32 * 3),
        ("dynamic_smem", _size),
        ("stream", _pointer),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", _u32),
    )


@dataclass(frozen=True)
class Image:
    """What the compiler made of one GPU module."""

    ptx: str
    cubin: bytes
    arch: str


@dataclass(frozen=True)
class Kernel:
    """A kernel of a loaded library."""

    name: str
    image: Image


class Session(Protocol):
    """What the runtime asks the active `sim.device` for."""

    arch: str
    sm_count: int
    capability: tuple[int, int]
    shared_optin: int
    memory: Memory

    def buffers(self) -> tuple[Buffer, ...]:
        """Global memory that is known to exist now."""

    def launched(self, launch: CapturedLaunch) -> None:
        """Hands a launch to the user's callback."""


class Runtime:
    """Handles, images and the active session; see the module's text."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._pending: BaseException | None = None
        self._images: dict[str, Image] = {}
        self._handles: dict[int, tuple[Image, ...] | Kernel] = {}
        self._thunks: dict[str, Any] = {}  # by symbol; compiled code holds their addresses

    # ---------------------------------------------------------------- for the compiler's side

    def add_image(self, image: Image) -> None:
        """Makes the PTX of a cubin known before host code loads that cubin."""
        self._images[cubin.digest(image.cubin)] = image

    def address_of(self, symbol: str) -> int | None:
        """The address to jump to for a runtime function; None: do nothing, return 0."""
        if symbol in _NOTHING_TO_DO:
            return None
        if symbol not in self._thunks:
            self._thunks[symbol] = self._make_thunk(symbol)
        return ctypes.cast(self._thunks[symbol], _pointer).value

    def take_pending(self) -> BaseException | None:
        """The exception that a callback could not raise; it is forgotten."""
        pending, self._pending = self._pending, None
        return pending

    def _make_thunk(self, symbol: str) -> Any:
        function, types = _FUNCTIONS.get(symbol, (None, ()))

        def thunk(*arguments: Any) -> int:
            if self._pending is not None:
                return LAUNCH_FAILED  # a second launch after a failed one
            try:
                if function is None:
                    raise StandInError(
                        f"the host code calls {symbol}, which the stand-in CUDA runtime does not "
                        f"have; it has {', '.join(sorted({*_FUNCTIONS, *_NOTHING_TO_DO}))}"
                    )
                return function(self, *arguments) or SUCCESS
            except BaseException as error:
                self._keep(error)
                return LAUNCH_FAILED

        return ctypes.CFUNCTYPE(_i32, *types)(thunk)

    def _keep(self, error: BaseException) -> None:
        if self.session is None:
            # Nobody is left who would raise it: the caller sees CUDA's error code alone.
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        else:
            self._pending = error

    def _active(self) -> Session:
        if self.session is None:
            raise StandInError(
                "a function that was compiled inside `sim.device` is called outside it; call it "
                "inside, or compile it anew"
            )
        return self.session

    # ---------------------------------------------------------------- libraries and kernels

    def _new_handle(self, thing: tuple[Image, ...] | Kernel) -> int:
        handle = 0x51_0000_0000 + 16 * len(self._handles)
        self._handles[handle] = thing
        return handle

    def _kernel(self, handle: int) -> Kernel:
        kernel = self._handles.get(handle)
        if not isinstance(kernel, Kernel):
            raise StandInError(f"{handle:#x} is no kernel of the stand-in CUDA runtime")
        return kernel

    def library_load(self, out: int, data: int, *_: Any) -> None:
        self._active()  # a real driver may be asked to unload what is loaded outside
        images = []
        for elf in cubin.cubins_at(data):
            image = self._images.get(cubin.digest(elf))
            if image is None:
                raise StandInError(
                    f"a cubin of {len(elf)} bytes is loaded whose compilation was not seen, so its "
                    "PTX is not known; compile the function inside `sim.device`"
                )
            images.append(image)
        _store(out, ctypes.c_uint64, self._new_handle(tuple(images)))

    def library_kernel(self, out: int, library: int, name: bytes) -> None:
        images = self._handles.get(library)
        if not isinstance(images, tuple):
            raise StandInError(f"{library:#x} is no library of the stand-in CUDA runtime")
        entry = name.decode()
        for image in images:
            if cubin.has_kernel(image.cubin, entry):
                _store(out, ctypes.c_uint64, self._new_handle(Kernel(entry, image)))
                return
        raise StandInError(f"no cubin of the library has a kernel {entry}")

    def kernel_attribute(self, out: int, attribute: int, handle: int, _device: int) -> None:
        kernel = self._kernel(handle)
        if attribute == _KERNEL_SHARED_BYTES:
            value = _static_smem(kernel.image.ptx)
        elif attribute == _KERNEL_REGISTERS:
            value = cubin.launch_registers(kernel.image.cubin, kernel.name)
        else:
            raise StandInError(f"attribute {attribute} of a kernel is asked for; add it here")
        _store(out, _i32, value)

    # ---------------------------------------------------------------- the device

    def device_attribute(self, out: int, attribute: int, _device: int) -> None:
        session = self._active()
        values = {
            _THREADS_PER_BLOCK: _MAX_THREADS,
            _SHARED_PER_BLOCK: 48 * 1024,
            _WARP: 32,
            _SM_COUNT: session.sm_count,
            _MAJOR: session.capability[0],
            _MINOR: session.capability[1],
            _SHARED_OPTIN: session.shared_optin,
        }
        if attribute not in values:
            raise StandInError(f"device attribute {attribute} is asked for; add it here")
        _store(out, _i32, values[attribute])

    def get_device(self, out: int) -> None:
        _store(out, _i32, 0)

    def get_device_count(self, out: int) -> None:
        _store(out, _i32, 1)

    def set_device(self, device: int) -> None:
        if device != 0:
            raise StandInError(f"device {device} is selected; the simulated machine has device 0")

    def init_once(self, state: int, init: int, load: int, set_error: int) -> int:
        """The TVM FFI wrapper's lazy load; `state` is a word that starts as 0."""
        if _load(state, ctypes.c_uint64):
            return SUCCESS
        library = ctypes.c_uint64(0)
        at = ctypes.addressof(library)
        code = ctypes.CFUNCTYPE(_i32, _pointer)(init)(at)
        code = code or ctypes.CFUNCTYPE(_i32, _pointer, _i32)(load)(at, 0)
        if code == SUCCESS:
            _store(state, ctypes.c_uint64, library.value)
            return SUCCESS
        # TVM FFI takes the error for set already when this function fails.
        say = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)
        say(b"RuntimeError", b"the simulated kernel library could not be loaded")
        return int(code)

    # ---------------------------------------------------------------- memory

    def copy(self, to: int, source: int, nbytes: int, *_: Any) -> None:
        ctypes.memmove(to, source, nbytes)

    def fill(self, to: int, value: int, nbytes: int, *_: Any) -> None:
        ctypes.memset(to, value, nbytes)

    # ---------------------------------------------------------------- launches

    def launch_ex(self, at: int, handle: int, arguments: int) -> None:
        config = _Config.from_address(at)
        attributes = {
            config.attributes[i].id: bytes(config.attributes[i].value)
            for i in range(config.attribute_count)
        }
        shape = _triple(config.grid), _triple(config.block)
        self._launch(handle, *shape, config.dynamic_smem, attributes, arguments)

    def launch_plain(self, handle: int, *rest: int) -> None:
        grid, block, (arguments, smem, _stream) = rest[:3], rest[3:6], rest[6:]
        self._launch(handle, _triple(grid), _triple(block), smem, {}, arguments)

    def _launch(
        self,
        handle: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        dynamic_smem: int,
        attributes: dict[int, bytes],
        arguments: int,
    ) -> None:
        session, kernel = self._active(), self._kernel(handle)
        if _number(kernel.image.arch) != _number(session.arch):
            raise StandInError(
                f"{kernel.name} was compiled for {kernel.image.arch}, and the device is "
                f"{session.arch}; compile it inside this `sim.device`"
            )
        cluster_value = attributes.pop(_CLUSTER, None)
        cluster = (1, 1, 1)
        if cluster_value is not None:
            cluster = _triple((_u32 * 3).from_buffer_copy(cluster_value))
        refuse_impossible(kernel.name, grid, block, cluster, dynamic_smem, session.shared_optin)
        sizes = param_sizes(kernel.image.ptx, kernel.name)
        pointers = (_pointer * len(sizes)).from_address(arguments) if sizes else ()
        session.launched(
            CapturedLaunch(
                ptx=kernel.image.ptx,
                cubin=kernel.image.cubin,
                entry=kernel.name,
                grid=grid,
                block=block,
                cluster=cluster,
                dynamic_smem=dynamic_smem,
                params=tuple(
                    ctypes.string_at(p or 0, n) for p, n in zip(pointers, sizes, strict=True)
                ),
                launch_registers=cubin.launch_registers(kernel.image.cubin, kernel.name),
                arch=kernel.image.arch,
                buffers=session.buffers(),
                cooperative=any(attributes.pop(_COOPERATIVE, b"")[:4]),
                programmatic_serialization=any(attributes.pop(_PROGRAMMATIC, b"")[:4]),
                attributes=tuple(sorted(attributes.items())),
            )
        )


def refuse_impossible(
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    dynamic_smem: int,
    shared_optin: int,
) -> None:
    """Raises for a launch that a CUDA driver would refuse."""
    faults = []
    if 0 in grid or 0 in block or 0 in cluster:
        faults.append("a dimension is 0")
    elif any(g % c for g, c in zip(grid, cluster, strict=True)):
        faults.append("the grid is no multiple of the cluster")
    if (threads := math.prod(block)) > _MAX_THREADS:
        faults.append(f"{threads} threads a block, at most {_MAX_THREADS}")
    if (ctas := math.prod(cluster)) > _MAX_CLUSTER:
        faults.append(f"{ctas} CTAs a cluster, at most {_MAX_CLUSTER}")
    if dynamic_smem > shared_optin:
        faults.append(f"{dynamic_smem} bytes of dynamic shared memory, at most {shared_optin}")
    if faults:
        raise StandInError(
            f"launch of {kernel} with grid {grid}, block {block}, cluster {cluster} refused: "
            f"{'; '.join(faults)}"
        )


def _static_smem(ptx: str) -> int:
    """Bytes of shared memory that the module declares with a size."""
    # Not the cubin's .nv.shared section, which is 1024 bytes for kernels that declare none.
    return sum(int(n) * int(bits) // 8 for bits, n in _STATIC_SHARED.findall(ptx))


def _triple(values: Any) -> tuple[int, int, int]:
    x, y, z = values
    return int(x), int(y), int(z)


def _number(arch: str) -> str:
    return arch.rstrip("af")  # sm_100f code runs on sm_100a


def _store(at: int, kind: Any, value: int) -> None:
    kind.from_address(at).value = value


def _load(at: int, kind: Any) -> int:
    return int(kind.from_address(at).value)


# Attributes that the pretended device takes without a word, waits for work that is done already,
# and unloading, which may run when the interpreter is gone and must therefore not reach Python.
_NOTHING_TO_DO = frozenset(
    {
        "_cudaKernelSetAttributeForDevice",
        "_cudaFuncSetAttribute",
        "_cudaDeviceSynchronize",
        "_cudaStreamSynchronize",
        "_cudaLibraryUnload",
        "_cuLibraryUnload",
        "cuda_dialect_unload_library_once",
    }
)

_FUNCTIONS: dict[str, tuple[Callable[..., int | None], tuple[Any, ...]]] = {
    "_cudaLibraryLoadData": (Runtime.library_load, (_pointer, _pointer)),
    "_cudaLibraryGetKernel": (Runtime.library_kernel, (_pointer, _pointer, ctypes.c_char_p)),
    "_cuKernelGetAttribute": (Runtime.kernel_attribute, (_pointer, _i32, _pointer, _i32)),
    "_cudaDeviceGetAttribute": (Runtime.device_attribute, (_pointer, _i32, _i32)),
    "_cudaGetDevice": (Runtime.get_device, (_pointer,)),
    "_cudaGetDeviceCount": (Runtime.get_device_count, (_pointer,)),
    "_cudaSetDevice": (Runtime.set_device, (_i32,)),
    "_cudaLaunchKernelEx": (Runtime.launch_ex, (_pointer, _pointer, _pointer)),
    "_cudaLaunchKernel": (
        Runtime.launch_plain,
        (_pointer, *(_u32,) * 6, _pointer, _size, _pointer),
    ),
    "_cudaMemcpy": (Runtime.copy, (_pointer, _pointer, _size, _i32)),
    "_cudaMemcpyAsync": (Runtime.copy, (_pointer, _pointer, _size, _i32, _pointer)),
    "_cudaMemset": (Runtime.fill, (_pointer, _i32, _size)),
    "_cudaMemsetAsync": (Runtime.fill, (_pointer, _i32, _size, _pointer)),
    "cuda_dialect_init_library_once": (Runtime.init_once, (_pointer,) * 4),
}

RUNTIME = Runtime()
