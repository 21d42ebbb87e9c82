"""A bundle runs where CuTe DSL is not, and is refused where it does not belong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_attn_fp8.compiler import bundle, cache, link
from flash_attn_fp8.compiler.key import key_of
from flash_attn_fp8.errors import InvalidArguments
from tests.compiler.conftest import ARCH, SMALL, Builder

# A machine without the compiler, and what its kernel says to tensors of a CPU.
ELSEWHERE = """
import sys
class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError(name + " is not on this machine")
sys.meta_path.insert(0, NoCompiler())
import torch
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.specs import CombineSpec
link.c_compiler = lambda: None
spec = CombineSpec("bf16", 64, varlen=False, lse=False, output_scale=False)
assert cache.where(spec, "sm_100a") == "bundle"
kernel = cache.kernel(spec, "sm_100a")
tensors = torch.zeros(2, 1, 3, 4, 64), torch.zeros(2, 1, 4, 3), torch.empty(1, 3, 4, 64).bfloat16()
for given in ((*tensors, None, None), (*tensors, None)):
    try:
        kernel(given)
    except Exception as error:
        print(type(error).__name__, error)
assert "cutlass" not in sys.modules
"""


def test_a_bundle_runs_in_a_process_without_the_compiler(tmp_path: Path) -> None:
    entry = cache.keep(SMALL, ARCH)
    folder = bundle.write(tmp_path / "bundle", ARCH, {key_of(SMALL, ARCH): entry}).parent
    environment = {**os.environ, "FLASH_ATTN_FP8_BUNDLE": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    of_cpu, too_few = done.stdout.splitlines()[0], done.stdout
    assert "cuda" in of_cpu.lower()  # the kernel's own host code wants CUDA's tensors
    assert "expected" in too_few.lower()


@pytest.fixture
def made(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one kernel that is a text."""
    runtime = tmp_path / "runtime.so"
    runtime.write_text("the runtime")
    monkeypatch.setattr(link, "runtime_library", lambda: runtime)
    entries = {key_of(SMALL, ARCH): cache.keep(SMALL, ARCH)}
    return bundle.write(tmp_path / "bundle", ARCH, entries).parent


def test_a_loaded_bundle_comes_before_the_disk(made: Path, monkeypatch) -> None:
    loaded = []
    monkeypatch.setattr(link, "load", lambda *what: loaded.append(what) or print)
    assert cache.where(SMALL, ARCH) == "disk"
    assert bundle.load(made) == (repr(SMALL),)
    assert cache.where(SMALL, ARCH) == "bundle"
    assert cache.where(SMALL, "sm_103a") is None
    assert cache.where(SMALL, ARCH, "simulator") is None
    assert cache.kernel(SMALL, ARCH) is print
    key = key_of(SMALL, ARCH)
    assert loaded == [(made / f"{key.digest}.so", key.function, made / link.RUNTIME)]


def test_a_bundle_of_other_sources_or_another_machine_is_refused(made: Path) -> None:
    file = made / bundle.MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "sources": "0" * 64, "machine": "riscv64"}))
    with pytest.raises(InvalidArguments) as refused:
        bundle.load(made)
    assert len(refused.value.reasons) == 2
    assert "its machine riscv64" in str(refused.value)
    assert cache.where(SMALL, ARCH) == "disk"


def test_a_changed_or_missing_file_is_named(made: Path) -> None:
    name = f"{key_of(SMALL, ARCH).digest}.so"
    (made / name).write_text("something else")
    (made / link.RUNTIME).unlink()
    with pytest.raises(InvalidArguments) as refused:
        bundle.load(made)
    assert set(refused.value.reasons) == {
        f"{link.RUNTIME} is missing",
        f"{name} is not the file that was written",
    }


@pytest.mark.parametrize("text", [None, "[]", "{", '{"format": 0}', '{"format": 1}'])
def test_what_is_no_bundle_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / bundle.MANIFEST).write_text(text)
    with pytest.raises(InvalidArguments, match="no bundle of kernels"):
        bundle.load(tmp_path)
