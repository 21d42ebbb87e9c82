"""What is asked of the code of an SM90 kernel with products of warpgroups."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks import sass
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.specs import Spec

PTXAS = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"


def check_code(spec: Spec) -> None:
    """Nothing is spilt in its loops or elsewhere, and no product waits for another."""
    entry = cache.keep(spec, "sm_90a", "simulator")
    cubin = (entry / link.CUBIN).read_bytes()
    (blocks,) = sass.functions(sass.printed("nvdisasm", cubin=cubin)).values()
    assert any(sass.loops(blocks))
    assert sass.spills(blocks) == {}
    if Path(PTXAS).exists():
        _check_products(entry / link.PTX)


def _check_products(ptx: Path) -> None:
    command = [PTXAS, "-arch=sm_90a", "-v", "-o", "/dev/null", str(ptx)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    assert "C75" not in said, said
    assert "serialized" not in said, said
