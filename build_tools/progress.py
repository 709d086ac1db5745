"""Progress of a build: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

#: Seconds without news after which a plain log is told what is being compiled.
HEARTBEAT = 10.0


class Progress:
    """Counts finished kernels. Use as a context manager; the bar is cleared at the end."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self._total = total
        self._label = label
        self._stream = stream or sys.stderr
        self._bar = self._stream.isatty()
        self._done = 0
        self._started = time.monotonic()
        self._last_line = self._started

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar and self._total:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def finished(self, name: str, note: str) -> None:
        """One more kernel is done; ``note`` says how (seconds, ``cached``, ``FAILED``)."""
        self._done += 1
        if self._bar:
            self._draw(name)
        else:
            self._line(f"[{self._done}/{self._total}] {name} {note}")

    def waiting(self, running: list[str]) -> None:
        """Called now and then while kernels compile; keeps the ETA moving, or tells a quiet log what is going on."""
        if self._bar:
            self._draw(running[0] if running else "")
        elif time.monotonic() - self._last_line >= HEARTBEAT:
            elapsed = time.monotonic() - self._started
            self._line(f"[{self._done}/{self._total}] {elapsed:.0f} s, compiling {', '.join(running)}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._stream.write(f"{self._label} {text}\n")
        self._stream.flush()

    def _draw(self, name: str) -> None:
        width = 20
        filled = width * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (width - filled)
        text = f"{self._label} [{bar}] {self._done}/{self._total} {self._eta()} {name}"
        columns = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + text[:columns])
        self._stream.flush()

    def _eta(self) -> str:
        if not self._done:
            return "ETA -:--"
        left = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f"ETA {int(left) // 60}:{int(left) % 60:02d}"
