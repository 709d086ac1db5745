"""Section: every kernel of the pack through its op, at model shapes, against float64 and bit for bit against itself."""

from __future__ import annotations

from pathlib import Path

import torch
from operands import DEVICE, DISTRIBUTIONS, DTYPES, Operand, product, random_operand, tolerance
from report import Report

from b12x.gemm import blockscaled
from b12x.quantization import nvfp4, scales

ROWS = (1, 16, 64, 256, 4096)
#: (N, K) of projections.
MODELS = {
    "DeepSeek-V3 q_a": (1536, 7168),
    "DeepSeek-V3 kv_a": (576, 7168),
    "DeepSeek-V3 q_b": (24576, 1536),
    "DeepSeek-V3 kv_b": (32768, 512),
    "DeepSeek-V3 o": (7168, 16384),
    "DeepSeek-V3 gate_up": (36864, 7168),
    "DeepSeek-V3 down": (7168, 18432),
    "DeepSeek-V3 expert gate_up": (4096, 7168),
    "DeepSeek-V3 expert down": (7168, 2048),
    "Qwen3-32B qkv": (10240, 5120),
    "Qwen3-32B o": (5120, 8192),
    "Qwen3-32B gate_up": (51200, 5120),
    "Qwen3-32B down": (5120, 25600),
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Llama-3.1-70B qkv / tp8": (1280, 8192),
    "Llama-3.1-70B o": (8192, 8192),
    "Llama-3.1-70B gate_up": (57344, 8192),
    "Llama-3.1-70B down": (8192, 28672),
}
#: (M, N, K, L) that fit no tile: sharded widths, ragged rows, batches.
RAGGED = (
    (1, 8, 128, 1),
    (65, 176, 256, 1),
    (127, 352, 384, 1),
    (129, 464, 640, 3),
    (200, 704, 1152, 2),
    (513, 96, 128, 5),
)


