"""The schema of benchmark results: what it refuses, what it writes, what it finds again."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flash_attn_fp8 import results
from flash_attn_fp8.results import Plot, Results, ResultsError, Row

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def rows() -> list[Row]:
    return [
        Row.of(
            {"seqlen": n, "causal": c, "d": 128}, impl, "time", "ms", t + n, t + n + 2, t + n + 1
        )
        for n in (256, 1024)
        for c in (False, True)
        for impl, t in (("ours", 1), ("theirs", 2))
    ]


def some_results() -> Results:
    return Results(tuple(rows()), "make it", {"cpu": "x", "cores": 2, "gpu": None}, {}, "abc-dirty")


def test_value_is_the_median_of_the_runs() -> None:
    assert Row.of({"a": 1}, "i", "m", "u", 5, 1, 2).value == 2
    assert Row.of({"a": 1}, "i", "m", "u", 5, 1, 2).runs == (5, 1, 2)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"case": {}}, "has no case"),
        ({"case": {"a": [1]}}, "case 'a'=[1] must be text, a number or a boolean"),
        ({"case": {"impl": 1}}, "case must not be keyed 'impl'"),
        ({"impl": ""}, "impl='' must be text"),
        ({"unit": None}, "unit=None must be text"),
        ({"runs": ()}, "has no runs"),
        ({"value": float("nan")}, "must be finite numbers"),
        ({"runs": (1.0, float("inf")), "value": 1.0}, "must be finite numbers"),
        ({"runs": (True,), "value": 1}, "must be finite numbers"),
        ({"value": 7.0}, "value=7.0 is not the median of runs"),
    ],
)
def test_a_faulty_row_is_refused_and_nothing_is_written(tmp_path: Path, change, fault) -> None:
    faulty = replace(rows()[0], **change)
    with pytest.raises(ResultsError) as refusal:
        results.write(Results((faulty,)), "name", tmp_path)
    assert fault in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_all_faults_are_named_at_once() -> None:
    good, *_ = rows()
    with pytest.raises(ResultsError) as refusal:
        results.check([replace(good, impl=""), good, good])
    assert "row 0 impl=''" in str(refusal.value)
    assert "row 2 has the case, impl and metric of an earlier row" in str(refusal.value)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = results.write(some_results(), "name", tmp_path / "new")
    assert results.read(path) == some_results()
    assert sorted(f.name for f in path.parent.iterdir()) == ["name.json", "name.md"]
    assert list(json.loads(path.read_text())) == [
        "command",
        "machine",
        "versions",
        "commit",
        "rows",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = results.write(some_results(), "name", tmp_path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(results.os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        results.write(replace(some_results(), command="other"), "name", tmp_path)
    assert path.read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["name.json", "name.md"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is no JSON"),
        ("{}", "must hold exactly command, machine, versions, commit, rows"),
        (
            '{"command": "", "machine": {}, "versions": {}, "commit": "", "rows": [{"case": {}}]}',
            "row 0 must hold exactly case, impl, metric, unit, value, runs",
        ),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ResultsError, match=fault):
        results.read(tmp_path / "a.json")


def test_merging_replaces_what_was_measured_again() -> None:
    old = rows()
    again = Row.of(old[2].case, old[2].impl, "time", "ms", 99)
    more = Row.of({"seqlen": 4096, "causal": False, "d": 128}, "ours", "time", "ms", 1)
    merged = results.merge(old, [again, more])
    assert merged == (*old[:2], again, *old[3:], more)


def test_tables_pivot_the_impl_and_say_constants_once() -> None:
    (table,) = results.tables(rows())
    assert table.title == "time (ms)"
    assert table.constant == {"d": 128}
    assert table.header == ("seqlen", "causal", "ours", "theirs")
    assert table.lines[1] == ("256", "True", "258", "259")
    text = results.markdown(some_results(), "name")
    assert "| 1024 | False | 1026 | 1027 |" in text
    assert "commit: abc-dirty" in text


def test_tables_pivot_any_entry_of_the_case() -> None:
    (table,) = results.tables(rows(), ("seqlen", "impl"))
    assert table.header == ("causal", "256 · ours", "256 · theirs", "1024 · ours", "1024 · theirs")
    assert len(table.lines) == 2


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_commit_is_dirty_unless_only_results_changed(tmp_path: Path) -> None:
    assert results.commit(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = results.commit(tmp_path)
    assert not clean.endswith("-dirty")
    (tmp_path / results.FOLDER).mkdir(parents=True)
    (tmp_path / results.FOLDER / "a.json").write_text("{}")
    assert results.commit(tmp_path) == clean
    (tmp_path / "new.py").write_text("2")
    assert results.commit(tmp_path) == f"{clean}-dirty"


def test_the_machine_and_the_versions_are_described() -> None:
    here = Results.here(rows(), "command")
    assert set(here.machine) == {"cpu", "cores", "gpu"}
    assert here.machine["cores"] >= 1
    assert here.versions["python"] == sys.version.partition(" ")[0]
    assert here.versions["torch"]


@pytest.mark.parametrize("x", [("seqlen",), ("seqlen", "causal")], ids=["lines", "bars"])
def test_a_plot_is_a_png(tmp_path: Path, x: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    what = Plot("time", x=x, series=("impl",), panels=("causal",), points="theirs")
    path = results.plot(rows(), what, tmp_path / "a.png")
    assert path.read_bytes().startswith(PNG_MAGIC)


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    what = Plot("time", x=("seqlen",), series=("impl",), where={"seqlen": 7})
    with pytest.raises(ResultsError, match="no row has the metric 'time'"):
        results.plot(rows(), what, tmp_path / "a.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResultsError, match="pip install matplotlib"):
        results.plot(rows(), Plot("time", ("seqlen",), ("impl",)), tmp_path / "a.png")
