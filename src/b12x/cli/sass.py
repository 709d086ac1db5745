"""Machine code as text, through NVIDIA's nvdisasm."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import tempfile

from b12x.cli.output import CommandError

DISTRIBUTION = "nvidia-cuda-nvdisasm"


def find_nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or in the wheel that carries it (CommandError saying how to get it)."""
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return str(file.locate())
    raise CommandError(f"nvdisasm not found on PATH or in the wheel {DISTRIBUTION}: pip install {DISTRIBUTION}")


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin."""
    program = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{program} failed: {done.stderr.strip()}; needed is one of CUDA 13 or newer")
    return done.stdout
