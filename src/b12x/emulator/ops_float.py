"""Arithmetic of integers and floats alike, and the floating-point instructions (PTX ISA 9.7.1, 9.7.3 to 9.7.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .decode import TYPES, Decoder, Mods, Op, Type, decoder
from .ops_int import INT_TYPES, PACKED_INT, carry_op, divide, int_add, int_binary, int_mul
from .parse import Instr

Array = NDArray[Any]
SINGLE_FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
FLOAT_TYPES = (*SINGLE_FLOATS, "f32x2")
SATURATING = ("ftz", "sat")
ROUNDINGS = ("rn", "rz", "rm", "rp")


def element(t: Type) -> str:
    """The scalar format of a possibly packed type."""
    return t.name.removesuffix("x2")


def widen(x: Array, t: Type) -> Array:
    """Values as float64 (bf16 travels as bits)."""
    return num.bf16_to_f32(x).astype(np.float64) if t.kind == "bf" else x.astype(np.float64)


def to_f32(x: Array, t: Type) -> Array:
    return num.bf16_to_f32(x) if t.kind == "bf" else x


def from_f32(x: Array, t: Type) -> Array:
    return num.f32_to_bf16(x) if t.kind == "bf" else x


class Finish:
    """Those of .ftz, .sat and .relu that an instruction has; consumed from its modifiers."""

    def __init__(self, mods: Mods, t: Type, allowed: tuple[str, ...]) -> None:
        self.ftz = "ftz" in allowed and mods.flag("ftz") and element(t) == "f32"
        self.sat = "sat" in allowed and mods.flag("sat")
        self.relu = "relu" in allowed and mods.flag("relu")
        self.t = t
        self.plain = not (self.ftz or self.sat or self.relu)

    def inputs(self, args: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(num.flush(a) for a in args) if self.ftz else args

    def output(self, x: Array) -> Array:
        if self.ftz:
            x = num.flush(x)
        if self.sat or self.relu:
            value = to_f32(x, self.t)
            # NaN saturates to 0; relu keeps it (canonical)
            if self.sat:
                value = np.where(value != value, 0, np.clip(value, 0, 1)).astype(value.dtype)
            else:
                value = np.where(value != value, value, np.where(value > 0, value, 0)).astype(value.dtype)
            x = from_f32(value, self.t) if self.t.kind == "bf" else value
        return x

    def wrap(self, fn: Callable[..., Array]) -> Callable[..., Array]:
        if self.plain:
            return fn
        return lambda *args: self.output(fn(*self.inputs(args)))


def float_op(
    d: Decoder,
    mods: Mods,
    t: Type,
    fn: Callable[..., Array],
    count: int,
    ufunc: bool = False,
    allowed: tuple[str, ...] = ("ftz",),
) -> Op:
    """A floating-point operation on operands of one type; .f32 with a narrower second type widens all but the last."""
    narrow = mods.type("f16", "bf16") if t.name == "f32" and mods.left and mods.left[-1] in ("f16", "bf16") else None
    finish = Finish(mods, t, allowed)
    operands = d.operands(count + 1)
    srcs = [d.src(o, t) for o in operands[1:]] if narrow is None else []
    if narrow is not None:
        same, inner = narrow, fn
        srcs = [*(d.src(o, narrow) for o in operands[1:-1]), d.src(operands[-1], t)]

        def widened(*args: Array) -> Array:
            return inner(*(widen(a, same).astype(np.float32) for a in args[:-1]), args[-1])

        return d.alu(d.dst(operands[0], t), srcs, finish.wrap(widened))
    return d.alu(d.dst(operands[0], t), srcs, finish.wrap(fn), ufunc=ufunc and finish.plain)


@decoder("add", "sub")
def add(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """add/sub (9.7.1.1, 9.7.3.3, 9.7.4.1)."""
    if "cc" in mods.left:
        return carry_op(d, ins, mods, False)
    mode = mods.choice(*ROUNDINGS, default="rn")
    packed = PACKED_INT if ins.opcode == "add" else ()
    t = mods.type(*INT_TYPES, *packed, *FLOAT_TYPES)
    if t.kind in "us":
        return int_add(d, ins, mods, t)
    sign = 1 if ins.opcode == "add" else -1
    if mode != "rn":
        fn = lambda a, b: num.add_rounded(widen(a, t), sign * widen(b, t), element(t), mode)  # noqa: E731
        return float_op(d, mods, t, fn, 2, allowed=SATURATING)
    op = np.add if sign > 0 else np.subtract
    if t.kind == "bf":
        return float_op(d, mods, t, lambda a, b: from_f32(op(to_f32(a, t), to_f32(b, t)), t), 2)
    return float_op(d, mods, t, op, 2, ufunc=True, allowed=SATURATING)


@decoder("mul", "mad")
def mul(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mul/mad (9.7.1.3, 9.7.1.4, 9.7.3.5, 9.7.3.7)."""
    mode = mods.choice(*ROUNDINGS, default="rn")
    t = mods.type(*INT_TYPES, *(FLOAT_TYPES if ins.opcode == "mul" else ("f32", "f64")))
    if t.kind in "us":
        return int_mul(d, ins, mods, t)
    if ins.opcode == "mad":
        return fused(d, mods, t, mode, SATURATING)
    if mode != "rn":
        return float_op(
            d, mods, t, lambda a, b: num.mul_rounded(widen(a, t), widen(b, t), element(t), mode), 2, allowed=SATURATING
        )
    if t.kind == "bf":
        return float_op(d, mods, t, lambda a, b: from_f32(to_f32(a, t) * to_f32(b, t), t), 2)
    return float_op(d, mods, t, np.multiply, 2, ufunc=True, allowed=SATURATING)


