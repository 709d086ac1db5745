"""Cases that prove the expansions: one instruction each, over random or all register inputs.

A case is a small kernel that hands every thread some input words and stores its output words. It runs in the emulator
as written, in the emulator after its rewriting, and on Hopper; all three must agree. :mod:`.case_data` makes the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from b12x import emulator
from b12x._runtime.abi import Region

from . import case_data as data
from . import case_references as references
from .case_data import Words

BLOCK = 256
#: How results are compared: every bit; every bit but a NaN's; or within the rounding of a sum of products.
Comparison = Literal["bits", "floats", "sums", "half sums"]


@dataclass(frozen=True)
class Case:
    """``code`` reads ``%i0``.. and writes ``%o0``..; ``%d0`` and ``%d1`` are the thread's input and output addresses.

    ``inputs(rng)`` gives words ``[threads, inputs]``, threads being a multiple of :data:`BLOCK`. ``magnitudes`` maps
    them to inputs whose results bound the sums of magnitudes. With ``shared``, the thread's first four inputs are
    stored as its 16-byte row of shared memory, ``%r60`` is the address of a row of its warp that differs from lane to
    lane, and ``%r61`` that of its own row. ``stores`` is False where the code itself writes global memory.
    ``reference`` gives the results where the emulator does not know the instruction.
    """

    name: str
    count: int
    results: int
    code: str
    inputs: Callable[[np.random.Generator], Words]
    compare: Comparison = "bits"
    magnitudes: Callable[[Words], Words] | None = None
    shared: bool = False
    stores: bool = True
    reference: Callable[[Words], Words] | None = None

    @property
    def ptx(self) -> str:
        loads = "\n".join(f"ld.global.b32 %i{i}, [%d0+{4 * i}];" for i in range(self.count))
        stores = "\n".join(f"st.global.b32 [%d1+{4 * i}], %o{i};" for i in range(self.results))
        return _KERNEL.format(
            loads=loads,
            shared=_SHARED if self.shared else "",
            code=self.code,
            stores=stores if self.stores else "",
            input_bytes=4 * self.count,
            output_bytes=4 * self.results,
        )


_KERNEL = """.version 9.4
.target sm_120a
.address_size 64

