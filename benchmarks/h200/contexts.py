"""Section: launches while another context than the device's primary one is current, or none, or another GPU's.

The runtime launches first and looks at the context only if the driver refuses; here the driver has its say. Each entry
records whether the result was right and whether the thread's context was left as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from operands import DEVICE, random_operand
from report import Report

from b12x._runtime import cuda_target, driver, target
from b12x.gemm import blockscaled

M, N, K = 16, 256, 1024


def run(prepared: Path, seed: int, report: Report) -> None:
    cu = driver.ready()
    generator = torch.Generator(DEVICE).manual_seed(seed + 5)
    plan = blockscaled.plan(blockscaled.Caps(device=DEVICE, c_dtype="float32", max_m=M, n=N, k=K))
    a, b = random_operand(generator, M, K, "octaves"), random_operand(generator, N, K, "octaves")
    expected, out = (torch.zeros((1, M, N), device=DEVICE).permute(1, 2, 0) for _ in range(2))
    blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=expected))
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=out)
    (device,) = driver.check("cuDeviceGet", cu.cuDeviceGet(0))
    (foreign,) = driver.check("cuCtxCreate", cu.cuCtxCreate(None, 0, device))
    driver.check("cuCtxPopCurrent", cu.cuCtxPopCurrent())
    contexts = {"no context": cu.CUcontext(0), "another context of the GPU": foreign}
    if torch.cuda.device_count() > 1:
        contexts["another GPU's context"] = cuda_target.cuda_target(1, target.current_target(DEVICE).arch).context
    streams = {"the default stream": None, "a stream": torch.cuda.Stream()}

    def judge(name: str, launch: Callable[[], bool]) -> None:
        with report.guard(name):
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            kept = launch()
            torch.cuda.synchronize()
            report.add(name, kept and torch.equal(out, expected), context_kept=kept)

    for what, context in contexts.items():
        for where, stream in streams.items():
            judge(
                f"{what}, {where}",
                lambda context=context, stream=stream: _under(
                    context, lambda: blockscaled.run(binding=binding, stream=stream)
                ),
            )
        judge(f"{what}, in a graph", lambda context=context: _captured(context, binding))
    judge("a new thread", lambda: _in_thread(lambda: blockscaled.run(binding=binding)))


def _under(context: Any, launch: Callable[[], Any]) -> bool:
    """Launch with ``context`` current; whether it still was afterwards."""
    cu = driver.ready()
    saved = _current()
    driver.check("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
    try:
        launch()
        return int(_current()) == int(context)
    finally:
        driver.check("cuCtxSetCurrent", cu.cuCtxSetCurrent(saved))


def _current() -> Any:
    (context,) = driver.check("cuCtxGetCurrent", driver.ready().cuCtxGetCurrent())
    return context


def _captured(context: Any, binding: blockscaled.Binding) -> bool:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        kept = _under(context, lambda: blockscaled.run(binding=binding, stream=stream))
    graph.replay()
    return kept


def _in_thread(launch: Callable[[], Any]) -> bool:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            launch()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return True
