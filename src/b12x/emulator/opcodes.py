"""Importing this module registers the decoders of all opcodes."""

from . import mma, ops_copy, ops_cvt, ops_float, ops_int, ops_memory, ops_move, ops_sync, ops_warp

__all__ = ["mma", "ops_copy", "ops_cvt", "ops_float", "ops_int", "ops_memory", "ops_move", "ops_sync", "ops_warp"]
