"""What a fresh process loads. The arrows between our own modules are `lint-imports`' business."""

import json
import subprocess
import sys

HEAVY = ["cutlass", "triton", "typer", "rich", "matplotlib"]

# torch goes first: what it brings along on this machine is not ours.
LOADED_BY_US = """
import json, sys, torch
before = set(sys.modules)
import flash_attn_fp8
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_loads_no_backend_and_no_terminal() -> None:
    command = [sys.executable, "-c", LOADED_BY_US]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    loaded = json.loads(out.stdout)
    assert "flash_attn_fp8" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)