def fused(d: Decoder, mods: Mods, t: Type, mode: str, allowed: tuple[str, ...]) -> Op:
    name = element(t)
    return float_op(
        d, mods, t, lambda a, b, c: num.fma(widen(a, t), widen(b, t), widen(c, t), name, mode), 3, allowed=allowed
    )


@decoder("fma")
def fma(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """fma (9.7.3.6, 9.7.4.4): one rounding."""
    mode = mods.choice(*ROUNDINGS)
    if not mode:
        raise d.fail("fma without rounding")
    return fused(d, mods, mods.type(*FLOAT_TYPES), mode, (*SATURATING, "relu"))


@decoder("neg", "abs")
def sign(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """neg/abs (9.7.1.11, 9.7.1.10, 9.7.3.10, 9.7.3.9): on floats only the sign bit changes."""
    t = mods.type("s16", "s32", "s64", *SINGLE_FLOATS)
    dst, a = d.operands(2)
    if t.kind == "s":
        fn = np.negative if ins.opcode == "neg" else np.abs
        return d.alu(d.dst(dst, t), [d.src(a, t)], fn, ufunc=True)
    finish = Finish(mods, t, ("ftz",))
    bits = np.dtype(f"u{np.dtype(t.dtype).itemsize}")
    top = bits.type(1 << (bits.itemsize * 8 - 1))
    flip = ins.opcode == "neg"

    def change(x: Array) -> Array:
        raw = x.view(bits)
        result: Array = (raw ^ top if flip else raw & ~top).view(t.dtype)
        return result

    return d.alu(d.dst(dst, t), [d.src(a, t)], finish.wrap(change))


@decoder("min", "max")
def minmax(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """min/max (9.7.1.12, 9.7.1.13, 9.7.3.11, 9.7.3.12, 9.7.4.7), with .NaN, .xorsign.abs and a third input."""
    t = mods.type(*INT_TYPES, *PACKED_INT, *SINGLE_FLOATS)
    low = ins.opcode == "min"
    if t.kind in "us":
        relu = mods.flag("relu")
        fn = np.minimum if low else np.maximum
        if relu:
            return int_binary(d, mods, t, lambda a, b: np.maximum(fn(a, b), t.dtype(0)), False)
        return int_binary(d, mods, t, fn, True)
    nan = mods.flag("NaN")
    xorsign = mods.flag("xorsign")
    absolute = mods.flag("abs")
    pick = num.minimum if low else num.maximum

    def fold(*args: Array) -> Array:
        values = [to_f32(a, t) for a in args]
        if xorsign:
            negative = np.logical_xor.reduce([np.signbit(v) for v in values])
        if absolute:
            values = [np.abs(v) for v in values]
        out = values[0]
        for v in values[1:]:
            out = pick(out, v, nan)
        if xorsign:
            out = np.where(negative, -out, out)
        if t.kind == "bf":
            return num.f32_to_bf16(out)
        canonical = {"f16": np.uint16(0x7FFF), "f32": np.uint32(0x7FFFFFFF)}.get(element(t))
        bad = out != out
        if canonical is not None and bad.any():
            out = np.where(bad, canonical.view(t.dtype), out)
        return out

    return float_op(d, mods, t, fold, len(ins.operands) - 1)


@decoder("div")
def div(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """div (9.7.1.8, 9.7.3.8); .full and .approx give the correctly rounded quotient, which is within their error."""
    mode = mods.choice(*ROUNDINGS, "approx", "full", default="rn")
    t = mods.type(*INT_TYPES, "f32", "f64")
    if t.kind in "us":
        return int_binary(d, mods, t, divide(t), False)
    if mode in ("rz", "rm", "rp"):
        quotient = num.divide_f64 if t.name == "f64" else num.div_rounded
        return float_op(d, mods, t, lambda a, b: quotient(widen(a, t), widen(b, t), mode), 2)
    return float_op(d, mods, t, np.divide, 2, ufunc=True)


def unary64(fn: Callable[[Array], Array], t: Type) -> Callable[[Array], Array]:
    """A function computed in float64 and rounded to the type."""

    def run(x: Array) -> Array:
        y = fn(widen(x, t))
        if t.kind == "bf":
            return num.from_f64(y, "bf16")
        return y.astype(t.dtype)

    return run


@decoder("rcp", "sqrt")
def rcp_sqrt(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """rcp/sqrt (9.7.3.13, 9.7.3.15)."""
    mode = mods.choice(*ROUNDINGS, "approx", default="rn")
    t = mods.type("f32", "f64")
    if mode in ("rz", "rm", "rp"):
        if ins.opcode == "sqrt":
            return float_op(d, mods, t, lambda a: num.sqrt_rounded(widen(a, t), element(t), mode), 1)
        quotient = num.divide_f64 if t.name == "f64" else num.div_rounded
        return float_op(d, mods, t, lambda a: quotient(np.ones(a.shape), widen(a, t), mode), 1)
    if ins.opcode == "sqrt":
        return float_op(d, mods, t, np.sqrt, 1, ufunc=True)
    one = t.dtype(1)
    return float_op(d, mods, t, lambda a: one / a, 1)


_APPROX: dict[str, Callable[[Array], Array]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@decoder("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def approximate(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """The approximate functions (9.7.3.16 to 9.7.3.21, 9.7.4.9, 9.7.4.10), computed in float64."""
    if not mods.flag("approx"):
        raise d.fail("only .approx is supported")
    half = ("f32", "f16", "f16x2", "bf16", "bf16x2")
    types = {"rsqrt": ("f32", "f64"), "ex2": half, "tanh": half}.get(ins.opcode, ("f32",))
    t = mods.type(*types)
    return float_op(d, mods, t, unary64(_APPROX[ins.opcode], t), 1, allowed=() if ins.opcode == "tanh" else ("ftz",))


@decoder("copysign")
def copysign(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """copysign (9.7.3.2): the sign of a on b."""
    t = mods.type("f32", "f64")
    dst, a, b = d.operands(3)
    return d.alu(d.dst(dst, t), [d.src(a, t), d.src(b, t)], lambda a, b: np.copysign(b, a))


@decoder("testp")
def testp(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """testp (9.7.3.1)."""
    what = mods.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    t = mods.type("f32", "f64")
    tiny = np.finfo(t.dtype).tiny
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }
    dst, a = d.operands(2)
    return d.alu(d.dst(dst, TYPES["pred"]), [d.src(a, t)], tests[what])
