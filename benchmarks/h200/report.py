"""A section's results as JSON, written again after every entry: an interrupted run keeps what it found."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sanitizer import MARK

from b12x._runtime import counters

#: Failures that are printed; all are in the JSON.
_PRINTED = 5
_PRINTED_CHARACTERS = 300


class Report:
    """``entries`` is a list of results, ``failures`` names those that found something wrong or broke, ``launches``
    counts the launches of each kernel so far."""

    def __init__(self, path: Path, *, mark: bool = False) -> None:
        """With ``mark``, each entry's name is printed when it is added."""
        self._path = path
        self._mark = mark
        self.data: dict[str, Any] = {"entries": [], "failures": []}
        self._write()

    def add(self, name: str, ok: bool, **values: Any) -> None:
        self.data["entries"].append({"name": name, "ok": ok, **values})
        if not ok:
            self.data["failures"].append(name)
            if len(self.data["failures"]) <= _PRINTED:
                print(f"FAILED {name}: {values}"[:_PRINTED_CHARACTERS], flush=True)
        if self._mark:
            print(f"{MARK}{name}", flush=True)
        self._write()

    def set(self, name: str, value: Any) -> None:
        self.data[name] = value
        self._write()

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """An exception inside becomes a failed entry."""
        try:
            yield
        except Exception as error:
            self.add(name, False, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc(limit=-4))

    def _write(self) -> None:
        self.data["launches"] = dict(counters.launches)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, default=str) + "\n")
        os.replace(partial, self._path)
