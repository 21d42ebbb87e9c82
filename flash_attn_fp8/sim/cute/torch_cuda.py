"""torch, made to believe in one CUDA device whose memory is the CPU's.

Two halves. `torch.cuda.*` functions are replaced, since they would call a driver. And a function
mode sees every operation on tensors: what asks where a tensor lives gets `cuda:0`, and what places
a tensor on `cuda` gets CPU memory. All strided CPU tensors count as CUDA's in here, whether the
caller made them before or inside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode

from .arguments import Memory
from .dlpack import CUDA_DEVICE, cuda_capsule
from .patching import Patches

# What cudaMalloc gives, and TMA and vector accesses count on; torch's CPU allocator gives 64.
ALIGNMENT = 256

_T = torch.Tensor


_ADDRESSES = (_T.data_ptr, _T.untyped_storage, _T.__dlpack__)

_MAKERS = frozenset(
    {
        torch.arange,
        torch.as_tensor,
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.full_like,
        torch.linspace,
        torch.ones,
        torch.ones_like,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
        torch.randperm,
        torch.tensor,
        torch.zeros,
        torch.zeros_like,
        _T.clone,
        _T.contiguous,
        _T.new_empty,
        _T.new_full,
        _T.new_ones,
        _T.new_tensor,
        _T.new_zeros,
        _T.to,
    }
)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    _T.is_cpu.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    _T.device.__get__: lambda tensor: torch.device("cuda", 0),
    _T.get_device: lambda tensor: 0,
    _T.__dlpack_device__: lambda tensor, *_: CUDA_DEVICE,
    _T.cuda: lambda tensor, *_, **__: tensor,
    _T.cpu: lambda tensor, *_, **__: tensor.clone(),
    _T.pin_memory: lambda tensor, *_: tensor,
    _T.is_pinned: lambda tensor, *_: False,
    _T.record_stream: lambda tensor, stream: None,
}


class CudaTensors(TorchFunctionMode):
    """CPU tensors that look like CUDA's while the mode is active."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers questions about the device; runs everything else on the CPU."""
        kwargs = dict(kwargs or {})
        if func is torch.device or active_fake_mode() is not None:
            return func(*args, **kwargs)  # tensors without memory may be CUDA's without our help
        answer = _ANSWERS.get(func)
        if answer is not None and _pretends(args[0]):
            return answer(*args, **kwargs)
        if func in _ADDRESSES and _pretends(args[0]):
            self._memory.seen(args[0])
        if func is _T.__dlpack__ and _pretends(args[0]):
            return cuda_capsule(args[0])
        result = func(*map(_on_cpu, args), **_host_arguments(kwargs))
        if func in _MAKERS and isinstance(result, torch.Tensor):
            # An operation that returns its argument (`contiguous`) must not become a copy.
            return result if any(result is a for a in args) else aligned(result)
        return result


def _pretends(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    if isinstance(argument, str) and (argument == "cuda" or argument.startswith("cuda:")):
        return "cpu"
    return argument


def _host_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = "cpu"
    return {name: _on_cpu(value) for name, value in kwargs.items()}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, moved to memory aligned as CUDA's where it is not; the storage has no slack.

    No slack, so that an access one byte behind the tensor is one outside of every buffer.
    """
    with torch._C.DisableTorchFunction():
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or tensor.requires_grad
            or type(tensor) is not torch.Tensor
            or tensor.storage_offset()
            or tensor.data_ptr() % ALIGNMENT == 0
        ):
            return tensor
        nbytes = tensor.untyped_storage().nbytes()
        room = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        storage = torch.from_numpy(room[start : start + nbytes]).untyped_storage()
        moved = torch.empty(0, dtype=tensor.dtype)
        moved.set_(storage, 0, tensor.size(), tensor.stride())
        return moved.copy_(tensor)


# -------------------------------------------------------------------------------- torch.cuda


class SimulatedStream:
    """The one stream; what is put into it is done when the call returns."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)

    def synchronize(self) -> None:
        """Everything is done already."""

    wait_stream = wait_event = record_event = query = lambda self, *_: True


class SimulatedEvent:
    """An event that has happened; no time passes on the simulated device."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, _end: SimulatedEvent) -> float:
        raise RuntimeError("the simulator has no clock: event times mean nothing; do not time here")

    def synchronize(self) -> None:
        """Everything is done already."""

    record = wait = query = lambda self, *_: True


def properties(sm_count: int, capability: tuple[int, int], shared_optin: int) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` says; sizes are those of a B200."""
    return SimpleNamespace(
        name="simulated GPU",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sm_count,
        total_memory=180 << 30,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared_optin,
        shared_memory_per_multiprocessor=shared_optin + 1024,
        L2_cache_size=126 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def patch_torch_cuda(patches: Patches, props: SimpleNamespace) -> None:
    """Replaces the functions of `torch.cuda` that would need a driver."""
    stream = SimulatedStream()
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (props.major, props.minor),
        "get_device_properties": lambda device=None: props,
        "get_device_name": lambda device=None: props.name,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(stream),
        "set_stream": lambda stream: None,
        "device": lambda device: nullcontext(device),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
    }
    for name, function in functions.items():
        patches.attribute(torch.cuda, name, function)
