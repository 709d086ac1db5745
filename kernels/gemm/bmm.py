"""Batched products with weights that are dequantised on the way: ``out[b] = lhs[b] @ W[b]``, bf16 MMA, f32 sums.

Weights are the 16-row operand of the MMA, tokens the 8-column one. What counts in an MMA is that both operands put the
same k in the same place, and which row is which is free too; so each lane takes whole 16-byte pieces of the weights as
they lie in memory. With ``lane = 4 g + t``, a lane owns consecutive columns of the result, columns 2i and 2i+1 being
rows g and g+8 of its 16-row tile i, and the same consecutive k of weights and tokens.

* ``decode``: few tokens. No shared memory before the sums: weights go from global memory to registers, several steps
  ahead, each read once. The warps of a CTA take the K steps in turn, and their sums are added in the order of warps.
* ``prefill``: many tokens. A ring of stages in shared memory; each warp has 64 columns and 32 tokens.

An MXFP8 weight is bf16(code) * bf16(scale), rounded to bf16, as the contract has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from b12x._runtime.abi import ITEMSIZE
from b12x.gemm._bmm.spec import WEIGHTS, BatchedSpec
from b12x.kernels._shared import mma, ptx

#: Bytes of the pieces that copies and lanes take.
CHUNK = 16
#: Selectors of permute_bytes: (k, k+1) pairs of neighbouring columns from two rows of k.
CODE_PAIRS = (0x5140, 0x7362)
HALF_PAIRS = (0x5410, 0x7632)
#: The low half of a word twice, and its high half twice.
TWICE = (0x1010, 0x3232)


def define(spec: BatchedSpec):
    """The jit function and example arguments of one spec."""
    kernel = _decode(spec) if spec.tile == "decode" else _prefill(spec)

    @cute.jit
    def launch(
        lhs: cute.Pointer,
        weight: cute.Pointer,
        scales: cute.Pointer,
        rope: cute.Pointer,
        q_scale: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        rope_words: Int32,
        vector: Int32,
        lhs_batch: Int64,
        lhs_row: Int64,
        weight_batch: Int64,
        weight_row: Int64,
        scale_batch: Int64,
        scale_row: Int64,
        rope_batch: Int64,
        rope_row: Int64,
        out_batch: Int64,
        out_row: Int64,
    ):
        kernel(
            lhs,
            weight,
            scales,
            rope,
            q_scale,
            out,
            m,
            n,
            k,
            rope_words,
            vector,
            lhs_batch,
            lhs_row,
            weight_batch,
            weight_row,
            scale_batch,
            scale_row,
            rope_batch,
            rope_row,
            out_batch,
            out_row,
        ).launch(
            grid=[1, 1, 1],
            block=[spec.threads, 1, 1],
            smem=spec.smem_bytes,
            min_blocks_per_mp=spec.ctas_per_sm,
            preferred_smem_carveout=100,  # for the DSL's own launches only; without it, the DSL asks a driver
        )

    def pointer(element: type, align: int):
        return make_ptr(element, align, AddressSpace.gmem, assumed_align=align)

    elements = {"bfloat16": BFloat16, "float8_e4m3fn": Float8E4M3FN}
    arguments = (
        pointer(BFloat16, 16),
        pointer(elements[WEIGHTS[spec.weight]], 16),
        pointer(Uint8, 1),
        pointer(BFloat16, 4),
        pointer(Float32, 4),
        pointer(elements[spec.out_dtype], ITEMSIZE[spec.out_dtype]),
        *[Int32(1)] * 5,
        *[Int64(1)] * 10,
    )
    return launch, arguments


class _Lane(NamedTuple):
    """Decode: how a lane's addresses go on from line to line and, N-major, from step to step of its warp."""

    weight_row: Int64
    scale_row: Int64
    weight_step: Int64
    scale_step: Int64
    k: Int32


class _Registers(NamedTuple):
    """Decode: pieces of the weights, their scale codes and the tokens for each slot, and the sums.

    ``at`` has the addresses of weights, scales and tokens: of the next step to load, or, K-major, of k = 0.
    """

    at: Any
    words: Any
    codes: Any
    tokens: Any
    acc: Any


