"""From a pack to a pack of the same kernels for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from b12x._runtime.pack import Artifact, Cubin, Pack, cubin_blob, index_bytes, ptx_blob

from ..cubin import read_cubin
from ..pack import publish
from .assemble import assemble
from .errors import RehostError
from .rewrite import TARGET, Rehosted, rewrite

Progress = Callable[[str, Rehosted], None]


def rehost_pack(
    source: Path, folder: Path, *, keys: Iterable[str] | None = None, jobs: int = 1, progress: Progress | None = None
) -> Pack:
    """Rehost the kernels of the pack at ``source`` (all, or those of ``keys``) and write the result at ``folder``.

    The new pack keeps each kernel's PTX, whose sha256 ties what was checked to what is shipped; its one architecture is
    :data:`~b12x.build_tools.rehost.rewrite.TARGET`. Raises RehostError, naming the kernel, where one cannot be
    rehosted.
    """
    pack = Pack.open(source)
    chosen = sorted(pack.keys() if keys is None else keys)
    entries: dict[str, Artifact] = {}
    blobs: dict[str, bytes] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for key, (entry, own, rehosted) in zip(chosen, pool.map(lambda key: _rehost(pack, key), chosen), strict=True):
            entries[key] = entry
            blobs.update(own)
            if progress is not None:
                progress(key, rehosted)
    index = index_bytes(
        name=f"{pack.name}-rehost",
        dsl=pack.dsl,
        ptxas=pack.ptxas,
        archs=(TARGET,),
        manifests=pack.manifests,
        entries=entries,
    )
    publish(folder, index, blobs)
    return Pack.open(folder)


def _rehost(pack: Pack, key: str) -> tuple[Artifact, dict[str, bytes], Rehosted]:
    artifact = pack.get(key)
    if artifact is None:
        raise RehostError(f"pack {pack.path} has no kernel {key}")
    ptx = pack.ptx(artifact)
    try:
        rehosted = rewrite(ptx)
    except RehostError as error:
        raise RehostError(f"{key}: {error}") from None
    cubin = assemble(rehosted.ptx, about=key)
    used = read_cubin(cubin)
    digest, cubin_name, cubin_data = cubin_blob(cubin)
    _, ptx_name, ptx_data = ptx_blob(ptx)
    held = Cubin(digest, len(cubin), used.registers, used.static_smem, used.local_bytes)
    return replace(artifact, cubins={TARGET: held}), {cubin_name: cubin_data, ptx_name: ptx_data}, rehosted
