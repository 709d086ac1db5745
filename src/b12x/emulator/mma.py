"""Warp-level matrix multiply-accumulate (PTX ISA 9.7.14.5, mma.sync, with and without block scaling).

Operands are decoded to dense float32 matrices, scaled, multiplied with exact products and accumulated in float32.
Independent multiplies of a basic block arrive here as one batch, in which every distinct A and B is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import mma_exact
from . import numerics as num
from .decode import TYPES, Decoder, Mods, Op, decoder
from .errors import EmulatorError
from .machine import W16, W32, Group
from .parse import Imm, Instr, Operand, Vector

Array = NDArray[Any]

F4 = ("e2m1",)
F8 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
#: kind -> element types it takes
KINDS = {"": ("f16", "bf16", "tf32", "e4m3", "e5m2"), "f8f6f4": F8, "mxf8f6f4": F8, "mxf4": F4, "mxf4nvf4": F4}
#: (kind, scale_vec, scale type) that exist
SCALES = {
    ("mxf8f6f4", 1, "ue8m0"),
    ("mxf4", 2, "ue8m0"),
    ("mxf4nvf4", 2, "ue8m0"),
    ("mxf4nvf4", 4, "ue4m3"),
    ("mxf4nvf4", 4, "ue8m0"),
}


@dataclass(frozen=True)
class Form:
    """What the multiplies of a batch share."""

    k: int
    kind: str
    a: str
    b: str
    acc: str
    scale_vec: int = 0
    scale: str = ""

    @property
    def bits(self) -> int:
        """Width of an element's container."""
        if self.kind in ("mxf4", "mxf4nvf4"):
            return 4
        return {"f16": 16, "bf16": 16, "tf32": 32}.get(self.a, 8)

    @property
    def quads(self) -> int:
        """Registers per row of a fragment: each holds 32 / bits elements, and four lanes share a row."""
        return self.k * self.bits // 128


@dataclass(frozen=True)
class Call:
    """One multiply: register-file rows of its operands.

    ``sa`` and ``sb`` are the scale operands: row of the scale register, byte-id and thread-id. An id is its value, or
    ``-1 - row`` of the 16-bit register that holds it.
    """

    form: Form
    d: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]
    sa: tuple[int, ...] = ()
    sb: tuple[int, ...] = ()


@cache
def _byte_table(name: str, bits: int) -> Array:
    """Values by container byte; for 4-bit containers a pair of float32 as one 64-bit item, low nibble first."""
    table = num.decode_table(name)
    if bits == 4:
        nibbles = table[:16]
        pairs = np.stack([nibbles[np.arange(256) & 15], nibbles[np.arange(256) >> 4]], axis=1)
        return np.ascontiguousarray(pairs.astype(np.float32)).view(np.uint64)[:, 0]
    if name == "e2m1":  # sits in bits 2 to 5 of its byte
        result: Array = table[(np.arange(256) >> 2) & 15]
        return result
    return table


def _values(words: Array, name: str, bits: int) -> Array:
    """Elements of packed 32-bit words, along the last axis."""
    words = np.ascontiguousarray(words)
    if bits == 16:
        half = words.view(np.uint16)
        return num.bf16_to_f32(half) if name == "bf16" else half.view(np.float16).astype(np.float32)
    if bits == 32:
        result: Array = (words & np.uint32(0xFFFFE000)).view(np.float32)
        return result
    return _byte_table(name, bits).take(words.view(np.uint8)).view(np.float32)


def _rows(g: Group, rows: Sequence[int]) -> Array:
    """Register rows of the group's warps, [row, warp, lane]."""
    out: Array = g.file.files[W32][list(rows), g.slice]
    return out


def _selector(g: Group, code: int) -> int:
    """The value of a byte-id or thread-id; one for the whole warp group."""
    if code >= 0:
        return code
    values = g.u16[-1 - code]
    first = int(values[0, 0])
    if (values != first).any():
        raise EmulatorError(f"{g.cta.name}: scale selectors differ between the lanes of an mma")
    return first


