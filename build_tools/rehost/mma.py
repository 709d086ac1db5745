"""Expansions of ``mma.sync`` with a ``kind::`` (PTX ISA 9.7.14.5.14): FP4, FP6 and FP8 operands, block scales.

``lane = 4 g + t``. All sums of products start from zero and are added to C in f32: Hopper's f16 MMA truncates its
accumulator, which over a long K would cost more than the instruction's own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from .body import Body
from .errors import RehostError
from .scan import Instruction, vector

_SCALE_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
_DEFAULT_VECTOR = {"kind::mxf8f6f4": 1, "kind::mxf4": 2}
_FP4_KINDS = ("kind::mxf4", "kind::mxf4nvf4")
#: f16x2 of 2^14: what a code standing in f16's lowest exponent bits lacks.
_F16_BIAS = "0x74007400"
#: Container type -> (instructions' operand type, power of two that its bits as that type lack).
_AS_FP8 = {"e4m3": ("e4m3", 0), "e5m2": ("e5m2", 0), "e2m1": ("e4m3", 6), "e2m3": ("e4m3", 6), "e3m2": ("e4m3", 4)}


@dataclass(frozen=True)
class _Scales:
    """One operand's scale register and its selectors, which may be registers."""

    word: str
    byte: str
    thread: str


def has_kind(ins: Instruction) -> bool:
    """Whether the instruction names a kind."""
    return any(mod.startswith("kind::") for mod in ins.mods)


def multiply(ins: Instruction, body: Body) -> None:
    """Any dense m16n8 form with a kind."""
    kind = next(mod for mod in ins.mods if mod.startswith("kind::"))
    named = [count for mod, count in _SCALE_VECTORS.items() if mod in ins.mods]
    blocks = named[0] if named else _DEFAULT_VECTOR.get(kind, 0)
    if kind in _FP4_KINDS and ins.mods[-1] == "ue4m3" and blocks == 4:
        _fp4_e4m3_scales(ins, body)
    elif kind in _FP4_KINDS and ins.mods[-1] == "ue8m0" and blocks in (2, 4):
        _fp4_power_scales(ins, body, blocks)
    elif kind == "kind::mxf8f6f4" and ins.mods[-1] == "ue8m0" and blocks == 1:
        _fp8_power_scales(ins, body)
    elif kind == "kind::f8f6f4" and ins.mods[-1] in ("f32", "f16"):
        _fp8(ins, body)
    else:
        raise RehostError(f"line {ins.line}: no expansion for {ins.name}")


def _fp4_e4m3_scales(ins: Instruction, body: Body) -> None:
    """NVFP4: m16n8k64, e2m1, a ue4m3 scale for 16 values of k.

    Value times scale has at most 6 significant bits and fits f16, so both are multiplied before four m16n8k16 f16 MMAs.
    A register holds 8 values of a row at k = 8t.. (+32 for the upper ones): their scale is byte ``t >> 1`` (+2).
    """
    a, b = (body.copies(vector(ins.operands[i])) for i in (1, 2))
    sfa, sfb = _scale_operands(ins, body)
    lane = body.lane()
    row = _lane_of_row(body, lane, sfa)
    words = [body.shuffle(sfa.word, row), body.shuffle(sfa.word, body.op("or.b32", row, 1))]
    words.append(body.shuffle(sfb.word, body.op("or.b32", body.op("and.b32", lane, 28), sfb.thread)))
    upper_half = body.op("and.b32", body.op("shr.u32", lane, 1), 1)
    first = body.op("mad.lo.u32", upper_half, "0x11", "0x4400")
    selectors = [first, body.op("add.u32", first, "0x22")]
    scales = [[_e4m3_pair(body, word, selector) for selector in selectors] for word in words]
    row0, row8, column = scales
    factors = [row0[0], row8[0], row0[1], row8[1]]
    left = [_scaled(body, _fp4_pairs(body, word), factor) for word, factor in zip(a, factors, strict=True)]
    right = [_scaled(body, _fp4_pairs(body, word), factor) for word, factor in zip(b, column, strict=True)]
    sums = _zeros(body)
    for i in range(4):
        _mma_f16(body, sums, [word[i] for word in left], [word[i] for word in right])
    c = body.copies(vector(ins.operands[3]))
    totals = [body.op("add.rn.f32", value, part) for value, part in zip(c, sums, strict=True)]
    _write(body, ins.operands[0], totals)


