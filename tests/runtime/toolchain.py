"""A kernel compiler that compiles nothing, for tests of the JIT in this and in other processes."""

from __future__ import annotations

import importlib.metadata
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from b12x._runtime import counters, jit
from b12x._runtime.pack import index_bytes
from b12x._runtime.spec import KernelSpec

from .fakes import make_artifact

DSL_VERSION = "9.9.9"


class FakeToolchain:
    """Has the modules that the JIT asks for; remembers what was compiled."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        self.log = log
        self.seconds = seconds
        self.compiled: list[tuple[str, list[str]]] = []
        self.source = "1" * 64
        self.error: Exception | None = None
        self.compile_one = SimpleNamespace(DSL_VERSION=DSL_VERSION, compile_spec=self.compile_spec)
        self.pack = SimpleNamespace(pack_contents=self.pack_contents)
        self.sources = SimpleNamespace(source_sha256=lambda spec: self.source)

    def compile_spec(self, spec: KernelSpec, archs: list[str]) -> Any:
        counters.count_compile()
        self.compiled.append((spec.key, archs))
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(f"{os.getpid()} {spec.key}\n")
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return spec, tuple(archs)

    def pack_contents(self, name: str, compiled: list[Any], manifests: dict[str, str]) -> Any:
        ((spec, archs),) = compiled
        artifact, blobs = make_artifact(spec, archs)
        entries = {spec.key: artifact}
        return index_bytes(name=name, dsl="d", ptxas="p", archs=archs, manifests=manifests, entries=entries), blobs

    def install(self, put: Any, version: str | None = DSL_VERSION) -> None:
        """Put it in the place of the real one; ``version`` is the DSL that seems to be installed, None for no DSL."""

        def installed(name: str) -> str:
            if version is None or name != jit.DSL:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        put(jit, "_toolchain", lambda: self)
        put(importlib.metadata, "version", installed)
