"""What the H200 sections of the GEMMs launch, at small sizes on the target under test."""

from __future__ import annotations

from typing import Any

import gemm
import pytest
import rows
import torch

from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.recipes import RECIPES


class Notes:
    """Stands for a section's report."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[bool, dict[str, Any]]] = {}

    def add(self, name: str, ok: bool, **values: Any) -> None:
        self.entries[name] = ok, values


@pytest.fixture
def small(target: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Few heads, and the target's device in the place of a GPU."""
    monkeypatch.setattr(gemm, "DEVICE", target.device)
    monkeypatch.setattr(rows, "DEVICE", target.device)
    monkeypatch.setattr(gemm, "HEADS", 2)
    return torch.Generator(target.device).manual_seed(1)


@pytest.mark.parametrize("make", ["n", "k", "mxfp8", "bfloat16"])
def test_launches_with_a_reference(small: torch.Generator, make: str) -> None:
    """The weights are all that is counted, and the result is near float64's."""
    if make in "nk":
        nbytes, launch, out, wanted = gemm._bmm(small, 3, 64, 96, make)
        assert nbytes == 2 * 64 * 96 * 33 // 32
    else:
        nbytes, launch, out, wanted = gemm._mla(small, 3, make, "bfloat16")
        size = gemm.NOPE * gemm.LATENT
        assert nbytes == 2 * (size * 33 // 32 if make == "mxfp8" else 2 * size)
    launch()
    assert wanted is not None
    assert float((out.double() - wanted).norm() / wanted.norm()) < 2**-7


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_decode_launches(small: torch.Generator, recipe: str) -> None:
    nbytes, launch, out, _ = gemm._blockscaled(small, recipe, 3, 128, 256)
    assert nbytes == 128 * 256 * RECIPES[recipe].bits // 8 + 128 * 256 // RECIPES[recipe].block
    launch()
    assert bool(out.isfinite().all())


def test_every_figure_has_a_name_of_its_own(small: torch.Generator) -> None:
    names = [name for name, _, _ in gemm.configurations(small)]
    assert len(set(names)) == len(names) == 3 * (2 + 4) + 2 * len(gemm.SHAPES) * len(gemm.ROWS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_compared(small: torch.Generator, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """One kernel and split of a recipe is compared in every way; the others are found."""
    variants = rows.variants(recipe, 72, 256)
    assert {role for role, _ in variants} == {role.name for role in planner.roles(rows._caps(recipe, 72, 256))}
    assert all(1 <= split <= 2 for _, split in variants)
    monkeypatch.setattr(rows, "ROWS", 6)
    monkeypatch.setattr(rows, "SM_COUNTS", (1,))
    monkeypatch.setattr(rows, "variants", lambda *sizes: [variants[0]])
    notes: Any = Notes()
    notes.guard = lambda name: torch.enable_grad()
    rows._recipe(small, recipe, 72, 256, notes)
    ((ok, values),) = notes.entries.values()
    assert ok, values
