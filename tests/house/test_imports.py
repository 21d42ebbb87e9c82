"""What a fresh process loads. The arrows between our own modules are `lint-imports`' business."""

import importlib.util
import json
import subprocess
import sys

import pytest

import flash_attn_fp8

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


def _fresh(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.parametrize("module", ["flash_attn_fp8", "flash_attn_fp8.sim.machine"])
def test_torch_is_loaded_when_it_is_needed(module: str) -> None:
    assert _fresh(f"import sys, {module}\nprint('torch' in sys.modules)").strip() == "False"


def test_every_public_name_is_there_in_any_order_of_loading() -> None:
    """Also where modules were imported before the names were asked for."""
    code = """
import sys
from flash_attn_fp8.quantization import ZERO_DESCALE
import flash_attn_fp8.explanation, flash_attn_fp8.accuracy
from flash_attn_fp8 import *
import flash_attn_fp8
assert set(flash_attn_fp8.__all__) <= set(dir(flash_attn_fp8)) & set(globals()), dir(flash_attn_fp8)
print(all(callable(f) for f in (flash_attn_func, quantize, explain, accuracy_report)))
"""
    assert _fresh(code).strip() == "True"


def test_no_module_hides_a_public_name() -> None:
    hidden = [n for n in flash_attn_fp8.__all__ if importlib.util.find_spec(f"flash_attn_fp8.{n}")]
    assert not hidden


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'flash_attn_fnuc'"):
        _ = flash_attn_fp8.flash_attn_fnuc
