"""Options and fixtures of the whole suite: which executors run, and where."""

from __future__ import annotations

import pytest
import torch

EXECUTORS = ("reference", "tiled")  # simulated and compiled kernels join here by name


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
