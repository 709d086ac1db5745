"""How much host time a launch costs, stage by stage, without a GPU: a driver that does nothing stands for the real one.

    python benchmarks/host_overhead.py [--json FILE]

CPU tensors count as tensors of ``cuda:0`` here. The real driver adds its own time to each launch, and a GPU's allocator
to each output; `benchmarks/h200/overhead.py` measures with both.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from cuda.bindings import driver as bindings

import b12x
from b12x._runtime import checks, cuda_target, driver
from b12x.build_tools.build import BuildOptions, build_pack
from b12x.build_tools.manifest import load_manifest
from b12x.gemm import blockscaled
from b12x.quantization import nvfp4

_CALLS = 2000
_ROUNDS = 15
_M, _N, _K = 16, 64, 128


class NoDriver:
    """Every call succeeds at once and gives a handle, or the facts of an SM120 device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name) if name[:2] != "cu" or name.startswith("cuuint") else self._handle

    def _handle(self, *arguments: Any) -> Any:
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUfunction(7)

    def cuDriverGetVersion(self) -> Any:
        return bindings.CUresult.CUDA_SUCCESS, 13000

    def cuDeviceGetCount(self) -> Any:
        return bindings.CUresult.CUDA_SUCCESS, 1

    def cuDeviceGetAttribute(self, kind: Any, device: Any) -> Any:
        kinds = bindings.CUdevice_attribute
        facts = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 12,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 170,
        }
        return bindings.CUresult.CUDA_SUCCESS, facts[kind]

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUtensorMap()

    def cuLaunchKernel(self, *arguments: Any) -> Any:
        return (bindings.CUresult.CUDA_SUCCESS,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    driver._driver = NoDriver
    checks._device_names[torch.device("cpu")] = "cuda:0"
    cuda_target._current_raw_stream = lambda ordinal: 0
    with tempfile.TemporaryDirectory() as folder:
        options = replace(BuildOptions.from_environment(), allow_unchecked=True)
        manifest = load_manifest(Path(__file__).parent.parent / "manifests" / "base.toml")
        os.environ["B12X_PACK_PATH"] = str(build_pack(manifest, Path(folder) / "base", options).path)
        b12x.freeze_kernel_resolution("a benchmark of launches compiles nothing")
        calls = {**_torch(), **_gemm(), **_quantise()}
        results = _measure(calls)
    base = results["torch in-place add"]
    print(f"{'':24s}{'us':>8s}{'/ torch add':>14s}")
    for name, microseconds in results.items():
        print(f"{name:24s}{microseconds:8.2f}{microseconds / base:14.2f}")
    if arguments.json:
        found = {"microseconds": results, "machine": machine.describe(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _measure(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds a call: the best round's median, the rounds of all calls taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            samples = []
            for _ in range(_CALLS // 10):
                start = time.perf_counter_ns()
                for _ in range(10):
                    call()
                samples.append((time.perf_counter_ns() - start) / 10_000)
            best[name] = min(best[name], median(samples))
    return best


def _torch() -> dict[str, Callable[[], Any]]:
    x = torch.zeros(256)
    return {"torch in-place add": lambda: x.add_(1.0), "torch.empty": lambda: torch.empty((1, _M, _N))}


def _gemm() -> dict[str, Callable[[], Any]]:
    (a, b), alpha = (_operand(rows) for rows in (_M, _N)), torch.ones(1)
    out = torch.empty((1, _M, _N), dtype=torch.bfloat16).permute(1, 2, 0)
    plan = blockscaled.plan(blockscaled.Caps(device="cuda:0", c_dtype="bfloat16", max_m=_M, n=_N, k=_K))
    binding = plan.bind(lhs=a, rhs=b, out=out, alpha=alpha)
    dtypes = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
    return {
        "gemm run": lambda: blockscaled.run(binding=binding),
        "gemm bind": lambda: plan.bind(lhs=a, rhs=b, out=out, alpha=alpha),
        "gemm bind + run": lambda: blockscaled.run(binding=plan.bind(lhs=a, rhs=b, out=out, alpha=alpha)),
        "gemm one-shot": lambda: blockscaled.mm(a, b, out, alpha=alpha, **dtypes),
        "gemm one-shot, new C": lambda: blockscaled.mm(a, b, alpha=alpha, **dtypes),
    }


def _operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.zeros((1, rows, _K // 2), dtype=torch.uint8).permute(1, 2, 0)
    return packed, torch.zeros((1, 1, 2, 32, 4, 4), dtype=torch.uint8)


def _quantise() -> dict[str, Callable[[], Any]]:
    x, one = torch.ones((_M, _K), dtype=torch.bfloat16), torch.ones(1)
    plan = nvfp4.plan(_M, _K, device="cuda:0", dtype="bfloat16")
    outputs = nvfp4.allocate_outputs(plan, device="cpu")
    binding = nvfp4.bind(plan, x=x, global_scale=one, outputs=outputs)
    return {
        "quantise run": lambda: nvfp4.run(binding=binding),
        "quantise bind": lambda: nvfp4.bind(plan, x=x, global_scale=one, outputs=outputs),
        "quantise bind + run": lambda: nvfp4.run(plan=plan, x=x, global_scale=one, outputs=outputs),
        "quantise one-shot": lambda: nvfp4.quantize(x, one),
    }


if __name__ == "__main__":
    main()
