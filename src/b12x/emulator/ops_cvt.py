"""Conversions (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .decode import TYPES, Decoder, Mods, Op, Type, decoder
from .ops_float import ROUNDINGS, widen
from .parse import Instr

Array = NDArray[Any]

INT = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOAT = ("f16", "bf16", "f32", "f64")
PACKED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "tf32")
#: register type that holds each packed narrow format
CARRIER = {
    "e4m3x2": "b16", "e5m2x2": "b16", "e2m3x2": "b16", "e3m2x2": "b16", "ue8m0x2": "b16", "e2m1x2": "b8",
    "f16x2": "b32", "bf16x2": "b32", "tf32": "b32",
}  # fmt: skip


@decoder("cvt")
def cvt(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cvt, all forms between integers, floats and packed narrow floats."""
    names = [m for m in mods.left if m in INT + FLOAT + PACKED]
    if len(names) != 2:
        raise d.fail("types are not supported")
    for name in names:
        mods.left.remove(name)
    to, frm = names
    if to in PACKED or frm in PACKED:
        return packed(d, ins, mods, to, frm)
    mode = mods.choice(*ROUNDINGS, "rni", "rzi", "rmi", "rpi", "rna")
    ftz, sat, relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    satfinite = mods.flag("satfinite")
    t, s = TYPES[to], TYPES[frm]
    dst, a = d.operands(2)
    out, src = d.dst(dst, t), d.src(a, s)
    if t.kind in "us" and s.kind in "us":
        fn = int_to_int(t, s, sat)
        same = t.bits <= s.bits or s.kind == "u"

        def rule(g: Any) -> Any:
            bits = src.shadow(g)
            if s.kind == "s":
                bits = bits.view(s.dtype)
            return [bits.astype(t.dtype).view(np.dtype(f"u{t.bits // 8}"))]

        return d.alu(out, [src], fn, rule=None if sat and not same else rule)
    if s.kind in "us":
        return d.alu(out, [src], int_to_float(d, t, mode or "rn"))
    if t.kind in "us":
        return d.alu(out, [src], float_to_int(t, s, mode or "rzi", ftz))
    return d.alu(out, [src], float_to_float(t, s, mode, ftz, sat, relu, satfinite))


def int_to_int(t: Type, s: Type, sat: bool) -> Callable[[Array], Array]:
    if not sat:
        return lambda a: a.astype(t.dtype)
    info = np.iinfo(t.dtype)

    def fn(a: Array) -> Array:
        low = max(int(info.min), int(np.iinfo(s.dtype).min))
        high = min(int(info.max), int(np.iinfo(s.dtype).max))
        return np.clip(a, s.dtype(low), s.dtype(high)).astype(t.dtype)

    return fn


def int_to_float(d: Decoder, t: Type, mode: str) -> Callable[[Array], Array]:
    if t.name in ("f64", "f32") and mode == "rn":
        return lambda a: a.astype(t.dtype)
    if t.name == "f64":
        exact = lambda x: num.directed(Fraction(int(x)), mode)  # noqa: E731
        return lambda a: np.vectorize(exact, otypes=[np.float64])(a)

    def fn(a: Array) -> Array:
        value = a.astype(np.float64)
        if a.dtype.itemsize == 8:  # round to odd, so that the second rounding is exact
            back = value.astype(object)
            exact = np.array([int(x) for x in a.ravel()], object).reshape(a.shape)
            error = np.array([int(e) - int(b) for e, b in zip(exact.ravel(), back.ravel(), strict=True)], object)
            diff = error.reshape(a.shape)
            bits = value.view(np.int64)
            toward = np.where((diff > 0) == (value > 0), 1, -1)
            value = np.where((diff != 0) & (bits & 1 == 0), bits + toward, bits).view(np.float64)
        return num.from_f64(value, t.name, mode)

    return fn


