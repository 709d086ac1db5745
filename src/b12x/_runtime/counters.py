"""What happened in this process: launches by kernel key, and compiles.

Tests and the demo read these; nothing acts on them.
"""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()

#: Launches by kernel key, counted where the kernel is launched. A replayed graph counts its launches once, at capture.
launches: Counter[str] = Counter()

#: Calls of ``cute.compile``.
compiles = 0


def count_launch(key: str) -> None:
    with _lock:
        launches[key] += 1


def count_compile() -> None:
    global compiles
    with _lock:
        compiles += 1


def reset() -> None:
    """Set all counters to zero."""
    global compiles
    with _lock:
        launches.clear()
        compiles = 0
