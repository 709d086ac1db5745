"""Section: CUDA graphs with changed inputs, two streams at once, two bindings that write one output in turn."""

from __future__ import annotations

from pathlib import Path

import torch
from operands import DEVICE, DTYPES, Operand, random_operand
from report import Report

from b12x.gemm import blockscaled
from b12x.quantization import nvfp4

#: (M, N, K): one of each tile, one beyond a wave.
SHAPES = ((16, 1536, 2048), (256, 4096, 2048), (1024, 8192, 1024))
_ROUNDS = 20


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed + 2)
    for m, n, k in SHAPES:
        for c_dtype in DTYPES:
            title = f"{m}x{n}x{k} {c_dtype}"
            for name, check in (("graph", _graph), ("two streams", _streams), ("one output", _one_output)):
                with report.guard(f"{name} {title}"):
                    report.add(f"{name} {title}", check(generator, m, n, k, c_dtype))


def _plan(m: int, n: int, k: int, c_dtype: str) -> blockscaled.Plan:
    return blockscaled.plan(blockscaled.Caps(device=DEVICE, c_dtype=c_dtype, max_m=m, n=n, k=k))


def _out(m: int, n: int, c_dtype: str) -> torch.Tensor:
    return torch.full((1, m, n), float("nan"), dtype=DTYPES[c_dtype], device=DEVICE).permute(1, 2, 0)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.permute(2, 0, 1).view(torch.uint8), b.permute(2, 0, 1).view(torch.uint8))


def _eager(plan: blockscaled.Plan, a: Operand, b: Operand, alpha: torch.Tensor) -> torch.Tensor:
    out = _out(a.packed.shape[0], plan.caps.n, plan.caps.c_dtype)
    return blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=alpha))


def _graph(generator: torch.Generator, m: int, n: int, k: int, c_dtype: str) -> bool:
    """Quantiser and GEMM captured together, then replayed for other rows, weights and alpha than at capture."""
    plan, quantiser = _plan(m, n, k, c_dtype), nvfp4.plan(m, k, device=DEVICE, dtype="bfloat16")
    x = torch.randn((m, k), generator=generator, device=DEVICE).to(torch.bfloat16)
    one, alpha = torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)
    rows = nvfp4.allocate_outputs(quantiser)
    weight = random_operand(generator, n, k, "octaves")
    out = _out(m, n, c_dtype)
    quantise = nvfp4.bind(quantiser, x=x, global_scale=one, outputs=rows)
    multiply = plan.bind(lhs=(rows.packed_a_view, rows.scale_view), rhs=weight.pair, out=out, alpha=alpha)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nvfp4.run(binding=quantise)
        blockscaled.run(binding=multiply)
    right = True
    for _ in range(3):
        other = random_operand(generator, n, k, "octaves")
        weight.packed.copy_(other.packed)
        weight.scales.copy_(other.scales)
        x.copy_(torch.randn((m, k), generator=generator, device=DEVICE))
        alpha.copy_(torch.rand(1, generator=generator, device=DEVICE) + 0.5)
        out.fill_(float("nan"))
        graph.replay()
        fresh = nvfp4.quantize(x, one)
        expected = _out(m, n, c_dtype)
        lhs = (fresh.packed_a_view, fresh.scale_view)
        blockscaled.run(binding=plan.bind(lhs=lhs, rhs=other.pair, out=expected, alpha=alpha))
        torch.cuda.synchronize()
        right = right and not bool(out.isnan().any()) and _same(out, expected)
    return right


def _streams(generator: torch.Generator, m: int, n: int, k: int, c_dtype: str) -> bool:
    """Two bindings of one plan, launched in alternation on two streams, many times."""
    plan, alpha = _plan(m, n, k, c_dtype), torch.ones(1, device=DEVICE)
    pairs = [(random_operand(generator, m, k, "octaves"), random_operand(generator, n, k, "octaves")) for _ in range(2)]
    expected = [_eager(plan, a, b, alpha) for a, b in pairs]
    outs = [_out(m, n, c_dtype) for _ in pairs]
    bindings = [
        plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=alpha) for (a, b), out in zip(pairs, outs, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(_ROUNDS):
        for binding, stream in zip(bindings, streams, strict=True):
            blockscaled.run(binding=binding, stream=stream)
    torch.cuda.synchronize()
    return all(_same(out, want) for out, want in zip(outs, expected, strict=True))


def _one_output(generator: torch.Generator, m: int, n: int, k: int, c_dtype: str) -> bool:
    """Two bindings over the same C, A and weights of their own, run in turn on one stream."""
    plan, alpha = _plan(m, n, k, c_dtype), torch.ones(1, device=DEVICE)
    pairs = [(random_operand(generator, m, k, "octaves"), random_operand(generator, n, k, "octaves")) for _ in range(2)]
    expected = [_eager(plan, a, b, alpha) for a, b in pairs]
    out = _out(m, n, c_dtype)
    bindings = [plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=alpha) for a, b in pairs]
    right = True
    for turn in (0, 1, 1, 0):
        blockscaled.run(binding=bindings[turn])
        right = right and _same(out, expected[turn])
    return right
