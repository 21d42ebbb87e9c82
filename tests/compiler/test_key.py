"""A kernel's key changes with everything that its code depends on."""

import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from flash_attn_fp8.compiler import key as keys
from flash_attn_fp8.compiler import link
from flash_attn_fp8.compiler.key import digest_of, fingerprint, key_of
from tests.compiler.conftest import ARCH, SMALL

PACKAGE = Path(keys.__file__).parents[1]


def copied(tmp_path: Path) -> Path:
    for name in keys._SOURCES:
        copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copyfile
        copy(PACKAGE / name, tmp_path / name)
    return tmp_path


def test_the_same_sources_elsewhere_have_the_same_fingerprint(tmp_path: Path) -> None:
    assert digest_of(copied(tmp_path), keys._SOURCES) == fingerprint()


@pytest.mark.parametrize("file", ["kernels/sm100/softmax.py", "compiler/build.py", "policy.py"])
def test_a_changed_source_file_changes_the_fingerprint(tmp_path: Path, file: str) -> None:
    root = copied(tmp_path)
    with (root / file).open("a") as source:
        source.write("\n")
    assert digest_of(root, keys._SOURCES) != fingerprint()


def test_a_new_or_renamed_source_file_changes_the_fingerprint(tmp_path: Path) -> None:
    root = copied(tmp_path)
    (root / "kernels" / "new.py").touch()
    added = digest_of(root, keys._SOURCES)
    (root / "kernels" / "new.py").rename(root / "kernels" / "newer.py")
    assert len({fingerprint(), added, digest_of(root, keys._SOURCES)}) == 3


def test_every_field_of_a_key_is_in_its_digest() -> None:
    key = key_of(SMALL, ARCH)
    others = [replace(key, **{field: "other"}) for field in key.__dataclass_fields__]
    assert len({key.digest, *(other.digest for other in others)}) == len(others) + 1


def test_kernels_of_another_cuda_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra cu13 installs a second runtime, of the same version, which is then linked with."""
    key = key_of(SMALL, ARCH)
    cu13, cu12 = link._RUNTIME_WHEELS
    files, version = metadata.files, metadata.version
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "files", lambda name: files(cu12 if name == cu13 else name))
        patched.setattr(metadata, "version", lambda name: version(cu12 if name == cu13 else name))
        link._runtime.cache_clear()
        other = key_of(SMALL, ARCH)
    link._runtime.cache_clear()
    assert other.runtime == key.runtime.replace("cu12", "cu13") != key.runtime
    assert other.digest != key.digest == key_of(SMALL, ARCH).digest


def test_a_spec_an_architecture_and_a_linkage_have_keys_of_their_own() -> None:
    other = replace(SMALL, head_dim_v=128)
    keys = [key_of(SMALL, ARCH), key_of(other, ARCH), key_of(SMALL, "sm_103a")]
    keys.append(key_of(SMALL, ARCH, "simulator"))
    assert len({key.digest for key in keys}) == 4
    assert key_of(replace(SMALL), ARCH) == keys[0]