def _fp4_power_scales(ins: Instruction, body: Body, blocks: int) -> None:
    """MXFP4: m16n8k64, e2m1, a ue8m0 scale for 32 (or 16) values of k, which multiplies exact partial sums."""
    a, b = (body.copies(vector(ins.operands[i])) for i in (1, 2))
    totals = body.copies(vector(ins.operands[3]))
    scales = _Powers(ins, body)
    left = [_scaled(body, _fp4_pairs(body, word), "") for word in a]
    right = [_scaled(body, _fp4_pairs(body, word), "") for word in b]
    masks = [""]
    if blocks == 4:
        # Lanes t = 0, 1 hold the first 16 values of a half, t = 2, 3 the others: zeros keep one block of the two.
        upper = body.op("shr.s32", body.op("shl.b32", scales.lane, 30), 31)
        masks = [body.op("not.b32", upper), upper]
    for half in range(2):
        for part, mask in enumerate(masks):
            sums = _zeros(body)
            for i in (0, 2):
                rows = [left[2 * half + r][i + k] for k in range(2) for r in range(2)]
                if mask:
                    rows = [body.op("and.b32", word, mask) for word in rows]
                _mma_f16(body, sums, rows, [right[half][i], right[half][i + 1]])
            scales.accumulate(totals, sums, half * len(masks) + part)
    _write(body, ins.operands[0], totals)


def _fp8_power_scales(ins: Instruction, body: Body) -> None:
    """MXFP8, MXFP6, MXFP4 in byte containers: m16n8k32, one ue8m0 scale for 32 values of k."""
    totals = body.copies(vector(ins.operands[3]))
    scales = _Powers(ins, body)
    scales.accumulate(totals, _fp8_sums(ins, body), 0)
    _write(body, ins.operands[0], totals)


def _fp8(ins: Instruction, body: Body) -> None:
    """``kind::f8f6f4`` without scales: m16n8k32, f32 or f16 accumulators."""
    c = body.copies(vector(ins.operands[3]))
    sums = _fp8_sums(ins, body)
    if ins.mods[-1] == "f32":
        _write(body, ins.operands[0], [body.op("add.rn.f32", value, part) for value, part in zip(c, sums, strict=True)])
        return
    packed = []
    for i, pair in enumerate(c):
        halves = [body.new("b16"), body.new("b16")]
        body.add(f"mov.b32 {{{halves[0]}, {halves[1]}}}, {pair}")
        values = [body.op("cvt.f32.f16", half) for half in halves]
        low, high = (body.op("add.rn.f32", value, sums[2 * i + j]) for j, value in enumerate(values))
        packed.append(body.op("cvt.rn.f16x2.f32", high, low))
    _write(body, ins.operands[0], packed)


def _fp8_sums(ins: Instruction, body: Body) -> list[str]:
    """Sums of products over k = 32, with Hopper's FP8 MMA: the shorter formats are e4m3 with other exponents."""
    at = ins.mods.index("f32" if "f32" in ins.mods else "f16")
    operands, names, exponent = [], [], 0
    for i in (1, 2):
        name, lacking = _AS_FP8[ins.mods[at + i]]
        exponent += lacking
        names.append(name)
        operands.append([_container(body, word, ins.mods[at + i]) for word in vector(ins.operands[i])])
    sums = _zeros(body)
    registers = ", ".join(sums)
    body.add(
        f"mma.sync.aligned.m16n8k32.row.col.f32.{names[0]}.{names[1]}.f32 "
        f"{{{registers}}}, {{{', '.join(operands[0])}}}, {{{', '.join(operands[1])}}}, {{{registers}}}"
    )
    if exponent:
        factor = body.copy(f"0x{(127 + exponent) << 23:08x}")
        sums = [body.op("mul.rn.f32", value, factor) for value in sums]
    return sums


def _container(body: Body, word: str, name: str) -> str:
    """Four byte containers as e4m3 (times a power of two), or as they are."""
    if name in ("e4m3", "e5m2"):
        return body.copy(word)
    # e2m1 stands in bits 2 to 5, the FP6 formats in bits 0 to 5; e4m3 wants the sign in bit 7, the mantissa below bit
    # 3.
    magnitude = body.op("and.b32", word, "0x1c1c1c1c" if name == "e2m1" else "0x1f1f1f1f")
    if name == "e3m2":
        magnitude = body.op("shl.b32", magnitude, 1)
    return body.op("lop3.b32", body.op("shl.b32", word, 2), "0x80808080", magnitude, "0xea")


