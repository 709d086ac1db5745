"""Properties of the planner's table, for any shape and any number of multiprocessors."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.recipes import BY_DTYPES

#: Every M up to this is looked at, and the largest.
ROWS = 300


@st.composite
def any_caps(draw: st.DrawFn) -> planner.Caps:
    ab_dtype, sf_dtype, block = draw(st.sampled_from(sorted(BY_DTYPES)))
    return planner.Caps(
        ab_dtype=ab_dtype,
        sf_dtype=sf_dtype,
        sf_vec_size=block,
        c_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        max_m=draw(st.integers(1, 70_000)),
        n=draw(st.integers(1, 60_000)),
        k=planner.K_QUANTUM * draw(st.integers(1, 240)),
        batch=draw(st.integers(1, 8)),
    )


@given(any_caps(), st.integers(1, 256))
def test_every_m_has_one_role_and_the_plan_lists_it(caps: planner.Caps, sm_count: int) -> None:
    """Exactly one entry of the table covers each M, and its role is among those that the plan resolves."""
    table = planner.table(caps, sm_count)
    listed = {role.name: role for role in planner.roles(caps)}
    bounds: list[float] = [0, *(float("inf") if choice.limit is None else choice.limit for choice in table)]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    for m in {*range(1, min(ROWS, caps.max_m) + 1), caps.max_m}:
        covering = [c for c, low, high in zip(table, bounds, bounds[1:], strict=False) if low < m <= high]
        assert covering == [planner.choose(table, m)]
        assert covering[0].role in listed
        assert planner.spec(caps, covering[0].role) in listed[covering[0].role].candidates
    # Two neighbours that do the same would be one entry.
    assert all((a.role, a.split) != (b.role, b.split) for a, b in pairwise(table))


@given(any_caps(), st.integers(1, 256))
def test_a_table_of_its_own_passes_the_check(caps: planner.Caps, sm_count: int) -> None:
    listed = {role.name for role in planner.roles(caps)}
    table = tuple(choice for choice in planner.table(caps, sm_count) if choice.role in listed)
    wide = table if table[-1].limit is None else (*table[:-1], dataclasses.replace(table[-1], limit=None))
    if wide[-1].role != "decode":
        assert planner.checked_table(caps, wide) == wide


@given(any_caps(), st.integers(1, 256))
def test_a_split_is_one_that_the_kernel_takes(caps: planner.Caps, sm_count: int) -> None:
    """Each CTA of a cluster gets a K step at least, and the launch contract allows the cluster."""
    for choice in planner.table(caps, sm_count):
        contract = planner.spec(caps, choice.role).abi().launch
        assert 1 <= choice.split <= contract.max_cluster
        assert choice.split <= caps.k // planner.K_QUANTUM


@given(any_caps(), st.integers(1, 256))
def test_max_m_changes_no_choice(caps: planner.Caps, sm_count: int) -> None:
    """Two plans that differ in capacity alone give a row the same kernel, split the same: the same bits."""
    larger: dict[str, Any] = {"max_m": 10 * caps.max_m}
    assert planner.table(caps, sm_count) == planner.table(dataclasses.replace(caps, **larger), sm_count)
