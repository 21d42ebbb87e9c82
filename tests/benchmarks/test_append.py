"""The benchmark of appends: refused politely without a GPU; what it would time is right."""

from __future__ import annotations

import pytest
import torch

from benchmarks import append
from flash_attn_fp8.formats import QUANTIZED


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert append.main() == append.NO_DEVICE
    assert "nothing was measured" in capsys.readouterr().out


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale", append.STATIC)
def test_what_is_timed_appends(fmt, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(append.fa.QuantizedKVCache, "append", _watched(seen))
    append.appends(fmt.dtype, 64, scale, 32, "cpu")()
    (cache,) = seen
    written = cache.k.view(torch.uint8).flatten(0, 1).any(-1).any(-1)
    assert int(written.sum()) == 32
    assert cache.per == ("token_head" if scale is None else "tensor")


def _watched(seen: list):
    original = append.fa.QuantizedKVCache.append

    def watched(self, *args, **kwargs) -> None:
        seen.append(self)
        original(self, *args, **kwargs)

    return watched


def test_bytes_are_those_that_the_simulator_counts_once() -> None:
    """Of the numbers, codes and scales; a row's slot is read by each of its lanes, from a cache."""
    assert append.bytes_moved(10, 2, 64, static=True) == 40 * 64 * 3 + 160
    assert append.bytes_moved(10, 2, 64, static=False) == 40 * (64 * 3 + 4) + 160