def run(prepared: Path, seed: int, report: Report) -> None:
    """GEMMs first, since they take longest; then the quantiser."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for m, n, k, batch in RAGGED:
        for distribution in DISTRIBUTIONS:
            with report.guard(f"gemm {m}x{n}x{k}x{batch} {distribution}"):
                _ragged(generator, (m, n, k, batch), distribution, report)
    for name, (n, k) in MODELS.items():
        for distribution in DISTRIBUTIONS:
            with report.guard(f"gemm {name} {distribution}"):
                _model(generator, name, n, k, distribution, report)
    for dtype in ("bfloat16", "float16"):
        for k in sorted({k for _, k in MODELS.values()} | {64, 192}):
            for rows in (1, 17, 129, 4096):
                with report.guard(f"quantise {rows}x{k} {dtype}"):
                    _quantise(generator, rows, k, dtype, report)


def _model(generator: torch.Generator, name: str, n: int, k: int, distribution: str, report: Report) -> None:
    b = random_operand(generator, n, k, distribution)
    a = random_operand(generator, max(ROWS), k, distribution)
    reference, magnitude = _references(a, b)
    alpha = torch.rand(1, generator=generator, device=DEVICE) + 0.5
    for c_dtype in DTYPES:
        plan = blockscaled.plan(blockscaled.Caps(device=DEVICE, c_dtype=c_dtype, max_m=max(ROWS), n=n, k=k))
        for m in ROWS:
            title = f"gemm {name} {m}x{n}x{k} {c_dtype} {distribution}"
            _judge(title, plan, a.rows(m), b, alpha, reference[:, :m], magnitude[:, :m], report)


def _ragged(generator: torch.Generator, shape: tuple[int, int, int, int], distribution: str, report: Report) -> None:
    m, n, k, batch = shape
    a = random_operand(generator, m, k, distribution, batch)
    b = random_operand(generator, n, k, distribution, batch)
    reference, magnitude = _references(a, b)
    alpha = torch.rand(batch, generator=generator, device=DEVICE) + 0.5
    for c_dtype in DTYPES:
        caps = blockscaled.Caps(device=DEVICE, c_dtype=c_dtype, max_m=m, n=n, k=k, batch=batch)
        title = f"gemm {m}x{n}x{k}x{batch} {c_dtype} {distribution}"
        _judge(title, blockscaled.plan(caps), a, b, alpha, reference, magnitude, report)


def _references(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = a.values(), b.values()
    return product(left, right), product(left.abs(), right.abs())


def _judge(
    title: str,
    plan: blockscaled.Plan,
    a: Operand,
    b: Operand,
    alpha: torch.Tensor,
    reference: torch.Tensor,
    magnitude: torch.Tensor,
    report: Report,
) -> None:
    """Error of one GEMM, and whether three runs, one of them on fewer SMs, give the same bits into a poisoned C."""
    fewer = 37 if reference.numel() * plan.caps.k < 2**34 else 101
    caps = plan.caps
    batch, m, n = reference.shape
    outputs = []
    for sm_count in (None, None, fewer):
        storage = torch.full((batch, m, n), float("nan"), dtype=DTYPES[caps.c_dtype], device=DEVICE)
        out = storage.permute(1, 2, 0)
        blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=alpha, sm_count=sm_count))
        outputs.append(storage)
    factors = alpha.double().view(-1, 1, 1)
    expected, scale = reference * factors, magnitude * factors
    error = (outputs[0].double() - expected).abs()
    bound = tolerance(expected, scale, caps.k, caps.c_dtype)
    beyond = int((~(error <= bound)).sum())
    repeated = all(torch.equal(outputs[0].view(torch.uint8), other.view(torch.uint8)) for other in outputs[1:])
    report.add(
        title,
        beyond == 0 and repeated,
        beyond_bound=beyond,
        worst_of_bound=float((error / bound).max()),
        relative_error=float(error.norm() / expected.norm()),
        worst_of_sum=float((error / scale.clamp(min=1e-300)).max()),
        same_bits=repeated,
    )


def _quantise(generator: torch.Generator, rows: int, k: int, dtype: str, report: Report) -> None:
    """Bits against the contract's chain in torch, with N(0, 1) rows of very different size, zero rows among them."""
    x = torch.randn((rows, k), generator=generator, device=DEVICE)
    x *= torch.exp2(torch.randint(-12, 8, (rows, 1), generator=generator, device=DEVICE).float())
    x = torch.where(torch.rand((rows, 1), generator=generator, device=DEVICE) < 0.05, 0, x).to(DTYPES[dtype])
    x.view(-1)[:: max(1, x.numel() // 64)] = float("inf") if rows % 2 == 0 else 60000.0
    global_scale = torch.rand(1, generator=generator, device=DEVICE) * 8 + 0.25
    plan = nvfp4.plan(rows, k, device=DEVICE, dtype=dtype)
    results = []
    for _ in range(2):
        outputs = nvfp4.allocate_outputs(plan)
        outputs.packed_a_storage.fill_(0xA5)
        outputs.scale_storage.fill_(0xA5)
        nvfp4.run(plan=plan, x=x, global_scale=global_scale, outputs=outputs)
        results.append(outputs)
    first = results[0]
    codes, linear = _contract(x.float(), global_scale)
    found = scales.unswizzle(first.scale_storage, rows, k // 16)[0]
    wrong_scales = int((found != linear).sum())
    wrong_codes = int((first.packed_a_storage[0] != codes).sum())
    pads = first.scale_storage.view(scales.storage_shape(rows, k // 16))
    inside = scales.swizzle(torch.ones_like(linear))
    clean = bool((pads[inside == 0] == 0).all())
    repeated = torch.equal(first.packed_a_storage, results[1].packed_a_storage) and torch.equal(
        first.scale_storage, results[1].scale_storage
    )
    report.add(
        f"quantise {rows}x{k} {dtype}",
        wrong_scales == wrong_codes == 0 and repeated and clean,
        wrong_scales=wrong_scales,
        wrong_bytes=wrong_codes,
        same_bits=repeated,
        pads_zero=clean,
    )


def _contract(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain of ``quantization.nvfp4.reference`` in torch: one f32 rounding a line."""
    sixth = torch.tensor(0x3E2AAAAB, dtype=torch.int32, device=x.device).view(torch.float32)
    blocks = x.view(x.shape[0], -1, 16)
    amax = blocks.abs().amax(dim=2)
    scale = (global_scale * (amax * sixth)).clamp(max=448.0).to(torch.float8_e4m3fn)
    value = scale.float()
    factor = 1.0 / (value * (1.0 / global_scale))
    scaled = torch.where(value.unsqueeze(2) == 0, 0.0, blocks * factor.unsqueeze(2))
    magnitude = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for low, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude > middle) if low % 2 == 0 else (magnitude >= middle)
    code |= ((scaled < 0) & (code > 0)).to(torch.uint8) << 3
    code = code.view(x.shape)
    return code[:, 0::2] | (code[:, 1::2] << 4), scale.view(torch.uint8)
