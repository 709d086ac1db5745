"""Scratch memory: what a plan asks the caller for, and how its sub-buffers lie in it.

An op needs at most one scratch buffer, a 1-D uint8 tensor. Sub-buffers start at multiples of 1024 bytes. Contents are
undefined on entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from b12x._runtime import checks
from b12x._runtime.abi import ITEMSIZE

ALIGNMENT = 1024


@dataclass(frozen=True)
class ScratchBufferSpec:
    """A buffer that the caller allocates: ``torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)``."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    device: Any

    @property
    def nbytes(self) -> int:
        size = ITEMSIZE[self.dtype] if isinstance(self.dtype, str) else int(self.dtype.itemsize)
        for extent in self.shape:
            size *= extent
        return size


class Layout:
    """Where named sub-buffers lie in one scratch buffer.

    Parameters
    ----------
    sizes
        Bytes of each sub-buffer, in the order in which they are laid out.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.offsets: dict[str, int] = {}
        cursor = 0
        for name, size in self.sizes.items():
            if size < 0:
                raise ValueError(f"scratch sub-buffer {name!r} has {size} bytes; expected 0 or more")
            cursor = -(-cursor // ALIGNMENT) * ALIGNMENT
            self.offsets[name] = cursor
            cursor += size
        self.nbytes = cursor

    def specs(self, device: Any, name: str = "scratch") -> tuple[ScratchBufferSpec, ...]:
        """The one buffer to allocate, never empty; ``dtype`` is ``torch.uint8``."""
        import torch

        return (ScratchBufferSpec(name, (max(self.nbytes, 1),), torch.uint8, device),)

    def carve(self, buffer: Any) -> dict[str, Any]:
        """1-D uint8 views of the sub-buffers; ``buffer`` comes from :func:`select`."""
        return {name: buffer[at : at + self.sizes[name]] for name, at in self.offsets.items()}


def select(op: str, specs: Sequence[ScratchBufferSpec], scratch: Any) -> Any:
    """The scratch tensor in any of the forms that a caller may pass, checked.

    Parameters
    ----------
    op
        Qualified name of the op, for messages.
    specs
        The plan's one spec.
    scratch
        A tensor, a mapping ``{spec.name: tensor}`` or a sequence of one tensor. It may be larger than asked for.

    Returns
    -------
    tensor
        Its first ``spec.nbytes`` bytes as a 1-D uint8 view.

    Raises
    ------
    KeyError
        The mapping lacks the buffer's name.
    TypeError
        Not a tensor, or not uint8.
    ValueError
        A sequence of other than one tensor; wrong device, too small or not contiguous.
    """
    (spec,) = specs
    if isinstance(scratch, Mapping):
        if spec.name not in scratch:
            raise KeyError(f"{op}: scratch has {sorted(scratch)}, needed is {spec.name!r} ({spec.nbytes} bytes)")
        scratch = scratch[spec.name]
    elif isinstance(scratch, (list, tuple)):
        if len(scratch) != 1:
            raise ValueError(f"{op}: scratch is a sequence of {len(scratch)} tensors; pass exactly one")
        scratch = scratch[0]
    checks.tensor(op, spec.name, scratch, dtype="uint8", shape=None, device=str(spec.device), align=1)
    found = scratch.numel()
    if found < spec.nbytes:
        raise ValueError(
            f"{op}: scratch {spec.name!r} has {found} bytes, needed are {spec.nbytes}; allocate it from "
            "plan.scratch_specs()"
        )
    return scratch.view(-1)[: spec.nbytes]
