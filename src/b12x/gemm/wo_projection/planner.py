"""Planner of ``gemm.wo_projection``: the parts of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.gemm import _parts
from b12x.gemm.blockscaled import fused_planner
from b12x.gemm.blockscaled import planner as blockscaled
from b12x.gemm.blockscaled.fused_planner import FusedCaps
from b12x.quantization.mxfp8 import planner as mxfp8
from b12x.quantization.mxfp8.spec import CACHE_DTYPES

OP = "gemm.wo_projection"

#: WO-B reads pieces of ``rank`` columns, 16 bytes at a time.
RANK_QUANTUM = 8
#: A rope of each cache dtype: a head's dimensions are launch arguments of the kernels, so any that divide a group do.
ROPES = tuple(mxfp8.Rope(head_dim=64, nope_dim=32, rope_dim=32, cache_dtype=dtype) for dtype in CACHE_DTYPES)


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities and static choices of a plan for a grouped low-rank output projection.

    Any live token count 0..max_tokens. WO-A takes each of ``groups`` inputs of ``group_width`` (D, a multiple of 128)
    to ``rank``, WO-B their ``groups * rank`` results (a multiple of 128) to ``hidden``. ``dtype`` is ``bfloat16``.
    """

    device: object = None
    max_tokens: int
    groups: int
    group_width: int
    rank: int
    hidden: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checks.dtype_name(self.dtype))
        for name in ("max_tokens", "group_width", "rank", "hidden"):
            checks.whole(OP, name, getattr(self, name))
        checks.whole(OP, "groups", self.groups, most=mxfp8.MOST_GROUPS)
        check_dimensions(self.groups, self.group_width, self.rank)
        if self.dtype != "bfloat16":
            raise ValueError(f"{OP}: dtype is {self.dtype!r}; needed is 'bfloat16': convert the input")

    @property
    def inner(self) -> int:
        """K of WO-B."""
        return self.groups * self.rank


def check_dimensions(groups: int, group_width: int, rank: int) -> None:
    """Refuse dimensions that a scale tile does not divide."""
    if group_width % _parts.COLUMNS:
        raise ValueError(
            f"{OP}: group_width is {group_width}; needed is a multiple of {_parts.COLUMNS}: pad WO-A with zero columns"
        )
    if groups * rank % _parts.COLUMNS or rank % RANK_QUANTUM:
        raise ValueError(
            f"{OP}: rank is {rank} and groups {groups}; needed is a rank that is a multiple of {RANK_QUANTUM}, and a "
            f"product that is one of {_parts.COLUMNS}: pad each group's WO-A with zero rows and WO-B with zero columns"
        )


def input_quantizer(caps: Caps, rope: mxfp8.Rope | None = None) -> mxfp8.Caps:
    """The part that quantises the input of all groups, rotated back before where there is a rope."""
    return mxfp8.Caps(device=caps.device, m=caps.max_tokens, k=caps.group_width, groups=caps.groups, rope=rope)


def inner_quantizer(caps: Caps) -> mxfp8.Caps:
    """The part that quantises what WO-A wrote, a matrix for each group, as rows of WO-B's input."""
    return mxfp8.Caps(device=caps.device, m=caps.max_tokens, k=caps.inner, span=caps.rank)


def first(caps: Caps) -> blockscaled.Caps:
    """WO-A, a batch entry for each group."""
    width = caps.group_width
    return _parts.fp8_product(caps.device, caps.max_tokens, caps.rank, width, caps.dtype, batch=caps.groups)


def second(caps: Caps) -> blockscaled.Caps:
    """WO-B."""
    return _parts.fp8_product(caps.device, caps.max_tokens, caps.hidden, caps.inner, caps.dtype)


def fused_first(caps: Caps, rope: mxfp8.Rope | None = None) -> FusedCaps:
    """WO-A of few tokens, with the quantisation of its input."""
    few = min(caps.max_tokens, _parts.FUSED_M)
    return FusedCaps(
        device=caps.device, max_m=few, n=caps.rank, k=caps.group_width, groups=caps.groups, rope=rope, dtype=caps.dtype
    )


def fused_second(caps: Caps) -> FusedCaps:
    """WO-B of few tokens, with the quantisation of what WO-A wrote."""
    few = min(caps.max_tokens, _parts.FUSED_M)
    return FusedCaps(device=caps.device, max_m=few, n=caps.hidden, k=caps.inner, span=caps.rank, dtype=caps.dtype)


def roles(caps: Caps) -> tuple[Role, ...]:
    """Every kernel that some token count in 1..max_tokens needs, with and without a rope of either cache dtype."""
    parts = {
        "fused_wo_a": fused_planner.roles(fused_first(caps)),
        "fused_wo_b": fused_planner.roles(fused_second(caps)),
    }
    for rope in ROPES:
        parts[f"fused_wo_a_{rope.cache_dtype}"] = fused_planner.roles(fused_first(caps, rope))
    if caps.max_tokens > _parts.FUSED_M:
        parts |= {
            "input": mxfp8.roles(input_quantizer(caps)),
            "wo_a": blockscaled.roles(first(caps)),
            "inner": mxfp8.roles(inner_quantizer(caps)),
            "wo_b": blockscaled.roles(second(caps)),
        }
        for rope in ROPES:
            parts[f"input_{rope.cache_dtype}"] = mxfp8.roles(input_quantizer(caps, rope))
    return _parts.together(**parts)
