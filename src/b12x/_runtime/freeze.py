"""Freezing kernel resolution: from then on a plan may only use kernels that are in memory or in a pack.

The state is one tuple that is replaced as a whole, so readers need no lock.
"""

from __future__ import annotations

_state: tuple[bool, str | None] = (False, None)


def freeze_kernel_resolution(reason: str | None = None) -> None:
    """Forbid compiling, process-wide.

    Afterwards a plan that needs a kernel neither in memory nor in a pack raises
    :class:`b12x.KernelResolutionFrozenError`; the JIT's disk cache is not looked at. Freezing again replaces the
    reason.

    Parameters
    ----------
    reason
        Why, for the error message.
    """
    global _state
    _state = (True, reason)


def unfreeze_kernel_resolution() -> None:
    """Allow compiling again."""
    global _state
    _state = (False, None)


def kernel_resolution_frozen() -> bool:
    """Whether kernel resolution is frozen."""
    return _state[0]


def freeze_reason() -> str | None:
    """The reason given when resolution was frozen, if any."""
    return _state[1]


freeze_compilation = freeze_kernel_resolution
unfreeze_compilation = unfreeze_kernel_resolution
compilation_frozen = kernel_resolution_frozen
