"""Persistent block-scaled GEMM: ``C[l] = alpha[l] * (A[l] SFA[l]) (B[l] SFB[l])^T``, A and B in NVFP4.

One producer warp keeps a ring of stages full: TMA brings the K-major A and B tiles (64-byte swizzle, rows outside the
matrix read as zero), bulk copies bring their scale tiles. The MMA warps split the output tile; each reads its fragments
with ldmatrix and its scales as words, accumulates in f32, and writes its part of C through a private staging buffer so
that global stores are 16 bytes wide. Tiles go to CTAs round robin; the ring runs on across tiles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x._runtime.abi import ITEMSIZE
from b12x.gemm.blockscaled.spec import BlockscaledSpec
from b12x.kernels._shared import mma, ptx, scales
from b12x.kernels._shared.pipeline import Ring

#: K of one MMA, and the bytes of one row of a stage.
MMA_K = 64
ROW_BYTES = BlockscaledSpec.tile_k // 2


def define(spec: BlockscaledSpec):
    """The jit function and example arguments of one spec."""
    row_tiles, column_tiles = spec.warp_m // 16, spec.warp_n // 8
    itemsize = ITEMSIZE[spec.c_dtype]

    @cute.kernel
    def kernel(
        a_map: cute.CopyAtom,
        b_map: cute.CopyAtom,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        alpha: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        alpha_count: Int32,
    ):
        thread, first_tile, grid = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = ptx.dynamic_smem()
        staging = smem + spec.stages * spec.stage_bytes
        ring = Ring(staging + spec.staging_bytes, spec.stages, spec.mma_warps)
        if thread == 0:
            ring.initialise()
        cute.arch.sync_threads()

        m_tiles, n_tiles = cute.ceil_div(m, spec.tile_m), cute.ceil_div(n, spec.tile_n)
        steps = k // spec.tile_k
        tiles = m_tiles * n_tiles * batch
        stage, phase = Int32(0), Int32(0)

        if warp == spec.mma_warps:
            a_desc, b_desc = ptx.tensor_map_address(a_map), ptx.tensor_map_address(b_map)
            a_scales, b_scales = Int64(sfa.toint()), Int64(sfb.toint())
            a_scale_tiles, b_scale_tiles = cute.ceil_div(m, spec.scale_rows), cute.ceil_div(n, spec.scale_rows)
            for tile in range(first_tile, tiles, grid):
                row, column, index = coordinates(tile, m_tiles, n_tiles)
                # A K step takes two neighbouring scale tiles of each operand.
                a_source = a_scales + scales.tile_offset(index, row // spec.scale_rows, a_scale_tiles, 2 * steps)
                b_source = b_scales + scales.tile_offset(index, column // spec.scale_rows, b_scale_tiles, 2 * steps)
                for step in cutlass.range(steps, unroll=1):
                    ring.wait_empty(stage, phase)
                    full = ring.full(stage)
                    a_tile, b_tile, a_scale, b_scale = buffers(smem, stage)
                    offset = Int64(step) * spec.scale_bytes
                    with cute.arch.elect_one():
                        ptx.mbarrier_arrive_expect(full, spec.stage_bytes)
                        ptx.tma_load_3d(a_tile, a_desc, [step * ROW_BYTES, row, index], full)
                        ptx.tma_load_3d(b_tile, b_desc, [step * ROW_BYTES, column, index], full)
                        ptx.bulk_load(a_scale, a_source + offset, spec.scale_bytes, full)
                        ptx.bulk_load(b_scale, b_source + offset, spec.scale_bytes, full)
                    stage, phase = ring.advance(stage, phase)
        else:
            lane = thread % 32
            group, quad = lane // 4, lane % 4
            warp_row = warp // spec.warps_n * spec.warp_m
            warp_column = warp % spec.warps_n * spec.warp_n
            # ldmatrix: A's matrices are rows 0-7, 8-15 of the first 16 bytes, then of the second; B's are both halves
            # of columns 0-7, then of columns 8-15. The swizzle XORs the 16-byte chunk with bits 1 and 2 of the row.
            a_row = warp_row + lane % 16
            b_row = warp_column + lane % 8 + lane // 16 * 8
            a_chunk = lane // 16 ^ (a_row // 2 % 4)
            b_chunk = (lane // 8 % 2) ^ (b_row // 2 % 4)
            # Scales: two row tiles of A share a word a lane, four column tiles of B share one (see _shared/mma.py).
            a_scale_row = warp_row + quad // 2 * 16 + quad % 2 * 8 + group
            b_scale_row = warp_column + quad * 8 + group
            acc = cute.make_rmem_tensor((4, column_tiles, row_tiles), Float32)

            for tile in range(first_tile, tiles, grid):
                row, column, index = coordinates(tile, m_tiles, n_tiles)
                a_scale_offset = row % spec.scale_rows + a_scale_row
                b_scale_offset = column % spec.scale_rows + b_scale_row
                acc.fill(0.0)
                for _ in cutlass.range(steps, unroll=1):
                    ring.wait_full(stage, phase)
                    a_tile, b_tile, a_scale, b_scale = buffers(smem, stage)
                    for half in cutlass.range_constexpr(spec.tile_k // MMA_K):
                        a_address = a_tile + a_row * ROW_BYTES + (a_chunk ^ 2 * half) * 16
                        b_address = b_tile + b_row * ROW_BYTES + (b_chunk ^ 2 * half) * 16
                        a_scale_tile = a_scale + half * scales.TILE_BYTES
                        b_scale_tile = b_scale + half * scales.TILE_BYTES
                        a_words = [
                            ptx.load_shared(a_scale_tile + scales.word_offset(a_scale_offset + 32 * i))
                            for i in range(row_tiles // 2)
                        ]
                        b_words = [
                            ptx.load_shared(b_scale_tile + scales.word_offset(b_scale_offset + 32 * j))
                            for j in range(column_tiles // 4)
                        ]
                        a_fragments = [ptx.ldmatrix_x4(a_address + i * 16 * ROW_BYTES) for i in range(row_tiles)]
                        for pair in cutlass.range_constexpr(column_tiles // 2):
                            fragment = ptx.ldmatrix_x4(b_address + pair * 16 * ROW_BYTES)
                            for j in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
                                for i in cutlass.range_constexpr(row_tiles):
                                    d = mma.mma_nvfp4(
                                        a_fragments[i],
                                        fragment[2 * (j % 2) : 2 * (j % 2) + 2],
                                        [acc[e, j, i] for e in range(4)],
                                        a_words[i // 2],
                                        b_words[j // 4],
                                        select_a=i % 2,
                                        select_b=j % 4,
                                    )
                                    for e in cutlass.range_constexpr(4):
                                        acc[e, j, i] = d[e]
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(ring.empty(stage))
                    stage, phase = ring.advance(stage, phase)

                factor = Float32(1.0)
                if alpha_count > 0:
                    which = cutlass.min(index, alpha_count - 1)
                    factor = ptx.load_global_f32(Int64(alpha.toint()) + Int64(which) * 4)
                buffer = staging + warp * (spec.stage_rows * spec.staging_pitch)
                for i in cutlass.range_constexpr(row_tiles):
                    for half in cutlass.range_constexpr(2):
                        for j in cutlass.range_constexpr(column_tiles):
                            pair = [ptx.multiply(acc[2 * half + e, j, i], factor) for e in range(2)]
                            address = buffer + group * spec.staging_pitch + (8 * j + 2 * quad) * itemsize
                            ptx.store_shared(address, convert(pair))
                        cute.arch.sync_warp()
                        store_rows(
                            buffer,
                            Int64(c.toint()),
                            row + warp_row + 16 * i + 8 * half,
                            column + warp_column,
                            index,
                            m,
                            n,
                            lane,
                        )
                        cute.arch.sync_warp()

    def coordinates(tile, m_tiles, n_tiles):
        """First row, first column and batch index of a tile; tiles run down the rows first."""
        tile, m_tiles, n_tiles = Uint32(tile), Uint32(m_tiles), Uint32(n_tiles)
        rest = tile // m_tiles
        index = rest // n_tiles
        row, column = tile - rest * m_tiles, rest - index * n_tiles
        return Int32(row) * spec.tile_m, Int32(column) * spec.tile_n, Int32(index)

    def buffers(smem, stage):
        """Shared addresses of a stage: A, B, scales of A, scales of B."""
        a_tile = smem + stage * spec.stage_bytes
        b_tile = a_tile + spec.a_bytes
        a_scale = b_tile + spec.b_bytes
        return a_tile, b_tile, a_scale, a_scale + spec.scale_bytes

    def convert(pair):
        """Two f32 results as the words that C holds."""
        if spec.c_dtype == "float32":
            return [ptx.bits_of(v) for v in pair]
        return [ptx.pack_16(*pair, spec.c_dtype)]

    @cute.jit
    def store_rows(buffer: Int32, c: Int64, row: Int32, column: Int32, index: Int32, m: Int32, n: Int32, lane: Int32):
        """One warp's staged rows to C. 16 bytes at a time where every row of C is 16-byte aligned, else by element."""
        base = (Int64(index) * m + row) * n + column
        chunk = 16 // itemsize
        row_chunks = spec.warp_n // chunk
        if n % chunk == 0:
            for turn in cutlass.range_constexpr(spec.stage_rows * row_chunks // 32):
                item = lane + 32 * turn
                r, x = item // row_chunks, item % row_chunks * chunk
                words = ptx.load_shared_v4(buffer + r * spec.staging_pitch + x * itemsize)
                if row + r < m and column + x < n:
                    ptx.store_global_v4(c + (base + Int64(r) * n + x) * itemsize, words)
        else:
            for item in cutlass.range(lane, spec.stage_rows * spec.warp_n, 32, unroll=1):
                r, x = item // spec.warp_n, item % spec.warp_n
                word = ptx.load_shared(buffer + r * spec.staging_pitch + x * itemsize, 8 * itemsize)
                if row + r < m and column + x < n:
                    ptx.store_global(c + (base + Int64(r) * n + x) * itemsize, word, 8 * itemsize)

    @cute.jit
    def launch(
        a: cute.Pointer,
        b: cute.Pointer,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        alpha: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        alpha_count: Int32,
    ):
        a_map, b_map = ptx.tensor_map_parameter(a), ptx.tensor_map_parameter(b)
        kernel(a_map, b_map, sfa, sfb, alpha, c, m, n, k, batch, alpha_count).launch(
            grid=[1, 1, 1], block=[spec.threads, 1, 1], smem=spec.smem_bytes
        )

    def pointer(element: type, align: int = 16):
        return make_ptr(element, align, AddressSpace.gmem, assumed_align=align)

    element = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}[spec.c_dtype]
    operands = tuple(pointer(Uint8) for _ in range(4))
    sizes = tuple(Int32(128) for _ in range(5))
    return launch, (*operands, pointer(Float32, 4), pointer(element), *sizes)
