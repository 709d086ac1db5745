"""mma.sync on integers and on f64 (PTX ISA 9.7.14.5.14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .decode import TYPES, Decoder, Dest, Mods, Op, Source, spread
from .machine import W32, Group
from .parse import Instr, Operand, Vector

Array = NDArray[Any]
INTEGERS = {"s8": (8, True), "u8": (8, False), "s4": (4, True), "u4": (4, False)}


def integer(d: Decoder, ins: Instr, mods: Mods, k: int) -> Op:
    """m16n8kK of 8- or 4-bit integers with s32 accumulation, wrapping or saturated at the end."""
    saturate = mods.flag("satfinite")
    types, mods.left = mods.left, []
    if len(types) != 4 or types[0] != "s32" or types[3] != "s32" or not {*types[1:3]} <= INTEGERS.keys():
        raise d.fail("types are not supported")
    bits = INTEGERS[types[1]][0]
    quads = k * bits // 128
    if bits != INTEGERS[types[2]][0] or quads not in (1, 2):
        raise d.fail("types or shape are not supported")
    dst, a, b, c = d.operands(4)
    srcs = [_fragment(d, x, n, "b32") for x, n in ((a, 2 * quads), (b, quads), (c, 4))]
    outs = [d.dst(o, TYPES["b32"]) for o in _items(d, dst, 4)]

    def values(g: Group, side: Sequence[Source], name: str) -> Array:
        words = np.ascontiguousarray(np.stack([s.get(g) for s in side]))
        raw = words.view(np.uint8)
        if bits == 4:
            raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
        raw = raw.reshape(*words.shape, 32 // bits).astype(np.float64)
        return np.where(raw >= 1 << (bits - 1), raw - (1 << bits), raw) if INTEGERS[name][1] else raw

    def run(g: Group) -> None:
        n, e = g.n, 32 // bits
        left = values(g, srcs[0], types[1]).reshape(quads, 2, n, 8, 4, e).transpose(2, 1, 3, 0, 4, 5).reshape(n, 16, k)
        right = values(g, srcs[1], types[2]).reshape(quads, n, 8, 4, e).transpose(1, 2, 0, 3, 4).reshape(n, 8, k)
        product = np.matmul(left, right.swapaxes(1, 2)).reshape(n, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        start = np.stack([s.get(g).view(np.int32) for s in srcs[2]]).astype(np.int64)
        total = product.reshape(4, n, 32).astype(np.int64) + start
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        for out, value in zip(outs, total.astype(np.uint64).astype(np.uint32), strict=True):
            out.put(g, value)

    return _whole(d, ins, run, [s for side in srcs for s in side], outs)


def double(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """m8n8k4 of f64: a chain of fma in the order of k."""
    mode = mods.choice("rn", "rz", "rm", "rp", default="rn")
    types, mods.left = mods.left, []
    if types != ["f64"] * 4:
        raise d.fail("types are not supported")
    dst, a, b, c = d.operands(4)
    srcs = [_fragment(d, x, n, "f64") for x, n in ((a, 1), (b, 1), (c, 2))]
    outs = [d.dst(o, TYPES["f64"]) for o in _items(d, dst, 2)]

    def run(g: Group) -> None:
        left, right = (side[0].get(g).reshape(g.n, 8, 4) for side in srcs[:2])
        total = np.stack([s.get(g) for s in srcs[2]], axis=-1).reshape(g.n, 8, 8)
        for k in range(4):
            x, y, z = np.broadcast_arrays(left[:, :, None, k], right[:, None, :, k], total)
            total = num.fma_f64(x, y, z, mode)
        for out, value in zip(outs, total.reshape(g.n, 32, 2).transpose(2, 0, 1), strict=True):
            out.put(g, value)

    return _whole(d, ins, run, [s for side in srcs for s in side], outs)


def _items(d: Decoder, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise d.fail(f"a fragment of {count} registers is expected")
    return items


def _fragment(d: Decoder, operand: Operand, count: int, kind: str) -> list[Source]:
    return [d.src(o, TYPES[kind]) for o in _items(d, operand, count)]


def _whole(d: Decoder, ins: Instr, run: Any, srcs: Sequence[Source], outs: Sequence[Dest]) -> Op:
    """An op of a whole warp; a tainted lane taints the results of all lanes of its warp."""
    lanes = spread(srcs, outs)

    def rule(g: Group) -> Sequence[Array]:
        return [np.broadcast_to(bits.max(axis=1, keepdims=True), bits.shape) for bits in lanes(g)]

    op = d.pure(ins, run, tuple(s.rid for s in srcs), outs, rule)
    op.converge = d.constant(W32, 0xFFFFFFFF)
    return op
