"""``b12x doctor``: what is installed, what the driver shows, what the packs hold, and whether kernels can run here."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import Any

import b12x
from b12x._runtime import cuda_target, driver, env, jit, packs, resolve, target
from b12x._runtime.errors import DriverError, PackError
from b12x._runtime.pack import Pack
from b12x._runtime.spec import spec_from_key
from b12x.cli.output import fields, table


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when kernels can run on a device or on the chosen target, 1 otherwise."""
    report = examine()
    print(json.dumps(report) if args.json else render(report))
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything the command prints, as JSON data."""
    opened, listed = _packs()
    found_driver, devices = _devices()
    targets = [d for d in devices if d["arch"]]
    wrong = []
    try:
        emulated = target.emulator_chosen()
    except ValueError as error:
        emulated = False
        wrong.append(str(error))
    wrong += _installation(any_device=bool(targets) and not emulated)
    if emulated:
        ready = importlib.util.find_spec("b12x.emulator") is not None
        targets.append(
            {"device": "cpu", "name": "emulator", "arch": "ptx", "problem": None if ready else "not installed"}
        )
    compiling = jit.unavailable()
    resolved = [_resolved(t, opened, compiling is None) for t in targets]
    conflicts = [str(error) for error in packs.conflicts()] if all(not p["problem"] for p in listed) else []
    problems = [*wrong, *(p["problem"] for p in listed if p["problem"]), *conflicts]
    problems += [problem for pack in opened for problem in _faults(pack)]
    if not targets:
        problems.append("no device or target can run kernels (B12X_TARGET=emulator chooses the emulator)")
    elif not any(r["usable"] for r in resolved):
        problems.append("no pack holds a kernel for any device or target, and none can be compiled")
    return {
        "ok": not problems,
        "problems": problems,
        "b12x": b12x.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": _version("torch"),
        "cuda_python": _version("cuda-bindings"),
        "driver": found_driver,
        "devices": devices,
        "packs": listed,
        "conflicts": conflicts,
        "frozen": b12x.kernel_resolution_frozen(),
        "jit": compiling or "available",
        "environment": {name: os.environ[name] for name in env.TABLE if name in os.environ},
        "resolution": resolved,
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    found = report["driver"]
    pairs = [
        ("b12x", report["b12x"]),
        ("python", f"{report['python']} on {report['platform']}"),
        ("torch", report["torch"] or "not installed"),
        ("cuda-python", report["cuda_python"] or "not installed"),
        ("driver", found["problem"] or f"CUDA {found['cuda']}"),
        ("frozen", "yes" if report["frozen"] else "no"),
        ("compiling here", report["jit"]),
        *((name, value) for name, value in report["environment"].items()),
    ]
    parts = [fields(pairs)]
    if report["devices"]:
        rows = [(d["device"], d["name"], d["capability"], d["arch"] or d["problem"]) for d in report["devices"]]
        parts.append(table(("device", "name", "capability", "arch"), rows))
    rows = [
        (p["name"] or "-", p["from"], p["problem"] or f"{p['kernels']} kernels for {', '.join(p['archs'])}", p["path"])
        for p in report["packs"]
    ]
    parts.append(table(("pack", "named by", "holds", "path"), rows) if rows else "no packs found")
    if report["resolution"]:
        lines = [
            (r["target"], r["arch"], op, n, ", ".join(f"{pack} {held}" for pack, held in r["served_by"][op].items()))
            for r in report["resolution"]
            for op, n in r["kernels"].items()
        ]
        parts.append(table(("would run on", "arch", "op", "kernels", "from packs"), lines))
    parts += [f"problem: {problem}" for problem in report["problems"]]
    parts.append("kernels can run here" if report["ok"] else "kernels cannot run here")
    return "\n\n".join(parts)


def _packs() -> tuple[list[Pack], list[dict[str, Any]]]:
    """The packs that open, and a line about every one that was named."""
    opened, listed = [], []
    try:
        folders = packs.pack_folders()
    except PackError as error:
        return [], [_pack_line("entry point", "", str(error))]
    for source, folder in folders:
        try:
            pack = packs.open_named(source, folder)
        except PackError as error:
            listed.append(_pack_line(source, str(folder), str(error)))
            continue
        opened.append(pack)
        line = _pack_line(source, str(folder), None)
        line.update(name=pack.name, b12x=pack.b12x_version, dsl=pack.dsl, ptxas=pack.ptxas)
        line.update(archs=list(pack.archs), kernels=len(pack.entries), manifests=dict(pack.manifests))
        listed.append(line)
    return opened, listed


def _pack_line(source: str, path: str, problem: str | None) -> dict[str, Any]:
    return {"name": None, "from": source, "path": path, "problem": problem}


def _devices() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The driver's version or what is wrong with it, and every device with its architecture or why it has none."""
    try:
        version = driver.version()
        text = f"{version // 1000}.{version % 1000 // 10}"
        count = cuda_target.device_count()
    except DriverError as error:
        return {"cuda": None, "problem": str(error)}, []
    devices = []
    for ordinal in range(count):
        major, minor = capability = cuda_target.device_capability(ordinal)
        arch = cuda_target.ARCHS.get(capability)
        needed = ", ".join(f"{a}.{b}" for a, b in cuda_target.ARCHS)
        devices.append(
            {
                "device": f"cuda:{ordinal}",
                "name": cuda_target.device_name(ordinal),
                "capability": f"{major}.{minor}",
                "arch": arch,
                "problem": None if arch else f"not supported; needed is capability {needed}",
            }
        )
    return {"cuda": text, "problem": None}, devices


