"""Numerical cases of ``gemm.tensor_fp8_linear``: results against float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.spec import Role
from b12x.gemm import _cases
from b12x.gemm.tensor_fp8_linear import api, planner
from b12x.verify.operands import DISTRIBUTIONS


@dataclass(frozen=True, kw_only=True)
class TensorFp8LinearCase(_cases.LinearCase):
    """Input and weight of one distribution, and a factor."""

    def roles(self) -> tuple[Role, ...]:
        caps = planner.Caps(**self.sizes())
        return tuple(role for role in planner.roles(caps) if role.name == f"gemm.{_cases.serving_role(self.tokens)}")

    def plan(self, device: str) -> api.Plan:
        return api.plan(planner.Caps(**self.sizes(device)))

    def weight(self, generator: torch.Generator) -> tuple[api.Weight, Callable[[slice], torch.Tensor], float]:
        codes = _cases.e4m3(generator, (self.n, self.k), self.distribution)
        # Small, so that fp16 holds the products.
        factor = (torch.rand(1, generator=generator, device=generator.device) + 0.5) * 2.0**-10
        return api.pack_weight(codes, factor), lambda part: codes[part].double(), float(factor)

    def source(self, generator: torch.Generator) -> torch.Tensor:
        return _cases.e4m3(generator, (self.tokens, self.k), self.distribution)

    def multiplied(self, source: torch.Tensor) -> torch.Tensor:
        return source.double()


def _all() -> Iterator[TensorFp8LinearCase]:
    small = partial(TensorFp8LinearCase, size="small")
    for dtype in ("bfloat16", "float16"):
        # K that is no multiple of a tile, and of C rows that are not 16-byte aligned.
        yield small(tokens=13, n=132, k=384, dtype=dtype, distribution="octaves")
        yield small(tokens=520, n=20, k=160, dtype=dtype, distribution="octaves")
        yield small(tokens=520, n=24, k=128, dtype=dtype, distribution="mean1")
    # Llama 3.1 70B, the feed-forward's input projections.
    for tokens, distribution in zip((1, 8, 16, 2048), (*DISTRIBUTIONS, "normal"), strict=True):
        yield TensorFp8LinearCase(size="model", n=28672, k=8192, tokens=tokens, distribution=distribution)


CASES = tuple(_all())
