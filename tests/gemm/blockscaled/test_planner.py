"""The choice table of ``gemm.blockscaled`` at certain sizes, as it runs, and from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.reference import tolerance
from tests.nvfp4_data import random_operand


def test_narrow_weights_cover_the_chip():
    """N = 512, K = 7168, the shape at which a serial K loop leaves most of the chip idle."""
    caps = planner.Caps(c_dtype="bfloat16", max_m=1, n=512, k=7168)
    choice = planner.choose(planner.table(caps, 170), 1)
    assert planner.tiles(planner.spec(caps, choice.role), 1, 512, 1) * choice.split >= 0.7 * 170


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([planner.Choice(None, "huge", 1)], "role 'huge'; these caps have decode, narrow, middle, prefill"),
        ([planner.Choice(None, "prefill", 2)], "splits prefill 2 ways; 1 to 1 are possible"),
        ([planner.Choice(None, "middle", 9)], "splits middle 9 ways; 1 to 8 are possible"),
        ([planner.Choice(None, "decode", 1)], "gives decode M up to None; it takes 16"),
        ([planner.Choice(64, "middle", 1), planner.Choice(64, "prefill", 1)], "not ascending at 64"),
        ([planner.Choice(64, "middle", 1)], "ends at M = 64, below max_m = 100: let the last limit be None"),
    ],
)
def test_tables_from_elsewhere_are_checked(table, words):
    caps = planner.Caps(c_dtype="bfloat16", max_m=100, n=64, k=128)
    with pytest.raises(ValueError, match=words):
        planner.checked_table(caps, table)


def test_at_every_boundary(target, rng):
    """Each entry of a table at its last row and the next, against float64."""
    n, k = 72, 256
    caps = blockscaled.Caps(device=target.device, c_dtype="float32", max_m=300, n=n, k=k)
    plan = blockscaled.plan(caps)
    b = random_operand(rng, 1, n, k, "octaves")
    limits = [choice.limit for choice in plan.table if choice.limit and choice.limit < caps.max_m]
    assert limits
    for m in sorted({1, *limits, *(limit + 1 for limit in limits), caps.max_m}):
        a = random_operand(rng, 1, m, k, "octaves")
        out = torch.full((1, m, n), torch.nan).permute(1, 2, 0)
        blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=out))
        got = out[:, :, 0].double().cpu().numpy()
        x, y = a.values[0], b.values[0]
        assert (np.abs(got - x @ y.T) <= tolerance(x, y, 1.0, "float32")).all()


def test_explain_says_what_serves_which_rows(target):
    plan = blockscaled.plan(blockscaled.Caps(device=target.device, c_dtype="bfloat16", max_m=4096, n=4096, k=4096))
    text = plan.explain()
    assert "M up to 16: decode, K split" in text
    assert "M above" in text