def float_to_int(t: Type, s: Type, mode: str, ftz: bool) -> Callable[[Array], Array]:
    high_nan = s.name == "f64" or t.bits == 64

    def fn(a: Array) -> Array:
        if ftz and s.name == "f32":
            a = num.flush(a)
        return num.to_int(widen(a, s), mode, t.bits, t.kind == "s", high_nan)

    return fn


def float_to_float(
    t: Type, s: Type, mode: str, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Callable[[Array], Array]:
    integral = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    name = t.name

    def fn(a: Array) -> Array:
        if ftz and s.name == "f32":
            a = num.flush(a)
        out: Array
        if name == "f32" and s.name == "f16" and not (sat or relu):
            out = a.astype(np.float32)
        elif name == "f32" and s.name == "bf16" and not (sat or relu):
            out = num.bf16_to_f32(a)
        elif s.name == "f32" and mode == "rn" and name == "bf16" and not (sat or relu or satfinite):
            return num.f32_to_bf16(a)
        elif s.name == "f32" and mode == "rn" and name == "f16" and not (sat or relu or satfinite):
            return num.f32_to_f16(a).view(np.float16)
        else:
            value = widen(a, s)
            if mode in integral:
                value = integral[mode](value)
            if sat:
                value = np.where(value != value, 0.0, np.clip(value, 0.0, 1.0))
            if relu:
                value = np.where(value != value, value, np.maximum(value, 0.0))
            rounding = mode if mode in ROUNDINGS or mode == "rna" else "rn"
            if satfinite:
                codes = num.encode(value, num.FORMATS[name], rounding, True)
                return codes.astype(np.dtype(f"u{t.bits // 8}")).view(t.dtype)
            out = num.from_f64(value, name, rounding)
        return num.flush(out) if ftz and name == "f32" else out

    return fn


def narrow(d: Decoder, name: str, mode: str, satfinite: bool, relu: bool) -> Callable[[Array], Array]:
    """float64 to codes of one element."""

    def fn(x: Array) -> Array:
        if relu:
            x = np.where(x != x, x, np.maximum(x, 0.0))
        if name == "ue8m0":
            return num.encode_ue8m0(x, mode, satfinite)
        return num.encode(x, num.FORMATS[name], mode, satfinite)

    if name == "ue8m0" and mode not in ("rz", "rp"):
        raise d.fail("rounding mode")
    return fn


def packed(d: Decoder, ins: Instr, mods: Mods, to: str, frm: str) -> Op:
    """Pairs: the first source goes to the upper half."""
    mode = mods.choice("rn", "rz", "rp", "rna", default="rn")
    satfinite, relu, ftz = mods.flag("satfinite"), mods.flag("relu"), mods.flag("ftz")
    if to == "tf32":
        if frm != "f32":
            raise d.fail("types")
        dst, a = d.operands(2)
        enc = narrow(d, "tf32", mode, satfinite, relu)
        return d.alu(d.dst(dst, TYPES["b32"]), [d.src(a, TYPES["f32"])], lambda a: enc(a.astype(np.float64)))
    if to in CARRIER and frm == "f32":
        dst, a, b = d.operands(3)
        name = to.removesuffix("x2")
        carrier = TYPES[CARRIER[to]]
        srcs = [d.src(a, TYPES["f32"]), d.src(b, TYPES["f32"])]
        out = d.dst(dst, carrier)
        half = carrier.bits // 2
        if mode == "rn" and not (satfinite or relu or ftz) and name in ("f16", "bf16"):
            one = num.f32_to_bf16 if name == "bf16" else num.f32_to_f16

            def fast(hi: Array, lo: Array) -> Array:
                result: Array = (one(hi).astype(np.uint32) << np.uint32(16)) | one(lo)
                return result

            return d.alu(out, srcs, fast, rule=lambda g: [halves(srcs[0].shadow(g), srcs[1].shadow(g), half, carrier)])
        if name in num.FORMATS and name not in ("f16", "bf16") and not satfinite:
            raise d.fail("needs .satfinite")
        enc = narrow(d, name, mode, satfinite, relu)

        def fn(hi: Array, lo: Array) -> Array:
            if ftz:
                hi, lo = num.flush(hi), num.flush(lo)
            bits = (enc(hi.astype(np.float64)) << np.uint32(half)) | enc(lo.astype(np.float64))
            result: Array = bits.astype(carrier.dtype)
            return result

        return d.alu(out, srcs, fn, rule=lambda g: [halves(srcs[0].shadow(g), srcs[1].shadow(g), half, carrier)])
    if to in ("f16x2", "bf16x2") and frm in CARRIER:
        return unpack(d, mods, to, frm, relu)
    if to in CARRIER and frm in ("f16x2", "bf16x2"):
        dst, a = d.operands(2)
        name, carrier, source = to.removesuffix("x2"), TYPES[CARRIER[to]], TYPES[frm]
        enc = narrow(d, name, mode, satfinite, relu)
        half = carrier.bits // 2

        def pair(a: Array) -> Array:
            code = enc(widen(a, source))
            result: Array = ((code[..., 1::2] << np.uint32(half)) | code[..., ::2]).astype(carrier.dtype)
            return result

        return d.alu(d.dst(dst, carrier), [d.src(a, source)], pair)
    raise d.fail("types are not supported")


def halves(hi: Array, lo: Array, half: int, carrier: Type) -> Array:
    """Tainted bits of a pair made of two whole sources."""
    ones = np.uint32((1 << half) - 1)
    bits = np.where(hi != 0, ones << np.uint32(half), np.uint32(0)) | np.where(lo != 0, ones, np.uint32(0))
    result: Array = bits.astype(np.dtype(f"u{carrier.bits // 8}"))
    return result


def unpack(d: Decoder, mods: Mods, to: str, frm: str, relu: bool) -> Op:
    """A pair of narrow floats to a pair of f16 or bf16 (exact)."""
    dst, a = d.operands(2)
    carrier, target = TYPES[CARRIER[frm]], TYPES[to]
    name = frm.removesuffix("x2")
    table = num.decode_table(name)
    half = carrier.bits // 2
    low = carrier.dtype((1 << half) - 1)

    def one(code: Array) -> Array:
        value = table[code & low]
        if relu:
            value = np.where(value != value, value, np.maximum(value, np.float32(0)))
        return num.f32_to_bf16(value) if to == "bf16x2" else num.f32_to_f16(value)

    def fn(x: Array) -> Array:
        out = np.empty((*x.shape, 2), np.uint16)
        out[..., 0] = one(x)
        out[..., 1] = one(x >> carrier.dtype(half))
        return out.reshape(x.shape[0], -1).view(target.dtype)

    return d.alu(d.dst(dst, target), [d.src(a, carrier)], fn)


@decoder("szext")
def szext(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """szext (9.7.1.21): sign or zero extension from a run-time width."""
    mode = mods.choice("clamp", "wrap")
    t = mods.type("u32", "s32")
    dst, a, b = d.operands(3)

    def fn(a: Array, b: Array) -> Array:
        n = (b & np.uint32(31)) if mode == "wrap" else np.minimum(b, np.uint32(32))
        bits = a.view(np.uint32).astype(np.uint64)
        mask = (np.uint64(1) << n.astype(np.uint64)) - np.uint64(1)
        low = bits & mask
        if t.kind == "s":
            sign = (n > 0) & ((bits >> (np.maximum(n, 1) - 1).astype(np.uint64)) & np.uint64(1)).astype(bool)
            low = np.where(sign, low | ~mask, low)
        result: Array = low.astype(np.uint32).view(t.dtype)
        return result

    return d.alu(d.dst(dst, t), [d.src(a, t), d.src(b, TYPES["u32"])], fn)
