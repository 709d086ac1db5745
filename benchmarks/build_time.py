"""How long does a kernel take to compile, and how long does a build take of which nothing changed?

A manifest is built without anything cached and then from a full cache. A kernel's time covers tracing, lowering and
assembling for both architectures; the start of the worker processes counts for the whole build only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

from b12x.build_tools.build import BuildOptions, BuildReport, build_pack
from b12x.build_tools.compile_one import DSL_VERSION
from b12x.build_tools.manifest import load_manifest

ROOT = Path(__file__).parent.parent


def measure(path: Path, jobs: int, runs: int) -> dict[str, Any]:
    """One build from nothing, then ``runs`` builds of the unchanged sources."""
    manifest = load_manifest(path)
    with tempfile.TemporaryDirectory(prefix="b12x-benchmark-") as folder:
        options = BuildOptions(jobs=jobs, cache=Path(folder, "cache"))
        cold = build_pack(manifest, Path(folder, "pack"), options)
        cached = [build_pack(manifest, Path(folder, "pack"), options) for _ in range(runs)]
    times = sorted(cold.kernel_seconds.items(), key=lambda item: -item[1])
    return {
        "benchmark": "build_time",
        "manifest": path.name,
        "kernels": cold.specs,
        "bytes": cold.bytes,
        "jobs": jobs,
        "cold": _summary([cold]),
        "cached": _summary(cached),
        "kernel_s": {key: round(seconds, 3) for key, seconds in times},
        "dsl": DSL_VERSION,
        "machine": machine.describe(),
    }


def _summary(reports: list[BuildReport]) -> dict[str, Any]:
    seconds = statistics.median(report.seconds for report in reports)
    return {
        "build_s": round(seconds, 3),
        "per_kernel_s": round(seconds / reports[0].specs, 4),
        "compiles": max(report.compiles for report in reports),
    }


def main() -> int:
    """Print the result as JSON; 1 when an unchanged build compiled anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "base.toml")
    parser.add_argument("--jobs", type=int, default=1, help="more than there are idle CPUs makes each kernel look slow")
    parser.add_argument("--runs", type=int, default=5, help="builds from the full cache; the median counts")
    arguments = parser.parse_args()
    result = measure(arguments.manifest, arguments.jobs, arguments.runs)
    print(json.dumps(result, indent=2))
    return 0 if result["cached"]["compiles"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
