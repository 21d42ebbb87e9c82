"""`flash-attn-fp8 sim` runs a script that was written for a GPU, and says what is wrong with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the bridge needs CuTe DSL")

_SCRIPT = '''
import sys
import torch, cutlass, cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    c[i] = a[i] + b[i]

@cute.jit
def run(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    add(a, b, c).launch(grid=({ctas}, 1, 1), block=(64, 1, 1))

a, b = (torch.randn(256, device="cuda") for _ in range(2))
c = torch.zeros(256, device="cuda")
run(*map(from_dlpack, (a, b, c)))
print("equal", torch.equal(c, a + b), sys.argv[1:])
'''


def _run(tmp_path: Path, ctas: int, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.replace("{ctas}", str(ctas)))
    command = [sys.executable, "-m", "flash_attn_fp8", "sim", *options, str(script), "--mine", "3"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_runs_with_its_own_arguments(tmp_path: Path) -> None:
    counters, trace = tmp_path / "counters.json", tmp_path / "trace.json"
    options = ("--schedule", "random", "--counters", str(counters), "--trace", str(trace))
    done = _run(tmp_path, 4, *options)
    assert done.returncode == 0, done.stderr
    assert "equal True ['--mine', '3']" in done.stdout
    (launch,) = json.loads(counters.read_text())
    executed = {(row["warp"], row["opcode"]): row["executed"] for row in launch["instructions"]}
    assert executed[0, "add.f32"] == executed[1, "add.f32"] == 4
    assert launch["traffic"]["global bytes written"] == 256 * 4
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"process_name", "thread_name", "run"} <= names


def test_a_finding_is_told_and_ends_it(tmp_path: Path) -> None:
    done = _run(tmp_path, 5)
    assert done.returncode == 1
    assert "OutOfBounds" in done.stderr
    assert "PTX line" in done.stderr
