"""Allocation of tensor memory: what blocks, what is refused, and order around freeing."""

from __future__ import annotations

import numpy as np
import pytest

from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.errors import Race, TensorMemoryMisuse
from flash_attn_fp8.sim.isa.tcgen05_alloc import allocate, deallocate, relinquish
from flash_attn_fp8.sim.isa.tcgen05_copy import fragment, load, store, wait_stores
from flash_attn_fp8.sim.state import Cta, Warp
from tests.sim.tensor.build import cluster

AT = 2048


def address(cta: Cta, at: int = AT) -> int:
    return int(cta.shared.data[at : at + 4].view(np.uint32)[0])


def blocked(w: Warp, wait: Wait | None) -> Wait:
    """As the machine holds a warp."""
    assert wait is not None
    wait.on.waiters.append(w)
    w.runnable = False
    return wait


def test_addresses_go_to_shared_memory():
    cta = cluster().ctas[0]
    assert allocate(cta.warps[0], 1, AT, 128) is None
    assert allocate(cta.warps[1], 1, AT + 4, 32) is None
    assert (address(cta), address(cta, AT + 4)) == (0, 128)
    with pytest.raises(Race):  # the address is a store like any other
        cta.shared.read(np.array([AT]), 4, cta.warps[2].access())


def test_allocation_blocks_until_columns_are_free():
    cta = cluster().ctas[0]
    first, second = cta.warps[:2]
    allocate(first, 1, AT, 256)
    allocate(first, 1, AT + 4, 256)
    wait = blocked(second, allocate(second, 1, AT + 8, 64))
    assert not wait.ready()
    assert "64 columns of tensor 0, of which 512" in wait.describe()
    assert deallocate(first, 1, 256, 256) is None
    assert wait.ready()
    assert second.runnable
    assert allocate(second, 1, AT + 8, 64) is None
    assert address(cta, AT + 8) == 256


def test_a_pair_allocates_together():
    made = cluster(2)
    zero, one = (cta.warps[0] for cta in made.ctas)
    wait = blocked(zero, allocate(zero, 2, AT, 512))
    assert not wait.ready()
    assert "peer CTA" in wait.describe()
    assert not made.ctas[0].tensor.allocated.any()
    assert allocate(one, 2, made.ctas[1].base + AT, 512) is None
    assert wait.ready()
    assert zero.runnable
    assert allocate(zero, 2, AT, 512) is None
    assert all(cta.tensor.allocated.all() and address(cta) == 0 for cta in made.ctas)
    wait = blocked(one, deallocate(one, 2, 0, 512))
    assert made.ctas[1].tensor.allocated.all()  # not before both have come
    assert deallocate(zero, 2, 0, 512) is None
    assert wait.ready()
    assert deallocate(one, 2, 0, 512) is None
    assert not any(cta.tensor.allocated.any() for cta in made.ctas)


def test_a_pair_gets_columns_that_are_free_in_both():
    made = cluster(2)
    zero, one = (cta.warps[0] for cta in made.ctas)
    made.ctas[1].tensor.allocate(0, 128)
    wait = blocked(zero, allocate(zero, 2, AT, 512))
    full = blocked(one, allocate(one, 2, made.ctas[1].base + AT, 512))
    assert not wait.ready()
    assert not full.ready()
    made.ctas[1].tensor.free(0)
    assert full.ready()
    assert allocate(one, 2, made.ctas[1].base + AT, 512) is None
    assert allocate(zero, 2, AT, 512) is None


def test_partners_must_agree():
    made = cluster(2)
    zero, one = (cta.warps[0] for cta in made.ctas)
    blocked(zero, allocate(zero, 2, AT, 512))
    with pytest.raises(TensorMemoryMisuse, match="256 columns while warp 0 of rank 0 is in one of"):
        allocate(one, 2, made.ctas[1].base + AT, 256)


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_columns_are_a_power_of_2(columns):
    with pytest.raises(TensorMemoryMisuse, match=f"allocates {columns} columns"):
        allocate(cluster().ctas[0].warps[0], 1, AT, columns)


@pytest.mark.parametrize(("first", "columns"), [(0, 64), (32, 32), (128, 128)])
def test_only_allocations_are_freed(first, columns):
    w = cluster().ctas[0].warps[0]
    allocate(w, 1, AT, 128)
    with pytest.raises(TensorMemoryMisuse, match="allocated are 128 from 0"):
        deallocate(w, 1, first, columns)


def test_no_allocation_after_the_permit_is_given_up():
    w = cluster().ctas[0].warps[0]
    relinquish(w, 1)
    with pytest.raises(TensorMemoryMisuse, match="relinquish_alloc_permit"):
        allocate(w, 1, AT, 128)


def test_one_cta_group_for_a_kernel():
    made = cluster(2)
    allocate(made.ctas[0].warps[0], 1, AT, 32)
    with pytest.raises(TensorMemoryMisuse, match="which has used cta_group::1"):
        allocate(made.ctas[0].warps[0], 2, AT, 32)


@pytest.mark.parametrize("told", [True, False])
def test_freeing_comes_after_every_use(told):
    cta = cluster().ctas[0]
    owner, user = cta.warps[:2]
    allocate(owner, 1, AT, 32)
    f = fragment("32x32b", 4, False)
    store(user, [0, 1, 2, 3], 32 << 16, f)
    wait_stores(user)
    load(user, [0, 1, 2, 3], 32 << 16, f)
    if told:
        owner.acquire(user.release())
        deallocate(owner, 1, 0, 32)
        allocate(owner, 1, AT, 32)
        store(user, [0, 1, 2, 3], 32 << 16, f)  # the old uses are forgotten
    else:
        with pytest.raises(Race, match="is freed by warp 0"):
            deallocate(owner, 1, 0, 32)
