"""MXFP8 rows in memory: as parts of a scratch, as tensors of their own, and as what a quantizer fills."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from b12x._runtime import scratch, target
from b12x._runtime.launch import Target
from b12x._runtime.scratch import Layout, ScratchBufferSpec
from b12x.gemm._parts import BLOCK
from b12x.quantization import scales
from b12x.quantization.mxfp8 import api as mxfp8
from b12x.quantization.mxfp8.api import MXFP8Rows
from b12x.quantization.mxfp8.planner import Caps

Operand = tuple[torch.Tensor, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def select(op: str, specs: Sequence[ScratchBufferSpec], found: Any) -> torch.Tensor:
    """The scratch that a caller passed, checked; its sub-buffers start at multiples of 16 bytes."""
    buffer: torch.Tensor = scratch.select(op, specs, found)
    if buffer.data_ptr() % 16:
        raise ValueError(
            f"{op}: scratch starts at an address {buffer.data_ptr() % 16} bytes past a multiple of 16; needed is a "
            "multiple of 16: allocate it by itself"
        )
    return buffer


def shapes(name: str, tokens: int, k: int, groups: int = 1) -> Shapes:
    """Values, scales in rows and swizzled scales of ``groups`` matrices ``[tokens, k]``, in the order of a scratch.

    The scales in rows are part of the layout that callers know; no kernel reads them, so none writes them there.
    """
    columns = k // BLOCK
    values = (tokens, k) if groups == 1 else (groups, tokens, k)
    return {
        f"{name}_values": (values, torch.float8_e4m3fn),
        f"{name}_scale_rows": ((groups, tokens, columns), torch.uint8),
        f"{name}_scale_mma": (scales.storage_shape(tokens, columns, groups), torch.uint8),
    }


def sizes(found: Shapes) -> dict[str, int]:
    """Bytes of what has these shapes."""
    nbytes = {}
    for name, (shape, dtype) in found.items():
        nbytes[name] = dtype.itemsize
        for extent in shape:
            nbytes[name] *= extent
    return nbytes


@lru_cache(maxsize=1024)
def layout(tokens: int, k: int) -> Layout:
    """The scratch of a linear."""
    return Layout(sizes(shapes("x_q", tokens, k)))


def operand(buffer: torch.Tensor, where: Layout, name: str, tokens: int, k: int, groups: int = 1) -> Operand:
    """Views of a scratch: values ``[T, K, G]`` and the bytes of their swizzled scales."""
    values = buffer.view(torch.float8_e4m3fn)
    base = values.storage_offset()
    offsets = where.offsets
    values = values.as_strided((tokens, k, groups), (k, 1, tokens * k), base + offsets[f"{name}_values"])
    count = scales.storage_bytes(tokens, k // BLOCK, groups)
    return values, buffer.as_strided((count,), (1,), base + offsets[f"{name}_scale_mma"])


def quantise(caps: Caps, source: torch.Tensor, out: MXFP8Rows | None, **rotation: torch.Tensor) -> MXFP8Rows:
    """Quantise ``source`` as the Caps say, whose device is a target's, into ``out`` or new rows."""
    plan = _plan(target.current_target(caps.device), caps)
    rows = mxfp8.allocate_outputs(plan, m=source.shape[0]) if out is None else out
    mxfp8.run(binding=plan.bind(source=source, **_outputs(rows), **rotation))
    return rows


def _outputs(rows: MXFP8Rows) -> dict[str, torch.Tensor | None]:
    return {"values": rows.values, "scale_rows": rows.scale_rows, "scale_mma": rows.scale_mma}


@lru_cache(maxsize=1024)
def _plan(where: Target, caps: Caps) -> mxfp8.Plan:
    """The quantizer kept on a target."""
    return mxfp8.plan(caps)


clear_caches = _plan.cache_clear
