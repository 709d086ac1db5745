"""Numerical cases of ``gemm.mla_query_projection``: the product against float64, the copied columns exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.abi import ITEMSIZE
from b12x._runtime.spec import Role
from b12x.gemm._bmm import reference
from b12x.gemm._bmm.cases import Weights, activations, mxfp8_weights, pitched, product
from b12x.gemm._bmm.planner import choose
from b12x.gemm.mla_query_projection import api, planner
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp

_PAD = 8
_POISON = 0x7F


@dataclass(frozen=True, kw_only=True)
class MlaQueryProjectionCase(Case):
    """Where there is a ``pad`` between rows of the output, rows of every operand are apart.

    ``distribution`` is that of queries and weights.
    """

    heads: int
    m: int
    n: int
    k: int
    rope: int
    weight_format: str
    output_dtype: str
    distribution: str
    pad: int = _PAD

    @property
    def name(self) -> str:
        sizes = f"{self.heads}x{self.m}x{self.n}x{self.k}+{self.rope}"
        pad = f" pad {self.pad}" if self.pad != _PAD else ""
        return f"{sizes} {self.weight_format} to {self.output_dtype} {self.distribution}{pad}"

    def caps(self, device: str | None = None) -> planner.Caps:
        return planner.Caps(
            device=device,
            num_heads=self.heads,
            max_m=self.m,
            nope_dim=self.k,
            latent_dim=self.n,
            output_dtype=self.output_dtype,
            weight_format=self.weight_format,
        )

    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in planner.roles(self.caps()) if role.name == choose(self.m))

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        shape = (self.heads, self.k, self.n)
        if self.weight_format == "mxfp8":
            weights = mxfp8_weights(generator, shape, self.distribution, dense=not self.pad)
        else:
            values = activations(generator, shape, self.distribution)
            weights = Weights(values if self.pad else values.contiguous(), None)
        q_nope = activations(generator, (self.heads, self.m, self.k), self.distribution)
        q_pe = pitched(activations(generator, (self.m, self.heads, self.rope), "normal"), 2)
        q_scale = torch.tensor([2.5], device=device)
        width = self.n + self.rope
        itemsize = ITEMSIZE[self.output_dtype]
        storage = torch.full(
            (self.m, self.heads, (width + self.pad) * itemsize), _POISON, dtype=torch.uint8, device=device
        )
        out = storage.view(getattr(torch, self.output_dtype))[..., :width]
        weight = weights.values if weights.scales is None else (weights.values, weights.scales)
        binding = api.plan(self.caps(device)).bind(q_nope=q_nope, weight=weight, q_pe=q_pe, out=out, q_scale=q_scale)
        count = self.heads * self.m * width
        weight_bytes = self.heads * self.k * self.n * (33 / 32 if weights.scales is not None else 2)
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(q_nope, weights, q_pe, float(q_scale), out, storage),
            flops=2 * self.heads * self.m * self.n * self.k,
            bytes=int(weight_bytes) + q_nope.numel() * 2 + q_pe.numel() * 2 + count * itemsize,
        )

    def _judge(
        self,
        q_nope: torch.Tensor,
        weights: Weights,
        q_pe: torch.Tensor,
        q_scale: float,
        out: torch.Tensor,
        storage: torch.Tensor,
    ) -> Judgement:
        """The bound of the product is that of its f32 sums, and half a unit of bf16. For E4M3 it is that over
        ``q_scale``, with 2^-22 for the two f32 roundings, and half a unit of E4M3 at the end of that interval."""
        wanted, bound = product(q_nope, weights.dequantised(), exact=False)
        bound += half_ulp(wanted.abs() + bound, "bfloat16")
        rope = q_pe.double()
        if self.output_dtype == "float8_e4m3fn":
            wanted, bound = wanted / q_scale, bound / q_scale + wanted.abs() / q_scale * 2.0**-22
            bound += _half_e4m3(wanted.abs() + bound)
            wanted = wanted.clamp(-448, 448)
            codes = reference.quantise(q_pe.float().cpu().numpy(), q_scale)
            rope = torch.from_numpy(reference.e4m3_values(codes)).to(q_pe.device).double()
        width = self.n + self.rope
        tally = Tally()
        tally.add(out[..., : self.n].transpose(0, 1).double(), wanted, bound)
        tally.add(out[..., self.n :].double(), rope)
        pads = storage[..., width * out.itemsize :] == _POISON
        tally.add(pads, torch.ones_like(pads, dtype=torch.float64))
        return tally.judgement()


def _half_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Half the distance of neighbouring E4M3 values around ``x``."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, 0.5), (exponent - 1).clamp(min=-6) - 3)


def _cases(weight_format: str, output_dtype: str) -> Iterator[MlaQueryProjectionCase]:
    case = partial(MlaQueryProjectionCase, weight_format=weight_format, output_dtype=output_dtype)
    # Two tiles and a tail of columns, more K steps than are under way and a tail; two tiles of tokens and a tail.
    n = {"mxfp8": 160, "bfloat16": 136}[weight_format]
    yield case(size="small", heads=2, m=7, n=n, k=208, rope=64, distribution="octaves")
    yield case(size="small", heads=1, m=9, n=n, k=192, rope=10, distribution="mean1", pad=2)
    yield case(size="small", heads=2, m=70, n=n, k=288, rope=64, distribution="octaves")
    yield case(size="small", heads=1, m=40, n=n, k=80, rope=10, distribution="normal")
    for m, distribution in ((1, "octaves"), (8, "normal"), (8, "mean1"), (300, "octaves")):
        yield case(size="model", heads=128, m=m, n=512, k=192, rope=64, distribution=distribution, pad=0)


CASES = tuple(
    case
    for weight_format in ("mxfp8", "bfloat16")
    for output_dtype in ("bfloat16", "float8_e4m3fn")
    for case in _cases(weight_format, output_dtype)
)
