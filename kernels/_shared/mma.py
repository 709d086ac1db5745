"""Warp-level block-scaled MMA with its fragments.

With ``lane = 4 g + t`` (PTX ISA 9.7.15.5): an m16n8 accumulator holds row g, columns 2t and 2t+1, then row g+8, the
same columns. A 16x64 FP4 tile of A is four registers of 8 codes: rows g and g+8 at k = 8t.., then both at k =
32+8t..; an 8x64 tile of B is two: column g at k = 8t.. and at k = 32+8t... A 16x32 FP8 tile is the same in bytes. So
each register is one 8x8 matrix of ldmatrix, whose rows are 16 bytes, and one MMA takes 32 bytes of every row.

Scales are one register an operand, four bytes of a row or column: for A, lanes ``4 g + 2 s`` and ``4 g + 2 s + 1`` hold
rows g and g+8, s the thread selector 0 or 1; for B, lane ``4 g + s`` holds column g, s in 0..3. So a load a lane serves
two row tiles of A, or four column tiles of B, through the selector. An MMA uses as many bytes as it has k blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from b12x.kernels._shared.ptx import inline_ptx


@dataclass(frozen=True)
class BlockScaledForm:
    """One form of the instruction: its shape and kind, scales per row and MMA, and the element types."""

    shape: str
    kind: str
    scale_vec: str
    elements: str
    scale: str


FORMS = {
    "nvfp4": BlockScaledForm("m16n8k64", "mxf4nvf4", "4X", "e2m1", "ue4m3"),
    "mxfp4": BlockScaledForm("m16n8k64", "mxf4", "2X", "e2m1", "ue8m0"),
    "mxfp8": BlockScaledForm("m16n8k32", "mxf8f6f4", "1X", "e4m3", "ue8m0"),
}


@dsl_user_op
def mma_block_scaled(
    form: BlockScaledForm,
    a: Sequence[Uint32],
    b: Sequence[Uint32],
    c: Sequence[Float32],
    sfa: Uint32,
    sfb: Uint32,
    *,
    byte: int = 0,
    select_a: int = 0,
    select_b: int = 0,
    loc: Any = None,
    ip: Any = None,
) -> list[Float32]:
    """``D = (A sfa) (B sfb)^T + C``, accumulated in f32.

    ``byte`` is the first byte of both scale registers that this MMA's k blocks use, ``select_a`` and ``select_b`` are
    the thread selectors of the scale registers (9.7.15.5.14).
    """
    template = (
        f"mma.sync.aligned.{form.shape}.row.col.kind::{form.kind}.block_scale.scale_vec::{form.scale_vec}"
        f".f32.{form.elements}.{form.elements}.f32.{form.scale} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}, "
        f"{{$14}}, {{{byte}, {select_a}}}, {{$15}}, {{{byte}, {select_b}}};"
    )
    operands = [*a, *b, *c, sfa, sfb]
    return inline_ptx(template, [Float32] * 4, operands, side_effects=False, loc=loc, ip=ip)


@dsl_user_op
def mma_bf16(
    a: Sequence[Uint32], b: Sequence[Uint32], c: Sequence[Float32], *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """``D = A B^T + C`` for m16n8k16 of bf16, accumulated in f32.

    Registers hold two values: A's are row g at k = 2t.., row g+8 at those k, then both rows at k = 8+2t..; B's are
    column g at k = 2t.. and at k = 8+2t... What counts is that A and B put the same k in the same place.
    """
    template = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return inline_ptx(template, [Float32] * 4, [*a, *b, *c], side_effects=False, loc=loc, ip=ip)
