"""What a warm eager call costs on the host, up to its executor: python -m benchmarks.host; seconds.

The executor is replaced by one that does nothing. What is left is what each call pays before a
kernel could start: describing its arguments, finding its plan by the metadata of its tensors, and
allocating its results. A call on the CPU, or in debug mode, also reads the values of its index and
scale tensors, which no CUDA call does: that is a column of its own.

Each figure is the median of RUNS means over CALLS calls, in time of the one thread that works: the
wall clock also counts what other processes take. The tensors are a GPU's where there is one.
Writes benchmarks/results/host.{json,md}.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT
from flash_attn_fp8 import ops
from flash_attn_fp8.results import Results, Row, write

BUDGET_US = 25.0  # of a call whose values are not read
RUNS, CALLS = 31, 1000
_VALUES = {False: "values unread (CUDA)", True: "values read (CPU, debug mode)"}


def calls(device: str) -> dict[str, Callable[[], object]]:
    """The measured calls by name: batched, packed, and three forms of decoding."""
    q, k, v = (torch.randn(2, 256, h, 128, device=device) for h in (8, 2, 2))
    q8, k8, v8 = (fa.quantize(x, per="batch_head") for x in (q, k, v))
    scales = dict(q_descale=q8.descale, k_descale=k8.descale, v_descale=v8.descale)
    codes = (q8.values, k8.values, v8.values)
    bounds, used = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 256, 512], [256, 100])
    )
    pages = torch.arange(32, dtype=torch.int32, device=device).reshape(2, 16)
    one, (cache_k, cache_v) = q8.values[:, :1], (_paged(x) for x in codes[1:])
    packed = tuple(x.flatten(0, 1) for x in codes)
    varlen = partial(fa.flash_attn_varlen_func, causal=True, **scales)
    return {
        "bf16": partial(fa.flash_attn_func, *(x.bfloat16() for x in (q, k, v)), causal=True),
        "e4m3": partial(fa.flash_attn_func, *codes, causal=True, **scales),
        "e4m3 packed": partial(varlen, *packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds),
        "e4m3 decode": partial(fa.flash_attn_func, one, *codes[1:], **scales),
        "e4m3 decode, paged": partial(
            varlen, one, cache_k, cache_v, page_table=pages, seqused_k=used
        ),
        "e4m3 flash_attn_with_kvcache": partial(
            fa.flash_attn_with_kvcache, one, *codes[1:], cache_seqlens=used, **scales
        ),
    }


def _paged(x: Tensor, page_size: int = 16) -> Tensor:
    return x.reshape(-1, page_size, *x.shape[2:])


@contextmanager
def idle_executor(read_values: bool) -> Iterator[None]:
    """The executor replaced by one that does nothing; and the reading of values, where it is."""
    nothing: dict[str, Callable[..., None]] = {"execute": _nothing}
    if not read_values:
        nothing["check_values"] = _nothing
    with mock.patch.multiple(ops, **nothing):
        yield


def _nothing(*_: object) -> None:
    return None


def rows(device: str, runs: int = RUNS, count: int = CALLS) -> list[Row]:
    """A row for each call and each way; `runs` means over `count` calls, taken in turns.

    In turns: what else the machine does for a second meets every row alike.
    """
    measured = {
        (name, read_values): Timer("call()", timer=time.thread_time, globals={"call": call})
        for name, call in calls(device).items()
        for read_values in _VALUES
    }
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in measured}
    for _ in range(runs + 1):  # the first warms up
        for key, timer in measured.items():
            with idle_executor(read_values=key[1]):
                times[key].append(timer.timeit(count).mean * 1e6)
    return [
        Row.of(
            {"call": name, "device": device, "values": _VALUES[read_values]},
            "front end",
            "CPU time of a call",
            "us",
            *times[name, read_values][1:],
        )
        for name, read_values in measured
    ]


def main() -> None:
    """Measure, save, and say where and whether the budget is kept."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = rows(device)
    results = Results.here(found, "python -m benchmarks.host", ROOT)
    print(write(results, "host", RESULTS, ("values",)).with_suffix(".md"))
    for row in found:
        if row.case["values"] == _VALUES[False]:
            kept = "within" if row.value <= BUDGET_US else "over"
            print(f"{row.case['call']}: {row.value:.1f} us, {kept} the budget of {BUDGET_US:g} us")


if __name__ == "__main__":
    main()
