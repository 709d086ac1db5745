"""Expansions of ``cvt`` to and from the formats below 8 bits and ue8m0 (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from dataclasses import dataclass

from .body import Body
from .scan import Instruction

_INFINITY = 0x7F800000
_ZERO = "0f00000000"
#: The bits of 1.5 * 2^23.
_ROUNDER = 0x4B400000


@dataclass(frozen=True)
class Narrow:
    """A format without infinity and NaN.

    ``emin`` is the smallest normal exponent, the rest are widths.
    """

    exponent: int
    mantissa: int
    emin: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def f16_factor(self) -> str:
        """f16x2 power of two that makes up for the bias of f16 (15) when the code's bits stand in f16's fields."""
        exponent = 15 - (1 - self.emin)
        return f"0x{((15 + exponent) << 10) * 0x10001:08x}"


NARROW = {
    "e2m1": Narrow(2, 1, 0),
    "e2m3": Narrow(2, 3, 0),
    "e3m2": Narrow(3, 2, -2),
}
_F8 = ("e4m3x2", "e5m2x2")
_PAIRS = (*(f"{name}x2" for name in NARROW), "ue8m0x2")
#: Width of the register that holds a pair.
_CARRIER = {"e2m1x2": 8}


def is_narrow(ins: Instruction) -> bool:
    """Whether one side is a format that Hopper does not convert, or the other side of an 8-bit float is bf16x2."""
    to, source = types(ins)
    return to in _PAIRS or source in _PAIRS or (to in _F8 and source == "bf16x2") or (source in _F8 and to == "bf16x2")


def types(ins: Instruction) -> tuple[str, str]:
    """Destination and source type."""
    return ins.mods[-2], ins.mods[-1]


def convert(ins: Instruction, body: Body) -> None:
    """Any conversion for which :func:`is_narrow` holds."""
    to, source = types(ins)
    if to == "ue8m0x2":
        _to_scales(ins, body)
    elif source == "ue8m0x2":
        _from_scales(ins, body)
    elif to in _F8:
        _to_f8(ins, body)
    elif to.removesuffix("x2") in NARROW:
        _to_narrow(ins, body)
    else:
        _to_half(ins, body)


def _to_narrow(ins: Instruction, body: Body) -> None:
    """``cvt.rn.satfinite{.relu}.{e2m1x2,e2m3x2,e3m2x2}.{f32,f16x2,bf16x2}``; NaN becomes the largest positive value."""
    to = types(ins)[0]
    fmt = NARROW[to.removesuffix("x2")]
    values = _floats(ins, body)
    if ins.has("relu"):
        values = (body.op("max.NaN.f32", values[0], _ZERO), body.op("max.NaN.f32", values[1], _ZERO))
    step = 4 if to == "e2m1x2" else 8
    top = 1 << (fmt.bits - 1)
    high, low = (_magnitude(body, value, fmt) for value in values)
    pair = body.op("and.b32", body.op("mad.lo.u32", high, 1 << step, low), (top - 1) * ((1 << step) + 1))
    for value, place in zip(values, (step, 0), strict=True):
        number = body.op("min.f32", value, f"0f{_INFINITY:08x}")  # which is positive, in the place of NaN
        sign = body.op("shr.u32", number, 32 - fmt.bits - place)
        pair = body.op("lop3.b32", sign, top << place, pair, "0xea")
    body.add(f"cvt.u{_CARRIER.get(to, 16)}.u32 {ins.operands[0]}, {pair}")


def _magnitude(body: Body, value: str, fmt: Narrow) -> str:
    """Code of an f32 without its sign, rounded to nearest even, in the low bits of a word.

    Between neighbouring powers of two the code is a linear function of the magnitude, and everywhere it is the least of
    these functions, since each has half the slope of the one before. So it is the least of their rounded values too.
    Each is a fused multiply-add that also adds 1.5 * 2^23, whose spacing is 1: it rounds once, and the low bits of the
    sum are the code. As integers the sums have the same order, and infinity and NaN are above them all.
    """
    magnitude = body.op("abs.f32", value)
    code = str(_ROUNDER + (1 << (fmt.bits - 1)) - 1)
    for step in range((1 << fmt.exponent) - 1):
        slope = f"0f{(127 + fmt.mantissa - fmt.emin - step) << 23:08x}"
        start = f"0f{_ROUNDER + (step << fmt.mantissa):08x}"
        code = body.op("min.u32", body.op("fma.rn.f32", magnitude, slope, start), code)
    return code


def _to_f8(ins: Instruction, body: Body) -> None:
    """``cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.bf16x2``: widened to f32, which is exact, then Hopper's own."""
    high, low = _floats(ins, body)
    body.add(f"{'.'.join((ins.opcode, *ins.mods[:-1], 'f32'))} {ins.operands[0]}, {high}, {low}")


