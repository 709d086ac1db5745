"""The pack format: what is written is read back, and any damage is a PackError that names file, found and expected."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import b12x
from b12x._runtime import pack as pack_format
from b12x._runtime import packs
from b12x._runtime.pack import INDEX, Artifact, Pack, UnsavedPack, seal, write_pack

from .fakes import BOTH, ToySpec, make_artifact, make_pack

SPECS = (ToySpec(), ToySpec(tile=32), ToySpec(dtype="float16"))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Contents of a good index."""
    folder = make_pack(tmp_path_factory.mktemp("intact") / "p", *SPECS)
    return (folder / INDEX).read_bytes()


def reseal(data: bytes, **changes: Any) -> bytes:
    """A rightly sealed index with some members changed; a value of None removes the member."""
    members = {**json.loads(data), **changes}
    members.pop("_sha256")
    entries = {key: json.dumps(entry) for key, entry in members.pop("entries").items()}
    return seal({name: value for name, value in members.items() if value is not None}, entries)


def parse_all(data: bytes) -> Pack:
    """Open an index and parse every entry."""
    pack = Pack.parse(Path("somewhere"), data)
    for key in pack.keys():  # noqa: SIM118, the public way
        pack.get(key)
    return pack


def test_round_trip(tmp_path: Path) -> None:
    pack = Pack.open(make_pack(tmp_path / "p", *SPECS, name="demo"))
    assert (pack.name, pack.b12x_version, pack.dsl, pack.ptxas) == ("demo", b12x.__version__, "4.8.1", "13.4.59")
    assert pack.archs == BOTH
    assert set(pack.keys()) == {spec.key for spec in SPECS}
    for spec in SPECS:
        expected, blobs = make_artifact(spec)
        artifact = pack.get(spec.key)
        assert artifact.to_text() == expected.to_text()
        assert artifact.fingerprint == spec.abi().fingerprint
        for arch in BOTH:
            assert pack.cubin(artifact, arch) == blobs[f"{artifact.cubins[arch].blob}.cubin"]
        assert pack.ptx(artifact).encode() == gzip.decompress(blobs[f"{artifact.ptx}.ptx.gz"])
    assert pack.get("toy.copy:tile=1") is None


def test_index_is_json_that_other_tools_can_read(intact: bytes) -> None:
    index = json.loads(intact)
    assert next(iter(index)) == "_sha256"
    assert list(index)[-1] == "entries"
    for spec in SPECS:
        assert index["entries"][spec.key] == json.loads(make_artifact(spec)[0].to_text())
    assert sum(line.startswith(b'"toy.copy:') for line in intact.splitlines()) == len(SPECS), "one entry a line"
    assert intact.endswith(b"\n")


def test_pack_without_entries(tmp_path: Path) -> None:
    pack = Pack.open(make_pack(tmp_path / "p"))
    assert list(pack.keys()) == []
    assert json.loads((pack.path / INDEX).read_bytes())["entries"] == {}


def test_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = make_pack(tmp_path / "1", *SPECS), make_pack(tmp_path / "2", *reversed(SPECS))
    files = [{f.relative_to(p): f.read_bytes() for f in p.rglob("*") if f.is_file()} for p in (one, two)]
    assert files[0] == files[1]


def test_empty_folder_is_no_pack(tmp_path: Path) -> None:
    with pytest.raises(b12x.PackError, match=r"no pack at .*cannot read index.json .*No such file.*reinstall"):
        Pack.open(tmp_path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flip_anywhere_in_the_index_is_a_pack_error(intact: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(intact) - 1))
    damaged = bytearray(intact)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(b12x.PackError, match="somewhere"):
        parse_all(bytes(damaged))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_index_is_a_pack_error(intact: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(intact) - 1))
    with pytest.raises(b12x.PackError, match=rf"truncated or damaged \({length} bytes\)"):
        parse_all(intact[:length])


@settings(max_examples=150)
@given(junk=st.binary(max_size=300))
@example(b"\xff\xfe")
@example(b"[" * 100_000)
@example(b'{"schema":1}')
@example(b'{"schema":[]}')
def test_any_other_bytes_are_a_pack_error(junk: bytes) -> None:
    with pytest.raises(b12x.PackError):
        Pack.parse(Path("somewhere"), junk)


@settings(max_examples=150)
@given(rest=st.binary(max_size=60) | st.builds(lambda a, b: a + b',"entries":{\n' + b, st.binary(), st.binary()))
@example(rest=b'","schema":1,"entries":{}}\n')
@example(rest=b'","schema":1,"entries":{\n}}\n')
@example(rest=b'","schema":1,"entries":{\n\xff\n}}\n')
def test_rightly_sealed_nonsense_is_a_pack_error(rest: bytes) -> None:
    with pytest.raises(b12x.PackError, match="somewhere"):
        parse_all(b'{"_sha256":"' + hashlib.sha256(rest).hexdigest().encode() + rest)


