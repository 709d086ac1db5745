"""Checks of tensor arguments, used by every op's ``bind``.

They run at every bind, so what does not depend on where a tensor lies is apart: :func:`facts` reads it, :func:`layout`
checks it, and an op remembers the facts that passed (``lru_cache``). Then :func:`memory` checks the addresses. Messages
are worded on failure only; one says the op, the argument, what was found, what is needed and what to do.

Tensors are recognised by what they can do (``dtype``, ``shape``, ``stride()``, ``device``, ``data_ptr()``), so that
torch need not be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from b12x._runtime.errors import DriverError

Extent = int | None
#: dtype, shape, strides and device of a tensor; for another object None, (), () and the name of its type.
Facts = tuple[Any, tuple[int, ...], tuple[int, ...], Any]

#: Largest size that Caps take. A kernel rounds rows and columns up to whole tiles, of 128 at most, in int32.
LARGEST = 2**31 - 256

#: In the facts of a tensor whose values are not what its memory holds, in the place of the device.
_NEGATED = "tensor that torch negates when it is read (is_neg())"

#: For ``strides``: none is looked at.
ANY: tuple[Extent, ...] = ()

_dtype_names: dict[Any, str] = {}
_device_names: dict[Any, str] = {}


def dtype_name(dtype: Any) -> str:
    """A dtype's name without its library: ``torch.bfloat16`` gives ``bfloat16``."""
    try:
        return _dtype_names[dtype]
    except KeyError:
        return _dtype_names.setdefault(dtype, str(dtype).rpartition(".")[2])


def device_name(device: Any) -> str:
    """``cpu`` or ``cuda:N``; ``cuda`` without an index is torch's current device (DriverError when it has none)."""
    try:
        return _device_names[device]
    except KeyError:
        pass
    except TypeError:  # unhashable, so no device
        return str(device)
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    if name == "cuda":
        return f"cuda:{_current_device()}"
    return _device_names.setdefault(device, "cpu" if name == "cpu:0" else name)


def facts(value: Any) -> Facts:
    """What :func:`layout` checks."""
    try:
        dtype = value.dtype
        if dtype.itemsize > 1 and value.is_neg():  # it is set on views of complex numbers, never on bytes
            return None, (), (), _NEGATED
        return dtype, value.shape, value.stride(), value.device
    except AttributeError:
        return None, (), (), type(value).__name__


def described(value: Any) -> str:
    """A tensor in the text of what holds it: what it is, without the values, which would have to be copied."""
    kind, extents, _, place = facts(value)
    return place if kind is None else f"{dtype_name(kind)}{list(extents)} on {place}"


