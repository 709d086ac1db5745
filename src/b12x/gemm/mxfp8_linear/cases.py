"""Numerical cases of ``gemm.mxfp8_linear``: results against float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.spec import Role
from b12x.gemm import _cases, _linear
from b12x.gemm.mxfp8_linear import api, planner
from b12x.verify.operands import DISTRIBUTIONS, random_operand


@dataclass(frozen=True, kw_only=True)
class Mxfp8LinearCase(_cases.LinearCase):
    """The weight has the distribution of the input, its scales in rows."""

    def roles(self) -> tuple[Role, ...]:
        return _cases.serving_roles(self.tokens, planner.roles(planner.Caps(**self.sizes())))

    def plan(self, device: str) -> _linear.Plan:
        return api.plan(planner.Caps(**self.sizes(device)))

    def weight(self, generator: torch.Generator) -> tuple[api.Weight, Callable[[slice], torch.Tensor], float]:
        b = random_operand(generator, self.n, self.k, self.distribution, recipe="mxfp8")
        return api.pack_weight(b.codes[..., 0], b.linear[0]), lambda part: b.values(part)[0], 1.0


def _all() -> Iterator[Mxfp8LinearCase]:
    small = partial(Mxfp8LinearCase, size="small")
    model = partial(Mxfp8LinearCase, size="model", n=2048, k=6144)
    for dtype, wide in (("bfloat16", "octaves"), ("float16", "normal")):  # whose sums fp16 holds
        # K that is no multiple of a tile, and of C rows that are not 16-byte aligned.
        yield small(tokens=7, n=132, k=416, dtype=dtype, distribution=wide)
        yield small(tokens=13, n=136, k=160, dtype=dtype, distribution="normal")
        yield small(tokens=520, n=20, k=160, dtype=dtype, distribution="mean1")
    for distribution in DISTRIBUTIONS:
        for tokens in (1, 8, 16, 2048):
            yield model(tokens=tokens, distribution=distribution)


CASES = tuple(_all())
