"""Numerical cases of ``gemm.bmm``: results against float64, element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from b12x._runtime.spec import Role
from b12x.gemm._bmm import api, planner, reference
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp

#: Elements between rows and round whole tensors that nothing may read or change.
_PAD = 8
#: k values that an MMA sums.
_MMA_K = 16


class Weights(NamedTuple):
    """``values`` and ``scales`` are views into pitched storage; scales are None for bf16."""

    values: torch.Tensor
    scales: torch.Tensor | None

    def dequantised(self) -> torch.Tensor:
        """float64, in the layout of ``values``."""
        if self.scales is None:
            return self.values.double()
        codes = self.values.view(torch.uint8).cpu().numpy()
        return torch.from_numpy(reference.dequantise(codes, self.scales.cpu().numpy())).to(self.values.device)


def pitched(x: torch.Tensor, pad: int = _PAD) -> torch.Tensor:
    """A copy whose rows are followed by ``pad`` elements with all bits set: NaN."""
    storage = torch.full((*x.shape[:-1], (x.shape[-1] + pad) * x.itemsize), 0xFF, dtype=torch.uint8, device=x.device)
    view = storage.view(x.dtype)[..., : x.shape[-1]]
    view.copy_(x)
    return view


def mxfp8_weights(
    generator: torch.Generator, shape: tuple[int, int, int], distribution: str, *, dense: bool = False
) -> Weights:
    """Seeded weights; unless they are ``dense``, rows are apart.

    ``normal`` is N(0, 1), ``mean1`` N(1, 0.1), near enough. ``octaves``: any finite codes, scales over eight octaves.
    ``extremes``: scales of all sizes, codes so that no product overflows.
    """
    device = generator.device
    scales_shape = (*shape[:2], shape[2] // reference.BLOCK)
    if distribution in ("normal", "mean1"):
        x = torch.randn(shape, generator=generator, device=device)
        values = (32 * (x if distribution == "normal" else 1 + 0.1 * x)).to(torch.float8_e4m3fn)
        scales = torch.full(scales_shape, 127 - 5, dtype=torch.uint8, device=device)
    else:
        codes = torch.randint(0, 0x7F, shape, generator=generator, device=device, dtype=torch.uint8)
        if distribution == "octaves":
            scales = torch.randint(123, 131, scales_shape, generator=generator, device=device, dtype=torch.uint8)
        else:
            choices = torch.tensor([0, 1, 2, 100, 127, 200, 253, 254], dtype=torch.uint8, device=device)
            scales = choices[torch.randint(0, 8, scales_shape, generator=generator, device=device)]
            # Below 2 times 2^127 is finite.
            large = scales.repeat_interleave(reference.BLOCK, dim=2) >= 253
            codes = torch.where(large, codes % 0x40, codes)
        sign = torch.randint(0, 2, shape, generator=generator, device=device, dtype=torch.uint8) << 7
        values = (codes | sign).view(torch.float8_e4m3fn)
    return Weights(values, scales) if dense else Weights(pitched(values, 2 * _PAD), pitched(scales, 3))


def activations(generator: torch.Generator, shape: tuple[int, int, int], distribution: str) -> torch.Tensor:
    """Seeded bf16 rows ``[B, M, K]``, pitched; ``extremes`` has one 1 in each, at places that differ."""
    batch, m, k = shape
    if distribution == "extremes":
        x = torch.zeros(batch * m, k, device=generator.device)
        row = torch.arange(batch * m, device=generator.device)
        x[row, row * 37 % k] = 1.0
        return pitched(x.view(shape).to(torch.bfloat16))
    x = torch.randn(shape, generator=generator, device=generator.device)
    if distribution == "mean1":
        x = 1 + 0.1 * x
    elif distribution == "octaves":
        x *= torch.exp2(torch.randint(-3, 4, shape, generator=generator, device=generator.device).float())
    return pitched(x.to(torch.bfloat16))


def product(lhs: torch.Tensor, weights: torch.Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 ``lhs [B, M, K] @ weights [B, K, N]`` and the bound of its f32 sums, in any order, before rounding."""
    x = lhs.double()
    result = x @ weights
    if exact:
        return result, torch.zeros_like(result)
    return result, (4 + lhs.shape[2] / _MMA_K) * 2.0**-23 * (x.abs() @ weights.abs())


