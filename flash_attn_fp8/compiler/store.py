"""Compiled kernels on disk: an entry is a folder that is whole or is not believed.

An entry holds what `make` put there and `entry.json`: the key in full, and a digest of every file.
It is made beside its place and renamed into it, under a lock that other processes wait for, so that
two of them compile once. An entry that is torn, changed, or of another key (a folder may have been
renamed, or copied from another machine) is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock

from flash_attn_fp8.compiler.key import Key

_MANIFEST = "entry.json"
_log = logging.getLogger(__name__)


def find(folder: Path, key: Key) -> Path | None:
    """The folder of a valid entry."""
    entry = folder / key.digest
    return entry if _is_valid(entry, key) else None


def find_or_make(folder: Path, key: Key, make: Callable[[Path], None]) -> Path:
    """The folder of the entry, which `make` fills where there is no valid one.

    Raises:
        OSError: the cache cannot be written.
    """
    found = find(folder, key)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{key.digest}.lock"):
        return find(folder, key) or _make(folder, key, make)


def discard(folder: Path, key: Key) -> None:
    """Removes an entry that is valid and still of no use: one that cannot be loaded."""
    with FileLock(folder / f"{key.digest}.lock"):
        shutil.rmtree(folder / key.digest, ignore_errors=True)


def _make(folder: Path, key: Key, make: Callable[[Path], None]) -> Path:
    entry = folder / key.digest
    new = Path(tempfile.mkdtemp(prefix=f".{key.digest}-", dir=folder))
    try:
        make(new)
        digests = {file.name: digest(file) for file in new.iterdir()}
        text = json.dumps({"key": asdict(key), "files": digests}, indent=1)
        (new / _MANIFEST).write_text(text, encoding="utf-8")
        if entry.exists():
            _log.warning("replacing %s, which is not what its name says", entry)
            # Renamed first: a name that is gone is better than half an entry, if we are killed.
            os.replace(entry, new / "replaced")
        os.replace(new, entry)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(entry / "replaced", ignore_errors=True)
    return entry


def _is_valid(entry: Path, key: Key) -> bool:
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return (
            bool(files)
            and manifest["key"] == asdict(key)
            and all(digest(entry / name) == expected for name, expected in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def digest(file: Path) -> str:
    """The SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
