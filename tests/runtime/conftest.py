"""Fixtures of the runtime's tests: nothing remembered between tests, and a place to install packs and fake drivers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import b12x
from b12x._runtime import counters, cuda_target, driver, jit, packs, resolve, tensor_map

from .fakes import FakeDriver


@pytest.fixture(autouse=True)
def clean_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every test starts with an empty process: no packs, no kernels, not frozen, a cache folder of its own."""
    for name in ("B12X_PACK_PATH", "B12X_TARGET", "B12X_PRINT_COMPILE_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("B12X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packs, "_installed", None)
    monkeypatch.setattr(resolve, "_memory", {})
    monkeypatch.setattr(jit, "_warned", set())
    monkeypatch.setattr(driver, "_ready", None)
    monkeypatch.setattr(cuda_target, "_targets", {})
    monkeypatch.setattr(cuda_target, "_current_raw_stream", None)
    tensor_map.encode.cache_clear()
    counters.reset()
    yield
    b12x.unfreeze_kernel_resolution()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make folders the only packs there are, in order, through B12X_PACK_PATH."""

    def put(*folders: Path) -> None:
        monkeypatch.setattr(packs, "b12x", SimpleNamespace(__path__=[]))  # where the wheel's own packs are
        monkeypatch.setenv("B12X_PACK_PATH", os.pathsep.join(map(str, folders)))
        packs.clear()

    return put


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    """Put a fake in the place of the driver."""

    def put(**options: Any) -> FakeDriver:
        fake = FakeDriver(**options)
        monkeypatch.setattr(driver, "_driver", lambda: fake)
        return fake

    return put
