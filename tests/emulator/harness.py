"""Hand-written PTX around a few instructions, and arrays whose addresses kernels can use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from b12x import emulator
from b12x._runtime.abi import Access, Region

Array = NDArray[Any]
DTYPES = {1: "uint8", 2: "float16", 4: "uint32", 8: "int64"}
REGISTERS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def aligned(shape: int | tuple[int, ...], dtype: Any, fill: Any = 0) -> Array:
    """A contiguous array that starts at a 128-byte boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + size].view(dtype).reshape(shape)
    out[...] = fill
    return out


def region(name: str, array: Array, access: Access = "rw", initialised: bool = True) -> Region:
    """The region of an array, byte for byte."""
    dtype = DTYPES[array.itemsize]
    return Region(name, array.ctypes.data, array.shape, array.strides, dtype, access, initialised)


def kernel(body: str, params: str = "", module: str = "", directives: str = "", name: str = "k") -> str:
    """PTX with one entry; registers %r, %rd, %rs, %f, %fd, %p are declared."""
    return f"""
.version 9.0
.target sm_120a
.address_size 64
{module}
.visible .entry {name}({params})
{directives}
{{
    .reg .pred %p<40>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<100>;
    .reg .f32 %f<40>;
    .reg .b64 %rd<60>;
    .reg .f64 %fd<10>;
{body}
}}
"""


def pointers(*names: str) -> tuple[str, str]:
    """Parameter list of pointers, and the code that loads them into registers of the same names."""
    params = ", ".join(f".param .u64 .ptr .global .align 16 p_{n}" for n in names)
    code = "\n".join(f".reg .b64 %{n}; ld.param.b64 %{n}, [p_{n}];" for n in names)
    return params, code


def run(
    body: str,
    *,
    block: int | tuple[int, ...] = 32,
    grid: tuple[int, ...] = (1,),
    module: str = "",
    directives: str = "",
    regions: list[Region] | None = None,
    options: emulator.Options | None = None,
    cluster: tuple[int, ...] = (1, 1, 1),
    dynamic_smem: int = 0,
    **tensors: Array,
) -> emulator.Stats:
    """Runs a body over named arrays. A name that starts with ``out`` is an output: write-only and uninitialised."""
    params, loads = pointers(*tensors)
    program = emulator.parse(kernel(loads + "\n" + body, params, module, directives))
    if regions is None:
        regions = [
            region(n, t, "w" if n.startswith("out") else "r", not n.startswith("out")) for n, t in tensors.items()
        ]
    return emulator.launch(
        program,
        grid=grid,
        block=(block,) if isinstance(block, int) else block,
        cluster=cluster,
        dynamic_smem=dynamic_smem,
        params=[t.ctypes.data for t in tensors.values()],
        regions=regions,
        options=options,
    )


def address(register: str, base: str, width: int, index: str = "%r99") -> str:
    """Code: register = base + index * width."""
    return f"mul.wide.u32 %{register}, {index}, {width}; add.s64 %{register}, %{register}, %{base};"


THREAD = "mov.u32 %r99, %tid.x;"
GLOBAL_THREAD = (
    "mov.u32 %r97, %ctaid.x; mov.u32 %r98, %ntid.x; mov.u32 %r99, %tid.x; mad.lo.s32 %r99, %r97, %r98, %r99;"
)


def elementwise(text: str, *inputs: Array, out: Any = np.uint32, outs: int = 1) -> Any:
    """Applies instructions to arrays. They read %a, %b, %c, %e (in order) and write %d (and %d1, ... for more)."""
    count = inputs[0].size
    block = min(1024, -(-count // 32) * 32)
    grid = -(-count // block)
    padded = []
    for x in inputs:
        whole = aligned(grid * block, x.dtype)
        whole[:count] = x.ravel()
        padded.append(whole)
    results = [aligned(grid * block, out, 0xA5) for _ in range(outs)]
    code = [GLOBAL_THREAD]
    tensors = {}
    for k, (name, x) in enumerate(zip("abce", padded, strict=False)):
        tensors[f"in{k}"] = x
        code.append(f".reg .{REGISTERS[x.itemsize]} %{name};")
        code.append(address(f"rd{50 + k}", f"in{k}", x.itemsize))
        code.append(f"ld.global.b{8 * x.itemsize} %{name}, [%rd{50 + k}];")
    size = np.dtype(out).itemsize
    names = ["d", *(f"d{k}" for k in range(1, outs))]
    code += [f".reg .{REGISTERS[size]} %{n};" for n in names]
    code.append(text)
    for k, (n, x) in enumerate(zip(names, results, strict=True)):
        tensors[f"out{k}"] = x
        code.append(address(f"rd{40 + k}", f"out{k}", size))
        code.append(f"st.global.b{8 * size} [%rd{40 + k}], %{n};")
    code.append("ret;")
    run("\n".join(code), block=block, grid=(grid,), **tensors)
    got = [r[:count].copy() for r in results]
    return got[0] if outs == 1 else got


def edges(dtype: Any, rng: np.random.Generator, count: int = 400) -> Array:
    """Random bit patterns of a type, with its extremes, small numbers and powers of two."""
    bits = np.dtype(dtype).itemsize * 8
    special = [0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 127, 128, 255]
    special += [1 << k for k in range(bits)] + [(1 << k) - 1 for k in range(bits + 1)]
    special += [(1 << bits) - k for k in range(1, 9)]
    unsigned = np.dtype(f"u{bits // 8}")
    values = np.array([s & ((1 << bits) - 1) for s in special], unsigned)
    random = rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(unsigned) * unsigned.type(3)
    return rng.permutation(np.concatenate([values, random])).view(dtype)


def floats(rng: np.random.Generator, count: int = 600) -> NDArray[np.float32]:
    """Floats of every magnitude, with zeros, infinities, NaN, subnormals and values that tie."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(count) * np.exp2(rng.integers(-20, 20, count))).astype(np.float32)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65504, 448])
    small = np.float32([2.0**-126, 2.0**-149, -(2.0**-149), 2.0**-133])
    near_one = np.float32([1, -1, 1 + 2.0**-23, 1 - 2.0**-24, 0.25, 0.75, 1.25, 1.5, 5, 6, 7])
    return rng.permutation(np.concatenate([bits, near, special, small, near_one]))
