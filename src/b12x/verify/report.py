"""The report of ``b12x verify`` as JSON data: machine, versions, packs, and every kernel's results."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import b12x
from b12x._runtime import cuda_target, driver, packs
from b12x._runtime.launch import Target
from b12x.verify.runner import KernelResult, op_of

_SMI = ("driver_version", "vbios_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def make(where: Target, kernels: Sequence[KernelResult], **more: Any) -> dict[str, Any]:
    """The report; ``more`` members are added to it."""
    failed = [kernel.key for kernel in kernels if kernel.status == "FAILED"]
    not_run = [kernel.key for kernel in kernels if kernel.status == "not run"]
    return {
        "ok": not failed and len(not_run) < len(kernels),
        "failed": failed,
        "not_run": not_run,
        "target": target(where),
        "versions": versions(),
        "packs": [
            {
                "name": pack.name,
                "path": str(pack.path),
                "b12x": pack.b12x_version,
                "dsl": pack.dsl,
                "ptxas": pack.ptxas,
                "archs": list(pack.archs),
                "index_sha256": hashlib.sha256(pack.index).hexdigest(),
            }
            for pack in packs.installed()
        ],
        "kernels": [_kernel(kernel) for kernel in kernels],
        **more,
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"b12x": b12x.__version__, "python": platform.python_version()}
    found["platform"] = f"{platform.system()} {platform.machine()}"
    for name in ("torch", "numpy", "cuda-bindings"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def target(where: Target) -> dict[str, Any]:
    """The target, and for a GPU its card, its driver and what nvidia-smi says of clocks and power, if it is there."""
    found: dict[str, Any] = {"name": where.name, "arch": where.arch, "sm_count": where.sm_count}
    if where.device == "cpu":
        return found
    ordinal = int(where.device.partition(":")[2])
    major, minor = cuda_target.device_capability(ordinal)
    version = driver.version()
    found["card"] = cuda_target.device_name(ordinal)
    found["capability"] = f"{major}.{minor}"
    found["driver"] = f"CUDA {version // 1000}.{version % 1000 // 10}"
    found["nvidia_smi"] = _nvidia_smi(ordinal)
    return found


def _nvidia_smi(ordinal: int) -> dict[str, str] | None:
    """Asked for by PCI address: its own numbers do not follow CUDA_VISIBLE_DEVICES."""
    import torch

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    device = torch.cuda.get_device_properties(ordinal)
    address = f"{device.pci_domain_id:08x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    command = [program, f"--id={address}", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(_SMI, (value.strip() for value in done.stdout.split(",")), strict=False))


def _kernel(kernel: KernelResult) -> dict[str, Any]:
    holders = packs.holders(kernel.key)
    return {
        "key": kernel.key,
        "op": op_of(kernel.key),
        "ptx": holders[0][1].ptx,
        "status": kernel.status,
        "cases": [result.to_json() for result in kernel.results],
    }
