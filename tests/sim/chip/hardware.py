"""Cases on the GPU of this machine, by the driver alone: PTX text in, bytes out.

`python -m tests.sim.chip.hardware DIRECTORY [PREFIX ...]` records every case (or those whose names
start so) into DIRECTORY, one file a group, with where they come from.

A fault leaves a context unusable, and a process with it: cases run in a process of their own, which
goes on in another one after a fault or a hang.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.sim.chip.case import Array, Bytes, Case, Map, results
from tests.sim.chip.recording import Outcome, save

_SECONDS = 40.0  # for one case
_ATTRIBUTE_CLUSTER = 4
_JIT_LOG, _JIT_LOG_BYTES = 5, 6  # the error log of CUjit_option
_MAX_DYNAMIC_SMEM = 8
_GUARD = 4096  # bytes around an array, so that its neighbours are nobody's


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Driver:
    """One context on device 0."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._modules: dict[str, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def _module(self, ptx: str) -> ctypes.c_void_p:
        if ptx not in self._modules:
            module, log = ctypes.c_void_p(), ctypes.create_string_buffer(1 << 14)
            options = (ctypes.c_int * 2)(_JIT_LOG, _JIT_LOG_BYTES)
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
            try:
                self._call(
                    "cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2,
                    options, values,
                )  # fmt: skip
            except RuntimeError as e:
                raise RuntimeError(f"{e}\n{log.value.decode(errors='replace')}") from e
            self._modules[ptx] = module
        return self._modules[ptx]

    def run(self, case: Case) -> list[Bytes]:
        """The outputs that the GPU computes."""
        function = ctypes.c_void_p()
        module = self._module(case.ptx)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        if case.smem:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, case.smem)
        addresses = [self._upload(a.data) if isinstance(a, Array) else None for a in case.arguments]
        params = []
        for argument, address in zip(case.arguments, addresses, strict=True):
            if address is not None:
                params.append(address.to_bytes(8, "little"))
            elif isinstance(argument, Map):
                params.append(argument.at(addresses[argument.of] or 0))
            else:
                params.append(argument.raw)
        self._launch(case, function, params)
        back = [
            self._download(address, a.data.size)
            for a, address in zip(case.arguments, addresses, strict=True)
            if address is not None
        ]
        for address in addresses:
            if address is not None:
                self._call("cuMemFree_v2", ctypes.c_uint64(address - _GUARD))
        return results(case, back)

    def _launch(self, case: Case, function: ctypes.c_void_p, params: Sequence[bytes]) -> None:
        attribute = _Attribute(_ATTRIBUTE_CLUSTER, 0, (ctypes.c_uint * 16)(case.cluster, 1, 1))
        config = _Config(
            (case.ctas, 1, 1), (case.threads, 1, 1), case.smem, None,
            ctypes.pointer(attribute), int(case.cluster > 1),
        )  # fmt: skip
        buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in params]
        pointers = (ctypes.c_void_p * len(params))(*(ctypes.addressof(b) for b in buffers))
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self._call("cuCtxSynchronize")

    def _upload(self, data: Bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.size + 2 * _GUARD))
        at = address.value + _GUARD
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(at), ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.size),
        )  # fmt: skip
        return int(at)

    def _download(self, address: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        self._call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
        )  # fmt: skip
        return data


# ------------------------------------------------------------------------------- processes


def _serve(cases: Sequence[Case], pipe: Connection) -> None:
    driver = Driver()
    for case in cases:
        try:
            pipe.send(driver.run(case))
        except RuntimeError as e:
            pipe.send(str(e))
            if "cuModule" not in str(e):  # what did not load has spoilt nothing
                return


def run_all(cases: Sequence[Case]) -> Iterator[Outcome]:
    """What became of each case, in order: its outputs, or the error as text."""
    context = multiprocessing.get_context("spawn")  # the parent may have a context of its own
    done = 0
    while done < len(cases):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(cases[done:], theirs))
        process.start()
        theirs.close()
        before = done
        for outcome in _received(ours):
            done += 1
            yield outcome
        if done == before:
            process.join()
            raise RuntimeError(f"no case runs: the process ended with {process.exitcode}")
        process.kill()
        process.join()


def _received(pipe: Connection) -> Iterator[Outcome]:
    """Outcomes until the process is done, or hangs."""
    while True:
        try:
            if not pipe.poll(_SECONDS):
                yield "hangs"
                return
            yield pipe.recv()
        except EOFError:
            return


def capability() -> tuple[int, int]:
    """Of device 0, as (major, minor)."""
    text = _output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0")
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() else (0, 0)


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, str]:
    """What a recording says about itself."""
    gpu = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    commit = Path("chip_commit")  # a copy without .git says here what it is a copy of
    return {
        "gpu and driver": gpu,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python3 -m tests.sim.chip.hardware", *sys.argv[1:]]),
        "commit": commit.read_text().strip()
        if commit.exists()
        else _output_of("git", "rev-parse", "HEAD"),
    }


def main() -> None:
    from tests.sim.chip.cases import GROUPS

    directory, prefixes = Path(sys.argv[1]), tuple(sys.argv[2:])
    about = provenance()
    for group, cases in GROUPS.items():
        wanted = [c for c in cases if c.name.startswith(prefixes or "")]
        if not wanted:
            continue
        found = {}
        for case, outcome in zip(wanted, run_all(wanted), strict=True):
            found[case.name] = (case.digest, outcome)
            if isinstance(outcome, str):
                sys.stdout.write(f"{case.name}: {outcome}\n")
        save(directory / f"{group}.npz", about, found)
        sys.stdout.write(f"{group}: {len(wanted)} cases\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
