"""Which target a plan runs on: it follows the device of its Caps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from b12x._runtime import checks, env
from b12x._runtime.cuda_target import ARCHS, REHOSTS, cuda_target, device_capability
from b12x._runtime.emulator_target import EmulatorTarget
from b12x._runtime.errors import DriverError
from b12x._runtime.launch import Target

_chosen: ContextVar[EmulatorTarget | str | None] = ContextVar("b12x_target", default=None)


@contextmanager
def target(name: str, *, sm_count: int = 170, options: Any = None) -> Iterator[Target]:
    """Choose the verification target for plans made inside the ``with`` block, in this thread or task.

    Parameters
    ----------
    name
        ``"emulator"``: plans for device ``cpu`` run their kernels' PTX on the CPU. ``"rehost:sm_90a"``: plans for a
        CUDA device, which must be a Hopper, take kernels from packs made by ``python -m b12x.build_tools.rehost``.
    sm_count
        Multiprocessors that the emulated GPU has.
    options
        Passed to :func:`b12x.emulator.launch`.

    Raises
    ------
    ValueError
        There is no such target, or ``sm_count`` is below 1.
    TypeError
        ``sm_count`` is no int.
    DriverError, DeviceNotSupportedError
        As :func:`b12x._runtime.cuda_target.cuda_target`, for the rehost target and the current device.
    """
    if name != "emulator" and name not in REHOSTS:
        known = " or ".join(f"{known!r}" for known in ("emulator", *REHOSTS))
        raise ValueError(
            f"unknown target {name!r}; needed is {known} (a cuda target is chosen by the device of the Caps)"
        )
    checks.whole("b12x.target", "sm_count", sm_count)
    token = _chosen.set(name if name in REHOSTS else EmulatorTarget(sm_count, options))
    try:
        yield current_target("cuda" if name in REHOSTS else "cpu")
    finally:
        _chosen.reset(token)


def current_target(device: Any) -> Target:
    """The target for a device.

    Parameters
    ----------
    device
        ``cpu``, ``cuda``, ``cuda:N``, an ordinal, or a torch device.

    Raises
    ------
    ValueError
        Another kind of device, or ``cpu`` without the emulator being chosen.
    DriverError, DeviceNotSupportedError
        As :func:`b12x._runtime.cuda_target.cuda_target`.
    """
    name = checks.device_name(device)
    kind, _, ordinal = name.partition(":")
    if kind == "cuda" and ordinal.isdigit():
        return cuda_target(int(ordinal), _rehost())
    if name != "cpu":
        raise ValueError(
            f"b12x has no target for device {name!r}; needed is 'cuda', 'cuda:N' or, for the emulator, 'cpu'"
        )
    emulator = _emulator()
    if emulator is None:
        raise ValueError(
            "device 'cpu' has no GPU kernels; needed is a CUDA device, or the emulator: set B12X_TARGET=emulator, or "
            "plan inside `with b12x.target('emulator'):`"
        )
    return emulator


def is_supported(device: Any = None) -> bool:
    """Whether ops can run on a device: capability 12.0 or 12.1, or what the chosen verification target needs.

    ``None`` asks for torch's current device, or for the emulator where one is chosen. A missing driver means False.
    """
    if device is None:
        if _emulator() is not None:
            return True
        device = "cuda"
    try:
        name = checks.device_name(device)
        if name == "cpu":
            return _emulator() is not None
        kind, _, ordinal = name.partition(":")
        rehost = _rehost()
        supported = ARCHS if rehost is None else (REHOSTS[rehost],)
        return kind == "cuda" and ordinal.isdigit() and device_capability(int(ordinal)) in supported
    except DriverError:
        return False


def emulator_chosen() -> bool:
    """Whether plans for device ``cpu`` have a target now."""
    return _emulator() is not None


def _rehost() -> str | None:
    chosen = _chosen.get()
    return chosen if isinstance(chosen, str) else None


def _emulator() -> EmulatorTarget | None:
    chosen = _chosen.get()
    if isinstance(chosen, EmulatorTarget):
        return chosen
    name = env.get("B12X_TARGET")
    if name not in ("", "cuda", "emulator"):
        raise ValueError(f"B12X_TARGET is {name!r}; needed is 'emulator', 'cuda' or nothing")
    return EmulatorTarget() if name == "emulator" else None
