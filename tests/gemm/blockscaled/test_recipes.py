"""Every recipe of ``gemm.blockscaled`` on every kernel that serves it, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from b12x._runtime import counters
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.reference import half_ulp, tolerance
from tests.mx_data import RECIPES, Operand, make

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: A live M for each role, with a tail.
ROWS = {"decode": 11, "narrow": 35, "middle": 37, "prefill": 133}


def planned(target, recipe: str, role: str, n: int, k: int, c_dtype: str, batch: int = 1, split: int = 1):
    """A plan whose rows all go to one role."""
    sizes = {"max_m": planner.LEAST_MAX_M[role] + 127, "n": n, "k": k, "batch": batch}
    caps = blockscaled.Caps(device=target.device, c_dtype=c_dtype, **sizes, **RECIPES[recipe][0])
    table = [planner.Choice(None, role, split)]
    if role == "decode":
        table = [planner.Choice(16, role, split), planner.Choice(None, "middle", 1)]
    return blockscaled.plan(caps, table=table)


def product(plan, a: Operand, b: Operand, **arguments) -> torch.Tensor:
    m, n, batch = a.tensor.shape[0], plan.caps.n, plan.caps.batch
    out = torch.full((batch, m, n), torch.nan, dtype=DTYPES[plan.caps.c_dtype]).permute(1, 2, 0)
    return blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=out, **arguments))


def check(out: torch.Tensor, recipe: str, a: Operand, b: Operand, alpha: np.ndarray | float = 1.0) -> None:
    """Every element within the bound on f32 accumulation and half a unit of the output."""
    c_dtype = str(out.dtype).removeprefix("torch.")
    got = out.permute(2, 0, 1).to(torch.float64).cpu().numpy()
    for index, factor in enumerate(np.broadcast_to(alpha, (len(got),))):
        x, y = a.values[index], b.values[index]
        bound = tolerance(x, y, float(factor), c_dtype, RECIPES[recipe][1])
        worst = np.abs(got[index] - float(factor) * (x @ y.T)) - bound
        assert (worst <= 0).all(), f"batch {index}: off by {worst.max():.3g} beyond the bound at {worst.argmax()}"


@pytest.mark.parametrize("role", ROWS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["normal", "distinct", "mean1"])
def test_against_float64(target, rng, recipe, role, kind):
    """Tails on M and N, N no multiple of 8, more K steps than stages."""
    n, k = 140 if kind == "normal" else 75, 1664
    a, b = make(rng, recipe, 1, ROWS[role], k, kind), make(rng, recipe, 1, n, k, kind, weight=True)
    alpha = torch.tensor([0.37])
    out = product(planned(target, recipe, role, n, k, "float32"), a, b, alpha=alpha)
    check(out, recipe, a, b, float(np.float32(0.37)))


@pytest.mark.parametrize("c_dtype", DTYPES)
@pytest.mark.parametrize("role", ROWS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_exact_grid(target, rng, recipe, role, c_dtype):
    """Where all f32 sums are exact, C is the correctly rounded product, split or not."""
    a, b = make(rng, recipe, 1, ROWS[role], 512, "grid"), make(rng, recipe, 1, 72, 512, "grid", weight=True)
    wanted = torch.tensor(a.values[0] @ b.values[0].T).to(DTYPES[c_dtype])
    for split in (1,) if role == "prefill" else (1, 3):
        out = product(planned(target, recipe, role, 72, 512, c_dtype, split=split), a, b)
        assert torch.equal(out[:, :, 0], wanted)


@pytest.mark.parametrize("split", [2, 5, 8])
@pytest.mark.parametrize("role", ["decode", "narrow", "middle"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_split_k(target, rng, recipe, role, split):
    """K of 6 steps of 128 over a cluster, in a batch: also where a CTA has no step of its own."""
    a, b = (make(rng, recipe, 2, rows, 768, "distinct") for rows in (ROWS[role], 40))
    plan = planned(target, recipe, role, 40, 768, "float32", batch=2, split=split)
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=torch.empty(2, ROWS[role], 40).permute(1, 2, 0))
    assert binding.launch.cluster == (split, 1, 1)
    before = counters.launches.total()
    check(blockscaled.run(binding=binding), recipe, a, b)
    assert counters.launches.total() == before + 1


@pytest.mark.parametrize("role", ROWS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_do_not_depend_on_each_other(target, rng, recipe, role):
    """A row's bits are the same with other rows around it, at another place, and on another grid."""
    m, n, k = ROWS[role], 72, 640
    a, b = make(rng, recipe, 1, m, k), make(rng, recipe, 1, n, k, weight=True)
    plan = planned(target, recipe, role, n, k, "float32")
    whole = product(plan, a, b)
    assert torch.equal(product(plan, a, b, sm_count=1), whole)
    assert torch.equal(product(plan, a, b), whole)
    codes = a.tensor[3:9].permute(2, 0, 1).clone().permute(1, 2, 0)
    scales = a.scales
    if recipe == "block_fp8":
        scales = scales[3:9].permute(2, 0, 1).clone().permute(1, 2, 0)
    elif recipe != "fp8":
        rows = scales.view(-(-m // 128), -1, 32, 4, 4)[0]
        moved = torch.full_like(rows, 0xFF)
        moved[:, 0:6] = rows[:, 3:9]
        scales = moved.reshape(-1)
    part = product(plan, Operand(codes, scales, a.values[:, 3:9]), b)
    assert torch.equal(part, whole[3:9])


@pytest.mark.parametrize("c_dtype", DTYPES)
@pytest.mark.parametrize("n", [72, 75])
@pytest.mark.parametrize("role", ROWS)
def test_bias(target, rng, role, n, c_dtype):
    """Added to C in C's dtype, after C was rounded to it."""
    a, b = make(rng, "mxfp8", 1, ROWS[role], 256), make(rng, "mxfp8", 1, n, 256)
    plan = planned(target, "mxfp8", role, n, 256, c_dtype)
    bias = torch.tensor(rng.standard_normal(n) * 100).to(DTYPES[c_dtype])
    assert torch.equal(product(plan, a, b, bias=bias), product(plan, a, b) + bias[:, None])


@pytest.mark.parametrize("role", ROWS)
def test_plain_fp8_never_reads_scales(target, rng, role):
    """Scale tensors are taken for the sake of callers that have some; what they hold, and whether, does not matter."""
    a, b = make(rng, "fp8", 1, ROWS[role], 256), make(rng, "fp8", 1, 40, 256)
    plan = planned(target, "fp8", role, 40, 256, "bfloat16")
    poisoned = [Operand(x.tensor, torch.full((512 * 2,), 0xFF, dtype=torch.uint8), x.values) for x in (a, b)]
    assert torch.equal(product(plan, a, b), product(plan, *poisoned))


@pytest.mark.parametrize("role", ROWS)
def test_block_fp8_scales_are_live(target, rng, role):
    """A float scale a 128 x 128 block of the weight, read by the kernel: doubled in place, C doubles."""
    a, b = make(rng, "block_fp8", 1, ROWS[role], 384), make(rng, "block_fp8", 1, 200, 384, weight=True)
    plan = planned(target, "block_fp8", role, 200, 384, "float32")
    out = torch.empty(1, ROWS[role], 200).permute(1, 2, 0)
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=out)
    once = blockscaled.run(binding=binding).clone()
    check(once, "block_fp8", a, b)
    b.scales.mul_(2)
    assert torch.equal(blockscaled.run(binding=binding), 2 * once)


def test_batch_with_strides(target, rng):
    """L = 3 entries of operands that lie apart and have pitched rows; each has scales and an alpha of its own."""
    for recipe in RECIPES:
        for role in ROWS:
            a, b = make(rng, recipe, 3, ROWS[role], 256), make(rng, recipe, 3, 24, 256, weight=True)
            wide = torch.full((3, 30, a.tensor.shape[1] + 32), 0x7F, dtype=torch.uint8).view(a.tensor.dtype)
            inside = wide[:, :24, : a.tensor.shape[1]].permute(1, 2, 0)
            inside.copy_(b.tensor)
            alpha = torch.tensor([1.0, -0.5, 3.0])
            plan = planned(target, recipe, role, 24, 256, "float32", batch=3)
            out = product(plan, a, Operand(inside, b.scales, b.values), alpha=alpha)
            check(out, recipe, a, b, alpha.cpu().numpy())


def test_one_shot(target, rng):
    """``mm`` takes the same choices by the same names."""
    for recipe, (names, _) in RECIPES.items():
        a, b = make(rng, recipe, 1, 20, 128), make(rng, recipe, 1, 24, 128, weight=True)
        out = blockscaled.mm(a.pair, b.pair, c_dtype="float32", sfb_k_replicated=True, expected_m=20, **names)
        check(out, recipe, a, b)


@pytest.mark.parametrize("k", [128, 256, 384])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shortest_k(target, rng, recipe, k):
    """One, two and three steps: fewer than the stages of any kernel."""
    for role, m in ROWS.items():
        a, b = make(rng, recipe, 1, m, k), make(rng, recipe, 1, 8, k, weight=True)
        check(product(planned(target, recipe, role, 8, k, "float32"), a, b), recipe, a, b)


def test_bound_is_half_a_unit_for_one_product():
    assert half_ulp(np.array([1.0]), "bfloat16")[0] == 2.0**-8


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ab_dtype": "float6_e3m2fn"}, TypeError, "ab_dtype is 'float6_e3m2fn'; needed is an operand dtype of one of"),
        ({"ab_dtype": "float8_e4m3fn"}, ValueError, "no recipe .*mxfp8"),
        ({"plain_fp8": True}, ValueError, "plain_fp8 goes with"),
        ({"block_fp8": True}, ValueError, "block_fp8 goes with"),
    ],
)
def test_caps_refusals(change, error, words):
    with pytest.raises(error, match=words):
        blockscaled.Caps(**({"c_dtype": "bfloat16", "max_m": 1, "n": 8, "k": 128} | change))


