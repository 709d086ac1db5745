"""Tensor maps: what TMA can address, and encoding one with the driver."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from b12x._runtime import driver
from b12x._runtime.abi import ITEMSIZE, TensorMapValue

_SWIZZLE_SPAN = {"none": 1 << 30, "32B": 32, "64B": 64, "128B": 128}
_TYPES = {
    "uint8": "UINT8",
    "float8_e4m3fn": "UINT8",
    "float8_e8m0fnu": "UINT8",
    "bfloat16": "BFLOAT16",
    "float16": "FLOAT16",
    "float32": "FLOAT32",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
}


def describe(
    key: str,
    name: str,
    dtype: str,
    box: tuple[int, ...],
    swizzle: str,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
) -> TensorMapValue:
    """The data of a tensor map.

    Raises
    ------
    ValueError
        TMA cannot address the tensor so; the driver itself would only say "invalid value". Names kernel and parameter.
    """
    problems = []
    if not 1 <= len(dims) <= 5 or len(strides) != len(dims) - 1 or len(box) != len(dims):
        problems.append(
            f"{len(dims)} dims, {len(strides)} strides and a box of {len(box)}; needed are 1 to 5 dims, one stride "
            "less, and a box of as many"
        )
    if address % 16:
        problems.append(f"address {address:#x}; needed is a multiple of 16")
    if any(not 1 <= extent <= 1 << 32 for extent in dims):
        problems.append(f"dims {dims}; needed are 1 to 2^32 elements")
    if any(stride % 16 or not 0 < stride < 1 << 40 for stride in strides):
        problems.append(f"strides of {strides} bytes; needed are positive multiples of 16 below 2^40: pad the rows")
    if any(not 1 <= extent <= 256 for extent in box):
        problems.append(f"box {box}; needed are 1 to 256 elements")
    row = box[0] * ITEMSIZE[dtype]
    if row % 16 or row > _SWIZZLE_SPAN[swizzle]:
        problems.append(f"box rows of {row} bytes with swizzle {swizzle}; needed is a multiple of 16 within it")
    if problems:
        raise ValueError(f"{key}: TMA cannot address {name}: " + "; ".join(problems))
    return TensorMapValue(address, dtype, dims, strides, box, swizzle)


@lru_cache(maxsize=1024)
def encode(
    key: str,
    name: str,
    dtype: str,
    box: tuple[int, ...],
    swizzle: str,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
) -> bytes:
    """The 128 bytes of a CUtensorMap. Cached, so that binding the same tensors again is cheap; raises as `describe`."""
    value = describe(key, name, dtype, box, swizzle, address, dims, strides)
    cu = driver.ready()
    (encoded,) = driver.check(
        "cuTensorMapEncodeTiled",
        cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[value.dtype]}"),
            len(value.dims),
            value.address,
            [cu.cuuint64_t(extent) for extent in value.dims],
            [cu.cuuint64_t(stride) for stride in value.strides],
            [cu.cuuint32_t(extent) for extent in value.box],
            [cu.cuuint32_t(1)] * len(value.dims),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{value.swizzle.upper()}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"for {value}",
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)
