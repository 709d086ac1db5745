"""Numerical cases of ``gemm.blockscaled``: C against float64, element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.abi import ITEMSIZE
from b12x._runtime.spec import Role
from b12x.gemm.blockscaled import api, planner
from b12x.gemm.blockscaled.reference import MMA_K
from b12x.gemm.blockscaled.spec import C_DTYPES
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp
from b12x.verify.operands import DISTRIBUTIONS, Operand, random_operand

#: Elements around C that must stay as they were.
_GUARD = 64
#: Columns of C that are judged at a time: float64 copies of a whole weight would not fit on a small card.
_COLUMNS = 4096


@dataclass(frozen=True, kw_only=True)
class BlockscaledCase(Case):
    """``C [M, N, L]`` with one alpha for each of the L entries; ``distribution`` is that of A.

    B has the same one; where A is one-hot, B has ``octaves`` and there is no alpha.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    c_dtype: str
    distribution: str
    sm_count: int | None = None

    @property
    def name(self) -> str:
        grid = f" on {self.sm_count} SMs" if self.sm_count else ""
        return f"{self.m}x{self.n}x{self.k}x{self.batch} {self.c_dtype} {self.distribution}{grid}"

    def caps(self, device: str | None = None) -> planner.Caps:
        return planner.Caps(device=device, c_dtype=self.c_dtype, max_m=self.m, n=self.n, k=self.k, batch=self.batch)

    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in planner.roles(self.caps()) if role.name == planner.choose(self.m))

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        a = random_operand(generator, self.m, self.k, self.distribution, self.batch)
        other = "octaves" if self.distribution == "onehot" else self.distribution
        b = random_operand(generator, self.n, self.k, other, self.batch)
        with_alpha = self.distribution != "onehot"
        alpha = torch.rand(self.batch, generator=generator, device=device) + 0.5 if with_alpha else None
        count = self.batch * self.m * self.n
        buffer = torch.full((count + 2 * _GUARD,), math.nan, dtype=getattr(torch, self.c_dtype), device=device)
        c = buffer[_GUARD : _GUARD + count].view(self.batch, self.m, self.n)
        plan = api.plan(self.caps(device))
        binding = plan.bind(lhs=a.pair, rhs=b.pair, out=c.permute(1, 2, 0), alpha=alpha, sm_count=self.sm_count)
        operand_bytes = (self.m + self.n) * (self.k // 2 + self.k // 16)
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(a, b, alpha, c, buffer),
            flops=2 * count * self.k,
            bytes=self.batch * operand_bytes + count * ITEMSIZE[self.c_dtype],
        )

    def _judge(
        self, a: Operand, b: Operand, alpha: torch.Tensor | None, c: torch.Tensor, buffer: torch.Tensor
    ) -> Judgement:
        """The bound is that of :func:`b12x.gemm.blockscaled.reference.tolerance`."""
        tally = Tally()
        rows = a.values()
        factors = rows.new_ones(1, 1, 1) if alpha is None else alpha.double().view(-1, 1, 1)
        for start in range(0, self.n, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            columns = b.values(part).mT
            reference = factors * (rows @ columns)
            accumulation = (4 + self.k / MMA_K) * 2.0**-23 * factors * (rows.abs() @ columns.abs())
            bound = half_ulp(reference.abs() + accumulation, self.c_dtype) + accumulation
            tally.add(c[..., part], reference, bound)
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            tally.add(guard.isnan(), torch.ones_like(guard, dtype=torch.float64))
        return tally.judgement()


def _cases(c_dtype: str) -> Iterator[BlockscaledCase]:
    case = partial(BlockscaledCase, c_dtype=c_dtype)
    for distribution in DISTRIBUTIONS:
        # Two tiles and a tail on N, a tail on M: this role never sees a second tile of M. 11 K steps, 8 stages.
        yield case(size="small", m=40, n=136, k=1408, distribution=distribution)
        # Tiles with tails on both axes, several for each CTA; 7 K steps, 4 stages.
        yield case(size="small", m=136, n=136, k=896, distribution=distribution, sm_count=3)
        yield case(size="model", m=16, n=28672, k=8192, distribution=distribution)
        yield case(size="model", m=2048, n=7168, k=7168, distribution=distribution)
        yield case(size="model", m=200, n=704, k=1152, distribution=distribution, batch=2)
    # Rows of C that are not 16-byte aligned, in a batch.
    yield case(size="small", m=65, n=133, k=256, distribution="octaves", batch=3)
    yield case(size="small", m=16, n=72, k=128, distribution="onehot")
    yield case(size="small", m=80, n=72, k=128, distribution="onehot")


CASES = tuple(case for c_dtype in C_DTYPES for case in _cases(c_dtype))