def _installation(any_device: bool) -> list[str]:
    """What is wrong with what ops are called with; ``any_device`` says that they would run on a GPU."""
    found = _version("torch")
    if found is None:
        return ["torch is not installed, and kernels take and give its tensors: pip install 'torch>=2.12'"]
    if any_device and found.endswith("+cpu"):
        return [f"torch {found} has no CUDA, so it has no tensors on a GPU; needed is a torch built for CUDA 13"]
    return []


def _faults(pack: Pack) -> list[str]:
    """Every blob whose hash is wrong, and every kernel whose ABI is not that of the code which would launch it."""
    faults: dict[str, None] = {}  # in order, once each: kernels share blobs
    for key in sorted(pack.entries):
        try:
            artifact = pack.get(key)
            assert artifact is not None
        except PackError as error:
            faults[str(error)] = None
            continue
        try:
            resolve.check_abi(spec_from_key(key), artifact, pack)
        except PackError as error:
            faults[str(error)] = None
        except ValueError:
            pass  # nothing in this installation asks for such a kernel
        for arch in artifact.cubins:
            _note(faults, pack.cubin, artifact, arch)
        if artifact.ptx is not None:
            _note(faults, pack.ptx, artifact)
    return list(faults)


def _note(faults: dict[str, None], read: Callable[..., object], *arguments: object) -> None:
    try:
        read(*arguments)
    except PackError as error:
        faults[str(error)] = None


def _resolved(where: dict[str, Any], opened: list[Pack], compiling: bool) -> dict[str, Any]:
    """How many kernels of each op a target finds in the packs, and how many of them each pack serves."""
    served: dict[str, Counter[str]] = {op.qualname: Counter() for op in b12x.list_ops()}
    seen: set[str] = set()
    for pack in opened:
        for key in pack.entries:
            if key not in seen and _holds(pack, key, where["arch"]):
                seen.add(key)
                served.setdefault(".".join(key.partition(":")[0].split(".")[:2]), Counter())[pack.name] += 1
    counts = {op: held.total() for op, held in served.items()}
    usable = not where["problem"] and (any(counts.values()) or compiling)
    by_pack = {op: dict(held) for op, held in served.items()}
    return {
        "target": where["device"],
        "arch": where["arch"],
        "kernels": counts,
        "served_by": by_pack,
        "usable": usable,
    }


def _holds(pack: Pack, key: str, arch: str) -> bool:
    try:
        artifact = pack.get(key)
    except PackError:
        return False
    return artifact is not None and (artifact.ptx is not None if arch == "ptx" else arch in artifact.cubins)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
