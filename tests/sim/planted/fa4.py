"""flash-attn-4's e4m3 forward as a captured launch, to damage and run again."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

import numpy as np
import torch

from flash_attn_fp8 import sim
from flash_attn_fp8.sim.launch import CapturedLaunch
from flash_attn_fp8.sim.machine import Machine, Run
from flash_attn_fp8.sim.ptx.parse import parse


def interface() -> Any:
    """flash-attn-4's module of entry points; a stand-in for triton where there is none."""
    if importlib.util.find_spec("triton") is not None:
        return importlib.import_module("flash_attn.cute.interface")
    import torch._dynamo  # noqa: F401  before the stand-in: it looks into a triton that is there

    triton = types.ModuleType("triton")
    triton.runtime = types.SimpleNamespace(  # type: ignore[attr-defined]
        cache=types.SimpleNamespace(FileCacheManager=object)
    )
    sys.modules["triton"] = triton
    try:
        return importlib.import_module("flash_attn.cute.interface")
    finally:
        del sys.modules["triton"]


@dataclasses.dataclass
class Captured:
    """A launch with the memory that it reads, and the result that it must have."""

    launch: CapturedLaunch
    tensors: list[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor
    right: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, text: str, machine: Machine) -> Run:
        """Run this text; the results start as NaN."""
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        launch = dataclasses.replace(self.launch, ptx=text)
        return machine.launch(parse(text), launch.entry, launch)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.clone(), self.lse.clone()

    def wrong(self) -> int:
        """Elements that are not what the undamaged kernel gave."""
        assert self.right is not None
        pairs = zip(self.results(), self.right, strict=True)
        return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


def captured(heads: int = 2, seqlen_q: int = 256, seqlen_k: int = 768) -> Captured:
    """Two tiles for one CTA, six blocks of keys each: the eight buffers of K and V are reused
    within a tile, and all the rest from one tile to the next."""
    with warnings.catch_warnings():  # of what it imports, and of the compiler
        warnings.simplefilter("ignore")
        return _captured(interface(), heads, seqlen_q, seqlen_k)


def _captured(fa4: Any, heads: int, seqlen_q: int, seqlen_k: int) -> Captured:
    made = torch.Generator().manual_seed(0)
    launches: list[CapturedLaunch] = []
    with sim.device("sm_100a", launches.append, sm_count=1):
        shapes = ((1, seqlen_q, heads, 128), (1, seqlen_k, heads, 128), (1, seqlen_k, heads, 128))
        qkv = [torch.randn(*s, generator=made).to(torch.float8_e4m3fn) for s in shapes]
        descales = {f"{x}_descale": torch.full((1, heads), 0.5) for x in "qkv"}
        out = torch.empty(1, seqlen_q, heads, 128, dtype=torch.bfloat16)
        lse = torch.empty(1, heads, seqlen_q)
        fa4._flash_attn_fwd(*qkv, **descales, out=out, lse=lse)
    (launch,) = launches
    # The tensors stay where they are as long as this lives; outside the device they are the CPU's.
    kept = [*qkv, *descales.values(), out, lse]
    found = Captured(launch, kept, _plain(out), _plain(lse))
    found.run(launch.ptx, Machine())
    found.right = found.results()
    assert not np.isnan(found.out.float().numpy()).any()
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.view(tensor.dtype)
