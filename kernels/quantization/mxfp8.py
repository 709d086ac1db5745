"""Rows of bf16 or fp16 to MXFP8: E4M3 values, and E8M0 block scales both in rows and in the swizzled layout.

A CTA of 128 threads owns one scale tile: 128 rows by 128 columns, four blocks of 32. Sixteen neighbouring lanes take
one row, 8 values each, so a load of a warp is two whole rows of the tile, 256 contiguous bytes each, and a store two
times 128. A thread keeps its columns for 16 rows, all of which are loaded before the first is used; where they lie in
memory is computed once. Four lanes hold a block and get its maximum by two exchanges.

A warp takes 8 of the residues ``row % 32``, with all four rows of each, in the order that makes its words of the
swizzled scales 128 contiguous bytes: row ``32 g + 8 warp + 4 half + i`` for step (g, i). The four scales of a row are
in four groups of lanes; a byte transpose over those groups, for one g in each lane of a group, makes the words.

Output rows may be wider than the source's: the further columns are zero, as if the source went on with zeros. Scales of
rows and columns past the outputs' are written as 127 in the swizzled layout, so the tile is whole; nothing else is
written for them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x.kernels._shared import ptx, quantize, scales
from b12x.quantization.mxfp8.spec import Mxfp8QuantizeSpec

BLOCK = 32
PART = 8  # values of a block that one lane holds
LANES = BLOCK // PART
STEPS = 4  # rows of one residue, and rows at a distance of 1 that a thread takes
UNIT_SCALES = 0x7F7F7F7F
TILE_COLUMNS = Mxfp8QuantizeSpec.tile_columns


def define(spec: Mxfp8QuantizeSpec):
    """The jit function and example arguments of one spec."""
    dtype = spec.dtype

    @cute.kernel
    def kernel(
        source: cute.Pointer,
        values: cute.Pointer,
        scale_rows: cute.Pointer,
        scale_mma: cute.Pointer,
        m: Int32,
        k: Int32,
        k_out: Int32,
        span: Int32,
        source_row: Int64,
        source_span: Int64,
        source_group: Int64,
        values_group: Int64,
        scale_rows_group: Int64,
        scale_mma_group: Int64,
        rope: tuple,
    ):
        # Indices are unsigned, so that divisions by powers of two are shifts.
        thread, tile = Uint32(cute.arch.thread_idx()[0]), Uint32(cute.arch.block_idx()[0])
        group = Int64(cute.arch.block_idx()[1])
        m, k, k_out, span = Uint32(m), Uint32(k), Uint32(k_out), Uint32(span)
        column_tiles = (k_out + (TILE_COLUMNS - 1)) // TILE_COLUMNS
        row_tile = tile // column_tiles
        column_tile = tile - row_tile * column_tiles
        lane, warp = thread % 32, thread // 32
        column = column_tile * TILE_COLUMNS + lane % 16 * PART
        first_row = row_tile * scales.ROWS + warp * 8 + lane // 16 * STEPS

        piece = column // span
        start = Int64(source.toint()) + group * source_group + Int64(first_row) * source_row
        start = start + Int64(piece) * source_span + Int64(column - piece * span) * 2
        parts = []
        for step in cutlass.range_constexpr(STEPS * STEPS):
            row = step // STEPS * BLOCK + step % STEPS
            live = Int32(first_row + row < m) & Int32(column < k)
            parts.append(ptx.load_global_v4_if(start + source_row * row, live))

        target = Int64(values.toint()) + group * values_group + Int64(first_row) * k_out + column
        words = []
        for g in cutlass.range_constexpr(STEPS):
            word = Uint32(UNIT_SCALES)
            # The same for the whole CTA: a condition that may differ within a warp costs much around its exchanges.
            if row_tile * scales.ROWS + g * BLOCK < m:
                word = Uint32(0)
                for i in cutlass.range_constexpr(STEPS):
                    row = g * BLOCK + i
                    live = Int32(first_row + row < m) & Int32(column < k_out)
                    if cutlass.const_expr(spec.rotates):
                        rotated = _rotated(parts[STEPS * g + i], spec, rope, column, first_row + row, live)
                        code, codes = quantize.mxfp8_values(rotated, lanes=LANES)
                    else:
                        code, codes = quantize.mxfp8_words(parts[STEPS * g + i], dtype, lanes=LANES)
                    word = word | (code << (8 * i))
                    ptx.store_global_v2_if(target + Int64(k_out) * row, codes, live)
            words.append(word)

        # Lane j of a block has the codes of rows 32 j + 0..3; after the transpose, lane j of block b has the four
        # scales of row 32 j + b.
        mine = words[0]
        for g in cutlass.range_constexpr(1, STEPS):
            mine = ptx.select(Uint32(lane % LANES == g), words[g], mine)
        block = lane % 16 // LANES
        mine = quantize.transpose_bytes(mine, block, LANES)
        offset = group * scale_mma_group + Int64(tile) * scales.TILE_BYTES + (warp * 32 + lane) * 4
        ptx.store_global(Int64(scale_mma.toint()) + offset, mine, 32)

        row = first_row + lane % LANES * BLOCK + block
        if scale_rows.toint() != 0 and row < m:
            blocks, first_block = k_out // BLOCK, column_tile * scales.COLUMNS
            place = Int64(scale_rows.toint()) + group * scale_rows_group + Int64(row) * blocks + first_block
            if blocks % scales.COLUMNS == 0:
                ptx.store_global(place, mine, 32)
            else:
                for j in cutlass.range_constexpr(scales.COLUMNS):
                    if first_block + j < blocks:
                        ptx.store_global_u8(place + j, mine >> (8 * j))

    @cute.jit
    def launch(
        source: cute.Pointer,
        values: cute.Pointer,
        scale_rows: cute.Pointer,
        scale_mma: cute.Pointer,
        m: Int32,
        k: Int32,
        k_out: Int32,
        span: Int32,
        source_row: Int64,
        source_span: Int64,
        source_group: Int64,
        values_group: Int64,
        scale_rows_group: Int64,
        scale_mma_group: Int64,
        rope: tuple,
    ):
        tiles = cute.ceil_div(m, scales.ROWS) * cute.ceil_div(k_out, TILE_COLUMNS)
        kernel(
            source,
            values,
            scale_rows,
            scale_mma,
            m,
            k,
            k_out,
            span,
            source_row,
            source_span,
            source_group,
            values_group,
            scale_rows_group,
            scale_mma_group,
            rope,
        ).launch(grid=[tiles, 1, 1], block=[spec.threads, 1, 1])

    def pointer(element: type, align: int):
        return make_ptr(element, align, AddressSpace.gmem, assumed_align=align)

    element = {"bfloat16": BFloat16, "float16": Float16}[dtype]
    pointers = (pointer(element, 16), pointer(Uint8, 8), pointer(Uint8, 4), pointer(Uint8, 16))
    rope = ()
    if spec.rotates:
        cache = {"float32": Float32, "bfloat16": BFloat16}[spec.rope]
        rope = (pointer(Int32, 4), pointer(cache, 16), Int32(1), Int32(BLOCK), Int32(0), Int32(BLOCK))
    return launch, (*pointers, Int32(1), *[Int32(BLOCK)] * 3, *[Int64(0)] * 6, rope)


def _rotated(words: list, spec: Mxfp8QuantizeSpec, rope: tuple, column: Uint32, row: Uint32, live: Int32) -> list:
    """Eight values as f32, those of a head's rotated columns turned back: ``x0 c + x1 s`` and ``x1 c - x0 s`` of every
    pair, each a product that is rounded and then a fused multiply-add."""
    positions, cache, position_words, head_dim, nope_dim, rope_dim = rope
    values = [v for word in words for v in ptx.unpack_16(word, spec.dtype)]
    column = column % Uint32(head_dim)
    turned = Int32(column >= Uint32(nope_dim))
    live = live & turned
    size = 4 if spec.rope == "float32" else 2
    place = Int64(positions.toint()) + Int64(row) * Int64(position_words) * 4
    position = Int64(ptx.load_global_if(place, live))
    entry = Int64(cache.toint()) + (position * rope_dim + Int64((column - Uint32(nope_dim)) // 2)) * size
    half = Int64(rope_dim) * (size // 2)
    if spec.rope == "float32":
        cosines, sines = ([ptx.float_of(w) for w in ptx.load_global_v4_if(entry + d, live)] for d in (0, half))
    else:
        cosines, sines = (
            [v for word in ptx.load_global_v2_if(entry + d, live) for v in ptx.unpack_16(word, "bfloat16")]
            for d in (0, half)
        )
    for pair in range(PART // 2):
        x0, x1 = values[2 * pair : 2 * pair + 2]
        c, s = cosines[pair], sines[pair]
        back = (ptx.fma(x1, s, ptx.multiply(x0, c)), ptx.fma(x0, ptx.negate(s), ptx.multiply(x1, c)))
        for old, new, at in zip((x0, x1), back, (2 * pair, 2 * pair + 1), strict=True):
            chosen = ptx.select(Uint32(turned), ptx.bits_of(new), ptx.bits_of(old))
            values[at] = ptx.float_of(chosen)
    return values
