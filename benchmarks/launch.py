"""What a launch costs on the host after planning: python -m benchmarks.launch; a minute, no GPU.

Three parts, in time of the one thread that works, medians of RUNS means over CALLS calls:

* prepare: `compiled._launch` with a kernel that does nothing: alignment, scales, the memo;
* convert: what TVM FFI takes for torch tensors more than for its own, in a call that does nothing;
* host code: the kernel's compiled host code, from its library: checks of the arguments, descriptors
  for TMA, and the launch, against a CUDA runtime in C that answers and does nothing.

So it is all but the driver's own share of `cudaLaunchKernelExC`, which needs a driver to be told.
The tensors are a CPU's, and TVM FFI is told that they are CUDA's: hence the second part apart.
Writes benchmarks/results/launch.{json,md}.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import tvm_ffi
from torch.utils.benchmark import Timer

from benchmarks import RESULTS, ROOT, host
from flash_attn_fp8 import compiled
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.compiler.key import key_of
from flash_attn_fp8.results import Results, Row, write
from flash_attn_fp8.sim.cute import aot
from flash_attn_fp8.sim.cute.arguments import replace_tensors
from flash_attn_fp8.sim.cute.dsl import ffi_tensor

BUDGET_US = 20.0
RUNS, CALLS = 15, 2000
ARCH = "sm_100a"
CASES = ("e4m3", "e4m3 packed", "e4m3 decode, paged")

_IDLE_RUNTIME = """
#include <stdint.h>
long launches;
int idle(void) { return 0; }
int answer(int32_t *out) { *out = 0; return 0; }
int initialise(uint64_t *state) { *state = 1; return 0; }
int launch(void) { launches++; return 0; }
"""


class IdleRuntime:
    """A CUDA runtime in C that does nothing, and counts launches."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "idle.c", folder / "idle.so"
        source.write_text(_IDLE_RUNTIME)
        command = [link.require_c_compiler(), "-shared", "-fPIC", "-O2", "-o", library, source]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    @property
    def launches(self) -> int:
        return ctypes.c_long.in_dll(self._library, "launches").value

    def address_of(self, symbol: str) -> int | None:
        name = "idle"
        if "LaunchKernel" in symbol:
            name = "launch"
        elif symbol == "cuda_dialect_init_library_once":
            name = "initialise"
        elif "Get" in symbol:
            name = "answer"
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value

    def kernel(self, spec: Any) -> Callable[..., Any]:
        """The kernel of a spec, from its library on disk."""
        key, entry = key_of(spec, ARCH, "simulator"), cache.keep(spec, ARCH, "simulator")
        runtime = link.runtime_library()
        return aot.connect(entry / link.LIBRARY, key.function, runtime, self.address_of)


def launch_of(call: Callable[..., object]) -> tuple[Any, ...]:
    """What `compiled.run` is given by a call."""
    with mock.patch.object(compiled, "run") as run:
        call(impl="sim")
    return tuple(run.call_args.args)


def _idle(*_: object) -> None:
    return None


def parts(call: Callable[..., object], runtime: IdleRuntime) -> dict[str, Timer]:
    """Timers by what they time; two of them make "convert"."""
    plan, problem, *tensors = launch_of(call)
    kernel = runtime.kernel(plan.spec)
    with mock.patch.object(compiled, "_kernel", return_value=_idle):
        launcher = compiled._Launcher(plan, problem, plan.target)
    compiled._launchers[id(plan), None, False] = launcher
    given = launcher.tensors(*tensors), launcher.scalars
    own = tuple(replace_tensors(argument, ffi_tensor) for argument in given)
    before = runtime.launches
    kernel(*own)
    if runtime.launches != before + 1:
        raise RuntimeError("the kernel did not launch; nothing would be measured")
    array = tvm_ffi.get_global_func("ffi.Array")
    statements = {
        "prepare": (compiled._launch, (plan, problem, *tensors)),
        "torch's tensors": (array, given),
        "its own tensors": (array, own),
        "host code": (kernel, own),
    }
    return {
        name: Timer("f(*a)", timer=time.thread_time, globals={"f": function, "a": arguments})
        for name, (function, arguments) in statements.items()
    }


def rows(runs: int = RUNS, count: int = CALLS) -> list[Row]:
    """The rows of every case: its parts, and their sum."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        runtime = IdleRuntime(Path(folder))
        calls = host.calls("cpu")
        for name in CASES:
            timers = parts(calls[name], runtime)
            times: dict[str, list[float]] = {part: [] for part in timers}
            for _ in range(runs + 1):  # in turns; the first warms up
                for part, timer in timers.items():
                    times[part].append(timer.timeit(count).mean * 1e6)
            torchs, own = times.pop("torch's tensors"), times.pop("its own tensors")
            times["convert"] = [a - b for a, b in zip(torchs, own, strict=True)]
            times["sum"] = [sum(each) for each in zip(*times.values(), strict=True)]
            for part, runs_of_part in times.items():
                case = {"call": name, "part": part}
                found.append(Row.of(case, "launch", "CPU time of a call", "us", *runs_of_part[1:]))
    return found


def main() -> None:
    """Measure, save, and say whether the budget is kept."""
    found = rows()
    results = Results.here(found, "python -m benchmarks.launch", ROOT)
    print(write(results, "launch", RESULTS, ("part",)).with_suffix(".md"))
    for row in found:
        if row.case["part"] == "sum":
            kept = "within" if row.value <= BUDGET_US else "over"
            print(f"{row.case['call']}: {row.value:.1f} us, {kept} the budget of {BUDGET_US:g} us")


if __name__ == "__main__":
    main()
