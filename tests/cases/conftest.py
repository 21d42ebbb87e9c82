"""What the cases are crossed with: layouts, formats, and executors with numbers of splits."""

from __future__ import annotations

import pytest

from tests.cases.arrange import CACHED_MIXES, FP8_MIXES, LAYOUTS, MIXES, Mix
from tests.conftest import EXECUTORS

# It keeps P exact and does not split.
EXACT = "reference"


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Batched, packed, and scattered over pages."""
    return str(request.param)


@pytest.fixture(params=MIXES, ids=str)
def mix(request: pytest.FixtureRequest) -> Mix:
    """Every mix of formats that the package takes."""
    return request.param


@pytest.fixture(params=FP8_MIXES, ids=str)
def fp8_mix(request: pytest.FixtureRequest) -> Mix:
    """q, k and v in one fp8 format."""
    return request.param


@pytest.fixture(params=CACHED_MIXES, ids=str)
def cached_mix(request: pytest.FixtureRequest) -> Mix:
    """8-bit k and v under q of any format: what takes k_descale and v_descale."""
    return request.param


@pytest.fixture(params=[name for name in EXECUTORS if name != EXACT])
def rounding_impl(request: pytest.FixtureRequest) -> str:
    """Every executor that rounds P."""
    return str(request.param)


@pytest.fixture(
    params=[
        (name, splits) for name in EXECUTORS for splits in (1, 4) if name != EXACT or splits == 1
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}-splits",
)
def execution(request: pytest.FixtureRequest) -> dict[str, object]:
    """impl= and num_splits= of every executor, in one part and in several."""
    impl, num_splits = request.param
    return {"impl": impl, "num_splits": num_splits}
