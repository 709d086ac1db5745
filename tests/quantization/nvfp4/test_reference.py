"""The numpy reference against ml_dtypes, and the layout helpers against index arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from b12x.quantization import scales
from b12x.quantization.nvfp4 import reference
from tests.nvfp4_data import golden_quantize, pack, swizzle, swizzled_offsets


def test_e4m3_tables():
    """Every non-negative code decodes as in ml_dtypes, and every value and midpoint encodes to nearest even."""
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(reference.e4m3_values(codes), values)
    middles = (values[:-1] + values[1:]) / 2
    for x in (values, middles, np.nextafter(middles, 0), np.nextafter(middles, 448)):
        np.testing.assert_array_equal(
            reference.e4m3_codes(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), err_msg=str(x)
        )
    assert reference.e4m3_codes(np.float32([449, 1e9, np.inf])).tolist() == [0x7E] * 3


def test_e2m1_tables():
    grid = np.linspace(-8, 8, 4097, dtype=np.float32)
    expected = np.clip(grid, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    expected[expected == 8] = 0
    np.testing.assert_array_equal(reference.e2m1_codes(grid), expected)
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(reference.e2m1_values(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0, 300.0, 1e-3, 1e30]))
def test_quantize(seed, global_scale):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 64)) * np.exp2(rng.integers(-14, 8, (5, 4)).repeat(16, axis=1))
    x = x.astype(np.float32)
    codes, scale_bytes = golden_quantize(x, global_scale)
    packed, found = reference.quantize(x, global_scale)
    np.testing.assert_array_equal(packed, pack(codes))
    np.testing.assert_array_equal(found, scale_bytes)
    real = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    real *= np.repeat(scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)
    np.testing.assert_array_equal(reference.dequantize(packed, found), real)


@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 1, 4), (1, 127, 4), (1, 129, 12), (2, 130, 5), (3, 1, 1)])
def test_swizzle(batch, rows, columns, rng):
    """Storage, pads (zero), view and inverse."""
    linear = rng.integers(1, 256, (batch, rows, columns)).astype(np.uint8)
    storage = scales.swizzle(torch.from_numpy(linear))
    np.testing.assert_array_equal(storage.view(-1).numpy(), swizzle(linear, 0))
    assert storage.numel() == scales.storage_bytes(rows, columns, batch)
    np.testing.assert_array_equal(scales.unswizzle(storage, rows, columns, batch).numpy(), linear)
    view = scales.view(storage, rows, columns, batch)
    last = (batch - 1, rows - 1, columns - 1)
    entry, row, column = last
    assert view[row % 32, row // 32 % 4, row // 128, column % 4, column // 4, entry] == linear[last]
    assert storage.view(-1)[swizzled_offsets(batch, rows, columns)[last]] == linear[last]
