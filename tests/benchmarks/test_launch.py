"""The benchmark of launches measures launches."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("cutlass") is None or shutil.which("gcc") is None:
    pytest.skip("needs CuTe DSL and gcc", allow_module_level=True)

from benchmarks import launch
from flash_attn_fp8 import compiled


def test_every_timed_call_of_host_code_is_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    original = launch.IdleRuntime

    class Counted(original):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            launched.append(self)

    monkeypatch.setattr(launch, "IdleRuntime", Counted)
    monkeypatch.setattr(launch, "CASES", ("e4m3",))
    monkeypatch.setattr(compiled, "_launchers", {})
    rows = launch.rows(runs=2, count=3)
    assert launched[0].launches >= 1 + 3 * 3
    values = {row.case["part"]: row.value for row in rows}
    assert set(values) == {"prepare", "convert", "host code", "sum"}
    assert values["prepare"] > 0
    assert values["host code"] > 0
