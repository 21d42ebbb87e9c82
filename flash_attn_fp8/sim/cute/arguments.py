"""The tensors in a call's arguments: their memory, and what to call it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from flash_attn_fp8.sim.launch import Buffer

SOURCE = "_simulated_source"  # a cute tensor's attribute: the torch tensor it was made from

_SHORT = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every torch tensor in a possibly nested argument, with its path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(source := getattr(value, SOURCE, None), torch.Tensor):
        yield name, source
    else:
        for key, part in _parts(value):
            path = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]"
            yield from tensors_in(path, part)


def _fields(value: Any) -> tuple[str, ...]:
    """The names in a named tuple; none for anything else."""
    return getattr(value, "_fields", ()) if isinstance(value, tuple) else ()


def _parts(value: Any) -> Iterable[tuple[str | int, Any]]:
    if fields := _fields(value):
        return zip(fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return ((str(key), part) for key, part in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return ()


def replace_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """`value`, with `replace(t)` for each torch tensor in it; itself where there is none."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if not any(True for _ in tensors_in("", value)):
        return value
    if _fields(value):
        return type(value)(*(replace_tensors(part, replace) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(replace_tensors(part, replace) for part in value)
    if isinstance(value, Mapping):
        return {key: replace_tensors(part, replace) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: replace_tensors(part, replace) for name, part in parts.items()}
        return dataclasses.replace(value, **changed)
    return value


def describe(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """`q e4m3[1, 256, 1, 128]`."""
    kind = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    return f"{name} {kind}{list(tensor.shape)}"


class Memory:
    """The storages that kernels may reach: those of the call in progress, and those seen so far.

    A tensor that was seen is remembered weakly, so that memory which is gone is not offered.
    """

    def __init__(self) -> None:
        self._calls: list[list[tuple[str, torch.Tensor]]] = []
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def seen(self, tensor: torch.Tensor) -> None:
        """Remembers a tensor whose address somebody may have."""
        self._seen[id(tensor)] = weakref.ref(tensor)

    def push(self, arguments: Iterable[tuple[str, Any]]) -> None:
        """Begins a call of a compiled function."""
        found = [pair for name, value in arguments for pair in tensors_in(name, value)]
        self._calls.append(found)

    def pop(self) -> None:
        """Ends the innermost call."""
        self._calls.pop()

    def buffers(self) -> tuple[Buffer, ...]:
        """One buffer a storage, the innermost call's arguments first."""
        self._seen = {key: ref for key, ref in self._seen.items() if ref() is not None}
        tensors = [pair for call in reversed(self._calls) for pair in call]
        tensors += [("tensor", t) for ref in self._seen.values() if (t := ref()) is not None]
        found: dict[int, Buffer] = {}
        with torch._C.DisableTorchFunction():
            # fp8 is passed as bytes, since not every DLPack consumer has its types.
            fp8 = {t.data_ptr(): t.dtype for _, t in tensors if t.dtype in _FP8}
            for name, tensor in tensors:
                if tensor.layout is not torch.strided or tensor.is_meta:
                    continue
                storage = tensor.untyped_storage()
                address, nbytes = storage.data_ptr(), storage.nbytes()
                if nbytes and address not in found:
                    dtype = tensor.dtype
                    if dtype is torch.uint8:
                        dtype = fp8.get(tensor.data_ptr(), dtype)
                    found[address] = Buffer(describe(name, tensor, dtype), address, nbytes)
        return tuple(found.values())
