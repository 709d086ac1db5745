"""Planner of ``gemm.mla_query_projection``: which kernels a plan holds; tiles and grid are those of ``gemm.bmm``."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime.spec import Role
from b12x.gemm._bmm.planner import check_sizes, check_weight, tiles
from b12x.gemm._bmm.spec import OUTPUTS, WEIGHTS
from b12x.gemm.mla_query_projection.spec import MlaQueryProjectionSpec

OP = "gemm.mla_query_projection"

#: Other names of weight formats.
_SYNONYMS = {"bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities and static choices of a plan.

    Any live M in 0..max_m; ``num_heads`` (H), ``nope_dim`` (K, a multiple of 16) and ``latent_dim`` (N, a multiple of
    32, or of 8 for bf16 weights) are exact. ``output_dtype`` is ``bfloat16`` or ``float8_e4m3fn``, ``weight_format``
    ``mxfp8`` or ``bfloat16``, also as ``bf16``; NotImplementedError for others. The RoPE width is live.
    """

    device: object = None
    num_heads: int
    max_m: int
    nope_dim: int
    latent_dim: int
    output_dtype: str
    weight_format: str = "mxfp8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_format", _SYNONYMS.get(self.weight_format, self.weight_format))
        for name, known in (("output_dtype", OUTPUTS), ("weight_format", tuple(WEIGHTS))):
            if getattr(self, name) not in known:
                raise NotImplementedError(
                    f"{OP}: {name} is {getattr(self, name)!r}; available is {' or '.join(known)}: choose one of them"
                )
        check_sizes(OP, self.num_heads, "num_heads", self.max_m, "max_m")
        check_weight(OP, self.weight_format, "n", self.latent_dim, "latent_dim", self.nope_dim, "nope_dim")


def roles(caps: Caps) -> tuple[Role, ...]:
    """The kernels that some live M picks."""
    return tuple(
        Role(
            tile,
            (MlaQueryProjectionSpec(weight=caps.weight_format, major="n", out_dtype=caps.output_dtype, tile=tile),),
        )
        for tile in tiles(caps.max_m)
    )
