"""What the cases are crossed with: layouts, formats, and executors with numbers of splits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flash_attn_fp8 as fa
from tests.cases.arrange import CACHED_MIXES, FP8_MIXES, LAYOUTS, MIXES, Mix
from tests.cases.widen import widened
from tests.conftest import EXECUTORS, KERNELS

# It keeps P exact and does not split.
EXACT = "reference"


@pytest.fixture(autouse=True)
def _wide_enough_for_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels: the cases, whose head dims are small, with head dims that kernels have.

    Not where a case gives an executor of its own, to be refused for just that.
    """
    if set(EXECUTORS) & set(KERNELS) and "impl_given" not in request.fixturenames:
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            monkeypatch.setattr(fa, name, widened(getattr(fa, name)))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """What a kernel refuses by name is skipped with the kernel's own reason, and counted so."""
    try:
        return (yield)
    except fa.Unsupported as refusal:
        if all(
            reason.startswith(tuple(f"impl={k!r}" for k in KERNELS)) for reason in refusal.reasons
        ):
            pytest.skip("; ".join(refusal.reasons))
        raise


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
