"""Runs ptxas, which needs no GPU: the one of the PyPI package nvidia-cuda-nvcc (requirements.txt has the version)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from .errors import RehostError
from .rewrite import ARCH

PACKAGE = "nvidia-cuda-nvcc"
_ERROR_LINES = 12
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def find_ptxas() -> Path:
    """The installed package's ptxas; RehostError that says what to install where it is missing."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise RehostError(
            f"ptxas is needed: python -m pip install -r build_tools/rehost/{_REQUIREMENTS.name} (package {PACKAGE})"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name == "ptxas"]
    if not found or not found[0].is_file():
        raise RehostError(f"package {PACKAGE} is installed but holds no ptxas; install it again")
    return found[0]


def assemble(ptx: str, arch: str = ARCH, *, about: str = "PTX") -> bytes:
    """The cubin of PTX text; RehostError with what ptxas says. Lines it names are lines of ``ptx``."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="ascii")
        command = [str(find_ptxas()), f"--gpu-name={arch}", "--output-file", str(output), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = re.sub(rf"(?:ptxas\s+)?{re.escape(str(source))}, ", "", result.stderr or result.stdout)
            first = "\n".join(said.strip().splitlines()[:_ERROR_LINES])
            raise RehostError(f"{about}: ptxas does not accept it for {arch}:\n{first}")
        return output.read_bytes()
