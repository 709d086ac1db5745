"""How the tensor cores accumulate: chains of ``mma.sync`` over K against float64.

Sums of N(0, 1) products show the size of the error. Where every product is positive the sum only grows, so a core that
drops bits is always too small: that tells truncation from rounding. With mean 1 alone it does not, since the products
of 8-bit and 4-bit values near 1 lie on a grid whose sums are exact; magnitudes with spread scales do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from b12x._runtime.launch import Target
from b12x.verify.case import half_ulp
from b12x.verify.mma.cases import MmaCase
from b12x.verify.mma.spec import KINDS
from b12x.verify.operands import DISTRIBUTIONS
from b12x.verify.runner import keys_of, packs_only

K = 7168
INPUTS = (*DISTRIBUTIONS, "positive")
#: From this bias on, errors have one sign for more than chance.
_ONE_SIDED = 0.75


@dataclass(frozen=True)
class Reading:
    """One kind on one distribution.

    ``relative``: norm of the error over that of the sums. ``worst_of_sum``: largest ``|error| / sum |a b|``. ``bias``:
    mean of the signed error towards larger magnitudes over its mean magnitude, -1 where every sum came out too small.
    ``rounded``: the part of the sums that are the correctly rounded f32.
    """

    kind: str
    distribution: str
    relative: float
    worst_of_sum: float
    bias: float
    rounded: float

    @property
    def looks_like(self) -> str:
        if self.rounded == 1.0:
            return "exact"
        if self.distribution not in ("mean1", "positive"):
            return ""
        return "truncation" if self.bias < -_ONE_SIDED else "rounding"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "looks_like": self.looks_like}


def read(
    kind: str, distribution: str, found: torch.Tensor, reference: torch.Tensor, magnitude: torch.Tensor
) -> Reading:
    """The figures of f32 results against float64 sums; ``magnitude`` is the sum of ``|a b|``."""
    error = found.double() - reference
    size = float(error.abs().mean())
    outward = error * reference.sign()
    return Reading(
        kind,
        distribution,
        relative=float(error.norm() / reference.norm()),
        worst_of_sum=float((error.abs() / magnitude).max()),
        bias=float(outward.mean()) / size if size else 0.0,
        rounded=float((error.abs() <= half_ulp(reference, "float32")).double().mean()),
    )


def measure(where: Target, *, seed: int = 0, tiles: int = 64) -> Iterator[Reading]:
    """Readings of every kind and distribution, as far as the installed packs hold the probe's kernels."""
    with packs_only():
        for kind in KINDS:
            for distribution in INPUTS:
                case = MmaCase(size="model", kind=kind, tiles=tiles, k=K, distribution=distribution)
                if keys_of(case, where) is None:
                    continue
                chain = case.chain(where.device, case.generator(where.device, seed))
                chain.launch()
                yield read(kind, distribution, chain.result(), chain.reference, chain.magnitude)
