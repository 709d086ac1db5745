"""Checks of tensor arguments, used by every op's ``bind``.

Tensors are recognised by what they can do (``dtype``, ``shape``, ``stride()``, ``device``, ``data_ptr()``), so that
torch need not be imported. The checks run at every bind: each compares first and words a message only when it fails. A
message says the op, the argument, what was found, what is needed and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Extent = int | None

_dtype_names: dict[Any, str] = {}
_device_names: dict[Any, str] = {}


def dtype_name(dtype: Any) -> str:
    """A dtype's name without its library: ``torch.bfloat16`` gives ``bfloat16``."""
    try:
        return _dtype_names[dtype]
    except KeyError:
        return _dtype_names.setdefault(dtype, str(dtype).rpartition(".")[2])


def device_name(device: Any) -> str:
    """``cpu`` or ``cuda:N``; ``cuda`` without an index is torch's current device."""
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    if name == "cuda":
        import torch

        return f"cuda:{torch.cuda.current_device()}"
    return "cpu" if name == "cpu:0" else name


def tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtype: str | tuple[str, ...],
    shape: Sequence[Extent] | None,
    device: str,
    strides: Sequence[Extent] | None = None,
    align: int = 16,
) -> None:
    """Check one tensor argument.

    Parameters
    ----------
    op, name
        Qualified name of the op and name of the argument, for messages.
    value
        The argument.
    dtype
        Accepted dtype names, such as ``"bfloat16"``.
    shape
        Required extents; None accepts any extent, and None for the whole any shape.
    device
        Required device, ``cpu`` or ``cuda:N``.
    strides
        Required strides in elements; None accepts any stride, and None for the whole means contiguous. The stride of an
        extent of 0 or 1 is not looked at, since nothing is addressed by it.
    align
        Required alignment of the first element in bytes.

    Raises
    ------
    TypeError
        Not a tensor, or of another dtype.
    ValueError
        Wrong shape, strides, device or alignment.
    """
    try:
        found = dtype_name(value.dtype)
        extents, place, address = value.shape, value.device, value.data_ptr()
    except AttributeError:
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; needed is a {_any_of(dtype)} tensor") from None
    if found != dtype and found not in ((dtype,) if isinstance(dtype, str) else dtype):
        raise TypeError(f"{op}: {name} has dtype {found}; needed is {_any_of(dtype)}: convert it before the call")
    if _device_names.get(place) != device and _device_names.setdefault(place, str(place)) != device:
        raise ValueError(
            f"{op}: {name} is on {place}; needed is {device}, the device of the plan: move it or plan for {place}"
        )
    if shape is not None and not _agree(extents, shape):
        raise ValueError(f"{op}: {name} has shape {_text(extents)}; needed is {_text(shape)}")
    if strides is None:
        if not value.is_contiguous():
            _bad_strides(op, name, value, "contiguous: call .contiguous() before")
    elif not _agree_strides(value.stride(), strides, extents):
        _bad_strides(op, name, value, f"{_text(strides)}: copy it into a tensor of that layout")
    if address % align:
        raise ValueError(
            f"{op}: {name} starts at an address {address % align} bytes past a multiple of {align}; needed is a "
            f"multiple of {align}: pass a view that starts at an aligned element, or a copy"
        )


def no_overlap(op: str, *, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Check that no output shares memory with another argument.

    The extent of a strided tensor counts as a whole, gaps included. Raises ValueError naming both arguments.
    """
    spans = [(name, *_span(value)) for name, value in outputs.items()]
    written = len(spans)
    spans += [(name, *_span(value)) for name, value in inputs.items()]
    for i in range(written):
        name, start, end = spans[i]
        for other, other_start, other_end in spans[i + 1 :]:
            if start < other_end and other_start < end:
                raise ValueError(
                    f"{op}: output {name} and {other} overlap in memory (bytes {max(start, other_start):#x} to "
                    f"{min(end, other_end):#x}); needed are separate tensors: pass a copy of one"
                )


def _span(value: Any) -> tuple[int, int]:
    """First and one past the last byte, equal when the tensor is empty."""
    start = value.data_ptr()
    if value.is_contiguous():
        return start, start + value.nbytes
    if not value.numel():
        return start, start
    last = sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))
    return start, start + (last + 1) * value.element_size()


def _agree(found: Sequence[int], needed: Sequence[Extent]) -> bool:
    if found == needed:
        return True
    if len(found) != len(needed):
        return False
    for f, n in zip(found, needed, strict=True):  # noqa: SIM110, a generator costs more than the comparison
        if f != n and n is not None:
            return False
    return True


def _agree_strides(found: Sequence[int], needed: Sequence[Extent], extents: Sequence[int]) -> bool:
    if len(found) != len(needed):
        return False
    for f, n, e in zip(found, needed, extents, strict=True):  # noqa: SIM110
        if f != n and n is not None and e > 1:
            return False
    return True


def _bad_strides(op: str, name: str, value: Any, needed: str) -> NoReturn:
    raise ValueError(
        f"{op}: {name} of shape {_text(value.shape)} has strides {_text(value.stride())}; needed is {needed}"
    )


def _text(extents: Sequence[Extent]) -> str:
    return "(" + ", ".join("any" if e is None else str(e) for e in extents) + ("," if len(extents) == 1 else "") + ")"


def _any_of(dtype: str | tuple[str, ...]) -> str:
    return dtype if isinstance(dtype, str) else " or ".join(dtype)
