"""What do the kernels' machine code and their traffic in shared memory look like?

From the sm_120a cubins, by nvdisasm: registers, spills, code size, and of the natural loop that holds the MMAs (and the
producer's) the instructions a K step of 128. From the same kernels' PTX on the emulator: bytes of shared memory an MMA
cycle, bank conflicts, bytes in flight before the first wait, and whether some warps multiply while others store.

    python benchmarks/sass_figures.py --markdown figures.md > benchmarks/results/sass_figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
from sass import graph, report
from sass.traffic import emulated, run_case

import b12x
from b12x._runtime.pack import Pack
from b12x._runtime.spec import KernelSpec, spec_from_key
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.cases import BlockscaledCase
from b12x.gemm.blockscaled.decode_spec import DecodeSpec
from b12x.gemm.blockscaled.spec import BlockscaledSpec
from b12x.verify import runner

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_120a"
#: K that figures are for, and clocks of a sub-core that an MMA takes; an SM has four sub-cores.
STEP_K, MMA_CLOCKS, SUB_CORES = 128, 16, 4
#: Weight bytes, scales included, that a 16 x 64 FP4 fragment has: what decode figures are for.
WEIGHT_BYTES = 576
#: TMA loads of a stage: A and B.
TMA_LOADS = 2
#: K of the emulated launches; what the longer one has more belongs to the main loop alone.
DEPTHS = (1536, 3072)
#: A plan for as many rows has every kernel.
MAX_M = 8192
FAMILIES = ("gemm.", "quantization.")


def spec_figures(spec: KernelSpec, cubin: bytes, registers: int, spills: int) -> dict[str, Any]:
    """What the machine code shows, whatever the kernel."""
    code = graph.Graph(graph.disassemble(cubin))
    found: dict[str, Any] = {
        "registers": registers,
        "spill_bytes": spills,
        "local_memory": sum(i.name in ("LDL", "STL") for i in code.instructions),
        "instructions": len(code.instructions),
        "global_accesses": accesses(code.instructions),
        "loops": [
            {"instructions": loop.size, "mma": loop.count(graph.is_mma)} for loop in code.innermost(graph.is_mma)
        ],
        "producer_loops": [loop.size for loop in producers(code)],
    }
    if isinstance(spec, BlockscaledSpec):
        found |= tile_figures(spec, code)
    if isinstance(spec, DecodeSpec):
        found |= decode_figures(spec, code)
    return found


def accesses(instructions: Iterable[graph.Instruction]) -> dict[str, int]:
    """Opcode and bytes of a thread -> how many global accesses there are."""
    return dict(sorted(Counter(f"{i.name} {graph.width(i)}" for i in instructions if graph.is_global(i)).items()))


def producers(code: graph.Graph) -> list[graph.Loop]:
    """Loops that ask for bulk copies and multiply nothing."""
    return [loop for loop in code.innermost(graph.is_bulk_copy) if not loop.count(graph.is_mma)]


def tile_figures(spec: BlockscaledSpec, code: graph.Graph) -> dict[str, Any]:
    """Issue slots of the warps that share a tile, its producer included, a K step of 128 (wait loops pass once)."""
    per_step = spec.warp_m // 16 * (spec.warp_n // 8) * (STEP_K // spec.encoding.mma_k)
    loop = max(code.innermost(graph.is_mma), key=lambda loop: loop.size)
    unroll = loop.count(graph.is_mma) / per_step
    instructions = loop.size / unroll
    producer = 0.0
    for part in producers(code):
        stages = part.count(lambda i: i.name == "UTMALDG") / TMA_LOADS
        producer = max(producer, part.size / stages * (STEP_K / spec.tile_k))
    cycles = spec.group_warps * per_step * MMA_CLOCKS
    return {
        "mma_per_step": per_step,
        "unroll": round(unroll, 3),
        "instructions_per_mma": round(loop.size / loop.count(graph.is_mma), 3),
        "instructions_per_step": round(instructions, 1),
        "producer_instructions_per_step": round(producer, 1),
        "mma_warps_slots_over_mma_cycles": round(spec.group_warps * instructions / cycles, 4),
        "slots_over_mma_cycles": round((spec.group_warps * instructions + producer) / cycles, 4),
    }


def decode_figures(spec: DecodeSpec, code: graph.Graph) -> dict[str, Any]:
    """Instructions of all warps for 576 bytes of weights: each warp takes whole K steps of all rows of its CTA."""
    per_step = spec.rows // 16 * (spec.tokens // 8) * (spec.tile_k // spec.encoding.mma_k)
    weight_bytes = spec.rows * spec.row_bytes
    if spec.encoding.scales == "mma":
        weight_bytes += spec.rows * spec.tile_k // spec.encoding.block
    loop = max(code.innermost(graph.is_mma), key=lambda loop: loop.size)
    unroll = loop.count(graph.is_mma) / per_step
    around = [outer for outer in code.loops if loop.blocks < outer.blocks]
    return {
        "mma_per_step": per_step,
        "unroll": round(unroll, 3),
        "instructions_per_576_bytes": round(loop.size / unroll / weight_bytes * WEIGHT_BYTES, 1),
        "loop_global_accesses": accesses((around[0] if around and not _asks(loop) else loop).body),
    }


def _asks(loop: graph.Loop) -> bool:
    return loop.count(graph.is_global) > 0 or loop.count(graph.is_bulk_copy) > 0


def emulated_figures(spec: BlockscaledSpec | DecodeSpec, role: str) -> dict[str, Any]:
    """Shared memory's traffic of the main loop, and the bytes that a CTA has in flight at first."""
    seen = []
    for k in DEPTHS:
        with emulated(1) as traffic:
            run_case(case_of(spec, role, k))
            seen.append(traffic)
    short, long = seen
    clocks = (long.multiplies - short.multiplies) * MMA_CLOCKS / SUB_CORES
    moved = long.read_bytes - short.read_bytes + long.copied - short.copied
    share = long.copied // len(long.in_flight)
    return {
        "shared_bytes_per_mma_clock": round(moved / clocks, 1),
        "bytes_before_first_wait": long.before_first_wait,
        "whole_share": share,
        "shared": kinds(long),
    }


