"""The decode GEMM that quantises A: to the bit what quantizer and GEMM give; its layouts, RoPE and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import b12x
from b12x import emulator
from b12x._runtime import counters
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import Caps
from b12x.gemm.blockscaled import fused as fused_api
from b12x.gemm.blockscaled.fused_planner import FusedCaps
from b12x.quantization import scales
from b12x.quantization.mxfp8 import reference
from b12x.verify.operands import ENCODINGS, Operand, random_operand

_MXFP8 = {"ab_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def weights(seed: int, n: int, k: int, groups: int = 1, distribution: str = "normal") -> Operand:
    return random_operand(generator(seed), n, k, distribution, groups, "mxfp8")


def identity(k: int, groups: int = 1) -> Operand:
    """Weights ``[K, K, G]`` by which C is what the quantised source stands for, its columns rolled by 8 a group."""
    codes = torch.zeros((groups, k, k), dtype=torch.uint8)
    row = torch.arange(k)
    for group in range(groups):
        codes[group, row, (row + 8 * group) % k] = 0x38
    linear = torch.full((groups, k, k // 32), 127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).permute(1, 2, 0)
    return Operand(ENCODINGS["mxfp8"], values, scales.swizzle(linear), linear)


def tokens(seed: int, m: int, k: int, groups: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[M, G, K]`` with blocks of every size, of zeros and of negative zeros."""
    made = generator(seed)
    x = torch.randn((m, groups, k), generator=made)
    x *= torch.exp2(torch.randint(-3, 6, (m, groups, k // 8), generator=made)).repeat_interleave(8, dim=-1)
    x[0, :, :32] = 0
    x[-1, :, 32:64] = -0.0
    return x.to(dtype)


def rows_of(source: torch.Tensor) -> np.ndarray:
    """``[G, M, K]`` in f32."""
    return source.float().cpu().transpose(0, 1).contiguous().numpy()


def read_back(rows: np.ndarray, k: int) -> torch.Tensor:
    """C ``[M, K, G]`` in float64 of rows ``[G, M, columns]`` by :func:`identity`: the quantizer's reference."""
    groups, m, columns = rows.shape
    padded = np.zeros((groups, m, k), np.float32)
    padded[..., :columns] = rows
    real = reference.dequantize(*reference.quantize(padded.reshape(-1, k))).reshape(padded.shape)
    rolled = [np.roll(real[group], -8 * group, axis=1) for group in range(groups)]
    return torch.from_numpy(np.stack(rolled)).to(torch.get_default_device()).permute(1, 2, 0)


def empty(m: int, n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """C ``[M, N, G]`` of NaN."""
    return torch.full((groups, m, n), math.nan, dtype=dtype).permute(1, 2, 0)


def fused(caps: FusedCaps, split: int, source: torch.Tensor, b: Operand, **more) -> torch.Tensor:
    plan = blockscaled.plan_fused(caps, split=split)
    out = empty(source.shape[0], caps.n, caps.groups, getattr(torch, caps.c_dtype))
    return blockscaled.run(binding=plan.bind(source=source, b=b.codes, sfb=b.scales, out=out, **more))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("k", "columns", "groups", "split"), [(128, 128, 1, 1), (256, 200, 1, 2), (256, 232, 3, 1), (256, 256, 1, 4)]
)
def test_quantises_to_the_byte(target, dtype, k, columns, groups, split):
    """Every M: what comes back is exactly what the quantizer's codes and scales stand for."""
    b = identity(k, groups)
    caps = FusedCaps(device=target.device, n=k, k=k, k_source=columns, groups=groups, dtype=dtype, c_dtype=dtype)
    for m in range(1, 9) if k == 128 else (1, 5, 8):
        source = tokens(m, m, columns, groups, getattr(torch, dtype))
        found = fused(caps, split, source if groups > 1 else source[:, 0], b)
        assert torch.equal(found.double(), read_back(rows_of(source), k)), m


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("n", "k", "groups", "split"), [(72, 128, 1, 1), (132, 1408, 1, 1), (136, 640, 2, 2), (72, 1152, 1, 7)]
)
def test_equals_quantiser_and_gemm_to_the_bit(target, dtype, n, k, groups, split):
    """On a grid where every sum is exact, so that the result does not depend on which kernel adds what first."""
    m = 7
    b = weights(n, n, k, groups, "grid")
    source = torch.randint(-7, 8, (m, groups, k), generator=generator(k)).to(getattr(torch, dtype))
    caps = FusedCaps(device=target.device, n=n, k=k, groups=groups, dtype=dtype, c_dtype=dtype)
    found = fused(caps, split, source, b)
    codes, bytes_of_scales = reference.quantize(rows_of(source).reshape(-1, k))
    device = torch.get_default_device()
    values = torch.from_numpy(codes).view(groups, m, k).to(device).permute(1, 2, 0)
    sfa = scales.swizzle(torch.from_numpy(bytes_of_scales).view(groups, m, k // 32).to(device))
    plan = blockscaled.plan(Caps(device=device, **_MXFP8, c_dtype=dtype, max_m=m, n=n, k=k, batch=groups))
    out = empty(m, n, groups, found.dtype)
    assert torch.equal(found, blockscaled.run(binding=plan.bind(lhs=(values, sfa), rhs=b.pair, out=out)))
    assert torch.equal(found.permute(2, 0, 1), (source.double().transpose(0, 1) @ b.values().mT).to(found.dtype))


@pytest.mark.parametrize(("span", "columns", "k"), [(64, 512, 512), (1024, 2048, 2048), (160, 480, 512), (8, 128, 128)])
def test_inner_span(target, span, columns, k):
    """Column ``g * span + r`` is element ``(r, g)``: spans that end within a K step, a block and beside one."""
    b, source = weights(1, 72, k), tokens(2, 5, columns)
    pieces = source.view(5, columns // span, span).transpose(0, 1).contiguous()  # [g, M, r]
    view = pieces.permute(1, 2, 0)
    assert view.stride() == (span, 1, 5 * span)
    found = blockscaled.mm_fused_quant_a(view, b.codes, b.scales, a_inner_span=span)
    plain = blockscaled.mm_fused_quant_a(source[:, 0], b.codes[..., 0], b.scales)
    assert torch.equal(found, plain)
    assert found.shape == (5, 72, 1)


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("position_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("head_dim", "nope_dim", "rope_dim"), [(128, 64, 64), (64, 32, 32), (96, 0, 96)])
def test_inverse_rope(target, cache_dtype, position_dtype, head_dim, nope_dim, rope_dim):
    """The rotation in f32 and the quantizer as their references do them, to the byte."""
    k, groups, m = 384, 1, 6
    b, source = identity(k, groups), tokens(4, m, k, groups)
    positions = torch.tensor([0, 7, 39, 7, 1, 20], dtype=getattr(torch, position_dtype))
    angles = 3 * torch.randn((40, rope_dim // 2), generator=generator(5))
    cache = torch.cat([angles.cos(), angles.sin()], dim=1).to(getattr(torch, cache_dtype))
    rope = {"head_dim": head_dim, "nope_dim": nope_dim, "rope_dim": rope_dim}
    turned = [
        reference.inverse_rope(
            rows, positions.cpu().numpy(), cache.float().cpu().numpy(), head_dim=head_dim, nope_dim=nope_dim
        )
        for rows in rows_of(source)
    ]
    wanted = read_back(np.stack(turned), k)
    caps = FusedCaps(device=target.device, n=k, k=k, groups=groups, rope={**rope, "cache_dtype": cache_dtype})
    found = fused(caps, 3, source, b, positions=positions, cos_sin_cache=cache)
    assert torch.equal(found.double(), wanted)
    once = blockscaled.mm_fused_quant_a_grouped(
        source, b.codes, b.scales, groups=groups, positions=positions, cos_sin_cache=cache, **rope
    )
    assert torch.equal(once, found)


def test_groups_with_strides(target):
    """Rows of the source further apart than they need, groups in any order of memory; what lies between is NaN."""
    b, source = weights(6, 72, 256, 3), tokens(7, 4, 256, 3)
    wide = torch.full((3, 4, 264), math.nan, dtype=torch.bfloat16)
    view = wide[:, :, :256].transpose(0, 1)
    view.copy_(source)
    wanted = blockscaled.mm_fused_quant_a_grouped(source, b.codes, b.scales, groups=3)
    assert torch.equal(blockscaled.mm_fused_quant_a_grouped(view, b.codes, b.scales, groups=3), wanted)
    out = empty(4, 72, 3, torch.bfloat16)
    assert blockscaled.mm_fused_quant_a_grouped(source, b.codes, b.scales, groups=3, out=out) is out
    assert torch.equal(out, wanted)


def test_alpha_and_bias(target):
    b, source = weights(8, 72, 128), tokens(9, 3, 128)[:, 0]
    caps = FusedCaps(device=target.device, n=72, k=128)
    plain = fused(caps, 1, source, b)
    bias = torch.linspace(-4, 4, 72).bfloat16()
    found = fused(caps, 1, source, b, alpha=torch.tensor([-0.5]), bias=bias)
    assert torch.equal(found[..., 0], (-0.5 * plain[..., 0].float() + bias.float()).bfloat16())


def test_one_launch_and_kept_plans(target):
    b, source = weights(10, 72, 128), tokens(11, 8, 128)[:, 0]
    for m in (1, 8, 0):
        before, compiles = counters.launches.total(), counters.compiles
        assert blockscaled.mm_fused_quant_a(source[:m], b.codes, b.scales).shape == (m, 72, 1)
        assert counters.launches.total() == before + (m > 0)
        assert m == 1 or counters.compiles == compiles
    blockscaled.clear_caches()


def test_arguments_that_change_nothing(target):
    """Dimensions without a rotation, and no tiled values, said in either way."""
    b, source = weights(16, 72, 128), tokens(17, 3, 128)
    wanted = blockscaled.mm_fused_quant_a(source[:, 0], b.codes, b.scales)
    found = blockscaled.mm_fused_quant_a(source[:, 0], b.codes, b.scales, rhs_values_tiled=False)
    assert torch.equal(found, wanted)
    dims = {"head_dim": 128, "nope_dim": 64, "rope_dim": 64}
    for more in (dims, {"positions": None, "cos_sin_cache": None, **dict.fromkeys(dims, 0)}):
        grouped = blockscaled.mm_fused_quant_a_grouped(source, b.codes, b.scales, groups=1, **more)
        assert torch.equal(grouped, wanted)


def test_memory_of_its_own_is_kept_for_the_stream(target, monkeypatch):
    """What a one-shot allocates is marked as used on the stream that was given; what the caller passes is not."""
    b, source = weights(18, 72, 128), tokens(19, 3, 128)
    marked = []
    monkeypatch.setattr(fused_api, "used_on", lambda stream, *tensors: marked.append((stream, *tensors)))
    for call in (
        lambda **more: blockscaled.mm_fused_quant_a(source[:, 0], b.codes, b.scales, **more),
        lambda **more: blockscaled.mm_fused_quant_a_grouped(source, b.codes, b.scales, groups=1, **more),
    ):
        found = call(stream=0)
        ((stream, tensor),) = marked
        assert (stream, tensor.data_ptr()) == (0, found.data_ptr())
        call(stream=0, out=empty(3, 72, 1, torch.bfloat16))
        assert len(marked) == 1
        marked.clear()


def test_any_order_of_the_warps(target):
    """Warps in random order, copies at once or as late as may be: the same bits, and no race."""
    if target.name != "emulator":
        pytest.skip("the order of warps is the emulator's to choose")
    results = []
    for seed, copies in enumerate(("late", "eager")):
        schedule = emulator.Options(schedule="random", seed=seed, copies=copies, races="strict")
        with b12x.target("emulator", options=schedule):
            caps = FusedCaps(device="cpu", n=72, k=1664)
            results.append(fused(caps, 2, tokens(12, 5, 1664)[:, 0], weights(13, 72, 1664)))
    assert torch.equal(*results)


def test_refused_caps():
    for wrong, said in (
        ({"max_m": 9}, "max_m"),
        ({"k": 192}, "k is 192"),
        ({"k_source": 124}, "124 columns"),
        ({"k_source": 264}, "264 columns"),
        ({"span": 12}, "span"),
        ({"span": 64, "groups": 2}, "span"),
        ({"dtype": "float32"}, "dtype"),
        ({"rope": {"head_dim": 96, "nope_dim": 64, "rope_dim": 32}}, "head_dim 96"),
        ({"rope": {"head_dim": 96, "nope_dim": 32, "rope_dim": 32}}, "rope_dim"),
    ):
        with pytest.raises(ValueError, match=said):
            FusedCaps(**({"device": "cpu", "n": 72, "k": 256} | wrong))
    with pytest.raises(ValueError, match="plan_fused"):
        blockscaled.plan(FusedCaps(device="cpu", n=72, k=256).product)


def test_refused_arguments(target):
    b, source = weights(14, 72, 256), tokens(15, 3, 256)[:, 0]
    call = blockscaled.mm_fused_quant_a
    with pytest.raises(ValueError, match="9 rows"):
        call(tokens(15, 9, 256)[:, 0], b.codes, b.scales)
    with pytest.raises(ValueError, match="source has shape"):
        call(source, b.codes, b.scales, a_inner_span=64)
    with pytest.raises(TypeError, match="source is a list"):
        call([1.0], b.codes, b.scales)
    with pytest.raises(ValueError, match="SFB"):
        call(source, b.codes, b.scales.flatten()[:-512])
    with pytest.raises(ValueError, match="strides"):
        call(source.T.contiguous().T, b.codes, b.scales)
    with pytest.raises(ValueError, match="mma_tiler_mn"):
        call(source, b.codes, b.scales, mma_tiler_mn=(16, 64))
    with pytest.raises(ValueError, match="overlap"):
        call(source, b.codes, b.scales, out=source.view(-1)[: 3 * 72].view(1, 3, 72).permute(1, 2, 0))
    grouped = blockscaled.mm_fused_quant_a_grouped
    for name in ("positions", "cos_sin_cache"):
        (other,) = {"positions", "cos_sin_cache"} - {name}
        with pytest.raises(TypeError, match=f"{other} is None; needed are positions and cos_sin_cache"):
            grouped(source.unsqueeze(1), b.codes, b.scales, groups=1, **{name: torch.zeros(3)})
    rotation = {"positions": torch.zeros(3, dtype=torch.int32), "cos_sin_cache": torch.ones(1, 64)}
    with pytest.raises(ValueError, match=r"rope.head_dim is 0"):
        grouped(source.unsqueeze(1), b.codes, b.scales, groups=1, **rotation)
    rotation["cos_sin_cache"] = torch.ones(1, 64).half()
    with pytest.raises(TypeError, match="cos_sin_cache has dtype float16"):
        grouped(source.unsqueeze(1), b.codes, b.scales, groups=1, **rotation)
    with pytest.raises(TypeError, match="source has dtype float32"):
        call(source.float(), b.codes, b.scales)
    with pytest.raises(TypeError, match="source has dtype float32"):
        grouped(source.float().unsqueeze(1), b.codes, b.scales, groups=1)
    with pytest.raises(ValueError, match="rhs_values_tiled"):
        call(source, b.codes, b.scales, rhs_values_tiled=b.codes)
    with pytest.raises(ValueError, match="source has shape"):
        grouped(source.unsqueeze(1), b.codes, b.scales, groups=2)
    plan = blockscaled.plan_fused(FusedCaps(device=target.device, n=72, k=256))
    out = empty(3, 72, 1, torch.bfloat16)
    with pytest.raises(ValueError, match="for a plan with a rope"):
        plan.bind(source=source, b=b.codes, sfb=b.scales, out=out, positions=torch.zeros(3))
    with pytest.raises(ValueError, match="split"):
        blockscaled.plan_fused(FusedCaps(device=target.device, n=72, k=256), split=9)
