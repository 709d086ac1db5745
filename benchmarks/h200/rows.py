"""Section: a row of C has the same bits whatever M is, wherever the row stands, and on any number of CTAs.

For every recipe, and for every kernel and split of K that its plan may use: within one of them nothing but the row, the
weights and K decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from operands import DEVICE
from report import Report

from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.recipes import BY_DTYPES, RECIPES
from b12x.quantization import scales
from b12x.verify.operands import Operand, random_operand

#: (N, K): more tiles than multiprocessors with a tail, and few.
SHAPES = ((16392, 1152), (712, 7168))
#: Rows of the whole product, where a kernel takes as many.
ROWS = 300
SM_COUNTS = (1, 37, 100)
#: A plan for as many rows has every kernel.
_MAX_M = 8192
_DTYPES = {recipe: dtypes for dtypes, recipe in BY_DTYPES.items()}


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed + 7)
    for recipe in RECIPES:
        for n, k in SHAPES:
            with report.guard(f"{recipe} N{n} K{k}"):
                _recipe(generator, recipe, n, k, report)


def _recipe(generator: torch.Generator, recipe: str, n: int, k: int, report: Report) -> None:
    a = random_operand(generator, ROWS, k, "normal", 1, recipe)
    b = random_operand(generator, n, k, "octaves", 1, recipe, 128 if recipe == "block_fp8" else 1)
    for role, split in variants(recipe, n, k):
        title = f"{recipe} N{n} K{k} {role} K split {split} ways"
        with report.guard(title):
            plan = _plan(recipe, n, k, role, split)
            rows = min(ROWS, planner.DECODE_M) if role == "decode" else ROWS
            whole = _product(plan, a, list(range(rows)), b)
            wrong = [what for what, same in _comparisons(plan, a, b, whole, rows) if not same]
            finite = bool(whole.isfinite().all())
            report.add(title, finite and not wrong, finite=finite, differing=wrong)


def variants(recipe: str, n: int, k: int) -> list[tuple[str, int]]:
    """Every kernel, by its role, with every split that its launch contract and K allow."""
    caps = _caps(recipe, n, k)
    found = []
    for role in planner.roles(caps):
        most = min(role.candidates[0].abi().launch.max_cluster, k // planner.K_QUANTUM)
        found += [(role.name, split) for split in range(1, most + 1)]
    return found


def _comparisons(
    plan: blockscaled.Plan, a: Operand, b: Operand, whole: torch.Tensor, rows: int
) -> Iterator[tuple[str, bool]]:
    yield "again", torch.equal(_product(plan, a, list(range(rows)), b), whole)
    for m in sorted({1, min(7, rows), rows // 3, rows - 1}):
        yield f"M = {m}", torch.equal(_product(plan, a, list(range(m)), b), whole[:m])
    moved = [*range(rows // 2, rows), *range(rows // 2)]
    yield "other positions", torch.equal(_product(plan, a, moved, b), whole[moved])
    for sm_count in SM_COUNTS:
        same = torch.equal(_product(plan, a, list(range(rows)), b, sm_count), whole)
        yield f"on {sm_count} multiprocessors", same


def _product(
    plan: blockscaled.Plan, a: Operand, rows: Sequence[int], b: Operand, sm_count: int | None = None
) -> torch.Tensor:
    """``[M, N]`` f32 of some rows of A, in that order."""
    caps, m = plan.caps, len(rows)
    out = torch.full((1, m, caps.n), float("nan"), device=DEVICE).permute(1, 2, 0)
    binding = plan.bind(lhs=_taken(a, rows), rhs=b.pair, out=out, sm_count=sm_count)
    blockscaled.run(binding=binding)
    return out[..., 0]


def _taken(a: Operand, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of an operand, with scales as the op takes them; the pads hold NaN."""
    index = torch.tensor(rows, device=DEVICE)
    codes = a.codes.view(torch.uint8)[index].permute(2, 0, 1).contiguous().permute(1, 2, 0).view(a.codes.dtype)
    linear = a.linear[:, index]
    if a.encoding.scale == "none":
        return codes, torch.empty(0, device=DEVICE)
    if a.encoding.scale == "f32":
        return codes, linear.contiguous().permute(1, 2, 0)
    return codes, scales.swizzle(linear, pad=0xFF)


def _caps(recipe: str, n: int, k: int) -> planner.Caps:
    ab_dtype, sf_dtype, block = _DTYPES["mxfp8" if recipe == "fp8" else recipe]
    return planner.Caps(
        device=DEVICE,
        ab_dtype=ab_dtype,
        sf_dtype=sf_dtype,
        sf_vec_size=block,
        c_dtype="float32",
        max_m=_MAX_M,
        n=n,
        k=k,
        plain_fp8=recipe == "fp8",
    )


def _plan(recipe: str, n: int, k: int, role: str, split: int) -> blockscaled.Plan:
    """A plan whose table has one kernel; decode kernels take few rows, and another one those above."""
    table = [planner.Choice(planner.DECODE_M if role == "decode" else None, role, split)]
    if role == "decode":
        table.append(planner.Choice(None, "prefill", 1))
    return blockscaled.plan(_caps(recipe, n, k), table=table)
