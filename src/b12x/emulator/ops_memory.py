"""Loads, stores, atomics and matrix loads (PTX ISA 9.7.9.8 to 9.7.9.14, 9.7.13.5, 9.7.13.6, 9.7.14.5.15 to .17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .access import SHARED_SPACES, Access, address, expand
from .decode import TYPES, Decoder, Dest, Mods, Op, Source, Type, decoder
from .machine import W32, Group
from .memory import RANK_SHIFT, check_alignment
from .observe import lanes
from .ops_int import BIT_TYPES, INT_TYPES
from .parse import Address, Instr, Operand, Symbol, Vector

Array = NDArray[Any]

SPACES = ("global", *SHARED_SPACES, "param", "param::entry", "const", "local")
MEMORY_TYPES = ("b8", "u8", "s8", *BIT_TYPES[1:], *INT_TYPES, "f32", "f64")
SCOPES = ("cta", "cluster", "gpu", "sys")
STRONG = {
    "ld": ("relaxed", "acquire", "volatile", "mmio"), "st": ("relaxed", "release", "volatile", "mmio"),
}  # fmt: skip
CACHE_OPERATORS = {"ld": ("ca", "cg", "cs", "lu", "cv", "nc", "unified"), "st": ("wb", "cg", "cs", "wt")}
CACHE = (
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
    "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B",
    "L2::256B",
)  # fmt: skip


def memory_form(d: Decoder, mods: Mods) -> tuple[str, Type, int, bool, bool]:
    """(state space, element type, vector length, whether a cache policy operand follows, whether it is strong)."""
    opcode = d.ins.opcode
    strong = bool(mods.choice(*STRONG[opcode]))
    if strong:
        mods.flag("relaxed", *SCOPES)  # .mmio.relaxed
    else:
        mods.flag("weak")
    space = mods.choice(*(SPACES if opcode == "ld" else ("global", *SHARED_SPACES, "local")))
    mods.flag(*CACHE_OPERATORS[opcode])
    mods.flag(*CACHE)
    hint = mods.flag("L2::cache_hint")
    vec = int(mods.choice("v2", "v4", "v8", default="v1")[1:])
    t = mods.type(*MEMORY_TYPES)
    if t.bits * vec > 256:
        raise d.fail("access width")
    return space, t, vec, hint, strong


def items_of(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def raw(t: Type) -> Any:
    return np.dtype(f"u{t.bits // 8}")


def deliver(g: Group, dsts: Sequence[Dest], data: Array, bits: Array | None, origin: str, t: Type) -> None:
    """Loaded items to registers, with their taint."""
    cta = g.cta
    count = len(dsts)
    parts = data.view(raw(t)).reshape(-1, count)
    for k, dst in enumerate(dsts):
        dst.put(g, expand(g, parts[:, k]))
    if bits is not None:
        shadows = bits.view(raw(t)).reshape(-1, count)
        for k, dst in enumerate(dsts):
            cta.set_shadow(g, dst.rid, dst.widen(expand(g, shadows[:, k])), origin)
    elif cta.tainted:
        for dst in dsts:
            if dst.rid in cta.tainted:
                cta.clear_shadow(g, dst.rid)


@decoder("ld")
def load(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """ld (9.7.9.8), ld.global.nc (9.7.9.9)."""
    space, t, vec, hint, strong = memory_form(d, mods)
    operands = d.operands(3 if hint else 2)
    if hint:
        d.src(operands[2], TYPES["u64"])
    if t.kind != "s":
        t = TYPES[f"b{t.bits}"]
    dsts = [d.dst(o, t) for o in items_of(operands[0])]
    if len(dsts) != vec:
        raise d.fail("vector length")
    if space.startswith("param") and isinstance(operands[1], Address) and isinstance(operands[1].base, Symbol):
        return load_param(d, ins, t, dsts, operands[1])
    addr, srcs = address(d, operands[1], space)
    access = Access(ins, space, d.touches(space, t.bits // 8 * vec), False, strong)

    def run(g: Group) -> None:
        data, bits, origin = access.load(g, g.pick(addr(g)))
        deliver(g, dsts, data, bits, origin, t)

    op = d.effect(ins, run, srcs, "address")
    op.dsts = tuple(x.rid for x in dsts)
    return op


def load_param(d: Decoder, ins: Instr, t: Type, dsts: Sequence[Dest], where: Address) -> Op:
    """A parameter at a known place is a row of the register file, filled at launch."""
    assert isinstance(where.base, Symbol)
    base = d.param(where.base) + where.offset
    size = t.bits // 8
    if base < 0 or base + size * len(dsts) > d.entry.param_bytes:
        raise d.fail("outside the parameters")
    cls = {1: 1, 2: 1, 4: 2, 8: 3}[size]
    srcs = [Source(d.launch_value(cls, "param", (base + k * size, size)), t) for k in range(len(dsts))]
    pairs = list(zip(dsts, srcs, strict=True))

    def run(g: Group) -> None:
        for dst, src in pairs:
            dst.put(g, src.get(g))

    return d.pure(ins, run, (), dsts, lambda g: [])


@decoder("st")
def store(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """st (9.7.9.11), st.async (9.7.9.12)."""
    if mods.flag("async"):
        from .ops_async import to_peer

        return to_peer(d, ins, mods, reduce=False)
    space, t, vec, hint, strong = memory_form(d, mods)
    operands = d.operands(3 if hint else 2)
    if hint:
        d.src(operands[2], TYPES["u64"])
    addr, base = address(d, operands[0], space)
    bits_type = TYPES[f"b{t.bits}"]
    srcs = [d.src(o, bits_type) for o in items_of(operands[1])]
    if len(srcs) != vec or space.startswith(("param", "const")):
        raise d.fail("store form")
    size = d.touches(space, t.bits // 8 * vec)
    access = Access(ins, space, size, True, strong)
    item = raw(t)
    unit = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(size, "c16")

    def gather(g: Group, get: Callable[[Source], Array], count: int) -> Array:
        if vec == 1:
            return g.pick(get(srcs[0]))
        out = np.empty((count, vec), item)
        for k, s in enumerate(srcs):
            out[:, k] = g.pick(get(s))
        packed = out.view(unit)
        return packed if size == 32 else packed[:, 0]

    def run(g: Group) -> None:
        a = g.pick(addr(g))
        access.store(g, a, gather(g, lambda s: s.get(g), a.size), None)

    def checked(g: Group) -> None:
        cta = g.cta
        cta.refuse(g, ins, base, "address")
        first = next((s.rid for s in srcs if s.rid in cta.tainted), None)
        if first is None:
            run(g)
            return
        a = g.pick(addr(g))
        bits = gather(g, lambda s: s.shadow(g), a.size)
        access.store(g, a, gather(g, lambda s: s.get(g), a.size), bits, cta.origin[first])

    return Op(ins, run, checked, (*base, *(s.rid for s in srcs)), pure=False)


# Atomics run lane by lane in lane order: any order is allowed, and a fixed one makes runs repeatable.

BITWISE, ORDERED = ("b32", "b64"), ("u32", "s32", "u64", "s64")
ATOMIC_TYPES = {
    "and": BITWISE, "or": BITWISE, "xor": BITWISE, "exch": BITWISE, "cas": ("b16", *BITWISE), "inc": ("u32",),
    "dec": ("u32",), "min": ORDERED, "max": ORDERED,
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"),
}  # fmt: skip
ATOMIC_VECTORS = ("f32", "f16", "f16x2", "bf16", "bf16x2")
Combine = Callable[[Array, Array, Array], Array]


def combine(d: Decoder, op: str, t: Type) -> Combine:
    """The new value from (old, b, c)."""
    if t.kind == "bf" or t.name in ("f16", "f16x2"):
        if op not in ("add", "min", "max"):
            raise d.fail("operation")

        def packed(old: Array, b: Array, c: Array) -> Array:
            x, y = (num.bf16_to_f32(old), num.bf16_to_f32(b)) if t.kind == "bf" else (old, b)
            r: Array = x + y if op == "add" else num.minimum(x, y, False) if op == "min" else num.maximum(x, y, False)
            return num.f32_to_bf16(r) if t.kind == "bf" else r

        return packed
    table: dict[str, Combine] = {
        "add": lambda old, b, c: old + b,
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: np.where(old == b, c, old),
        "min": lambda old, b, c: np.minimum(old, b),
        "max": lambda old, b, c: np.maximum(old, b),
        "inc": lambda old, b, c: np.where(old >= b, t.dtype(0), old + t.dtype(1)),
        "dec": lambda old, b, c: np.where((old == 0) | (old > b), b, old - t.dtype(1)),
    }
    return table[op]


@decoder("atom", "red")
def atomic(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """atom/red (9.7.13.5, 9.7.13.6), scalar and .v2/.v4/.v8; red.async (9.7.13.7)."""
    if ins.opcode == "red" and mods.flag("async"):
        from .ops_async import to_peer

        return to_peer(d, ins, mods, reduce=True)
    red = ins.opcode == "red"
    mods.choice(*(("relaxed", "release") if red else ("relaxed", "acquire", "release", "acq_rel")))
    mods.flag(*SCOPES)
    space = mods.choice("global", *SHARED_SPACES)
    op = mods.choice("add", "and", "or", "xor", "min", "max", "inc", "dec", *(() if red else ("exch", "cas")))
    mods.flag("noftz")
    hint = mods.flag("L2::cache_hint")
    vec = int(mods.choice("v2", "v4", "v8", default="v1")[1:])
    if not op:
        raise d.fail("operation")
    t = mods.type(*(ATOMIC_TYPES[op] if vec == 1 else ATOMIC_VECTORS if op == "add" else ATOMIC_VECTORS[1:]))
    if vec > 1 and (space not in ("global", "") or op not in ("add", "min", "max") or t.bits * vec > 128):
        raise d.fail("vector form")
    fn = combine(d, op, t)
    operands = list(ins.operands)
    if hint:
        d.src(operands.pop(), TYPES["u64"])
    dsts: list[Dest] = []
    if ins.opcode == "atom":
        dsts = [d.dst(o, TYPES[f"b{t.bits}"]) for o in items_of(operands.pop(0))]
    addr, base = address(d, operands.pop(0), space)
    bits_type = TYPES[f"b{t.bits}"]
    values = [[d.src(o, bits_type) for o in items_of(x)] for x in operands]
    if len(values) != (2 if op == "cas" else 1) or any(len(v) != vec for v in values):
        raise d.fail("operands")
    size = d.touches(space, t.bits // 8 * vec)
    access = Access(ins, space, size, True, strong=True, atomic=True)
    unit = raw(t)
    rids = tuple(s.rid for v in values for s in v)

    def run(g: Group) -> None:
        a = g.pick(addr(g))
        args = [np.stack([g.pick(s.get(g)) for s in v], axis=1) for v in values]
        old = np.zeros((a.size, vec), unit)
        bits = np.zeros_like(old)
        origin = ""
        places = np.flatnonzero(g.active())
        old_mask = g.mask
        for lane in range(a.size):
            one = a[lane : lane + 1]
            g.mask = np.zeros((g.n, 32), bool)
            g.mask.flat[places[lane]] = True
            data, shadow, why = access.load(g, one)
            before = np.ascontiguousarray(data).view(unit)
            operand = [np.ascontiguousarray(x[lane]).view(t.dtype) for x in args]
            after = fn(before.view(t.dtype).reshape(-1), operand[0], operand[-1])
            item = np.ascontiguousarray(np.asarray(after, t.dtype)).view(data.dtype)
            g.cta.stores += bool((item.reshape(-1).view(np.uint8) != data.reshape(-1).view(np.uint8)).any())
            access.store(g, one, item.reshape(data.shape), shadow, why)
            old[lane] = before.reshape(vec)
            if shadow is not None:
                bits[lane] = np.ascontiguousarray(shadow).view(unit).reshape(vec)
                origin = origin or why
        g.mask = old_mask
        g.cta.polls[g.slice] += 1
        if dsts:
            deliver(g, dsts, old, bits if origin else None, origin, bits_type)

    result = d.effect(ins, run, (*base, *rids), "operand of an atomic")
    result.dsts = tuple(x.rid for x in dsts)
    return result


@decoder("mapa")
def mapa(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mapa (9.7.9.23): a shared address in a peer CTA of the cluster."""
    mods.flag("shared::cluster")
    t = mods.type("u32", "u64")
    dst, a, b = d.operands(3)

    def fn(a: Array, rank: Array) -> Array:
        result: Array = (a & ~t.dtype(0xFF << RANK_SHIFT)) | (
            (rank.astype(t.dtype) + t.dtype(1)) << t.dtype(RANK_SHIFT)
        )
        return result

    return d.alu(d.dst(dst, t), [d.src(a, t), d.src(b, TYPES["u32"])], fn)


