"""Expansions of arithmetic: packed f32 pairs, three-input min and max, mixed precision, warp reduction of f32."""

from __future__ import annotations

from .body import FULL_WARP, Body
from .scan import Instruction

_CANONICAL_NAN = "0x7fffffff"


def f32x2(ins: Instruction, body: Body) -> None:
    """``add, sub, mul, fma`` of f32x2 (PTX ISA 9.7.3): the same operation on each half."""
    single = ".".join((ins.opcode, *(mod for mod in ins.mods if mod != "f32x2"), "f32"))
    halves = []
    for source in ins.operands[1:]:
        low, high = body.new(), body.new()
        body.add(f"mov.b64 {{{low}, {high}}}, {source}")
        halves.append((low, high))
    low, high = (body.op(single, *(pair[i] for pair in halves)) for i in range(2))
    body.add(f"mov.b64 {ins.operands[0]}, {{{low}, {high}}}")


def min_max_3(ins: Instruction, body: Body) -> None:
    """``min, max`` of three f32 (PTX ISA 9.7.3.11, 9.7.3.12): two steps, which give the same bits in any order."""
    sources = body.copies(ins.operands[1:])
    if ins.has("abs"):
        sources = [body.op("abs.f32", source) for source in sources]
    double = ".".join((ins.opcode, *(mod for mod in ins.mods if mod != "abs")))
    first = body.op(double, sources[0], sources[1])
    body.add(f"mov.b32 {ins.operands[0]}, {body.op(double, first, sources[2])}")


def mixed(ins: Instruction, body: Body) -> None:
    """``add, sub, fma`` of f32 with f16 or bf16 sources (PTX ISA 9.7.5): widened first, which is exact."""
    narrow = ins.mods[-1]
    widened = 2 if ins.opcode == "fma" else 1
    sources = [body.op(f"cvt.f32.{narrow}", source) for source in ins.operands[1 : 1 + widened]]
    sources.append(body.copy(ins.operands[1 + widened]))
    body.add(f"mov.b32 {ins.operands[0]}, {body.op('.'.join((ins.opcode, *ins.mods[:-1])), *sources)}")


def redux_f32(ins: Instruction, body: Body) -> None:
    """``redux.sync.{min,max}{.abs}{.NaN}.f32`` (PTX ISA 9.7.13.7) on integers of the same order.

    A float maps to an unsigned key: all bits flipped where it is negative, the sign bit set where it is not. NaN takes
    the key that never wins, or with ``.NaN`` the one that always does; no other value has those keys.
    """
    smallest = ins.has("min")
    value = body.copy(ins.operands[1])
    if ins.has("abs"):
        value = body.op("abs.f32", value)
    sign = body.op("shr.s32", value, 31)
    key = body.op("xor.b32", value, body.op("or.b32", sign, "0x80000000"))
    wins = smallest == ins.has("NaN")
    marker = "0" if wins else FULL_WARP
    is_nan = body.op("setp.nan.f32", value, value, kind="pred")
    key = body.op("selp.b32", marker, key, is_nan)
    best = body.op(f"redux.sync.{'min' if smallest else 'max'}.u32", key, ins.operands[2])
    negative = body.op("not.b32", body.op("shr.s32", best, 31))
    bits = body.op("xor.b32", best, body.op("or.b32", negative, "0x80000000"))
    none = body.op("setp.eq.u32", best, marker, kind="pred")
    body.add(f"selp.b32 {ins.operands[0]}, {_CANONICAL_NAN}, {bits}, {none}")
