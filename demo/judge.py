"""What the demo measures, and the gates that decide its exit code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from demo.encoder import Batch
from demo.linears import Recorded

REFERENCE_COSINE = 0.9999
#: The same for embeddings from tensor cores, whose sums differ from the reference's in the last bits: such a bit moves
#: a later activation across a rounding boundary of E2M1, and 24 stages in a row amplify that. Two references that
#: differ only in f32 or f64 sums agree to 0.990 in the worst sentence.
DRIFT_COSINE = 0.97
FORMAT_COSINE = 0.90
NEIGHBOURS = 10 / 12
LAUNCHES = 72


@dataclass(frozen=True)
class Row:
    """The figures of one sentence; neighbours are indices within the batch."""

    sentence: str
    fp32: float
    reference: float
    worst_channel: float
    neighbour: int
    neighbour_fp32: int

    @property
    def same_neighbour(self) -> bool:
        return self.neighbour == self.neighbour_fp32


@dataclass(frozen=True)
class Gate:
    """One condition of success."""

    name: str
    found: str
    needed: str
    passed: bool


@dataclass(frozen=True)
class Counts:
    """Kernels and launches of the process."""

    prebuilt: int
    resolved: int
    compiled: int
    launches: dict[str, int]
    frozen: bool


def nearest(embeddings: torch.Tensor) -> list[int]:
    """Index of each embedding's nearest other embedding."""
    similarity = embeddings @ embeddings.T
    neighbours: list[int] = similarity.fill_diagonal_(-math.inf).argmax(dim=1).tolist()
    return neighbours


def worst_channels(batch: Batch, recorded: dict[str, Recorded], products: dict[str, torch.Tensor]) -> list[float]:
    """For each sentence the lowest cosine, over all projections and output channels, between kernel and reference.

    One channel of one sentence is a vector with one element a token. Both sides had the same input, so that a single
    wrong weight scale, which reaches one channel only, is seen.
    """
    tokens = batch.mask.unsqueeze(-1).double()
    worst = torch.ones(batch.mask.shape[0], dtype=torch.float64)
    for name, product in products.items():
        kernel, reference = (y.reshape(*batch.mask.shape, -1).double() * tokens for y in (recorded[name].y, product))
        channels = torch.nn.functional.cosine_similarity(kernel, reference, dim=1)
        worst = torch.minimum(worst, channels.amin(dim=1))
    cosines: list[float] = worst.tolist()
    return cosines


def rows(
    sentences: Sequence[str],
    *,
    kernels: torch.Tensor,
    fp32: torch.Tensor,
    reference: torch.Tensor,
    channels: Sequence[float],
) -> list[Row]:
    """The table, from the embeddings of each backend."""
    columns = zip(
        sentences,
        _cosines(kernels, fp32),
        _cosines(kernels, reference),
        channels,
        nearest(kernels),
        nearest(fp32),
        strict=True,
    )
    return [Row(*values) for values in columns]


def gates(table: Sequence[Row], counts: Counts, *, exact_sums: bool) -> list[Gate]:
    """All conditions of success; ``exact_sums`` says that the target sums as the reference does, as the emulator."""
    same = sum(row.same_neighbour for row in table)
    needed = math.ceil(NEIGHBOURS * len(table))
    launched = sum(counts.launches.values())
    return [
        _at_least(
            "kernels = reference, embeddings",
            [row.reference for row in table],
            REFERENCE_COSINE if exact_sums else DRIFT_COSINE,
        ),
        _at_least("kernels = reference, worst channel", [row.worst_channel for row in table], REFERENCE_COSINE),
        _at_least("NVFP4 ~ fp32", [row.fp32 for row in table], FORMAT_COSINE),
        Gate("nearest neighbour unchanged", f"{same} of {len(table)}", f">= {needed}", same >= needed),
        Gate("launches in the batch", str(launched), f">= {LAUNCHES}", launched >= LAUNCHES),
        Gate("kernels compiled", str(counts.compiled), "0", counts.compiled == 0),
        Gate("kernel resolution frozen", str(counts.frozen), "True", counts.frozen),
    ]


def as_json(table: Sequence[Row]) -> list[dict[str, object]]:
    return [{**dataclasses.asdict(row), "same_neighbour": row.same_neighbour} for row in table]


def _cosines(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    cosines: list[float] = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=1).tolist()
    return cosines


def _at_least(name: str, cosines: Sequence[float], least: float) -> Gate:
    found = min(cosines)
    # Written so that NaN fails.
    return Gate(name, f"lowest cosine {found:.7f}", f">= {least}", all(cosine >= least for cosine in cosines))
