"""Where kernels come from, and that simulated ones are never a GPU's."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8 import sim
from flash_attn_fp8.compiler import build, cache, link
from flash_attn_fp8.errors import InvalidArguments, Unsupported
from tests.compiler.conftest import ARCH, SMALL, Builder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process knows."""
    monkeypatch.setattr(cache, "_kernels", {})


def test_a_kernel_is_exported_once_and_loaded_once_a_process(
    folder: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.kernel(SMALL, ARCH)
    assert cache.kernel(replace(SMALL), ARCH) is first
    assert (builder.exported, builder.loaded) == (1, 1)
    forget(monkeypatch)
    assert cache.kernel(SMALL, ARCH)() == first()
    assert (builder.exported, builder.loaded) == (1, 2)
    assert folder.is_dir()  # where FLASH_ATTN_FP8_CACHE says


def test_where_says_what_a_call_would_find(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.where(SMALL, ARCH) is None
    cache.kernel(SMALL, ARCH)
    assert cache.where(SMALL, ARCH) == "memory"
    forget(monkeypatch)
    assert cache.where(SMALL, ARCH) == "disk"
    assert cache.where(SMALL, ARCH, "simulator") is None


def test_a_corrupt_entry_is_compiled_again(
    folder: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.kernel(SMALL, ARCH)
    for library in folder.glob("*/kernel.so"):
        library.write_text("something else")
    forget(monkeypatch)
    assert cache.kernel(SMALL, ARCH)() == f"code of {SMALL}"
    assert builder.exported == 2


def test_an_entry_that_does_not_load_is_compiled_again_once(builder: Builder) -> None:
    builder.unloadable = 1
    assert cache.kernel(SMALL, ARCH)() == f"code of {SMALL}"
    assert builder.exported == 2
    builder.unloadable = 2
    with pytest.raises(RuntimeError, match="does not load"):
        cache.kernel(SMALL, "sm_103a")


def test_without_a_c_compiler_kernels_stay_in_memory(
    folder: Path,
    builder: Builder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.DEBUG, "flash_attn_fp8"):
        cache.kernel(SMALL, ARCH)
        cache.kernel(SMALL, ARCH)
    assert builder.compiled == 1
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert not folder.exists()
    with pytest.raises(Unsupported, match="install gcc"):
        cache.keep(SMALL, ARCH)


def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    cache.kernel(SMALL, ARCH)
    assert builder.compiled == 1
    assert "cannot be used" in caplog.text


def test_a_simulated_kernel_and_a_gpus_never_meet(folder: Path, builder: Builder) -> None:
    real = cache.kernel(SMALL, ARCH)
    with sim.device(ARCH, on_launch=print):
        simulated = cache.kernel(SMALL, ARCH)
        assert cache.kernel(SMALL, ARCH) is simulated
    assert simulated is not real
    assert cache.kernel(SMALL, ARCH) is real
    assert len(list(folder.glob("*/entry.json"))) == 2


def merged(launches: list) -> None:
    """A launch of SMALL on the simulated device, captured."""
    with sim.device(ARCH, on_launch=launches.append):
        partial, lse = torch.zeros(2, 1, 3, 4, 64), torch.zeros(2, 1, 4, 3)
        out = torch.empty(1, 3, 4, 64, dtype=torch.bfloat16)
        cache.kernel(SMALL, ARCH)((partial, lse, out, None, None))


def test_a_simulated_kernel_from_disk_launches_as_one_just_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list = []
    with monkeypatch.context() as patched:
        patched.setattr(link, "c_compiler", lambda: None)
        merged(launches)  # compiled in memory, by the simulator's own way
    assert not folder.exists()
    forget(monkeypatch)
    merged(launches)  # exported inside the simulated device
    forget(monkeypatch)
    monkeypatch.setattr(build, "compile_kernel", None)
    merged(launches)  # from disk
    shapes = {(one.grid, one.block, one.cluster, one.dynamic_smem) for one in launches}
    assert len(launches) == 3
    assert len(shapes) == 1
    assert len({one.ptx.partition(".visible")[2] for one in launches}) == 1
    assert [len(one.buffers) for one in launches] == [3, 3, 3]
    with pytest.raises(RuntimeError, match=r"outside `sim\.device`"):
        cache._kernels[SMALL, ARCH, "simulator"](())


def test_precompile_compiles_what_a_call_would_run(builder: Builder) -> None:
    q = torch.empty(1, 128, 8, 64, dtype=torch.float8_e4m3fn, device="meta")
    call = (fa.flash_attn_func, q, q, q)
    assert "to be compiled" in str(fa.explain(*call, target=ARCH))
    explained = fa.precompile(*call, target=ARCH)
    assert explained.plan.impl == "cute"
    assert builder.exported == 1
    assert builder.loaded == 0
    assert "on disk" in str(fa.explain(*call, target=ARCH))
    fa.precompile(*call, target=ARCH, num_splits=2)  # and the kernel that merges the parts
    assert builder.exported == 3
    fa.precompile(*call, impl="sim")
    assert cache.where(fa.explain(*call, impl="sim").plan.spec, ARCH, "simulator") == "disk"
    assert builder.exported == 4


def test_precompile_refuses_what_a_call_would(builder: Builder) -> None:
    q = torch.empty(1, 128, 8, 64, dtype=torch.float8_e4m3fn, device="meta")
    with pytest.raises(InvalidArguments, match="softcap"):
        fa.precompile(fa.flash_attn_func, q, q, q, softcap=-1, target=ARCH)
    with pytest.raises(Unsupported, match="no compiled kernel for e4m3 queries on sm_89"):
        fa.precompile(fa.flash_attn_func, q, q, q, impl="cute", target="sm_89")
    assert builder.exported == 0
