"""Compiling a kernel at run time, when no pack has it and resolution is not frozen.

Only here, and only at that moment, the kernel compiler (the DSL) is imported. A result is kept as a pack of one kernel
in a per-user folder: one process compiles a key while others wait for its file lock, and the folder appears whole or
not at all. A cache that cannot be used safely is not an error; the kernel then lives in memory only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from b12x import __version__
from b12x._runtime import env
from b12x._runtime.cuda_target import REHOSTS
from b12x._runtime.errors import KernelNotFoundError, PackError
from b12x._runtime.pack import Artifact, Pack, UnsavedPack, write_pack
from b12x._runtime.spec import KernelSpec

DSL = "nvidia-cutlass-dsl"
PACK_NAME = "jit"

#: Seconds between progress lines of one compile.
HEARTBEAT = 10.0

#: Seconds after which a half-written entry of the cache was left by a process that died.
STALE = 24 * 3600.0

_warned: set[str] = set()
_compiles = 0
_seconds = 0.0


class Toolchain(NamedTuple):
    """The modules that compile; none of them imports the DSL at its import."""

    compile_one: ModuleType
    pack: ModuleType
    sources: ModuleType


def obtain(spec: KernelSpec, arch: str, missed: str) -> tuple[Artifact, Pack, str]:
    """The kernel from the disk cache or, failing that, compiled.

    Parameters
    ----------
    spec, arch
        What to compile.
    missed
        What resolution looked for; the start of the error's message.

    Returns
    -------
    artifact, pack, origin
        ``origin`` is ``jit-cache`` or ``jit``.

    Raises
    ------
    KernelNotFoundError
        The DSL is missing or of another version, the kernel does not compile, or ``arch`` is not a compiler's.
    """
    if arch in REHOSTS:
        raise KernelNotFoundError(
            f"{missed}\n  target {arch} takes kernels only from packs made for it, nothing is compiled for it: rehost "
            "a pack that holds the kernel, `python -m b12x.build_tools.rehost PACK -o FOLDER` (an install from the "
            "source tree has it), then put FOLDER on B12X_PACK_PATH"
        )
    problem = unavailable()
    if problem is not None:
        raise KernelNotFoundError(f"{missed}\n  compiling it here: {problem}; or build a pack as above")
    tools = _toolchain()
    folder = cache_folder()
    if folder is None:
        return _compile(tools, spec, arch, None)
    identity = json.dumps(
        [spec.key, arch, tools.sources.source_sha256(spec), tools.compile_one.DSL_VERSION, __version__]
    )
    place = folder / hashlib.sha256(identity.encode()).hexdigest()
    cached = _cached(place, spec, arch)
    if cached is not None:
        return cached
    with _locked(place.with_suffix(".lock")) as locked:
        cached = _cached(place, spec, arch)
        if cached is not None:
            return cached
        return _compile(tools, spec, arch, place if locked else None)


def unavailable() -> str | None:
    """Why nothing can be compiled here and what to do about it, None when it can be tried."""
    try:
        needed = _toolchain().compile_one.DSL_VERSION
    except ImportError as error:
        return f"this installation has no kernel sources ({error}): reinstall b12x"
    try:
        found = importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        return f"{DSL} is not installed, needed is {needed}: pip install 'b12x[jit]'"
    if found != needed:
        return f"found {DSL} {found}, needed is {needed}: pip install 'b12x[jit]'"
    return None


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, made if need be; None, with one warning, when there is no safe place."""
    root = _cache_root()
    if root is None:
        _memory_only("there is no home folder; set B12X_CACHE_DIR to a folder of your own")
        return None
    folder = root / "jit"
    try:
        _make_private(folder)
        for path in (root, folder):
            status = path.stat()
            if status.st_mode & stat.S_IWOTH:
                _memory_only(
                    f"{path} is world-writable, so others could put kernels there; chmod o-w it or set B12X_CACHE_DIR"
                )
                return None
            if status.st_uid != os.geteuid():
                _memory_only(
                    f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; set B12X_CACHE_DIR to a folder of "
                    "your own"
                )
                return None
    except OSError as error:
        _memory_only(f"{folder} cannot be used ({error.strerror}); set B12X_CACHE_DIR to a writable folder")
        return None
    return folder