.visible .entry case(.param .u64 .ptr .global .align 32 case_0, .param .u64 .ptr .global .align 32 case_1)
.reqntid 256, 1, 1
{{
.reg .pred %p<4>;
.reg .b8 %b<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>, %i<16>, %o<16>;
.reg .b64 %d<16>;
.shared .align 128 .b8 rows[4096];
mov.u32 %r50, %tid.x;
mov.u32 %r51, %ctaid.x;
mad.lo.u32 %r52, %r51, 256, %r50;
ld.param.b64 %d0, [case_0];
ld.param.b64 %d1, [case_1];
mul.wide.u32 %d2, %r52, {input_bytes};
mul.wide.u32 %d3, %r52, {output_bytes};
add.s64 %d0, %d0, %d2;
add.s64 %d1, %d1, %d3;
setp.ne.u32 %p1, %r51, 4000;
setp.eq.u32 %p2, %r51, 4000;
{loads}
{shared}
{code}
{stores}
ret;
}}
"""

_SHARED = """mov.u32 %r57, rows;
mad.lo.u32 %r61, %r50, 16, %r57;
mad.lo.u32 %r58, %r50, 7, 3;
and.b32 %r58, %r58, 31;
and.b32 %r59, %r50, 224;
add.u32 %r59, %r59, %r58;
mad.lo.u32 %r60, %r59, 16, %r57;
st.shared.v4.b32 [%r61], {%i0, %i1, %i2, %i3};
bar.warp.sync 0xffffffff;"""


def all_cases() -> tuple[Case, ...]:
    """Every case, in a fixed order, with unique names."""
    return (
        *_to_narrow(),
        *_from_narrow(),
        *_scale_conversions(),
        *_arithmetic(),
        *_wide_accesses(),
        *_matrices(),
        *_fp4(),
        *_fp8(),
    )


def expected_results(case: Case, words: Words) -> Words:
    """What the original instruction gives."""
    return case.reference(words) if case.reference else emulate(case.ptx, words, case.results)


def emulate(ptx: str, words: Words, results: int) -> Words:
    """Output words of a case's kernel, original or rewritten, over its inputs."""
    threads = len(words)
    source, output = _aligned(words), _aligned(np.zeros((threads, results), np.uint32))
    regions = [
        Region("inputs", source.ctypes.data, source.shape, source.strides, "uint32", "r", True),
        Region("results", output.ctypes.data, output.shape, output.strides, "uint32", "w", False),
    ]
    parameters = [source.ctypes.data, output.ctypes.data]
    grid = (threads // BLOCK, 1, 1)
    emulator.launch(emulator.parse(ptx), grid=grid, block=(BLOCK, 1, 1), params=parameters, regions=regions)
    return output


def differences(case: Case, found: Words, expected: Words, bounds: Words | None = None) -> NDArray[np.intp]:
    """Indices ``[n, 2]`` (thread, result) where ``found`` is not what ``case.compare`` asks for."""
    if case.compare == "bits":
        return np.argwhere(found != expected)
    if case.compare == "half sums":
        pairs = (_as_half(found), _as_half(expected), None if bounds is None else _as_half(bounds))
        ulp, slack = 2.0**-11, 2.0**-24
    else:
        pairs = (_as_float(found), _as_float(expected), None if bounds is None else _as_float(bounds))
        ulp, slack = 0.0, 2.0**-149
    y, reference, scale = pairs
    same = (y == reference) | (np.isnan(y) & np.isnan(reference))
    if case.compare == "floats":
        same &= (np.signbit(y) == np.signbit(reference)) | np.isnan(y)
    elif scale is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            same |= np.abs(y - reference) <= 8 * 2.0**-23 * scale + ulp * np.abs(reference) + slack
    return np.argwhere(~same)


def _aligned(words: Words) -> Words:
    buffer = np.zeros(words.size + 32, np.uint32)
    first = -buffer.ctypes.data % 128 // 4
    out: Words = buffer[first : first + words.size].reshape(words.shape)
    out[...] = words
    return out


def _as_float(words: Words) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return words.view(np.float32).astype(np.float64)


def _as_half(words: Words) -> NDArray[np.float64]:
    return np.ascontiguousarray(words).view(np.float16).astype(np.float64)


def _to_narrow() -> list[Case]:
    found = []
    for fmt, relu in product(("e2m1", "e2m3", "e3m2"), ("", ".relu")):
        register, widen = ("%b0", "cvt.u32.u8") if fmt == "e2m1" else ("%h0", "cvt.u32.u16")
        finish = f"{widen} %o0, {register};"
        name = f"cvt.rn.satfinite{relu}.{fmt}x2"
        # With .relu, -0 may keep its sign: the ISA does not say.
        floats = data.rounding_floats(fmt, negative_zero=not relu)
        found.append(Case(f"{name}.f32", 2, 1, f"{name}.f32 {register}, %i0, %i1; {finish}", floats))
        for pair in ("f16x2", "bf16x2"):
            halves = data.half_pairs(pair, negative_zero=not relu)
            found.append(Case(f"{name}.{pair}", 1, 1, f"{name}.{pair} {register}, %i0; {finish}", halves))
    for fmt in ("e4m3", "e5m2"):
        name = f"cvt.rn.satfinite.{fmt}x2.bf16x2"
        found.append(Case(name, 1, 1, f"{name} %h0, %i0; cvt.u32.u16 %o0, %h0;", data.half_pairs("bf16x2")))
    return found


def _from_narrow() -> list[Case]:
    found = []
    for fmt, to, relu in product(("e2m1", "e2m3", "e3m2", "e4m3", "e5m2"), ("f16x2", "bf16x2"), ("", ".relu")):
        if to == "f16x2" and fmt in ("e4m3", "e5m2"):
            continue  # Hopper's own
        register, narrow = ("%b0", "cvt.u8.u32") if fmt == "e2m1" else ("%h0", "cvt.u16.u32")
        name = f"cvt.rn{relu}.{to}.{fmt}x2"
        words = data.all_pairs(0x3F3F if fmt in ("e2m3", "e3m2") else 0xFFFF)
        found.append(Case(name, 1, 1, f"{narrow} {register}, %i0; {name} %o0, {register};", words))
    return found


def _scale_conversions() -> list[Case]:
    found = []
    for mode, finite in product(("rz", "rp"), ("", ".satfinite")):
        name = f"cvt.{mode}{finite}.ue8m0x2"
        finish = "cvt.u32.u16 %o0, %h0;"
        found.append(Case(f"{name}.f32", 2, 1, f"{name}.f32 %h0, %i0, %i1; {finish}", data.positive_floats))
        found.append(Case(f"{name}.bf16x2", 1, 1, f"{name}.bf16x2 %h0, %i0; {finish}", data.positive_bf16_pairs))
    name = "cvt.rn.bf16x2.ue8m0x2"
    found.append(Case(name, 1, 1, f"cvt.u16.u32 %h0, %i0; {name} %o0, %h0;", data.all_pairs(0xFFFF)))
    return found


def _arithmetic() -> list[Case]:
    found = []
    for name in ("add.rn", "add.rz.ftz", "sub.rn", "sub.rm", "mul.rn", "mul.rp.ftz", "fma.rn", "fma.rn.ftz", "fma.rz"):
        sources = 3 if name.startswith("fma") else 2
        code = "".join(f"mov.b64 %d{4 + i}, {{%i{2 * i}, %i{2 * i + 1}}};\n" for i in range(sources))
        code += f"{name}.f32x2 %d9, {', '.join(f'%d{4 + i}' for i in range(sources))};\nmov.b64 {{%o0, %o1}}, %d9;"
        found.append(Case(f"{name}.f32x2", 2 * sources, 2, code, data.any_floats(2 * sources), "floats"))
    for opcode, mods in product(("min", "max"), ("", ".ftz", ".NaN", ".abs", ".ftz.NaN.abs")):
        name = f"{opcode}{mods}.f32"
        found.append(Case(f"{name} (3)", 3, 1, f"{name} %o0, %i0, %i1, %i2;", data.quiet_floats(3), "floats"))
    for name in ("add.rn.f32.f16", "sub.rz.f32.bf16", "fma.rn.f32.f16", "fma.rp.f32.bf16"):
        halves = "%h0, %h1, %i1" if name.startswith("fma") else "%h0, %i1"
        code = f"mov.b32 {{%h0, %h1}}, %i0; {name} %o0, {halves};"
        found.append(Case(name, 2, 1, code, data.any_floats(2), "floats", reference=partial(references.mixed, name)))
    for mods in ("min", "max", "min.abs", "max.NaN", "max.abs.NaN"):
        name = f"redux.sync.{mods}.f32"
        found.append(Case(name, 1, 1, f"{name} %o0, %i0, 0xffffffff;", data.floats_by_warp, "floats"))
    found.append(
        Case(
            "guarded fma.rn.f32x2",
            4,
            2,
            "mov.b64 %d4, {%i0, %i1}; mov.b64 %d5, {%i2, %i3}; mov.b64 %d6, %d4; setp.lt.f32 %p3, %i0, %i2;\n"
            "@%p3 fma.rn.f32x2 %d6, %d4, %d5, %d5; @!%p3 mul.rn.f32x2 %d6, %d4, %d4; mov.b64 {%o0, %o1}, %d6;",
            data.any_floats(4),
            "floats",
        )
    )
    return found


def _wide_accesses() -> list[Case]:
    eight = ", ".join(f"%o{i}" for i in range(8))
    inputs = ", ".join(f"%i{i}" for i in range(8))
    words = data.any_words(8)
    doubles = "%d4, %d5, %d6, %d0"
    split = " ".join(f"mov.b64 {{%o{2 * i}, %o{2 * i + 1}}}, {r};" for i, r in enumerate(doubles.split(", ")))
    name = "ld.global.L2::evict_last.v4.b64"
    return [
        Case("ld.global.v8.b32", 8, 8, f"ld.global.v8.b32 {{{eight}}}, [%d0];", words),
        Case(name, 8, 8, f"{name} {{{doubles}}}, [%d0]; {split}", words),
        Case("st.global.v8.f32", 8, 8, f"st.global.v8.f32 [%d1], {{{inputs}}};", words, stores=False),
    ]


def _matrices() -> list[Case]:
    found = []
    words = data.any_words(4)
    for count, source in product((1, 2, 4), ("b4x16_p64", "b6x16_p32")):
        name = f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{source}"
        found.append(Case(name, 4, count, f"{name} {{{_registers('o', count)}}}, [%r60];", words, shared=True))
    for count, (bits, source) in product((1, 2), ((8, "b8"), (4, "b8x16.b4x16_p64"), (6, "b8x16.b6x16_p32"))):
        name = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{source}"
        code = f"{name} {{{_registers('o', 2 * count)}}}, [%r60];"
        expected = partial(references.load_transposed, bits, count)
        found.append(Case(name, 4, 2 * count, code, words, shared=True, reference=expected))
    for count in (1, 2, 4):
        name = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8"
        code = f"{name} [%r60], {{{_registers('i', count)}}};\nbar.warp.sync 0xffffffff;\n"
        code += f"ld.shared.v4.b32 {{{_registers('o', 4)}}}, [%r61];"
        expected = partial(references.store_transposed, count)
        found.append(Case(name, 4, 4, code, words, shared=True, reference=expected))
    return found


def _registers(kind: str, count: int, first: int = 0) -> str:
    return ", ".join(f"%{kind}{first + i}" for i in range(count))


def _mma(name: str, inputs: data.MmaInputs, scaled: str = "", half: bool = False, guard: str = "") -> list[Case]:
    """An exact case and one with full ranges; the inputs are those of :class:`~.case_data.MmaInputs`."""
    results = 2 if half else 4
    c = _registers("i", results, 6)
    code = f"{name} {{{_registers('o', results)}}}, {{%i0, %i1, %i2, %i3}}, {{%i4, %i5}}, {{{c}}}{scaled};"
    if guard:
        zeros = " ".join(f"mov.b32 %o{i}, %i{6 + i};" for i in range(results))
        code = f"{zeros} @{guard} {code}"
    title = f"{name}{scaled}{' guarded ' + guard if guard else ''}"
    return [
        Case(f"{title} exact", 12, results, code, inputs.exact, "half sums" if half else "floats"),
        Case(title, 12, results, code, inputs.wide, "half sums" if half else "sums", inputs.magnitudes),
    ]


def _fp4() -> list[Case]:
    found = []
    prefix = "mma.sync.aligned.m16n8k64.row.col.kind::"
    for a, b in ((0, 0), (1, 1), (0, 2), (1, 3)):
        name = f"{prefix}mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
        found += _mma(name, data.fp4("ue4m3"), f", {{%i10}}, {{0, {a}}}, {{%i11}}, {{0, {b}}}")
    for kind, ids in (("mxf4nvf4", (0, 1, 2, 3)), ("mxf4", (2, 0, 0, 2)), ("mxf4", (0, 0, 0, 0))):
        name = f"{prefix}{kind}.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"
        found += _mma(
            name, data.fp4("ue8m0"), "".join(f", {{%i1{i}}}, {{{ids[2 * i]}, {ids[2 * i + 1]}}}" for i in range(2))
        )
    name = f"{prefix}mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0"
    found += _mma(name, data.fp4("ue8m0"), ", {%i10}, {0, 1}, {%i11}, {0, 1}")
    for guard in ("%p1", "!%p1"):
        name = f"{prefix}mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
        found += _mma(name, data.fp4("ue4m3"), ", {%i10}, {0, 0}, {%i11}, {0, 0}", guard=guard)
    return found


def _fp8() -> list[Case]:
    found = []
    formats = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
    for index, (a, b) in enumerate(product(formats, formats)):
        inputs = data.fp8(a, b)
        selectors = f", %i10, {{{index % 4}, {index % 2}}}, %i11, {{{index // 4 % 4}, {index % 4}}}"
        name = f"mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{a}.{b}.f32.ue8m0"
        found += _mma(name, inputs, selectors)
        found += _mma(f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{a}.{b}.f32", inputs)
        if index % 6 == 1:
            name = f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.{a}.{b}.f16"
            found += _mma(name, data.fp8(a, b, half=True), half=True)
    return found
