"""An entry on disk is whole or is made anew, and is made once however many ask."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flash_attn_fp8.compiler import store
from flash_attn_fp8.compiler.key import key_of
from tests.compiler.conftest import ARCH, SMALL

KEY = key_of(SMALL, ARCH)


class Maker:
    """Fills entries and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, new: Path) -> None:
        self.calls += 1
        (new / "kernel.so").write_bytes(b"code")


def _truncate(entry: Path) -> None:
    (entry / "kernel.so").write_bytes(b"co")


def _remove_file(entry: Path) -> None:
    (entry / "kernel.so").unlink()


def _remove_manifest(entry: Path) -> None:
    (entry / "entry.json").unlink()


def _tear_manifest(entry: Path) -> None:
    text = (entry / "entry.json").read_text()
    (entry / "entry.json").write_text(text[: len(text) // 2])


def _list_nothing(entry: Path) -> None:
    _rewrite(entry, files={})


def _of_other_version(entry: Path) -> None:
    _rewrite(entry, key={**_manifest(entry)["key"], "dsl": "4.7.0"})


def _of_other_arch(entry: Path) -> None:
    _rewrite(entry, key={**_manifest(entry)["key"], "arch": "sm_103a"})


def _not_json_of_ours(entry: Path) -> None:
    (entry / "entry.json").write_text("[]")


def _manifest(entry: Path) -> dict:
    return json.loads((entry / "entry.json").read_text())


def _rewrite(entry: Path, **changes: object) -> None:
    (entry / "entry.json").write_text(json.dumps({**_manifest(entry), **changes}))


@pytest.mark.parametrize(
    "harm",
    [
        _truncate,
        _remove_file,
        _remove_manifest,
        _tear_manifest,
        _list_nothing,
        _of_other_version,
        _of_other_arch,
        _not_json_of_ours,
    ],
)
def test_a_harmed_or_foreign_entry_is_made_anew(folder: Path, harm) -> None:
    make = Maker()
    entry = store.find_or_make(folder, KEY, make)
    harm(entry)
    assert store.find(folder, KEY) is None
    assert store.find_or_make(folder, KEY, make) == entry
    assert make.calls == 2
    assert (entry / "kernel.so").read_bytes() == b"code"
    assert sorted(p.name for p in entry.iterdir()) == ["entry.json", "kernel.so"]
    assert store.find_or_make(folder, KEY, make) == entry
    assert make.calls == 2


def test_another_keys_entry_under_this_name_is_not_believed(folder: Path) -> None:
    other = key_of(SMALL, "sm_103a")
    make = Maker()
    store.find_or_make(folder, other, make).rename(folder / KEY.digest)
    assert store.find(folder, KEY) is None
    store.find_or_make(folder, KEY, make)
    assert make.calls == 2


def test_a_file_in_the_place_of_an_entry_is_replaced(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / KEY.digest).write_text("not a folder")
    assert store.find_or_make(folder, KEY, Maker()).is_dir()


def test_what_fails_halfway_leaves_nothing(folder: Path) -> None:
    def fail(new: Path) -> None:
        (new / "kernel.so").write_bytes(b"half")
        raise KeyError("the compiler")

    with pytest.raises(KeyError):
        store.find_or_make(folder, KEY, fail)
    assert [p.name for p in folder.iterdir() if p.suffix != ".lock"] == []


MAKE_SLOWLY = """
import sys, time, types
from pathlib import Path
package = types.ModuleType("flash_attn_fp8")  # whose own imports would load torch, for nothing
package.__path__ = [sys.argv.pop(1)]
sys.modules["flash_attn_fp8"] = package
from flash_attn_fp8.compiler import store
from flash_attn_fp8.compiler.key import Key
folder, log, key = Path(sys.argv[1]), Path(sys.argv[2]), Key(*sys.argv[3:])
def make(new):
    with log.open("a") as file:
        file.write("made\\n")
    time.sleep(1)
    (new / "kernel.so").write_bytes(b"code")
print("ready", flush=True)
sys.stdin.readline()
print((store.find_or_make(folder, key, make) / "kernel.so").read_text())
"""


def test_processes_that_ask_at_once_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fields = [str(value) for value in vars(KEY).values()]
    package = str(Path(store.__file__).parents[1])
    command = [sys.executable, "-c", MAKE_SLOWLY, package, str(folder), str(log), *fields]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # at once: each has all its imports behind it
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["code\n"] * 2
    assert log.read_text() == "made\n"
