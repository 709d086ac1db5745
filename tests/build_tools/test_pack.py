"""From artifacts to index and blobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from b12x._runtime.pack import Pack
from b12x.build_tools.compile_one import CompiledArtifact
from b12x.build_tools.cubin import Cubin
from b12x.build_tools.errors import BuildError
from b12x.build_tools.pack import pack_contents, publish

ARTIFACT = CompiledArtifact(
    key="toy.scale:variant=good,block=64",
    abi={"params": [], "launch": {}},
    fingerprint="f" * 64,
    source="5" * 64,
    entry="kernel_0",
    ptx=".version 9.4\n.target sm_120a\n",
    cubins={"sm_121a": b"121", "sm_120a": b"120"},
    resources={arch: Cubin(arch, ("kernel_0",), 40, 512, 16, "13.4.59") for arch in ("sm_120a", "sm_121a")},
    dsl="4.8.1",
    ptxas="13.4.59",
)
TWIN = dataclasses.replace(ARTIFACT, key="toy.scale:variant=good,block=128")


def test_order_does_not_matter() -> None:
    swapped = dataclasses.replace(ARTIFACT, cubins=dict(reversed(list(ARTIFACT.cubins.items()))))
    one = pack_contents("toys", [ARTIFACT, TWIN], {"b.toml": "1", "a.toml": "2"})
    two = pack_contents("toys", [TWIN, swapped], {"a.toml": "2", "b.toml": "1"})
    assert one == two


def test_entries_say_what_the_cubins_use_and_equal_blobs_are_stored_once(tmp_path: Path) -> None:
    index, blobs = pack_contents("toys", [ARTIFACT, TWIN], {})
    assert sorted(name.split(".", 1)[1] for name in blobs) == ["cubin", "cubin", "ptx.gz"]
    publish(tmp_path / "toys", index, blobs)
    pack = Pack.open(tmp_path / "toys")
    assert list(pack.keys()) == [TWIN.key, ARTIFACT.key]
    artifact = pack.get(ARTIFACT.key)
    assert artifact is not None
    assert artifact.entry == "kernel_0"
    assert pack.cubin(artifact, "sm_121a") == b"121"
    assert pack.ptx(artifact) == ARTIFACT.ptx
    cubin = artifact.cubins["sm_120a"]
    assert (cubin.bytes, cubin.registers, cubin.static_smem, cubin.spill_bytes) == (3, 40, 512, 16)


@pytest.mark.parametrize("change", [{"dsl": "4.9.0"}, {"ptxas": "13.5.1"}, {"cubins": {"sm_120a": b"120"}}])
def test_one_toolchain_and_arch_list_per_pack(change: dict[str, object]) -> None:
    other = dataclasses.replace(TWIN, **change)
    with pytest.raises(BuildError, match=r"come from 2 toolchains or arch lists \(DSL .*, expected exactly one"):
        pack_contents("toys", [ARTIFACT, other], {})
    with pytest.raises(BuildError, match=r"come from 0 toolchains or arch lists \(no kernels\)"):
        pack_contents("toys", [], {})


def test_publish_replaces_a_pack_whole(tmp_path: Path) -> None:
    folder = tmp_path / "toys"
    publish(folder, *pack_contents("toys", [ARTIFACT, TWIN], {}))
    (folder / "blobs" / "stale.cubin").write_bytes(b"")
    publish(folder, *pack_contents("toys", [ARTIFACT], {}))
    assert list(Pack.open(folder).keys()) == [ARTIFACT.key]
    assert not (folder / "blobs" / "stale.cubin").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["toys"]
