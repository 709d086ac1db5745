"""The gates: each fails on its own figure, and on NaN."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from demo import judge
from demo.encoder import Batch
from demo.linears import Recorded

GOOD = judge.Row("text", fp32=0.96, reference=1.0, worst_channel=1.0, neighbour=1, neighbour_fp32=1)
COUNTS = judge.Counts(prebuilt=3, resolved=3, compiled=0, launches={"a": 36, "b": 36}, frozen=True)


def failed(table, counts=COUNTS):
    return [gate.name for gate in judge.gates(table, counts, exact_sums=True) if not gate.passed]


def test_good_run_passes():
    assert failed([GOOD] * 16) == []


@pytest.mark.parametrize("value", [0.5, math.nan])
@pytest.mark.parametrize(
    ("field", "gate"),
    [
        ("reference", "kernels = reference, embeddings"),
        ("worst_channel", "kernels = reference, worst channel"),
        ("fp32", "NVFP4 ~ fp32"),
    ],
)
def test_one_bad_sentence_fails(field, gate, value):
    assert failed([GOOD] * 15 + [dataclasses.replace(GOOD, **{field: value})]) == [gate]


def test_embeddings_may_drift_where_sums_differ():
    drifted = [dataclasses.replace(GOOD, reference=0.99)]
    assert failed(drifted * 16) == ["kernels = reference, embeddings"]
    assert all(gate.passed for gate in judge.gates(drifted * 16, COUNTS, exact_sums=False))


@pytest.mark.parametrize(("moved", "passes"), [(2, True), (3, False)])
def test_neighbours_in_proportion(moved, passes):
    """14 of 16, as 10 of 12 rounds up."""
    table = [dataclasses.replace(GOOD, neighbour=2)] * moved + [GOOD] * (16 - moved)
    assert failed(table) == ([] if passes else ["nearest neighbour unchanged"])


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"launches": {"a": 36, "b": 35}}, "launches in the batch"),
        ({"compiled": 1}, "kernels compiled"),
        ({"frozen": False}, "kernel resolution frozen"),
    ],
)
def test_counts(change, gate):
    assert failed([GOOD] * 16, dataclasses.replace(COUNTS, **change)) == [gate]


def test_nearest_is_never_itself():
    assert judge.nearest(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])) == [1, 0, 1]


def test_worst_channel_ignores_padding_and_finds_one_channel():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    product = torch.randn((6, 4), generator=torch.Generator().manual_seed(0))
    kernel = product.clone()
    kernel[2] = 100.0
    batch = Batch(torch.zeros_like(mask), mask)
    assert judge.worst_channels(batch, {"p": Recorded(product, kernel)}, {"p": product}) == pytest.approx([1, 1])
    kernel[4, 3] += 1.0
    first, second = judge.worst_channels(batch, {"p": Recorded(product, kernel)}, {"p": product})
    assert first == pytest.approx(1)
    assert second < 0.99
