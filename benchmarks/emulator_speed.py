"""How long does the emulator take for a tile of the NVFP4 GEMM, with and without its checks?

The kernel comes from a pack, or from a PTX file of the same spec. Each result is the median over runs of one CTA that
computes one 128 x 128 tile; the error is the largest one as a fraction of what the reference allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

from b12x import emulator
from b12x._runtime.abi import Region, TensorMapValue
from b12x._runtime.pack import Pack
from b12x.gemm.blockscaled import reference
from b12x.gemm.blockscaled.spec import BlockscaledSpec
from b12x.quantization.nvfp4 import reference as quantization

SPEC = BlockscaledSpec(recipe="nvfp4", c_dtype="float32", tile_m=128, tile_n=128, groups=2)
TILE = 128
VARIANTS = {
    "checked": emulator.Options(),
    "eager": emulator.Options(copies="eager"),
    "without race detection": emulator.Options(races=False),
    "unchecked": emulator.Options(copies="eager", checks=False),
    "random": emulator.Options(schedule="random"),
}


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy at a 128-byte boundary."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def swizzled(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Linear scale codes of 128 rows in the layout that the kernel reads."""
    return aligned(scales.reshape(4, 32, -1, 4).transpose(2, 1, 0, 3).reshape(-1))


class Problem:
    """Operands of one tile, and its launch."""

    def __init__(self, program: emulator.Program, k: int) -> None:
        rng = np.random.default_rng(0)
        quantized = [quantization.quantize(rng.standard_normal((TILE, k)).astype(np.float32), 8.0) for _ in range(2)]
        self.program = program
        self.dense = [quantization.dequantize(codes, scales) for codes, scales in quantized]
        self.codes = [aligned(codes) for codes, _ in quantized]
        self.scales = [swizzled(scales) for _, scales in quantized]
        self.alpha = aligned(np.ones(1, np.float32))
        self.c = aligned(np.zeros((TILE, TILE), np.float32))
        maps = [
            TensorMapValue(
                x.ctypes.data, "uint8", (k // 2, TILE, 1), (k // 2, TILE * k // 2), (SPEC.tile_k // 2, TILE, 1), "64B"
            )
            for x in self.codes
        ]
        no_bias = 0
        pointers = [*(x.ctypes.data for x in (*self.scales, self.alpha)), no_bias, self.c.ctypes.data]
        self.params = [*maps, *pointers, TILE, TILE, k, 1, 1, 0]
        inputs = {"a": self.codes[0], "b": self.codes[1], "sfa": self.scales[0], "sfb": self.scales[1]}
        self.regions = [Region(n, x.ctypes.data, x.shape, x.strides, "uint8", "r", True) for n, x in inputs.items()]
        self.regions.append(Region("alpha", self.alpha.ctypes.data, (1,), (4,), "float32", "r", True))
        self.regions.append(Region("c", self.c.ctypes.data, self.c.shape, self.c.strides, "float32", "w", False))

    def run(self, options: emulator.Options) -> emulator.Stats:
        launch = SPEC.abi().launch
        return emulator.launch(
            self.program,
            grid=(1,),
            block=launch.block,
            dynamic_smem=launch.dynamic_smem,
            params=self.params,
            regions=self.regions,
            options=options,
        )

    def error(self) -> float:
        """Largest error as a fraction of the tolerance."""
        want = reference.matmul(*self.dense)
        return float((np.abs(self.c - want) / reference.tolerance(*self.dense, 1.0, "float32")).max())


def measure(ptx: str, k: int, runs: int) -> dict[str, Any]:
    """Median milliseconds a tile for every variant."""
    start = time.perf_counter()
    program = emulator.parse(ptx)
    parse = time.perf_counter() - start
    problem = Problem(program, k)
    out: dict[str, Any] = {"benchmark": "emulator_speed", "k": k, "parse_ms": round(1000 * parse, 1)}
    for name, options in VARIANTS.items():
        problem.run(options)
        stats = [problem.run(options) for _ in range(runs)]
        seconds = statistics.median(s.seconds for s in stats)
        out[name] = {
            "ms_per_tile": round(1000 * seconds, 1),
            "steps": stats[-1].steps,
            "steps_per_s": round(stats[-1].steps / seconds),
            "error_of_tolerance": round(problem.error(), 3),
        }
    out["machine"] = machine.describe()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pack", type=Path, help=f"folder of a pack that holds {SPEC.key}")
    source.add_argument("--ptx", type=Path, help="PTX of that kernel")
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    if args.ptx:
        ptx = args.ptx.read_text()
    else:
        pack = Pack.open(args.pack)
        artifact = pack.get(SPEC.key)
        if artifact is None:
            parser.error(f"{args.pack} does not hold {SPEC.key}")
        ptx = pack.ptx(artifact)
    print(json.dumps(measure(ptx, args.k, args.runs), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