def test_operand_refusals(target, rng):
    """FP8 codes where FP4 is planned, no scales, scales of another layout, a bias of another dtype or length."""
    a, b = make(rng, "mxfp8", 1, 4, 128), make(rng, "mxfp8", 1, 24, 128)
    plan = planned(target, "mxfp8", "decode", 24, 128, "bfloat16")
    out = torch.empty(1, 4, 24, dtype=torch.bfloat16).permute(1, 2, 0)
    good = {"lhs": a.pair, "rhs": b.pair, "out": out}
    for change, error, words in (
        ({"lhs": (a.tensor, None)}, TypeError, "SFA is None; needed are the scales of mxfp8"),
        ({"lhs": (a.tensor.float(), a.scales)}, TypeError, "A has dtype float32; needed is float8_e4m3fn or uint8"),
        ({"rhs": (b.tensor, b.scales[:-1])}, ValueError, "SFB has shape .*512 contiguous bytes"),
        ({"bias": torch.zeros(24)}, TypeError, "bias has dtype float32"),
        ({"bias": torch.zeros(23, dtype=torch.bfloat16)}, ValueError, r"bias has shape \(23,\).*one term a column"),
    ):
        with pytest.raises(error, match=words):
            plan.bind(**(good | change))
    floats = planned(target, "block_fp8", "decode", 24, 128, "bfloat16")
    with pytest.raises(TypeError, match="SFA has dtype uint8; needed is float32"):
        floats.bind(**good)