def _to_half(ins: Instruction, body: Body) -> None:
    """``cvt.rn{.relu}.{f16x2,bf16x2}`` from a pair of narrow or 8-bit floats; every value is exact in both."""
    to, source = types(ins)
    if source in _F8:
        pair = body.op(f"cvt.rn.f16x2.{source}", ins.operands[1])
    else:
        pair = _decode(body, _pair(ins, body), NARROW[source.removesuffix("x2")], 4 if source == "e2m1x2" else 8)
    if ins.has("relu"):
        pair = body.op("max.NaN.f16x2", pair, body.copy("0"))
    if to == "bf16x2":
        low, high = body.new("b16"), body.new("b16")
        body.add(f"mov.b32 {{{low}, {high}}}, {pair}")
        pair = body.op("cvt.rn.bf16x2.f32", body.op("cvt.f32.f16", high), body.op("cvt.f32.f16", low))
    body.add(f"mov.b32 {ins.operands[0]}, {pair}")


def _decode(body: Body, pair: str, fmt: Narrow, step: int) -> str:
    """f16x2 of two codes, the second ``step`` bits above the first."""
    second = body.op("and.b32", body.op("shl.b32", pair, 16 - step), ((1 << fmt.bits) - 1) << 16)
    codes = body.op("lop3.b32", pair, (1 << fmt.bits) - 1, second, "0xea")
    magnitude = (1 << (fmt.bits - 1)) - 1
    moved = body.op(
        "and.b32", body.op("shl.b32", codes, 10 - fmt.mantissa), (magnitude << (10 - fmt.mantissa)) * 0x10001
    )
    bits = body.op("lop3.b32", body.op("shl.b32", codes, 16 - fmt.bits), "0x80008000", moved, "0xea")
    return body.op("mul.rn.f16x2", bits, body.copy(fmt.f16_factor))


def _to_scales(ins: Instruction, body: Body) -> None:
    """``cvt.{rz,rp}{.satfinite}.ue8m0x2.{f32,bf16x2}``: the exponent, with ``.rp`` rounded up. Signs have no effect."""
    codes = []
    for value in _floats(ins, body):
        magnitude = body.op("and.b32", value, "0x7fffffff")
        code = body.op("shr.u32", magnitude, 23)
        if ins.has("rp"):
            above = body.op("shr.u32", body.op("add.u32", magnitude, "0x7fffff"), 23)
            # Below the normal numbers there is one power of two, 2^-127, with code 0.
            is_zero = body.op("setp.le.u32", magnitude, "0x400000", kind="pred")
            code = body.op("selp.b32", 0, above, is_zero)
        code = body.op("min.u32", code, 255)
        if ins.has("satfinite"):
            is_number = body.op("setp.le.u32", magnitude, _INFINITY, kind="pred")
            code = body.op("selp.b32", body.op("min.u32", code, 254), code, is_number)
        codes.append(code)
    pair = body.op("or.b32", body.op("shl.b32", codes[0], 8), codes[1])
    body.add(f"cvt.u16.u32 {ins.operands[0]}, {pair}")


def _from_scales(ins: Instruction, body: Body) -> None:
    """``cvt.rn.bf16x2.ue8m0x2``: the byte is bf16's exponent; code 0 is the subnormal 2^-127, code 255 NaN."""
    pair = _pair(ins, body)
    halves = []
    for shift in (0, 8):
        code = body.op("and.b32", body.op("shr.u32", pair, shift), 255)
        bits = body.op("max.u32", body.op("shl.b32", code, 7), "0x40")
        is_nan = body.op("setp.eq.u32", code, 255, kind="pred")
        halves.append(body.op("selp.b32", "0x7fff", bits, is_nan))
    body.add(f"prmt.b32 {ins.operands[0]}, {halves[0]}, {halves[1]}, 0x5410")


def _floats(ins: Instruction, body: Body) -> tuple[str, str]:
    """The sources as f32: the one for the upper half of the result, then the other."""
    source = types(ins)[1]
    if source == "f32":
        high, low = body.copies(ins.operands[1:])
        return high, low
    pair = body.copy(ins.operands[1])
    if source == "bf16x2":
        return body.op("and.b32", pair, "0xffff0000"), body.op("shl.b32", pair, 16)
    low, high = body.new("b16"), body.new("b16")
    body.add(f"mov.b32 {{{low}, {high}}}, {pair}")
    return body.op("cvt.f32.f16", high), body.op("cvt.f32.f16", low)


def _pair(ins: Instruction, body: Body) -> str:
    """The packed source, in a 32-bit register."""
    return body.op(f"cvt.u32.u{_CARRIER.get(types(ins)[1], 16)}", ins.operands[1])
