"""The product behind every MMA: exact, in a fixed order, and on the thread that asked for it."""

import numpy as np

from flash_attn_fp8.sim import matrix


def test_is_a_times_b_transposed():
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-99, 99, (24, 16)).astype(float),
        rng.integers(-99, 99, (8, 16)).astype(float),
    )
    assert matrix.multiply(a, b).tolist() == (a @ b.T).tolist()
    assert matrix.multiply(a[::2], b[:, ::1]).tolist() == (a[::2] @ b.T).tolist()


def test_sums_in_the_order_of_k():
    """BLAS may take another: then a sum depends on the machine."""
    a = np.array([[1e16, 1.0, -1e16, 1.0], [1e16, -1e16, 1.0, 1.0]])
    assert matrix.multiply(a, np.ones((1, 4))).tolist() == [[1.0], [2.0]]


def test_specials():
    a, b = np.array([[np.inf, 1.0], [np.nan, 0.0], [1.0, 1.0]]), np.array([[0.0, 1.0]])
    found = matrix.multiply(a, b)[:, 0]
    assert np.isnan(found[:2]).all()
    assert found[2] == 1.0
