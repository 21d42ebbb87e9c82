"""All cases, in the groups that they are recorded in."""

from __future__ import annotations

from tests.sim.chip import products, tensor_copies, warps

GROUPS = {
    "copies": tensor_copies.CASES,
    "warps": warps.CASES,
    "wgmma": products.WGMMA,
    "mma": products.MMA,
}
CASES = {case.name: case for cases in GROUPS.values() for case in cases}
assert len(CASES) == sum(map(len, GROUPS.values())), "names of cases must differ"
