"""Bundles: folders of kernels compiled elsewhere, for machines without the compiler.

A bundle has a library for each kernel, the DSL's runtime library, and `bundle.json`, which says
what each kernel is and what its file must hash to. It needs torch, apache-tvm-ffi and the very
sources of this package that it was compiled from: a kernel's arguments are an agreement of both.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from flash_attn_fp8.compiler import link
from flash_attn_fp8.compiler.key import Key, fingerprint, installed
from flash_attn_fp8.compiler.store import digest
from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.target import bundles

MANIFEST = "bundle.json"
_FORMAT = 1

# Loaders of kernels, by the spec's repr and the architecture.
_registered: dict[tuple[str, str], Callable[[], Callable[..., Any]]] = {}


def find(spec: object, arch: str) -> Callable[[], Callable[..., Any]] | None:
    """What loads the kernel of a spec, if a bundle has it."""
    _load_named()
    return _registered.get((repr(spec), arch))


@cache
def _load_named() -> None:
    """The bundles that the environment names, once."""
    for folder in bundles():
        load(folder)


def load(path: str | Path) -> tuple[str, ...]:
    """Registers the kernels of a bundle, so that `impl="cute"` finds them before it compiles.

    Returns:
        The specs that it holds.

    Raises:
        InvalidArguments: it is no bundle, was changed, or belongs to another version or machine.
    """
    folder = Path(path).resolve()
    manifest = _read(folder)
    faults = [*_other_versions(manifest), *_changed_files(folder, manifest)]
    if faults:
        raise InvalidArguments(f"bundle {folder}: " + "; ".join(faults), tuple(faults))
    runtime = folder / link.RUNTIME
    for one in manifest["kernels"]:
        loader = partial(link.load, folder / one["file"], one["function"], runtime)
        _registered[one["spec"], manifest["arch"]] = loader
    return tuple(one["spec"] for one in manifest["kernels"])


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this version reads {_FORMAT}")
        missing = {"arch", "machine", "sources", "kernels", "files", "package"} - set(manifest)
        if missing:
            raise ValueError(f"it does not say {', '.join(sorted(missing))}")
        return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArguments(f"{folder} is no bundle of kernels: {error}") from None


def _other_versions(manifest: dict[str, Any]) -> Iterator[str]:
    wanted = {"machine": platform.machine(), "sources": fingerprint()}
    for name, here in wanted.items():
        if manifest[name] != here:
            yield (
                f"its {name} {str(manifest[name])[:12]} is not {here[:12]}, as here: make it anew "
                f"with the version that loads it (it is of flash-attn-fp8 {manifest['package']})"
            )


def _changed_files(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif digest(file) != expected:
            yield f"{name} is not the file that was written"


def write(folder: Path, arch: str, entries: dict[Key, Path]) -> Path:
    """Makes a bundle of entries of the cache; returns its manifest, which is written last.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(link.runtime_library(), folder / link.RUNTIME)
    kernels = []
    for key, entry in entries.items():
        name = f"{key.digest}.so"
        shutil.copyfile(entry / link.LIBRARY, folder / name)
        kernels.append({"spec": key.spec, "file": name, "function": key.function})
    names = [link.RUNTIME, *(one["file"] for one in kernels)]
    manifest = {
        "format": _FORMAT,
        "arch": arch,
        "machine": platform.machine(),
        "package": installed("flash-attn-fp8"),
        "sources": fingerprint(),
        "dsl": installed("nvidia-cutlass-dsl"),
        "tvm_ffi": installed("apache-tvm-ffi"),
        "kernels": kernels,
        "files": {name: digest(folder / name) for name in names},
    }
    file = folder / MANIFEST
    file.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return file
