"""The command line, in process: what it prints, what it writes, how it ends."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flash_attn_fp8.accuracy import experiments
from flash_attn_fp8.accuracy.published import PUBLISHED_SETTINGS, Table
from flash_attn_fp8.cli import app
from flash_attn_fp8.errors import InvalidArguments
from tests.house.sources import ROOT

TENSOR = "e4m3[1, 128, 8, 64]"
CALL = f"flash_attn_func(q={TENSOR}, k={TENSOR}, v={TENSOR}, causal=True)"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    for command in ("demo", "env", "support", "explain", "accuracy"):
        assert command in shown


def test_demo_shows_errors_and_what_ran() -> None:
    ended = run("demo", "--seqlen", "256", "--nheads", "2", "--nheads-kv", "1")
    assert ended.exit_code == 0
    assert "ran: tiled" in ended.stdout
    assert "not cute: needs a CUDA device" in ended.stdout
    errors = {}
    for line in ended.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 4:
            errors[cells[0].partition(" row_sum")[0], cells[1]] = float(cells[2])
    default = errors["e4m3 max_offset=8 rescale_threshold=0.75", "batch_head"]
    assert default < errors["UNSAFE e4m3 max_offset=8 rescale_threshold=4", "batch_head"]
    assert errors["bf16, for comparison", ""] < default


def test_demo_refuses_what_attention_refuses() -> None:
    ended = run("demo", "--nheads", "3", "--nheads-kv", "2")
    assert ended.exit_code == 2
    assert "3 heads" in ended.stderr


def test_env_says_what_runs_and_why_not() -> None:
    shown = run("env").stdout
    for part in ("torch", "nvidia-cutlass-dsl", "tiled", "needs a CUDA device"):
        assert part in shown


def test_explain_takes_what_an_error_message_prints() -> None:
    ended = run("explain", CALL)
    assert ended.exit_code == 0
    assert ended.stdout.startswith(CALL)
    assert "executor  tiled" in ended.stdout


def test_explain_takes_a_name_and_arguments() -> None:
    arguments = [f"{name}={TENSOR}" for name in "qkv"]
    ended = run("explain", "flash_attn_func", *arguments, "causal=True")
    assert ended.exit_code == 0
    assert ended.stdout == run("explain", CALL).stdout


def test_explain_lists_every_reason_and_ends_with_1() -> None:
    ended = run("explain", CALL.replace(")", ", softcap=-1, impl='cute')"), "--target", "sm_100a")
    assert ended.exit_code == 1
    assert "on sm_100a" in ended.stdout
    assert "1. softcap=-1 must be a finite number" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nonsense"], "is no call"),
        (["explain", CALL, "--target", "abacus"], "target='abacus' is no architecture"),
        (["explain", "flash_attn_func", "q=e4m3"], "write a tensor like"),
        (["explain", "flash_attn_func"], "q, k, v missing"),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(arguments: list[str], message: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") <= 2
    assert not isinstance(ended.exception, InvalidArguments)


@pytest.mark.parametrize("arguments", [["explain"], ["demo", "--seqlen", "0"], ["fly"]])
def test_usage_errors_end_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_support_prints_the_table() -> None:
    shown = run("support").stdout
    assert "bf16 q over int8 k, v" in shown
    assert "this version has no compiled kernel for e4m3 queries on sm_80" in shown


def test_the_support_page_is_what_the_rules_say() -> None:
    page = (ROOT / "docs" / "support.md").read_text("utf-8")
    assert page == run("support", "--markdown").stdout, (
        "flash-attn-fp8 support --markdown > docs/support.md"
    )


@pytest.fixture
def one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = experiments.table

    def small(quick: bool, impl: str) -> experiments.Experiment:
        part = Table((256,), PUBLISHED_SETTINGS[:1], rows_per_head=8)
        full = whole(quick, impl)
        return experiments.Experiment(full.name, (part,), full.columns, full.shown, full.picture)

    monkeypatch.setattr(experiments, "table", small)


@pytest.mark.usefixtures("one_cell")
def test_accuracy_prints_and_writes(tmp_path: Path) -> None:
    ended = run("accuracy", "--no-policies", "--out", str(tmp_path))
    assert ended.exit_code == 0, ended.output
    assert "0.1148" in ended.stdout
    assert "Largest deviation from a published figure" in ended.stdout
    assert {f.name for f in tmp_path.iterdir()} == {
        "accuracy.json",
        "accuracy.md",
        "accuracy.png",
    }
    written = json.loads((tmp_path / "accuracy.json").read_text())
    assert written["command"] == "flash-attn-fp8 accuracy --quick --no-policies"
    assert len(written["rows"]) == 3
    assert "tile 128 keys a tile, accumulator fp32" in (tmp_path / "accuracy.md").read_text()


@pytest.mark.usefixtures("one_cell")
def test_accuracy_ends_with_2_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run("accuracy", "--no-policies", "--out", str(tmp_path / "file"))
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: ")


def test_experiments_know_their_length() -> None:
    for make in (experiments.table, experiments.policies):
        for quick in (True, False):
            assert len(make(quick)) == sum(len(part) for part in make(quick).parts)
