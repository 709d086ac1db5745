"""Compiles the kernel packs when a wheel is built, and lists the packages; the rest is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
FOLDERS = {"b12x": "src/b12x", "b12x.kernels": "kernels", "b12x.build_tools": "build_tools"}
# What of the build tools is for work on the source tree only, and is no part of a wheel.
LEFT_OUT = ("rehost", "rehost.*", "mutants", "mutants.*")

# In the source tree b12x.kernels and b12x.build_tools are folders of the root; an install puts them into the package.
sys.path.insert(0, str(ROOT / "src"))
import b12x  # noqa: E402

b12x.__path__.append(str(ROOT))
from b12x.build_tools.setup_hooks import BdistWheel, BuildPy  # noqa: E402

# Zip files carry times; with a fixed one, two builds of one commit give the same wheel.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")

setup(
    packages=[
        f"{name}.{inner}" if inner else name
        for name, folder in FOLDERS.items()
        for inner in ("", *find_packages(folder, exclude=LEFT_OUT if folder == "build_tools" else ()))
    ],
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
