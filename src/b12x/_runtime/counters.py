"""What happened in this process: launches by kernel key, and compiles.

Tests and the demo read these; nothing acts on them. ``launches`` is a ``Counter`` as of now: launches by kernel key,
counted where the kernel is launched. A replayed graph counts its launches once, at capture.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable

_lock = threading.Lock()
_tallies: dict[str, _Tally] = {}

#: Calls of ``cute.compile``.
compiles = 0


class _Tally:
    """A count that threads add to without a lock, since a step of ``itertools.count`` is indivisible; to read is a step
    too."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._start = 0
        self._reads = 0

    def read(self) -> int:
        """With the lock held."""
        value = self.add() - self._reads - self._start
        self._reads += 1
        return value

    def reset(self) -> None:
        """With the lock held."""
        self._start += self.read()


def __getattr__(name: str) -> Counter[str]:
    if name != "launches":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _lock:
        counts = {key: tally.read() for key, tally in _tallies.items()}
    return Counter({key: count for key, count in counts.items() if count})


def launch_counter(key: str) -> Callable[[], int]:
    """A function that counts one launch of a kernel."""
    with _lock:
        return _tallies.setdefault(key, _Tally()).add


def count_compile() -> None:
    global compiles
    with _lock:
        compiles += 1


def reset() -> None:
    """Set all counters to zero."""
    global compiles
    with _lock:
        compiles = 0
        for tally in _tallies.values():
            tally.reset()
