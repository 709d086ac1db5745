"""The NVFP4 linear layers of the demo: one on b12x kernels, one on the float reference of the same quantisation.

A weight's global scale is ``448 * 6 / amax`` of the weight. An activation's global scale is static, one per
projection: ``448 * 6 / (HEADROOM * amax)`` with amax measured in fp32 on the sentences of
:data:`demo.sentences.CALIBRATION`. Block scales are floating point, so a power of two of headroom costs no precision;
it keeps unseen activations from saturating.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import reference as gemm_reference
from b12x.quantization import nvfp4, scales
from b12x.quantization.nvfp4 import reference as nvfp4_reference
from demo.encoder import Encoder, Projection, fp32_linear

#: Largest product of an E4M3 block scale and an E2M1 code.
FORMAT_MAX = 448.0 * 6.0
HEADROOM = 2.0
EXPONENT_BITS = (0x08, 0x10, 0x20, 0x40)
E4M3_NAN = 0x7F


def activation_scales(encoder: Encoder, sentences: Sequence[str]) -> dict[str, float]:
    """The static global scale of each projection's activations."""
    amax: dict[str, float] = {}

    def observe(projection: Projection, x: torch.Tensor) -> torch.Tensor:
        amax[projection.name] = x.abs().max().item()
        return fp32_linear(projection, x)

    encoder.embed(encoder.tokenize(sentences), observe)
    return {name: FORMAT_MAX / (HEADROOM * value) for name, value in amax.items()}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K] as packed codes [N, K/2], linear scale codes [N, K/16] and its global scale."""

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    global_scale: float

    def values(self) -> npt.NDArray[np.float64]:
        return nvfp4_reference.dequantize(self.packed, self.scales, self.global_scale)


def quantize_weights(projections: Iterable[Projection]) -> dict[str, QuantizedWeight]:
    """All weights, quantised from fp32."""
    quantized = {}
    for projection in projections:
        weight = projection.weight.numpy()
        global_scale = FORMAT_MAX / float(np.abs(weight).max())
        quantized[projection.name] = QuantizedWeight(*nvfp4_reference.quantize(weight, global_scale), global_scale)
    return quantized


@dataclass(frozen=True)
class ScaleFlip:
    """One flipped bit in one block scale of one weight."""

    projection: str
    row: int
    column: int
    before: int
    after: int

    def __str__(self) -> str:
        return (
            f"{self.projection}: scale of output channel {self.row}, block {self.column}: "
            f"0x{self.before:02x} -> 0x{self.after:02x}"
        )


def choose_flip(weights: dict[str, QuantizedWeight], seed: int) -> ScaleFlip:
    """A seeded choice among all exponent bits of all non-zero weight scales; the result is never NaN."""
    rng = random.Random(seed)
    name = rng.choice(sorted(weights))
    codes = weights[name].scales
    while True:
        row, column = rng.randrange(codes.shape[0]), rng.randrange(codes.shape[1])
        before = int(codes[row, column])
        after = before ^ rng.choice(EXPONENT_BITS)
        if before and after != E4M3_NAN:
            return ScaleFlip(name, row, column, before, after)


@dataclass(frozen=True)
class Recorded:
    """What one projection got (fp32 [rows, K]) and gave (fp32 [rows, N], before the bias)."""

    x: torch.Tensor
    y: torch.Tensor


class ReferenceLinear:
    """Quantise, dequantise and multiply in numpy, float64 sums, rounded to bf16 as the kernels' output is."""

    def __init__(self, weights: dict[str, QuantizedWeight], x_scales: dict[str, float]) -> None:
        self._weights = {name: weight.values() for name, weight in weights.items()}
        self._x_scales = x_scales

    def __call__(self, projection: Projection, x: torch.Tensor) -> torch.Tensor:
        return self.product(projection, x).to(torch.bfloat16).float() + projection.bias

    def product(self, projection: Projection, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` of the quantised operands, in float32, without bias."""
        scale = self._x_scales[projection.name]
        quantized = nvfp4_reference.quantize(x.to(torch.bfloat16).float().numpy(), scale)
        values = nvfp4_reference.dequantize(*quantized, scale)
        return torch.from_numpy(gemm_reference.matmul(values, self._weights[projection.name])).float()


def products_on_equal_inputs(
    reference: ReferenceLinear, projections: Iterable[Projection], recorded: dict[str, Recorded]
) -> dict[str, torch.Tensor]:
    """Each projection's product by the reference, from the input that the kernels had.

    On equal inputs two correct implementations agree on every target, however they sum: nothing is carried from one
    projection to the next.
    """
    return {p.name: reference.product(p, recorded[p.name].x) for p in projections}


@dataclass(frozen=True)
class _Weight:
    """One projection's operands on the device."""

    packed: torch.Tensor
    scales: torch.Tensor
    x_scale: torch.Tensor
    alpha: torch.Tensor


class KernelLinear:
    """``quantization.nvfp4`` on the bf16 activations, then ``gemm.blockscaled``; the bias is added in torch.

    Every plan is made here, so every kernel is resolved before the first run. ``flip`` corrupts one weight scale of the
    kernels' copy.
    """

    def __init__(
        self,
        projections: Iterable[Projection],
        weights: dict[str, QuantizedWeight],
        x_scales: dict[str, float],
        *,
        max_rows: int,
        device: str,
        flip: ScaleFlip | None = None,
    ) -> None:
        self._device = device
        self._weights: dict[str, _Weight] = {}
        self._quantize: dict[int, nvfp4.Plan] = {}
        self._outputs: dict[int, nvfp4.Outputs] = {}
        self._gemm: dict[tuple[int, int], blockscaled.Plan] = {}
        self.recorded: dict[str, Recorded] = {}
        for projection in projections:
            n, k = projection.weight.shape
            if k not in self._quantize:
                self._quantize[k] = nvfp4.plan(max_rows, k, device=device, dtype="bfloat16")
                self._outputs[k] = nvfp4.allocate_outputs(self._quantize[k])
            if (n, k) not in self._gemm:
                self._gemm[n, k] = blockscaled.plan(gemm_caps(device, max_rows, n, k))
            name = projection.name
            flipped = flip if flip is not None and flip.projection == name else None
            self._weights[name] = self._load(weights[name], x_scales[name], flipped)

    @property
    def resolved(self) -> set[str]:
        """Keys of all kernels that the plans hold."""
        plans = [*self._quantize.values(), *self._gemm.values()]
        return {kernel.spec.key for plan in plans for kernel in plan.kernels.values()}

    def __call__(self, projection: Projection, x: torch.Tensor) -> torch.Tensor:
        n, k = projection.weight.shape
        weight, outputs, rows = self._weights[projection.name], self._outputs[k], x.shape[0]
        bf16 = x.to(self._device, torch.bfloat16).contiguous()
        nvfp4.run(plan=self._quantize[k], x=bf16, global_scale=weight.x_scale, outputs=outputs)
        out = torch.empty((1, rows, n), dtype=torch.bfloat16, device=self._device).permute(1, 2, 0)
        binding = self._gemm[n, k].bind(
            lhs=(outputs.packed_a_view[:rows], outputs.scale_view),
            rhs=(weight.packed, weight.scales),
            out=out,
            alpha=weight.alpha,
        )
        y = blockscaled.run(binding=binding)[:, :, 0].float().cpu()
        self.recorded[projection.name] = Recorded(x, y)
        return y + projection.bias

    def _load(self, weight: QuantizedWeight, x_scale: float, flip: ScaleFlip | None) -> _Weight:
        codes = weight.scales.copy()
        if flip is not None:
            codes[flip.row, flip.column] = flip.after
        n, columns = codes.shape
        storage = scales.swizzle(torch.from_numpy(codes)).to(self._device)
        return _Weight(
            packed=torch.from_numpy(weight.packed).to(self._device).unsqueeze(-1),
            scales=scales.view(storage, n, columns),
            x_scale=torch.tensor([x_scale], dtype=torch.float32, device=self._device),
            alpha=torch.tensor([1.0 / (x_scale * weight.global_scale)], dtype=torch.float32, device=self._device),
        )


def gemm_caps(device: str, max_m: int, n: int, k: int, c_dtype: str = "bfloat16") -> blockscaled.Caps:
    """Caps of one projection's GEMM."""
    return blockscaled.Caps(
        device=device,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        sf_vec_size=16,
        c_dtype=c_dtype,
        max_m=max_m,
        n=n,
        k=k,
    )