@decoder("getctarank")
def getctarank(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """getctarank (9.7.9.24)."""
    mods.flag("shared::cluster")
    t = mods.type("u32", "u64")
    dst, a = d.operands(2)
    own = Source(d.launch_value(W32, "special", "cluster_ctarank"), TYPES["u32"])

    def fn(a: Array, own: Array) -> Array:
        tag = ((a >> t.dtype(RANK_SHIFT)) & t.dtype(0xFF)).astype(np.uint32)
        return np.where(tag == 0, own, tag - np.uint32(1))

    return d.alu(d.dst(dst, TYPES["u32"]), [d.src(a, t), own], fn)


# Matrix loads and stores


def _rows_of(g: Group, ins: Instr, addr: Array, count: int) -> Array:
    """Item indices of the 16-byte rows that the first lanes of each warp point at, [warp, row]."""
    rows = np.ascontiguousarray(addr[:, : 8 * count])
    check_alignment(g, ins, rows, 16)
    flat = rows.ravel()
    result: Array = (g.cta.shared.offsets(g, ins, flat, 16) >> np.uint32(4)).reshape(rows.shape)
    return result


def _addressing(g: Group, count: int) -> Array:
    """The lanes that give the addresses of these rows."""
    return np.flatnonzero(np.tile(np.arange(32) < 8 * count, g.n))


def _unpack_rows(data: Array, bits: int) -> Array:
    """Rows of 16 packed 4- or 6-bit elements (8 or 12 bytes, then padding) to one element a byte."""
    rows = data.view(np.uint8).reshape(*data.shape, 16)
    if bits == 4:
        half = rows[..., :8]
        out = np.stack([half & 15, half >> 4], axis=-1).reshape(rows.shape)
    else:
        stream = np.unpackbits(rows[..., :12], axis=-1, bitorder="little").reshape(*rows.shape[:-1], 16, 6)
        out = np.packbits(stream, axis=-1, bitorder="little")[..., 0]
    return np.ascontiguousarray(out).view(np.complex128)[..., 0]


@decoder("ldmatrix")
def ldmatrix(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """ldmatrix (9.7.14.5.15): 8x8 matrices of 16-bit elements, 8x16 of 4- or 6-bit elements in bytes, and transposed
    16x16 of 8 bits or of 4 or 6 bits in bytes: lane 4g + t gets rows 4t to 4t + 3 of columns g and g + 8."""
    if not (mods.flag("sync") and mods.flag("aligned")):
        raise d.fail("without .sync.aligned")
    shape = mods.choice("m8n8", "m8n16", "m16n16")
    count = int(mods.choice("x1", "x2", "x4", default="x0")[1:])
    trans = mods.flag("trans")
    space = mods.choice("shared", "shared::cta", default="shared")
    square = shape == "m16n16"
    if shape == "m8n8":
        bits = 16 if mods.flag("b16") else 0
    elif square and mods.flag("b8"):
        bits = 8
    else:
        bits = {"b4x16_p64": 4, "b6x16_p32": 6}.get(mods.choice("b4x16_p64", "b6x16_p32"), 0)
        bits = bits if mods.flag("b8x16") else 0
    fits = trans and count in (1, 2) if square else not trans or bits == 16
    if not count or not bits or not shape or not fits:
        raise d.fail("form is not supported")
    dst, a = d.operands(2)
    dsts = [d.dst(o, TYPES["b32"]) for o in items_of(dst)]
    count *= 2 if square else 1  # registers, and groups of eight rows
    if len(dsts) != count:
        raise d.fail("number of registers")
    addr, srcs = address(d, a, space)
    rows = [x.row for x in dsts]

    def arrange(g: Group, items: Array) -> Array:
        """16-byte rows [warp, row] to registers [matrix, warp, lane]."""
        if bits < 8:
            items = _unpack_rows(items, bits)
        if square:
            cells = np.ascontiguousarray(items).view(np.uint8).reshape(g.n, count // 2, 4, 4, 2, 8)
            words = np.ascontiguousarray(cells.transpose(0, 1, 4, 5, 2, 3)).view(np.uint32)
        elif trans:
            cells = items.view(np.uint16).reshape(g.n, count, 8, 8).swapaxes(2, 3)
            words = np.ascontiguousarray(cells).view(np.uint32)
        else:
            words = items.view(np.uint32)
        result: Array = words.reshape(g.n, count, 32).swapaxes(0, 1)
        return result

    def run(g: Group) -> None:
        cta = g.cta
        index = _rows_of(g, ins, addr(g), count)
        shared = cta.shared
        g.file.files[W32][rows, g.slice] = arrange(g, shared.units(16).take(index))
        shadow = shared.units(16, True).take(index)
        if cta.options.observer is not None:
            at = index.ravel() << np.uint32(4)
            cta.options.observer.shared(cta, ins, lanes(g, None, 8 * count), at, 16, False)
        if cta.races is not None:
            cta.races.read(g, ins, cta, index.ravel() << np.uint32(4), 16, _addressing(g, count), collective=True)
        if shadow.view(np.uint8).any():
            first = int(np.flatnonzero(shadow.view(np.uint8))[0] // 16)
            origin = cta.describe_shared(int(index.flat[first]) * 16)
            for dst, b in zip(dsts, arrange(g, shadow), strict=True):
                cta.set_shadow(g, dst.rid, b, origin)
        elif cta.tainted:
            for dst in dsts:
                if dst.rid in cta.tainted:
                    cta.clear_shadow(g, dst.rid)

    op = d.effect(ins, run, srcs, "address")
    op.dsts = tuple(x.rid for x in dsts)
    op.converge = d.constant(W32, 0xFFFFFFFF)
    return op


@decoder("stmatrix")
def stmatrix(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """stmatrix (9.7.14.5.16): 8x8 matrices of 16-bit elements, and transposed 16x8 of 8 bits (an accumulator's
    fragment: the bytes of lane 4g + t are rows g, g, g + 8, g + 8 of columns 2t, 2t + 1, 2t, 2t + 1)."""
    shape = mods.choice("m8n8", "m16n8")
    if not (mods.flag("sync") and mods.flag("aligned") and shape):
        raise d.fail("form is not supported")
    narrow = shape == "m16n8"
    count = int(mods.choice("x1", "x2", "x4", default="x0")[1:])
    trans = mods.flag("trans")
    space = mods.choice("shared", "shared::cta", default="shared")
    mods.type("b8" if narrow else "b16")
    if narrow and not trans:
        raise d.fail("form is not supported")
    a, src = d.operands(2)
    srcs = [d.src(o, TYPES["b32"]) for o in items_of(src)]
    if not count or len(srcs) != count:
        raise d.fail("form is not supported")
    addr, base = address(d, a, space)
    rids = tuple(s.rid for s in srcs)

    def arrange(g: Group, words: Sequence[Array]) -> Array:
        """Registers to 16-byte rows [warp, row]."""
        out = np.stack(words, axis=1)
        if narrow:
            parts = np.ascontiguousarray(out).view(np.uint8).reshape(g.n, count, 8, 4, 2, 2)
            rows = np.ascontiguousarray(parts.transpose(0, 1, 3, 5, 4, 2))
            return rows.reshape(g.n, 8 * count, 16).view(np.complex128)[..., 0]
        if trans:
            cells = np.ascontiguousarray(out).view(np.uint16).reshape(g.n, count, 8, 8).swapaxes(2, 3)
            return np.ascontiguousarray(cells).view(np.complex128).reshape(g.n, 8 * count)
        return out.reshape(g.n, 8 * count, 4).view(np.complex128)[..., 0]

    def write(g: Group, shadow: Any, origin: str = "") -> None:
        index = _rows_of(g, ins, addr(g), count)
        shared = g.cta.shared
        if origin:
            g.cta.note_origin(index[shadow != 0].astype(np.int64) * 16, 16, origin)
        items = arrange(g, [s.get(g) for s in srcs])
        if g.cta.options.observer is not None:
            at = index.ravel() << np.uint32(4)
            g.cta.options.observer.shared(g.cta, ins, lanes(g, None, 8 * count), at, 16, True)
        if g.cta.races is not None:
            offset, where = index.ravel() << np.uint32(4), _addressing(g, count)
            g.cta.races.write(g, ins, g.cta, offset, 16, where, np.ascontiguousarray(items), collective=True)
        shared.units(16)[index] = items
        shared.units(16, True)[index] = shadow

    def checked(g: Group) -> None:
        g.cta.refuse(g, ins, base, "address")
        first = next((r for r in rids if r in g.cta.tainted), None)
        if first is None:
            write(g, 0)
        else:
            write(g, arrange(g, [s.shadow(g) for s in srcs]), g.cta.origin[first])

    op = Op(ins, lambda g: write(g, 0), checked, (*base, *rids), pure=False)
    op.converge = d.constant(W32, 0xFFFFFFFF)
    return op


@decoder("movmatrix")
def movmatrix(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """movmatrix (9.7.14.5.17): an 8x8 matrix of 16-bit elements, transposed across the warp."""
    if not all(mods.flag(m) for m in ("sync", "aligned", "m8n8", "trans", "b16")):
        raise d.fail("form is not supported")
    dst, a = d.operands(2)
    src = d.src(a, TYPES["b32"])

    def fn(a: Array) -> Array:
        cells = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        return np.ascontiguousarray(cells).view(np.uint32).reshape(a.shape)

    op = d.alu(d.dst(dst, TYPES["b32"]), [src], fn, rule=lambda g: [fn(src.shadow(g))])
    op.converge = d.constant(W32, 0xFFFFFFFF)
    return op
