"""The errors of the runtime. Each message says what was found, what is needed and what to do."""

from __future__ import annotations


class KernelNotFoundError(RuntimeError):
    """No pack holds a kernel that a plan needs and it cannot be compiled here; or graph capture forbids to load it."""


class KernelResolutionFrozenError(RuntimeError):
    """A plan needs a kernel that is neither in memory nor in a pack while kernel resolution is frozen."""


class PackError(RuntimeError):
    """A pack cannot be used: damaged, made by another version, or with another ABI than the running code's."""


class PackConflictError(PackError):
    """Two packs hold different bytes for one key."""


class DriverError(RuntimeError):
    """The NVIDIA driver is missing, too old, or refused a call."""


class DeviceNotSupportedError(RuntimeError):
    """The device's architecture is not one that these kernels are made for."""
