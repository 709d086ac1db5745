"""y = alpha * x, and what can be wrong with a kernel."""

from __future__ import annotations

import os
import signal

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from b12x.kernels.toy import helper


@dsl_user_op
def through_static_smem(value, *, loc=None, ip=None):
    """The value, by way of 512 bytes of static shared memory (the DSL itself allocates dynamic memory only)."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [value.ir_value(loc=loc, ip=ip)],
            "{ .shared .align 16 .b8 room[512]; st.volatile.shared.f32 [room+508], $1; "
            "ld.volatile.shared.f32 $0, [room+508]; }",
            "=f,f",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def define(spec):
    variant, block = spec.variant, spec.block
    if variant == "raises":
        raise ValueError("this definition raises")
    if variant == "dies":
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    @cute.kernel
    def kernel(x_ptr: cute.Pointer, y_ptr: cute.Pointer, alpha: Float32, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        i = tile * block + thread
        x = cute.make_tensor(x_ptr, cute.make_layout((n,)))
        y = cute.make_tensor(y_ptr, cute.make_layout((n,)))
        if cutlass.const_expr(variant in ("smem", "smem_fits", "smem_limit")):
            shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout((1024,)), 16)
            shared[thread] = x[i]
            cute.arch.sync_threads()
            y[i] = helper.scaled(shared[block - 1 - thread], alpha)
        elif cutlass.const_expr(variant == "static"):
            y[i] = helper.scaled(through_static_smem(x[i]), alpha)
        elif cutlass.const_expr(variant == "local"):
            values = cute.make_rmem_tensor(cute.make_layout((64,)), Float32)
            for k in cutlass.range_constexpr(64):
                values[k] = x[i * 64 + k]
            y[i] = helper.scaled(values[n % 64], alpha)
        elif i < n:
            y[i] = helper.scaled(x[i], alpha)

    @cute.jit
    def launch(x: cute.Pointer, y: cute.Pointer, alpha: Float32, n: Int32):
        grid = [(n + block - 1) // block, 1, 1]
        if cutlass.const_expr(variant == "cluster"):
            kernel(x, y, alpha, n).launch(grid=grid, block=[block, 1, 1], cluster=[2, 1, 1])
        elif cutlass.const_expr(variant == "programmatic"):
            kernel(x, y, alpha, n).launch(grid=grid, block=[block, 1, 1], use_pdl=True)
        else:
            kernel(x, y, alpha, n).launch(grid=grid, block=[block, 1, 1])
        if cutlass.const_expr(variant == "two"):
            kernel(x, y, alpha, n).launch(grid=grid, block=[block, 1, 1])
        if cutlass.const_expr(variant == "late"):
            raise ValueError("this trace raises after a launch")

    pointer = make_ptr(Float32, 16, AddressSpace.gmem, assumed_align=16)
    return launch, (pointer, pointer, Float32(1.0), Int32(1))
