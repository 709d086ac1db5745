"""What the planners of the fused linears share: their Caps, and the parts that they are made of.

A linear has no kernel of its own. Its roles are those of its parts, a quantizer and GEMMs, each under the part's name:
``rows.quantize``, ``gemm.prefill``. So what the build makes for a part serves every linear, and ``plan`` asks for
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.gemm.blockscaled import fused_planner
from b12x.gemm.blockscaled import planner as blockscaled
from b12x.gemm.blockscaled.fused_planner import FusedCaps
from b12x.quantization.mxfp8 import planner as mxfp8

OUTPUTS = ("bfloat16", "float16")
#: Columns of a scale tile: K of a prepared weight is a multiple of it.
COLUMNS = 128
#: Values that share an E8M0 scale.
BLOCK = 32
#: Most tokens of a GEMM that quantises its input itself.
FUSED_M = fused_planner.MAX_M


@dataclass(frozen=True, kw_only=True)
class LinearCaps:
    """Capacities and static choices of a plan for ``y = x @ W^T (+ bias)``.

    Any live token count 0..max_tokens; ``in_features`` (K) and ``out_features`` (N) are exact. ``output_dtype`` is
    ``bfloat16`` or ``float16``, as a string or a torch dtype.
    """

    op: ClassVar[str]
    quantum: ClassVar[int] = BLOCK

    device: object = None
    max_tokens: int
    in_features: int
    out_features: int
    output_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_dtype", checks.dtype_name(self.output_dtype))
        for name in ("max_tokens", "in_features", "out_features"):
            checks.whole(self.op, name, getattr(self, name))
        if self.in_features % self.quantum:
            raise ValueError(
                f"{self.op}: in_features is {self.in_features}; needed is a multiple of {self.quantum}, the values "
                "that share a scale: pad the weight and its input with zero columns"
            )
        if self.output_dtype not in OUTPUTS:
            raise ValueError(
                f"{self.op}: output_dtype is {self.output_dtype!r}; needed is {' or '.join(map(repr, OUTPUTS))}: "
                "choose one and convert the result"
            )

    @property
    def padded_in_features(self) -> int:
        return padded(self.in_features)


def padded(k: int) -> int:
    """K rounded up to whole scale tiles."""
    return -(-k // COLUMNS) * COLUMNS


def quantizer(caps: LinearCaps) -> mxfp8.Caps:
    """The part that makes MXFP8 rows of the input, as wide as the prepared weight."""
    return mxfp8.Caps(
        device=caps.device,
        m=caps.max_tokens,
        k=caps.in_features,
        k_out=caps.padded_in_features,
        dtype=caps.output_dtype,
    )


def fused(caps: LinearCaps) -> FusedCaps:
    """The part that does all of it for few tokens."""
    return FusedCaps(
        device=caps.device,
        max_m=min(caps.max_tokens, FUSED_M),
        n=caps.out_features,
        k=caps.padded_in_features,
        k_source=caps.in_features,
        dtype=caps.output_dtype,
        c_dtype=caps.output_dtype,
    )


def linear_roles(caps: LinearCaps) -> tuple[Role, ...]:
    """Every kernel that some token count in 1..max_tokens needs of a linear with MXFP8 rows."""
    parts = {"fused": fused_planner.roles(fused(caps))}
    if caps.max_tokens > FUSED_M:
        parts["rows"] = mxfp8.roles(quantizer(caps))
        parts["gemm"] = blockscaled.roles(product(caps))
    return together(**parts)


def product(caps: LinearCaps, *, plain_fp8: bool = False) -> blockscaled.Caps:
    """The part that multiplies."""
    return fp8_product(
        caps.device, caps.max_tokens, caps.out_features, caps.padded_in_features, caps.output_dtype, plain_fp8=plain_fp8
    )


def fp8_product(
    device: object, max_m: int, n: int, k: int, c_dtype: str, *, batch: int = 1, plain_fp8: bool = False
) -> blockscaled.Caps:
    """Caps of an MXFP8 GEMM, or of one of plain E4M3."""
    return blockscaled.Caps(
        device=device,
        ab_dtype="float8_e4m3fn",
        sf_dtype="float8_e8m0fnu",
        sf_vec_size=BLOCK,
        c_dtype=c_dtype,
        max_m=max_m,
        n=n,
        k=k,
        batch=batch,
        plain_fp8=plain_fp8,
    )


def together(**parts: tuple[Role, ...]) -> tuple[Role, ...]:
    """The roles of all parts, each under its part's name."""
    return tuple(Role(f"{part}.{role.name}", role.candidates) for part, roles in parts.items() for role in roles)
