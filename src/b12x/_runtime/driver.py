"""The one door to the NVIDIA driver: cuda-python's bindings, initialised at first use.

Everything goes through :func:`_driver`, so a test can put a fake in its place.
"""

from __future__ import annotations

import threading
from typing import Any

from b12x._runtime.errors import DriverError

#: CUDA version, as ``cuDriverGetVersion`` words it, of the oldest driver that loads the cubins (ptxas 13): R580.
MINIMUM_DRIVER = 13000

_WORKS_WITHOUT = (
    "Without a GPU these still work: `b12x ops`, `b12x kernels`, `b12x show`, `b12x build`, and every op on CPU "
    "tensors with B12X_TARGET=emulator"
)

_lock = threading.Lock()
_ready: Any = None


def _driver() -> Any:
    """The bindings module. Importing it loads no driver library; its first call does."""
    from cuda.bindings import driver

    return driver


def ready() -> Any:
    """The bindings, after the driver was found, is new enough and is initialised; once per process, thread-safe.

    Raises
    ------
    DriverError
        cuda-python or the driver is missing, the driver is too old, or there is no device.
    """
    global _ready
    if _ready is None:
        with _lock:
            if _ready is None:
                _ready = _initialise()
    return _ready


def version() -> int:
    """CUDA version of the driver, such as 13000, whatever it is (DriverError when there is none)."""
    try:
        bindings = _driver()
    except ImportError as error:
        raise DriverError(
            f"cuda-python not found ({error}); needed is version 13 or newer: pip install 'cuda-python>=13'. "
            f"{_WORKS_WITHOUT}"
        ) from None
    try:
        (found,) = check("cuDriverGetVersion", bindings.cuDriverGetVersion())
    except (RuntimeError, OSError, SystemError) as error:  # what cuda-python raises when libcuda cannot be loaded
        raise _not_found(str(error)) from None
    if not found:
        raise _not_found("cuDriverGetVersion says 0")
    return int(found)


def check(call: str, result: tuple[Any, ...], about: str = "") -> tuple[Any, ...]:
    """The values of a driver call's result, or DriverError naming the call and the error."""
    if result[0] != 0:
        raise DriverError(f"{call} failed: {error_text(result[0])}{' ' if about else ''}{about}")
    return result[1:]


def error_text(code: Any) -> str:
    """``CUDA_ERROR_X (700)`` for a result code."""
    return f"{getattr(code, 'name', 'error')} ({int(code)})"


def _initialise() -> Any:
    found = version()
    if found < MINIMUM_DRIVER:
        raise DriverError(
            f"the NVIDIA driver is too old: found one for CUDA {found // 1000}.{found % 1000 // 10}, needed is CUDA "
            f"{MINIMUM_DRIVER // 1000}.0 (driver R580 or newer): update the driver. {_WORKS_WITHOUT}"
        )
    bindings = _driver()
    code = bindings.cuInit(0)[0]
    if code != 0:
        name = error_text(code)
        if "STUB_LIBRARY" in name:
            raise _not_found(name)
        raise DriverError(
            f"the NVIDIA driver finds no usable GPU: cuInit says {name}; needed is an SM120 or SM121 device that this "
            f"process may see: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPU access. {_WORKS_WITHOUT}"
        )
    return bindings


def _not_found(detail: str) -> DriverError:
    return DriverError(
        f"NVIDIA driver not found ({detail}); needed is driver R580 or newer: install it, or start the container with "
        f"access to the GPU. {_WORKS_WITHOUT}"
    )
