"""Every environment variable the runtime reads, in one table. None of them is part of a kernel key.

They are read when they are needed, never at import.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    default: str
    meaning: str


TABLE = {
    "B12X_PACK_PATH": Variable("", f"folders of packs to search first, separated by {os.pathsep!r}"),
    "B12X_TARGET": Variable("", "'emulator': plans for device 'cpu' run on the emulator"),
    "B12X_CACHE_DIR": Variable("$XDG_CACHE_HOME/b12x or ~/.cache/b12x", "where kernels compiled at run time are kept"),
    "B12X_PRINT_COMPILE_PROGRESS": Variable("0", "print a line when a run-time compile starts, goes on and ends"),
}


def get(name: str) -> str:
    """Value of a variable of the table, empty when it is not set."""
    assert name in TABLE
    return os.environ.get(name, "")


def flag(name: str) -> bool:
    """Value of a boolean variable: unset, empty, 0, false, no and off mean False, whatever the case."""
    return get(name).strip().lower() not in ("", "0", "false", "no", "off")
