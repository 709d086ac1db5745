"""``b12x kernels`` and ``b12x show``: what the installed packs hold."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
from dataclasses import asdict
from typing import Any

from b12x._runtime import cuda_target, packs
from b12x._runtime.errors import PackError
from b12x._runtime.pack import Artifact, Pack
from b12x.cli import sass
from b12x.cli.output import CommandError, fields, table


def run_list(args: argparse.Namespace) -> int:
    """List kernels, sorted by key."""
    pattern = f"*{args.filter}*"
    found = []
    installed = _installed()
    known = sorted({*cuda_target.ARCHS.values(), *(arch for pack in installed for arch in pack.archs)})
    if args.arch is not None and args.arch not in known:
        raise CommandError(
            f"unknown architecture {args.arch!r}; needed is one of {', '.join(known)}: leave --arch out for all"
        )
    for pack in installed:
        for key in pack.keys():  # noqa: SIM118, the pack's public way
            if fnmatch.fnmatchcase(key, pattern):
                artifact = _get(pack, key)
                if args.arch is None or args.arch in artifact.cubins:
                    found.append((key, pack, artifact))
    found.sort(key=lambda item: item[0])
    if args.json:
        print(json.dumps([_summary(*item) for item in found]))
    else:
        head = ("key", "pack", "archs", "registers", "smem", "spills", "bytes")
        print(table(head, [_row(_summary(*item)) for item in found]))
        print(f"{len(found)} kernels")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Show one kernel: ABI, resources, hashes and, if asked for, machine code."""
    pack, artifact = _find(args.key)
    if args.arch is not None and args.arch not in artifact.cubins:
        raise CommandError(
            f"{args.key} has no machine code for {args.arch!r}; it has {', '.join(artifact.cubins) or 'none'}: choose "
            "one of these"
        )
    report: dict[str, Any] = {
        "key": args.key,
        "packs": [str(holder.path) for holder, _ in packs.holders(args.key)],
        "b12x": pack.b12x_version,
        "dsl": pack.dsl,
        "ptxas": pack.ptxas,
        **asdict(artifact),
    }
    if args.sass:
        report["sass"] = _sass(pack, artifact, args)
    if args.json:
        print(json.dumps(report))
        return 0
    launch = artifact.abi["launch"]
    pairs = [
        ("key", args.key),
        *(("pack", path) for path in report["packs"]),
        ("made by", f"b12x {pack.b12x_version}, DSL {pack.dsl}, ptxas {pack.ptxas}"),
        ("entry", artifact.entry),
        ("block", " x ".join(map(str, launch["block"]))),
        ("cluster", " x ".join(map(str, launch["cluster"]))),
        ("dynamic smem", f"{launch['dynamic_smem']} bytes"),
        ("programmatic launch", "yes" if launch["programmatic_launch"] else "no"),
        ("ABI fingerprint", artifact.fingerprint),
        ("sources sha256", artifact.source),
        ("PTX sha256", artifact.ptx or "not in the pack"),
        ("checks", len(artifact.checks)),
    ]
    print(fields(pairs))
    print()
    print(table(("parameter", "kind", "dtype", "access", "details"), [_param(p) for p in artifact.abi["params"]]))
    print()
    head = ("arch", "registers", "static smem", "spill bytes", "bytes", "cubin sha256")
    rows = [(arch, c.registers, c.static_smem, c.spill_bytes, c.bytes, c.blob) for arch, c in artifact.cubins.items()]
    print(table(head, rows))
    if args.sass:
        print()
        print(report["sass"])
    return 0


def _installed() -> tuple[Pack, ...]:
    try:
        return packs.installed()
    except PackError as error:
        raise CommandError(str(error)) from None


def _get(pack: Pack, key: str) -> Artifact:
    try:
        artifact = pack.get(key)
    except PackError as error:
        raise CommandError(str(error)) from None
    assert artifact is not None
    return artifact


def _find(key: str) -> tuple[Pack, Artifact]:
    installed = _installed()
    try:
        found = packs.holders(key)
    except PackError as error:
        raise CommandError(str(error)) from None
    if found:
        return found[0]
    close = difflib.get_close_matches(key, {k for pack in installed for k in pack.entries}, n=3)
    near = f"; near are {', '.join(close)}" if close else ""
    raise CommandError(f"no installed pack holds {key!r} (`b12x kernels` lists what there is){near}")


def _sass(pack: Pack, artifact: Artifact, args: argparse.Namespace) -> str:
    arch = args.arch or next(iter(artifact.cubins), "")
    if not arch:
        raise CommandError(f"{args.key} has no machine code, only PTX; build its pack for an architecture")
    try:
        return sass.disassemble(pack.cubin(artifact, arch))
    except PackError as error:
        raise CommandError(str(error)) from None


def _summary(key: str, pack: Pack, artifact: Artifact) -> dict[str, Any]:
    return {
        "key": key,
        "pack": pack.name,
        "dynamic_smem": artifact.abi["launch"]["dynamic_smem"],
        "cubins": {arch: asdict(cubin) for arch, cubin in artifact.cubins.items()},
    }


def _row(summary: dict[str, Any]) -> tuple[object, ...]:
    """One line for all architectures: their largest figures."""
    cubins = summary["cubins"].values()
    return (
        summary["key"],
        summary["pack"],
        ",".join(summary["cubins"]),
        max((c["registers"] for c in cubins), default=0),
        summary["dynamic_smem"] + max((c["static_smem"] for c in cubins), default=0),
        max((c["spill_bytes"] for c in cubins), default=0),
        sum(c["bytes"] for c in cubins),
    )


def _param(param: dict[str, Any]) -> tuple[object, ...]:
    known = ("name", "kind", "dtype", "access")
    details = ", ".join(f"{name} {value}" for name, value in param.items() if name not in known)
    return (param["name"], param["kind"], param["dtype"], param.get("access", ""), details)
