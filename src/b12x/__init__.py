"""b12x: precompiled NVFP4 inference kernels for NVIDIA SM120 and SM121 GPUs.

Importing this package loads no other module than its own few lines: neither torch nor CUDA nor the kernel compiler, and
it touches no driver, no environment and no file. Everything public is imported when it is first used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost more than all the rest here
if TYPE_CHECKING:
    from b12x._runtime.caches import clear_all_caches
    from b12x._runtime.errors import (
        DeviceNotSupportedError,
        DriverError,
        KernelNotFoundError,
        KernelResolutionFrozenError,
        PackConflictError,
        PackError,
    )
    from b12x._runtime.freeze import (
        compilation_frozen,
        freeze_compilation,
        freeze_kernel_resolution,
        kernel_resolution_frozen,
        unfreeze_compilation,
        unfreeze_kernel_resolution,
    )
    from b12x._runtime.registry import OpMeta, find_op, list_ops
    from b12x._runtime.scratch import ScratchBufferSpec
    from b12x._runtime.target import target

__version__ = "0.1.0"

_SUBPACKAGES = ("emulator", "gemm", "quantization")
_HOME = {
    "DeviceNotSupportedError": "errors",
    "DriverError": "errors",
    "KernelNotFoundError": "errors",
    "KernelResolutionFrozenError": "errors",
    "OpMeta": "registry",
    "PackConflictError": "errors",
    "PackError": "errors",
    "ScratchBufferSpec": "scratch",
    "clear_all_caches": "caches",
    "compilation_frozen": "freeze",
    "find_op": "registry",
    "freeze_compilation": "freeze",
    "freeze_kernel_resolution": "freeze",
    "kernel_resolution_frozen": "freeze",
    "list_ops": "registry",
    "target": "target",
    "unfreeze_compilation": "freeze",
    "unfreeze_kernel_resolution": "freeze",
}

__all__ = [
    "DeviceNotSupportedError",
    "DriverError",
    "KernelNotFoundError",
    "KernelResolutionFrozenError",
    "OpMeta",
    "PackConflictError",
    "PackError",
    "ScratchBufferSpec",
    "clear_all_caches",
    "compilation_frozen",
    "find_op",
    "freeze_compilation",
    "freeze_kernel_resolution",
    "kernel_resolution_frozen",
    "list_ops",
    "target",
    "unfreeze_compilation",
    "unfreeze_kernel_resolution",
]


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"b12x.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"b12x._runtime.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'b12x' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBPACKAGES})
