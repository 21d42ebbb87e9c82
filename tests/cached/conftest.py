"""Both forms of the cache kernel: products of warps, and on SM90 of warpgroups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flash_attn_fp8.simulation import Settings, _as_active
from flash_attn_fp8.target import target_named


@pytest.fixture(params=["sm_100a:4", "sm_90a:4"])
def on_either(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device that impl="sim" simulates."""
    with _as_active(Settings(target_named(request.param))):
        yield
