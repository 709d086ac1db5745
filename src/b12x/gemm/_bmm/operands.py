"""Checks of the operands that ``gemm.bmm`` and ``gemm.mla_query_projection`` have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from b12x._runtime import checks
from b12x._runtime.abi import ITEMSIZE
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, LoadedKernel
from b12x.gemm._bmm import planner

#: dtypes that hold E8M0 codes.
SCALE_DTYPES = ("uint8", "float8_e8m0fnu")

Shape = tuple[int | None, ...]


class Strides(NamedTuple):
    """Bytes that an argument spans, and between its batch entries and rows."""

    size: int
    batch: int
    row: int


def batched(
    op: str, name: str, x: Facts, dtype: str | tuple[str, ...], shape: Shape, device: str, step: int, rows: int = 1
) -> Strides:
    """A tensor of three dimensions, the last dense, the others at strides that are multiples of ``step`` elements.

    ``rows`` says which of the first two are rows, the other is the batch.
    """
    size = checks.layout(op, name, x, dtype=dtype, shape=shape, strides=(None, None, 1), device=device)
    kind, extents, steps, _ = x
    for extent, stride in zip(extents[:2], steps[:2], strict=True):
        if extent > 1 and stride % step and 0 not in extents:
            raise ValueError(
                f"{op}: {name} of shape {tuple(extents)} has strides {tuple(steps)}; needed are outer strides that are "
                f"multiples of {step} elements: copy it into a tensor of such strides"
            )
    itemsize = int(kind.itemsize)
    return Strides(size, steps[1 - rows] * itemsize, steps[rows] * itemsize)


def weights(
    op: str, names: tuple[str, str], values: Facts, scales: Facts | None, major: str, shape: tuple[int, int, int],
    device: str,
) -> tuple[Strides, Strides]:  # fmt: skip
    """Values, and scales where there are any, of weights ``shape = (B, N, K)`` in the order of ``major``."""
    batch, n, k = shape
    rows, width = (k, n) if major == "n" else (n, k)
    kind = "bfloat16" if scales is None else "float8_e4m3fn"
    values_at = batched(op, names[0], values, kind, (batch, rows, width), device, 16 // ITEMSIZE[kind])
    if scales is None:
        return values_at, Strides(0, 0, 0)
    return values_at, batched(op, names[1], scales, SCALE_DTYPES, (batch, rows, width // 32), device, 1)


def output(
    op: str, name: str, x: Facts, dtype: str, shape: Shape, device: str, step: int, rows: int
) -> tuple[Strides, bool]:
    """As :func:`batched`, for a tensor whose elements all lie apart, and whether its strides suit vector stores."""
    at = batched(op, name, x, dtype, shape, device, step, rows)
    _, extents, steps, _ = x
    if 0 in extents:
        return at, True
    taken, aligned = extents[2], 16 if dtype == "bfloat16" else 8
    for stride, extent in sorted(zip(steps[:2], extents[:2], strict=True)):
        if extent > 1:
            if stride < taken:
                raise ValueError(
                    f"{op}: {name} of shape {tuple(extents)} has strides {tuple(steps)}, so its elements overlap or "
                    "interleave; needed are outer strides not below what lies inside: pass a tensor of such strides"
                )
            taken = (extent - 1) * stride + taken
    return at, at.batch % aligned == 0 and at.row % aligned == 0


def prepare(
    kernel: LoadedKernel,
    arguments: dict[str, Any],
    strides: dict[str, Strides],
    sizes: tuple[int, int, int, int],
    rope_words: int,
    vector: bool,
) -> Launch:
    """One launch; ``sizes`` are B, M, N and K."""
    batch, m, n, k = sizes
    block = {
        **arguments,
        "m": m,
        "n": n,
        "k": k,
        "rope_words": rope_words,
        "vector": int(vector and arguments["out"].data_ptr() % 16 == 0),
    }
    for name, at in strides.items():
        block[f"{name}_batch"], block[f"{name}_row"] = at.batch, at.row
    launch = kernel.prepare(block)
    launch.grid = planner.grid(kernel.spec, batch, m, n)  # type: ignore[arg-type]
    return launch
