"""How long does it take to open a pack of 10,000 kernels, and to resolve 100 plans from it? Targets: 100 ms and 50 ms.

No driver is needed: the plans are resolved for a target that loads nothing, so that what is timed is the index, the
look-up, the ABI check and the message-free path of resolution. Every entry has every field of a real one. Each plan
asks for three kernels that no other plan has asked for, each with a preferred candidate that no pack holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import machine

from b12x._runtime import packs, resolve
from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar, TensorMap
from b12x._runtime.pack import Artifact, Cubin, Pack, index_bytes, write_pack
from b12x._runtime.spec import KernelSpec, Role

ARCHS = ("sm_120a", "sm_121a")


@dataclass(frozen=True, kw_only=True)
class Spec(KernelSpec):
    """Shaped like a GEMM's spec."""

    kernel: ClassVar[str] = "benchmark.gemm"

    recipe: str = "nvfp4"
    c_dtype: str = "bfloat16"
    tile_m: int = 128
    tile_n: int = 128
    variant: int

    def abi(self) -> KernelABI:
        return KernelABI(
            params=(
                TensorMap("a", "uint8", (64, 128, 1), "64B"),
                TensorMap("b", "uint8", (64, 128, 1), "64B"),
                Pointer("sfa", "uint8", "r"),
                Pointer("sfb", "uint8", "r"),
                Pointer("alpha", "float32", "r", align=4),
                Pointer("c", self.c_dtype, "w"),
                *(Scalar(name, "int32") for name in ("m", "n", "k", "batch")),
            ),
            launch=LaunchContract((288, 1, 1), 83072),
        )


class NullTarget:
    """Takes every artifact for its architecture and loads nothing."""

    name, device, arch, sm_count = "null", "cpu", "sm_121a", 1

    def missing(self, artifact: Artifact) -> str | None:
        return None if self.arch in artifact.cubins else "has no machine code"

    def capturing(self) -> bool:
        return False

    def load(self, artifact: Artifact, pack: Pack, spec: KernelSpec) -> Any:
        return artifact


def make_index(folder: Path, entries: int) -> int:
    """Write a pack without blobs; the bytes of its index."""
    spec = Spec(variant=0)
    abi = spec.abi()

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    def artifact(number: int) -> Artifact:
        cubins = {arch: Cubin(digest(f"{arch}{number}"), 77344, 126, 0, 0) for arch in ARCHS}
        entry = f"kernel_cutlass_kernel_b12x_kernels_gemm_blockscaled_BlockscaledGemm_object_at__{number}"
        checks = ({"target": "emulator", "shapes": [[130, 144, 640]], "error": 0.25},)
        return Artifact(abi.to_json(), abi.fingerprint, digest("s"), digest(f"p{number}"), entry, cubins, checks)

    index = index_bytes(
        name="large",
        dsl="4.8.1",
        ptxas="13.4.59",
        archs=ARCHS,
        manifests={"large.toml": digest("m")},
        entries={dataclasses.replace(spec, variant=n).key: artifact(n) for n in range(entries)},
    )
    write_pack(folder, index, {})
    return len(index)


def time_open(folder: Path) -> float:
    start = time.perf_counter()
    Pack.open(folder)
    return time.perf_counter() - start


def time_resolve(plans: int) -> float:
    packs.installed()
    roles = [
        Role("main", (Spec(variant=-1 - n), Spec(variant=n)))  # the first is in no pack
        for n in range(3 * plans)
    ]
    target = NullTarget()
    resolve.clear()
    start = time.perf_counter()
    for n in range(plans):
        for role in roles[3 * n : 3 * n + 3]:
            resolve.resolve(role, target, "benchmark.gemm")
    return time.perf_counter() - start


def main() -> int:
    """Print the result as JSON; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "large"
        size = make_index(folder, args.entries)
        os.environ["B12X_PACK_PATH"] = str(folder)
        opened = [time_open(folder) for _ in range(args.runs)]
        resolved = [time_resolve(args.plans) for _ in range(args.runs)]
    result = {
        "benchmark": "index",
        "entries": args.entries,
        "index_bytes": size,
        "open": {"target_ms": 100, **_milliseconds(opened)},
        "resolve": {"plans": args.plans, "kernels": 3 * args.plans, "target_ms": 50, **_milliseconds(resolved)},
        "machine": machine.describe(),
    }
    print(json.dumps(result, indent=2))
    return int(any(part["median_ms"] > part["target_ms"] for part in (result["open"], result["resolve"])))


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 2),
        "min_ms": round(min(seconds) * 1e3, 2),
        "max_ms": round(max(seconds) * 1e3, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
