"""Options and fixtures of the whole suite: which executors run, and where."""

from __future__ import annotations

import os

import pytest
import torch

# Others for one run: TEST_EXECUTORS=sim python -m pytest tests/cases
EXECUTORS = tuple(os.environ.get("TEST_EXECUTORS", "reference tiled").split())
# Compiled kernels by name. A compilation costs seconds and a call tenths of one, so that what runs
# on them is chosen: the sweep's `kernel_sample`, tests/sm100, and tests/cases where asked for.
KERNELS = ("sim",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep", choices=("sample", "full"), default="sample", help="see tests/sweep"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=EXECUTORS)
def impl(request: pytest.FixtureRequest) -> str:
    """Every executor that runs on this machine."""
    return str(request.param)