@dataclass(frozen=True, kw_only=True)
class BmmCase(Case):
    """``out [B, M, N]`` as rows of ``[M, B, N + pad]``; where there is a pad, rows of every operand are apart.

    ``distribution`` is that of both operands.
    """

    batch: int
    m: int
    n: int
    k: int
    major: str
    distribution: str
    pad: int = _PAD

    @property
    def name(self) -> str:
        sizes = f"{self.batch}x{self.m}x{self.n}x{self.k}"
        return f"{sizes} {self.major}-major {self.distribution}" + (f" pad {self.pad}" if self.pad != _PAD else "")

    def caps(self, device: str | None = None) -> planner.Caps:
        return planner.Caps(
            device=device, batch=self.batch, max_m=self.m, n=self.n, k=self.k, b_major=self.major, sf_axis=self.major
        )

    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in planner.roles(self.caps()) if role.name == planner.choose(self.m))

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        shape = (self.batch, self.k, self.n) if self.major == "n" else (self.batch, self.n, self.k)
        weights = mxfp8_weights(generator, shape, self.distribution, dense=not self.pad)
        lhs = activations(generator, (self.batch, self.m, self.k), self.distribution)
        storage = torch.full((self.m, self.batch, self.n + self.pad), math.nan, dtype=torch.bfloat16, device=device)
        out = storage[..., : self.n].transpose(0, 1)
        binding = api.plan(self.caps(device)).bind(lhs=lhs, rhs=(weights.values, weights.scales), out=out)
        count = self.batch * self.m * self.n
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(lhs, weights, storage),
            flops=2 * count * self.k,
            bytes=self.batch * (self.n * self.k * 33 // 32 + 2 * self.m * self.k) + 2 * count,
        )

    def _judge(self, lhs: torch.Tensor, weights: Weights, storage: torch.Tensor) -> Judgement:
        """The bound is that of the f32 sums, and half a unit of bf16; one-hot rows read the weights back exactly."""
        values = weights.dequantised()
        exact = self.distribution == "extremes"
        wanted, bound = product(lhs, values if self.major == "n" else values.mT, exact)
        if not exact:
            bound += half_ulp(wanted.abs() + bound, "bfloat16")
        tally = Tally()
        tally.add(storage[..., : self.n].transpose(0, 1), wanted, bound)
        pads = storage[..., self.n :].isnan()
        tally.add(pads, torch.ones_like(pads, dtype=torch.float64))
        return tally.judgement()


def _cases(major: str) -> Iterator[BmmCase]:
    case = partial(BmmCase, major=major)
    # Two tiles and a tail of columns, more K steps than are under way and a tail; two tiles of tokens and a tail.
    n, k = {"n": (160, 208), "k": (76, 608)}[major]
    yield case(size="small", batch=2, m=7, n=n, k=k, distribution="octaves")
    yield case(size="small", batch=1, m=16, n=n, k=k, distribution="mean1", pad=3)
    yield case(size="small", batch=2, m=9, n=n, k=96, distribution="extremes")
    yield case(size="small", batch=2, m=70, n=2 * n, k=288, distribution="octaves")
    yield case(size="small", batch=1, m=40, n=n, k=224, distribution="normal")
    yield case(size="small", batch=1, m=70, n=n, k=96, distribution="extremes")
    n, k = {"n": (512, 192), "k": (256, 512)}[major]
    for m, distribution in ((1, "octaves"), (8, "normal"), (8, "mean1"), (16, "octaves"), (300, "octaves")):
        yield case(size="model", batch=128, m=m, n=n, k=k, distribution=distribution, pad=0)


CASES = tuple(case for major in ("n", "k") for case in _cases(major))