def kinds(traffic: Any) -> dict[str, dict[str, int]]:
    """Wavefronts by kind of access, the least there could be, and the difference."""
    return {
        name: {"accesses": kind.accesses, "wavefronts": kind.wavefronts, "conflicts": kind.conflicts}
        for name, kind in sorted(traffic.kinds.items())
    }


def overlap_figures(spec: BlockscaledSpec, role: str) -> dict[str, Any]:
    """Six tiles on one multiprocessor, warps in random order: while one stores, may others multiply?"""
    with emulated(1, free=True) as traffic:
        case = case_of(spec, role, DEPTHS[0])
        run_case(replace(case, m=2 * spec.tile_m, n=3 * spec.tile_n))
    stretches, overlapped = traffic.multiplies_during_stores()
    return {"store_stretches": stretches, "with_multiplies_of_others": overlapped}


def case_of(spec: BlockscaledSpec | DecodeSpec, role: str, k: int) -> BlockscaledCase:
    """One tile of C, or one CTA's rows."""
    if isinstance(spec, DecodeSpec):
        m, n = spec.tokens, spec.scale_rows
    else:
        m, n = spec.tile_m, spec.tile_n
    return BlockscaledCase(
        size="small",
        recipe=spec.recipe,
        c_dtype=spec.c_dtype,
        m=m,
        n=n,
        k=k,
        role=role,
        distribution="normal",
        sm_count=1,
    )


def role_of(spec: BlockscaledSpec | DecodeSpec) -> str | None:
    """The role by which plans launch a kernel; None for one that another op launches."""
    caps = replace(case_of(spec, "decode", STEP_K).caps(), max_m=MAX_M)
    return next((role.name for role in planner.roles(caps) if spec in role.candidates), None)


def cases_by_key(keys: Iterable[str]) -> dict[str, list[tuple[str, Any]]]:
    """Small cases that launch one kernel alone, by its key."""
    wanted = set(keys)
    found: dict[str, list[tuple[str, Any]]] = {key: [] for key in wanted}
    for op, case in runner.every_case():
        if case.size != "small":
            continue
        roles = case.roles()
        specs = [spec.key for role in roles for spec in role.candidates if spec.key in wanted]
        if len(roles) == 1 and specs:
            found[specs[0]].append((op, case))
    return found


def measure(pack: Pack, keys: list[str], emulate: bool) -> list[dict[str, Any]]:
    rows = []
    cases = cases_by_key(keys) if emulate else {}
    for key in keys:
        artifact = pack.get(key)
        assert artifact is not None
        cubin = artifact.cubins[ARCH]
        spec = spec_from_key(key)
        row: dict[str, Any] = {"key": key}
        print(key, file=sys.stderr, flush=True)
        try:
            row |= spec_figures(spec, pack.cubin(artifact, ARCH), cubin.registers, cubin.spill_bytes)
        except ValueError as error:
            row["error"] = str(error)
        if emulate:
            row |= _emulate(spec, cases[key])
        rows.append(row)
    return rows


def _emulate(spec: KernelSpec, cases: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    role = role_of(spec) if isinstance(spec, (BlockscaledSpec, DecodeSpec)) else None
    try:
        if isinstance(spec, (BlockscaledSpec, DecodeSpec)) and role is not None:
            found |= emulated_figures(spec, role)
        if isinstance(spec, BlockscaledSpec) and role is not None:
            found |= overlap_figures(spec, role)
        if role is None and cases:
            with emulated(runner.EMULATED_SMS) as traffic:
                run_case(cases[0][1])
            found |= {"case": f"{cases[0][0]} {cases[0][1].name}", "shared": kinds(traffic)}
            found["bytes_before_first_wait"] = traffic.before_first_wait
    except (ValueError, b12x.emulator.EmulatorError) as error:
        found["emulator_error"] = f"{type(error).__name__}: {error}"
    return found


def main() -> int:
    """Print the result as JSON; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="pack to look at; default: manifests/base.toml, built here")
    parser.add_argument("--only", action="append", help="kernels whose key has this text; may be repeated")
    parser.add_argument("--no-emulator", action="store_true", help="machine code only")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.pack or _built(Path(folder) / "base")
        os.environ["B12X_PACK_PATH"] = str(path)
        b12x.clear_all_caches()
        pack = Pack.open(path)
        keys = [key for key in sorted(pack.keys()) if key.startswith(FAMILIES)]
        keys = [key for key in keys if not args.only or any(text in key for text in args.only)]
        rows = measure(pack, keys, not args.no_emulator)
    missed = report.missed(rows)
    result = {
        "benchmark": "sass_figures",
        "dsl": pack.dsl,
        "ptxas": pack.ptxas,
        "targets": report.TARGETS,
        "missed": missed,
        "kernels": rows,
        "machine": machine.describe(),
    }
    print(json.dumps(result, indent=1))
    if args.markdown:
        args.markdown.write_text(report.markdown(rows, missed, pack.ptxas))
    return int(bool(missed))


def _built(folder: Path) -> Path:
    from b12x.build_tools.build import BuildOptions, build_pack
    from b12x.build_tools.manifest import load_manifest

    options = replace(BuildOptions.from_environment(), allow_unchecked=True)
    return build_pack(load_manifest(ROOT / "manifests" / "base.toml"), folder, options).path


if __name__ == "__main__":
    sys.exit(main())
