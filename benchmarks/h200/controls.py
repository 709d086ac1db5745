"""Section for racecheck: textbook pipelines, one copy instruction each, that are right by the PTX memory model.

What the tool says of these it also says of right kernels that use the same instructions. Each kernel moves tiles of
2048 bytes through shared memory: ``once`` a single tile, the others eight through two stages with a full and an empty
mbarrier a stage, as kernels/_shared/pipeline.py does; in ``threads`` every consumer thread arrives at ``empty``, in
``warps`` one thread a warp after ``bar.warp.sync``. :mod:`prepare` assembles them, and checks in the emulator that they
copy what they should.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
from numpy.typing import NDArray
from report import Report

from b12x import emulator
from b12x._runtime import driver, target, tensor_map
from b12x._runtime.abi import Region, TensorMapValue

TILE = 2048
CONSUMERS = 128
THREADS = CONSUMERS + 32
#: A tile as a tensor map sees it.
ROW, ROWS = 256, 8


@dataclass(frozen=True)
class Control:
    """``copy`` is ``bulk`` (cp.async.bulk) or ``tensor`` (cp.async.bulk.tensor)."""

    copy: str
    form: str

    @property
    def name(self) -> str:
        return f"control_{self.copy}_{self.form}"

    @property
    def tiles(self) -> int:
        return 1 if self.form == "once" else 8

    @property
    def ptx(self) -> str:
        tensor = self.copy == "tensor"
        return _KERNEL.format(
            name=self.name,
            source=".param .align 64 .b8 source[128]" if tensor else ".param .u64 .ptr .global .align 16 source",
            load="mov.b64 %d0, source;\ncvta.param.u64 %d0, %d0;" if tensor else "ld.param.b64 %d0, [source];",
            copy=_TENSOR if tensor else _BULK,
            arrivals=CONSUMERS // 32 if self.form == "warps" else CONSUMERS,
            wait_empty="" if self.form == "once" else _WAIT.format(barrier="%r9", parity="%r8"),
            wait_full=_WAIT.format(barrier="%r6", parity="%r5"),
            arrive=_ARRIVE[self.form],
            produce_again="" if self.form == "once" else _AGAIN.format(tiles=self.tiles, loop="PRODUCE"),
            consume_again="" if self.form == "once" else _AGAIN.format(tiles=self.tiles, loop="CONSUME"),
        )

    def map_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (ROW, ROWS * self.tiles), (ROW,)


def all_controls() -> tuple[Control, ...]:
    return tuple(Control(copy, form) for copy, form in product(("bulk", "tensor"), ("once", "threads", "warps")))


def run(prepared: Path, seed: int, report: Report) -> None:
    generator = torch.Generator("cuda").manual_seed(seed + 4)
    with target.current_target("cuda").current():
        for control in all_controls():
            with report.guard(control.name):
                size = control.tiles * TILE
                source = torch.randint(0, 256, (size,), generator=generator, device="cuda", dtype=torch.uint8)
                output = torch.zeros_like(source)
                _launch(control, (prepared / "controls" / f"{control.name}.cubin").read_bytes(), source, output)
                report.add(control.name, torch.equal(source, output))


def emulate(control: Control, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What the kernel makes of ``source`` (16-byte aligned) in the emulator, whose checks are all on."""
    buffer = np.zeros(source.size + 16, np.uint8)
    first = -buffer.ctypes.data % 16
    output = buffer[first : first + source.size]
    dims, strides = control.map_shape()
    map_value = TensorMapValue(source.ctypes.data, "uint8", dims, strides, (ROW, ROWS))
    regions = [
        Region("source", source.ctypes.data, source.shape, source.strides, "uint8", "r", True),
        Region("output", output.ctypes.data, output.shape, output.strides, "uint8", "w", False),
    ]
    parameters = [map_value if control.copy == "tensor" else source.ctypes.data, output.ctypes.data]
    program = emulator.parse(control.ptx)
    emulator.launch(program, grid=(1, 1, 1), block=(THREADS, 1, 1), params=parameters, regions=regions)
    return output


class _Map(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 128),)


