"""The wheel that ``pip wheel .`` builds, through the same calls that pip makes to the build backend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from b12x import __version__
from b12x._runtime.pack import Pack
from b12x.build_tools.checks import ALLOW_UNCHECKED
from b12x.build_tools.errors import BuildError
from b12x.build_tools.setup_hooks import build_packs, platform_tag
from tests.build_tools.conftest import ROOT

MANIFEST = 'name = "{name}"\n[[op]]\nop = "quantization.nvfp4"\ndtype = "{dtype}"\nm = 1\nk = 64\n'


@pytest.fixture(autouse=True)
def records_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's kernels have check records."""
    monkeypatch.delenv(ALLOW_UNCHECKED)


def source_tree(folder: Path) -> Path:
    """What a clone has, with two small manifests and a torch that must not be imported."""
    folder.mkdir()
    for name in ("src", "kernels", "build_tools", "manifests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "packs"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "README.md").write_text("# b12x\n")
    for name, dtype in (("one", "bfloat16"), ("two", "float16")):
        (folder / "manifests" / f"{name}.toml").write_text(MANIFEST.format(name=name, dtype=dtype))
    (folder / "traps").mkdir()
    (folder / "traps" / "torch.py").write_text("raise RuntimeError('the build imports torch')\n")
    return folder


def build(tree: Path, what: str, **environment: str) -> Path:
    """Run one hook of the build backend in a source tree."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    out = tree / "dist"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "traps"), "B12X_BUILD_CACHE": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (built,) = out.glob("*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel(tmp_path: Path) -> None:
    tree = source_tree(tmp_path / "tree")
    elsewhere = shutil.copytree(tree, tmp_path / "another place")
    for path in elsewhere.rglob("*"):
        os.utime(path, (10**9, 10**9))
    both = {"B12X_BUILD_MANIFESTS": "manifests/one.toml, manifests/two.toml"}
    wheel = build(tree, "wheel", **both)
    assert wheel.name == f"b12x-{__version__}-py3-none-{platform_tag('Linux', os.uname().machine)}.whl"
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"b12x", f"b12x-{__version__}.dist-info"}
    for expected in (
        "b12x/_runtime/spec.py",
        "b12x/kernels/_shared/ptx.py",
        "b12x/kernels/gemm/blockscaled.py",
        "b12x/build_tools/compile_one.py",
        "b12x/build_tools/checks.json",
        "b12x/verify/mma/cases.py",
        "b12x/kernels/verify/mma.py",
        "b12x/packs/one/index.json",
        "b12x/packs/two/index.json",
    ):
        assert expected in names
    assert not [name for name in names if name.startswith(("b12x/build_tools/rehost", "b12x/build_tools/mutants"))]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        information = archive.read(f"b12x-{__version__}.dist-info/METADATA").decode()
        scripts = archive.read(f"b12x-{__version__}.dist-info/entry_points.txt").decode()
    assert "b12x = b12x.cli:main" in scripts
    needed = [line for line in information.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line]
    assert [line.split()[1].split(">")[0].split("<")[0] for line in needed] == ["torch", "cuda-python", "numpy"]
    pack = Pack.open(tmp_path / "installed" / "b12x" / "packs" / "one")
    assert list(pack.keys()) == ["quantization.nvfp4:dtype=bfloat16"]
    assert "emulator" in {check["target"] for check in pack.get("quantization.nvfp4:dtype=bfloat16").checks}

    # Built again for one manifest only, over the leftovers and elsewhere: nothing stale, and the same bytes.
    one = {"B12X_BUILD_MANIFESTS": "manifests/one.toml"}
    (tree / "build" / "lib" / "b12x" / "removed.py").write_text("")
    wheel.unlink()
    again = build(tree, "wheel", **one)
    assert names_in(again) == {name for name in names if not name.startswith("b12x/packs/two")}
    other = build(elsewhere, "wheel", B12X_BUILD_JOBS="1", PYTHONHASHSEED="7", **one)
    assert again.read_bytes() == other.read_bytes()


def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    tree = source_tree(tmp_path / "tree")
    build(tree, "editable", B12X_BUILD_MANIFESTS="manifests/absent.toml")
    assert list(tree.rglob("index.json")) == []


@pytest.mark.parametrize(
    ("system", "machine", "tag"),
    [
        ("Linux", "x86_64", "manylinux_2_28_x86_64"),
        ("Linux", "AMD64", "manylinux_2_28_x86_64"),
        ("Linux", "aarch64", "manylinux_2_28_aarch64"),
        ("Linux", "arm64", "manylinux_2_28_aarch64"),
    ],
)
def test_platform_tags(system: str, machine: str, tag: str) -> None:
    assert platform_tag(system, machine) == tag


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_platforms_without_a_wheel(system: str, machine: str) -> None:
    with pytest.raises(BuildError, match=r"wheels are built on Linux on x86_64 or aarch64, this is"):
        platform_tag(system, machine)


def test_two_manifests_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_BUILD_MANIFESTS", "manifests/base.toml,manifests/base.toml")
    with pytest.raises(BuildError, match=r"names packs base, base; expected a different name for each"):
        build_packs(tmp_path)