def pair(op: str, name: str, form: str, found: Any) -> tuple[Any, Any]:
    """A pair of tensors (TypeError for anything else); ``form`` is what to pass."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        what = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
        raise TypeError(f"{op}: {name} is {what}; needed is a pair of tensors: pass {name}={form}")
    return found[0], found[1]


def no_binding(op: str, found: Any) -> TypeError:
    """What ``run`` raises for something that is no binding of its op."""
    return TypeError(f"{op}: binding is a {type(found).__name__}; needed is a Binding: make one with bind")


def whole(op: str, name: str, value: Any, least: int = 1, most: int = LARGEST, fix: str = "") -> int:
    """Check a size or a count: an int (TypeError) from ``least`` to ``most`` (ValueError); ``fix`` is what to do."""
    if type(value) is not int:
        raise TypeError(f"{op}: {name} is {value!r}, a {type(value).__name__}; needed is an int: convert it with int()")
    if not least <= value <= most:
        raise ValueError(
            f"{op}: {name} is {value}; needed is {least} to {most}: {fix or 'choose a value in that range'}"
        )
    return value


def wholes(op: str, name: str, values: Any, least: int = 1) -> tuple[int, ...]:
    """Check several sizes, each as :func:`whole` does; TypeError for what is not iterable."""
    try:
        found = tuple(values)
    except TypeError:
        kind = type(values).__name__
        raise TypeError(f"{op}: {name} is {values!r}, a {kind}; needed are several ints: pass a tuple") from None
    for value in found:
        whole(op, name, value, least=least)
    return found


def layout(
    op: str,
    name: str,
    found: Facts,
    *,
    dtype: str | tuple[str, ...],
    shape: Sequence[Extent] | None,
    device: str,
    strides: Sequence[Extent] | None = None,
    fix: str = "reshape or slice it, or plan for its shape",
) -> int:
    """Check what does not depend on where a tensor lies.

    Parameters
    ----------
    op, name
        Qualified name of the op and name of the argument, for messages.
    found
        The argument's :func:`facts`.
    dtype
        Accepted dtype names, such as ``"bfloat16"``.
    shape
        Required extents; None accepts any extent, and None for the whole any shape.
    device
        Required device, ``cpu`` or ``cuda:N``.
    strides
        Required strides in elements; None accepts any stride, None for the whole means contiguous, and :data:`ANY`
        accepts all. The stride of an extent of 0 or 1 is not looked at, since nothing is addressed by it.
    fix
        What to do about a wrong shape, for the message.

    Returns
    -------
    nbytes
        Bytes from the first element to the end of the last one, gaps included.

    Raises
    ------
    TypeError
        Not a tensor, or of another dtype.
    ValueError
        Wrong shape, strides or device.
    """
    kind, extents, steps, place = found
    if kind is None:
        _no_tensor(op, name, place, dtype, device)
    named = dtype_name(kind)
    if named not in ((dtype,) if isinstance(dtype, str) else dtype):
        raise TypeError(f"{op}: {name} has dtype {named}; needed is {_any_of(dtype)}: convert it before the call")
    if device_name(place) != device:
        raise ValueError(
            f"{op}: {name} is on {place}; needed is {device}, the device of the plan: move it or plan for {place}"
        )
    if shape is not None and not _agree(extents, shape):
        raise ValueError(f"{op}: {name} has shape {_text(extents)}; needed is {_text(shape)}: {fix}")
    if strides is None:
        if not contiguous(found):
            _bad_strides(op, name, found, "contiguous: call .contiguous() before")
    elif strides is not ANY and not _agree_strides(steps, strides, extents):
        _bad_strides(op, name, found, f"{_text(strides)}: copy it into a tensor of that layout")
    if 0 in extents:
        return 0
    last = sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
    return (last + 1) * int(kind.itemsize)


def memory(
    op: str, arguments: Sequence[tuple[str, int]], tensors: Sequence[Any], sizes: Sequence[int], outputs: int
) -> None:
    """Check where the tensors of one launch lie: each is aligned, and no output shares memory with another argument.

    Parameters
    ----------
    op
        Qualified name of the op, for messages.
    arguments
        Name and required alignment in bytes of each argument, outputs first; there may be more than tensors.
    tensors, sizes
        The tensors and what :func:`layout` gave for them.
    outputs
        How many of them are written.

    Raises
    ------
    ValueError
        Wrong alignment, or an overlap, naming both arguments.
    """
    written: list[tuple[str, int, int]] = []
    for (name, align), value, size in zip(arguments, tensors, sizes, strict=False):
        start = value.data_ptr()
        if start % align:
            _misaligned(op, name, start, align)
        end = start + size
        for output, output_start, output_end in written:
            if start < output_end and output_start < end:
                raise ValueError(
                    f"{op}: output {output} and {name} overlap in memory (bytes {max(start, output_start):#x} to "
                    f"{min(end, output_end):#x}); needed are separate tensors: pass a copy of one"
                )
        if outputs:
            outputs -= 1
            written.append((name, start, end))


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
    """Check one tensor by itself: :func:`layout` and the alignment of its first element in bytes."""
    layout(op, name, facts(value), dtype=dtype, shape=shape, device=device, strides=strides)
    address = value.data_ptr()
    if address % align:
        _misaligned(op, name, address, align)


def contiguous(found: Facts) -> bool:
    """As torch's ``is_contiguous()``."""
    _, extents, steps, _ = found
    if 0 in extents:
        return True
    needed = 1
    for extent, step in zip(reversed(extents), reversed(steps), strict=True):
        if extent != 1 and step != needed:
            return False
        needed *= extent
    return True


def _agree(found: Sequence[int], needed: Sequence[Extent]) -> bool:
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


def _current_device() -> int:
    import torch

    try:
        return int(torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:  # what torch raises without CUDA, a driver or a device
        from b12x._runtime import driver

        driver.ready()  # a driver that is missing or too old, or shows no device, is said in the words of this library
        raise DriverError(
            f"torch cannot use the GPU: found torch {torch.__version__}, which says {str(error).strip()!r}; needed is "
            "a torch built for CUDA 13: install that one, or plan for the CPU inside `with b12x.target('emulator'):`"
        ) from None


def _no_tensor(op: str, name: str, found: str, dtype: str | tuple[str, ...], device: str) -> NoReturn:
    if found is _NEGATED:
        raise ValueError(
            f"{op}: {name} is a {found}; needed is one whose memory holds its values: pass {name}.resolve_neg()"
        )
    raise TypeError(
        f"{op}: {name} is a {found}; needed is a {_any_of(dtype)} tensor: make one with torch.tensor(..., "
        f"device={device!r})"
    )


def _bad_strides(op: str, name: str, found: Facts, needed: str) -> NoReturn:
    _, extents, steps, _ = found
    raise ValueError(f"{op}: {name} of shape {_text(extents)} has strides {_text(steps)}; needed is {needed}")


def _misaligned(op: str, name: str, address: int, align: int) -> NoReturn:
    raise ValueError(
        f"{op}: {name} starts at an address {address % align} bytes past a multiple of {align}; needed is a "
        f"multiple of {align}: pass a view that starts at an aligned element, or a copy"
    )


def _text(extents: Sequence[Extent]) -> str:
    return "(" + ", ".join("any" if e is None else str(e) for e in extents) + ("," if len(extents) == 1 else "") + ")"


def _any_of(dtype: str | tuple[str, ...]) -> str:
    return dtype if isinstance(dtype, str) else " or ".join(dtype)
