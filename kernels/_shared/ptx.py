"""PTX instructions as DSL operations.

Addresses are plain integers: Int64 in global memory, Int32 in shared memory. A kernel computes them from its layouts
and names the access here, so what reaches the PTX is what the kernel wrote. Section numbers refer to the PTX ISA
manual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

_CONSTRAINT = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l"}
_MLIR_TYPE = {Float32: "f32", Int32: "i32", Uint32: "i32", Int64: "i64"}


def inline_ptx(
    template: str,
    results: Sequence[type],
    operands: Sequence[Any],
    *,
    side_effects: bool,
    loc: Any,
    ip: Any,
) -> list[Any]:
    """One inline PTX statement. ``$0..`` are the results, then the operands, each a DSL number."""
    constraints = [f"={_CONSTRAINT[r]}" for r in results] + [_CONSTRAINT[type(v)] for v in operands]
    if side_effects:
        constraints.append("~{memory}")
    names = [_MLIR_TYPE[r] for r in results]
    kind = None
    if len(names) == 1:
        kind = ir.Type.parse(names[0])
    elif names:
        kind = ir.Type.parse(f"!llvm.struct<({','.join(names)})>")
    value = llvm.inline_asm(
        kind,
        [v.ir_value(loc=loc, ip=ip) for v in operands],
        template,
        ",".join(constraints),
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(results) == 1:
        return [results[0](value)]
    element = {Float32: T.f32, Int32: T.i32, Uint32: T.i32, Int64: T.i64}
    return [r(llvm.extractvalue(element[r](), value, [i], loc=loc, ip=ip)) for i, r in enumerate(results)]


# ---- global memory (9.7.9 Data Movement) --------------------------------------------------------------------------


@dsl_user_op
def load_global_v4_if(address: Int64, live: Int32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four 32-bit words from a 16-byte aligned address, read-only path; zeros, and no access, where ``live`` is 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        [Uint32] * 4,
        [Int64(address), Int32(live)],
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stream_global_v4(address: Int64, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four 32-bit words from a 16-byte aligned address that nobody else reads: read-only path, not kept in the L1."""
    template = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(template, [Uint32] * 4, [Int64(address)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_global_u8(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One byte in the low byte of a word, read-only path."""
    return inline_ptx("ld.global.nc.u8 $0, [$1];", [Uint32], [Int64(address)], side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_global_f32(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    """One f32, read-only path."""
    return inline_ptx("ld.global.nc.f32 $0, [$1];", [Float32], [Int64(address)], side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_global_f32_if(address: Int64, live: Int32, otherwise: float, *, loc: Any = None, ip: Any = None) -> Float32:
    """One f32, read-only path; ``otherwise``, and no access, where ``live`` is 0."""
    template = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, $3; @p ld.global.nc.f32 $0, [$1]; }"
    operands = [Int64(address), Int32(live), Float32(otherwise)]
    return inline_ptx(template, [Float32], operands, side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_global_v2(address: Int64, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Two 32-bit words from an 8-byte aligned address, read-only path."""
    template = "ld.global.nc.v2.b32 {$0, $1}, [$2];"
    return inline_ptx(template, [Uint32] * 2, [Int64(address)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_global(address: Int64, bits: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """16 bits in the low half of a word, or 32 bits, read-only path."""
    template = {
        16: "{ .reg .b16 lo, hi; ld.global.nc.b16 lo, [$1]; mov.b16 hi, 0; mov.b32 $0, {lo, hi}; }",
        32: "ld.global.nc.b32 $0, [$1];",
    }[bits]
    return inline_ptx(template, [Uint32], [Int64(address)], side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_global_if(address: Int64, live: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One 32-bit word, read-only path; zero, and no access, where ``live`` is 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
        [Uint32],
        [Int64(address), Int32(live)],
        side_effects=True,
        loc=loc,
        ip=ip,
    )[0]


@dsl_user_op
def load_global_v2_if(address: Int64, live: Int32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Two 32-bit words from an 8-byte aligned address, read-only path; zeros, and no access, where ``live`` is 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.nc.v2.b32 {$0, $1}, [$2]; }",
        [Uint32] * 2,
        [Int64(address), Int32(live)],
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_global_v2(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Two 32-bit words to an 8-byte aligned address."""
    operands = [Int64(address), *(Uint32(w) for w in words)]
    inline_ptx("st.global.v2.b32 [$0], {$1, $2};", [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_global_v2_if(
    address: Int64, words: Sequence[Uint32], live: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Two 32-bit words to an 8-byte aligned address, where ``live`` is not 0."""
    operands = [Int64(address), *(Uint32(w) for w in words), Int32(live)]
    template = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2}; }"
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_global_v4(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Four 32-bit words to a 16-byte aligned address."""
    operands = [Int64(address), *(Uint32(w) for w in words)]
    inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_global(address: Int64, word: Uint32, bits: int, *, loc: Any = None, ip: Any = None) -> None:
    """The low 16 bits, or all 32 bits, of a word."""
    template = {
        16: "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; st.global.b16 [$0], lo; }",
        32: "st.global.b32 [$0], $1;",
    }[bits]
    inline_ptx(template, [], [Int64(address), Uint32(word)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_global_u8(address: Int64, word: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low byte of a word."""
    template = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h; }"
    inline_ptx(template, [], [Int64(address), Uint32(word)], side_effects=True, loc=loc, ip=ip)


# ---- shared memory ------------------------------------------------------------------------------------------------


@dsl_user_op
def dynamic_smem(*, loc: Any = None, ip: Any = None) -> Int32:
    """Shared address of the CTA's dynamic shared memory; 1024-byte aligned by the PTX declaration."""
    pointer = cute.arch.get_dyn_smem(cute.Uint8, alignment=1024, loc=loc, ip=ip)
    return Int32(pointer.toint(loc=loc, ip=ip))


@dsl_user_op
def load_shared(address: Int32, bits: int = 32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One word, or 16 bits in the low half of a word."""
    template = {
        16: "{ .reg .b16 lo, hi; ld.shared.b16 lo, [$1]; mov.b16 hi, 0; mov.b32 $0, {lo, hi}; }",
        32: "ld.shared.b32 $0, [$1];",
    }[bits]
    return inline_ptx(template, [Uint32], [Int32(address)], side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_shared_v2(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Two words from an 8-byte aligned address."""
    return inline_ptx(
        "ld.shared.v2.b32 {$0, $1}, [$2];", [Uint32] * 2, [Int32(address)], side_effects=True, loc=loc, ip=ip
    )


@dsl_user_op
def load_shared_v4(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four words from a 16-byte aligned address."""
    template = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(template, [Uint32] * 4, [Int32(address)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared(address: Int32, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """One, two or four words to an address aligned to their size."""
    template = {
        1: "st.shared.b32 [$0], $1;",
        2: "st.shared.v2.b32 [$0], {$1, $2};",
        4: "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
    }[len(words)]
    operands = [Int32(address), *(Uint32(w) for w in words)]
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared_v4(address: Int32, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Four words to a 16-byte aligned address."""
    operands = [Int32(address), *(Uint32(w) for w in words)]
    inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared_u16(address: Int32, word: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low 16 bits of a word."""
    template = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; st.shared.b16 [$0], lo; }"
    inline_ptx(template, [], [Int32(address), Uint32(word)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def ldmatrix_x4(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four 8x8 matrices of 16-bit elements (9.7.15.5.15): lane ``8 i + r`` gives the address of row r of matrix i, and
    receives in register i the 4 bytes at byte ``4 (lane % 4)`` of row ``lane // 4`` of matrix i."""
    template = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(template, [Uint32] * 4, [Int32(address)], side_effects=True, loc=loc, ip=ip)


# ---- clusters (9.7.9.23, 9.7.13.4) ---------------------------------------------------------------------------------


@dsl_user_op
def cluster_rank(*, loc: Any = None, ip: Any = None) -> Int32:
    """This CTA's place in its cluster."""
    return inline_ptx("mov.u32 $0, %cluster_ctarank;", [Int32], [], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def cluster_size(*, loc: Any = None, ip: Any = None) -> Int32:
    """CTAs in the cluster."""
    return inline_ptx("mov.u32 $0, %cluster_nctarank;", [Int32], [], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def cluster_sync(*, loc: Any = None, ip: Any = None) -> None:
    """A barrier of all threads of the cluster, whole warps at a time; what was written to shared memory before it may
    be read by any CTA of the cluster after it."""
    template = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    inline_ptx(template, [], [], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def cluster_sync_relaxed(*, loc: Any = None, ip: Any = None) -> None:
    """A barrier of all threads of the cluster, whole warps at a time, that makes no writes visible, so it does not wait
    for any. At the end it keeps a CTA's shared memory there until the others have read it."""
    template = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    inline_ptx(template, [], [], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def peer_address(address: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The shared::cluster address of a shared address of this CTA in the CTA of another rank."""
    operands = [Int32(address), Int32(rank)]
    return inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def load_peer_f32x2(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Two f32 from an 8-byte aligned shared::cluster address."""
    template = "ld.shared::cluster.v2.f32 {$0, $1}, [$2];"
    return inline_ptx(template, [Float32] * 2, [Int32(address)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_peer_v4(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Four f32 from a 16-byte aligned shared::cluster address."""
    template = "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(template, [Float32] * 4, [Int32(address)], side_effects=True, loc=loc, ip=ip)


# ---- asynchronous copies (9.7.9.25) -------------------------------------------------------------------------------


@dsl_user_op
def copy_async(smem: Int32, address: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes to shared memory, both ends aligned to 16: ``size`` of them are read, 0 or 16, the rest is zero."""
    template = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    operands = [Int32(smem), Int64(address), Int32(size)]
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_async_commit(*, loc: Any = None, ip: Any = None) -> None:
    """Make a group of this thread's copies since the last one."""
    inline_ptx("cp.async.commit_group;", [], [], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_async_wait(pending: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until at most ``pending`` of this thread's latest groups are under way."""
    inline_ptx(f"cp.async.wait_group {pending};", [], [], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_async_4(smem: Int32, address: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """As :func:`copy_async`, of 4 bytes: ``size`` is 0 or 4."""
    template = "cp.async.ca.shared.global [$0], [$1], 4, $2;"
    operands = [Int32(smem), Int64(address), Int32(size)]
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def tensor_map_address(atom: Any, *, loc: Any = None, ip: Any = None) -> Int64:
    """Generic address of the CUtensorMap that a TMA atom parameter carries."""
    kind = ir.Type.parse("!cute.ptr<i8, generic, align<64>>")
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    pointer = cute_nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip)
    return Int64(pointer.toint(loc=loc, ip=ip))


def tensor_map_parameter(base: cute.Pointer) -> Any:
    """A TMA atom for a kernel parameter list, inside the jit function: it reserves the 128 bytes of a CUtensorMap.

    What the atom says of tensor and tile is never used: the launch encodes the map from the spec's ``TensorMap``.
    """
    tensor = cute.make_tensor(base, cute.make_layout((16, 16), stride=(16, 1)))
    tile = cute.make_layout((16, 16), stride=(16, 1))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, (16, 16))[0]


@dsl_user_op
def tma_load_3d(
    smem: Int32, tensor_map: Int64, coords: Sequence[Int32], mbarrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """The box at ``coords`` (innermost first) to shared memory, completing on ``mbarrier``; outside elements read 0."""
    template = (
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];"
    )
    operands = [Int32(smem), Int64(tensor_map), *(Int32(c) for c in coords), Int32(mbarrier)]
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def bulk_load(smem: Int32, address: Int64, size: int, mbarrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """``size`` contiguous bytes to shared memory, all 16-byte aligned, completing on ``mbarrier``."""
    template = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    operands = [Int32(smem), Int64(address), Int32(size), Int32(mbarrier)]
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


# ---- mbarriers (9.7.13.15) ----------------------------------------------------------------------------------------


@dsl_user_op
def mbarrier_init(mbarrier: Int32, arrivals: int, *, loc: Any = None, ip: Any = None) -> None:
    """A barrier whose phase completes after ``arrivals`` arrivals and all expected bytes."""
    operands = [Int32(mbarrier), Int32(arrivals)]
    inline_ptx("mbarrier.init.shared::cta.b64 [$0], $1;", [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_arrive(mbarrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival with release semantics."""
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [Int32(mbarrier)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_arrive_expect(mbarrier: Int32, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Expect ``size`` more bytes in this phase, then arrive once."""
    operands = [Int32(mbarrier), Int32(size)]
    template = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    inline_ptx(template, [], operands, side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_wait(mbarrier: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Block until the phase of the given parity has completed; parity 1 passes at once on a fresh barrier."""
    template = (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
        "@done bra.uni DONE; bra.uni WAIT; DONE: }"
    )
    inline_ptx(template, [], [Int32(mbarrier), Int32(parity)], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def fence_mbarrier_init(*, loc: Any = None, ip: Any = None) -> None:
    """Make initialised barriers visible to the asynchronous proxy."""
    inline_ptx("fence.mbarrier_init.release.cluster;", [], [], side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def set_registers(count: int, increase: bool, *, loc: Any = None, ip: Any = None) -> None:
    """Registers a thread from here on, by all warps of four that start at a multiple of four (9.7.20.5)."""
    template = f"setmaxnreg.{'inc' if increase else 'dec'}.sync.aligned.u32 {count};"
    inline_ptx(template, [], [], side_effects=True, loc=loc, ip=ip)


# ---- arithmetic and conversion ------------------------------------------------------------------------------------


@dsl_user_op
def max_u16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Halfwise unsigned maximum; orders non-negative bf16 and f16 values by magnitude."""
    return inline_ptx("max.u16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def max_u32(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Unsigned maximum; orders the bit patterns of non-negative f32 values."""
    return inline_ptx("max.u32 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def multiply(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """f32 product, rounded to nearest even, subnormals kept, never contracted into an fma."""
    return inline_ptx(
        "mul.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], side_effects=False, loc=loc, ip=ip
    )[0]


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``a * b + c`` in f32, rounded once to nearest even, subnormals kept."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return inline_ptx("fma.rn.f32 $0, $1, $2, $3;", [Float32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def negate(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """An f32 with the other sign."""
    return inline_ptx("neg.f32 $0, $1;", [Float32], [Float32(a)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def minimum(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """f32 minimum; the other operand where one is NaN."""
    return inline_ptx("min.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """f32 maximum; the other operand where one is NaN."""
    operands = [Float32(a), Float32(b)]
    return inline_ptx("max.f32 $0, $1, $2;", [Float32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def largest_magnitude(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of two f32 magnitudes; the other one where one is NaN."""
    template = "{ .reg .f32 p, q; abs.f32 p, $1; abs.f32 q, $2; max.f32 $0, p, q; }"
    return inline_ptx(template, [Float32], [Float32(a), Float32(b)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def reciprocal(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Correctly rounded 1/a, subnormals kept."""
    return inline_ptx("rcp.rn.f32 $0, $1;", [Float32], [Float32(a)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def unpack_16(word: Uint32, dtype: str, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """The two bf16 or f16 values of a word as f32, low half first; exact."""
    template = {
        "bfloat16": "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "float16": "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    }[dtype]
    return inline_ptx(template, [Float32] * 2, [Uint32(word)], side_effects=False, loc=loc, ip=ip)


@dsl_user_op
def pack_16(low: Float32, high: Float32, dtype: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two f32 values rounded to nearest even into one word of bf16 or f16."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    operands = [Float32(high), Float32(low)]
    return inline_ptx(f"cvt.rn.{kind}.f32 $0, $1, $2;", [Uint32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def bits_of(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The bit pattern of an f32."""
    return inline_ptx("mov.b32 $0, $1;", [Uint32], [Float32(value)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def float_of(bits: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The f32 of a bit pattern."""
    return inline_ptx("mov.b32 $0, $1;", [Float32], [Uint32(bits)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def to_e4m3(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """E4M3 code in the low byte: nearest even, saturating at 448."""
    template = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, $1; cvt.u32.u16 $0, h; }"
    return inline_ptx(template, [Uint32], [Float32(value)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def to_e4m3x4(values: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> Uint32:
    """Four E4M3 codes, the first in the lowest byte: nearest even, saturating at 448."""
    template = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }"
    )
    return inline_ptx(template, [Uint32], [Float32(v) for v in values], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def from_e4m3(code: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The value of the E4M3 code in the low byte; exact."""
    template = (
        "{ .reg .b16 h, lo, hi; .reg .b32 w; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 w, h; "
        "mov.b32 {lo, hi}, w; cvt.f32.f16 $0, lo; }"
    )
    return inline_ptx(template, [Float32], [Uint32(code)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def bf16x2_of_e4m3x4(codes: Uint32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """The values of four E4M3 codes as two words of bf16, the lowest byte first; exact."""
    template = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.bf16x2.e4m3x2 $0, lo; cvt.rn.bf16x2.e4m3x2 $1, hi; }"
    return inline_ptx(template, [Uint32] * 2, [Uint32(codes)], side_effects=False, loc=loc, ip=ip)


@dsl_user_op
def bf16x2_of_e8m0x2(codes: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The powers of two of the E8M0 codes in the low two bytes as bf16; exact: 2^-127 for 0, NaN for 255."""
    template = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.bf16x2.ue8m0x2 $0, lo; }"
    return inline_ptx(template, [Uint32], [Uint32(codes)], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def multiply_bf16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two bf16 products, each rounded to nearest even, subnormals kept, never contracted into an fma."""
    operands = [Uint32(a), Uint32(b)]
    return inline_ptx("mul.rn.bf16x2 $0, $1, $2;", [Uint32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def to_e2m1x8(values: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> Uint32:
    """Eight E2M1 codes, the first in the lowest nibble: nearest even, saturating at 6."""
    pairs = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1}; " for i in range(4))
    template = f"{{ .reg .b8 b0, b1, b2, b3; {pairs}mov.b32 $0, {{b0, b1, b2, b3}}; }}"
    return inline_ptx(template, [Uint32], [Float32(v) for v in values], side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def permute_bytes(low: Uint32, high: Uint32, selector: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Byte i of the result is byte ``selector nibble i`` of the eight bytes {high, low}."""
    operands = [Uint32(low), Uint32(high), Uint32(selector)]
    return inline_ptx("prmt.b32 $0, $1, $2, $3;", [Uint32], operands, side_effects=False, loc=loc, ip=ip)[0]


@dsl_user_op
def shuffle_xor(value: Uint32, mask: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The value of lane ``lane ^ mask``."""
    template = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    return inline_ptx(template, [Uint32], [Uint32(value)], side_effects=True, loc=loc, ip=ip)[0]


@dsl_user_op
def select(flag: Uint32, if_set: Uint32, if_clear: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """``if_set`` where the flag is not zero, else ``if_clear``; no branch."""
    template = "{ .reg .pred p; setp.ne.u32 p, $1, 0; selp.b32 $0, $2, $3, p; }"
    operands = [Uint32(flag), Uint32(if_set), Uint32(if_clear)]
    return inline_ptx(template, [Uint32], operands, side_effects=False, loc=loc, ip=ip)[0]
