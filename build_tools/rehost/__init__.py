"""Rehost: an artifact's PTX, with what Hopper lacks expanded, as a cubin that an H100 or H200 runs.

It answers whether a kernel computes, synchronises and launches right; its speed there says little, because the expanded
instructions are those of the inner loop. The PTX that is expanded is the very text that became the shipped cubin.
"""

from .assemble import assemble
from .errors import RehostError
from .pack import rehost_pack
from .rewrite import ARCH, TARGET, Rehosted, rewrite

__all__ = ["ARCH", "TARGET", "RehostError", "Rehosted", "assemble", "rehost_pack", "rewrite"]
