"""Rows of bf16 or fp16 to NVFP4: packed E2M1 payload and swizzled E4M3 block scales.

A CTA of 128 threads owns one scale tile: 128 rows by 64 columns. Four neighbouring lanes take the four 16-element
blocks of a row, and a warp takes 8 of the residues ``row % 32``, each thread four rows at distance 32. So a quad's
loads are 128 contiguous bytes, its payload stores are 32, and after a 4x4 byte transpose in the quad a warp's scale
stores are 128. Rows past the live count are not read and get no payload; their scales are written as zero, so the
tile is whole. Output rows may be wider than the source's: their further codes and scales are zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x.kernels._shared import ptx, quantize, scales
from b12x.quantization.nvfp4.spec import Nvfp4QuantizeSpec

BLOCK = 16
TILE_COLUMNS = scales.COLUMNS * BLOCK
ROW_STEP = 32


def define(spec: Nvfp4QuantizeSpec):
    """The jit function and example arguments of one spec."""
    dtype = spec.dtype

    @cute.kernel
    def kernel(
        x: cute.Pointer,
        global_scale: cute.Pointer,
        packed: cute.Pointer,
        scale_bytes: cute.Pointer,
        m: Int32,
        k: Int32,
        k_out: Int32,
    ):
        # Indices are unsigned, so that divisions by powers of two are shifts.
        thread, tile = Uint32(cute.arch.thread_idx()[0]), Uint32(cute.arch.block_idx()[0])
        m, k, k_out = Uint32(m), Uint32(k), Uint32(k_out)
        column_tiles = k_out // TILE_COLUMNS
        row_tile = tile // column_tiles
        column_tile = tile - row_tile * column_tiles
        lane = thread % 4
        residue = thread // 4
        column = column_tile * TILE_COLUMNS + lane * BLOCK

        scale = ptx.load_global_f32(Int64(global_scale.toint()))
        inverse_scale = ptx.reciprocal(scale)
        row = row_tile * scales.ROWS + residue
        source = Int64(x.toint()) + (Int64(row) * k + column) * 2
        inside = [Int32(column + part * (BLOCK // 2) < k) for part in range(2)]
        rows = []
        for step in cutlass.range_constexpr(4):
            live = Int32(row + step * ROW_STEP < m)
            address = source + Int64(k) * (step * ROW_STEP * 2)
            parts = [ptx.load_global_v4_if(address + 16 * part, live & inside[part]) for part in range(2)]
            rows.append(parts[0] + parts[1])

        word = Uint32(0)
        target = Int64(packed.toint()) + ((Int64(row) * k_out + column) >> 1)
        for step in cutlass.range_constexpr(4):
            codes, block_scale = quantize.nvfp4_block(rows[step], dtype, scale, inverse_scale)
            word = word | (block_scale << (8 * step))
            if row + step * ROW_STEP < m:
                ptx.store_global_v2(target + Int64(k_out) * (step * ROW_STEP // 2), codes)
        word = quantize.transpose_bytes(word, lane)
        offset = Int64(tile) * scales.TILE_BYTES + residue * 16 + lane * 4
        ptx.store_global(Int64(scale_bytes.toint()) + offset, word, 32)

    @cute.jit
    def launch(
        x: cute.Pointer,
        global_scale: cute.Pointer,
        packed: cute.Pointer,
        scale_bytes: cute.Pointer,
        m: Int32,
        k: Int32,
        k_out: Int32,
    ):
        tiles = cute.ceil_div(m, scales.ROWS) * (k_out // TILE_COLUMNS)
        kernel(x, global_scale, packed, scale_bytes, m, k, k_out).launch(grid=[tiles, 1, 1], block=[spec.threads, 1, 1])

    def pointer(element: type, align: int):
        return make_ptr(element, align, AddressSpace.gmem, assumed_align=align)

    element = {"bfloat16": BFloat16, "float16": Float16}[dtype]
    pointers = (pointer(element, 16), pointer(Float32, 4), pointer(Uint8, 8), pointer(Uint8, 4))
    return launch, (*pointers, Int32(1), Int32(64), Int32(64))
