"""NVFP4 operands on the GPU, their float64 values, and the bound that a GEMM's result is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from b12x.quantization import nvfp4, scales
from b12x.verify.case import half_ulp
from b12x.verify.operands import DISTRIBUTIONS, dequantise

__all__ = ["DEVICE", "DISTRIBUTIONS", "DTYPES", "Operand", "product", "random_operand", "tolerance"]

#: Values that share a scale, and K of one MMA.
BLOCK, MMA_K = 16, 64
#: Device that everything lives on.
DEVICE = "cuda"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Operand:
    """``packed`` uint8 ``[rows, K/2, L]``, ``scales`` swizzled storage, ``codes`` and ``linear`` what they hold."""

    packed: torch.Tensor
    scales: torch.Tensor
    linear: torch.Tensor

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.packed, self.scales

    def values(self) -> torch.Tensor:
        """float64 ``[L, rows, K]``."""
        return dequantise(self.packed.permute(2, 0, 1), self.linear)

    def rows(self, count: int) -> Operand:
        """The first rows of a matrix without batch, with its scales swizzled again."""
        return _with_pads(self.packed[:count], self.linear[:, :count])


def random_operand(generator: torch.Generator, rows: int, k: int, distribution: str, batch: int = 1) -> Operand:
    """``normal``: N(0, 1), ``mean1``: N(1, 0.1), both quantised by the library's op with G = 1. ``octaves``: uniform
    codes, block scales over four octaves. ``grid``: uniform codes, scales 0.5 and 1, so that every f32 sum is exact."""
    device = generator.device
    shape = (batch, rows, k // BLOCK)
    if distribution in ("normal", "mean1"):
        x = torch.randn((batch * rows, k), generator=generator, device=device)
        x = x if distribution == "normal" else 1 + 0.1 * x
        one = torch.ones(1, device=device)
        outputs = nvfp4.quantize(x.to(torch.bfloat16), one)
        packed = outputs.packed_a_storage.view(batch, rows, k // 2)
        linear = scales.unswizzle(outputs.scale_storage, batch * rows, k // BLOCK).view(shape)
    else:
        packed = torch.randint(0, 256, (batch, rows, k // 2), generator=generator, device=device, dtype=torch.uint8)
        low, high = (0x28, 0x48) if distribution == "octaves" else (0x30, 0x39)
        linear = torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)
        if distribution == "grid":
            linear &= 0x38
    return _with_pads(packed.permute(1, 2, 0), linear)


def _with_pads(packed: torch.Tensor, linear: torch.Tensor) -> Operand:
    """Scale pads hold NaN, 448 and other bytes that would show in the result."""
    storage = scales.swizzle(linear)
    inside = scales.swizzle(torch.ones_like(linear))
    pads = torch.arange(storage.numel(), device=storage.device).view(storage.shape) % 5
    poison = torch.tensor([0x7F, 0x00, 0xFF, 0x7E, 0x55], dtype=torch.uint8, device=storage.device)[pads]
    return Operand(packed, torch.where(inside == 1, storage, poison), linear)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 ``[L, M, N]``."""
    return a @ b.transpose(-1, -2)


def tolerance(reference: torch.Tensor, magnitude: torch.Tensor, k: int, c_dtype: str) -> torch.Tensor:
    """As :func:`b12x.gemm.blockscaled.reference.tolerance`, on the GPU; alpha is in both arguments already."""
    accumulation = (4 + k / MMA_K) * 2.0**-23 * magnitude
    return half_ulp(reference.abs() + accumulation, c_dtype) + accumulation
