"""Which packs there are, and looking a key up in all of them.

Order: folders of ``B12X_PACK_PATH``, entry points of the group ``b12x.packs`` sorted by name, the wheel's own packs.
Packs are found and opened once per process, at the first look-up.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import b12x
from b12x._runtime import env
from b12x._runtime.errors import PackConflictError, PackError
from b12x._runtime.pack import INDEX, Artifact, Pack

ENTRY_POINTS = "b12x.packs"

_lock = threading.Lock()
_installed: tuple[Pack, ...] | None = None


def pack_folders() -> list[tuple[str, Path]]:
    """Folders to open, in order, each with where it was named. PackError when an entry point names no folder."""
    found = [("B12X_PACK_PATH", Path(p).absolute()) for p in env.get("B12X_PACK_PATH").split(os.pathsep) if p]
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        found.append((f"entry point {point.name!r}", _package_folder(point)))
    for root in b12x.__path__:
        own = Path(root) / "packs"
        if own.is_dir():
            found += [("b12x", folder) for folder in sorted(own.iterdir()) if (folder / INDEX).is_file()]
    return found


def installed() -> tuple[Pack, ...]:
    """All packs in order of precedence, opened at the first call (PackError when one cannot be used)."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = tuple(open_named(source, folder) for source, folder in pack_folders())
        return _installed


def open_named(source: str, folder: Path) -> Pack:
    """Open a folder of :func:`pack_folders`; the PackError of one that cannot be used says where it was named."""
    try:
        return Pack.open(folder)
    except PackError as error:
        if source == "b12x":
            raise
        remedy = "; or take it off the variable" if source == "B12X_PACK_PATH" else ""
        raise PackError(f"{source} names {str(folder)!r}, which is no pack that can be used: {error}{remedy}") from None


def clear() -> None:
    """Forget the opened packs."""
    global _installed
    with _lock:
        _installed = None


def holders(key: str) -> list[tuple[Pack, Artifact]]:
    """All packs that hold a key, in order.

    Raises
    ------
    PackConflictError
        Two packs hold different bytes under the key.
    """
    found = [(pack, artifact) for pack in installed() if (artifact := pack.get(key)) is not None]
    for pack, artifact in found[1:]:
        _check_same(key, found[0], (pack, artifact))
    return found


def conflicts() -> Iterator[PackConflictError]:
    """The conflict of every key that is held twice with different bytes."""
    seen: set[str] = set()
    for pack in installed():
        for key in pack.keys() & seen:
            try:
                holders(key)
            except PackConflictError as error:
                yield error
        seen.update(pack.keys())


def keys_of(kernel: str) -> Iterator[tuple[Pack, str]]:
    """All keys of one kernel family with their packs."""
    for pack in installed():
        for key in pack.entries:
            if key.startswith(f"{kernel}:"):
                yield pack, key


def _package_folder(point: importlib.metadata.EntryPoint) -> Path:
    """The folder of the package that an entry point names; located, not imported."""
    try:
        spec = importlib.util.find_spec(point.value)
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise PackError(
            f"entry point {point.name!r} of group {ENTRY_POINTS} names {point.value!r}, which is not an installed "
            "package; expected a package whose folder is a pack: reinstall or uninstall the distribution that "
            "declares it"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _check_same(key: str, first: tuple[Pack, Artifact], second: tuple[Pack, Artifact]) -> None:
    (pack, a), (other, b) = first, second
    differing = [arch for arch in a.cubins if arch in b.cubins and a.cubins[arch].blob != b.cubins[arch].blob]
    if a.ptx and b.ptx and a.ptx != b.ptx:
        differing.append("PTX")
    if differing:
        raise PackConflictError(
            f"two packs hold different {', '.join(differing)} for {key}: pack {pack.name!r} at {pack.path} (sha256 "
            f"{_digests(a)}) and pack {other.name!r} at {other.path} (sha256 {_digests(b)}). Expected are the same "
            "bytes: build both with the same b12x and DSL, or remove one (uninstall it, or take it off B12X_PACK_PATH)"
        )


def _digests(artifact: Artifact) -> str:
    cubins = [f"{arch} {cubin.blob[:12]}" for arch, cubin in artifact.cubins.items()]
    return ", ".join([*cubins, *([f"PTX {artifact.ptx[:12]}"] if artifact.ptx else [])])
