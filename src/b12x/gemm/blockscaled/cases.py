"""Numerical cases of ``gemm.blockscaled``: C against float64, element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.abi import ITEMSIZE
from b12x._runtime.spec import Role
from b12x.gemm.blockscaled import api, decode_cases, planner
from b12x.gemm.blockscaled.recipes import BY_DTYPES, C_DTYPES, RECIPES
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp
from b12x.verify.operands import DISTRIBUTIONS, Operand, random_operand

#: Elements around C that must stay as they were.
_GUARD = 64
#: Alpha that keeps the largest products of codes and E8M0 or float scales within the range of float16.
_HALF_ALPHA = 2.0**-14
#: Columns of C that are judged at a time: float64 copies of a whole weight would not fit on a small card.
_COLUMNS = 4096

_DTYPES = {recipe: dtypes for dtypes, recipe in BY_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class BlockscaledCase(Case):
    """``C [M, N, L]`` by the kernel of one role, each tile by ``split`` CTAs.

    ``distribution`` is that of A; B has the same one, or ``octaves`` where A is one-hot. There is one alpha for each of
    the L entries, and a bias, except where A is one-hot or all is on a grid.
    """

    recipe: str
    c_dtype: str
    m: int
    n: int
    k: int
    batch: int = 1
    role: str
    split: int = 1
    distribution: str
    sm_count: int | None = None

    @property
    def name(self) -> str:
        split = f" K split {self.split} ways" if self.split > 1 else ""
        grid = f" on {self.sm_count} SMs" if self.sm_count else ""
        sizes = f"{self.m}x{self.n}x{self.k}x{self.batch}"
        return f"{self.recipe} {sizes} {self.c_dtype} {self.role}{split} {self.distribution}{grid}"

    def caps(self, device: str | None = None) -> planner.Caps:
        ab_dtype, sf_dtype, vec = _DTYPES["mxfp8" if self.recipe == "fp8" else self.recipe]
        return planner.Caps(
            device=device,
            ab_dtype=ab_dtype,
            sf_dtype=sf_dtype,
            sf_vec_size=vec,
            c_dtype=self.c_dtype,
            # A role is among a plan's where the plan's largest M may need it.
            max_m=max(self.m, planner.LEAST_MAX_M[self.role]),
            n=self.n,
            k=self.k,
            batch=self.batch,
            plain_fp8=self.recipe == "fp8",
        )

    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in planner.roles(self.caps()) if role.name == self.role)

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        a = random_operand(generator, self.m, self.k, self.distribution, self.batch, self.recipe)
        other = "octaves" if self.distribution == "onehot" else self.distribution
        block_rows = 128 if self.recipe == "block_fp8" else 1
        b = random_operand(generator, self.n, self.k, other, self.batch, self.recipe, block_rows)
        dtype = getattr(torch, self.c_dtype)
        alpha = bias = None
        small = _HALF_ALPHA if self.c_dtype == "float16" and self.recipe != "nvfp4" else 1.0
        if self.distribution == "onehot" and small < 1:
            alpha = torch.full((self.batch,), small, device=device)
        if self.distribution not in ("onehot", "grid"):
            alpha = small * (torch.rand(self.batch, generator=generator, device=device) + 0.5)
            bias = torch.randn(self.n, generator=generator, device=device).to(dtype)
        count = self.batch * self.m * self.n
        buffer = torch.full((count + 2 * _GUARD,), math.nan, dtype=dtype, device=device)
        c = buffer[_GUARD : _GUARD + count].view(self.batch, self.m, self.n)
        limit = planner.DECODE_M if self.role == "decode" else None
        plan = api.plan(self.caps(device), table=[planner.Choice(limit, self.role, self.split)])
        binding = plan.bind(
            lhs=a.pair, rhs=b.pair, out=c.permute(1, 2, 0), alpha=alpha, bias=bias, sm_count=self.sm_count
        )
        encoding = RECIPES[self.recipe]
        operand_bytes = (self.m + self.n) * encoding.row_bytes(self.k)
        if encoding.scales == "mma":
            operand_bytes += (self.m + self.n) * self.k // encoding.block
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(a, b, alpha, bias, c, buffer),
            flops=2 * count * self.k,
            bytes=self.batch * operand_bytes + count * ITEMSIZE[self.c_dtype],
        )

    def _judge(
        self,
        a: Operand,
        b: Operand,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
        c: torch.Tensor,
        buffer: torch.Tensor,
    ) -> Judgement:
        """The bound is that of :func:`b12x.gemm.blockscaled.reference.tolerance`, and half a unit more for the bias."""
        tally = Tally()
        rows = a.values()
        factors = rows.new_ones(1, 1, 1) if alpha is None else alpha.double().view(-1, 1, 1)
        for start in range(0, self.n, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            columns = b.values(part).mT
            reference = factors * (rows @ columns)
            mma_k = RECIPES[self.recipe].mma_k
            accumulation = (4 + self.k / mma_k) * 2.0**-23 * factors * (rows.abs() @ columns.abs())
            bound = half_ulp(reference.abs() + accumulation, self.c_dtype) + accumulation
            if bias is not None:
                reference = reference + bias[part].double()
                bound = bound + half_ulp(reference.abs() + bound, self.c_dtype)
            if self.distribution == "grid":
                bound = half_ulp(reference.abs(), self.c_dtype)
            tally.add(c[..., part], reference, bound)
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            tally.add(guard.isnan(), torch.ones_like(guard, dtype=torch.float64))
        return tally.judgement()


def _cases(recipe: str, c_dtype: str) -> Iterator[BlockscaledCase]:
    case = partial(BlockscaledCase, recipe=recipe, c_dtype=c_dtype)
    for distribution in DISTRIBUTIONS:
        # Tails on N, all rows and some; more K steps than the stages of all warps.
        yield case(size="small", m=16, n=136, k=2816, role="decode", distribution=distribution)
        # Two tiles and a tail on N, a tail on M. 11 or 22 K steps, 8 stages at most.
        yield case(size="small", m=40, n=136, k=1408, role="middle", distribution=distribution)
        yield case(size="small", m=40, n=72, k=1408, role="narrow", distribution=distribution)
        # Tiles with tails on both axes, several for each CTA.
        yield case(size="small", m=136, n=136, k=1152, role="prefill", distribution=distribution, sm_count=1)
        yield case(size="model", m=16, n=28672, k=8192, role="decode", distribution=distribution)
        yield case(size="model", m=64, n=7168, k=7168, role="middle", distribution=distribution)
        yield case(size="model", m=2048, n=7168, k=7168, role="prefill", distribution=distribution)
        yield case(size="model", m=200, n=704, k=1152, role="prefill", distribution=distribution, batch=2)
    # K split over clusters, unevenly; rows of C that are not 16-byte aligned, in a batch.
    for split, n in ((2, 133), (3, 136), (8, 72)):
        yield case(size="small", m=5, n=n, k=1152, role="decode", split=split, distribution="octaves", batch=2)
        yield case(size="small", m=65, n=n, k=640, role="middle", split=split, distribution="octaves", batch=2)
        yield case(size="small", m=33, n=n, k=640, role="narrow", split=split, distribution="octaves", batch=2)
        yield case(size="model", m=8, n=1536, k=7168, role="decode", split=split, distribution="normal")
        yield case(size="model", m=192, n=1536, k=7168, role="middle", split=split, distribution="normal")
        yield case(size="model", m=64, n=1536, k=7168, role="narrow", split=split, distribution="normal")
    yield case(size="small", m=129, n=133, k=256, role="prefill", distribution="octaves", batch=3)
    for role, m in (("decode", 16), ("narrow", 16), ("middle", 16), ("prefill", 80)):
        yield case(size="small", m=m, n=72, k=128, role=role, distribution="onehot")
        yield case(size="small", m=m, n=72, k=384, role=role, distribution="grid")


CASES: tuple[Case, ...] = (
    *(case for recipe in RECIPES for c_dtype in C_DTYPES for case in _cases(recipe, c_dtype)),
    *decode_cases.CASES,
)
