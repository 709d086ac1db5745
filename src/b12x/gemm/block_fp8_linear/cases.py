"""Numerical cases of ``gemm.block_fp8_linear``: results against float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.spec import Role
from b12x.gemm import _cases, _linear
from b12x.gemm.block_fp8_linear import api, planner
from b12x.verify.operands import DISTRIBUTIONS, random_operand

#: (N, K) of DeepSeek models: the query's two projections, and one of an expert.
_MODELS = ((1536, 4096), (16384, 1024), (7168, 2048))


@dataclass(frozen=True, kw_only=True)
class BlockFp8LinearCase(_cases.LinearCase):
    """The weight's scales are no powers of two, so it is quantised again; results are judged by what it became."""

    def roles(self) -> tuple[Role, ...]:
        return _cases.serving_roles(self.tokens, planner.roles(planner.Caps(**self.sizes())))

    def plan(self, device: str) -> _linear.Plan:
        return api.plan(planner.Caps(**self.sizes(device)))

    def weight(self, generator: torch.Generator) -> tuple[api.Weight, Callable[[slice], torch.Tensor], float]:
        b = random_operand(generator, self.n, self.k, self.distribution, recipe="block_fp8", block_rows=128)
        packed = api.pack_weight(b.codes[..., 0], b.linear[0])
        return packed, partial(_cases.weight_values, packed.weight), 1.0


def _all() -> Iterator[BlockFp8LinearCase]:
    small = partial(BlockFp8LinearCase, size="small")
    for dtype in ("bfloat16", "float16"):
        # Part of a block of rows is left, and rows of C are not 16-byte aligned.
        yield small(tokens=7, n=132, k=384, dtype=dtype, distribution="octaves")
        yield small(tokens=13, n=136, k=256, dtype=dtype, distribution="normal")
        yield small(tokens=520, n=20, k=256, dtype=dtype, distribution="mean1")
    for n, k in _MODELS:
        for tokens, distribution in zip((1, 8, 16, 2048), (*DISTRIBUTIONS, "normal"), strict=True):
            yield BlockFp8LinearCase(size="model", n=n, k=k, tokens=tokens, distribution=distribution)


CASES = tuple(_all())
