"""How near an append is to the memory's speed: python -m benchmarks.append; seconds, on a GPU.

Appends TOKENS tokens of bf16 to random slots of a paged cache, replayed from a CUDA graph so that
the host is not timed, beside a copy that moves as many bytes, in turns. Prints the bytes a second
of both, and their ratio: 1 is the speed of the copy. Without a device it measures nothing and exits
with NO_DEVICE. Writes benchmarks/results/append_DEVICE.{json,md}.
"""

import re
import sys
from collections.abc import Callable, Iterator

import torch

import flash_attn_fp8 as fa
from benchmarks import RESULTS, ROOT
from flash_attn_fp8.formats import QUANTIZED
from flash_attn_fp8.results import Results, Row, write

NO_DEVICE = 3  # exit status
TOKENS, HEADS, HEAD_DIMS, PAGE = 65_536, 8, (64, 128), 16
LAUNCHES, TURNS = 20, 10
STATIC = (None, 0.01)  # a scale a token and head, or static ones


def bytes_moved(tokens: int, heads: int, head_dim: int, static: bool) -> int:
    """Read: bf16 and int64 slots (of K and of V); written: codes, and scales where not static."""
    rows = 2 * tokens * heads
    return rows * (head_dim * 3 + (0 if static else 4)) + 2 * tokens * 8


def appends(
    dtype: torch.dtype, head_dim: int, scale: float | None, tokens: int, device: str
) -> Callable[[], None]:
    """What is timed: one append to a cache of twice the size."""
    static = None if scale is None else torch.tensor(scale, device=device)
    cache = fa.QuantizedKVCache(
        2, tokens, HEADS, head_dim, dtype=dtype, page_size=PAGE, k_scale=static, v_scale=static,
        device=device,
    )  # fmt: skip
    shape = tokens, HEADS, head_dim
    k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    return lambda: cache.append(k, v, slot_mapping=slots, check=False)


def seconds(call: Callable[[], object]) -> Callable[[], float]:
    """A clock of a call in a graph of LAUNCHES."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()

    def timed(of: object = call) -> float:  # whose tensors must live as long as the graph
        del of
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / LAUNCHES

    return timed


def measurements() -> Iterator[Row]:
    """Of each format, head dim and kind of scale: bytes a second, and the ratio to a copy's."""
    for head_dim in HEAD_DIMS:
        for fmt in QUANTIZED:
            for scale in STATIC:
                moved = bytes_moved(TOKENS, HEADS, head_dim, scale is not None)
                source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                clocks = (
                    seconds(appends(fmt.dtype, head_dim, scale, TOKENS, "cuda")),
                    seconds(lambda to=target, of=source: to.copy_(of)),
                )
                times = [[clock() for clock in clocks] for _ in range(TURNS)]
                ours, copy = (sorted(column)[TURNS // 2] for column in zip(*times, strict=True))
                kind = "static" if scale is not None else "token_head"
                case = {"format": fmt.name, "d": head_dim, "scales": kind, "tokens": TOKENS}
                yield Row.of(case, "append", "speed", "GB/s", moved / ours / 1e9)
                yield Row.of(case, "copy", "speed", "GB/s", moved / copy / 1e9)
                yield Row.of(case, "append / copy", "speed", "ratio", copy / ours)


def main() -> int:
    """The command; its exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return NO_DEVICE
    device = torch.cuda.get_device_name()
    print(device)
    rows = []
    for row in measurements():
        rows.append(row)
        print(f"{row.case} {row.impl}: {row.value:.4g} {row.unit}")
    name = re.sub("[^a-z0-9]+", "_", device.lower()).removeprefix("nvidia_")
    write(Results.here(rows, "python -m benchmarks.append", ROOT), f"append_{name}", RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
