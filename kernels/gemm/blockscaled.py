"""Persistent block-scaled GEMM: ``C[l] = alpha[l] * (A[l] SFA[l]) (B[l] SFB[l])^T + bias`` in FP4 and FP8.

One producer warp keeps a ring of stages full: TMA brings the K-major A and B tiles (64-byte swizzle, rows outside the
matrix read as zero), bulk copies bring their scale tiles. The 2 x 2 MMA warps of a consumer group share the output
tile; each reads its fragments with ldmatrix and its scales as words, accumulates in f32, and writes its part of C
through a private staging buffer, so that global stores are 16 bytes wide. Tiles go to CTAs round robin, and to the two
consumer groups in turn where there are two, so that one group multiplies while the other stores; the ring runs on
across tiles. In a cluster, the CTAs share a tile: each sums a range of K, shows its sums in shared memory, and adds
those of all, in rank order, for every n-th slab of rows.

A warp has 16 neighbouring rows (columns) of every group of 32 in the tile. The scales of rows at a distance of 32 are
neighbours in memory, so one load of a word or two a lane serves a warp, and its lanes use all banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x._runtime.abi import ITEMSIZE
from b12x.gemm.blockscaled.spec import BlockscaledSpec
from b12x.kernels._shared import mma, ptx, results, scales
from b12x.kernels._shared.pipeline import Ring

#: Bytes of an operand's row that one MMA takes, and of the chunks that TMA swizzles and ldmatrix reads.
MMA_BYTES = 32
CHUNK = 16
#: Four E8M0 scales of 1.
UNIT_SCALES = 0x7F7F7F7F
#: Rows or columns of which a warp has half.
GROUP = 32
#: K over which the f32 scales of block FP8 are constant.
SCALE_K = 128


def define(spec: BlockscaledSpec):
    """The jit function and example arguments of one spec."""
    row_groups, column_groups = spec.tile_m // GROUP, spec.tile_n // GROUP
    column_tiles = 2 * column_groups
    a_count, b_count = max(1, row_groups // 2), max(1, column_groups // 2)
    slabs = spec.warp_m // spec.stage_rows
    row_bytes, itemsize = spec.row_bytes, ITEMSIZE[spec.c_dtype]
    # Plain FP8 takes the block-scaled instruction with unit scales: it runs at twice the rate of the unscaled one.
    encoding, form = spec.encoding, mma.FORMS.get(spec.recipe, mma.FORMS["mxfp8"])
    swizzled = encoding.scales == "mma"
    blocks_per_mma = encoding.mma_k // encoding.block if swizzled else 0
    blocks_per_step = spec.tile_k // encoding.block if swizzled else 0
    # Bytes of the f32 sums of one slab of a warp's rows, as the warp shows them to the cluster.
    slab_bytes = spec.stage_rows * spec.warp_n * 4

    @cute.kernel
    def kernel(
        a_map: cute.CopyAtom,
        b_map: cute.CopyAtom,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        alpha_count: Int32,
        has_bias: Int32,
    ):
        thread, first_tile, grid = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = ptx.dynamic_smem()
        staging = smem + spec.stages * spec.stage_bytes
        partials = staging + spec.staging_bytes
        ring = Ring(partials + spec.partial_bytes, spec.stages, spec.group_warps)
        turns = ring.base + ring.bytes
        if thread == 0:
            for group in range(spec.groups):
                ptx.mbarrier_init(turns + 8 * group, spec.group_warps)
            ring.initialise()
        cute.arch.sync_threads()

        m_tiles, n_tiles = cute.ceil_div(m, spec.tile_m), cute.ceil_div(n, spec.tile_n)
        tiles = m_tiles * n_tiles * batch
        steps = k // spec.tile_k
        rank, split = Int32(0), Int32(1)
        first_step, last_step = Int32(0), steps
        if cutlass.const_expr(spec.splits):
            rank, split = ptx.cluster_rank(), ptx.cluster_size()
            first_tile, grid = first_tile // split, grid // split
            first_step, last_step = steps * rank // split, steps * (rank + 1) // split
        stage, phase = Int32(0), Int32(0)

        # A warp that loads needs few registers, one that multiplies many: four warps at a time pass them on.
        if warp >= spec.mma_warps:
            if cutlass.const_expr(spec.groups > 1):
                ptx.set_registers(spec.producer_registers, increase=False)
            a_desc, b_desc = ptx.tensor_map_address(a_map), ptx.tensor_map_address(b_map)
            a_scales, b_scales = Int64(sfa.toint()), Int64(sfb.toint())
            a_scale_tiles, b_scale_tiles = cute.ceil_div(m, spec.scale_rows), cute.ceil_div(n, spec.scale_rows)
            width = steps * blocks_per_step // scales.COLUMNS
            if warp > spec.mma_warps:  # only there to hand over registers
                tiles = first_tile
            for tile in range(first_tile, tiles, grid):
                row, column, index = coordinates(tile, m_tiles, n_tiles)
                a_source = a_scales + scales.tile_offset(index, row // spec.scale_rows, a_scale_tiles, width)
                b_source = b_scales + scales.tile_offset(index, column // spec.scale_rows, b_scale_tiles, width)
                for step in cutlass.range(first_step, last_step, unroll=1):
                    ring.wait_empty(stage, phase)
                    full = ring.full(stage)
                    a_tile, b_tile, a_scale, b_scale = buffers(smem, stage)
                    offset = Int64(step * blocks_per_step // scales.COLUMNS) * scales.TILE_BYTES
                    with cute.arch.elect_one():
                        ptx.mbarrier_arrive_expect(full, spec.stage_bytes)
                        ptx.tma_load_3d(a_tile, a_desc, [step * row_bytes, row, index], full)
                        ptx.tma_load_3d(b_tile, b_desc, [step * row_bytes, column, index], full)
                        if cutlass.const_expr(swizzled):
                            ptx.bulk_load(a_scale, a_source + offset, spec.scale_bytes, full)
                            ptx.bulk_load(b_scale, b_source + offset, spec.scale_bytes, full)
                    stage, phase = ring.advance(stage, phase)
                if cutlass.const_expr(spec.splits):
                    if split > 1:
                        ptx.cluster_sync()
                        ptx.cluster_sync()
        else:
            if cutlass.const_expr(spec.groups > 1):
                ptx.set_registers(spec.consumer_registers, increase=True)
            lane = thread % 32
            group, quad = lane // 4, lane % 4
            turn = warp // spec.group_warps
            place = warp % spec.group_warps
            warp_row, warp_column = place // 2 * (GROUP // 2), place % 2 * (GROUP // 2)
            # ldmatrix: A's matrices are rows 0-7, 8-15 of the first chunk, then of the second; B's are both chunks of
            # columns 0-7, then of columns 8-15. The swizzle XORs the chunk with bits 1 and 2 of the row.
            a_row = warp_row + lane % 16
            b_row = warp_column + lane % 8 + lane // 16 * 8
            a_lane = a_row * row_bytes + ((lane // 16) ^ (a_row // 2 % 4)) * CHUNK
            b_lane = b_row * row_bytes + ((lane // 8 % 2) ^ (b_row // 2 % 4)) * CHUNK
            # Scales (see _shared/mma.py): lanes 4 g and 4 g + 1 hold rows g and g + 8 of A, or column g of two tiles of
            # B; lanes 4 g + 2 and 4 g + 3 the same of the second half of the groups.
            a_scale_lane = (warp_row + quad % 2 * 8 + group) * CHUNK + quad // 2 * (row_groups // 2 * 4)
            b_scale_lane = (warp_column + quad % 2 * 8 + group) * CHUNK + quad // 2 * (column_groups // 2 * 4)
            acc = cute.make_rmem_tensor((4, column_tiles, row_groups), Float32)
            partial = cute.make_rmem_tensor((4, column_tiles, row_groups), Float32)
            factors = cute.make_rmem_tensor((slabs,), Float32)
            share = partials + place * (slabs * slab_bytes) + lane * 8
            my_turn, their_turn, waiting = turns + 8 * turn, turns + 8 * (1 - turn), 1 - turn
            if cutlass.const_expr(spec.groups > 1):
                stage, phase = ring.skip(stage, phase, turn * steps)

            for tile in range(first_tile + turn * grid, tiles, spec.groups * grid):
                row, column, index = coordinates(tile, m_tiles, n_tiles)
                a_scale_at, b_scale_at = a_scale_lane, b_scale_lane
                if cutlass.const_expr(spec.tile_m < spec.scale_rows):
                    a_scale_at += scales.word_offset(row % spec.scale_rows)
                if cutlass.const_expr(spec.tile_n < spec.scale_rows):
                    b_scale_at += scales.word_offset(column % spec.scale_rows)
                acc.fill(0.0)
                # A parity names the phase to wait for only if the one before it is complete: the other group must have
                # waited for the last stage of its tile.
                if cutlass.const_expr(spec.groups > 1):
                    ptx.mbarrier_wait(my_turn, waiting)
                    waiting = waiting ^ 1
                for step in cutlass.range(first_step, last_step, unroll=1):
                    if cutlass.const_expr(encoding.scales == "f32"):
                        block_factors(
                            factors, sfa, sfb, row + warp_row + group, column + warp_column, index, step, m, n, k
                        )
                        partial.fill(0.0)
                    sums = partial if encoding.scales == "f32" else acc
                    ring.wait_full(stage, phase)
                    a_tile, b_tile, a_scale, b_scale = buffers(smem, stage)
                    a_words, b_words = [Uint32(UNIT_SCALES)] * a_count, [Uint32(UNIT_SCALES)] * b_count
                    for part in cutlass.range_constexpr(row_bytes // MMA_BYTES):
                        block = part * blocks_per_mma
                        if cutlass.const_expr(swizzled and block % scales.COLUMNS == 0):
                            tile_at = block // scales.COLUMNS * scales.TILE_BYTES
                            a_words = scale_words(a_scale + tile_at + a_scale_at, a_count, step)
                            b_words = scale_words(b_scale + tile_at + b_scale_at, b_count, step)
                        a_address = a_tile + (a_lane ^ part * MMA_BYTES)
                        b_address = b_tile + (b_lane ^ part * MMA_BYTES)
                        a_fragments = [ptx.ldmatrix_x4(a_address + i * GROUP * row_bytes) for i in range(row_groups)]
                        for pair in cutlass.range_constexpr(column_groups):
                            fragment = ptx.ldmatrix_x4(b_address + pair * GROUP * row_bytes)
                            for j in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
                                for i in cutlass.range_constexpr(row_groups):
                                    d = mma.mma_block_scaled(
                                        form,
                                        a_fragments[i],
                                        fragment[2 * (j % 2) : 2 * (j % 2) + 2],
                                        [sums[e, j, i] for e in range(4)],
                                        a_words[i % a_count],
                                        b_words[pair % b_count],
                                        byte=block % scales.COLUMNS,
                                        select_a=i // a_count,
                                        select_b=pair // b_count * 2 + j % 2,
                                    )
                                    for e in cutlass.range_constexpr(4):
                                        sums[e, j, i] = d[e]
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(ring.empty(stage))
                    if cutlass.const_expr(encoding.scales == "f32"):
                        for i in cutlass.range_constexpr(row_groups):
                            for j in cutlass.range_constexpr(column_tiles):
                                for e in cutlass.range_constexpr(4):
                                    acc[e, j, i] += partial[e, j, i] * factors[2 * i + e // 2]
                    stage, phase = ring.advance(stage, phase)
                if cutlass.const_expr(spec.groups > 1):
                    if lane == 0:
                        ptx.mbarrier_arrive(their_turn)
                    stage, phase = ring.skip(stage, phase, steps)

                if cutlass.const_expr(spec.splits):
                    if split > 1:
                        for i in cutlass.range_constexpr(row_groups):
                            for j in cutlass.range_constexpr(column_tiles):
                                for half in cutlass.range_constexpr(2):
                                    words = [ptx.bits_of(acc[2 * half + e, j, i]) for e in range(2)]
                                    ptx.store_shared(share + (2 * i + half) * slab_bytes + j * 256, words)
                        ptx.cluster_sync()
                        for slab in cutlass.range_constexpr(slabs):
                            if slab % split == rank:
                                for j in cutlass.range_constexpr(column_tiles):
                                    for e in cutlass.range_constexpr(2):
                                        acc[slab % 2 * 2 + e, j, slab // 2] = Float32(0.0)
                                for peer in cutlass.range(split, unroll=1):
                                    address = ptx.peer_address(share + slab * slab_bytes, peer)
                                    for j in cutlass.range_constexpr(column_tiles):
                                        terms = ptx.load_peer_f32x2(address + j * 256)
                                        for e in cutlass.range_constexpr(2):
                                            acc[slab % 2 * 2 + e, j, slab // 2] += terms[e]
                        ptx.cluster_sync()

                factor = Float32(1.0)
                if alpha_count > 0:
                    which = cutlass.min(index, alpha_count - 1)
                    factor = ptx.load_global_f32(Int64(alpha.toint()) + Int64(which) * 4)
                buffer = staging + warp * (spec.stage_rows * spec.staging_pitch)
                for slab in cutlass.range_constexpr(slabs):
                    if slab % split == rank:
                        for part in cutlass.range_constexpr(spec.warp_n // spec.stage_columns):
                            for j in cutlass.range_constexpr(spec.stage_columns // 8):
                                at = part * (spec.stage_columns // 8) + j
                                pair = [ptx.multiply(acc[slab % 2 * 2 + e, at, slab // 2], factor) for e in range(2)]
                                words = results.convert(pair, spec.c_dtype)
                                ptx.store_shared(buffer + staged(group, 8 * j + 2 * quad), words)
                            cute.arch.sync_warp()
                            store_rows(
                                buffer,
                                Int64(c.toint()),
                                Int64(bias.toint()),
                                has_bias,
                                row + warp_row + slab // 2 * GROUP + slab % 2 * spec.stage_rows,
                                column + warp_column + 2 * spec.stage_columns * part,
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

    def scale_words(address, count, step):
        """One or two scale words of a lane.

        Where a scale tile holds more steps than one, the bytes of this step are brought to the low end.
        """
        words = [ptx.load_shared(address)] if count == 1 else ptx.load_shared_v2(address)
        if blocks_per_step < scales.COLUMNS:
            words = [word >> (Uint32(step * blocks_per_step % scales.COLUMNS) * 8) for word in words]
        return words

    def block_factors(factors, sfa, sfb, row, column, index, step, m, n, k):
        """``SFA[row, step] * SFB[column / 128, step]`` for the rows of this lane's accumulators, f32 scales."""
        blocks, block = k // SCALE_K, step * spec.tile_k // SCALE_K
        b_rows = cute.ceil_div(n, spec.scale_rows)
        # Columns outside the matrix are not stored.
        b_row = cutlass.min(column // spec.scale_rows, b_rows - 1)
        b_at = (Int64(index) * b_rows + b_row) * blocks + block
        b_factor = ptx.load_global_f32(Int64(sfb.toint()) + b_at * 4)
        for slab in range(slabs):
            # Rows outside the matrix are not stored.
            live = cutlass.min(row + slab // 2 * GROUP + slab % 2 * spec.stage_rows, m - 1)
            a_at = (Int64(index) * m + live) * blocks + block
            factors[slab] = ptx.load_global_f32(Int64(sfa.toint()) + a_at * 4) * b_factor

    def staged(row, column):
        """Offset in a warp's staging buffer. Chunks of 16 bytes are swizzled, so that neither the stores of fragments
        nor the loads of rows meet in a bank."""
        chunk, unit = column * itemsize // CHUNK, itemsize // 2
        swizzle = row // (128 // spec.staging_pitch) % (spec.staging_pitch // CHUNK // unit) * unit
        return row * spec.staging_pitch + (chunk ^ swizzle) * CHUNK + column * itemsize % CHUNK

    @cute.jit
    def store_rows(
        buffer: Int32,
        c: Int64,
        bias: Int64,
        has_bias: Int32,
        row: Int32,
        column: Int32,
        index: Int32,
        m: Int32,
        n: Int32,
        lane: Int32,
    ):
        """One warp's staged rows to C, the bias added. 16 bytes at a time where every row of C is 16-byte aligned, else
        by element. Staged columns are 16 of each 32."""
        base = (Int64(index) * m + row) * n + column
        width = CHUNK // itemsize
        row_chunks = spec.stage_columns // width
        if n % width == 0:
            for turn in cutlass.range_constexpr(-(-spec.stage_rows * row_chunks // 32)):
                item = lane + 32 * turn
                r, x = item // row_chunks, item % row_chunks * width
                at = x // 16 * GROUP + x % 16
                words = ptx.load_shared_v4(buffer + staged(r % spec.stage_rows, x))
                if row + r < m and column + at < n and r < spec.stage_rows:
                    if has_bias != 0:
                        terms = ptx.load_global_v4_if(bias + Int64(column + at) * itemsize, Int32(1))
                        words = [results.add(*both, spec.c_dtype) for both in zip(words, terms, strict=True)]
                    ptx.store_global_v4(c + (base + Int64(r) * n + at) * itemsize, words)
        else:
            for item in cutlass.range(lane, spec.stage_rows * spec.stage_columns, 32, unroll=1):
                r, x = item // spec.stage_columns, item % spec.stage_columns
                at = x // 16 * GROUP + x % 16
                word = ptx.load_shared(buffer + staged(r, x), 8 * itemsize)
                if row + r < m and column + at < n:
                    if has_bias != 0:
                        term = ptx.load_global(bias + Int64(column + at) * itemsize, 8 * itemsize)
                        word = results.add(word, term, spec.c_dtype)
                    ptx.store_global(c + (base + Int64(r) * n + at) * itemsize, word, 8 * itemsize)

    @cute.jit
    def launch(
        a: cute.Pointer,
        b: cute.Pointer,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        alpha_count: Int32,
        has_bias: Int32,
    ):
        a_map, b_map = ptx.tensor_map_parameter(a), ptx.tensor_map_parameter(b)
        kernel(a_map, b_map, sfa, sfb, alpha, bias, c, m, n, k, batch, alpha_count, has_bias).launch(
            grid=[1, 1, 1], block=[spec.threads, 1, 1], smem=spec.smem_bytes, min_blocks_per_mp=1
        )

    def pointer(element: type, align: int = 16):
        return make_ptr(element, align, AddressSpace.gmem, assumed_align=align)

    element = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}[spec.c_dtype]
    scale = Float32 if encoding.scales == "f32" else Uint8
    operands = (pointer(Uint8), pointer(Uint8), pointer(scale), pointer(scale))
    sizes = tuple(Int32(128) for _ in range(6))
    return launch, (*operands, pointer(Float32, 4), pointer(element), pointer(element), *sizes)
