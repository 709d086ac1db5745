"""What the numerical cases of the linears share: inputs, their values after quantisation, and judging a product.

Token counts of cases are such that one kernel serves them on every device: up to 8 the one that quantises its input, up
to 16 ``decode``, above 512 ``prefill``. What is between is for the cases of ``gemm.blockscaled``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from b12x._runtime.abi import ITEMSIZE
from b12x._runtime.spec import Role
from b12x.gemm import _linear, _weights
from b12x.gemm._parts import BLOCK, FUSED_M
from b12x.gemm.blockscaled import planner as blockscaled
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp
from b12x.verify.operands import ENCODINGS, dequantise

#: Elements around an output, and bytes behind a scratch, that must stay as they were.
GUARD = 64
_POISON = 0xFF
#: Columns that are judged at a time: float64 copies of a whole weight would not fit on a small card.
_COLUMNS = 4096


def activations(generator: torch.Generator, shape: tuple[int, ...], distribution: str, dtype: str) -> torch.Tensor:
    """``normal`` is N(0, 1), ``mean1`` N(1, 0.1), ``octaves`` N(0, 1) in blocks of 32 over eight octaves."""
    x = torch.randn(shape, generator=generator, device=generator.device)
    if distribution == "mean1":
        x = 1 + 0.1 * x
    elif distribution == "octaves":
        blocks = (*shape[:-1], shape[-1] // BLOCK, 1)
        powers = torch.randint(-5, 3, blocks, generator=generator, device=generator.device)
        x = (x.unflatten(-1, (-1, BLOCK)) * torch.exp2(powers.float())).flatten(-2)
    return x.to(getattr(torch, dtype))


def e4m3(generator: torch.Generator, shape: tuple[int, ...], distribution: str) -> torch.Tensor:
    """The like in E4M3, with values up to its largest."""
    x = activations(generator, shape, distribution, "bfloat16")
    return (64 * x).clamp(-448, 448).to(torch.float8_e4m3fn)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """float64 values of rows ``[..., K]`` after their quantisation to MXFP8."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    inverse = torch.tensor(_weights.INVERSE_MAX, dtype=torch.int32, device=x.device).view(torch.float32)
    codes = _weights.e8m0_codes(blocks.abs().amax(-1) * inverse)
    powers = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.int() - _weights.ONE).unsqueeze(-1)
    values = (blocks.double() / powers).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return (values.double() * powers).flatten(-2)


def weight_values(rows: Any, part: slice, group: int = 0) -> torch.Tensor:
    """float64 values of some rows of a prepared MXFP8 weight, of one group."""
    values = rows.values if rows.values.ndim == 2 else rows.values[..., group]
    return dequantise(values[part], rows.scale_rows[group, part], ENCODINGS["mxfp8"])


def judge_product(
    tally: Tally,
    found: torch.Tensor,
    a: torch.Tensor,
    b: Callable[[slice], torch.Tensor],
    dtype: str,
    factor: float = 1.0,
    bias: torch.Tensor | None = None,
) -> None:
    """``factor * a @ b^T (+ bias)``: half a unit for each rounding, and what f32 sums of K / 32 MMAs may lose."""
    n, k = found.shape[1], a.shape[1]
    for start in range(0, n, _COLUMNS):
        part = slice(start, min(start + _COLUMNS, n))
        columns = b(part).mT
        reference = factor * (a @ columns)
        lost = (4 + k / BLOCK) * 2.0**-23 * factor * (a.abs() @ columns.abs())
        bound = half_ulp(reference.abs() + lost, dtype) + lost
        if bias is not None:
            reference = reference + bias[part].double()
            bound = bound + half_ulp(reference.abs() + bound, dtype)
        tally.add(found[:, part], reference, bound)


def poisoned(nbytes: int, device: str) -> torch.Tensor:
    """Scratch full of NaN, as E4M3, E8M0 and bf16, and a guard behind it."""
    return torch.full((nbytes + GUARD,), _POISON, dtype=torch.uint8, device=device)


def judge_guard(tally: Tally, scratch: torch.Tensor) -> None:
    guard = scratch[-GUARD:]
    tally.add(guard, torch.full_like(guard, _POISON).double())


def serving_role(tokens: int) -> str:
    """The role of ``gemm.blockscaled`` that serves more than 8 tokens on every device."""
    if blockscaled.DECODE_M < tokens <= blockscaled.TABLE_M:
        raise ValueError(
            f"which kernel serves {tokens} tokens depends on the device: take up to {blockscaled.DECODE_M}, or more "
            f"than {blockscaled.TABLE_M}"
        )
    return "decode" if tokens <= blockscaled.DECODE_M else "prefill"


def serving_roles(tokens: int, roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Of the roles of a linear with MXFP8 rows, those that serve a token count."""
    names = ("fused.fused",) if tokens <= FUSED_M else ("rows.quantize", f"gemm.{serving_role(tokens)}")
    return tuple(role for role in roles if role.name in names)


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """``tokens`` rows of K through a weight ``[n, k]``, with a bias; poisoned scratch, guarded output."""

    tokens: int
    n: int
    k: int
    dtype: str = "bfloat16"
    distribution: str

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.n}x{self.k} {self.dtype} {self.distribution}"

    def sizes(self, device: str | None = None) -> dict[str, Any]:
        """Fields of the op's Caps."""
        return {
            "device": device,
            "max_tokens": self.tokens,
            "in_features": self.k,
            "out_features": self.n,
            "output_dtype": self.dtype,
        }

    @abstractmethod
    def plan(self, device: str) -> Any:
        """The op's plan."""

    @abstractmethod
    def weight(self, generator: torch.Generator) -> tuple[Any, Callable[[slice], torch.Tensor], float]:
        """A prepared weight, the float64 values of its rows, and the factor of the product."""

    def source(self, generator: torch.Generator) -> torch.Tensor:
        return activations(generator, (self.tokens, self.k), self.distribution, self.dtype)

    def multiplied(self, source: torch.Tensor) -> torch.Tensor:
        """float64 values that the source stands for."""
        return quantised(source)

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        packed, values, factor = self.weight(generator)
        x = self.source(generator)
        dtype = getattr(torch, self.dtype)
        bias = torch.randn(self.n, generator=generator, device=device).to(dtype)
        count = self.tokens * self.n
        buffer = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
        output = buffer[GUARD : GUARD + count].view(self.tokens, self.n, 1)
        plan = self.plan(device)
        tensors = {"source": x, "packed_weight": packed, "output": output, "bias": bias}
        scratch = None
        if hasattr(plan, "layout"):
            tensors["scratch"] = scratch = poisoned(plan.layout.nbytes, device)
        binding = plan.bind(**tensors)

        def judge() -> Judgement:
            tally = Tally()
            judge_product(tally, output[..., 0], self.multiplied(x), values, self.dtype, factor, bias)
            for guard in (buffer[:GUARD], buffer[-GUARD:]):
                tally.add(guard.isnan(), torch.ones_like(guard, dtype=torch.float64))
            if scratch is not None:
                judge_guard(tally, scratch)
            return tally.judgement()

        return Prepared(
            launch=lambda: _linear.run(plan.caps.op, binding, None),
            judge=judge,
            flops=2 * count * self.k,
            bytes=self.n * self.k + x.nbytes + count * ITEMSIZE[self.dtype],
        )
