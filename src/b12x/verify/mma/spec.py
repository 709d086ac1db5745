"""Kernel spec of the MMA probe: one m16n8 accumulator, a chain of ``mma.sync`` along K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar
from b12x._runtime.spec import KernelSpec

#: Kind -> K of one MMA and bits of an element. The last two have block scales.
KINDS = {"f16": (16, 16), "bf16": (16, 16), "e4m3": (32, 8), "mxf8f6f4": (32, 8), "mxf4nvf4": (64, 4)}


@dataclass(frozen=True, kw_only=True)
class MmaSpec(KernelSpec):
    """A CTA is one warp; it multiplies operands that lie in memory as the lanes' registers want them.

    Words: ``a [tiles, steps, 32, 4]``, ``b [tiles, steps, 32, 4]`` (two of B, the scales of A and of B), ``d`` f32
    ``[tiles, 32, 4]``.
    """

    kernel: ClassVar[str] = "verify.mma"

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"verify.mma has the kinds {', '.join(KINDS)}, not {self.kind!r}")

    def abi(self) -> KernelABI:
        return KernelABI(
            params=(
                Pointer("a", "uint32", "r"),
                Pointer("b", "uint32", "r"),
                Pointer("d", "float32", "w"),
                Scalar("steps", "int32"),
            ),
            launch=LaunchContract(block=(32, 1, 1)),
        )


SPECS = (MmaSpec,)
