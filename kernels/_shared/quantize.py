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
#: 1/448 rounded to f32.
E4M3_MAX_INVERSE = 0x3B124925


def nvfp4_block(
    words: Sequence[Uint32], dtype: str, scale: Float32, inverse_scale: Float32
) -> tuple[list[Uint32], Uint32]:
    """Quantise 16 values to NVFP4.

    ``words`` holds the values in pairs, ``dtype`` bf16 or f16; ``scale`` is the tensor's global scale G and
    ``inverse_scale`` 1/G. Returns the 16 E2M1 codes in two words and the E4M3 block scale in the low byte of a third:
    ``b = E4M3(min(G * (amax / 6), 448))``, ``q = E2M1(x * (1 / (b * (1/G))))``; all zero where b is 0; no -0 code.
    A G that is no positive number gives b = 0, and a reciprocal that overflows is the largest f32, so zeros stay zero.
    """
    amax = largest_magnitude(words, dtype)
    product = ptx.multiply(scale, ptx.multiply(amax, ptx.float_of(Uint32(ONE_SIXTH))))
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


def largest_magnitude(words: Sequence[Uint32], dtype: str, lanes: int = 1) -> Float32:
    """Largest magnitude of bf16 or f16 values held in pairs, here and in ``lanes`` (1, 2 or 4) neighbouring lanes."""
    magnitudes = [w & Uint32(0x7FFF7FFF) for w in words]
    while len(magnitudes) > 1:
        half = len(magnitudes) // 2
        magnitudes = [ptx.max_u16x2(magnitudes[i], magnitudes[i + half]) for i in range(half)]
    pair = magnitudes[0]
    for mask in range(1, lanes):
        if mask & (mask - 1) == 0:
            pair = ptx.max_u16x2(pair, ptx.shuffle_xor(pair, mask))
    return ptx.unpack_16(ptx.max_u16x2(pair, pair >> 16), dtype)[0]


def e8m0_scale(amax: Float32) -> tuple[Uint32, Float32]:
    """The E8M0 code of a block of largest magnitude ``amax``, and the factor 2^(127 - code) for its values.

    ``amax / 448`` rounded up to a power of two, by integer arithmetic on its bits: adding all ones below the exponent
    raises it by one unless they were zeros. Code 127 where it is 0.
    """
    bits = ptx.bits_of(ptx.multiply(amax, ptx.float_of(Uint32(E4M3_MAX_INVERSE))))
    code = ptx.select(bits, (bits + Uint32(0x7FFFFF)) >> 23, Uint32(127))
    # 2^(127 - code) has the exponent field 254 - code; codes stay below 254, since amax / 448 is below 2^120.
    return code, ptx.float_of((Uint32(254) - code) << 23)


def mxfp8_part(words: Sequence[Uint32], dtype: str, amax: Float32, factor: Float32) -> list[Uint32]:
    """Eight values, in pairs, to E4M3 codes of ``value * factor`` in two words; zero, not -0, where the block is
    zero."""
    values = [v for word in words for v in ptx.unpack_16(word, dtype)]
    return _e4m3_codes(values, factor, ptx.bits_of(amax))


def mxfp8_words(words: Sequence[Uint32], dtype: str, lanes: int) -> tuple[Uint32, list[Uint32]]:
    """The E8M0 code of a block that ``lanes`` neighbouring lanes hold, and the E4M3 codes of this lane's eight values,
    which are given in pairs."""
    amax = largest_magnitude(words, dtype, lanes)
    code, factor = e8m0_scale(amax)
    return code, mxfp8_part(words, dtype, amax, factor)


def mxfp8_values(values: Sequence[Float32], lanes: int) -> tuple[Uint32, list[Uint32]]:
    """As :func:`mxfp8_words`, of f32 values. A block whose largest magnitude over 448 is no f32 but 0 is zero."""
    magnitudes = [ptx.bits_of(v) & Uint32(0x7FFFFFFF) for v in values]
    while len(magnitudes) > 1:
        half = len(magnitudes) // 2
        magnitudes = [ptx.max_u32(magnitudes[i], magnitudes[i + half]) for i in range(half)]
    bits = magnitudes[0]
    for mask in range(1, lanes):
        if mask & (mask - 1) == 0:
            bits = ptx.max_u32(bits, ptx.shuffle_xor(bits, mask))
    return mxfp8_block(values, ptx.float_of(bits))


def largest_value(values: Sequence[Float32], lanes: int) -> Float32:
    """Largest magnitude of f32 values, here and in ``lanes`` (1, 2 or 4) neighbouring lanes; NaN counts as nothing."""
    largest = list(values)
    while len(largest) > 1:
        half = len(largest) // 2
        largest = [ptx.largest_magnitude(largest[i], largest[i + half]) for i in range(half)]
    amax = largest[0]
    for mask in range(1, lanes):
        if mask & (mask - 1) == 0:
            amax = ptx.maximum(amax, ptx.float_of(ptx.shuffle_xor(ptx.bits_of(amax), mask)))
    return amax


def mxfp8_block(values: Sequence[Float32], amax: Float32, *, signed_zeros: bool = False) -> tuple[Uint32, list[Uint32]]:
    """The E8M0 code of a block of largest magnitude ``amax``, and the E4M3 codes of eight of its f32 values.

    With ``signed_zeros`` a zero block may have codes of -0, which a product does not tell from 0.
    """
    code, factor = e8m0_scale(amax)
    if signed_zeros:
        return code, _e4m3_codes(values, factor, None)
    scaled = ptx.bits_of(ptx.multiply(amax, ptx.float_of(Uint32(E4M3_MAX_INVERSE))))
    return code, _e4m3_codes(values, factor, scaled)


def _e4m3_codes(values: Sequence[Float32], factor: Float32, nonzero: Uint32 | None) -> list[Uint32]:
    """Eight E4M3 codes of ``value * factor`` in two words; zero, not -0, where ``nonzero`` is 0."""
    scaled = [ptx.multiply(v, factor) for v in values]
    codes = [ptx.to_e4m3x4(scaled[:4]), ptx.to_e4m3x4(scaled[4:])]
    return codes if nonzero is None else [ptx.select(nonzero, w, Uint32(0)) for w in codes]


def without_negative_zero(codes: Uint32) -> Uint32:
    """Eight E2M1 codes with code 8 (-0) replaced by 0."""
    magnitude = codes & Uint32(0x77777777)
    nonzero = (magnitude | (magnitude >> 1) | (magnitude >> 2)) & Uint32(0x11111111)
    return magnitude | (codes & (nonzero << 3))


def transpose_bytes(word: Uint32, lane: Uint32, distance: int = 1) -> Uint32:
    """4x4 byte transpose over four lanes at a distance (1, 4): byte j of lane i becomes byte i of lane j.

    ``lane`` is the lane's index among the four. Two exchange steps: with the next lane swap the bytes whose index
    differs in bit 0, then with the lane after next those that differ in bit 1.
    """
    other = ptx.shuffle_xor(word, distance)
    # Even lanes keep bytes 0 and 2 and take the neighbour's 0 and 2 as 1 and 3; odd lanes take 1, 3 and keep 1, 3.
    word = ptx.permute_bytes(word, other, ptx.select(lane & Uint32(1), Uint32(0x3715), Uint32(0x6240)))
    other = ptx.shuffle_xor(word, 2 * distance)
    return ptx.permute_bytes(word, other, ptx.select(lane & Uint32(2), Uint32(0x3276), Uint32(0x5410)))