def _scale(g: Group, values: Array, form: Form, scales: Sequence[tuple[int, ...]], columns: bool) -> Array:
    """Multiplies the K-blocks of [warp, row, k] by their scales; ``scales`` has an operand for every fragment.

    Row g's scales of A lie in lane 4g + 2 * tid (row g + 8 in the next lane), those of column g of B in lane 4g + tid.
    """
    f, n, count = len(scales), g.n, form.scale_vec
    words = _rows(g, [s[0] for s in scales]).reshape(f, n, 8, 4)
    which = np.arange(f)
    tid = np.array([_selector(g, s[2]) for s in scales])
    byte = [_selector(g, s[1]) for s in scales]
    if columns:
        words = words[which, :, :, tid].transpose(1, 0, 2)
    else:
        words = words[which[:, None], :, :, 2 * tid[:, None] + np.arange(2)].transpose(2, 0, 1, 3)
    if any(byte):
        words = words >> (8 * np.array(byte, np.uint32)).reshape(1, f, *([1] * (words.ndim - 2)))
    codes = np.ascontiguousarray(words).reshape(n, -1, 1).view(np.uint8)[..., :count]
    factors = num.decode_table(form.scale).take(codes)
    if form.scale == "ue8m0" and (codes.min() < 90 or codes.max() > 164):
        # a scaled element could leave the range of float32 although the product does not
        factors, values = factors.astype(np.float64), values.astype(np.float64)
    _, rows, k = values.shape
    out: Array = (values.reshape(n, rows, count, k // count) * factors[..., None]).reshape(n, rows, k)
    return out


class _Side:
    """The distinct A (or B) of a batch, each with its scales."""

    def __init__(self, form: Form, fragments: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], columns: bool) -> None:
        self.form = form
        self.keys = list(dict.fromkeys(fragments))
        self.index = np.array([self.keys.index(f) for f in fragments])
        self.rows = [r for regs, _ in self.keys for r in regs]
        self.scales = [scale for _, scale in self.keys]
        self.columns = columns

    def __len__(self) -> int:
        return len(self.keys)

    def matrix(self, g: Group) -> Array:
        """[warp, 16 * index + row, k] of A, [warp, 8 * index + column, k] of B."""
        form, f, q, n = self.form, len(self.keys), self.form.quads, g.n
        words = _rows(g, self.rows)
        if self.columns:
            words, name = words.reshape(f, q, n, 8, 4).transpose(2, 0, 3, 1, 4), form.b
        else:
            words, name = words.reshape(f, q, 2, n, 8, 4).transpose(3, 0, 2, 4, 1, 5), form.a
        values = _values(words, name, form.bits).reshape(n, -1, form.k)
        return _scale(g, values, form, self.scales, self.columns) if form.scale else values


class Batch:
    """Independent multiplies of one form."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.form = calls[0].form
        self.a = _Side(self.form, [(c.a, c.sa) for c in calls], False)
        self.b = _Side(self.form, [(c.b, c.sb) for c in calls], True)
        self.c = [r for call in calls for r in call.c]
        self.d = [r for call in calls for r in call.d]
        self.count = len(calls)
        all_pairs = len(self.a) * len(self.b)
        self.product = 2 * self.count >= all_pairs
        order = self.a.index * len(self.b) + self.b.index
        self.order = None if np.array_equal(order, np.arange(all_pairs)) else order

    def run(self, g: Group) -> None:
        form, n, p = self.form, g.n, self.count
        a, b = self.a.matrix(g), self.b.matrix(g)
        if self.product:
            fa, fb = len(self.a), len(self.b)
            acc = np.matmul(a, b.swapaxes(1, 2)).reshape(n, fa, 2, 8, fb, 4, 2)
            acc = acc.transpose(1, 4, 2, 6, 0, 3, 5).reshape(fa * fb, 4, n, 32)
            if self.order is not None:
                acc = acc[self.order]
        else:
            a = a.reshape(n, -1, 16, form.k)[:, self.a.index]
            b = b.reshape(n, -1, 8, form.k)[:, self.b.index]
            acc = np.matmul(a, b.swapaxes(2, 3)).reshape(n, p, 2, 8, 4, 2)
            acc = acc.transpose(1, 2, 5, 0, 3, 4).reshape(p, 4, n, 32)
        if form.acc == "f32":
            c = _rows(g, self.c).view(np.float32)
            acc = acc.reshape(4 * p, n, 32) + c
            g.file.files[W32].view(np.float32)[self.d, g.slice] = acc
        else:
            c16 = _rows(g, self.c).view(np.float16).reshape(p, 2, n, 32, 2).transpose(0, 1, 4, 2, 3)
            total = acc.reshape(p, 2, 2, n, 32) + c16.astype(np.float32)
            packed = np.ascontiguousarray(total.astype(np.float16).transpose(0, 1, 3, 4, 2)).view(np.uint32)
            g.file.files[W32][self.d, g.slice] = packed.reshape(2 * p, n, 32)


def _taint(g: Group, call: Call) -> list[Array]:
    """Tainted bits of D: by row of A and its scales, by column of B and its scales, by element of C."""
    form, n = call.form, g.n

    def hit(row: int) -> Array:
        return g.shadow(row * 4 + W32).reshape(n, 8, 4)

    def bytes_used(word: Array, byte: int) -> Array:
        mask = np.uint32(((1 << (8 * form.scale_vec)) - 1) << (8 * byte))
        result: Array = (word & mask) != 0
        return result

    rows = [np.zeros((n, 8), bool), np.zeros((n, 8), bool)]
    for r, row in enumerate(call.a):
        rows[r & 1] |= (hit(row) != 0).any(axis=2)
    columns = np.zeros((n, 8), bool)
    for row in call.b:
        columns |= (hit(row) != 0).any(axis=2)
    if form.scale:
        byte, tid = _selector(g, call.sa[1]), _selector(g, call.sa[2])
        for h in range(2):
            rows[h] |= bytes_used(hit(call.sa[0])[:, :, 2 * tid + h], byte)
        byte, tid = _selector(g, call.sb[1]), _selector(g, call.sb[2])
        columns |= bytes_used(hit(call.sb[0])[:, :, tid], byte)
    out = []
    pair = columns.reshape(n, 1, 4, 2)
    if form.acc == "f32":
        for r in range(4):
            bad = rows[r >> 1][:, :, None] | pair[..., r & 1] | (hit(call.c[r]) != 0)
            out.append(np.where(bad, np.uint32(0xFFFFFFFF), np.uint32(0)).reshape(n, 32))
    else:
        for h in range(2):
            bits = np.zeros((n, 8, 4), np.uint32)
            for c in range(2):
                ones = np.uint32(0xFFFF << (16 * c))
                bad = rows[h][:, :, None] | pair[..., c] | ((hit(call.c[h]) & ones) != 0)
                bits |= np.where(bad, ones, np.uint32(0))
            out.append(bits.reshape(n, 32))
    return out


def _op(ins: Instr, calls: Sequence[Call], srcs: tuple[int, ...], dsts: tuple[int, ...]) -> Op:
    work = Batch(calls)

    def checked(g: Group) -> None:
        cta = g.cta
        source = next((s for s in srcs if s in cta.tainted), None)
        if source is None:
            work.run(g)
            for rid in dsts:
                if rid in cta.tainted:
                    cta.clear_shadow(g, rid)
            return
        origin = cta.origin[source]
        shadows = [(call, _taint(g, call)) for call in calls]
        work.run(g)
        for call, bits in shadows:
            for row, b in zip(call.d, bits, strict=True):
                cta.set_shadow(g, row * 4 + W32, b, origin)

    return Op(ins, work.run, checked, srcs, dsts)


def batch(ops: Sequence[Op]) -> Op:
    """Several independent mma ops of one form as one."""
    srcs = tuple(dict.fromkeys(s for op in ops for s in op.srcs))
    dsts = tuple(d for op in ops for d in op.dsts)
    return _op(ops[0].ins, [op.mma for op in ops], srcs, dsts)


def _fragment(d: Decoder, operand: Operand, count: int, dst: bool = False) -> tuple[int, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise d.fail(f"a fragment of {count} registers is expected")
    b32 = TYPES["b32"]
    return tuple((d.dst(i, b32).row if dst else d.src(i, b32).row) for i in items)


@decoder("mma")
def mma(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mma.sync.aligned.m16n8kK (9.7.14.5.14), dense."""
    if not (mods.flag("sync") and mods.flag("aligned")):
        raise d.fail("mma without .sync.aligned")
    kind = next((m for m in mods.left if m.startswith("kind::")), "")
    if kind:
        mods.left.remove(kind)
    kind = kind.removeprefix("kind::")
    shape = next((m for m in mods.left if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    if (
        not kind
        and ((shape == "m8n8k4" and "f64" in mods.left) or "s32" in mods.left)
        and mods.flag("row")
        and mods.flag("col")
    ):
        mods.left.remove(shape)
        if shape == "m8n8k4":
            return mma_exact.double(d, ins, mods)
        if re.fullmatch(r"m16n8k\d+", shape):
            return mma_exact.integer(d, ins, mods, int(shape[6:]))
    m = re.fullmatch(r"m16n8k(\d+)", shape)
    if not m or kind not in KINDS or not (mods.flag("row") and mods.flag("col")):
        raise d.fail("shape, layout or kind is not supported")
    mods.left.remove(shape)
    scaled = mods.flag("block_scale")
    vec = mods.choice("scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
    types, mods.left = mods.left, []
    scale = types.pop() if scaled and len(types) == 5 else ""
    if len(types) != 4 or types[0] != types[3] or types[0] not in ("f32", "f16"):
        raise d.fail("types are not supported")
    acc, a, b = types[0], types[1], types[2]
    scale_vec = 0
    if scaled:
        default = {"mxf8f6f4": "scale_vec::1X", "mxf4": "scale_vec::2X"}.get(kind, "")
        scale_vec = int((vec or default or "scale_vec::0X")[-2])
        if (kind, scale_vec, scale) not in SCALES or acc != "f32":
            raise d.fail("scale form is not supported")
    form = Form(int(m.group(1)), kind, a, b, acc, scale_vec, scale)
    if a not in KINDS[kind] or b not in KINDS[kind] or (a != b and form.bits != 8) or form.quads not in (1, 2):
        raise d.fail("element types or shape are not supported")
    if acc == "f16" and a in ("bf16", "tf32"):
        raise d.fail("types are not supported")
    operands = d.operands(8 if scaled else 4)
    q, dc = form.quads, 4 if acc == "f32" else 2
    regs = (
        _fragment(d, operands[0], dc, dst=True),
        _fragment(d, operands[1], 2 * q),
        _fragment(d, operands[2], q),
        _fragment(d, operands[3], dc),
    )
    sa: tuple[int, ...] = ()
    sb: tuple[int, ...] = ()
    if scaled:
        sa = _scale_operand(d, operands[4], operands[5], 2)
        sb = _scale_operand(d, operands[6], operands[7], 4)
    call = Call(form, *regs, sa, sb)
    srcs = tuple(r * 4 + W32 for r in (*regs[1], *regs[2], *regs[3], *sa[:1], *sb[:1]))
    srcs += tuple((-1 - code) * 4 + W16 for code in (*sa[1:], *sb[1:]) if code < 0)
    op = _op(ins, [call], srcs, tuple(r * 4 + W32 for r in regs[0]))
    op.mma = call
    op.converge = d.constant(W32, 0xFFFFFFFF)
    return op


def _scale_operand(d: Decoder, register: Operand, ids: Operand, threads: int) -> tuple[int, ...]:
    (row,) = _fragment(d, register, 1)
    codes = [row]
    if len(_items(ids)) != 2:
        raise d.fail("scale selectors")
    for item, limit in zip(_items(ids), (4, threads), strict=True):
        if isinstance(item, Imm):
            if not 0 <= item.value < limit:
                raise d.fail("scale selector out of range")
            codes.append(item.value)
        else:
            codes.append(-1 - d.src(item, TYPES["u16"]).row)
    return tuple(codes)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)
