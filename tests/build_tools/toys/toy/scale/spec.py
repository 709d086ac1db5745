"""Specs of ``toy.scale``. Every variant but ``good`` is made to fail in its own way; see ``kernels/toy/scale.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar
from b12x._runtime.spec import KernelSpec

SMEM_LIMIT = 101_376


@dataclass(frozen=True, kw_only=True)
class ScaleSpec(KernelSpec):
    """``variant`` says what is wrong with the kernel or with what this spec declares of it."""

    kernel: ClassVar[str] = "toy.scale"

    variant: str = "good"
    block: int = 64

    def abi(self) -> KernelABI:
        block = 128 if self.variant == "block" else self.block
        smem = {"smem": 1024, "smem_fits": 4096, "smem_limit": SMEM_LIMIT, "smem_over": SMEM_LIMIT + 1024}
        return KernelABI(
            params=(
                Pointer("x", "float32", "r", align=4 if self.variant == "align" else 16),
                Pointer("y", "float32", "w"),
                Scalar("alpha", "float32"),
                Scalar("n", "int64" if self.variant == "params" else "int32"),
            ),
            launch=LaunchContract((block, 1, 1), smem.get(self.variant, 0)),
        )


@dataclass(frozen=True, kw_only=True)
class LocalSpec(KernelSpec):
    """The kernel of the variant ``local``, whose local memory this spec allows."""

    kernel: ClassVar[str] = "toy.scale.local"
    allow_local_memory: ClassVar[str] = "the test of this exception needs it"

    variant: str = "local"
    block: int = 64

    def abi(self) -> KernelABI:
        return ScaleSpec(variant=self.variant, block=self.block).abi()


SPECS = (ScaleSpec, LocalSpec)
