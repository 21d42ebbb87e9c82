"""What executes: a device as the planner sees it. The package's environment is read here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from platformdirs import user_cache_path

from flash_attn_fp8.errors import InvalidArguments

# SM counts of the parts that the names stand for, used where no device is present to ask
# (H200 SXM: 132, read off the device; B200: 148, NVIDIA's product brief).
_NAMED_SM_COUNT = {"sm_90a": 132, "sm_100a": 148}


# Shared memory of a CTA at most, in bytes: CUDA programming guide, technical specifications.
SHARED_MEMORY = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_87": 163 * 1024, "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_120a": 99 * 1024,
    "sm_121a": 99 * 1024,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """An architecture (`cpu`, `sm_90a`, `sm_100a`, ...) and its number of SMs."""

    arch: str
    sm_count: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.arch != "cpu"


def compute_capability(arch: str) -> int:
    """90 of sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def has_fp8(arch: str) -> bool:
    """Whether the architecture converts fp8: PTX ISA, `cvt`, from sm_89 on."""
    return compute_capability(arch) >= 89


CPU = Target("cpu")

# Architectures that the simulator knows.
SIMULATED_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")
# What impl="sim" simulates: few multiprocessors, so that a CTA works on several tiles in turn.
SIMULATED = Target("sm_100a", 4)


def simulated(target: Target) -> Target:
    """What impl="sim" simulates where it is planned for a target: that one, if it can be."""
    return target if target.arch in SIMULATED_ARCHS else SIMULATED


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device; meta and CPU tensors are planned for the CPU."""
    if device.type != "cuda":
        return CPU
    props = torch.cuda.get_device_properties(device)
    suffix = "a" if props.major >= 9 else ""
    return Target(f"sm_{props.major}{props.minor}{suffix}", props.multi_processor_count)


def target_named(name: str) -> Target:
    """`cpu`, `sm_100a`, or `sm_100a:4` for a chosen number of SMs.

    Raises:
        InvalidArguments: the name is none of these.
    """
    match = re.fullmatch(r"(cpu|sm_\d+[af]?)(?::(\d+))?", name)
    if match is None:
        raise InvalidArguments(
            f"target={name!r} is no architecture; write cpu, sm_90a, sm_100a, or sm_100a:SMS"
        )
    arch, count = match.groups()
    return Target(arch, int(count) if count else _NAMED_SM_COUNT.get(arch, 1))


def debug_checks() -> bool:
    """FLASH_ATTN_FP8_DEBUG=1: check values on CUDA too (costs a host synchronisation a call)."""
    return os.environ.get("FLASH_ATTN_FP8_DEBUG", "0") not in ("", "0")


def cache_folder() -> Path:
    """FLASH_ATTN_FP8_CACHE: where compiled kernels are kept; by default the user's cache folder."""
    return Path(os.environ.get("FLASH_ATTN_FP8_CACHE") or user_cache_path("flash_attn_fp8"))


def bundles() -> tuple[Path, ...]:
    """FLASH_ATTN_FP8_BUNDLE: folders of kernels compiled elsewhere, separated as in PATH."""
    folders = os.environ.get("FLASH_ATTN_FP8_BUNDLE", "").split(os.pathsep)
    return tuple(Path(folder) for folder in folders if folder)
