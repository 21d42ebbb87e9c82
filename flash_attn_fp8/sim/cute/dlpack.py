"""CPU tensors that say they are CUDA's, to whoever asks through DLPack.

CuTe DSL reads a tensor's memory space from its DLPack device: a CPU tensor gives generic pointers,
hence other PTX than on a GPU, and code that insists on global memory does not compile at all. So
the device in the capsule is changed after torch has made it. Nothing else is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CUDA_DEVICE = (2, 0)  # DLPack: kDLCUDA, index 0


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    # The head of DLTensor, which is also the head of an unversioned DLManagedTensor.
    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def cuda_capsule(tensor: torch.Tensor) -> Any:
    """A DLPack capsule of `tensor`, device (2, 0), that shares its memory."""
    # torch's own function refuses tensors that require grad; on a GPU the DSL's callers detach.
    with torch._C.DisableTorchFunction():
        capsule = torch._C._to_dlpack(tensor.detach())
    address = _capsule_pointer(capsule, b"dltensor")
    head = ctypes.cast(address, ctypes.POINTER(_DLTensor)).contents
    head.device.device_type, head.device.device_id = CUDA_DEVICE
    return capsule


class CudaClaim:
    """A DLPack producer around a CPU tensor; consumers see CUDA device 0."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return cuda_capsule(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE
