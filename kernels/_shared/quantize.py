"""Quantisation arithmetic on registers, one block at a time.

Everything is f32 without flush to zero and without fused multiply-add, so that a float32 reference that follows the
same chain gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32

from b12x.kernels._shared import ptx

#: 1/6 rounded to f32: the reciprocal of the largest E2M1 magnitude.
ONE_SIXTH = 0x3E2AAAAB
E4M3_MAX = 448.0
LARGEST_F32 = 0x7F7FFFFF


def nvfp4_block(
    words: Sequence[Uint32], dtype: str, scale: Float32, inverse_scale: Float32
) -> tuple[list[Uint32], Uint32]:
    """Quantise 16 values to NVFP4.

    ``words`` holds the values in pairs, ``dtype`` bf16 or f16; ``scale`` is the tensor's global scale G and
    ``inverse_scale`` 1/G. Returns the 16 E2M1 codes in two words and the E4M3 block scale in the low byte of a third:
    ``b = E4M3(min(G * (amax / 6), 448))``, ``q = E2M1(x * (1 / (b * (1/G))))``; all zero where b is 0; no -0 code.
    A G that is no positive number gives b = 0, and a reciprocal that overflows is the largest f32, so zeros stay zero.
    """
    magnitudes = [w & Uint32(0x7FFF7FFF) for w in words]
    while len(magnitudes) > 1:
        half = len(magnitudes) // 2
        magnitudes = [ptx.max_u16x2(magnitudes[i], magnitudes[i + half]) for i in range(half)]
    pair = magnitudes[0]
    low, _ = ptx.unpack_16(ptx.max_u16x2(pair, pair >> 16), dtype)
    product = ptx.multiply(scale, ptx.multiply(low, ptx.float_of(Uint32(ONE_SIXTH))))
    # maximum() turns NaN into 0; the pad rows of a tile, whose values are zero, get scale 0 for every G.
    code = ptx.to_e4m3(ptx.minimum(ptx.maximum(product, Float32(0.0)), Float32(E4M3_MAX)))
    reciprocal = ptx.reciprocal(ptx.multiply(ptx.from_e4m3(code), inverse_scale))
    factor = ptx.minimum(reciprocal, ptx.float_of(Uint32(LARGEST_F32)))
    packed = []
    for group in range(2):
        values = []
        for word in words[4 * group : 4 * group + 4]:
            values += [ptx.multiply(v, factor) for v in ptx.unpack_16(word, dtype)]
        packed.append(without_negative_zero(ptx.to_e2m1x8(values)))
    return [ptx.select(code, w, Uint32(0)) for w in packed], code


def without_negative_zero(codes: Uint32) -> Uint32:
    """Eight E2M1 codes with code 8 (-0) replaced by 0."""
    magnitude = codes & Uint32(0x77777777)
    nonzero = (magnitude | (magnitude >> 1) | (magnitude >> 2)) & Uint32(0x11111111)
    return magnitude | (codes & (nonzero << 3))


def transpose_bytes(word: Uint32, lane: Uint32) -> Uint32:
    """4x4 byte transpose over four neighbouring lanes: byte j of lane i becomes byte i of lane j.

    ``lane`` is the lane's index modulo 4. Two exchange steps: with the lane at distance 1 swap the bytes whose index
    differs in bit 0, then with the lane at distance 2 those that differ in bit 1.
    """
    other = ptx.shuffle_xor(word, 1)
    # Even lanes keep bytes 0 and 2 and take the neighbour's 0 and 2 as 1 and 3; odd lanes take 1, 3 and keep 1, 3.
    word = ptx.permute_bytes(word, other, ptx.select(lane & Uint32(1), Uint32(0x3715), Uint32(0x6240)))
    other = ptx.shuffle_xor(word, 2)
    return ptx.permute_bytes(word, other, ptx.select(lane & Uint32(2), Uint32(0x3276), Uint32(0x5410)))
