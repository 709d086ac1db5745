"""The command ``b12x build``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from b12x._runtime.pack import BLOBS, INDEX

from .build import ARCHS, BuildOptions, BuildReport, build_pack, names_in
from .errors import BuildError, BuildFailedError
from .manifest import load_manifest
from .wheel import write_wheel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("manifest", type=Path, nargs="+", help="TOML file that names ops with their capacities")
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), metavar="DIR", help="default: dist")
    parser.add_argument(
        "--wheel", action="store_true", help="write an add-on wheel instead of a pack folder DIR/<name>"
    )
    parser.add_argument("--archs", metavar="ARCH,...", help=f"default: $B12X_BUILD_ARCHS or {','.join(ARCHS)}")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="default: $B12X_BUILD_JOBS or one per CPU")
    parser.add_argument("--no-cache", action="store_true", help="compile everything, keep nothing ($B12X_BUILD_CACHE)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Build; 0 when every pack was written, 1 otherwise."""
    try:
        options = _options(args)
        reports = [_build(path, args, options) for path in args.manifest]
    except (BuildError, OSError) as error:
        if args.json:
            failures = error.failures if isinstance(error, BuildFailedError) else {}
            print(json.dumps({"error": str(error), "failures": failures}))
        else:
            print(f"b12x build: {error}", file=sys.stderr)
        return 1
    print(json.dumps([report.to_json() for report in reports]) if args.json else _table(reports))
    return 0


def _options(args: argparse.Namespace) -> BuildOptions:
    options = BuildOptions.from_environment()
    if args.archs is not None:
        options = dataclasses.replace(options, archs=names_in(args.archs))
    if args.jobs is not None:
        options = dataclasses.replace(options, jobs=args.jobs)
    return dataclasses.replace(options, cache=None) if args.no_cache else options


def _build(path: Path, args: argparse.Namespace, options: BuildOptions) -> BuildReport:
    manifest = load_manifest(path)
    if not args.wheel:
        return build_pack(manifest, args.output / manifest.name, options)
    with tempfile.TemporaryDirectory(prefix="b12x-pack-") as folder:
        report = build_pack(manifest, Path(folder, "pack"), options)
        blobs = {blob.name: blob.read_bytes() for blob in (report.path / BLOBS).iterdir()}
        report.path = write_wheel(args.output, manifest.name, (report.path / INDEX).read_bytes(), blobs)
    report.bytes = report.path.stat().st_size
    return report


def _table(reports: Sequence[BuildReport]) -> str:
    rows = [("pack", "specs", "compiled", "cached", "seconds", "bytes", "path")]
    rows += [
        (r.name, str(r.specs), str(r.compiled), str(r.cached), f"{r.seconds:.1f}", f"{r.bytes:,}", str(r.path))
        for r in reports
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    # Names to the left, numbers to the right, the path last and unpadded.
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in range(1, 6)), row[6]]) for row in rows
    )
