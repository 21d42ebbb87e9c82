"""Kernels by spec: in memory, in a bundle, on disk, or compiled now.

`kernel` is what executors call. A kernel for the simulated device is another than the GPU's, in
memory and on disk: its host code calls the simulator (`Key.linkage`). Without a C compiler, or
where the cache cannot be written, kernels are compiled once a process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flash_attn_fp8 import sim
from flash_attn_fp8.compiler import bundle, link, store
from flash_attn_fp8.compiler.key import Key, Linkage, key_of
from flash_attn_fp8.errors import Unsupported
from flash_attn_fp8.target import cache_folder

if TYPE_CHECKING:
    from flash_attn_fp8.specs import Spec

Kernel = Callable[..., Any]
Place = Literal["memory", "bundle", "disk"]

_log = logging.getLogger(__name__)
_kernels: dict[tuple[Spec, str, Linkage], Kernel] = {}
_compiling = threading.Lock()  # CuTe DSL compiles one thing at a time


def kernel(spec: Spec, arch: str) -> Kernel:
    """The kernel of a spec: the simulated device's inside `sim.device`, else the GPU's."""
    linkage: Linkage = "simulator" if sim.is_active() else "gpu"
    found = _kernels.get((spec, arch, linkage))
    if found is None:
        with _compiling:
            found = _kernels.get((spec, arch, linkage)) or _obtain(spec, arch, linkage)
            _kernels[spec, arch, linkage] = found
    return found


def linkage_of(impl: str) -> Linkage:
    """What the kernels of an executor are linked for."""
    return "simulator" if impl == "sim" else "gpu"


def where(spec: Spec, arch: str, linkage: Linkage = "gpu") -> Place | None:
    """Where the kernel is already; None: a call would compile it."""
    if (spec, arch, linkage) in _kernels:
        return "memory"
    if linkage == "gpu" and bundle.find(spec, arch) is not None:
        return "bundle"
    return "disk" if store.find(folder(), key_of(spec, arch, linkage)) else None


def keep(spec: Spec, arch: str, linkage: Linkage = "gpu") -> Path:
    """Compiles a kernel into the cache on disk, unless it is there; returns its folder.

    Raises:
        Unsupported: there is no C compiler.
        OSError: the cache cannot be written.
    """
    compiler = link.require_c_compiler()
    key = key_of(spec, arch, linkage)
    return store.find_or_make(folder(), key, lambda new: _export(spec, key, new, compiler))


def folder() -> Path:
    """Where entries are kept."""
    return cache_folder() / "kernels"


def _obtain(spec: Spec, arch: str, linkage: Linkage) -> Kernel:
    if linkage == "gpu":
        bundled = bundle.find(spec, arch)
        if bundled is not None:
            return bundled()
    if link.c_compiler() is None:
        _log.debug("no gcc to link with: kernels are compiled in every process")
        return _compile(spec)
    try:
        return _from_disk(spec, key_of(spec, arch, linkage))
    except OSError as error:
        _log.warning("the cache %s cannot be used, kernels stay in memory: %s", folder(), error)
        return _compile(spec)


def _from_disk(spec: Spec, key: Key) -> Kernel:
    entry = keep(spec, key.arch, key.linkage)
    try:
        return _load(entry, key)
    except Unsupported:  # a RuntimeError, but no fault of the entry: to make it anew would not help
        raise
    except (OSError, RuntimeError, AttributeError) as error:
        _log.warning("%s does not load and is made anew: %s", entry, error)
        store.discard(folder(), key)
    return _load(keep(spec, key.arch, key.linkage), key)


def _load(entry: Path, key: Key) -> Kernel:
    if key.linkage == "gpu":
        return link.load(entry / link.LIBRARY, key.function, link.runtime_library())
    from flash_attn_fp8.sim.cute import aot

    ptx, cubin = (entry / link.PTX).read_text(encoding="utf-8"), (entry / link.CUBIN).read_bytes()
    image = aot.Image(ptx, cubin, key.arch)
    runtime, names = link.runtime_library(), ("tensors", "scalars")
    return aot.load(entry / link.LIBRARY, key.function, image, runtime, names)


def _compile(spec: Spec) -> Kernel:
    from flash_attn_fp8.compiler.build import compile_kernel

    compiled: Kernel = compile_kernel(spec)
    return compiled


def _export(spec: Spec, key: Key, new: Path, compiler: str) -> None:
    from flash_attn_fp8.compiler.export import export

    export(spec, key, new, compiler)
