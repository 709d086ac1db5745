"""Planner of ``quantization.mxfp8``: which kernel, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.quantization.mxfp8.spec import CACHE_DTYPES, DTYPES, NO_ROPE, Mxfp8QuantizeSpec

OP = "quantization.mxfp8"
BLOCK = 32
#: Values that a thread loads at a time.
PART = 8
#: A grid has at most so many CTAs along y.
MOST_GROUPS = 65535


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding to take back before quantising: of every ``head_dim`` columns the last ``rope_dim``, which
    follow ``nope_dim`` others, in interleaved pairs, by a cache ``[positions, rope_dim]`` of cosines, then sines."""

    head_dim: int
    nope_dim: int
    rope_dim: int
    cache_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("head_dim", "nope_dim", "rope_dim"):
            value = checks.whole(OP, f"rope.{name}", getattr(self, name), least=0 if name == "nope_dim" else 1)
            if value % BLOCK:
                raise ValueError(
                    f"{OP}: rope.{name} is {value}; needed is a multiple of {BLOCK}, so that a block is rotated as a "
                    "whole or not at all: quantise such heads after a rotation of their own"
                )
        if self.nope_dim + self.rope_dim != self.head_dim:
            raise ValueError(
                f"{OP}: rope.head_dim is {self.head_dim}, rope.nope_dim + rope.rope_dim is "
                f"{self.nope_dim + self.rope_dim}; needed are equal ones: correct the one that is wrong"
            )
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"{OP}: rope.cache_dtype is {self.cache_dtype!r}; needed is {' or '.join(CACHE_DTYPES)}: convert the "
                "cache before"
            )

    def __str__(self) -> str:
        """As in a manifest."""
        dims = f"head_dim = {self.head_dim}, nope_dim = {self.nope_dim}, rope_dim = {self.rope_dim}"
        return f'{{ {dims}, cache_dtype = "{self.cache_dtype}" }}'


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities of a plan: up to ``m`` rows (any live count 0..m) of exactly ``k`` columns, a multiple of 32.

    ``dtype`` of the rows is ``bfloat16`` or ``float16``. ``k_out`` columns are written, those from ``k`` on as if the
    rows went on with zeros; without it as many as are read, and with it ``k`` may be any multiple of 8. ``groups``
    matrices are quantised at once. Where ``span`` is not 0, a row is read in pieces of ``span`` columns, which lie a
    stride apart. ``rope`` is a rotation to take back before, or a mapping of its fields.
    """

    device: object = None
    m: int
    k: int
    dtype: str = "bfloat16"
    k_out: int | None = None
    groups: int = 1
    span: int = 0
    rope: Rope | None = None

    def __post_init__(self) -> None:
        checks.whole(OP, "m", self.m, fix="choose a row capacity in that range")
        checks.whole(OP, "k", self.k)
        checks.whole(OP, "groups", self.groups, most=MOST_GROUPS)
        checks.whole(OP, "span", self.span, least=0)
        step = BLOCK if self.k_out is None else PART
        if self.k % step:
            raise ValueError(
                f"{OP}: k is {self.k}; a multiple of {step} is needed: pad the rows with zeros"
                + (f", or give k_out, the next multiple of {BLOCK}" if self.k % PART == 0 else "")
            )
        if self.k_out is not None:
            checks.whole(OP, "k_out", self.k_out)
            if self.k_out < self.k or self.k_out % BLOCK:
                raise ValueError(
                    f"{OP}: k_out is {self.k_out} and k {self.k}; needed is a multiple of {BLOCK} that is not less "
                    "than k: round k up"
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"{OP}: dtype is {self.dtype!r}; it reads {' or '.join(DTYPES)}: convert the rows before")
        if self.span and (self.groups != 1 or self.span % PART or self.k % self.span):
            raise ValueError(
                f"{OP}: span is {self.span}, k {self.k}, groups {self.groups}; needed is one group and a span that is "
                f"a multiple of {PART} and divides k: copy the rows into contiguous ones"
            )
        rope: Any = self.rope
        if isinstance(rope, Mapping):
            rope = Rope(**rope)
            object.__setattr__(self, "rope", rope)
        if rope is not None:
            self._check_rope(rope)

    def _check_rope(self, rope: Any) -> None:
        if not isinstance(rope, Rope):
            raise TypeError(
                f"{OP}: rope is a {type(rope).__name__}; needed is a Rope: make one of the head's dimensions"
            )
        if self.k % rope.head_dim or self.dtype != "bfloat16":
            raise ValueError(
                f"{OP}: with a rope of head_dim {rope.head_dim}, k is {self.k} and dtype {self.dtype!r}; needed are a "
                "multiple of head_dim and 'bfloat16': plan for whole heads of that dtype"
            )

    @property
    def columns(self) -> int:
        """Columns that are written."""
        return self.k if self.k_out is None else self.k_out


def roles(caps: Caps) -> tuple[Role, ...]:
    """The one kernel: it serves every row count and width."""
    rope = NO_ROPE if caps.rope is None else caps.rope.cache_dtype
    return (Role("quantize", (Mxfp8QuantizeSpec(dtype=caps.dtype, rope=rope),)),)


def grid(rows: int, columns: int, groups: int = 1) -> tuple[int, int, int]:
    """CTAs for ``rows`` live rows of ``columns`` that are written: one for each scale tile of each group."""
    row_tiles = -(-rows // Mxfp8QuantizeSpec.tile_rows)
    return (row_tiles * -(-columns // Mxfp8QuantizeSpec.tile_columns), groups, 1)