class _Powers:
    """ue8m0 scales of the four accumulators of a lane: rows g and g+8, columns 2t and 2t+1."""

    def __init__(self, ins: Instruction, body: Body) -> None:
        self._body = body
        sfa, sfb = _scale_operands(ins, body)
        self.lane = body.lane()
        row = _lane_of_row(body, self.lane, sfa)
        column = body.op("mad.lo.u32", body.op("and.b32", self.lane, 3), 8, sfb.thread)
        self._rows = [body.shuffle(sfa.word, row), body.shuffle(sfa.word, body.op("or.b32", row, 1))]
        self._columns = [body.shuffle(sfb.word, column), body.shuffle(sfb.word, body.op("add.u32", column, 4))]
        self._first = (sfa.byte, sfb.byte)

    def accumulate(self, totals: list[str], sums: list[str], block: int) -> None:
        """Add ``sums`` times the scales of a block to ``totals``.

        The product of two scales spans 2^-254 to 2^254, more than one f32 factor: it is applied as two factors of half
        the exponent, of which the first cannot over- or underflow unless the whole does.
        """
        body = self._body
        rows = [self._code(word, self._first[0], block) for word in self._rows]
        columns = [self._code(word, self._first[1], block) for word in self._columns]
        for i, value in enumerate(sums):
            (row, row_nan), (column, column_nan) = rows[i >> 1], columns[i & 1]
            exponent = body.op("sub.s32", body.op("add.s32", row, column), 254)
            half = body.op("shr.s32", exponent, 1)
            is_nan = body.op("or.pred", row_nan, column_nan, kind="pred")
            first = body.op("selp.b32", "0x7fffffff", self._power(half), is_nan)
            scaled = body.op("mul.rn.f32", value, first)
            other = self._power(body.op("sub.s32", exponent, half))
            totals[i] = body.op("fma.rn.f32", scaled, other, totals[i])

    def _code(self, word: str, first: str, block: int) -> tuple[str, str]:
        body = self._body
        shift = body.op("mad.lo.u32", first, 8, 8 * block)
        code = body.op("and.b32", body.op("shr.u32", word, shift), 255)
        return code, body.op("setp.eq.u32", code, 255, kind="pred")

    def _power(self, exponent: str) -> str:
        """2^exponent in f32, for -127 to 127."""
        body = self._body
        bits = body.op("shl.b32", body.op("add.s32", exponent, 127), 23)
        return body.op("max.u32", bits, "0x400000")


def _scale_operands(ins: Instruction, body: Body) -> tuple[_Scales, _Scales]:
    """``scale-a, {byte-a, thread-a}, scale-b, {byte-b, thread-b}``."""
    found = []
    for word, selectors in (ins.operands[4:6], ins.operands[6:8]):
        ids = vector(selectors)
        if len(ids) != 2:
            raise RehostError(f"line {ins.line}: {ins.name}: {selectors!r} is not a byte and a thread selector")
        # Selectors are 16-bit registers or literals.
        byte, thread = (body.copy(i) if i.isdigit() else body.op("cvt.u32.u16", i) for i in ids)
        found.append(_Scales(body.copy(vector(word)[0]), byte, thread))
    return found[0], found[1]


def _lane_of_row(body: Body, lane: str, scales: _Scales) -> str:
    """The lane that holds row g's scales of A; the next one holds row g+8's."""
    return body.op("mad.lo.u32", scales.thread, 2, body.op("and.b32", lane, 28))


def _e4m3_pair(body: Body, word: str, selector: str) -> str:
    """f16x2 with the chosen byte, a ue4m3, in both halves. Its sign bit has no meaning."""
    twice = body.op("and.b32", body.op("prmt.b32", word, 0, selector), "0x7f7f")
    return body.op("cvt.rn.f16x2.e4m3x2", body.op("cvt.u16.u32", twice, kind="b16"))


def _fp4_pairs(body: Body, word: str) -> list[str]:
    """f16x2 registers of values (0, 4), (1, 5), (2, 6), (3, 7) of 8 e2m1 codes, times 2^-14.

    Which k an MMA sees in which place does not matter as long as A and B agree. The magnitude's bits go to the top of
    the mantissa and the bottom of the exponent, where subnormals come out right by themselves.
    """
    pairs = []
    for i in range(4):
        placed = body.op("shl.b32", word, 12 - 4 * i) if i < 3 else word
        magnitude = body.op("and.b32", body.op("shr.u32", placed, 3), "0x0e000e00")
        pairs.append(body.op("lop3.b32", placed, "0x80008000", magnitude, "0xea"))
    return pairs


def _scaled(body: Body, pairs: list[str], factor: str) -> list[str]:
    """The values themselves, times a factor if there is one; every product is exact."""
    bias = body.copy(_F16_BIAS)
    values = [body.op("mul.rn.f16x2", pair, bias) for pair in pairs]
    return [body.op("mul.rn.f16x2", value, factor) for value in values] if factor else values


def _zeros(body: Body) -> list[str]:
    return [body.copy("0") for _ in range(4)]


def _mma_f16(body: Body, sums: list[str], a: list[str], b: list[str]) -> None:
    registers = ", ".join(sums)
    body.add(
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        f"{{{registers}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{registers}}}"
    )


def _write(body: Body, destination: str, values: list[str]) -> None:
    for register, value in zip(vector(destination), values, strict=True):
        body.add(f"mov.b32 {register}, {value}")
