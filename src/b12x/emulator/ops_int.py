"""Integer, bit and logic instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import TYPES, Decoder, Mods, Op, Rule, Source, Type, decoder
from .machine import Group
from .parse import Imm, Instr

Array = NDArray[Any]
INT_TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")
PACKED_INT = ("u16x2", "s16x2")
BIT_TYPES = ("pred", "b16", "b32", "b64")


def wider(t: Type) -> Type:
    """The type of a ``.wide`` result."""
    return TYPES[f"{t.name[0]}{t.bits * 2}"]


def saturate_s32(value: Array) -> Array:
    return np.clip(value, -(2**31), 2**31 - 1).astype(np.int32)


def mul_hi(t: Type) -> Callable[[Array, Array], Array]:
    """Upper half of a product."""
    if t.bits < 64:
        wide = wider(t).dtype
        shift = wide(t.bits)

        def narrow(a: Array, b: Array) -> Array:
            result: Array = ((a.astype(wide) * b.astype(wide)) >> shift).astype(t.dtype)
            return result

        return narrow

    def unsigned(a: Array, b: Array) -> Array:
        low, s32 = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low, a >> s32, b & low, b >> s32
        mid = a1 * b0 + ((a0 * b0) >> s32)
        mid2 = a0 * b1 + (mid & low)
        result: Array = a1 * b1 + (mid >> s32) + (mid2 >> s32)
        return result

    if t.kind == "u":
        return unsigned

    def signed(a: Array, b: Array) -> Array:
        ua, ub = a.view(np.uint64), b.view(np.uint64)
        hi = unsigned(ua, ub).view(np.int64)
        return hi - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)

    return signed


def divide(t: Type) -> Callable[[Array, Array], Array]:
    """Integer quotient truncated towards zero; division by zero gives all ones."""

    def fn(a: Array, b: Array) -> Array:
        zero = b == 0
        safe = np.where(zero, t.dtype(1), b)
        if t.kind == "u":
            q = a // safe
        else:
            q = np.where((a < 0) != (safe < 0), -(np.abs(a) // np.abs(safe)), np.abs(a) // np.abs(safe)).astype(t.dtype)
            low = np.iinfo(t.dtype).min
            exact = (a == low) | (safe == low)
            if exact.any():
                pairs = [(int(x), int(y)) for x, y in zip(a[exact], safe[exact], strict=True)]
                wide = [abs(x) // abs(y) if (x < 0) == (y < 0) else -(abs(x) // abs(y)) for x, y in pairs]
                bits = np.array([w & (2**t.bits - 1) for w in wide], np.dtype(f"u{t.bits // 8}"))
                q[exact] = bits.view(t.dtype)
        return np.where(zero, t.dtype(-1) if t.kind == "s" else np.iinfo(t.dtype).max, q).astype(t.dtype)

    return fn


def remainder(t: Type) -> Callable[[Array, Array], Array]:
    """Remainder with the sign of the dividend; by zero it is the dividend."""
    quotient = divide(t)
    return lambda a, b: np.where(b == 0, a, a - quotient(a, b) * b).astype(t.dtype)


def int_binary(d: Decoder, mods: Mods, t: Type, fn: Any, ufunc: bool) -> Op:
    dst, a, b = d.operands(3)
    return d.alu(d.dst(dst, t), [d.src(a, t), d.src(b, t)], fn, ufunc=ufunc)


def int_add(d: Decoder, ins: Instr, mods: Mods, t: Type) -> Op:
    """add/sub (9.7.1.1, 9.7.1.2)."""
    op = np.add if ins.opcode == "add" else np.subtract
    if mods.flag("sat"):
        return int_binary(d, mods, t, lambda a, b: saturate_s32(op(a, b, dtype=np.int64)), False)
    return int_binary(d, mods, t, op, True)


def int_mul(d: Decoder, ins: Instr, mods: Mods, t: Type) -> Op:
    """mul/mad (9.7.1.3, 9.7.1.4)."""
    part = mods.choice("lo", "hi", "wide")
    mad = ins.opcode == "mad"
    operands = d.operands(4 if mad else 3)
    sat = mods.flag("sat")
    out = wider(t) if part == "wide" else t
    srcs = [d.src(operands[1], t), d.src(operands[2], t)]
    if mad:
        srcs.append(d.src(operands[3], out))
    dst = d.dst(operands[0], out)
    if part == "lo":
        if not mad:
            return d.alu(dst, srcs, np.multiply, ufunc=True)
        return d.alu(dst, srcs, lambda a, b, c: a * b + c)
    if part == "wide":
        wide = out.dtype
        if not mad:
            return d.alu(dst, srcs, lambda a, b: np.multiply(a, b, dtype=wide))
        return d.alu(dst, srcs, lambda a, b, c: np.multiply(a, b, dtype=wide) + c)
    if part != "hi":
        raise d.fail("mul without .lo, .hi or .wide")
    hi = mul_hi(t)
    if not mad:
        return d.alu(dst, srcs, hi)
    if sat:
        return d.alu(dst, srcs, lambda a, b, c: saturate_s32(hi(a, b).astype(np.int64) + c))
    return d.alu(dst, srcs, lambda a, b, c: hi(a, b) + c)


@decoder("mul24", "mad24")
def mul24(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mul24/mad24 (9.7.1.5, 9.7.1.6)."""
    part = mods.choice("lo", "hi")
    t = mods.type("u32", "s32")
    drop = 0 if part == "lo" else 16
    wide = np.int64 if t.kind == "s" else np.uint64

    def fn(a: Array, b: Array, *c: Array) -> Array:
        eight = t.dtype(8)
        product = ((a << eight) >> eight).astype(wide) * ((b << eight) >> eight).astype(wide) >> wide(drop)
        out = product.astype(np.uint32).view(t.dtype)
        result: Array = out + c[0] if c else out
        return result

    operands = d.operands(4 if ins.opcode == "mad24" else 3)
    return d.alu(d.dst(operands[0], t), [d.src(o, t) for o in operands[1:]], fn)


