"""Planner of the decode GEMM that quantises A itself: its Caps, its kernel, and how many CTAs share K."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.decode_spec import NO_ROPE, SOURCES, DecodeSpec
from b12x.quantization.mxfp8.planner import MOST_GROUPS, Rope

OP = planner.OP
#: Rows of A that the kernel takes.
MAX_M = planner.FUSED_M
#: Values of A that are loaded at a time.
PART = 8


@dataclass(frozen=True, kw_only=True)
class FusedCaps:
    """Capacities and static choices of ``C[M, N, G] = alpha * MXFP8(A) (B SFB)^T + bias`` with A in bf16 or f16.

    Any live M in 0..max_m, at most 8. B is MXFP8 ``[N, K, G]``, K a multiple of 128; A has ``k_source`` columns, a
    multiple of 8, and counts as zero from there to K. ``groups`` products (G) are one launch. Where ``span`` is not 0,
    a row of A is in pieces of ``span`` columns that lie a stride apart. ``rope`` is a rotation of A to undo first, or
    a mapping of its fields.
    """

    device: object = None
    max_m: int = MAX_M
    n: int
    k: int
    k_source: int | None = None
    groups: int = 1
    span: int = 0
    rope: Rope | None = None
    dtype: str = "bfloat16"
    c_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        fix = "quantise more rows with b12x.quantization.mxfp8, and multiply with gemm.blockscaled.mm"
        checks.whole(OP, "max_m", self.max_m, most=MAX_M, fix=fix)
        checks.whole(OP, "groups", self.groups, most=MOST_GROUPS)
        checks.whole(OP, "span", self.span, least=0)
        if self.dtype not in SOURCES[1:]:
            raise ValueError(
                f"{OP}: dtype is {self.dtype!r}; A is read as {' or '.join(SOURCES[1:])}: convert it, or quantise it"
            )
        if self.k_source is None:
            object.__setattr__(self, "k_source", self.k)
        checks.whole(OP, "k_source", self.k_source)
        if self.columns % PART or self.columns > self.k:
            raise ValueError(
                f"{OP}: A has {self.columns} columns, B {self.k}; needed is a multiple of {PART} that is not more than "
                "B has: pad A with zeros, or take the weight that goes with it"
            )
        if self.span and (self.groups != 1 or self.span % PART or self.columns % self.span):
            raise ValueError(
                f"{OP}: span is {self.span}, A has {self.columns} columns in {self.groups} groups; needed is one group "
                f"and a span that is a multiple of {PART} and divides the columns: copy the rows into contiguous ones"
            )
        rope: Any = self.rope
        if isinstance(rope, Mapping):
            object.__setattr__(self, "rope", Rope(**rope))
        if self.rope is not None and (self.columns % self.rope.head_dim or self.span):
            raise ValueError(
                f"{OP}: with a rope of head_dim {self.rope.head_dim}, A has {self.columns} columns and span {self.span}"
                "; needed are whole heads and no span: plan for those"
            )
        _ = self.product  # which checks n, k and c_dtype

    @property
    def columns(self) -> int:
        """Columns of A."""
        assert self.k_source is not None
        return self.k_source

    @property
    def product(self) -> planner.Caps:
        """The same as Caps of ``gemm.blockscaled``, without what is no choice of a kernel."""
        return planner.Caps(
            device=self.device,
            ab_dtype="float8_e4m3fn",
            sf_dtype="float8_e8m0fnu",
            sf_vec_size=32,
            c_dtype=self.c_dtype,
            max_m=self.max_m,
            n=self.n,
            k=self.k,
            batch=self.groups,
            source=self.dtype,
            rope=NO_ROPE if self.rope is None else self.rope.cache_dtype,
        )


def roles(caps: FusedCaps) -> tuple[Role, ...]:
    """The one kernel."""
    return planner.roles(caps.product)


def split(caps: FusedCaps, sm_count: int, wanted: int | None = None) -> int:
    """CTAs that share K: as many as are wanted (ValueError where the kernel can't), else as many as take least time."""
    if wanted is not None:
        return checks.whole(OP, "split", wanted, most=DecodeSpec.max_split, fix="leave it out")
    (choice,) = planner.table(caps.product, sm_count)
    return choice.split
