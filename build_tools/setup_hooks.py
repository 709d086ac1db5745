"""What ``pip wheel .`` does beyond copying files: it compiles the manifests and puts their packs into the wheel."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from .build import BuildOptions, build_pack, names_in
from .errors import BuildError
from .manifest import load_manifest

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MANIFESTS = "manifests/base.toml"
#: Machines whose hosts the wheel serves. The payload is the same; a wheel of each name says that it was meant.
MACHINES = ("x86_64", "aarch64")


class BuildPy(build_py):
    """Compiles after the Python files are copied. An editable install compiles nothing."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, "b12x")
        # setuptools copies into this folder without ever removing what an earlier build left in it.
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        build_packs(package / "packs")


class BdistWheel(bdist_wheel):
    """Names the wheel for any Python 3 on Linux with glibc 2.28 or newer: there is no extension module in it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", platform_tag(platform.system(), platform.machine())


def platform_tag(system: str, machine: str) -> str:
    """The wheel's platform tag on this kind of host."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    if system != "Linux" or machine not in MACHINES:
        raise BuildError(f"wheels are built on Linux on {' or '.join(MACHINES)}, this is {system} on {machine}")
    return f"manylinux_2_28_{machine}"


def build_packs(folder: Path) -> None:
    """Build the packs of ``B12X_BUILD_MANIFESTS`` (paths relative to the source tree, separated by commas)."""
    named = names_in(os.environ.get("B12X_BUILD_MANIFESTS", "")) or (DEFAULT_MANIFESTS,)
    manifests = [load_manifest(ROOT / name) for name in named]
    names = [manifest.name for manifest in manifests]
    if len(set(names)) != len(names):
        raise BuildError(f"B12X_BUILD_MANIFESTS names packs {', '.join(names)}; expected a different name for each")
    for manifest in manifests:
        report = build_pack(manifest, folder / manifest.name, BuildOptions.from_environment())
        print(
            f"b12x pack {report.name}: {report.specs} kernels for {', '.join(report.archs)} "
            f"({report.compiled} compiled, {report.cached} cached), {report.bytes:,} bytes, {report.seconds:.1f} s"
        )
