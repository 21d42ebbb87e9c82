"""The compiled loop, and flash-attn-4 where it is installed."""

import pytest

from benchmarks.peers import flash_attn_4
from flash_attn_fp8.sim import engine

# Before tests are timed: the first time it takes a while.
engine.warm_up()


@pytest.fixture(scope="session")
def fa4():
    """flash-attn-4's module of entry points."""
    try:
        return flash_attn_4()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
