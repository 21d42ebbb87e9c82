"""A captured launch in a file, with the memory that it points into: another process can execute it.

    python -m benchmarks.simulator_launch FILE     # simulate it and print what that took, as JSON

Addresses are in the launch's arguments and in its TMA descriptors, so the memory is brought back to
where it was. That this process has nothing there is checked, not assumed. Linux only.
"""

import argparse
import ctypes
import json
import mmap
import pickle
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from flash_attn_fp8.sim import Checks, Machine, parse
from flash_attn_fp8.sim.launch import Buffer, CapturedLaunch

_FIXED_NOREPLACE = 0x100000  # MAP_FIXED_NOREPLACE, which Python's mmap does not name


def save(launch: CapturedLaunch, path: Path) -> None:
    """Write the launch and its buffers' bytes."""
    contents = [ctypes.string_at(b.address, b.nbytes) for b in launch.buffers]
    path.write_bytes(pickle.dumps((launch, contents)))


def load(path: Path) -> CapturedLaunch:
    """Read a launch of ours back, and its memory to where it was.

    Raises:
        OSError: this process uses those addresses; another one will not.
    """
    launch, contents = pickle.loads(path.read_bytes())
    _take_pages(launch.buffers)
    for b, data in zip(launch.buffers, contents, strict=True):
        ctypes.memmove(b.address, data, b.nbytes)
    found: CapturedLaunch = launch
    return found


def _take_pages(buffers: Iterable[Buffer]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size, flags = mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    pages = {
        p for b in buffers for p in range(b.address // size, -(-(b.address + b.nbytes) // size))
    }
    for page in sorted(pages):
        if (
            libc.mmap(page * size, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            != page * size
        ):
            raise OSError(ctypes.get_errno(), f"no page at {page * size:#x}")


def peak_gib() -> float:
    """The most memory that this process has had resident.

    Not `ru_maxrss`: that begins with what the process that started this one had.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def _processor_seconds() -> float:
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


def main() -> None:
    """Execute the launch `runs` times after once, and print seconds, counts and peak memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--no-checks", action="store_true")
    chosen = parser.parse_args()
    launch = load(chosen.file)
    program = parse(launch.ptx)
    checks = Checks(False, False, False, False, False) if chosen.no_checks else Checks()
    machine = Machine("sm_100a", checks=checks, workers=chosen.workers)
    wall, processor, instructions = [], [], 0
    for _ in range(chosen.runs + 1):
        start, used = time.perf_counter(), _processor_seconds()
        instructions = machine.launch(program, launch.entry, launch).warp_instructions
        wall.append(time.perf_counter() - start)
        processor.append(_processor_seconds() - used)
    taken = {"wall": wall[1:], "processor": processor[1:], "peak": peak_gib()}
    print(json.dumps({**taken, "instructions": instructions}))


if __name__ == "__main__":
    main()