def _make_private(folder: Path) -> None:
    """Make a folder and the missing ones above it, all for this user alone, whatever the umask lets through."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove what writers that died have left: an entry is written under a hidden name and renamed."""
    for entry in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > STALE:
                shutil.rmtree(entry)


def _cache_root() -> Path | None:
    chosen = env.get("B12X_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "b12x"
    home = os.path.expanduser("~")  # needs neither HOME nor a passwd row: it then gives "~" back
    return Path(home) / ".cache" / "b12x" if os.path.isabs(home) else None


def _toolchain() -> Toolchain:
    from b12x.build_tools import compile_one, pack, sources

    return Toolchain(compile_one, pack, sources)


def _cached(place: Path, spec: KernelSpec, arch: str) -> tuple[Artifact, Pack, str] | None:
    """What another compile published; None when there is nothing, or nothing whole."""
    if not place.exists():
        return None
    try:
        pack = Pack.open(place)
        artifact = pack.get(spec.key)
        if artifact is None or arch not in artifact.cubins:
            raise PackError(f"{place} does not hold {spec.key} for {arch}")
        pack.cubin(artifact, arch)
        pack.ptx(artifact)
    except PackError as error:
        _warn(f"b12x compiles a cached kernel again: {error}")
        return None
    return artifact, pack, "jit-cache"


def _compile(tools: Toolchain, spec: KernelSpec, arch: str, place: Path | None) -> tuple[Artifact, Pack, str]:
    """Compile, and publish at ``place`` unless it is None."""
    with _progress(spec, arch):
        try:
            compiled = tools.compile_one.compile_spec(spec, [arch])
        except Exception as error:
            raise KernelNotFoundError(f"{spec.key} cannot be compiled for {arch}: {error}") from error
    index, blobs = tools.pack.pack_contents(PACK_NAME, [compiled], {})
    pack: Pack = UnsavedPack.from_bytes(place or Path("<memory>"), index, blobs)
    if place is not None:
        try:
            if place.exists():  # damaged: what is whole was returned before
                shutil.rmtree(place)
            _remove_stale(place.parent)
            write_pack(place, index, blobs)
        except OSError as error:
            _memory_only(f"{place} cannot be written ({error.strerror})")
    artifact = pack.get(spec.key)
    assert artifact is not None
    return artifact, pack, "jit"


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Hold a file's lock; False when it cannot be had. The kernel drops the lock of a process that dies."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _memory_only(f"{file} cannot be written ({error.strerror})")
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def _progress(spec: KernelSpec, arch: str) -> Iterator[None]:
    """Print when a compile starts, every few seconds while it runs, and when it ends, if that is asked for."""
    global _compiles, _seconds
    _compiles += 1
    started = time.monotonic()
    done = threading.Event()

    def say(event: str, detail: str = "") -> None:
        print(
            f"[b12x cute.compile] {event} number={_compiles} {detail}key={spec.key} arch={arch}",
            file=sys.stderr,
            flush=True,
        )

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            say("compile-running", f"duration_s={time.monotonic() - started:.1f} ")

    event = "compile-failed"
    wanted = env.flag("B12X_PRINT_COMPILE_PROGRESS")
    if wanted:
        say("compile-start")
        threading.Thread(target=beat, daemon=True).start()
    try:
        yield
        event = "compile-done"
    finally:
        done.set()
        duration = time.monotonic() - started
        _seconds += duration
        if wanted:
            say(event, f"duration_s={duration:.3f} total_compile_s={_seconds:.3f} ")


def _memory_only(why: str) -> None:
    _warn(f"b12x keeps kernels compiled at run time in memory only: {why}")


def _warn(text: str) -> None:
    """Warn once per process and text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
