"""The numpy reference against ml_dtypes and exact fractions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from b12x.quantization import scales
from b12x.quantization.mxfp8 import reference
from tests.mxfp8_data import fma, golden_inverse_rope, golden_quantize, golden_scales
from tests.nvfp4_data import swizzle


def every_magnitude(kind: type) -> np.ndarray:
    """All finite non-negative values of a 16-bit format, in f32."""
    values = np.arange(2**15, dtype=np.uint16).view(kind).astype(np.float32)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_scales_of_every_maximum(kind):
    amax = every_magnitude(kind)
    np.testing.assert_array_equal(reference.e8m0_codes(amax), golden_scales(amax))


def test_known_scales():
    """448 * 2^k is the largest that fits a scale; its upper neighbour takes the next one."""
    amax = np.float32([448, 450, 224, 225, 0, 2.0**-126 * 448, 2.0**-133])
    assert reference.e8m0_codes(amax).tolist() == [127, 128, 126, 127, 127, 1, 1]
    beside = np.nextafter(np.float32(448), np.float32(np.inf))
    assert reference.e8m0_codes(np.float32([beside])).tolist() == golden_scales(np.float32([beside])).tolist()


@given(st.integers(0, 2**32 - 1))
def test_quantize(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 64)) * np.exp2(rng.integers(-140, 100, (5, 2)).repeat(32, axis=1))
    x = x.astype(np.float32)
    x[0, :32] = -0.0
    for found, wanted in zip(reference.quantize(x), golden_quantize(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


@given(st.integers(0, 2**32 - 1))
def test_dequantize(seed):
    rng = np.random.default_rng(seed)
    codes, linear = rng.integers(0, 256, (3, 64)).astype(np.uint8), rng.integers(0, 255, (3, 2)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    real = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    real *= np.repeat(linear.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
    np.testing.assert_array_equal(reference.dequantize(codes, linear), real)


@given(st.integers(0, 2**32 - 1))
def test_fused_multiply_add(seed):
    """Among the sums are ties that a sum in f64 cannot tell from its neighbours."""
    rng = np.random.default_rng(seed)
    a, b, c = (
        (rng.integers(-(2**24), 2**24, 64) * np.exp2(rng.integers(-60, 20, 64))).astype(np.float32) for _ in range(3)
    )
    half_unit = np.float32(2.0**-12)
    a[:3], b[:3], c[:3] = half_unit, half_unit, [1, 1 + 2.0**-23, 2.0**-40]
    a[3:5], b[3:5], c[3:5] = 1 + half_unit, [2.0**-24, -(2.0**-24)], [1 + 2.0**-23, 1]
    with np.errstate(all="ignore"):
        wanted = np.array([fma(*each) for each in zip(a, b, c, strict=True)])
    np.testing.assert_array_equal(reference.fused_multiply_add(a, b, c), wanted)


def test_inverse_rope(rng):
    x = rng.standard_normal((4, 128)).astype(np.float32)
    positions, cache = rng.integers(0, 9, 4), rng.uniform(-1, 1, (9, 32)).astype(np.float32)
    found = reference.inverse_rope(x, positions, cache, head_dim=64, nope_dim=32)
    np.testing.assert_array_equal(found, golden_inverse_rope(x, positions, cache, 64, 32))
    np.testing.assert_array_equal(found[:, :32], x[:, :32])
    # Turning by 0 leaves everything as it is.
    cache[:, :16], cache[:, 16:] = 1, 0
    np.testing.assert_array_equal(reference.inverse_rope(x, positions, cache, head_dim=64, nope_dim=32), x)


@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 1, 1), (1, 129, 4), (2, 130, 5)])
def test_swizzled_e8m0(batch, rows, columns, rng):
    """Pads are the byte asked for, and the logical view is taken where storage is."""
    linear = rng.integers(0, 256, (batch, rows, columns)).astype(np.uint8)
    storage = scales.swizzle(torch.from_numpy(linear).view(torch.float8_e8m0fnu), pad=scales.PAD_E8M0)
    np.testing.assert_array_equal(storage.view(-1).numpy(), swizzle(linear, 127))
    view = scales.view(storage, rows, columns, batch)
    assert scales.is_view(view.shape, view.stride(), columns, batch)
    np.testing.assert_array_equal(scales.unswizzle(view, rows, columns, batch).numpy(), linear)
    again = scales.view(view, rows, columns, batch)
    assert (again.shape, again.data_ptr()) == (view.shape, storage.data_ptr())
