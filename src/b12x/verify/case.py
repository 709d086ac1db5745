"""What a numerical case is, and how a result is judged."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from b12x._runtime.spec import Role

#: ``small`` is for every target, the emulator too; ``model`` is for GPUs.
Size = Literal["small", "model"]

#: Significant digits and smallest normal exponent.
_FORMATS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}


@dataclass(frozen=True)
class Judgement:
    """How far a result is from its reference.

    ``wrong`` of ``total`` elements are outside their bound (NaN is). ``worst`` is the largest ``|error| / bound``: at
    most 1 where nothing is wrong, infinite where an element that has to be exact is not. ``relative`` is the norm of
    the error over that of the reference.
    """

    wrong: int
    total: int
    worst: float
    relative: float

    def __str__(self) -> str:
        if self.wrong:
            return f"{self.wrong} of {self.total} elements wrong"
        return f"{self.worst:.2f} of bound" if self.worst else "exact"

    def to_json(self) -> dict[str, Any]:
        """All figures; None stands for one that is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


class Tally:
    """Judges a result part by part."""

    def __init__(self) -> None:
        self._wrong = self._total = 0
        self._worst = self._error = self._reference = 0.0

    def add(self, found: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor | float = 0.0) -> None:
        """Compare one part with float64 values of its shape; a bound of 0 wants equality."""
        error = (found.double() - reference).abs()
        ratio = torch.where(error == 0, 0.0, error / bound)
        self._wrong += int((~(ratio <= 1)).sum())
        self._total += error.numel()
        if error.numel():
            self._worst = max(self._worst, float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        self._error += float(error.square().sum())
        self._reference += float(reference.double().square().sum())

    def judgement(self) -> Judgement:
        relative = math.sqrt(self._error / self._reference) if self._reference else float(self._error != 0)
        return Judgement(self._wrong, self._total, self._worst, relative)


def half_ulp(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Half the distance between neighbouring values of a dtype around ``|x|`` (float64)."""
    digits, smallest = _FORMATS[dtype]
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, 0.5), exponent.clamp(min=smallest + 1) - 1 - (digits - 1))


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs on the device.

    ``launch`` only launches and may be repeated and captured; ``judge`` compares what it wrote. ``flops`` and ``bytes``
    are what one launch has to compute, and to read and write at least.
    """

    launch: Callable[[], object]
    judge: Callable[[], Judgement]
    flops: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One run of an op at fixed sizes on seeded inputs. A subclass holds the op's choices as fields."""

    size: Size

    @property
    @abstractmethod
    def name(self) -> str:
        """Sizes, dtypes and distribution; unique within the op."""

    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """The roles of the op's plan that this case launches."""

    @abstractmethod
    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        """Make inputs on a device, plan and bind through the op's public functions."""

    def generator(self, device: str, seed: int) -> torch.Generator:
        """Random numbers that differ between cases and repeat between runs of one seed."""
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