def test_damage_message_has_both_hashes_and_the_remedy(intact: bytes) -> None:
    damaged = intact.replace(b"4.8.1", b"4.8.2")
    expected = json.loads(intact)["_sha256"]
    found = hashlib.sha256(damaged[len('{"_sha256":"') + 64 :]).hexdigest()
    with pytest.raises(b12x.PackError) as caught:
        Pack.parse(Path("/packs/demo"), damaged)
    for word in ("/packs/demo/index.json", found, expected, "reinstall the wheel or build the pack again"):
        assert word in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    member=st.sampled_from(["archs", "b12x_version", "dsl", "manifests", "name", "ptxas", "schema"]),
    value=json_values,
)
def test_wrong_members_of_a_sealed_index_are_a_pack_error_or_harmless(intact: bytes, member: str, value: Any) -> None:
    try:
        parse_all(reseal(intact, **{member: value}))
    except b12x.PackError as error:
        assert "somewhere" in str(error)  # noqa: PT017, other exceptions must pass through


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrong_entries_of_a_sealed_index_are_a_pack_error_or_harmless(intact: bytes, data: st.DataObject) -> None:
    entry = json.loads(make_artifact(ToySpec())[0].to_text())
    member = data.draw(st.sampled_from([*entry, "new"]))
    entry[member] = data.draw(json_values)
    text = json.dumps(entry)
    try:
        members = {name: value for name, value in json.loads(intact).items() if name not in ("_sha256", "entries")}
        parse_all(seal(members, {"toy.copy:a=1": text[: data.draw(st.integers(0, len(text)))]}))
    except b12x.PackError as error:
        assert "toy.copy:a=1" in str(error)  # noqa: PT017


def test_another_schema_is_refused_with_both_numbers(intact: bytes) -> None:
    with pytest.raises(b12x.PackError) as caught:
        Pack.parse(Path("somewhere"), reseal(intact, schema=2))
    for word in ("schema 2", "reads schema 1", "build the pack again", "install the b12x version"):
        assert word in str(caught.value)


def test_another_schema_is_recognised_even_with_another_seal() -> None:
    with pytest.raises(b12x.PackError, match="has schema 7"):
        Pack.parse(Path("somewhere"), b'{"schema": 7, "seal": "elsewhere"}')


def test_another_b12x_version_is_refused_with_both_versions(intact: bytes) -> None:
    with pytest.raises(b12x.PackError) as caught:
        Pack.parse(Path("somewhere"), reseal(intact, b12x_version="0.0.9"))
    for word in ("b12x 0.0.9", f"b12x {b12x.__version__}", "build it again", "remove it"):
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["cubin", "ptx.gz"])
def test_a_flipped_byte_in_a_blob_is_refused_with_file_found_and_expected(tmp_path: Path, kind: str) -> None:
    folder = make_pack(tmp_path / "p", ToySpec())
    pack = Pack.open(folder)
    artifact = pack.get(ToySpec().key)
    digest = artifact.cubins["sm_120a"].blob if kind == "cubin" else artifact.ptx
    file = folder / "blobs" / f"{digest}.{kind}"
    read = (lambda: pack.cubin(artifact, "sm_120a")) if kind == "cubin" else (lambda: pack.ptx(artifact))
    read()
    if kind == "cubin":
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        found = hashlib.sha256(damaged).hexdigest()
    else:
        file.write_bytes(gzip.compress(b"// another text"))
        found = hashlib.sha256(b"// another text").hexdigest()
    with pytest.raises(b12x.PackError) as caught:
        read()
    for word in (str(file), found, digest, "reinstall the wheel or build the pack again"):
        assert word in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b\x08", b"not gzip"])
def test_unreadable_ptx_is_a_pack_error(tmp_path: Path, damage: bytes) -> None:
    folder = make_pack(tmp_path / "p", ToySpec())
    pack = Pack.open(folder)
    artifact = pack.get(ToySpec().key)
    file = folder / "blobs" / f"{artifact.ptx}.ptx.gz"
    file.write_bytes(damage)
    with pytest.raises(b12x.PackError, match=file.name):
        pack.ptx(artifact)


def test_missing_blob_is_named(tmp_path: Path) -> None:
    folder = make_pack(tmp_path / "p", ToySpec())
    pack = Pack.open(folder)
    artifact = pack.get(ToySpec().key)
    file = folder / "blobs" / f"{artifact.cubins['sm_121a'].blob}.cubin"
    file.unlink()
    with pytest.raises(b12x.PackError, match=rf"{file.name} is missing; reinstall"):
        pack.cubin(artifact, "sm_121a")


def test_pack_without_ptx_says_so(tmp_path: Path) -> None:
    pack = Pack.open(make_pack(tmp_path / "p", ToySpec(), ptx=False))
    with pytest.raises(b12x.PackError, match="carries no PTX; build it again with PTX to use the emulator"):
        pack.ptx(pack.get(ToySpec().key))


