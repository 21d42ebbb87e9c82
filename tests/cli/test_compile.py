"""`flash-attn-fp8 compile`: what it builds, where to, and how it refuses."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flash_attn_fp8 as fa
from flash_attn_fp8.cli import app
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.compiler.presets import PRESETS, specs_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


@pytest.fixture(autouse=True)
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The specs that are compiled, by a compiler that writes texts."""
    specs: list[object] = []

    def export(spec: object, key: object, new: Path, compiler: str) -> None:
        specs.append(spec)
        (new / link.LIBRARY).write_text(f"code of {spec}")

    runtime = tmp_path / "runtime.so"
    runtime.write_text("the runtime")
    monkeypatch.setenv("FLASH_ATTN_FP8_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_export", export)
    monkeypatch.setattr(link, "runtime_library", lambda: runtime)
    return specs


def test_list_names_every_preset_and_compiles_nothing(exported: list[object]) -> None:
    shown = run("--list").stdout
    assert [line.split()[0] for line in shown.splitlines()] == list(PRESETS)
    assert exported == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_compiles_each_of_its_kernels_once(name: str, exported: list[object]) -> None:
    ended = run("--preset", name)
    assert ended.exit_code == 0
    wanted = specs_of(PRESETS[name], "sm_100a")
    assert exported == list(wanted)
    assert ended.stdout.startswith(f"{len(wanted)} kernels, {len(wanted)} of them compiled now")
    assert run("--preset", name).stdout.startswith(f"{len(wanted)} kernels, 0 of them")


def test_a_preset_has_the_kernels_of_calls_of_any_length() -> None:
    """The only choice that sizes have a part in, but for splits: whether CTAs work in pairs."""

    def planned(seqlen: int) -> object:
        q = torch.empty(1, seqlen, 4, 128, dtype=torch.float8_e4m3fn, device="meta")
        scales = {f"{name}_descale": torch.empty(1, 4, device="meta") for name in "qkv"}
        call = {"q": q, "k": q, "v": q, "target": "sm_100a", **scales}
        return fa.explain(fa.flash_attn_func, **call).plan.spec

    specs = specs_of(PRESETS["encoder"], "sm_100a")
    assert {planned(seqlen) for seqlen in (1, 256, 257, 5000)} <= set(specs)
    assert {spec.pair for spec in specs if spec.traits.q_layout == "dense"} == {False, True}
    assert len(set(specs)) == len(specs)


def test_out_makes_a_bundle(tmp_path: Path) -> None:
    ended = run("--preset", "gpt-oss", "--out", str(tmp_path / "new" / "bundle"))
    assert ended.exit_code == 0
    manifest = json.loads((tmp_path / "new" / "bundle" / "bundle.json").read_text())
    specs = [repr(spec) for spec in specs_of(PRESETS["gpt-oss"], "sm_100a")]
    assert [one["spec"] for one in manifest["kernels"]] == specs
    assert manifest["arch"] == "sm_100a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama", "--arch", "sm_89"], "arch='sm_89': this preset is compiled for"),
        (["--preset", "lama"], "preset='lama' is not one of smoke, llama"),
        ([], "preset='' is not one of"),
        (["--preset", "smoke", "--out", "/proc/self/bundle"], "cannot be written"),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(
    arguments: list[str], message: str, exported: list[object]
) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert exported == []


def test_without_a_c_compiler_it_says_so(
    exported: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    ended = run("--preset", "smoke")
    assert ended.exit_code == 2
    assert "install gcc" in ended.stderr
    assert exported == []


def test_a_cache_that_cannot_be_written_is_an_error_here(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    ended = run("--preset", "smoke")
    assert ended.exit_code == 2
    assert "cannot be written" in ended.stderr