def _decode(spec: BatchedSpec):
    """A CTA has 8 tokens and ``tile_n`` columns; a lane has the columns of its group g and the tokens 2t and 2t+1."""
    major_k, itemsize = spec.major == "k", ITEMSIZE[WEIGHTS[spec.weight]]
    columns, groups = spec.tile_n // 8, spec.step_k // 16
    tiles = columns // 2
    #: 16-byte pieces of a lane in a step: 4 rows of k, or a row for each column.
    lines = columns if major_k else 4
    stride = spec.warps * spec.step_k

    @cute.kernel
    def kernel(
        lhs: cute.Pointer,
        weight: cute.Pointer,
        scales: cute.Pointer,
        rope: cute.Pointer,
        q_scale: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        rope_words: Int32,
        vector: Int32,
        lhs_batch: Int64,
        lhs_row: Int64,
        weight_batch: Int64,
        weight_row: Int64,
        scale_batch: Int64,
        scale_row: Int64,
        rope_batch: Int64,
        rope_row: Int64,
        out_batch: Int64,
        out_row: Int64,
    ):
        thread = cute.arch.thread_idx()[0]
        first_row, first_column, batch = cute.arch.block_idx()
        first_row, first_column = first_row * spec.tokens, first_column * spec.tile_n
        warp = cute.arch.make_warp_uniform(thread // 32)
        group, quad = thread % 32 // 4, thread % 4
        regs = _Registers(
            cute.make_rmem_tensor((3,), Int64),
            cute.make_rmem_tensor((4, lines, spec.slots), Uint32),
            cute.make_rmem_tensor((lines, spec.slots), Uint32),
            cute.make_rmem_tensor((2 * groups, spec.slots), Uint32),
            cute.make_rmem_tensor((4, tiles), Float32),
        )
        regs.acc.fill(0.0)

        # Columns and tokens outside the matrix repeat the last ones; they are not stored.
        lhs_at = Int64(lhs.toint()) + batch * lhs_batch
        weight_at, scale_at = Int64(weight.toint()) + batch * weight_batch, Int64(scales.toint()) + batch * scale_batch
        column = cutlass.min(first_column + columns * group, n - columns)
        row = cutlass.min(first_row + group, m - 1)
        step = warp * spec.step_k
        start = step + quad * (4 * groups)
        regs.at[2] = lhs_at + row * lhs_row
        if cutlass.const_expr(major_k):
            regs.at[0], regs.at[1] = weight_at + column * weight_row, scale_at + column * scale_row
        else:
            regs.at[0] = weight_at + start * weight_row + column * itemsize
            regs.at[1] = scale_at + start * scale_row + Uint32(column) // 32
            regs.at[2] += start * 2
        lane = _Lane(weight_row, scale_row, weight_row * stride, scale_row * stride, k)

        for slot in cutlass.range_constexpr(spec.slots):
            if step + slot * stride < k:
                load(lane, regs, slot, start + slot * stride)
        inverse = Float32(1.0)
        if cutlass.const_expr(spec.out_dtype == "float8_e4m3fn"):
            inverse = ptx.reciprocal(ptx.load_global_f32(Int64(q_scale.toint())))
        if cutlass.const_expr(spec.rope):
            if first_column == 0:
                source = Int64(rope.toint()) + batch * rope_batch + first_row * rope_row
                target = Int64(out.toint()) + batch * out_batch + first_row * out_row + n * ITEMSIZE[spec.out_dtype]
                copy_rope(source, target, rope_words, rope_row, out_row, m - first_row, inverse)
        for base in cutlass.range(0, k - step, spec.slots * stride, unroll=1):
            for slot in cutlass.range_constexpr(spec.slots):
                at = base + slot * stride
                if at < k - step:
                    multiply(lane, regs, slot, start + at)
                    if at + spec.slots * stride < k - step:
                        load(lane, regs, slot, start + at + spec.slots * stride)

        smem = ptx.dynamic_smem()
        partial = smem + (warp * spec.tokens + 2 * quad) * spec.partial_pitch + group * (columns * 4)
        for q in cutlass.range_constexpr(2):
            for piece in cutlass.range_constexpr(tiles // 2):
                four = [regs.acc[2 * half + q, 2 * piece + i] for i in range(2) for half in range(2)]
                ptx.store_shared_v4(partial + q * spec.partial_pitch + piece * 16, [ptx.bits_of(v) for v in four])
        cute.arch.sync_threads()

        # A thread sums half a group's columns of one token.
        token, part = thread // 16, thread % 16
        sums = []
        for piece in cutlass.range_constexpr(columns // 8):
            address = smem + token * spec.partial_pitch + part * (columns * 2) + piece * 16
            total = [ptx.float_of(word) for word in ptx.load_shared_v4(address)]
            for other in cutlass.range_constexpr(1, spec.warps):
                terms = ptx.load_shared_v4(address + other * spec.tokens * spec.partial_pitch)
                total = [x + ptx.float_of(y) for x, y in zip(total, terms, strict=True)]
            sums += total
        if first_row + token < m:
            wanted = first_column + part // 2 * columns
            found = cutlass.min(wanted, n - columns)
            words = _converted(spec, sums, inverse)
            target = Int64(out.toint()) + batch * out_batch + (first_row + token) * out_row
            store_columns(target, words, part % 2 * (columns // 2), wanted, found, vector)

    def load(lane, regs, slot, at):
        """Request a step whose first k in this lane is ``at``."""
        weight, scales, lhs = regs.at[0], regs.at[1], regs.at[2]
        if major_k:
            # Past the end of K the last piece is read again, and multiplied by zeros.
            live = Int32(at < lane.k)
            at = cutlass.min(at, lane.k - CHUNK)
            weight, scales, lhs = weight + at, scales + Uint32(at) // 32, lhs + at * 2
        else:
            regs.at[0], regs.at[1], regs.at[2] = weight + lane.weight_step, scales + lane.scale_step, lhs + stride * 2
        for line in range(lines):
            for i, word in enumerate(ptx.stream_global_v4(weight)):
                regs.words[i, line, slot] = word
            weight += lane.weight_row
        if spec.scaled:
            for line in range(lines):
                regs.codes[line, slot] = ptx.load_global_u8(scales)
                scales += lane.scale_row
        if major_k:
            tokens = ptx.load_global_v4_if(lhs, live) + ptx.load_global_v4_if(lhs + 16, live)
        else:
            tokens = ptx.load_global_v2(lhs)
        for i, word in enumerate(tokens):
            regs.tokens[i, slot] = word

    def multiply(lane, regs, slot, at):
        """Add the products of a step whose first k in this lane is ``at``."""
        factors = []
        for line in range(0, lines if spec.scaled else 0, 2):
            pair = ptx.bf16x2_of_e8m0x2(regs.codes[line, slot] | (regs.codes[line + 1, slot] << 8))
            if major_k:
                pair = ptx.select(Uint32(at < lane.k), pair, Uint32(0))
                factors += [ptx.permute_bytes(pair, pair, Uint32(half)) for half in TWICE]
            else:
                factors.append(pair)
        for j in range(groups):
            b = [regs.tokens[2 * j + i, slot] for i in range(2)]
            for tile in range(tiles):
                if major_k:
                    pair = [regs.words[j, 2 * tile + i, slot] for i in range(2)]
                    a = _k_major_fragment(pair, factors[2 * tile : 2 * tile + 2])
                else:
                    word = tile // 2 if spec.scaled else tile
                    a = _n_major_fragment([regs.words[word, line, slot] for line in range(4)], tile % 2, factors)
                d = mma.mma_bf16(a, b, [regs.acc[e, tile] for e in range(4)])
                for e in range(4):
                    regs.acc[e, tile] = d[e]

    copy_rope, store_columns = _copy_rope(spec), _store_columns(spec, columns // 2)
    return kernel


def _prefill(spec: BatchedSpec):
    """A CTA has 64 tokens and 128 columns, a warp 32 tokens and 64 columns: 8 columns for each group of a lane."""
    major_k, itemsize = spec.major == "k", ITEMSIZE[WEIGHTS[spec.weight]]
    columns, token_tiles, tiles = 8, 4, 4
    row_bytes = 128

    @cute.kernel
    def kernel(
        lhs: cute.Pointer,
        weight: cute.Pointer,
        scales: cute.Pointer,
        rope: cute.Pointer,
        q_scale: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        rope_words: Int32,
        vector: Int32,
        lhs_batch: Int64,
        lhs_row: Int64,
        weight_batch: Int64,
        weight_row: Int64,
        scale_batch: Int64,
        scale_row: Int64,
        rope_batch: Int64,
        rope_row: Int64,
        out_batch: Int64,
        out_row: Int64,
    ):
        thread = cute.arch.thread_idx()[0]
        first_row, first_column, batch = cute.arch.block_idx()
        first_row, first_column = first_row * spec.tokens, first_column * spec.tile_n
        warp = cute.arch.make_warp_uniform(thread // 32)
        group, quad = thread % 32 // 4, thread % 4
        warp_column, warp_row = warp % 2 * 64, warp // 2 * 32
        smem = ptx.dynamic_smem()
        steps = cute.ceil_div(k, spec.step_k)
        acc = cute.make_rmem_tensor((4, token_tiles, tiles), Float32)
        acc.fill(0.0)
        lhs_at = Int64(lhs.toint()) + batch * lhs_batch
        weight_at, scale_at = Int64(weight.toint()) + batch * weight_batch, Int64(scales.toint()) + batch * scale_batch

        inverse = Float32(1.0)
        if cutlass.const_expr(spec.out_dtype == "float8_e4m3fn"):
            inverse = ptx.reciprocal(ptx.load_global_f32(Int64(q_scale.toint())))
        for step in cutlass.range_constexpr(spec.stages - 1):
            stage = smem + step * spec.stage_bytes
            if step < steps:
                copy_tokens(stage, lhs_at, lhs_row, first_row, m, k, step, thread)
                copy_weights(stage + spec.token_bytes, weight_at, weight_row, first_column, n, k, step, thread)
                if cutlass.const_expr(spec.scaled):
                    pair = load_factors(scale_at, scale_row, first_column, n, k, step, thread)
                    store_factors(stage + spec.token_bytes + spec.weight_bytes, pair, thread)
            ptx.copy_async_commit()
        if cutlass.const_expr(spec.rope):
            if first_column == 0:
                source = Int64(rope.toint()) + batch * rope_batch + first_row * rope_row
                target = Int64(out.toint()) + batch * out_batch + first_row * out_row + n * ITEMSIZE[spec.out_dtype]
                copy_rope(source, target, rope_words, rope_row, out_row, m - first_row, inverse)

        current = Int32(0)
        for step in cutlass.range(steps, unroll=1):
            ptx.copy_async_wait(spec.stages - 2)
            cute.arch.sync_threads()
            # The stage that all warps have left a moment ago takes the step that is furthest ahead.
            ahead = step + (spec.stages - 1)
            free = current - 1 if current > 0 else Int32(spec.stages - 1)
            target = smem + free * spec.stage_bytes
            pair = Uint32(0)
            if ahead < steps:
                copy_tokens(target, lhs_at, lhs_row, first_row, m, k, ahead, thread)
                copy_weights(target + spec.token_bytes, weight_at, weight_row, first_column, n, k, ahead, thread)
                if cutlass.const_expr(spec.scaled):
                    pair = load_factors(scale_at, scale_row, first_column, n, k, ahead, thread)
            ptx.copy_async_commit()
            multiply(acc, smem + current * spec.stage_bytes, warp_row, warp_column, group, quad)
            if cutlass.const_expr(spec.scaled):
                if ahead < steps:
                    store_factors(target + spec.token_bytes + spec.weight_bytes, pair, thread)
            current = current + 1 if current < spec.stages - 1 else Int32(0)

        out_at = Int64(out.toint()) + batch * out_batch
        wanted = first_column + warp_column + group * columns
        found = cutlass.min(wanted, n - columns)
        for tile in cutlass.range_constexpr(token_tiles):
            for q in cutlass.range_constexpr(2):
                row = first_row + warp_row + 8 * tile + 2 * quad + q
                if row < m:
                    words = _converted(
                        spec, [acc[2 * half + q, tile, i] for i in range(tiles) for half in range(2)], inverse
                    )
                    store_columns(out_at + row * out_row, words, Int32(0), wanted, found, vector)

    def copy_tokens(stage, lhs, lhs_row, first_row, m, k, step, thread):
        """Rows of 128 bytes; odd rows have their 16-byte chunks exchanged in pairs, for the banks."""
        chunk = thread % 8
        at = step * spec.step_k + chunk * 8
        live = cutlass.select_(at < k, Int32(CHUNK), Int32(0))
        for i in range(spec.tokens // 16):
            row = thread // 8 + 16 * i
            source = lhs + cutlass.min(first_row + row, m - 1) * lhs_row + at * 2
            ptx.copy_async(stage + row * row_bytes + (chunk ^ (row & 1)) * CHUNK, source, live)

    def copy_weights(stage, weight, weight_row, first_column, n, k, step, thread):
        """N-major: rows of k, whose chunks are placed by ``k // 16``, for the banks. K-major: 64 bytes of each column,
        the eight columns of a lane eight rows apart. Columns outside the matrix repeat the last ones."""
        chunks = (spec.step_k if major_k else spec.tile_n * itemsize) // CHUNK
        chunk, first = thread % chunks, thread // chunks
        height = spec.threads // chunks
        for i in range(spec.weight_bytes // CHUNK // spec.threads):
            if major_k:
                at = step * spec.step_k + chunk * CHUNK
                base = first_column + i * height // 64 * 64 + first % 8 * 8
                column = cutlass.min(base, n - columns) + (first // 8 + i * height % 64 // 8)
                source, target = weight + column * weight_row + at, (first + i * height) * chunks + chunk
            else:
                row = first + i * height
                at = step * spec.step_k + row
                column = cutlass.min(first_column + chunk * (CHUNK // itemsize), n - CHUNK // itemsize)
                source = weight + at * weight_row + column * itemsize
                target = row * chunks + (chunk ^ (i * height // 16 * 2))
            ptx.copy_async(stage + target * CHUNK, source, cutlass.select_(at < k, Int32(CHUNK), Int32(0)))

    def load_factors(scales, scale_row, first_column, n, k, step, thread):
        """Two scale codes of this thread as bf16, zero past the end of K: one k and two blocks of 32 columns, or one
        column and two blocks of 32 k."""
        if major_k:
            column = cutlass.min(first_column + thread // 8 * 8, n - columns) + thread % 8
            block, last = step * (spec.step_k // 32), k // 32 - 1
            row = scales + column * scale_row
            blocks = [block, cutlass.min(block + 1, last)]
        else:
            at = step * spec.step_k + thread // 2
            row = scales + cutlass.min(at, k - 1) * scale_row
            blocks = [cutlass.min(first_column // 32 + thread % 2 * 2 + i, n // 32 - 1) for i in range(2)]
        low, high = [ptx.load_global_u8(row + block) for block in blocks]
        pair = ptx.bf16x2_of_e8m0x2(low | (high << 8))
        if major_k:
            return ptx.select(Uint32(block < last), pair, pair & Uint32(0xFFFF))
        return ptx.select(Uint32(at < k), pair, Uint32(0))

    def store_factors(stage, pair, thread):
        """N-major: bf16 ``[4 blocks][64 k]``. K-major: ``[2 blocks][128 columns]``, each factor twice in a word."""
        if major_k:
            for i, half in enumerate(TWICE):
                ptx.store_shared(
                    stage + i * spec.tile_n * 4 + thread * 4, [ptx.permute_bytes(pair, pair, Uint32(half))]
                )
        else:
            at = stage + (thread % 2 * 2 * spec.step_k + thread // 2) * 2
            ptx.store_shared_u16(at, pair)
            ptx.store_shared_u16(at + spec.step_k * 2, pair >> 16)

    def multiply(acc, stage, warp_row, warp_column, group, quad):
        """One stage: a lane has k = 16 t to 16 t + 15, four for each of four MMAs."""
        weights = stage + spec.token_bytes
        factors = weights + spec.weight_bytes
        token_rows = stage + (warp_row + group) * row_bytes
        lines, doubled = [], []
        if major_k:
            at = weights + (warp_column + group) * spec.step_k + quad * CHUNK
            lines = [ptx.load_shared_v4(at + e * 8 * spec.step_k) for e in range(columns)]
            at = factors + (quad // 2 * spec.tile_n + warp_column + group * columns) * 4
            doubled = ptx.load_shared_v4(at) + ptx.load_shared_v4(at + 16)
        else:
            pitch, block = spec.tile_n * itemsize, (warp_column // 32 + group // 4) * spec.step_k
            at = weights + quad * 16 * pitch
            if spec.scaled:
                at += ((warp_column // 16 + group // 2) ^ (quad * 2)) * CHUNK + group % 2 * 8
            else:
                at += ((warp_column // 8 + group) ^ (quad * 2)) * CHUNK
        for j in range(4):
            if j % 2 == 0:
                chunk = ((quad * 2 + j // 2) ^ (group & 1)) * CHUNK
                tokens = [ptx.load_shared_v4(token_rows + chunk + i * 8 * row_bytes) for i in range(token_tiles)]
            if not major_k:
                read = ptx.load_shared_v2 if spec.scaled else ptx.load_shared_v4
                lines = [read(at + (4 * j + i) * pitch) for i in range(4)]
                pair = ptx.load_shared_v2(factors + (block + quad * 16 + j * 4) * 2) if spec.scaled else []
            for tile in range(tiles):
                if major_k:
                    words = [lines[2 * tile + i][j] for i in range(2)]
                    a = _k_major_fragment(words, doubled[2 * tile : 2 * tile + 2])
                else:
                    word = tile // 2 if spec.scaled else tile
                    a = _n_major_fragment([line[word] for line in lines], tile % 2, pair)
                for i in range(token_tiles):
                    b = tokens[i][j % 2 * 2 : j % 2 * 2 + 2]
                    d = mma.mma_bf16(a, b, [acc[e, i, tile] for e in range(4)])
                    for e in range(4):
                        acc[e, i, tile] = d[e]

    copy_rope, store_columns = _copy_rope(spec), _store_columns(spec, columns)
    return kernel


def _n_major_fragment(words, part, factors):
    """Two columns by 16 k, from the words of four consecutive k that hold the columns.

    MXFP8: a word has four columns, of which ``part`` chooses two; a factor has two k. bf16: a word has two.
    """
    if not factors:
        return [ptx.permute_bytes(words[i], words[i + 1], Uint32(half)) for i in (0, 2) for half in HALF_PAIRS]
    fragment = []
    for i, factor in zip((0, 2), factors, strict=True):
        codes = ptx.permute_bytes(words[i], words[i + 1], Uint32(CODE_PAIRS[part]))
        fragment += [ptx.multiply_bf16x2(value, factor) for value in ptx.bf16x2_of_e4m3x4(codes)]
    return fragment


def _k_major_fragment(words, factors):
    """Two columns by 16 k, from a word of four k for each column and a factor for each, twice in a word."""
    values = [ptx.bf16x2_of_e4m3x4(word) for word in words]
    return [ptx.multiply_bf16x2(values[c][i], factors[c]) for i in range(2) for c in range(2)]


def _converted(spec: BatchedSpec, values, inverse):
    """Words of the output's dtype; E4M3 is made from the bf16 results."""
    words = [ptx.pack_16(values[i], values[i + 1], "bfloat16") for i in range(0, len(values), 2)]
    if spec.out_dtype == "bfloat16":
        return words
    return [_quantised(words[i : i + 2], inverse) for i in range(0, len(words), 2)]


def _quantised(words, inverse):
    """Four bf16 values, in pairs, times ``inverse`` as E4M3 codes."""
    return ptx.to_e4m3x4([ptx.multiply(v, inverse) for word in words for v in ptx.unpack_16(word, "bfloat16")])


def _copy_rope(spec: BatchedSpec):
    @cute.jit
    def copy_rope(
        rope: Int64, out: Int64, words: Int32, rope_row: Int64, out_row: Int64, rows: Int32, inverse: Float32
    ):
        """The CTA's rows of ``rope``, two columns at a time, to the columns behind the product's."""
        thread = cute.arch.thread_idx()[0]
        for row in cutlass.range(thread // 16, cutlass.min(rows, spec.tokens), spec.threads // 16, unroll=1):
            for word in cutlass.range(thread % 16, words, 16, unroll=1):
                pair = ptx.load_global(rope + row * rope_row + word * 4, 32)
                target = out + row * out_row
                if cutlass.const_expr(spec.out_dtype == "bfloat16"):
                    ptx.store_global(target + word * 4, pair, 32)
                else:
                    ptx.store_global(target + word * 2, _quantised([pair, Uint32(0)], inverse), 16)

    return copy_rope


def _store_columns(spec: BatchedSpec, count: int):
    itemsize = ITEMSIZE[spec.out_dtype]
    in_word = 4 // itemsize
    stores = {1: lambda at, words: ptx.store_global(at, words[0], 32), 2: ptx.store_global_v2, 4: ptx.store_global_v4}

    @cute.jit
    def store_columns(row: Int64, words: list, offset: Int32, wanted: Int32, found: Int32, vector: Int32):
        """``count`` columns of one row, from ``offset`` on in a group whose first column is ``found``.

        The group was to start at ``wanted``. Where that reaches over the end it holds the last columns instead, and
        those before ``wanted`` belong to others; N-major, where N is a multiple of the group, all do.
        """
        target = row + (found + offset) * itemsize
        if vector != 0 and wanted == found:
            stores[count // in_word](target, words)
        elif spec.major == "k" or wanted == found:
            for c in cutlass.range_constexpr(count):
                if spec.major == "n" or found + offset + c >= wanted:
                    value = words[c // in_word] >> (c % in_word * 8 * itemsize)
                    if cutlass.const_expr(itemsize == 2):
                        ptx.store_global(target + c * itemsize, value, 16)
                    else:
                        ptx.store_global_u8(target + c, value)

    return store_columns
