"""The kernel families whose mutants are judged. A new family joins by a row of :data:`FAMILIES`.

A row names keys of the default packs, at least one of each shape of kernel that the family has, and the cases that its
mutants have to fail. The cases are as small as may be and still have what faults need to show: several tiles and a tail
on every axis, a batch, more tiles than CTAs, more K steps than stages (and no multiple of them).
"""

from __future__ import annotations

from dataclasses import dataclass

from b12x.gemm.blockscaled.cases import BlockscaledCase
from b12x.quantization.nvfp4.cases import Nvfp4Case
from b12x.verify.case import Case
from b12x.verify.mma.cases import MmaCase

from ..errors import BuildError


@dataclass(frozen=True)
class Family:
    """``count`` mutants are drawn in the tests. A case runs for the key that it launches."""

    kernel: str
    count: int
    keys: tuple[str, ...]
    cases: tuple[Case, ...]

    def cases_of(self, key: str) -> tuple[Case, ...]:
        """The cases that launch a kernel."""
        return tuple(
            case for case in self.cases if any(spec.key == key for role in case.roles() for spec in role.candidates)
        )


_GEMM = "gemm.blockscaled:recipe=nvfp4,c_dtype={},tile_m={},tile_n={},warps_m={},warps_n={}"

#: The shapes of a GEMM (M, N, K, L). M ends in each group of a warp's 32 rows that is stored by an instruction of its
#: own: 8 rows, or 4 where tile_n is 128 and N lets rows of C be stored 16 bytes at a time (73 does not). Among them are
#: one K step, more K steps than stages, and a batch.
_SMALL = (
    *((m, 72, 128, 1) for m in (12, 20, 60)),
    *((m, 73, 128, 1) for m in (12, 20, 60)),
    (36, 73, 256, 3),
    (33, 72, 1280, 2),
)
_LARGE = (
    *((m, 72, 128, 1) for m in (72, 76, 80, 84, 88, 92, 100)),
    *((m, 73, 128, 1) for m in (76, 84, 92)),
    (132, 73, 256, 2),
    (129, 136, 768, 2),
)
#: CTAs for a GEMM's tiles.
_SMS = 3

FAMILIES: tuple[Family, ...] = (
    Family(
        kernel="gemm.blockscaled",
        count=60,
        keys=(_GEMM.format("float16", 64, 64, 2, 2), _GEMM.format("bfloat16", 128, 128, 4, 2)),
        cases=tuple(
            BlockscaledCase(
                size="small", m=m, n=n, k=k, batch=batch, c_dtype=c_dtype, distribution="octaves", sm_count=_SMS
            )
            for c_dtype, shapes in (("float16", _SMALL), ("bfloat16", _LARGE))
            for m, n, k, batch in shapes
        ),
    ),
    Family(
        kernel="quantization.nvfp4",
        count=30,
        keys=("quantization.nvfp4:dtype=bfloat16", "quantization.nvfp4:dtype=float16"),
        cases=tuple(
            # M ends in each of the four rows of a thread, twice in the second tile.
            Nvfp4Case(size="small", m=m, k=k, capacity=300, dtype=dtype, values=values, global_scale=global_scale)
            for dtype in ("bfloat16", "float16")
            for m, k, values, global_scale in (
                (37, 64, "blocks", 448 * 6 / 5.25),
                (70, 64, "bits", 1.0),
                (131, 192, "blocks", 448 * 6 / 5.25),
                (229, 128, "bits", 1.0),
            )
        ),
    ),
    Family(
        kernel="verify.mma",
        count=30,
        keys=("verify.mma:kind=mxf4nvf4", "verify.mma:kind=f16"),
        cases=tuple(
            # One step, and many.
            MmaCase(size="small", kind=kind, tiles=3, k=k, distribution="octaves")
            for kind, step in (("mxf4nvf4", 64), ("f16", 16))
            for k in (step, 576)
        ),
    ),
)


def family_of(name: str) -> Family:
    """The family of a kernel or of a key (BuildError when there is none)."""
    kernel = name.partition(":")[0]
    for family in FAMILIES:
        if family.kernel == kernel:
            return family
    known = ", ".join(family.kernel for family in FAMILIES)
    raise BuildError(f"no family {kernel!r} has mutants; there are {known}")
