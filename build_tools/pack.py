"""From compiled artifacts to a pack on disk, in the format of :mod:`b12x._runtime.pack`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from b12x._runtime.pack import INDEX, Artifact, Cubin, cubin_blob, index_bytes, ptx_blob, write_pack

from .compile_one import CompiledArtifact
from .errors import BuildError

_NO_RECORDS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def pack_entry(
    artifact: CompiledArtifact, records: Mapping[str, Mapping[str, Any]]
) -> tuple[Artifact, dict[str, bytes]]:
    """The index entry of one artifact, with the checks that ``records`` hold of its PTX, and its blobs by file name."""
    blobs: dict[str, bytes] = {}
    cubins: dict[str, Cubin] = {}
    for arch, data in artifact.cubins.items():
        digest, name, content = cubin_blob(data)
        blobs[name] = content
        used = artifact.resources[arch]
        cubins[arch] = Cubin(digest, len(data), used.registers, used.static_smem, used.local_bytes)
    ptx, name, content = ptx_blob(artifact.ptx)
    blobs[name] = content
    entry = Artifact(
        abi=artifact.abi,
        fingerprint=artifact.fingerprint,
        source=artifact.source,
        ptx=ptx,
        entry=artifact.entry,
        cubins=cubins,
        checks=tuple(records.get(ptx, {}).get("checks", ())),
    )
    return entry, blobs


def pack_contents(
    name: str,
    artifacts: Iterable[CompiledArtifact],
    manifests: Mapping[str, str],
    records: Mapping[str, Mapping[str, Any]] = _NO_RECORDS,
) -> tuple[bytes, dict[str, bytes]]:
    """The index and the blobs of a pack: the same bytes for the same artifacts, whatever their order.

    ``manifests`` maps the file names of the manifests to their sha256, ``records`` the sha256 of PTX to its check
    record (:mod:`b12x.build_tools.checks`).
    """
    entries: dict[str, Artifact] = {}
    blobs: dict[str, bytes] = {}
    versions: set[tuple[str, str, tuple[str, ...]]] = set()
    for artifact in artifacts:
        entries[artifact.key], own = pack_entry(artifact, records)
        blobs.update(own)
        versions.add((artifact.dsl, artifact.ptxas, tuple(sorted(artifact.cubins))))
    if len(versions) != 1:
        found = "; ".join(
            f"DSL {dsl}, ptxas {ptxas}, archs {', '.join(archs)}" for dsl, ptxas, archs in sorted(versions)
        )
        raise BuildError(
            f"pack {name!r}: its kernels come from {len(versions)} toolchains or arch lists ({found or 'no kernels'}), "
            f"expected exactly one; build with --no-cache"
        )
    ((dsl, ptxas, archs),) = versions
    index = index_bytes(name=name, dsl=dsl, ptxas=ptxas, archs=archs, manifests=manifests, entries=entries)
    return index, blobs


def publish(folder: Path, index: bytes, blobs: Mapping[str, bytes]) -> None:
    """Write a pack at ``folder``, in place of the pack that may be there. Never leaves half a pack.

    Raises BuildError when the folder holds something that is not a pack.
    """
    if folder.exists() and not (folder / INDEX).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError(f"{folder} exists and is not a pack (it has no {INDEX}); choose another output folder")
    if not folder.exists():
        write_pack(folder, index, blobs)
        return
    # A folder can be renamed only onto an empty one, so the old pack steps aside first, and back if anything fails.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.old-", dir=folder.parent) as aside:
        old = Path(aside, folder.name)
        folder.rename(old)
        try:
            write_pack(folder, index, blobs)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            old.rename(folder)
            raise
