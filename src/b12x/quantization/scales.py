"""The swizzled block-scale layout ("MMA layout") on torch tensors.

A scale matrix ``[rows, columns]`` of one byte a scale is stored as tiles of 128 rows by 4 columns, 512 bytes each,
row tiles outermost; the byte of ``(row, column)`` in batch ``l`` lies at ``((l * R + row // 128) * C + column // 4) *
512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4`` with ``R = ceil(rows / 128)`` and ``C = ceil(columns / 4)``.

It holds E4M3 scales of 16 elements (NVFP4) and E8M0 scales of 32 (MXFP8, MXFP4) alike; only what quantisers write in
the pads of their tiles differs: zero, :data:`PAD_E4M3`, or one, :data:`PAD_E8M0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: The byte of a pad.
PAD_E4M3 = 0
PAD_E8M0 = 127


def storage_shape(rows: int, columns: int, batch: int = 1) -> tuple[int, ...]:
    """Shape of the contiguous storage: ``[L, R, C, 32, 4, 4]``."""
    return (batch, -(-rows // 128), -(-columns // 4), 32, 4, 4)


def storage_bytes(rows: int, columns: int, batch: int = 1) -> int:
    """Bytes of the storage, pads included."""
    return batch * -(-rows // 128) * -(-columns // 4) * 512


def view(storage: torch.Tensor, rows: int, columns: int, batch: int = 1) -> torch.Tensor:
    """The logical view ``[32, 4, R, 4, C, L]`` of contiguous storage, or that view itself; no copy."""
    return _storage(storage, rows, columns, batch).permute(3, 4, 1, 5, 2, 0)


def is_storage(shape: Sequence[int], columns: int, batch: int = 1) -> bool:
    """Whether a shape is that of storage, of any number of row tiles."""
    return len(shape) == 6 and tuple(shape) == (batch, shape[1], -(-columns // 4), 32, 4, 4)


def is_view(shape: Sequence[int], strides: Sequence[int], columns: int, batch: int = 1) -> bool:
    """Whether a tensor is the logical view of contiguous storage, of any number of row tiles."""
    if len(shape) != 6:
        return False
    row_tiles, column_tiles = shape[2], -(-columns // 4)
    if tuple(shape) != (32, 4, row_tiles, 4, column_tiles, batch):
        return False
    if 0 in shape:  # torch counts an extent of 0 as 1 in the strides of others
        return True
    dense = (16, 4, column_tiles * 512, 1, 512, row_tiles * column_tiles * 512)
    return all(step == wanted or extent == 1 for extent, step, wanted in zip(shape, strides, dense, strict=True))


def swizzle(linear: torch.Tensor, pad: int = PAD_E4M3) -> torch.Tensor:
    """Linear scales ``[rows, columns]`` or ``[L, rows, columns]`` (one byte each) to new swizzled storage, uint8, whose
    pads are the byte ``pad``."""
    import torch

    if linear.ndim == 2:
        linear = linear[None]
    batch, rows, columns = linear.shape
    shape = storage_shape(rows, columns, batch)
    extents = (batch, shape[1] * 128, shape[2] * 4)
    padded = torch.full(extents, pad, dtype=torch.uint8, device=linear.device)
    padded[:, :rows, :columns] = linear.view(torch.uint8)
    tiles = padded.view(batch, shape[1], 4, 32, shape[2], 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous()


def unswizzle(storage: torch.Tensor, rows: int, columns: int, batch: int = 1) -> torch.Tensor:
    """Swizzled storage, or its logical view, to linear scales ``[L, rows, columns]``."""
    tiles = _storage(storage, rows, columns, batch).permute(0, 1, 4, 3, 2, 5)
    _, row_tiles, _, _, column_tiles, _ = tiles.shape
    return tiles.reshape(batch, row_tiles * 128, column_tiles * 4)[:, :rows, :columns].contiguous()


def _storage(storage: torch.Tensor, rows: int, columns: int, batch: int) -> torch.Tensor:
    """Storage in its shape, of storage or its logical view; ValueError where it has another shape than these and not
    one dimension, as linear scales have."""
    shape = storage_shape(rows, columns, batch)
    if storage.ndim == 6 and storage.shape[2] == shape[1] and is_view(storage.shape, storage.stride(), columns, batch):
        storage = storage.permute(5, 2, 4, 0, 1, 3)
    if storage.shape != shape and (storage.ndim != 1 or storage.numel() != storage_bytes(rows, columns, batch)):
        raise ValueError(
            f"quantization.scales: storage has shape {tuple(storage.shape)}; needed are the swizzled scales of "
            f"[{batch}, {rows}, {columns}], {list(shape)}, flat or as the logical view: swizzle makes them of linear "
            "scales"
        )
    return storage.view(shape)
