"""How long does a kernel take to compile, and how long a build of which nothing changed?

Builds a manifest twice, without a cache and then from a full one, in workers whose start is not counted per kernel::

    python -m benchmarks.build_time [--manifest manifests/base.toml] [--jobs 1] [--json FILE]

A compilation covers tracing, lowering and assembling for both archs. Exit code 1 if the second build compiled anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import b12x

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in b12x.__path__:
    b12x.__path__.append(str(ROOT))

from b12x.build_tools.build import BuildOptions, BuildReport, build_pack  # noqa: E402
from b12x.build_tools.compile_one import DSL_VERSION  # noqa: E402
from b12x.build_tools.manifest import load_manifest  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "base.toml")
    parser.add_argument("--jobs", type=int, default=1, help="more than the idle CPUs makes each kernel look slow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args()
    manifest = load_manifest(args.manifest)
    with tempfile.TemporaryDirectory(prefix="b12x-benchmark-") as folder:
        options = BuildOptions(jobs=args.jobs, cache=Path(folder, "cache"))
        cold = build_pack(manifest, Path(folder, "cold"), options)
        cached = [build_pack(manifest, Path(folder, "cached"), options) for _ in range(3)]
    again = dataclasses.replace(cached[0], seconds=statistics.median(report.seconds for report in cached))
    result = {**machine(), "jobs": args.jobs, "cold": summary(cold), "cached": summary(again)}
    for key, seconds in sorted(cold.kernel_seconds.items(), key=lambda item: -item[1]):
        print(f"{seconds:8.2f} s  {key}")
    for name, report in (("cold", cold), ("cached", again)):
        print(
            f"{name:>8}: {report.seconds:6.2f} s for {report.specs}, {report.seconds / report.specs:.3f} s each, "
            f"{report.compiles} cute.compile calls"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if again.compiles else 0


def summary(report: BuildReport) -> dict[str, object]:
    return {
        "seconds": round(report.seconds, 3),
        "kernels": report.specs,
        "compiles": report.compiles,
        "bytes": report.bytes,
        "kernel_seconds": {key: round(seconds, 3) for key, seconds in sorted(report.kernel_seconds.items())},
    }


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "dsl": DSL_VERSION,
        "b12x": b12x.__version__,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
