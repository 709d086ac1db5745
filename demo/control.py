"""Control run: the compile counter of the demo is real.

    python -m demo.control

In an environment that has the DSL, with resolution not frozen and an empty JIT cache, a GEMM whose spec is in no pack
is planned: that has to compile exactly one kernel, and the kernel has to be right. Exit codes: 0 as expected, 3 not.
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
import torch

from b12x._runtime import counters
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import reference as gemm_reference
from b12x.quantization import scales
from b12x.quantization.nvfp4 import reference as nvfp4_reference
from demo.linears import FORMAT_MAX, gemm_caps
from demo.run import GATE_FAILED, choose_target

M, N, K = 16, 128, 256


def main() -> int:
    device, where = choose_target()
    rng = np.random.default_rng(0)
    values, operands, global_scales = [], [], []
    for rows in (M, N):
        x = rng.standard_normal((rows, K), dtype=np.float32)
        scale = FORMAT_MAX / float(np.abs(x).max())
        packed, codes = nvfp4_reference.quantize(x, scale)
        values.append(nvfp4_reference.dequantize(packed, codes, scale))
        swizzled = scales.swizzle(torch.from_numpy(codes)).to(device)
        operands.append((torch.from_numpy(packed).to(device).unsqueeze(-1), scales.view(swizzled, rows, K // 16)))
        global_scales.append(scale)

    with tempfile.TemporaryDirectory() as cache:
        os.environ["B12X_CACHE_DIR"] = cache
        plan = blockscaled.plan(gemm_caps(device, M, N, K, c_dtype="float32"))
    out = torch.empty((1, M, N), device=device).permute(1, 2, 0)
    alpha = torch.tensor([1.0 / (global_scales[0] * global_scales[1])], device=device)
    blockscaled.run(binding=plan.bind(lhs=operands[0], rhs=operands[1], out=out, alpha=alpha))
    a, b = values
    error = np.abs(out[:, :, 0].cpu().numpy() - gemm_reference.matmul(a, b))
    within = bool((error <= gemm_reference.tolerance(a, b, 1.0, "float32")).all())

    print(f"target: {where}")
    print(f"kernels compiled: {counters.compiles} (needed 1)")
    print(f"largest error: {error.max():.2e}, {'within' if within else 'NOT within'} the bound on f32 accumulation")
    print(plan.explain())
    return 0 if counters.compiles == 1 and within else GATE_FAILED


if __name__ == "__main__":
    sys.exit(main())
