"""What the simulator finds, one class per kind of fault.

Every exception says where: the PTX line, the CTA and the warp, and, where one is concerned, the
barrier or the memory by name. `Finding`s are faults of the simulated program; the others are
limits of the simulator.
"""

from __future__ import annotations


class SimulationError(Exception):
    """Base of everything that `flash_attn_fp8.sim` raises on purpose."""


class PtxSyntaxError(SimulationError, ValueError):
    """The text is not PTX as this parser knows it."""


class Unmodelled(SimulationError, NotImplementedError):
    """An opcode, suffix, operand form or descriptor bit that the simulator does not know."""


class Finding(SimulationError):
    """A fault of the program that ran."""


class OutOfBounds(Finding, IndexError):
    """An access outside every buffer or space; names the nearest."""


class Misaligned(Finding):
    """An address that its instruction's alignment rule excludes."""


class Uninitialised(Finding):
    """Shared or tensor memory was read before anything wrote it."""


class Race(Finding):
    """Two accesses of one place, at least one a write, that nothing orders."""


class Deadlock(Finding):
    """Every warp that has not exited waits; the message says who for what."""


class BarrierMisuse(Finding):
    """Arrivals or bytes that do not fit a barrier, or a barrier that was not initialised."""


class TensorMemoryMisuse(Finding):
    """Tensor memory that was not allocated, allocated twice, or never freed."""


class InstructionLimit(SimulationError):
    """The run was cut off by its limit of instructions."""
