"""The swizzled scale-factor layout of block-scaled operands.

Scales of 128 rows by 4 consecutive blocks along K form one tile of 512 contiguous bytes; the tiles of a matrix follow
each other along K, then along the rows, then along the batch. Inside a tile the four scales of one row are one 32-bit
word, at byte ``(row % 32) * 16 + (row // 32 % 4) * 4``: exactly the register that one MMA step over 4 blocks wants.
"""

from __future__ import annotations

from cutlass import Int32, Int64

ROWS = 128
COLUMNS = 4
TILE_BYTES = ROWS * COLUMNS


def tile_offset(batch: Int32, row_tile: Int32, row_tiles: Int32, column_tiles: Int32) -> Int64:
    """Byte offset of the first tile of a row of tiles; 64-bit, since a batch of large matrices passes 2^31."""
    return (Int64(batch) * row_tiles + row_tile) * column_tiles * TILE_BYTES


def word_offset(row: Int32) -> Int32:
    """Byte offset, inside a tile, of the word that holds the four scales of a row (0..127)."""
    return (row % 32) * 16 + (row // 32) * 4
