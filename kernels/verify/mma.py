"""The MMA probe: a warp chains ``mma.sync`` over K into one m16n8 accumulator and stores it.

The host has arranged the operands as the lanes' registers want them, so nothing but the tensor core computes: what the
result differs by from the exact sum is how that core accumulates.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import dsl_user_op

from b12x.kernels._shared import ptx
from b12x.verify.mma.spec import MmaSpec

#: Kind -> instruction (PTX ISA 9.7.15.5) after ``mma.sync.aligned``. Scales are byte 0, or all four, of the words that
#: the first lanes of each quad hold.
_FORMS = {
    "f16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bf16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "e4m3": "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "mxf8f6f4": "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0",
    "mxf4nvf4": "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
}
LANE_BYTES = 16


@dsl_user_op
def multiply(kind: str, a: list, b: list, c: list, *, loc: Any = None, ip: Any = None) -> list:
    """``D = A B + C`` of a warp; ``b`` is two words of B and the scale words of A and of B."""
    scales = ", {$14}, {0, 0}, {$15}, {0, 0}" if "block_scale" in _FORMS[kind] else ""
    template = (
        f"mma.sync.aligned.{_FORMS[kind]} "
        f"{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}}{scales};"
    )
    operands = [*a, *b[:2], *c, *(b[2:] if scales else [])]
    return ptx.inline_ptx(template, [Float32] * 4, operands, side_effects=False, loc=loc, ip=ip)


def define(spec: MmaSpec):
    """The jit function and example arguments of one spec."""

    @cute.kernel
    def kernel(a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, steps: Int32):
        lane, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        offset = (Int64(tile) * steps * 32 + lane) * LANE_BYTES
        a_address, b_address = Int64(a.toint()) + offset, Int64(b.toint()) + offset
        acc = cute.make_rmem_tensor((4,), Float32)
        acc.fill(0.0)
        for step in cutlass.range(steps, unroll=1):
            distance = Int64(step) * (32 * LANE_BYTES)
            a_words = ptx.load_global_v4_if(a_address + distance, Int32(1))
            b_words = ptx.load_global_v4_if(b_address + distance, Int32(1))
            result = multiply(spec.kind, a_words, b_words, [acc[e] for e in range(4)])
            for e in cutlass.range_constexpr(4):
                acc[e] = result[e]
        target = Int64(d.toint()) + (Int64(tile) * 32 + lane) * LANE_BYTES
        ptx.store_global_v4(target, [ptx.bits_of(acc[e]) for e in range(4)])

    @cute.jit
    def launch(a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, steps: Int32):
        kernel(a, b, d, steps).launch(grid=[1, 1, 1], block=[32, 1, 1])

    def pointer(element: type):
        return make_ptr(element, 16, AddressSpace.gmem, assumed_align=16)

    return launch, (pointer(Uint32), pointer(Uint32), pointer(Float32), Int32(1))
