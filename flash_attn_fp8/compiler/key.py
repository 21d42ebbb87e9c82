"""What a compiled kernel depends on, as a record whose digest names it on disk.

Standard library only: a kernel that is found needs no compiler to be loaded.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from flash_attn_fp8.compiler.link import runtime_wheel

Linkage = Literal["gpu", "simulator"]

_PACKAGE = Path(__file__).resolve().parents[1]
# What the code of a kernel is made from: the kernels, how they are compiled, the records in a spec.
_SOURCES = ("kernels", "compiler", "specs.py", "problem.py", "policy.py", "formats.py")
# Not a kernel's, by the name of its spec: other kernels, and what only finds or names kernels.
_SM90 = ("kernels/cached", "kernels/sm100")
_OTHERS = {
    "Sm100Spec": ("kernels/cached", "kernels/sm90"),
    "Sm90Spec": _SM90,
    "TransposeSpec": _SM90,
    "WidenSpec": _SM90,
    "CacheSpec": ("kernels/forward", "kernels/sm90", "kernels/sm100"),
}
_NOT_IN_CODE = tuple(f"compiler/{n}.py" for n in ("bundle", "cache", "cache_presets", "presets"))


@dataclass(frozen=True)
class Key:
    """All that decides a kernel's code. `linkage`: for a GPU, or for the simulated one.

    `runtime`: the wheel that it is linked with. CUDA 12's and 13's have one version of the DSL.
    """

    spec: str
    arch: str
    linkage: Linkage
    sources: str
    dsl: str
    runtime: str
    tvm_ffi: str
    machine: str

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def function(self) -> str:
        """The name of the exported function; unlike any other's of the process."""
        return f"flash_attn_fp8_{self.digest}"


def key_of(spec: object, arch: str, linkage: Linkage = "gpu") -> Key:
    """The key of a spec's kernel, as this package with these libraries would compile it."""
    return Key(
        spec=repr(spec),
        arch=arch,
        linkage=linkage,
        sources=fingerprint(linkage, type(spec).__name__),
        dsl=installed("nvidia-cutlass-dsl"),
        runtime=runtime_wheel(),
        tvm_ffi=installed("apache-tvm-ffi"),
        machine=platform.machine(),
    )


@cache
def fingerprint(linkage: Linkage = "gpu", spec: str = "") -> str:
    """A digest of the sources that decide a kernel's code; they are read once a process.

    `spec`: the name of its spec's class, whose kernel alone is meant.
    """
    names = _SOURCES if linkage == "gpu" else (*_SOURCES, "sim/cute")
    return digest_of(_PACKAGE, names, (*_OTHERS.get(spec, ()), *_NOT_IN_CODE) if spec else ())


def digest_of(root: Path, names: Iterable[str], without: Iterable[str] = ()) -> str:
    """A digest of Python files and of folders of them: their paths from `root`, their bytes."""
    files = [file for name in names for file in _files(root / name)]
    left_out = {file for name in without for file in _files(root / name)}
    files = [file for file in files if file not in left_out]
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@cache
def installed(distribution: str) -> str:
    """A distribution's version; empty where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
