"""Section: time of GEMMs at few rows, over distinct weights, beside a copy and an empty node of a graph.

A figure is the median of 30 replays of a graph that launches on weights in turn, several times the L2 of them. The copy
counts bytes read and written. ``gemm.bmm`` and ``gemm.mla_query_projection`` run as on SM120, and have a target; the
MMAs of ``gemm.blockscaled`` are expanded to many instructions here, so its figures are only listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from operands import DEVICE
from quantizers import copy_bandwidth, seconds, sets_for
from report import Report

import b12x
from b12x.gemm import blockscaled, mla_query_projection
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.recipes import BY_DTYPES, RECIPES
from b12x.quantization import scales

HEADS, NOPE, LATENT, ROPE, VALUE = 128, 192, 512, 64, 256
HEAD_ROWS = (1, 4, 8)
#: Times the time of the weights' bytes at the copy bandwidth, plus an empty node's.
TARGET = 2.5
#: (N, K) and M of decode GEMMs.
SHAPES = ((512, 7168), (1536, 4096), (2048, 7168), (7168, 2048), (7168, 7168), (16384, 1024))
ROWS = (1, 8, 16)
_DTYPES = {recipe: dtypes for dtypes, recipe in BY_DTYPES.items()}
_EMPTY_NODES = 64

#: Bytes of the weights of one launch, the launch, its result and what that has to be near (None: not looked at).
Made = tuple[int, Callable[[], Any], torch.Tensor, torch.Tensor | None]


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    machine: dict[str, float] = {}
    with report.guard("machine"):
        machine["copy_gbps"] = copy_bandwidth(DEVICE)
        machine["empty_node_us"] = 1e6 * seconds([lambda: torch.cuda._sleep(0)] * _EMPTY_NODES)
        report.set("machine", machine)
    for name, make, target in configurations(generator):
        with report.guard(name):
            _measure(name, make, target, machine, report)
        torch.cuda.empty_cache()


def configurations(generator: torch.Generator) -> Iterator[tuple[str, Callable[[], Made], float | None]]:
    """Name, a function that makes a launch on weights of its own, and the target."""
    for m in HEAD_ROWS:
        for major, k, n in (("n", NOPE, LATENT), ("k", LATENT, VALUE)):
            name = f"bmm {HEADS} heads M{m} K{k} N{n} {major}-major"
            yield name, lambda m=m, major=major, k=k, n=n: _bmm(generator, m, k, n, major), TARGET
        for weight in ("mxfp8", "bfloat16"):
            for output in ("bfloat16", "float8_e4m3fn"):
                name = f"mla_query_projection {HEADS} heads M{m} {weight} to {output}"
                yield name, lambda m=m, weight=weight, output=output: _mla(generator, m, weight, output), TARGET
    for recipe in ("nvfp4", "mxfp8"):
        for n, k in SHAPES:
            for m in ROWS:
                name = f"blockscaled {recipe} {m}x{n}x{k}"
                yield name, lambda recipe=recipe, m=m, n=n, k=k: _blockscaled(generator, recipe, m, n, k), None


def _measure(
    name: str, make: Callable[[], Made], target: float | None, machine: dict[str, float], report: Report
) -> None:
    first = make()
    nbytes, launch, out, wanted = first
    launch()
    near = {}
    if wanted is not None:
        near["relative_error"] = float((out.double() - wanted).norm() / wanted.norm())
    l2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    made = [first, *(make() for _ in range(sets_for(nbytes, l2) - 1))]
    time = 1e6 * seconds([launch for _, launch, _, _ in made])
    floor = nbytes / machine["copy_gbps"] / 1e3 + machine["empty_node_us"]
    right = near.get("relative_error", 0.0) < 2**-5
    report.add(
        name,
        right and (target is None or time <= target * floor),
        us=time,
        weight_bytes=nbytes,
        weights=len(made),
        gbps=nbytes / time / 1e3,
        floor_us=floor,
        times_floor=time / floor,
        target=target,
        **near,
    )


def _random_weight(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values, and E8M0 codes around 1, one for 32 values of the last dimension."""
    values = torch.randn(shape, generator=generator, device=DEVICE).to(torch.float8_e4m3fn)
    blocks = (*shape[:-1], shape[-1] // 32)
    return values, torch.randint(125, 130, blocks, generator=generator, device=DEVICE, dtype=torch.uint8)


def _dequantised(weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    values, codes = weight
    factors = torch.exp2(codes.double() - 127).repeat_interleave(32, dim=-1)
    return values.double() * factors


def _bmm(generator: torch.Generator, m: int, k: int, n: int, major: str) -> Made:
    module: Any = importlib.import_module(b12x.find_op("gemm.bmm").module)
    weight = _random_weight(generator, HEADS, *((k, n) if major == "n" else (n, k)))
    lhs = torch.randn((HEADS, m, k), generator=generator, device=DEVICE).to(torch.bfloat16)
    out = torch.full((HEADS, m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    caps = module.Caps(device=DEVICE, batch=HEADS, max_m=m, n=n, k=k, b_major=major, sf_axis=major)
    binding = module.plan(caps).bind(lhs=lhs, rhs=weight, out=out)
    dense = _dequantised(weight)
    wanted = lhs.double() @ (dense if major == "n" else dense.mT)
    return _nbytes(*weight), lambda: module.run(binding=binding), out, wanted


def _mla(generator: torch.Generator, m: int, weight_format: str, output: str) -> Made:
    weight: Any = _random_weight(generator, HEADS, NOPE, LATENT)
    dense = _dequantised(weight)
    parts = weight
    if weight_format == "bfloat16":
        weight = dense.to(torch.bfloat16)
        parts, dense = (weight,), weight.double()
    q_nope = torch.randn((HEADS, m, NOPE), generator=generator, device=DEVICE).to(torch.bfloat16)
    q_pe = torch.randn((m, HEADS, ROPE), generator=generator, device=DEVICE).to(torch.bfloat16)
    out = torch.zeros((m, HEADS, LATENT + ROPE), device=DEVICE).to(getattr(torch, output))
    caps = mla_query_projection.Caps(
        device=DEVICE,
        num_heads=HEADS,
        max_m=m,
        nope_dim=NOPE,
        latent_dim=LATENT,
        output_dtype=output,
        weight_format=weight_format,
    )
    scale = torch.full((1,), 0.5, device=DEVICE)
    binding = mla_query_projection.plan(caps).bind(q_nope=q_nope, weight=weight, q_pe=q_pe, out=out, q_scale=scale)
    wanted = torch.cat([(q_nope.double() @ dense).permute(1, 0, 2), q_pe.double()], dim=2)
    if output != "bfloat16":
        wanted = (wanted / 0.5).clamp(-448, 448)
    return _nbytes(*parts), lambda: mla_query_projection.run(binding=binding), out, wanted


def _blockscaled(generator: torch.Generator, recipe: str, m: int, n: int, k: int) -> Made:
    """Any codes but NaN; whether results are right is for the cases to say."""
    encoding = RECIPES[recipe]
    ab_dtype, sf_dtype, block = _DTYPES[recipe]

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (rows, encoding.row_bytes(k), 1)
        codes = torch.randint(0, 0x78, shape, generator=generator, device=DEVICE, dtype=torch.uint8)
        if encoding.bits == 8:
            codes = codes.view(torch.float8_e4m3fn)
        size = scales.storage_bytes(rows, k // block, 1)
        return codes, torch.full((size,), 0x38 if recipe == "nvfp4" else 127, dtype=torch.uint8, device=DEVICE)

    caps = planner.Caps(
        device=DEVICE, ab_dtype=ab_dtype, sf_dtype=sf_dtype, sf_vec_size=block, c_dtype="bfloat16", max_m=m, n=n, k=k
    )
    weight = operand(n)
    out = torch.empty((1, m, n), dtype=torch.bfloat16, device=DEVICE).permute(1, 2, 0)
    binding = blockscaled.plan(caps).bind(lhs=operand(m), rhs=weight, out=out)
    return _nbytes(*weight), lambda: blockscaled.run(binding=binding), out, None


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
