"""Section: host time of a launch, median of many calls, beside launches of other libraries in the same process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from operands import DEVICE, random_operand
from report import Report

from b12x.gemm import blockscaled
from b12x.quantization import nvfp4

_CALLS = 4000
#: The launch queue holds about a thousand entries; it is drained before it makes a call wait.
_BATCH = 100
_REPEATS = 3
_M, _N, _K = 16, 64, 128
#: Times a torch in-place add.
_TARGETS = {"run": 1.0, "bind + run": 3.0, "one-shot": 5.0}


def run(prepared: Path, seed: int, report: Report) -> None:
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "torch in-place add": _torch_add,
        "gemm run": lambda: _gemm(seed, "run"),
        "gemm bind + run": lambda: _gemm(seed, "bind"),
        "gemm one-shot": lambda: _gemm(seed, "one-shot"),
        "quantise run": lambda: _quantise(seed, "run"),
        "quantise bind + run": lambda: _quantise(seed, "bind"),
        "quantise one-shot": lambda: _quantise(seed, "one-shot"),
        "triton launch": _triton,
        "cuda.core launch": lambda: _cuda_core(prepared),
    }
    medians: dict[str, float] = {}
    for name, make in makers.items():
        try:
            call = make()
        except ImportError as error:
            report.add(name, True, missing=str(error))
            continue
        except Exception as error:  # a peer that does not work here is no fault of ours
            report.add(name, not name.startswith(("gemm", "quantise")), error=f"{type(error).__name__}: {error}")
            continue
        with report.guard(name):
            rounds = [_median(call) for _ in range(_REPEATS)]
            medians[name] = min(rounds)
            report.add(name, True, microseconds=medians[name], rounds=rounds)
    base = medians.get("torch in-place add")
    if base:
        report.set("times_torch_add", {name: value / base for name, value in medians.items()})
        report.set("targets", _TARGETS)
        met = {
            name: value / base <= limit
            for name, value in medians.items()
            for form, limit in _TARGETS.items()
            if name in (f"gemm {form}", f"quantise {form}")
        }
        report.set("met", met)
        print(
            json.dumps({name: round(value, 1) for name, value in medians.items()}),
            "missed:",
            [name for name, reached in met.items() if not reached],
            flush=True,
        )


def _median(call: Callable[[], Any]) -> float:
    """Microseconds a call."""
    for _ in range(50):
        call()
    samples = []
    for _ in range(_CALLS // _BATCH):
        torch.cuda.synchronize()
        for _ in range(_BATCH):
            start = time.perf_counter_ns()
            call()
            samples.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return statistics.median(samples) / 1000


def _torch_add() -> Callable[[], Any]:
    x = torch.zeros(256, device=DEVICE)
    return lambda: x.add_(1.0)


def _gemm(seed: int, form: str) -> Callable[[], Any]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    a, b = (random_operand(generator, rows, _K, "octaves").pair for rows in (_M, _N))
    alpha = torch.ones(1, device=DEVICE)
    out = torch.empty((1, _M, _N), dtype=torch.bfloat16, device=DEVICE).permute(1, 2, 0)
    plan = blockscaled.plan(blockscaled.Caps(device=DEVICE, c_dtype="bfloat16", max_m=_M, n=_N, k=_K))
    binding = plan.bind(lhs=a, rhs=b, out=out, alpha=alpha)
    dtypes = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
    if form == "run":
        return lambda: blockscaled.run(binding=binding)
    if form == "bind":
        return lambda: blockscaled.run(binding=plan.bind(lhs=a, rhs=b, out=out, alpha=alpha))
    return lambda: blockscaled.mm(a, b, out, alpha=alpha, **dtypes)


def _quantise(seed: int, form: str) -> Callable[[], Any]:
    x = torch.ones((_M, _K), dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    plan = nvfp4.plan(_M, _K, device=DEVICE, dtype="bfloat16")
    outputs = nvfp4.allocate_outputs(plan)
    binding = nvfp4.bind(plan, x=x, global_scale=one, outputs=outputs)
    if form == "run":
        return lambda: nvfp4.run(binding=binding)
    if form == "bind":
        return lambda: nvfp4.run(plan=plan, x=x, global_scale=one, outputs=outputs)
    return lambda: nvfp4.quantize(x, one)


def _triton() -> Callable[[], Any]:
    import triton_add

    x = torch.zeros(256, device=DEVICE)
    return lambda: triton_add.add(x)


def _cuda_core(prepared: Path) -> Callable[[], Any]:
    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, launch
    except ImportError:
        from cuda.core.experimental import Device, LaunchConfig, ObjectCode, launch
    index = json.loads((prepared / "cases" / "index.json").read_text())
    cubin = (prepared / "cases" / index["add.rn.f32x2"]["cubin"]).read_bytes()
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    kernel = ObjectCode.from_cubin(cubin).get_kernel("case")
    source = torch.zeros((256, 4), device=DEVICE)
    output = torch.zeros((256, 2), device=DEVICE)
    config = LaunchConfig(grid=1, block=256)
    addresses = (source.data_ptr(), output.data_ptr())

    def call(keep: tuple[torch.Tensor, ...] = (source, output)) -> None:
        launch(stream, config, kernel, *addresses)

    return call
