"""Section for compute-sanitizer: every kernel, at the smallest sizes with two tiles, a tail and several stages."""

from __future__ import annotations

from pathlib import Path

import torch
from operands import DEVICE, DTYPES, product, random_operand, tolerance
from report import Report

from b12x.gemm import blockscaled
from b12x.quantization import nvfp4

#: The first for the small tile, the second for the large one; more K steps than stages, and a batch.
GEMMS = ((40, 72, 1408, 1), (136, 136, 896, 2))
SM_COUNT = 3


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed + 3)
    for dtype in ("bfloat16", "float16"):
        with report.guard(f"quantise {dtype}"):
            x = torch.randn((131, 192), generator=generator, device=DEVICE).to(DTYPES[dtype])
            nvfp4.quantize(x, torch.ones(1, device=DEVICE))
            torch.cuda.synchronize()
            report.add(f"quantise {dtype}", True)
    for m, n, k, batch in GEMMS:
        a = random_operand(generator, m, k, "octaves", batch)
        b = random_operand(generator, n, k, "octaves", batch)
        left, right = a.values(), b.values()
        reference, magnitude = product(left, right), product(left.abs(), right.abs())
        for c_dtype, torch_dtype in DTYPES.items():
            with report.guard(f"gemm {m}x{n}x{k}x{batch} {c_dtype}"):
                caps = blockscaled.Caps(device=DEVICE, c_dtype=c_dtype, max_m=m, n=n, k=k, batch=batch)
                out = torch.zeros((batch, m, n), dtype=torch_dtype, device=DEVICE).permute(1, 2, 0)
                plan = blockscaled.plan(caps)
                blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=out, sm_count=SM_COUNT))
                error = (out.permute(2, 0, 1).double() - reference).abs()
                within = bool((error <= tolerance(reference, magnitude, k, c_dtype)).all())
                report.add(f"gemm {m}x{n}x{k}x{batch} {c_dtype}", within)
