"""The two products of `chain.ptx`: launches, and what they must give."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.machine import Machine, Run
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.tensormap import encode
from tests.sim.kernels.gemm import from_bf16, tensor_map, to_bf16
from tests.sim.programs import aligned, buffer

TEXT = (Path(__file__).parent / "chain.ptx").read_text(encoding="utf-8")
NAMES = {
    1024 + 32768 + 8 * i: name
    for i, name in enumerate(("full", "s_full", "p_full", "o_full", "o_empty", "a_empty"))
}


class Problem:
    """Small integers: S is exact in f32, and so is the sum of the second product of its bf16."""

    def __init__(self, rounds: int = 3) -> None:
        rng = np.random.default_rng(0)
        self.rounds = rounds
        self.a, self.b = aligned((128 * rounds, 64), "u2"), aligned((64, 64), "u2")
        self.v, self.o = aligned((64, 64), "u2"), aligned((128 * rounds, 64), "f4")
        for x in (self.a, self.b, self.v):
            x[:] = to_bf16(rng.integers(-3, 4, x.shape))
        self.buffers = [
            buffer("A", self.a, False),
            buffer("B", self.b, False),
            buffer("V", self.v, False),
            buffer("O", self.o),
        ]

    def run(self, text: str = TEXT, machine: Machine | None = None) -> Run:
        self.o[:] = np.nan
        machine = machine or Machine(barrier_names=NAMES, instruction_limit=200_000)
        launch = Launch(
            grid=(1, 1, 1),
            block=(192, 1, 1),
            dynamic_smem=32768 + 64,
            params=(
                encode(tensor_map(self.a, (64, 128), "128B")),
                encode(tensor_map(self.b, (64, 64), "128B")),
                *(x.ctypes.data.to_bytes(8, "little") for x in (self.v, self.o)),
                self.rounds.to_bytes(4, "little"),
            ),
            buffers=tuple(self.buffers),
        )
        return machine.launch(parse(text), "chain", launch)

    def wrong(self) -> int:
        """Elements of O that are not right."""
        s = from_bf16(self.a) @ from_bf16(self.b).T
        return int((self.o != from_bf16(to_bf16(s)) @ from_bf16(self.v).T).sum())
