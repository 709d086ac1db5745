"""Dropping what the process remembers."""

from __future__ import annotations

import sys

from b12x._runtime import packs, registry, resolve


def clear_all_caches() -> None:
    """Forget resolved kernels and opened packs, and call ``clear_caches`` of every op that has been imported.

    Imports nothing new. Cubins already loaded on a device stay loaded, since a captured graph may still use them; a
    later plan finds them again instead of loading a second copy.
    """
    resolve.clear()
    packs.clear()
    for meta in registry.list_ops():
        clear = getattr(sys.modules.get(meta.module), "clear_caches", None)
        if clear is not None:
            clear()
