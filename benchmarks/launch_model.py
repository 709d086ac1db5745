"""How evenly do the planner's real launches spread over the chip?

The plans of ``gemm.blockscaled`` are bound and run for the shapes of public models (``shapes.toml``), with a stand-in
for the driver that records grid, cluster, block and shared memory; no GPU is needed. CTAs are then dealt to
multiprocessors in order. Targets: at least 0.9 CTAs a multiprocessor, unless every CTA has its whole share in flight
at once; and in 85 % of the cases the busiest multiprocessor moves at most 1.25 times the mean over all of them.

    python benchmarks/launch_model.py > benchmarks/results/launch_model.json
    python benchmarks/launch_model.py --configs FOLDER      # makes shapes.toml of models' configurations
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from launches import shapes, work
from launches.recorder import DEVICE, Array, Driver, Recorded, recording

from b12x._runtime.pack import Pack
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.quantization import scales

SHAPES = Path(__file__).parent / "shapes.toml"
ROWS = (1, 2, 4, 8, 16, 64, 256)
#: Multiprocessors -> card, and its memory bandwidth in GB/s.
CARDS = {48: ("GB10", 233), 84: ("RTX 5080", 960), 170: ("RTX 5090", 1792), 188: ("RTX PRO 6000 Server", 1597)}
C_DTYPE = "bfloat16"
#: Recipe -> operand dtype, scale dtype, values a scale, bits an element.
RECIPES = {
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16, 4),
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32, 8),
}
LEAST_CTAS, LARGEST_OVER_MEAN, SHARE_OF_CASES = 0.9, 1.25, 0.85
#: Rows that a serving plan has to hold.
MAX_M = 8192
WORST = 10
#: Limits of N between which results are summed up.
BANDS = (0, 512, 1024, 2048, 4096, 8192, 1 << 20)


@dataclass(frozen=True)
class Result:
    """One launch, judged."""

    problem: work.Problem
    sm_count: int
    layers: str
    key: str
    what: str
    grid: tuple[int, ...]
    split: int
    resident: int
    ctas: int
    all_in_flight: bool
    over_mean: float
    busy: int
    exchanged: int

    @property
    def covered(self) -> bool:
        return self.ctas >= LEAST_CTAS * self.sm_count or self.all_in_flight

    @property
    def even(self) -> bool:
        return self.over_mean <= LARGEST_OVER_MEAN

    @property
    def floor_us(self) -> float:
        """Time of the problem's bytes at the card's memory bandwidth."""
        return self.problem.bytes / CARDS[self.sm_count][1] / 1e3

    @property
    def busiest_us(self) -> float:
        """Time of the busiest multiprocessor at its share of the bandwidth: the floor that this launch can reach."""
        return self.floor_us * self.over_mean

    def why(self) -> str:
        """One line on what makes the busiest multiprocessor busier than the mean."""
        per_sm = self.ctas / self.sm_count
        slots = self.resident * self.sm_count
        split = f" in clusters of {self.split}" if self.split > 1 else ""
        dealt = f"{self.what}{split}: {self.ctas} CTAs on {self.sm_count} SMs"
        if self.ctas < self.sm_count:
            rest = "; each holds its whole share in flight, so the time is one latency" if self.all_in_flight else ""
            return f"{dealt}, {self.sm_count - self.busy} idle{rest}"
        if self.ctas <= slots:
            return f"{dealt}, all resident, {per_sm:.2f} an SM"
        return f"{dealt}, {self.ctas / slots:.2f} waves of {slots}"

    def row(self) -> dict[str, Any]:
        p = self.problem
        return {
            "recipe": p.recipe,
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "sms": self.sm_count,
            "kernel": self.key.partition(":")[2],
            "grid": list(self.grid),
            "split": self.split,
            "ctas_over_sms": round(self.ctas / self.sm_count, 2),
            "all_in_flight": self.all_in_flight,
            "largest_over_mean": round(self.over_mean, 3),
            "exchanged_of_bytes": round(self.exchanged / p.bytes, 4),
            "floor_us": round(self.floor_us, 2),
            "busiest_us": round(self.busiest_us, 2),
            "layers": self.layers,
            "why": self.why(),
        }


def plan_caps(recipe: str, n: int, k: int) -> planner.Caps:
    ab_dtype, sf_dtype, block, _ = RECIPES[recipe]
    return planner.Caps(
        device=DEVICE,
        ab_dtype=ab_dtype,
        sf_dtype=sf_dtype,
        sf_vec_size=block,
        c_dtype=C_DTYPE,
        max_m=MAX_M,
        n=n,
        k=k,
    )


def launch(driver: Driver, plan: blockscaled.Plan, problem: work.Problem, rhs: tuple[Array, Array]) -> list[Recorded]:
    """Bind and run on stand-in tensors; the launches that the driver got."""
    m, n = problem.m, problem.n
    out = Array(getattr(torch, C_DTYPE), (m, n, 1), (n, 1, m * n))
    driver.launches.clear()
    binding = plan.bind(lhs=operand(problem, m), rhs=rhs, out=out)
    blockscaled.run(binding=binding, stream=0)
    return list(driver.launches)


def operand(problem: work.Problem, rows: int) -> tuple[Array, Array]:
    """Codes ``[rows, bytes, 1]`` and swizzled scales in one dimension."""
    _, _, block, bits = RECIPES[problem.recipe]
    width = problem.k * bits // 8
    codes = Array(torch.uint8 if bits == 4 else torch.float8_e4m3fn, (rows, width, 1), (width, 1, rows * width))
    return codes, Array(torch.uint8, (scales.storage_bytes(rows, problem.k // block, 1),))


def judge(
    launches: list[Recorded], problem: work.Problem, sm_count: int, layers: str, registers: Mapping[str, int]
) -> Result:
    (only,) = launches
    done = work.MODELS[only.spec.kernel](only, problem)
    slots = work.resident(only, registers.get(only.spec.key, 0))
    split = only.cluster[0]
    per_sm = work.deal(done.per_cta, split, slots, sm_count)
    return Result(
        problem=problem,
        sm_count=sm_count,
        layers=layers,
        key=only.spec.key,
        what=done.what,
        grid=only.grid,
        split=split,
        resident=slots,
        ctas=only.ctas,
        all_in_flight=done.all_in_flight and only.ctas <= slots * sm_count,
        over_mean=float(per_sm.max() / per_sm.mean()),
        busy=int((per_sm > 0).sum()),
        exchanged=done.exchanged,
    )


def measure(pairs: Mapping[tuple[int, int], str], registers: Mapping[str, int]) -> tuple[list[Result], list[str]]:
    """All cases of every recipe that the planner has; and what it lacks."""
    results, lacking = [], []
    for recipe in RECIPES:
        try:
            plan_caps(recipe, 128, 128)
        except ValueError as error:
            lacking.append(f"{recipe}: {error}")
            continue
        specs = {
            spec.key: spec
            for n, k in pairs
            for role in planner.roles(plan_caps(recipe, n, k))
            for spec in role.candidates
        }
        for sm_count in CARDS:
            with recording(specs.values(), sm_count) as driver:
                for (n, k), layers in pairs.items():
                    plan = blockscaled.plan(plan_caps(recipe, n, k))
                    rhs = operand(work.Problem(recipe, C_DTYPE, n, n, k), n)
                    for m in ROWS:
                        problem = work.Problem(recipe, C_DTYPE, m, n, k)
                        found = launch(driver, plan, problem, rhs)
                        results.append(judge(found, problem, sm_count, layers, registers))
    return results, lacking


def share(results: Iterable[Result], test: str) -> float:
    found = [bool(getattr(result, test)) for result in results]
    return round(sum(found) / len(found), 4)


def table(results: list[Result]) -> list[dict[str, Any]]:
    """A row for each recipe, card and M."""
    groups: dict[tuple[str, int, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.problem.recipe, result.sm_count, result.problem.m].append(result)
    return [
        {
            "recipe": recipe,
            "sms": sms,
            "m": m,
            "cases": len(group),
            "covered": share(group, "covered"),
            "even": share(group, "even"),
            "median_over_mean": round(sorted(result.over_mean for result in group)[len(group) // 2], 3),
            "split": {str(s): sum(result.split == s for result in group) for s in sorted({r.split for r in group})},
            "exchanged_of_bytes": round(
                sum(r.exchanged for r in group) / sum(result.problem.bytes for result in group), 5
            ),
        }
        for (recipe, sms, m), group in groups.items()
    ]


def worst(results: list[Result], count: int) -> list[Result]:
    """The most uneven launch of each (N, K), the worst of those first; uncovered ones before all others."""
    found: dict[tuple[int, int], Result] = {}
    for result in sorted(results, key=lambda r: (r.covered, -r.over_mean, -r.floor_us)):
        found.setdefault((result.problem.n, result.problem.k), result)
    return list(found.values())[:count]


def summary(results: list[Result], pairs: int) -> dict[str, Any]:
    covered, even = share(results, "covered"), share(results, "even")
    waiting = [result for result in results if not result.all_in_flight]
    return {
        "benchmark": "launch_model",
        "pairs": pairs,
        "cases": len(results),
        "covered": covered,
        "even": even,
        "even_of_those_not_all_in_flight": share(waiting, "even") if waiting else None,
        "even_or_all_in_flight": round(sum(r.even or r.all_in_flight for r in results) / len(results), 4),
        "even_by_n": {
            f"{low + 1} to {high}": share(band, "even")
            for low, high in itertools.pairwise(BANDS)
            if (band := [r for r in results if low < r.problem.n <= high])
        },
        "targets": {"covered": 1.0, "even": SHARE_OF_CASES, "largest_over_mean": LARGEST_OVER_MEAN},
        "met": covered == 1.0 and even >= SHARE_OF_CASES,
        "bandwidth_gb_s": dict(CARDS.values()),
        "table": table(results),
        "worst": [result.row() for result in worst(results, WORST)],
    }


def main() -> int:
    """Print the result as JSON; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, help="folder of models' *_config.json: write shapes.toml and stop")
    parser.add_argument("--pack", type=Path, help="pack of the kernels, whose registers then count in the occupancy")
    parser.add_argument("--rows", type=Path, metavar="JSON", help="write every case to this file")
    parser.add_argument("--every", type=int, default=1, help="take one in so many pairs")
    args = parser.parse_args()
    if args.configs:
        SHAPES.write_text(shapes.to_toml(shapes.derive(args.configs)))
        print(f"{SHAPES}: {len(shapes.read(SHAPES))} pairs")
        return 0
    pairs = dict(list(shapes.read(SHAPES).items())[:: args.every])
    results, lacking = measure(pairs, _registers(args.pack))
    if args.rows:
        args.rows.write_text("\n".join(json.dumps(result.row()) for result in results) + "\n")
    result = summary(results, len(pairs))
    print(json.dumps({**result, "lacking": lacking, "machine": machine.describe()}, indent=2))
    return 0 if result["met"] else 1


def _registers(folder: Path | None) -> dict[str, int]:
    if folder is None:
        return {}
    pack, found = Pack.open(folder), {}
    for key in sorted(pack.keys()):
        artifact = pack.get(key)
        if artifact is not None:
            found[key] = max((cubin.registers for cubin in artifact.cubins.values()), default=0)
    return found


if __name__ == "__main__":
    sys.exit(main())
