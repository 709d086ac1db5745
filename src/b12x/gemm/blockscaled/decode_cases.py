"""Numerical cases of the decode GEMM that quantises A itself; those of quantised A are in ``cases``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.spec import Role
from b12x.gemm.blockscaled import api, fused, fused_planner
from b12x.gemm.blockscaled.recipes import RECIPES
from b12x.quantization.mxfp8 import reference
from b12x.quantization.mxfp8.planner import Rope
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp
from b12x.verify.operands import DISTRIBUTIONS, Operand, random_operand

#: Elements around C that must stay as they were.
_GUARD = 64
#: Columns of C that are judged at a time: float64 copies of a whole weight would not fit on a small card.
_COLUMNS = 4096
_HEAD = {"head_dim": 128, "nope_dim": 96, "rope_dim": 32}
_POSITIONS = 50


@dataclass(frozen=True, kw_only=True)
class FusedCase(Case):
    """``C [M, N, G]`` of a source in bf16 or f16, with alpha and bias; a block of its first row is zero.

    ``distribution`` is that of B and of the source: ``normal``, ``octaves`` (magnitudes over a dozen) or ``mean1``.
    """

    m: int
    n: int
    k: int
    k_source: int
    groups: int = 1
    span: int = 0
    rope: str = "none"
    dtype: str = "bfloat16"
    split: int = 1
    distribution: str

    @property
    def name(self) -> str:
        parts = [f"fused {self.dtype} {self.m}x{self.n}x{self.k}x{self.groups}"]
        if self.k_source < self.k:
            parts.append(f"of {self.k_source} columns")
        if self.span:
            parts.append(f"in spans of {self.span}")
        if self.rope != "none":
            parts.append(f"rope {self.rope}")
        if self.split > 1:
            parts.append(f"K split {self.split} ways")
        return " ".join([*parts, self.distribution])

    def caps(self, device: str | None = None) -> fused_planner.FusedCaps:
        return fused_planner.FusedCaps(
            device=device,
            max_m=self.m,
            n=self.n,
            k=self.k,
            k_source=self.k_source,
            groups=self.groups,
            span=self.span,
            rope=None if self.rope == "none" else Rope(**_HEAD, cache_dtype=self.rope),
            dtype=self.dtype,
            c_dtype=self.dtype,
        )

    def roles(self) -> tuple[Role, ...]:
        return fused_planner.roles(self.caps())

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        random = partial(torch.randn, generator=generator, device=device)
        dtype = getattr(torch, self.dtype)
        x = random(self.m, self.groups, self.k_source)
        if self.distribution == "mean1":
            x = 1 + 0.1 * x
        elif self.distribution == "octaves":
            x = x * torch.exp2(6 * random(self.m, self.groups, self.k_source // 8)).repeat_interleave(8, dim=-1)
        x[0, :, 32:64] = 0
        source = x.clamp(-3e4, 3e4).to(dtype)
        b = random_operand(generator, self.n, self.k, self.distribution, self.groups, "mxfp8")
        positions = cache = None
        if self.rope != "none":
            positions = torch.arange(self.m, device=device) * 7 % _POSITIONS
            angles = 3 * random(_POSITIONS, _HEAD["rope_dim"] // 2)
            cache = torch.cat([angles.cos(), angles.sin()], dim=1).to(getattr(torch, self.rope))
        alpha = torch.rand(self.groups, generator=generator, device=device) + 0.5
        if self.distribution == "octaves":
            alpha *= 2.0**-18  # or f16 would overflow
        bias = random(self.n).to(dtype)
        count = self.groups * self.m * self.n
        buffer = torch.full((count + 2 * _GUARD,), math.nan, dtype=dtype, device=device)
        c = buffer[_GUARD : _GUARD + count].view(self.groups, self.m, self.n)
        binding = fused.plan_fused(self.caps(device), split=self.split).bind(
            source=self._laid_out(source),
            b=b.codes,
            sfb=b.scales,
            out=c.permute(1, 2, 0),
            positions=positions,
            cos_sin_cache=cache,
            alpha=alpha,
            bias=bias,
        )
        weight_bytes = self.groups * self.n * (self.k + self.k // 32)
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(self._values(source, positions, cache), b, alpha, bias, c, buffer),
            flops=2 * count * self.k,
            bytes=weight_bytes + 2 * source.numel() + 2 * count,
        )

    def _laid_out(self, source: torch.Tensor) -> torch.Tensor:
        """The source ``[M, G, K]`` as the plan takes it."""
        if not self.span:
            return source if self.groups > 1 else source[:, 0]
        pieces = source.view(self.m, self.k_source // self.span, self.span)
        return pieces.transpose(0, 1).contiguous().permute(1, 2, 0)

    def _values(self, source: torch.Tensor, positions: torch.Tensor | None, cache: torch.Tensor | None) -> torch.Tensor:
        """What the quantised source stands for, float64 ``[G, M, K]``."""
        x = torch.zeros(self.groups, self.m, self.k, device="cpu")
        x[..., : self.k_source] = source.float().cpu().transpose(0, 1)
        rows = x.view(-1, self.k).numpy()
        if positions is not None and cache is not None:
            turns = positions.cpu().repeat(self.groups).numpy()
            head_dim, nope_dim = _HEAD["head_dim"], _HEAD["nope_dim"]
            table = cache.float().cpu().numpy()
            rows = reference.inverse_rope(rows, turns, table, head_dim=head_dim, nope_dim=nope_dim)
        real = reference.dequantize(*reference.quantize(rows))
        return torch.from_numpy(real).view(self.groups, self.m, self.k).to(source.device)

    def _judge(
        self,
        rows: torch.Tensor,
        b: Operand,
        alpha: torch.Tensor,
        bias: torch.Tensor,
        c: torch.Tensor,
        buffer: torch.Tensor,
    ) -> Judgement:
        """As cases of quantised A are."""
        tally = Tally()
        factors = alpha.double().view(-1, 1, 1)
        mma_k = RECIPES["mxfp8"].mma_k
        for start in range(0, self.n, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            columns = b.values(part).mT
            product = factors * (rows @ columns)
            accumulation = (4 + self.k / mma_k) * 2.0**-23 * factors * (rows.abs() @ columns.abs())
            bound = half_ulp(product.abs() + accumulation, self.dtype) + accumulation
            result = product + bias[part].double()
            tally.add(c[..., part], result, bound + half_ulp(result.abs() + bound, self.dtype))
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            tally.add(guard.isnan(), torch.ones_like(guard, dtype=torch.float64))
        return tally.judgement()


def _cases(dtype: str) -> Iterator[FusedCase]:
    case = partial(FusedCase, dtype=dtype)
    for distribution in DISTRIBUTIONS:
        # Tails on N, all rows and some; more K steps than the stages of all warps.
        yield case(size="small", m=8, n=136, k=1408, k_source=1408, distribution=distribution)
        yield case(size="model", m=8, n=4096, k=4096, k_source=4096, span=1024, distribution=distribution)
    # K split over clusters, unevenly; columns that end within a block, spans that end within a K step.
    yield case(size="small", m=5, n=133, k=384, k_source=360, split=2, groups=2, distribution="normal")
    yield case(size="small", m=1, n=72, k=1152, k_source=1120, split=3, span=160, distribution="normal")
    yield case(size="small", m=3, n=72, k=256, k_source=256, split=4, distribution="normal")
    yield case(size="model", m=8, n=1024, k=4096, k_source=4096, groups=4, split=2, distribution="normal")


def _rotated_cases() -> Iterator[FusedCase]:
    for rope in ("float32", "bfloat16"):
        case = partial(FusedCase, rope=rope, distribution="normal")
        yield case(size="small", m=8, n=136, k=1408, k_source=1408)
        yield case(size="small", m=3, n=72, k=384, k_source=384, groups=2, split=2)
        yield case(size="model", m=8, n=1024, k=4096, k_source=4096, groups=4)


CASES = (*(case for dtype in ("bfloat16", "float16") for case in _cases(dtype)), *_rotated_cases())
