"""Section: the same op with the same pack on the GPU and in the emulator, at sizes with tails and several tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from operands import DEVICE, DTYPES, Operand, product, random_operand, tolerance
from report import Report

import b12x
from b12x.gemm import blockscaled
from b12x.quantization import nvfp4

GEMMS = ((5, 72, 128, 1), (64, 64, 640, 1), (65, 144, 384, 2), (130, 136, 1152, 1), (257, 264, 256, 1))
ROWS = ((1, 64), (131, 192), (257, 320))
#: ``grid`` sums are exact in f32: there the bits must be the same. Elsewhere both must be within the bound.
DISTRIBUTIONS = ("grid", "normal", "octaves", "mean1")


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    for dtype in ("bfloat16", "float16"):
        for rows, k in ROWS:
            with report.guard(f"quantise {rows}x{k} {dtype}"):
                _quantise(generator, rows, k, dtype, report)
    for shape in GEMMS:
        for distribution in DISTRIBUTIONS:
            # Rounding to 16 bits hides most of what the sums differ by.
            for c_dtype in DTYPES if distribution == "grid" else ("float32",):
                with report.guard(f"gemm {'x'.join(map(str, shape))} {c_dtype} {distribution}"):
                    _gemm(generator, shape, distribution, c_dtype, report)


def _quantise(generator: torch.Generator, rows: int, k: int, dtype: str, report: Report) -> None:
    x = (torch.randn((rows, k), generator=generator, device=DEVICE) * 3).to(DTYPES[dtype])
    global_scale = torch.rand(1, generator=generator, device=DEVICE) * 8 + 0.25
    gpu = nvfp4.quantize(x, global_scale)
    with b12x.target("emulator"):
        cpu = nvfp4.quantize(x.cpu(), global_scale.cpu())
    same = torch.equal(gpu.packed_a_storage.cpu(), cpu.packed_a_storage) and torch.equal(
        gpu.scale_storage.cpu(), cpu.scale_storage
    )
    report.add(f"quantise {rows}x{k} {dtype}", same)


def _gemm(
    generator: torch.Generator, shape: tuple[int, int, int, int], distribution: str, c_dtype: str, report: Report
) -> None:
    m, n, k, batch = shape
    a = random_operand(generator, m, k, distribution, batch)
    b = random_operand(generator, n, k, distribution, batch)
    # A power of two keeps the exact sums exact.
    alpha = torch.full((batch,), 0.5, device=DEVICE)
    gpu = _multiply(a.pair, b.pair, alpha, c_dtype, shape)
    with b12x.target("emulator"):
        cpu = _multiply(_on_cpu(a), _on_cpu(b), alpha.cpu(), c_dtype, shape)
    reference, bound = _bound(a, b, alpha, k, c_dtype)
    found = [out.permute(2, 0, 1).double().cpu() for out in (gpu, cpu)]
    within = [bool(((out - reference).abs() <= bound).all()) for out in found]
    equal = float((found[0] == found[1]).double().mean())
    report.add(
        f"gemm {m}x{n}x{k}x{batch} {c_dtype} {distribution}",
        all(within) and (equal == 1.0 or distribution != "grid"),
        gpu_within_bound=within[0],
        emulator_within_bound=within[1],
        equal_bits=equal,
        worst_difference_of_bound=float(((found[0] - found[1]).abs() / bound).max()),
    )


def _multiply(lhs: Any, rhs: Any, alpha: torch.Tensor, c_dtype: str, shape: tuple[int, int, int, int]) -> torch.Tensor:
    m, n, k, batch = shape
    device = str(alpha.device)
    out = torch.full((batch, m, n), float("nan"), dtype=DTYPES[c_dtype], device=device).permute(1, 2, 0)
    caps = blockscaled.Caps(device=device, c_dtype=c_dtype, max_m=m, n=n, k=k, batch=batch)
    plan = blockscaled.plan(caps)
    return blockscaled.run(binding=plan.bind(lhs=lhs, rhs=rhs, out=out, alpha=alpha))


def _on_cpu(operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    packed = operand.packed.permute(2, 0, 1).contiguous().cpu().permute(1, 2, 0)
    return packed, operand.scales.cpu()


def _bound(a: Operand, b: Operand, alpha: torch.Tensor, k: int, c_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    left, right, factors = a.values(), b.values(), alpha.double().view(-1, 1, 1)
    reference = product(left, right) * factors
    magnitude = product(left.abs(), right.abs()) * factors
    return reference.cpu(), tolerance(reference, magnitude, k, c_dtype).cpu()