@decoder("sad")
def sad(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """sad (9.7.1.7)."""
    t = mods.type(*INT_TYPES)
    dst, a, b, c = d.operands(4)
    return d.alu(
        d.dst(dst, t),
        [d.src(x, t) for x in (a, b, c)],
        lambda a, b, c: c + np.where(a < b, b - a, a - b).astype(t.dtype),
    )


@decoder("rem")
def rem(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """rem (9.7.1.9)."""
    t = mods.type(*INT_TYPES)
    return int_binary(d, mods, t, remainder(t), False)


@decoder("dp4a")
def dp4a(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """dp4a (9.7.1.23): four byte products added to c."""
    ta, tb = mods.type("u32", "s32"), mods.type("u32", "s32")
    dst, a, b, c = d.operands(4)
    out = TYPES["s32" if "s32" in (ta.name, tb.name) else "u32"]

    def parts(x: Array, t: Type) -> Array:
        raw = np.ascontiguousarray(x).view(np.int8 if t.kind == "s" else np.uint8)
        return raw.reshape(*x.shape, 4).astype(np.int64)

    return d.alu(
        d.dst(dst, out),
        [d.src(a, ta), d.src(b, tb), d.src(c, out)],
        lambda a, b, c: ((parts(a, ta) * parts(b, tb)).sum(-1) + c).astype(np.uint64).astype(np.uint32).view(out.dtype),
    )


def _carry_in(d: Decoder) -> Source:
    return Source(d.launch_value(0, "carry", None), TYPES["pred"])


@decoder("addc", "subc")
def add_carry(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """addc/subc (9.7.2): with the condition code of the last ``.cc``."""
    return carry_op(d, ins, mods, True)


def carry_op(d: Decoder, ins: Instr, mods: Mods, use: bool) -> Op:
    """add.cc, addc, sub.cc, subc: extended-precision arithmetic on 32 and 64 bits."""
    produce = mods.flag("cc")
    t = mods.type("u32", "s32", "u64", "s64")
    u = TYPES[f"u{t.bits}"]
    dst, a, b = d.operands(3)
    sub = ins.opcode.startswith("sub")
    carry = _carry_in(d)
    out = d.dst(dst, u)
    sa, sb = d.src(a, u), d.src(b, u)
    one = u.dtype(1)

    def run(g: Group) -> None:
        x, y = sa.get(g), sb.get(g)
        cin = carry.get(g).astype(u.dtype) if use else u.dtype(0)
        if sub:
            y, cin = ~y, (one - cin if use else one)
        first = x + y
        total = first + cin
        flag = (first < x) | (total < first)
        out.put(g, total)
        if produce:
            g.put(carry.get(g), ~flag if sub else flag)

    srcs = (sa.rid, sb.rid, carry.rid) if use else (sa.rid, sb.rid)
    dests = [out]
    if produce:
        from .decode import Dest, spread

        dests.append(Dest(carry.rid, TYPES["pred"]))
    else:
        from .decode import spread
    return d.pure(ins, run, srcs, dests, spread([sa, sb, carry] if use else [sa, sb], dests))


# Logic and shifts: taint moves bit by bit.


def logic_rule(name: str, a: Source, b: Source) -> Rule:
    """Tainted bits of and/or/xor: a known 0 (or 1) hides the other side's taint."""

    def rule(g: Group) -> Sequence[Array]:
        ta, tb = a.shadow(g), b.shadow(g)
        if name == "xor":
            return [ta | tb]
        va, vb = a.get(g), b.get(g)
        if name == "or":
            va, vb = ~va, ~vb
        return [(ta & tb) | (ta & vb) | (tb & va)]

    return rule


@decoder("and", "or", "xor")
def logic(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """and/or/xor (9.7.8.1 to 9.7.8.3)."""
    t = mods.type(*BIT_TYPES)
    dst, a, b = d.operands(3)
    fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.opcode]
    sa, sb = d.src(a, t), d.src(b, t)
    return d.alu(d.dst(dst, t), [sa, sb], fn, ufunc=True, rule=logic_rule(ins.opcode, sa, sb))


@decoder("not")
def invert(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """not (9.7.8.4)."""
    t = mods.type(*BIT_TYPES)
    dst, a = d.operands(2)
    sa = d.src(a, t)
    return d.alu(d.dst(dst, t), [sa], np.invert, ufunc=True, rule=lambda g: [sa.shadow(g)])


@decoder("cnot")
def cnot(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cnot (9.7.8.5)."""
    t = mods.type("b16", "b32", "b64")
    dst, a = d.operands(2)
    return d.alu(d.dst(dst, t), [d.src(a, t)], lambda a: (a == 0).astype(t.dtype))


@decoder("shl", "shr")
def shift(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """shl/shr (9.7.8.7, 9.7.8.8): amounts clamp at the width."""
    left = ins.opcode == "shl"
    t = mods.type("b16", "b32", "b64") if left else mods.type("b16", "b32", "b64", *INT_TYPES)
    fn = np.left_shift if left else np.right_shift
    dst, a, b = d.operands(3)
    sa = d.src(a, t)
    if t.bits == 32:
        # numpy shifts as PTX does: by the unsigned amount, clamped
        sb = d.src(b, t if t.kind == "s" else TYPES["u32"])
    else:
        sb = d.src(b, TYPES["u32"])

    def rule(g: Group) -> Sequence[Array]:
        amount = sb.get(g).view(np.uint32)
        bits = sa.shadow(g)
        if t.kind == "s":
            bits = bits.view(t.dtype)
        moved = fn(bits, np.minimum(amount, 255).astype(bits.dtype)).view(sa.shadow(g).dtype)
        if sb.rid in g.cta.tainted:
            moved = np.where(g.shadow(sb.rid) != 0, ~moved.dtype.type(0), moved)
        return [moved]

    if t.bits == 32:
        return d.alu(d.dst(dst, t), [sa, sb], fn, ufunc=True, rule=rule)
    return d.alu(d.dst(dst, t), [sa, sb], lambda a, b: fn(a, np.minimum(b, 255).astype(t.dtype)), rule=rule)


@decoder("shf")
def funnel(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """shf (9.7.8.6): funnel shift of the 64-bit value {b, a}."""
    left = mods.choice("l", "r")
    wrap = mods.choice("wrap", "clamp")
    if not left or not wrap:
        raise d.fail("shf needs a direction and a mode")
    t = mods.type("b32")
    dst, a, b, c = d.operands(4)
    sa, sb, sc = d.src(a, t), d.src(b, t), d.src(c, TYPES["u32"])

    def fn(lo: Array, hi: Array, c: Array) -> Array:
        n = (c & np.uint32(31)) if wrap == "wrap" else np.minimum(c, np.uint32(32))
        both = (hi.astype(np.uint64) << np.uint64(32)) | lo
        moved = (both << n.astype(np.uint64)) >> np.uint64(32) if left == "l" else both >> n.astype(np.uint64)
        result: Array = moved.astype(np.uint32)
        return result

    def rule(g: Group) -> Sequence[Array]:
        bits = fn(sa.shadow(g), sb.shadow(g), sc.get(g))
        return [np.where(sc.shadow(g) != 0, np.uint32(0xFFFFFFFF), bits)]

    return d.alu(d.dst(dst, t), [sa, sb, sc], fn, rule=rule)


@decoder("lop3")
def lop3(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """lop3 (9.7.8.5): any function of three bits."""
    t = mods.type("b32")
    dst, a, b, c, lut = d.operands(5)
    if not isinstance(lut, Imm):
        raise d.fail("the table is not an immediate")
    table = lut.value & 0xFF
    srcs = [d.src(x, t) for x in (a, b, c)]

    def fn(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros_like(a)
        for k in range(8):
            if table >> k & 1:
                out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return out

    def rule(g: Group) -> Sequence[Array]:
        # a result bit is tainted if it can change with the tainted inputs
        values = [s.get(g) for s in srcs]
        shadows = [s.shadow(g) for s in srcs]
        can_be_one = can_be_zero = np.zeros_like(shadows[0])
        for k in range(8):
            reach = ~np.zeros_like(shadows[0])
            for v, s, bit in zip(values, shadows, (4, 2, 1), strict=True):
                reach = reach & (s | (v if k & bit else ~v))
            if table >> k & 1:
                can_be_one = can_be_one | reach
            else:
                can_be_zero = can_be_zero | reach
        return [can_be_one & can_be_zero]

    return d.alu(d.dst(dst, t), srcs, fn, rule=rule)


_PRMT_MODES: dict[str, Callable[[int], list[int]]] = {
    "f4e": lambda s: [s, s + 1, s + 2, s + 3],
    "b4e": lambda s: [s, (s - 1) & 7, (s - 2) & 7, (s - 3) & 7],
    "rc8": lambda s: [s] * 4,
    "ecl": lambda s: [max(s, 0), max(s, 1), max(s, 2), 3],
    "ecr": lambda s: [0, min(s, 1), min(s, 2), min(s, 3)],
    "rc16": lambda s: [2 * (s & 1), 2 * (s & 1) + 1] * 2,
}


@decoder("prmt")
def prmt(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """prmt (9.7.9.7): picks four of eight bytes; selector bit 3 replicates the byte's sign."""
    t = mods.type("b32")
    mode = mods.choice(*_PRMT_MODES)
    dst, a, b, c = d.operands(4)
    sa, sb, sc = d.src(a, t), d.src(b, t), d.src(c, t)
    if mode:
        of = _PRMT_MODES[mode]
        selectors = np.array(
            [sum((v & 7) << (4 * i) for i, v in enumerate(of(s))) for s in range(8 if "4e" in mode else 4)]
        )

    def fn(a: Array, b: Array, c: Array) -> Array:
        pool = (b.astype(np.uint64) << np.uint64(32)) | a
        if mode:
            c = selectors[c & np.uint32(len(selectors) - 1)].astype(np.uint32)
        out = np.zeros_like(a)
        for i in range(4):
            s = c >> np.uint32(4 * i)
            byte = (pool >> ((s & np.uint32(7)) << np.uint32(3)).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            out |= np.where(s & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return out

    def rule(g: Group) -> Sequence[Array]:
        return [np.where(sc.shadow(g) != 0, np.uint32(0xFFFFFFFF), fn(sa.shadow(g), sb.shadow(g), sc.get(g)))]

    return d.alu(d.dst(dst, t), [sa, sb, sc], fn, rule=rule)


@decoder("bfe")
def bfe(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bfe (9.7.1.19)."""
    t = mods.type("u32", "u64", "s32", "s64")
    dst, a, b, c = d.operands(4)
    u = np.uint64
    top = u(t.bits - 1)

    def field(a: Array, b: Array, c: Array, signed: bool) -> Array:
        pos, length = (b & np.uint32(0xFF)).astype(u), (c & np.uint32(0xFF)).astype(u)
        raw = a.view(np.dtype(f"u{t.bits // 8}")).astype(u)
        mask = np.where(length >= u(64), ~u(0), (u(1) << length) - u(1))
        out = np.where(pos > top, u(0), raw >> pos) & mask
        if signed:
            last = np.minimum(pos + length - u(1), top)
            sign = np.where(length == u(0), u(0), (raw >> last) & u(1)).astype(bool)
            # bits above the field, and those beyond the register, take the sign
            have = np.where(pos > top, u(0), np.minimum(length, u(t.bits) - np.minimum(pos, u(t.bits))))
            low = np.where(have >= u(64), ~u(0), (u(1) << have) - u(1))
            out = np.where(sign, out | ~low, out)
        result: Array = out.astype(np.dtype(f"u{t.bits // 8}")).view(t.dtype)
        return result

    sa, sb, sc = d.src(a, t), d.src(b, TYPES["u32"]), d.src(c, TYPES["u32"])

    def rule(g: Group) -> Sequence[Array]:
        ubits = np.dtype(f"u{t.bits // 8}")
        bits = field(sa.shadow(g).view(t.dtype), sb.get(g), sc.get(g), t.kind == "s").view(ubits)
        wild = (sb.shadow(g) | sc.shadow(g)) != 0
        return [np.where(wild, ~ubits.type(0), bits)]

    return d.alu(d.dst(dst, t), [sa, sb, sc], lambda a, b, c: field(a, b, c, t.kind == "s"), rule=rule)


@decoder("bfi")
def bfi(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bfi (9.7.1.20): the low bits of a over a field of b."""
    t = mods.type("b32", "b64")
    dst, a, b, c, e = d.operands(5)
    u = np.uint64

    def fn(a: Array, b: Array, c: Array, e: Array) -> Array:
        pos, length = (c & np.uint32(0xFF)).astype(u), (e & np.uint32(0xFF)).astype(u)
        mask = np.where(length >= u(64), ~u(0), (u(1) << length) - u(1)) << pos
        mask = np.where(pos >= u(64), u(0), mask)
        result: Array = ((b.astype(u) & ~mask) | ((a.astype(u) << pos) & mask)).astype(t.dtype)
        return result

    srcs = [d.src(a, t), d.src(b, t), d.src(c, TYPES["u32"]), d.src(e, TYPES["u32"])]

    def rule(g: Group) -> Sequence[Array]:
        bits = fn(srcs[0].shadow(g), srcs[1].shadow(g), srcs[2].get(g), srcs[3].get(g))
        wild = (srcs[2].shadow(g) | srcs[3].shadow(g)) != 0
        return [np.where(wild, ~t.dtype(0), bits)]

    return d.alu(d.dst(dst, t), srcs, fn, rule=rule)


def _bit_length(x: Array) -> Array:
    """Position of the highest set bit plus one."""
    out = np.zeros(x.shape, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        if step >= x.dtype.itemsize * 8:
            continue
        big = (x >> x.dtype.type(step)) != 0
        out += np.where(big, np.uint32(step), np.uint32(0))
        x = np.where(big, x >> x.dtype.type(step), x)
    result: Array = out + (x != 0).astype(np.uint32)
    return result


@decoder("popc", "clz")
def count_bits(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """popc/clz (9.7.1.14, 9.7.1.15)."""
    t = mods.type("b32", "b64")
    dst, a = d.operands(2)
    if ins.opcode == "popc":
        return d.alu(d.dst(dst, TYPES["u32"]), [d.src(a, t)], lambda a: np.bitwise_count(a).astype(np.uint32))
    return d.alu(d.dst(dst, TYPES["u32"]), [d.src(a, t)], lambda a: np.uint32(t.bits) - _bit_length(a))


@decoder("bfind")
def bfind(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bfind (9.7.1.16): the highest bit that differs from the sign."""
    amount = mods.flag("shiftamt")
    t = mods.type("u32", "u64", "s32", "s64")
    dst, a = d.operands(2)

    def fn(a: Array) -> Array:
        x = np.where(a < 0, ~a, a).astype(t.dtype).view(np.dtype(f"u{t.bits // 8}"))
        pos = _bit_length(x) - np.uint32(1)
        result: Array = np.where(pos == np.uint32(0xFFFFFFFF), pos, np.uint32(t.bits - 1) - pos) if amount else pos
        return result

    return d.alu(d.dst(dst, TYPES["u32"]), [d.src(a, t)], fn)


@decoder("brev")
def brev(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """brev (9.7.1.18)."""
    t = mods.type("b32", "b64")
    dst, a = d.operands(2)
    table = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)

    def fn(a: Array) -> Array:
        raw = np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, t.bits // 8)
        result: Array = np.ascontiguousarray(table[raw][..., ::-1]).view(t.dtype).reshape(a.shape)
        return result

    sa = d.src(a, t)
    return d.alu(d.dst(dst, t), [sa], fn, rule=lambda g: [fn(sa.shadow(g))])


@decoder("bmsk")
def bmsk(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bmsk (9.7.1.22): ``width`` ones from bit ``position``."""
    mode = mods.choice("clamp", "wrap")
    t = mods.type("b32")
    dst, a, b = d.operands(3)

    def fn(a: Array, b: Array) -> Array:
        if mode == "wrap":
            a, b = a & np.uint32(31), b & np.uint32(31)
        u = np.uint64
        start, end = np.minimum(a, 32).astype(u), np.minimum(a.astype(u) + b, u(32))
        result: Array = (((u(1) << end) - u(1)) & ~((u(1) << start) - u(1))).astype(np.uint32)
        return result

    return d.alu(d.dst(dst, t), [d.src(a, t), d.src(b, t)], fn)
