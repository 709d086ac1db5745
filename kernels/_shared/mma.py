"""Warp-level block-scaled MMA with its fragments.

With ``lane = 4 g + t`` (PTX ISA 9.7.15.5): an m16n8 accumulator holds row g, columns 2t and 2t+1, then row g+8, the
same columns. A 16x64 FP4 tile of A is four registers of 8 codes: rows g and g+8 at k = 8t.., then both at k =
32+8t..; an 8x64 tile of B is two: column g at k = 8t.. and at k = 32+8t... Seen as bytes, each register is one 8x8
matrix of ldmatrix, whose rows are 16 bytes = 32 codes. Scales are one register an operand, the four bytes of one row
or column: for A, lanes ``4 g + 2 s`` and ``4 g + 2 s + 1`` hold rows g and g+8, s the thread selector 0 or 1; for B,
lane ``4 g + s`` holds column g, s in 0..3. So one load a lane serves two row tiles of A, or four column tiles of B,
through the selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from b12x.kernels._shared.ptx import inline_ptx


@dsl_user_op
def mma_nvfp4(
    a: Sequence[Uint32],
    b: Sequence[Uint32],
    c: Sequence[Float32],
    sfa: Uint32,
    sfb: Uint32,
    *,
    select_a: int = 0,
    select_b: int = 0,
    loc: Any = None,
    ip: Any = None,
) -> list[Float32]:
    """``D = (A sfa) (B sfb) + C`` for m16n8k64, E2M1 operands, UE4M3 scales over blocks of 16 along k, f32
    accumulation.

    ``select_a`` and ``select_b`` are the thread selectors of the scale registers (9.7.15.5.14).
    """
    template = (
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}, "
        f"{{$14}}, {{0, {select_a}}}, {{$15}}, {{0, {select_b}}};"
    )
    operands = [*a, *b, *c, sfa, sfb]
    return inline_ptx(template, [Float32] * 4, operands, side_effects=False, loc=loc, ip=ip)
