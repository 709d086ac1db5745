"""Numerical cases of ``gemm.wo_projection``: WO-A from the input, WO-B from what WO-A wrote, each against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from b12x._runtime.spec import Role
from b12x.gemm import _cases
from b12x.gemm._parts import FUSED_M
from b12x.gemm.wo_projection import api, planner
from b12x.verify.case import Case, Judgement, Prepared, Tally
from b12x.verify.operands import DISTRIBUTIONS, random_operand

#: Rows of a cos/sin cache.
_POSITIONS = 97


@dataclass(frozen=True, kw_only=True)
class WoProjectionCase(Case):
    """``tokens`` of G groups of D, by WO-A ``[rank, D]`` each and WO-B ``[hidden, G * rank]``, in poisoned scratch.

    ``rope`` is the dtype of the cos/sin cache by which ``rope_dim`` columns of heads of ``head_dim`` are rotated back,
    or the empty text.
    """

    tokens: int
    groups: int
    width: int
    rank: int
    hidden: int
    distribution: str
    rope: str = ""
    head_dim: int = 0
    rope_dim: int = 64

    @property
    def name(self) -> str:
        rope = f" rope {self.head_dim - self.rope_dim}+{self.rope_dim} {self.rope}" if self.rope else ""
        return f"{self.tokens}x{self.groups}x{self.width} to {self.rank} to {self.hidden} {self.distribution}{rope}"

    def caps(self, device: str | None = None) -> planner.Caps:
        return planner.Caps(
            device=device,
            max_tokens=self.tokens,
            groups=self.groups,
            group_width=self.width,
            rank=self.rank,
            hidden=self.hidden,
        )

    def roles(self) -> tuple[Role, ...]:
        rope = f"_{self.rope}" if self.rope else ""
        if self.tokens <= FUSED_M:
            names = {f"fused_wo_a{rope}.fused", "fused_wo_b.fused"}
        else:
            role = _cases.serving_role(self.tokens)
            names = {f"input{rope}.quantize", "inner.quantize", f"wo_a.{role}", f"wo_b.{role}"}
        return tuple(role for role in planner.roles(self.caps()) if role.name in names)

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        weights = self._weights(generator)
        x = _cases.activations(generator, (self.tokens, self.groups, self.width), self.distribution, "bfloat16")
        plan = api.plan(self.caps(device))
        scratch = _cases.poisoned(plan.layout.nbytes, device)
        rotation = self._rotation(generator)
        if self.rope:
            o = x.view(self.tokens, -1, self.head_dim)
            binding = plan.bind_inv_rope(scratch=scratch, o=o, weights=weights, **rotation)
        else:
            binding = plan.bind(scratch=scratch, source_tgd=x, weights=weights)
        inner = self.groups * self.rank
        weight_bytes = inner * self.width + self.hidden * inner
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(plan, scratch, weights, x, rotation, binding.output),
            flops=2 * self.tokens * weight_bytes,
            bytes=weight_bytes + x.nbytes + binding.output.nbytes,
        )

    def _weights(self, generator: torch.Generator) -> api.Weights:
        """Block scales that are no powers of two; WO-A's are small, so that its results are of the input's range."""
        inner = self.groups * self.rank
        a = random_operand(generator, inner, self.width, self.distribution, recipe="block_fp8", block_rows=128)
        b = random_operand(generator, self.hidden, inner, self.distribution, recipe="block_fp8", block_rows=128)
        small = 2.0**-12
        return api.pack_weights(
            a.codes[..., 0],
            a.linear[0] * small,
            b.codes[..., 0],
            b.linear[0],
            groups=self.groups,
            group_width=self.width,
            rank=self.rank,
            hidden=self.hidden,
        )

    def _rotation(self, generator: torch.Generator) -> dict[str, Any]:
        """Arguments of a rope."""
        if not self.rope:
            return {}
        device = generator.device
        angles = torch.rand((_POSITIONS, self.rope_dim // 2), generator=generator, device=device) * 2 * math.pi
        cache = torch.cat([angles.cos(), angles.sin()], dim=1).to(getattr(torch, self.rope))
        return {
            "positions": torch.randint(0, _POSITIONS, (self.tokens,), generator=generator, device=device),
            "cos_sin_cache": cache,
            "heads_per_group": self.width // self.head_dim,
            "nope_dim": self.head_dim - self.rope_dim,
            "rope_dim": self.rope_dim,
        }

    def _judge(
        self,
        plan: api.Plan,
        scratch: torch.Tensor,
        weights: api.Weights,
        x: torch.Tensor,
        rotation: dict[str, Any],
        output: torch.Tensor,
    ) -> Judgement:
        start, count = plan.layout.offsets["tmp"], self.groups * self.tokens * self.rank
        tmp = scratch[start : start + 2 * count].view(torch.bfloat16).view(self.groups, self.tokens, self.rank)
        rows = self._rotated_back(x.float(), rotation) if rotation else x
        tally = Tally()
        for group in range(self.groups):
            values = partial(_cases.weight_values, weights.wo_a, group=group)
            _cases.judge_product(tally, tmp[group], _cases.quantised(rows[:, group]), values, "bfloat16")
        inner = _cases.quantised(tmp.permute(1, 0, 2).reshape(self.tokens, -1))
        _cases.judge_product(tally, output, inner, partial(_cases.weight_values, weights.wo_b), "bfloat16")
        _cases.judge_guard(tally, scratch)
        return tally.judgement()

    def _rotated_back(self, x: torch.Tensor, rotation: dict[str, Any]) -> torch.Tensor:
        """f32 ``[T, G, D]``: each pair's product and sum have one rounding each, as the kernels' have."""
        heads = x.view(self.tokens, -1, self.head_dim)
        table = rotation["cos_sin_cache"].float()[rotation["positions"].long()][:, None]
        cos, sin = table[..., : self.rope_dim // 2], table[..., self.rope_dim // 2 :]
        nope = self.head_dim - self.rope_dim
        even, odd = heads[..., nope::2], heads[..., nope + 1 :: 2]
        out = heads.clone()
        out[..., nope::2] = ((even * cos).double() + odd.double() * sin.double()).float()
        out[..., nope + 1 :: 2] = ((odd * cos).double() - even.double() * sin.double()).float()
        return out.view(x.shape)


def _all() -> Iterator[WoProjectionCase]:
    small = partial(WoProjectionCase, size="small")
    even = partial(small, groups=2, width=256, rank=64, hidden=72)
    # A rank that cuts blocks of 32 values, and rows of the result that are not 16-byte aligned.
    odd = partial(small, groups=16, width=128, rank=24, hidden=132)
    for tokens in (7, 13):
        yield even(tokens=tokens, distribution="octaves")
        yield odd(tokens=tokens, distribution="normal")
    for rope, tokens in (("float32", 7), ("bfloat16", 7), ("float32", 13), ("bfloat16", 520)):
        yield even(tokens=tokens, distribution="normal", rope=rope, head_dim=128)
    model = partial(WoProjectionCase, size="model", groups=4, width=4096, rank=1024, hidden=4096)
    for tokens, distribution in zip((1, 8, 16, 2048), (*DISTRIBUTIONS, "normal"), strict=True):
        yield model(tokens=tokens, distribution=distribution)
        yield model(tokens=tokens, distribution=distribution, rope="float32", head_dim=512)


CASES = tuple(_all())
