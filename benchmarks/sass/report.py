"""The targets that kernels are held to, what misses them, and the tables beside other libraries' figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: What each figure has to be. ``prefill`` is for kernels of the large tile, ``decode`` for the decode kernels.
TARGETS = {
    "prefill slots_over_mma_cycles": 0.20,
    "prefill shared_bytes_per_mma_clock": 96,
    "decode instructions_per_576_bytes": 64,
    "decode bytes_before_first_wait": 16384,
}
MATRIX = ("ldmatrix", "stmatrix")
#: Other libraries' sm_120a code, of ptxas 13.4 where not said otherwise: kernel, registers, spilled bytes, and of the
#: innermost loop with the MMAs instructions / MMAs.
PEERS = (
    ("NVIDIA's example, NVFP4 128x128x128 ping-pong", "168", "0", "131 / 64 = 2.05 (ptxas 12.9: 182)"),
    ("JIT library, NVFP4 GEMM, M = 1", "94", "0", "130 / 32 = 4.06"),
    ("JIT library, NVFP4 GEMM, M = 16..64", "", "0", "148 / 32 = 4.62; newest 129 / 32 to 183 / 32"),
    ("JIT library, NVFP4 GEMM, M = 4096", "134", "0", "169 / 64 = 2.64"),
    ("JIT library, MXFP8 GEMM, M = 4096", "158", "0", "218 / 64 = 3.41"),
    ("JIT library, block-FP8 GEMM, M = 4096", "133", "0", "192 / 64 = 3.00"),
    ("JIT library, quantise NVFP4 rows", "45", "0", "182, 2-byte scalar loads"),
    ("JIT library, quantise MXFP8 rows", "28", "0", "119, 2-byte scalar loads"),
)


def is_prefill(row: dict[str, Any]) -> bool:
    return "groups=2" in row["key"]


def missed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Each target that a kernel misses, with what was found."""
    found = []
    for row in rows:
        key = row["key"]
        if "error" in row or "emulator_error" in row:
            found.append(f"{key}: {row.get('error') or row['emulator_error']}")
        if row.get("spill_bytes") or row.get("local_memory"):
            found.append(f"{key}: local memory, {row['spill_bytes']} bytes a thread")
        if is_prefill(row):
            for name in ("slots_over_mma_cycles", "shared_bytes_per_mma_clock"):
                if row.get(name, 0) > TARGETS[f"prefill {name}"]:
                    found.append(f"{key}: {name} is {row[name]}, at most {TARGETS[f'prefill {name}']} wanted")
            if "store_stretches" in row and not row["with_multiplies_of_others"]:
                found.append(f"{key}: nothing multiplies while a tile is stored")
        if "instructions_per_576_bytes" in row:
            if row["instructions_per_576_bytes"] > TARGETS["decode instructions_per_576_bytes"]:
                found.append(f"{key}: {row['instructions_per_576_bytes']} instructions for 576 weight bytes")
            narrow = [name for name in row["loop_global_accesses"] if int(name.split()[1]) < 16]
            if narrow:
                found.append(f"{key}: global accesses of the main loop below 16 bytes: {', '.join(narrow)}")
            if "whole_share" in row:
                least = min(TARGETS["decode bytes_before_first_wait"], row["whole_share"])
                if row["bytes_before_first_wait"] < least:
                    found.append(f"{key}: {row['bytes_before_first_wait']} bytes before the first wait, {least} wanted")
        for name in MATRIX:
            conflicts = row.get("shared", {}).get(name, {}).get("conflicts", 0)
            if conflicts:
                found.append(f"{key}: {conflicts} bank conflicts in {name}")
    return found


_NOTE = """From sm_120a cubins (ptxas {ptxas}) and the same kernels' PTX on the emulator; nothing here ran on a GPU. A
step is K = 128. Slots are issue slots of the MMA warps that share a tile, and of the producer. Shared bytes are the
wavefronts of loads and the bytes of copies. Conflicts are wavefronts beyond the least, of ldmatrix, stmatrix, loads and
stores; a dash stands for no such access."""
_TILES = (
    "kernel",
    "registers",
    "loop / MMAs",
    "unroll",
    "producer a step",
    "slots / MMA cycles",
    "shared B / clock",
    "conflicts",
    "stores with multiplies",
)
_DECODE = (
    "kernel",
    "registers",
    "loop / MMAs",
    "instructions for 576 B",
    "global accesses in the loop",
    "B before the first wait",
    "conflicts",
)
_OTHERS = ("kernel", "registers", "instructions", "loop / MMAs", "global accesses", "conflicts")
_PEERS = ("kernel", "registers", "spilled B", "innermost loop with the MMAs")


def markdown(rows: list[dict[str, Any]], misses: list[str], ptxas: str) -> str:
    """Tables of the tile kernels, the decode kernels, all others, and the peers."""
    tiles = [row for row in rows if "slots_over_mma_cycles" in row]
    decode = [row for row in rows if "instructions_per_576_bytes" in row]
    others = [row for row in rows if row not in tiles and row not in decode and "error" not in row]
    parts = [
        "# Machine code and shared memory",
        _NOTE.format(ptxas=ptxas),
        "## Tile kernels",
        table(_TILES, map(_tile, tiles)),
        "## Decode kernels",
        table(_DECODE, map(_decode, decode)),
        "## Others",
        table(_OTHERS, map(_other, others)),
        "## Other libraries",
        table(_PEERS, PEERS),
        "## Missed",
        "\n".join(f"- {line}" for line in misses) or "Nothing.",
    ]
    return "\n\n".join(parts) + "\n"


def _tile(row: dict[str, Any]) -> tuple[Any, ...]:
    overlap = f"{row['with_multiplies_of_others']} of {row['store_stretches']}" if "store_stretches" in row else ""
    figures = (row["unroll"], row["producer_instructions_per_step"], row["slots_over_mma_cycles"])
    shared = row.get("shared_bytes_per_mma_clock", "")
    return name(row), row["registers"], loop(row), *figures, shared, conflicts(row), overlap


def _decode(row: dict[str, Any]) -> tuple[Any, ...]:
    figures = row["instructions_per_576_bytes"], text(row["loop_global_accesses"])
    return name(row), row["registers"], loop(row), *figures, row.get("bytes_before_first_wait", ""), conflicts(row)


def _other(row: dict[str, Any]) -> tuple[Any, ...]:
    figures = row["instructions"], loop(row), text(row["global_accesses"])
    return name(row), row["registers"], *figures, conflicts(row)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def name(row: dict[str, Any]) -> str:
    """The key in short: the kernel and its values."""
    kernel, _, fields = row["key"].partition(":")
    return f"{kernel} {' '.join(field.partition('=')[2] for field in fields.split(',') if not field.endswith('='))}"


def loop(row: dict[str, Any]) -> str:
    shown = [f"{part['instructions']} / {part['mma']}" for part in row["loops"]]
    return "; ".join(shown) or "none"


def conflicts(row: dict[str, Any]) -> str:
    """Extra wavefronts by kind of access; a dash where there is no such access."""
    shared = row.get("shared")
    if shared is None:
        return ""
    groups = [[n for n in shared if n == kind] for kind in MATRIX]
    groups += [[n for n in shared if n.startswith(kind + ".")] for kind in ("ld", "st")]
    return ", ".join(str(sum(shared[n]["conflicts"] for n in group)) if group else "-" for group in groups)


def text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} B" for kind, count in counts.items()) or "none"
