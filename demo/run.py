"""Run the encoder of all-MiniLM-L6-v2 with its 36 linear projections on prebuilt NVFP4 kernels, and judge the result.

    python -m demo.run [--flip-scale-byte SEED] [--json FILE]

Needs the b12x wheel built from ``manifests/demo.toml`` and demo/requirements.txt; ``make demo`` prepares both. Runs on
an SM120 or SM121 GPU where there is one, otherwise on the emulator. Exit codes: 0 all gates passed, 3 a gate failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import b12x
from b12x._runtime import counters, packs
from b12x.gemm import blockscaled
from demo import judge
from demo.encoder import Encoder, Projection, fp32_linear
from demo.linears import (
    HEADROOM,
    KernelLinear,
    ReferenceLinear,
    activation_scales,
    choose_flip,
    gemm_caps,
    products_on_equal_inputs,
    quantize_weights,
)
from demo.sentences import CALIBRATION, SENTENCES

GATE_FAILED = 3
_IMPORTED = time.monotonic()
#: Multiprocessors of the emulated GPU, and the target that is chosen for the whole process.
_EMULATED_SMS = 4
_CHOSEN = contextlib.ExitStack()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description="Sentence embeddings on NVFP4 kernels.")
    parser.add_argument("--flip-scale-byte", type=int, metavar="SEED", help="corrupt one weight scale: must fail")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    options = parser.parse_args(arguments)

    device, where = choose_target()
    print(f"b12x {b12x.__version__} from {os.path.relpath(Path(b12x.__file__).parent)}")
    print(f"target: {where}; Python {platform.python_version()}, torch {torch.__version__}")

    encoder = Encoder.installed()
    projections = list(encoder.projections())
    batch = encoder.tokenize(SENTENCES)
    x_scales = activation_scales(encoder, CALIBRATION)
    weights = quantize_weights(projections)
    flip = None if options.flip_scale_byte is None else choose_flip(weights, options.flip_scale_byte)
    if flip is not None:
        print(f"corrupted in the kernels' copy: {flip}")

    b12x.freeze_kernel_resolution("demo")
    kernels = KernelLinear(projections, weights, x_scales, max_rows=batch.rows, device=device, flip=flip)
    first: list[float] = []

    def timed(projection: Projection, x: torch.Tensor) -> torch.Tensor:
        y = kernels(projection, x)
        first.append(process_seconds())
        return y

    before = counters.launches.copy()
    embeddings = encoder.embed(batch, timed)
    seconds = {"first_projection": first[0], "first_embeddings": process_seconds()}
    launches = dict(sorted((counters.launches - before).items()))

    reference = ReferenceLinear(weights, x_scales)
    products = products_on_equal_inputs(reference, projections, kernels.recorded)
    table = judge.rows(
        SENTENCES,
        kernels=embeddings,
        fp32=encoder.embed(batch, fp32_linear),
        reference=encoder.embed(batch, reference),
        channels=judge.worst_channels(batch, kernels.recorded, products),
    )
    counts = judge.Counts(
        prebuilt=sum(len(pack.keys()) for pack in packs.installed()),
        resolved=len(kernels.resolved),
        compiled=counters.compiles,
        launches=launches,
        frozen=b12x.kernel_resolution_frozen(),
    )
    miss = frozen_miss(device)
    found = "a plan" if miss is None else "KernelResolutionFrozenError"
    gates = [
        *judge.gates(table, counts, exact_sums=device == "cpu"),
        judge.Gate("a shape outside the pack, at plan", found, "KernelResolutionFrozenError", miss is not None),
    ]

    print(
        f"model: all-MiniLM-L6-v2, {len(projections)} projections, one batch of {len(SENTENCES)} sentences, "
        f"{batch.rows} rows ({int(batch.mask.sum())} tokens)"
    )
    print(
        f"activation scale: static, one per projection, 448 * 6 / ({HEADROOM:g} * amax), amax in fp32 on "
        f"{len(CALIBRATION)} other sentences\n"
    )
    print_table(table)
    print(f"\nkernels: {counts.prebuilt} prebuilt, {counts.resolved} resolved, {counts.compiled} compiled")
    print("launches in the batch:")
    for key, count in launches.items():
        print(f"  {count:4}  {key}")
    print(
        f"seconds from process start: {seconds['first_projection']:.1f} to the first projection, "
        f"{seconds['first_embeddings']:.1f} to the embeddings\n"
    )
    if miss is not None:
        print(f"a shape outside the pack (float32 output), at plan:\n{textwrap.indent(miss, '  ')}\n")
    for gate in gates:
        print(f"{'pass' if gate.passed else 'FAIL'}  {gate.name}: {gate.found} (needed {gate.needed})")

    if options.json:
        report = {
            "b12x": b12x.__version__,
            "target": where,
            "flip": None if flip is None else asdict(flip),
            "activation_scale": {"headroom": HEADROOM, "calibration_sentences": len(CALIBRATION)},
            "sentences": judge.as_json(table),
            "kernels": asdict(counts),
            "seconds": seconds,
            "gates": [asdict(gate) for gate in gates],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(gate.passed for gate in gates) else GATE_FAILED


def choose_target() -> tuple[str, str]:
    """Device for the plans and its name: an SM120/SM121 GPU, otherwise, from here on, the emulator of a small one.

    Of few multiprocessors, since nothing runs side by side there: tiles are large, and K is not split.
    """
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) in ((12, 0), (12, 1)):
            return f"cuda:{index}", f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
    _CHOSEN.enter_context(b12x.target("emulator", sm_count=_EMULATED_SMS))
    return "cpu", "emulator on CPU (no SM120 or SM121 GPU found)"


def frozen_miss(device: str) -> str | None:
    """Plan a GEMM that the demo's pack does not hold: the message of the refusal, None when there was none."""
    try:
        blockscaled.plan(gemm_caps(device, 128, 384, 384, c_dtype="float32"))
    except b12x.KernelResolutionFrozenError as error:
        return str(error)
    return None


def print_table(table: Sequence[judge.Row]) -> None:
    """One line a sentence, and the medians."""
    print(
        "cosines of the NVFP4 kernels' result\n"
        "  fp32       embedding, against the model in fp32\n"
        "  reference  embedding, against the float reference of the same quantisation\n"
        "  channel    lowest of any output channel of any projection, against the reference on the kernels' inputs"
    )
    print(f"{'':3} {'sentence':66} {'fp32':>7} {'reference':>10} {'channel':>10}  nearest")
    for index, row in enumerate(table):
        same = "same" if row.same_neighbour else f"{row.neighbour}, was {row.neighbour_fp32}"
        print(
            f"{index:3} {row.sentence:66} {row.fp32:7.4f} {row.reference:10.7f} {row.worst_channel:10.7f}"
            f"  {row.neighbour} ({same})"
        )
    fp32, reference, channel = (
        statistics.median(getattr(row, name) for row in table) for name in ("fp32", "reference", "worst_channel")
    )
    print(f"{'':3} {'median':66} {fp32:7.4f} {reference:10.7f} {channel:10.7f}")


def process_seconds() -> float:
    """Seconds since this process started; since this module was imported where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.monotonic() - _IMPORTED


if __name__ == "__main__":
    sys.exit(main())
