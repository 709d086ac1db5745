"""Every numerical case of every op on the chosen target, and what the cases have to cover."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from b12x._runtime import counters, packs
from b12x._runtime.target import current_target
from b12x.gemm.blockscaled import cases as gemm_cases
from b12x.gemm.blockscaled import planner, reference
from b12x.gemm.blockscaled.decode_spec import DecodeSpec
from b12x.gemm.blockscaled.recipes import C_DTYPES, RECIPES
from b12x.verify import operands, runner
from b12x.verify.case import Tally, half_ulp


def test_case(target, op_case):
    """The case launches the kernel that it is for, and the result is right."""
    op, case = op_case
    keys = runner.keys_of(case, current_target(target.device))
    assert keys, "the pack lacks its kernel"
    counters.reset()
    prepared = case.prepare(target.device, case.generator(target.device, seed=1))
    prepared.launch()
    assert set(counters.launches) == set(keys)
    judgement = prepared.judge()
    assert judgement.wrong == 0, f"{op} {case.name}: {judgement}"
    assert judgement.total > 0
    assert prepared.bytes > 0


def test_small_cases_reach_every_kernel(target):
    where = current_target(target.device)
    reached = {key for _, case in runner.all_cases(("small",)) for key in runner.keys_of(case, where)}
    assert reached == {key for pack in packs.installed() for key in pack.keys()}  # noqa: SIM118


def test_names_are_unique():
    names = [(op, case.name) for op, case in runner.every_case()]
    assert len(names) == len(set(names))


def test_small_gemm_cases_cover_tiles_tails_and_stages():
    """For every kernel: two tiles and a tail on N (and on M where the role goes beyond one tile), and a number of K
    steps that is more than the stages and no multiple of them."""
    covered: dict[str, set[str]] = {}
    for case in gemm_cases.CASES:
        if case.size != "small" or not isinstance(case, gemm_cases.BlockscaledCase):
            continue
        for role in case.roles():
            spec = role.candidates[0]
            steps = case.k // spec.tile_k
            found = covered.setdefault(spec.key, {"m"} if role.name == "decode" else set())
            if isinstance(spec, DecodeSpec):
                rows, stages = spec.scale_rows, spec.warps * spec.stages
            else:
                rows, stages = spec.tile_n, spec.stages
                found |= {"m"} if case.m % spec.tile_m and (case.m > spec.tile_m or role.name == "narrow") else set()
            found |= {"n"} if case.n > rows and case.n % rows else set()
            found |= {"k"} if steps > stages and steps % stages else set()
            found |= {case.distribution}
    kinds = {"normal", "octaves", "mean1", "onehot", "grid"}
    assert len(covered) == len(RECIPES) * len(C_DTYPES) * len(planner.LEAST_MAX_M)
    assert {key: found for key, found in covered.items() if found != kinds | {"m", "n", "k"}} == {}


@pytest.mark.parametrize("c_dtype", ["bfloat16", "float16", "float32"])
def test_bound_is_that_of_the_reference(c_dtype, rng):
    x = torch.from_numpy(rng.standard_normal((5, 7)) * np.exp2(rng.integers(-40, 20, (5, 7))))
    x[0, 0] = 0
    np.testing.assert_array_equal(half_ulp(x, c_dtype).numpy(), reference.half_ulp(x.numpy(), c_dtype))


@pytest.mark.parametrize("recipe", RECIPES)
def test_operand_values_are_those_of_the_format(recipe):
    """Codes and scales, read with ml_dtypes."""
    generator = torch.Generator().manual_seed(3)
    block_rows = 4 if recipe == "block_fp8" else 1
    for distribution in ("normal", "octaves", "mean1", "grid", "onehot"):
        operand = operands.random_operand(generator, 5, 256, distribution, 2, recipe, block_rows)
        codes = operand.codes.view(torch.uint8).permute(2, 0, 1).numpy()
        if RECIPES[recipe].bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(2, 5, 256)
            wanted = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        else:
            wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        linear = operand.linear.numpy()
        if linear.dtype == np.uint8:
            kind = ml_dtypes.float8_e4m3fn if recipe == "nvfp4" else ml_dtypes.float8_e8m0fnu
            linear = linear.view(kind)
        block = 256 // linear.shape[2]
        scale = np.repeat(np.repeat(linear.astype(np.float64), block, axis=2), block_rows, axis=1)[:, :5]
        np.testing.assert_array_equal(operand.values().numpy(), wanted * scale)
        assert torch.equal(operand.values(slice(1, 3)), operand.values()[:, 1:3])


def test_quantised_operand_is_near(rng):
    x = torch.from_numpy(rng.standard_normal((64, 256)).astype(np.float32))
    x[3, :16] = 0
    values = operands.dequantise(*operands.quantise(x))
    assert float((values - x).norm() / x.norm()) < 0.12


def test_tally():
    tally = Tally()
    reference_values = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    tally.add(torch.tensor([1.0, 2.5, 0.0]), reference_values, torch.tensor([0.0, 1.0, 0.0]))
    judgement = tally.judgement()
    assert (judgement.wrong, judgement.total, judgement.worst) == (0, 3, 0.5)
    assert math.isclose(judgement.relative, 0.5 / math.sqrt(5))
    assert str(judgement) == "0.50 of bound"
    tally.add(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.5]), 0.1)
    judgement = tally.judgement()
    assert (judgement.wrong, judgement.total, judgement.worst) == (2, 5, math.inf)
    assert judgement.to_json()["worst"] is None
    assert str(judgement) == "2 of 5 elements wrong"
