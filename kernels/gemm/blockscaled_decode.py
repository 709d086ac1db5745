"""Decode GEMM: ``C[l] = alpha[l] * (A[l] SFA[l]) (B[l] SFB[l])^T + bias`` for at most 16 tokens, bound by DRAM.

The MMA computes C^T: rows of B are its 16-row operand, tokens its 8-column one. A CTA owns 16 or 32 rows. Its warps
share out the K steps and are pipelines of their own: each copies its steps to a ring of stages that only it reads, all
of them requested before the first is waited for, so there is no barrier before the sums are done. The warps' sums are
added in the order of the warps, then those of the cluster's CTAs, which have a range of K each, in the order of their
ranks; every rank finishes a part of C.

In 128 rows, a CTA has the residues ``8 s .. 8 s + 7`` modulo 32, ``s`` its slice: their scales are 128 contiguous bytes
of a tile of swizzled scales, and their columns of C are 8 at a time. Row ``l`` of a CTA is row ``8 s + l % 8 + 32 (l //
8)`` of the 128; of 16 rows, the second CTA of a slice goes on where the first ends.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x._runtime.abi import ITEMSIZE, Param, Pointer
from b12x.gemm.blockscaled.decode_spec import DecodeSpec
from b12x.kernels._shared import mma, ptx, quantize, results, scales

#: Bytes of a row that one MMA takes, and of the chunks that are copied, swizzled, and read by ldmatrix.
MMA_BYTES = 32
CHUNK = 16
#: Four E8M0 scales of 1.
UNIT_SCALES = 0x7F7F7F7F
#: Elements of a block of MXFP8.
BLOCK = 32


def define(spec: DecodeSpec):
    """The jit function and example arguments of one spec."""
    rows, tokens, warps, stages = spec.rows, spec.tokens, spec.warps, spec.stages
    row_tiles, token_tiles, groups = rows // 16, tokens // 8, rows // spec.group
    row_bytes, token_bytes, itemsize = spec.row_bytes, spec.token_bytes, ITEMSIZE[spec.c_dtype]
    parts = row_bytes // MMA_BYTES
    encoding, form = spec.encoding, mma.FORMS.get(spec.recipe, mma.FORMS["mxfp8"])
    swizzled, factored = encoding.scales == "mma", encoding.scales == "f32"
    blocks_per_mma = encoding.mma_k // encoding.block if swizzled else 0
    # Rows of A may be in pieces where it is quantised here, but not where it is rotated.
    in_one_piece = not spec.fused or spec.rotates
    token_at = rows * row_bytes
    scale_at = token_at + tokens * token_bytes
    token_scale_at = scale_at + spec.scale_tiles * spec.row_scale_bytes
    scale_chunks = spec.scale_bytes // CHUNK if swizzled else 0
    sum_at = spec.partial_bytes
    assert sum_at + tokens * spec.sum_pitch <= spec.ring_bytes, "the first warp's ring has to hold the CTA's sums"
    units = tokens * groups
    assert units <= spec.threads, "a thread finishes one unit at most"

    @cute.kernel
    def kernel(
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
        a_row: Int64,
        a_batch: Int64,
        b_row: Int64,
        b_batch: Int64,
        more: tuple,
    ):
        thread, entry = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        group, quad = lane // 4, lane % 4
        rank, split = ptx.cluster_rank(), ptx.cluster_size()
        cta = Uint32(cute.arch.cluster_idx()[0])
        row_tile, place = Int32(cta // (spec.scale_rows // rows)), Int32(cta % (spec.scale_rows // rows))
        first_row = row_tile * spec.scale_rows + place % 4 * spec.group + place // 4 * 64
        smem = ptx.dynamic_smem()
        ring = smem + warp * spec.ring_bytes

        steps = Int32(Uint32(k) // spec.tile_k)
        first, last = part_of(steps * rank, split) + warp, part_of(steps * (rank + 1), split)
        mine = Int32(Uint32(cutlass.max(last - first + (warps - 1), 0)) // warps)

        chunks, _ = chunks_of(row_bytes)
        row = first_row + lane // chunks
        weights = Int64(b.toint()) + Int64(entry) * b_batch + Int64(row) * b_row + lane % chunks * CHUNK
        chunks, _ = chunks_of(token_bytes)
        token = lane // chunks
        source = Int64(a.toint()) + Int64(entry) * a_batch + Int64(token) * a_row
        if cutlass.const_expr(in_one_piece):
            source += lane % chunks * CHUNK
        scale_copies = ()
        if cutlass.const_expr(swizzled):
            scale_copies = swizzled_copies(sfa, sfb, entry, row_tile, place % 4, n, steps, lane)
        if cutlass.const_expr(factored):
            scale_copies = factor_copies(sfa, sfb, entry, row_tile, m, n, steps, lane)

        sources = (weights, b_row, n - row, scale_copies, source, a_row, m - token, more[:3])
        for stage in cutlass.range_constexpr(stages):
            if stage < mine:
                request(ring + stage * spec.stage_bytes, first + stage * warps, sources, lane)
            ptx.copy_async_commit()

        # Other loads come after the copies: a wait for one of them must not hold a copy up.
        which = cutlass.min(entry, alpha_count - 1)
        factor = ptx.load_global_f32_if(Int64(alpha.toint()) + Int64(which) * 4, alpha_count, 1.0)
        rope, angles = more[3:], ()
        if cutlass.const_expr(spec.rotates):
            angles = angle_rows(rope, cutlass.min(group, m - 1), quad)

        acc = cute.make_rmem_tensor((4, token_tiles, row_tiles), Float32)
        partial = cute.make_rmem_tensor((4, token_tiles, row_tiles), Float32)
        acc.fill(0.0)
        # Lanes 4 g + q have the scale word of row g of the group q of 8 rows; of 16 rows there are only two groups.
        row_word = group * CHUNK + (quad if rows == 32 else quad % 2 + place // 4 * 2) * 4
        slot, step = ring, first
        for turn in cutlass.range(mine, unroll=1):
            ptx.copy_async_wait(stages - 1)
            cute.arch.sync_warp()
            if cutlass.const_expr(factored):
                partial.fill(0.0)
            multiply_step(slot, partial if factored else acc, row_word, step, rope, angles, lane)
            if cutlass.const_expr(factored):
                weight_factor = ptx.float_of(ptx.load_shared(slot + scale_at + 4 * tokens))
                for j in cutlass.range_constexpr(token_tiles):
                    pair = ptx.load_shared_v2(slot + scale_at + (8 * j + 2 * quad) * 4)
                    for e in cutlass.range_constexpr(4):
                        scale = ptx.float_of(pair[e % 2]) * weight_factor
                        for i in cutlass.range_constexpr(row_tiles):
                            acc[e, j, i] += partial[e, j, i] * scale
            cute.arch.sync_warp()
            if turn + stages < mine:
                request(slot, step + stages * warps, sources, lane)
            ptx.copy_async_commit()
            step += warps
            slot += spec.stage_bytes
            if slot == ring + spec.ring_bytes:
                slot = ring

        # The warp's own ring is free: nothing is on its way to it. A fragment goes out as it is, 16 bytes a lane.
        for i in cutlass.range_constexpr(row_tiles):
            for j in cutlass.range_constexpr(token_tiles):
                words = [ptx.bits_of(acc[e, j, i]) for e in range(4)]
                ptx.store_shared(ring + ((i * token_tiles + j) * 32 + lane) * 16, words)
        cute.arch.sync_threads()
        if thread < row_tiles * token_tiles * 32:
            sums = warp_sums(smem + thread * 16)
            tile = thread // 32
            row = tile // token_tiles * 16 + group
            token = tile % token_tiles * 8 + 2 * quad
            for e in cutlass.range_constexpr(4):
                address = smem + sum_at + (token + e % 2) * spec.sum_pitch + (row + e // 2 * 8) * 4
                ptx.store_shared(address, [ptx.bits_of(sums[e])])
        ptx.cluster_sync()

        unit = rank + split * thread
        if unit < units:
            token, column = unit // groups, first_row + unit % groups * 32
            if token < m and column < n:
                address = smem + sum_at + token * spec.sum_pitch + unit % groups * spec.group * 4
                values = cluster_sums(address, split)
                at = (Int64(entry) * m + token) * n + column
                store_unit(
                    [ptx.multiply(v, factor) for v in values],
                    Int64(c.toint()) + at * itemsize,
                    Int64(bias.toint()) + Int64(column) * itemsize,
                    has_bias,
                    n,
                    n - column,
                )
        ptx.cluster_sync_relaxed()  # no CTA leaves while another may read its sums

    def part_of(steps, split):
        """``steps // split`` for 1 to 8 parts, by a product with 2^32 / split, rounded up: exact below 2^28 steps."""
        assert spec.max_split == 8, "the reciprocals are chosen by the low bits of the parts, those of 8 by zero"
        found = [Uint32(-(-(1 << 32) // s) % (1 << 32)) for s in (8, *range(1, 8))]
        for bit in (1, 2, 4):
            low = Uint32(split) & Uint32(bit)
            found = [ptx.select(low, odd, even) for even, odd in zip(found[::2], found[1::2], strict=True)]
        reciprocal = found[0]
        quotient = Uint32((Int64(steps) * Int64(reciprocal)) >> 32)
        return Int32(ptx.select(Uint32(split == 1), Uint32(steps), quotient))

    # ---- copies to a stage ---------------------------------------------------------------------------------------

    def chunks_of(width: int):
        """Chunks in ``width`` bytes of a row, and rows that a warp copies at once."""
        return width // CHUNK, 32 // (width // CHUNK)

    def later_row(i, at_once):
        """Rows of B from the first one that a lane copies to the ``i``-th."""
        return i * at_once % spec.group + i * at_once // spec.group * 32

    def row_tiles_of(n):
        """Tiles of B's scales along its rows."""
        return Int32(Uint32(n + (spec.scale_rows - 1)) // spec.scale_rows)

    @cute.jit
    def swizzled_copies(sfa, sfb, entry, row_tile, residues, n, steps, lane):
        """Addresses of this lane's chunks of scales in the first K step: those of B's tiles, then those of A's."""
        width = spec.scale_tiles * steps
        row_base = Int64(sfb.toint()) + scales.tile_offset(entry, row_tile, row_tiles_of(n), width)
        row_base += residues * spec.row_scale_bytes
        token_base = Int64(0) if spec.fused else Int64(sfa.toint()) + scales.tile_offset(entry, 0, 1, width)
        row_chunks = spec.row_scale_bytes // CHUNK
        found = []
        for i in cutlass.range_constexpr(-(-scale_chunks // 32)):
            q = Uint32(lane + 32 * i)
            ours = q - spec.scale_tiles * row_chunks
            address = row_base + (q // row_chunks * scales.TILE_BYTES + q % row_chunks * CHUNK)
            if q >= spec.scale_tiles * row_chunks:
                address = token_base + (ours // tokens * scales.TILE_BYTES + ours % tokens * CHUNK)
            found.append(address)
        return found

    def factor_copies(sfa, sfb, entry, row_tile, m, n, steps, lane):
        """Address in the first K step, and size, of this lane's f32 scale: a token's, or the one of all rows."""
        of_token = Int64(sfa.toint()) + (Int64(entry) * m + lane) * steps * 4
        row = Int64(entry) * row_tiles_of(n) + row_tile
        of_rows = Int64(sfb.toint()) + row * steps * 4
        last = Int32(lane == tokens)
        live = (Int32(lane < m) | last) * 4
        return [(of_token + Int64(last) * (of_rows - of_token), live)]

    @cute.jit
    def request(stage: Int32, step: Int32, sources: tuple, lane: Int32):
        """Start all copies of one K step: B first, then scales, then the tokens."""
        weights, b_row, rows_left, scale_copies, source, a_row, tokens_left, columns = sources
        chunks, at_once = chunks_of(row_bytes)
        address = weights + Int64(step) * row_bytes
        for i in cutlass.range_constexpr(rows // at_once):
            later = later_row(i, at_once)
            live = Int32(later < rows_left) * CHUNK
            ptx.copy_async(stage + swizzled_at(lane, i, chunks, at_once), address + b_row * later, live)
        if cutlass.const_expr(swizzled):
            offset = Int64(step) * (spec.scale_tiles * scales.TILE_BYTES)
            for i in cutlass.range_constexpr(len(scale_copies)):
                target = stage + scale_at + (lane + 32 * i) * CHUNK
                if cutlass.const_expr(scale_chunks - 32 * i >= 32):
                    ptx.copy_async(target, scale_copies[i] + offset, Int32(CHUNK))
                else:
                    if lane < scale_chunks - 32 * i:
                        ptx.copy_async(target, scale_copies[i] + offset, Int32(CHUNK))
        if cutlass.const_expr(factored):
            address, live = scale_copies[0]
            if lane <= tokens:
                ptx.copy_async_4(stage + scale_at + lane * 4, address + Int64(step) * 4, live)
        chunks, at_once = chunks_of(token_bytes)
        address, inside = source + Int64(step) * token_bytes, Int32(CHUNK)
        if cutlass.const_expr(spec.fused):
            k_source, span, span_bytes = columns
            element = step * spec.tile_k + lane % chunks * (CHUNK // 2)
            inside = Int32(element < k_source) * CHUNK
            if cutlass.const_expr(not in_one_piece):
                piece = Int32(Uint32(element) // Uint32(span))
                address = source + Int64(piece) * span_bytes + Int64(element - piece * span) * 2
        for i in cutlass.range_constexpr(tokens // at_once):
            later = i * at_once
            live = Int32(later < tokens_left) * inside
            target = stage + token_at + token_chunk_at(lane, i, chunks, at_once)
            ptx.copy_async(target, address + a_row * later, live)

    def swizzle(row):
        """What a row's chunks are XORed with, so that the 8 rows of a matrix lie in different banks."""
        return row % 8 if row_bytes == 128 else row // 2 % 4

    def swizzled_at(lane, i, chunks, at_once):
        """Offset, in an operand's part of a stage, of the ``i``-th chunk that this lane copies."""
        row = lane // chunks + i * at_once
        return row * row_bytes + (lane % chunks ^ swizzle(row)) * CHUNK

    def token_chunk_at(lane, i, chunks, at_once):
        """As ``swizzled_at``, of tokens: those to be quantised are read in pieces of 8 bytes by half a warp."""
        if not spec.fused:
            return swizzled_at(lane, i, chunks, at_once)
        token = lane // chunks + i * at_once
        return token * token_bytes + (lane % chunks ^ token % 4 * 2) * CHUNK

    # ---- one K step ------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply_step(stage: Int32, sums: cute.Tensor, row_word: Int32, step: Int32, rope, angles, lane: Int32):
        """Add the products of one K step to the sums of a warp."""
        group, quad = lane // 4, lane % 4
        # ldmatrix: the matrices of B are rows 0-7, 8-15 of the first chunk, then of the second.
        row = lane % 16
        row_address = stage + row * row_bytes + (lane // 16 ^ swizzle(row)) * CHUNK
        # Of 16 tokens they are both chunks of tokens 0-7, then of 8-15; of 8 tokens, the chunks of two MMAs.
        token = lane % 8 + (lane // 16 * 8 if token_tiles == 2 else 0)
        token_chunk = lane // 8 % (2 if token_tiles == 2 else 4)
        token_address = stage + token_at + token * row_bytes + (token_chunk ^ swizzle(token)) * CHUNK
        row_words, token_words = Uint32(UNIT_SCALES), Uint32(UNIT_SCALES)
        fragments, token_fragments = [], []
        if cutlass.const_expr(spec.fused):
            token_words, token_fragments = quantised_step(stage + token_at, step, rope, angles, lane)
        for part in cutlass.range_constexpr(parts):
            block = part * blocks_per_mma
            if cutlass.const_expr(swizzled and block % scales.COLUMNS == 0):
                tile = block // scales.COLUMNS
                row_words = ptx.load_shared(stage + scale_at + tile * spec.row_scale_bytes + row_word)
                if cutlass.const_expr(not spec.fused):
                    address = stage + token_scale_at + tile * spec.token_scale_bytes
                    token_words = ptx.load_shared(address + (group + quad % token_tiles * 8) * CHUNK)
            # XOR with the part's chunks: they are above the bit that tells a lane's matrix.
            flip = 2 * part * CHUNK
            fragments = [ptx.ldmatrix_x4((row_address ^ flip) + i * 16 * row_bytes) for i in range(row_tiles)]
            if cutlass.const_expr(not spec.fused and (token_tiles == 2 or part % 2 == 0)):
                token_fragments = ptx.ldmatrix_x4(token_address ^ flip)
            for j in cutlass.range_constexpr(token_tiles):
                start = 2 * (part if spec.fused else j if token_tiles == 2 else part % 2)
                for i in cutlass.range_constexpr(row_tiles):
                    d = mma.mma_block_scaled(
                        form,
                        fragments[i],
                        token_fragments[start : start + 2],
                        [sums[e, j, i] for e in range(4)],
                        row_words,
                        token_words,
                        byte=block % scales.COLUMNS,
                        select_a=i,
                        select_b=j,
                    )
                    for e in cutlass.range_constexpr(4):
                        sums[e, j, i] = d[e]

    # ---- tokens quantised on the way ---------------------------------------------------------------------------------

    def quantised_step(tile: Int32, step: Int32, rope, angles, lane: Int32):
        """Scale word and MMA fragments of 8 tokens, quantised from their stage; all lanes of a quad have one token.

        A lane has the elements 4 t .. 4 t + 3 and 16 + 4 t .. of each block of 32.
        """
        group, quad = lane // 4, lane % 4
        offset = group * token_bytes + (quad // 2 ^ group % 4 * 2) * CHUNK + quad % 2 * 8
        word, fragments = Uint32(0), []
        if spec.rotates:
            _, _, _, head_dim, nope_dim, rope_dim = rope
            inside = Int32(Uint32(step * spec.tile_k) % Uint32(head_dim)) - nope_dim
        for part in range(parts):
            # The tile is not aligned to a token's bytes, so the offset is what is swizzled.
            first, second = offset ^ 4 * part * CHUNK, offset ^ (4 * part + 2) * CHUNK
            words = ptx.load_shared_v2(tile + first) + ptx.load_shared_v2(tile + second)
            if spec.rotates:
                values = [v for w in words for v in ptx.unpack_16(w, spec.source)]
                values = rotated(values, inside, angles)
                inside = inside + BLOCK
                inside = inside - head_dim * Int32(inside == rope_dim)  # a head is whole blocks
                code, codes = quantize.mxfp8_block(values, quantize.largest_value(values, lanes=4), signed_zeros=True)
            else:
                code, codes = quantize.mxfp8_words(words, spec.source, lanes=4)
            fragments += codes
            word = word | (code << (8 * part))
        return word, fragments

    def angle_rows(rope, token, quad):
        """Addresses of a lane's first cosine and its first sine for a token's position."""
        positions, cache, position_words, _, _, rope_dim = rope
        # The low word of a position is all of it: there are fewer than 2^31.
        position = ptx.load_global(Int64(positions.toint()) + Int64(token) * position_words * 4, 32)
        size = ITEMSIZE[spec.rope]
        cosine = Int64(cache.toint()) + Int64(position) * rope_dim * size + 2 * quad * size
        return cosine, cosine + rope_dim // 2 * size

    @cute.jit
    def rotated(values, inside: Int32, angles):
        """The lane's values of a block, rotated back where it starts ``inside`` (>= 0) a head's rotated columns."""
        size = ITEMSIZE[spec.rope]
        result = cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(8):
            result[i] = values[i]
        if inside >= 0:
            cosine, sine = [base + inside * (size // 2) for base in angles]
            for half in cutlass.range_constexpr(2):
                cosines, sines = load_pair(cosine + 8 * half * size), load_pair(sine + 8 * half * size)
                for i in cutlass.range_constexpr(2):
                    at = 4 * half + 2 * i
                    even, odd = values[at], values[at + 1]
                    result[at] = ptx.fma(odd, sines[i], ptx.multiply(even, cosines[i]))
                    result[at + 1] = ptx.fma(even, ptx.negate(sines[i]), ptx.multiply(odd, cosines[i]))
        return [result[i] for i in range(8)]

    def load_pair(address):
        """Two neighbouring cosines or sines."""
        if spec.rope == "float32":
            return [ptx.float_of(word) for word in ptx.load_global_v2(address)]
        return ptx.unpack_16(ptx.load_global(address, 32), spec.rope)

    # ---- results -----------------------------------------------------------------------------------------------------

    def warp_sums(address):
        """A lane's four sums of the warps, added in the order of the warps."""
        loaded = [ptx.load_shared_v4(address + w * spec.ring_bytes) for w in range(warps)]
        sums = [ptx.float_of(word) for word in loaded[0]]
        for words in loaded[1:]:
            sums = [x + ptx.float_of(word) for x, word in zip(sums, words, strict=True)]
        return sums

    @cute.jit
    def cluster_sums(address: Int32, split: Int32):
        """Eight sums of the cluster's CTAs, added in the order of the ranks; those of four CTAs are loaded at once."""
        result = cute.make_rmem_tensor((spec.group,), Float32)
        for start in cutlass.range_constexpr(0, spec.max_split, 4):
            if start < split:
                loaded = []
                for r in cutlass.range_constexpr(start, start + 4):
                    peer = ptx.peer_address(address, cutlass.min(Int32(r), split - 1))
                    loaded.append(ptx.load_peer_v4(peer) + ptx.load_peer_v4(peer + 16))
                for r in cutlass.range_constexpr(start, start + 4):
                    for e in cutlass.range_constexpr(spec.group):
                        if cutlass.const_expr(r == 0):
                            result[e] = loaded[0][e]
                        else:
                            before = result[e]
                            after = ptx.bits_of(before + loaded[r - start][e])
                            result[e] = ptx.float_of(ptx.select(Uint32(r < split), after, ptx.bits_of(before)))
        return [result[e] for e in range(spec.group)]

    @cute.jit
    def store_unit(values, c: Int64, bias: Int64, has_bias: Int32, n: Int32, left: Int32):
        """Eight neighbouring results of a token, the bias added: 16 bytes at a time where all rows of C are aligned to
        them, else one by one, as many as are left of the row."""
        words = results.convert(values, spec.c_dtype)
        if n % spec.group == 0:
            for i in cutlass.range_constexpr(0, len(words), 4):
                part = words[i : i + 4]
                if has_bias != 0:
                    terms = ptx.load_global_v4_if(bias + i * 4, Int32(1))
                    part = [results.add(*both, spec.c_dtype) for both in zip(part, terms, strict=True)]
                ptx.store_global_v4(c + i * 4, part)
        else:
            for i in cutlass.range_constexpr(spec.group):
                if i < left:
                    word = words[i * itemsize // 4]
                    if cutlass.const_expr(itemsize == 2 and i % 2 == 1):
                        word = word >> 16
                    if has_bias != 0:
                        term = ptx.load_global(bias + i * itemsize, 8 * itemsize)
                        word = results.add(word, term, spec.c_dtype)
                    ptx.store_global(c + i * itemsize, word, 8 * itemsize)

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
        a_row: Int64,
        a_batch: Int64,
        b_row: Int64,
        b_batch: Int64,
        more: tuple,
    ):
        kernel(
            a, b, sfa, sfb, alpha, bias, c, m, n, k, batch, alpha_count, has_bias, a_row, a_batch, b_row, b_batch, more
        ).launch(grid=[1, 1, 1], block=[spec.threads, 1, 1], smem=warps * spec.ring_bytes)

    fixed = 17  # parameters that every spec has
    arguments = [example(p) for p in spec.abi().params]
    return launch, (*arguments[:fixed], tuple(arguments[fixed:]))


def example(param: Param):
    """An example argument for a parameter of a spec."""
    element = {
        "uint8": Uint8,
        "bfloat16": BFloat16,
        "float16": Float16,
        "float32": Float32,
        "int32": Int32,
        "int64": Int64,
    }[param.dtype]
    if isinstance(param, Pointer):
        return make_ptr(element, param.align, AddressSpace.gmem, assumed_align=param.align)
    return element(DecodeSpec.tile_k)
