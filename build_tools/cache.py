"""The build cache: one file per spec and arch, named by a hash of everything its content depends on.

A file begins with the sha256 of its rest, so a damaged one is found when it is read; it is removed and compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from b12x._runtime.spec import KernelSpec

from .compile_one import DSL_VERSION, ArchBuild
from .sources import module_file, source_sha256

# The modules whose code decides how the DSL is called. Inspection is not among them: it also runs on what is cached.
_COMPILER_MODULES = ("b12x.build_tools.compile_one", "b12x.build_tools.tracing")


@dataclass(frozen=True)
class BuildCache:
    """A cache in a folder, or, with ``None``, one that holds nothing."""

    folder: Path | None

    def load(self, spec: KernelSpec, arch: str) -> ArchBuild | None:
        if self.folder is None:
            return None
        path = self._path(self.folder, spec, arch)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, _, body = data.partition(b"\n")
        if digest.decode(errors="replace") != hashlib.sha256(body).hexdigest():
            path.unlink(missing_ok=True)
            return None
        return ArchBuild.from_json(json.loads(body))

    def store(self, spec: KernelSpec, build: ArchBuild) -> None:
        if self.folder is None:
            return
        path = self._path(self.folder, spec, build.arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = json.dumps(build.to_json(), sort_keys=True).encode()
        # Written beside its place and renamed, so that a reader never sees half a file.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _path(self, folder: Path, spec: KernelSpec, arch: str) -> Path:
        name = cache_key(spec, arch)
        return folder / name[:2] / f"{name}.json"


def cache_key(spec: KernelSpec, arch: str) -> str:
    """sha256 over all that decides the result: spec, ABI, sources, arch, DSL and Python version, compile code."""
    parts = {
        "spec": spec.key,
        "abi": spec.abi().fingerprint,
        "sources": source_sha256(spec),
        "arch": arch,
        "dsl": DSL_VERSION,
        # The DSL rewrites the kernel's syntax tree, which depends on the minor version.
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "compiler": [_module_sha256(name) for name in _COMPILER_MODULES],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def default_folder() -> Path | None:
    """``B12X_BUILD_CACHE``, else ``build/cache`` of a source tree, else the user's cache folder, else nowhere.

    An empty ``B12X_BUILD_CACHE`` means nowhere.
    """
    named = os.environ.get("B12X_BUILD_CACHE")
    if named is not None:
        return Path(named).absolute() if named else None
    root = Path(__file__).parent.parent
    if (root / "pyproject.toml").is_file() and os.access(root, os.W_OK):
        return root / "build" / "cache"
    base = os.environ.get("XDG_CACHE_HOME") or (f"{os.environ['HOME']}/.cache" if os.environ.get("HOME") else "")
    return Path(base, "b12x", "build") if base else None


def _module_sha256(name: str) -> str:
    path = module_file(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
