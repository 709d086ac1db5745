"""``b12x build`` and the add-on wheels it makes."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from b12x import __version__
from b12x._runtime import packs
from b12x._runtime.pack import Pack
from b12x.build_tools import cli


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def manifest(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("B12X_BUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("B12X_BUILD_ARCHS", "sm_120a")
    path = tmp_path / "toys.toml"
    path.write_text('name = "my-toys"\n[[op]]\nop = "toy.scale"\nn = 1\n')
    return path


def test_a_folder_and_a_table(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(manifest, "-o", tmp_path / "out") == 0
    pack = Pack.open(tmp_path / "out" / "my-toys")
    assert (pack.archs, list(pack.keys())) == (("sm_120a",), ["toy.scale:variant=good,block=64"])
    printed = capsys.readouterr()
    head, row = (line.split() for line in printed.out.splitlines())
    assert head == ["pack", "specs", "compiled", "cached", "seconds", "bytes", "path"]
    assert row[:4] == ["my-toys", "1", "1", "0"]
    assert row[6] == str(tmp_path / "out" / "my-toys")
    assert "my-toys [1/1] toy.scale:variant=good,block=64" in printed.err


def test_json(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (manifest, "-o", tmp_path / "out", "--json", "--archs", "sm_120a,sm_121a", "--jobs", 1)
    assert run(*arguments) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["name"], report["compiles"], report["archs"]) == ("my-toys", 2, ["sm_120a", "sm_121a"])
    assert run(*arguments) == 0
    assert json.loads(capsys.readouterr().out)[0]["compiles"] == 0
    assert run(*arguments, "--no-cache") == 0
    assert json.loads(capsys.readouterr().out)[0]["compiles"] == 2


def test_failures(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest.write_text(manifest.read_text() + 'variant = "block"\n')
    assert run(manifest, "-o", tmp_path / "out") == 1
    assert "pack 'my-toys' was not written: 1 of 1 kernels failed" in capsys.readouterr().err
    assert run(manifest, "-o", tmp_path / "out", "--json") == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert list(failures) == ["toy.scale:variant=block,block=64"]
    assert not (tmp_path / "out").exists()


def test_bad_arguments(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(manifest, "--archs", "sm_100a", "-o", tmp_path / "out") == 1
    assert "archs are sm_100a; expected one or more of sm_120a, sm_121a" in capsys.readouterr().err
    assert run(manifest, "--jobs", "0", "-o", tmp_path / "out") == 1
    assert "jobs is 0; expected 1 or more" in capsys.readouterr().err
    assert run(tmp_path / "absent.toml", "-o", tmp_path / "out") == 1
    assert "absent.toml:0: cannot be read" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(manifest, "-o", tmp_path / "file") == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_an_add_on_wheel(manifest: Path, tmp_path: Path) -> None:
    wheels = []
    for folder in ("one", "two"):
        assert run(manifest, "--wheel", "-o", tmp_path / folder) == 0
        (wheel,) = (tmp_path / folder).iterdir()
        assert wheel.name == f"b12x_pack_my_toys-{__version__}-py3-none-any.whl"
        wheels.append(wheel)
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    info = f"b12x_pack_my_toys-{__version__}.dist-info"
    with zipfile.ZipFile(wheels[0]) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert {name.split("/")[0] for name in contents} == {"b12x_pack_my_toys", info}
    assert f"Requires-Dist: b12x=={__version__}" in contents[f"{info}/METADATA"].decode()
    recorded = [line.split(",") for line in contents[f"{info}/RECORD"].decode().splitlines()]
    assert {path for path, _, _ in recorded} == set(contents)
    for path, digest, size in recorded:
        if digest:
            expected = base64.urlsafe_b64encode(hashlib.sha256(contents[path]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(contents[path]))


def test_the_runtime_finds_an_installed_add_on(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(manifest, "--wheel", "-o", tmp_path / "dist") == 0
    (wheel,) = (tmp_path / "dist").iterdir()
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True)
    monkeypatch.syspath_prepend(str(site))
    (point,) = metadata.entry_points(group=packs.ENTRY_POINTS, name="my-toys")
    assert point.value == "b12x_pack_my_toys"
    folders = dict(packs.pack_folders())
    assert folders["entry point 'my-toys'"] == site / "b12x_pack_my_toys"
    assert list(Pack.open(site / "b12x_pack_my_toys").keys()) == ["toy.scale:variant=good,block=64"]
