"""Package attributes that are imported when first asked for, so that importing a package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public ``names`` map to the modules, relative to it, that define them.

    A name that maps to itself with a dot in front is the submodule.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(names[name], package)
        value = module if names[name] == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # this function is not asked again: its time is that of a launch
        return value

    return load