def test_unsaved_pack_reads_from_memory(intact: bytes) -> None:
    artifact, blobs = make_artifact(SPECS[0])
    pack = UnsavedPack.from_bytes(Path("<memory>"), intact, blobs)
    assert pack.cubin(artifact, "sm_120a") == blobs[f"{artifact.cubins['sm_120a'].blob}.cubin"]


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pack_format, "_sync_directory", fail)
    with pytest.raises(OSError, match="disk full"):
        write_pack(tmp_path / "out" / "p", b"index", {"a.cubin": b"1"})
    assert list((tmp_path / "out").iterdir()) == []


def test_write_does_not_replace_a_pack(tmp_path: Path) -> None:
    folder = make_pack(tmp_path / "p", ToySpec())
    before = (folder / INDEX).read_bytes()
    with pytest.raises(OSError, match="not empty"):
        make_pack(folder, ToySpec(tile=8))
    assert (folder / INDEX).read_bytes() == before


def test_pack_path_order_then_entry_points_then_the_wheels_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {}
    for name in ("path-b", "path-a", "own-a", "own-b"):
        parent = tmp_path / ("wheel/packs" if name.startswith("own") else "folders")
        folders[name] = make_pack(parent / name, ToySpec(), name=name)
    (tmp_path / "wheel" / "packs" / "not-a-pack").mkdir()
    site = tmp_path / "site"
    for name in ("zeta", "alpha"):
        make_pack(site / f"addon_{name}", ToySpec(), name=name)
        (site / f"addon_{name}" / "__init__.py").write_text("raise AssertionError('imported')")
        info = site / f"addon_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: addon-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[b12x.packs]\n{name} = addon_{name}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(packs, "b12x", SimpleNamespace(__path__=[str(tmp_path / "wheel")]))
    monkeypatch.setenv("B12X_PACK_PATH", f"{folders['path-b']}::{folders['path-a']}")
    assert [pack.name for pack in packs.installed()] == ["path-b", "path-a", "alpha", "zeta", "own-a", "own-b"]
    ((first, _), *others) = packs.holders(ToySpec().key)
    assert first.name == "path-b"
    assert len(others) == 5, "the same bytes in several packs are fine"


def test_entry_point_to_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "gone-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[b12x.packs]\nlost = no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(b12x.PackError, match=r"'lost' .* names 'no_such_package', which is not .* uninstall"):
        packs.installed()


def test_missing_folder_on_the_pack_path_is_an_error(install: Callable[..., None], tmp_path: Path) -> None:
    install(tmp_path / "nowhere")
    with pytest.raises(b12x.PackError, match=r"no pack at .*nowhere"):
        packs.installed()


@pytest.mark.parametrize("different", ["cubin", "ptx"])
def test_one_key_with_different_bytes_in_two_packs_is_refused(
    install: Callable[..., None], tmp_path: Path, different: str
) -> None:
    def edit(artifact: Artifact) -> Artifact:
        other, _ = make_artifact(ToySpec(), salt="2")
        if different == "ptx":
            return dataclasses.replace(artifact, ptx=other.ptx)
        return dataclasses.replace(artifact, cubins={**artifact.cubins, "sm_121a": other.cubins["sm_121a"]})

    one = make_pack(tmp_path / "1", ToySpec(), name="one")
    two = make_pack(tmp_path / "2", ToySpec(), ToySpec(tile=8), name="two", edit=edit)
    install(one, two)
    with pytest.raises(b12x.PackConflictError) as caught:
        packs.holders(ToySpec().key)
    mine, theirs = (Pack.open(p).get(ToySpec().key) for p in (one, two))
    wrong = "PTX" if different == "ptx" else "sm_121a"
    digests = (mine.ptx, theirs.ptx) if different == "ptx" else (a.cubins["sm_121a"].blob for a in (mine, theirs))
    for word in (
        f"different {wrong} for {ToySpec().key}",
        f"'one' at {one}",
        f"'two' at {two}",
        *(digest[:12] for digest in digests),
        "build both with the same b12x and DSL, or remove one",
    ):
        assert word in str(caught.value)
    assert [pack.name for pack, _ in packs.holders(ToySpec(tile=8).key)] == ["two"], "other keys are served"
    assert [str(error) for error in packs.conflicts()] == [str(caught.value)]


@pytest.mark.parametrize("entry", ["absent", "file"])
def test_wrong_entry_of_the_path_is_named(install: Callable[..., None], tmp_path: Path, entry: str) -> None:
    (tmp_path / "file").write_text("")
    install(make_pack(tmp_path / "good", ToySpec()), tmp_path / entry)
    with pytest.raises(b12x.PackError) as caught:
        packs.installed()
    for word in (f"B12X_PACK_PATH names '{tmp_path / entry}'", "cannot read index.json", "or take it off the variable"):
        assert word in str(caught.value)
