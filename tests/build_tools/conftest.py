"""The toy ops of ``toys/``, made part of the ``b12x`` package while a test needs them."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import b12x
from b12x.build_tools.checks import ALLOW_UNCHECKED

ROOT = Path(__file__).parent.parent.parent
TOYS = Path(__file__).parent / "toys"


@pytest.fixture(autouse=True)
def no_records_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys have no check records, and kernels that were changed a moment ago have none yet."""
    monkeypatch.setenv(ALLOW_UNCHECKED, "1")


@contextmanager
def part_of_b12x(tree: Path) -> Iterator[Path]:
    """Make a tree's ops and its ``kernels`` part of the package, and forget them afterwards."""
    kernels = importlib.import_module("b12x.kernels")
    b12x.__path__.append(str(tree))
    kernels.__path__.append(str(tree / "kernels"))
    importlib.invalidate_caches()
    try:
        yield tree
    finally:
        b12x.__path__.remove(str(tree))
        kernels.__path__.remove(str(tree / "kernels"))
        for name in list(sys.modules):
            if name.startswith(("b12x.toy", "b12x.kernels.toy")):
                del sys.modules[name]
        for package in (b12x, kernels):
            vars(package).pop("toy", None)


@pytest.fixture
def toys() -> Iterator[Path]:
    """The toy ops, as they are in the repository."""
    with part_of_b12x(TOYS) as tree:
        yield tree


@pytest.fixture
def toy_tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of the toy ops that the test may edit."""
    shutil.copytree(TOYS, tmp_path / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    with part_of_b12x(tmp_path / "tree") as tree:
        yield tree