def _launch(control: Control, cubin: bytes, source: torch.Tensor, output: torch.Tensor) -> None:
    cu = driver.ready()
    (library,) = driver.check("cuLibraryLoadData", cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    (kernel,) = driver.check("cuLibraryGetKernel", cu.cuLibraryGetKernel(library, control.name.encode()))
    (function,) = driver.check("cuKernelGetFunction", cu.cuKernelGetFunction(kernel))
    first: tuple[Any, Any] = (source.data_ptr(), ctypes.c_uint64)
    if control.copy == "tensor":
        shape = control.map_shape()
        encoded = tensor_map.encode(control.name, "source", "uint8", (ROW, ROWS), "none", source.data_ptr(), *shape)
        first = (_Map.from_buffer_copy(encoded), None)
    arguments = ((first[0], output.data_ptr()), (first[1], ctypes.c_uint64))
    stream = torch.cuda.current_stream().cuda_stream
    launched = cu.cuLaunchKernel(function, 1, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
    driver.check("cuLaunchKernel", launched)
    torch.cuda.synchronize()
    driver.check("cuLibraryUnload", cu.cuLibraryUnload(library))


_WAIT = """{{
.reg .pred done;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
@done bra.uni OVER;
bra.uni WAIT;
OVER:
}}"""

_AGAIN = """add.u32 %r3, %r3, 1;
setp.lt.u32 %p3, %r3, {tiles};
@%p3 bra {loop};"""

_ARRIVE = {
    "once": "",
    "threads": "mbarrier.arrive.shared::cta.b64 _, [%r9];",
    "warps": """bar.warp.sync 0xffffffff;
and.b32 %r18, %r0, 31;
setp.eq.u32 %p4, %r18, 0;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%r9];""",
}

_BULK = """mul.wide.u32 %d4, %r3, 2048;
add.s64 %d4, %d4, %d0;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%d4], 2048, [%r6];"""

_TENSOR = """mov.u32 %r16, 0;
shl.b32 %r17, %r3, 3;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r7], [%d0, {%r16, %r17}], [%r6];"""

_STAGE = """and.b32 %r4, %r3, 1;
shr.u32 %r5, %r3, 1;
and.b32 %r5, %r5, 1;
xor.b32 %r8, %r5, 1;
shl.b32 %r6, %r4, 3;
add.u32 %r6, %r6, %r2;
add.u32 %r9, %r6, 16;
shl.b32 %r7, %r4, 11;
add.u32 %r7, %r7, %r1;"""

# Registers: r0 thread, r1 stages, r2 barriers (two full, two empty), r3 step; then of the step r4 stage, r5 phase,
# r6 full, r7 the stage's memory, r8 the other phase, r9 empty.
_KERNEL = (
    """.version 9.4
.target sm_120a
.address_size 64

.visible .entry {name}({source}, .param .u64 .ptr .global .align 16 output)
.reqntid 160, 1, 1
{{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %d<8>;
.shared .align 128 .b8 stages[4096];
.shared .align 8 .b8 barriers[32];
mov.u32 %r0, %tid.x;
mov.u32 %r1, stages;
mov.u32 %r2, barriers;
mov.u32 %r3, 0;
{load}
ld.param.b64 %d1, [output];
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.init.shared::cta.b64 [%r2+8], 1;
mbarrier.init.shared::cta.b64 [%r2+16], {arrivals};
mbarrier.init.shared::cta.b64 [%r2+24], {arrivals};
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
setp.lt.u32 %p1, %r0, 128;
@%p1 bra CONSUME;
setp.ne.u32 %p2, %r0, 128;
@%p2 bra FINISH;
PRODUCE:
"""
    + _STAGE
    + """
{wait_empty}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 2048;
{copy}
{produce_again}
bra.uni FINISH;
CONSUME:
"""
    + _STAGE
    + """
{wait_full}
shl.b32 %r10, %r0, 4;
add.u32 %r11, %r7, %r10;
ld.shared.v4.b32 {{%r12, %r13, %r14, %r15}}, [%r11];
{arrive}
mul.wide.u32 %d2, %r3, 2048;
cvt.u64.u32 %d3, %r10;
add.s64 %d2, %d2, %d3;
add.s64 %d2, %d2, %d1;
st.global.v4.b32 [%d2], {{%r12, %r13, %r14, %r15}};
{consume_again}
FINISH:
ret;
}}
"""
)
