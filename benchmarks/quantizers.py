"""Bandwidth of the quantisers on a GPU, beside a copy and torch.compile's version of the same expression.

    PYTHONPATH=src python3 benchmarks/quantizers.py --out quantizers.json

Needs torch, numpy and cuda-bindings; for torch.compile also Triton and a C compiler. Without ``--target cuda`` the
kernels of ``build/h200/pack``, which ``benchmarks/h200/prepare.py`` makes, run on a Hopper GPU. A figure is the median
of 30 replays of a graph that launches on buffers in turn, of which there are so many that none is in the L2 when its
turn comes again; GB/s are bytes read and written, of a copy too. Each op is measured in a process of its own, and
results are written after each figure: what fails is in the file, and so is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch

import b12x
from b12x.quantization import mxfp8, nvfp4, scales

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((4096, 7168), (8192, 7168), (16384, 4096), (4096, 14336))
#: Least part of the copy bandwidth, at 4096 x 7168 and larger; on an H200 the conversion to E2M1 is many instructions.
TARGETS = {"mxfp8": 0.8, "nvfp4": 0.6}
REPLAYS = 30
#: Least number of launches in a graph, and least bytes that its buffers have, in bytes of L2.
_LAUNCHES = 12
_TIMES_L2 = 4
_COPIED = 2**29
_LIMIT = 280
_GLOBAL_SCALE = 3.25


@dataclass(frozen=True)
class Buffers:
    """Source and outputs of one launch; ``parts`` are the outputs as both versions write them."""

    source: torch.Tensor
    launch: Callable[[], Any]
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.source.nbytes + sum(part.nbytes for part in self.parts)


def mxfp8_buffers(m: int, k: int, device: str) -> Buffers:
    plan = mxfp8.plan(mxfp8.Caps(device=device, m=m, k=k))
    rows = mxfp8.allocate_outputs(plan)
    source = torch.randn((m, k), device=device).to(torch.bfloat16)
    binding = plan.bind(source=source, values=rows.values, scale_rows=rows.scale_rows, scale_mma=rows.scale_mma)
    storage = rows.scale_mma.permute(5, 2, 4, 0, 1, 3)
    parts = (rows.values.view(torch.uint8), rows.scale_rows[0], storage)
    return Buffers(source, lambda: mxfp8.run(binding=binding), parts)


def nvfp4_buffers(m: int, k: int, device: str) -> Buffers:
    plan = nvfp4.plan(m, k, device=device)
    outputs = nvfp4.allocate_outputs(plan)
    source = torch.randn((m, k), device=device).to(torch.bfloat16)
    scale = torch.full((1,), _GLOBAL_SCALE, device=device)
    binding = plan.bind(x=source, global_scale=scale, outputs=outputs)
    storage = outputs.scale_storage.view(scales.storage_shape(m, k // 16))
    return Buffers(source, lambda: nvfp4.run(binding=binding), (outputs.packed_a_storage[0], storage))


def mxfp8_expression(x: torch.Tensor, values: torch.Tensor, scale_rows: torch.Tensor, scale_mma: torch.Tensor) -> None:
    """The contract in torch, for rows and columns that are multiples of 128."""
    blocks = x.view(x.shape[0], -1, 32)
    bits = (blocks.abs().amax(-1).float() * (1 / 448)).view(torch.int32)
    code = torch.where(bits == 0, 127, (bits + 0x7FFFFF) >> 23)
    factor = ((254 - code) << 23).view(torch.float32)
    scaled = torch.where((bits == 0)[..., None], 0.0, blocks.float() * factor[..., None])
    values.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(x.shape))
    code = code.to(torch.uint8)
    scale_rows.copy_(code)
    scale_mma.copy_(swizzled(code))


def nvfp4_expression(x: torch.Tensor, packed: torch.Tensor, scale_storage: torch.Tensor) -> None:
    """The contract in torch, for multiples of 128 and 64, with a global scale that is known beforehand."""
    blocks = x.view(x.shape[0], -1, 16).float()
    product = _GLOBAL_SCALE * (blocks.abs().amax(-1) * (1 / 6))
    scale = product.clamp(max=448.0).to(torch.float8_e4m3fn)
    factor = 1 / (scale.float() * (1 / _GLOBAL_SCALE))
    scaled = torch.where((scale.float() == 0)[..., None], 0.0, blocks * factor[..., None])
    size = scaled.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5)
    code = torch.where((scaled < 0) & (code > 0), code | 8, code).view(*packed.shape, 2)
    packed.copy_(code[..., 0] | code[..., 1] << 4)
    scale_storage.copy_(swizzled(scale.view(torch.uint8)))


def swizzled(code: torch.Tensor) -> torch.Tensor:
    """Scales ``[M, columns]`` of whole tiles in the order of their storage; a view."""
    rows, columns = code.shape
    return code.view(1, rows // 128, 4, 32, columns // 4, 4).permute(0, 1, 4, 3, 2, 5)


OPS: dict[str, tuple[Callable[[int, int, str], Buffers], Callable[..., None]]] = {
    "mxfp8": (mxfp8_buffers, mxfp8_expression),
    "nvfp4": (nvfp4_buffers, nvfp4_expression),
}


def sets_for(nbytes: int, l2: int) -> int:
    """Distinct buffers of this size whose bytes are several times the L2, and never less than three."""
    return max(3, -(-_TIMES_L2 * l2 // nbytes))


def seconds(launches: Sequence[Callable[[], Any]]) -> float:
    """Median time of one launch in a graph of all of them, in turn; the launches have run before."""
    rounds = -(-_LAUNCHES // len(launches))
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for start, end in events:
        # The GPU is kept busy while the host gets the replay under way, whose start is then the first launch's.
        torch.cuda._sleep(200_000)
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1000 / (rounds * len(launches))


def copy_bandwidth(device: str) -> float:
    """GB/s between large buffers, read and written bytes counted: the better of the driver's copy and of a kernel's."""
    pairs = [[torch.full((_COPIED // 4,), n, dtype=torch.int32, device=device) for n in range(2)] for _ in range(3)]
    driver = seconds([lambda a=a, b=b: a.copy_(b) for a, b in pairs])
    kernel = seconds([lambda a=a, b=b: torch.neg(b, out=a) for a, b in pairs])
    return 2 * _COPIED / min(driver, kernel) / 1e9


class Results:
    """``entries`` by shape, ``failures`` with their tracebacks; in a file after each change."""

    def __init__(self, path: Path, op: str) -> None:
        self._path = path
        self.data: dict[str, Any] = {"op": op, "copy_gbps": None, "entries": {}, "failures": []}

    def measure(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.data["failures"].append(
                {"what": what, "error": repr(error)[:2000], "trace": traceback.format_exc()[-3000:]}
            )
        torch.cuda.empty_cache()
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(partial, self._path)

    def entry(self, m: int, k: int) -> dict[str, Any]:
        found: dict[str, Any] = self.data["entries"].setdefault(f"{m}x{k}", {})
        return found


def measure_op(op: str, device: str, results: Results) -> None:
    """The copy, then the kernel at each shape, then torch.compile's version at each."""
    make, expression = OPS[op]
    torch.manual_seed(1)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size

    def copy() -> None:
        results.data["copy_gbps"] = copy_bandwidth(device)

    def figures(time: float, nbytes: int) -> dict[str, float | None]:
        gbps, copied = nbytes / time / 1e9, results.data["copy_gbps"]
        return {"us": time * 1e6, "gbps": gbps, "of_copy": gbps / copied if copied else None}

    def kernel(m: int, k: int) -> None:
        first = make(m, k, device)
        sets = [first, *(make(m, k, device) for _ in range(sets_for(first.nbytes, l2) - 1))]
        entry = results.entry(m, k)
        entry["buffers"], entry["bytes"] = len(sets), first.nbytes
        entry["kernel"] = figures(seconds([buffers.launch for buffers in sets]), first.nbytes)

    def compiled(m: int, k: int) -> None:
        first = make(m, k, device)
        sets = [first, *(make(m, k, device) for _ in range(sets_for(first.nbytes, l2) - 1))]
        first.launch()
        wanted = [part.clone() for part in first.parts]
        torch.compiler.reset()
        version = torch.compile(expression, dynamic=False, fullgraph=True)
        for part in first.parts:
            part.fill_(0xA5)
        version(first.source, *first.parts)
        entry = results.entry(m, k)
        # Triton divides approximately, so a code may differ here and there.
        entry["equal_bytes"] = [float((a == b).double().mean()) for a, b in zip(first.parts, wanted, strict=True)]
        calls = [lambda b=buffers: version(b.source, *b.parts) for buffers in sets]
        entry["compiled"] = figures(seconds(calls), first.nbytes)
        if "kernel" in entry:
            entry["times_faster"] = entry["compiled"]["us"] / entry["kernel"]["us"]

    results.measure("copy", copy)
    for what, work in (("kernel", kernel), ("compiled", compiled)):
        for m, k in SHAPES:
            results.measure(f"{what} {m}x{k}", lambda work=work, m=m, k=k: work(m, k))


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Whether the figures of an op are reached, by shape; None where one of the two is missing."""
    least = TARGETS[found["op"]]
    verdicts = {}
    for shape, entry in found["entries"].items():
        of_copy, faster = entry.get("kernel", {}).get("of_copy"), entry.get("times_faster")
        verdicts[shape] = {
            "of_copy": None if of_copy is None else of_copy >= least,
            "faster": None if faster is None else faster > 1,
        }
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=ROOT / "build" / "h200" / "pack", help="(default: %(default)s)")
    parser.add_argument("--target", choices=("rehost:sm_90a", "cuda"), default="rehost:sm_90a")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    parser.add_argument("--only", choices=OPS, action="append")
    parser.add_argument("--op", choices=OPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.op:
        os.environ["B12X_PACK_PATH"] = str(arguments.pack)
        b12x.freeze_kernel_resolution("the kernels of the pack are measured, nothing else")
        with nullcontext() if arguments.target == "cuda" else b12x.target(arguments.target):
            measure_op(arguments.op, "cuda:0", Results(arguments.out, arguments.op))
        return 0
    # The machine is described by a child's library calls, so that this process holds no GPU.
    results: dict[str, Any] = {"target": arguments.target, "machine": _described(), "ops": {}}
    for op in arguments.only or OPS:
        results["ops"][op] = _child(op, arguments)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        _show(results["ops"][op])
    reached = [v for found in results["ops"].values() for shape in found["reached"].values() for v in shape.values()]
    return 0 if reached and all(reached) else 1


def _child(op: str, arguments: argparse.Namespace) -> dict[str, Any]:
    part = arguments.out.with_name(f".{arguments.out.stem}.{op}.json")
    part.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--op", op, "--out", str(part), "--pack", str(arguments.pack)]
    try:
        done = subprocess.run(
            [*command, "--target", arguments.target], capture_output=True, text=True, check=False, timeout=_LIMIT
        )
        status, output = str(done.returncode), done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, output = "timeout", str(error.stderr)
    found: dict[str, Any] = {"op": op, "copy_gbps": None, "entries": {}, "failures": []}
    if part.exists():
        found = json.loads(part.read_text())
        part.unlink()
    if status != "0":
        found["failures"].append({"what": "process", "error": f"exit status {status}", "trace": output[-3000:]})
    return {**found, "reached": judged(found)}


def _described() -> dict[str, Any]:
    code = (
        "import json, machine, torch; d = machine.describe(); d['torch'] = torch.__version__; "
        "d['device'] = torch.cuda.get_device_name(0); print(json.dumps(d))"
    )
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if done.returncode:
        return {**machine.describe(), "error": done.stderr[-1000:]}
    described: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return described


def _show(found: dict[str, Any]) -> None:
    print(f"{found['op']}: copy {found['copy_gbps'] or 0:.0f} GB/s")
    for shape, entry in found["entries"].items():
        line = [f"  {shape:>11}"]
        for what in ("kernel", "compiled"):
            if what in entry:
                figures = entry[what]
                line.append(f"{what} {figures['us']:.1f} us, {figures['gbps']:.0f} GB/s, {figures['of_copy'] or 0:.0%}")
        if "times_faster" in entry:
            line.append(f"{entry['times_faster']:.2f} times faster")
        print("; ".join(line), found["reached"][shape])
    for failure in found["failures"]:
        print(f"  FAILED {failure['what']}: {failure['error'][:300]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
