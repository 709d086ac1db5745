"""The fp32 encoder is the model that it claims to be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from demo import encoder as encoder_module
from demo.encoder import Encoder, fp32_linear
from demo.judge import nearest
from demo.sentences import CALIBRATION, SENTENCES


def test_published_embeddings(encoder):
    """The first values of the embeddings that the model's publisher prints for its two example sentences."""
    embeddings = encoder.embed(
        encoder.tokenize(["This is an example sentence", "Each sentence is converted"]), fp32_linear
    )
    expected = torch.tensor(
        [[0.067657, 0.063496, 0.048713, 0.079305], [0.086439, 0.102763, 0.005395, 0.002044]],
    )
    torch.testing.assert_close(embeddings[:, :4], expected, rtol=0, atol=2e-6)
    assert embeddings.shape == (2, 384)


def test_projections(encoder):
    shapes = Counter(tuple(p.weight.shape) for p in encoder.projections())
    assert shapes == {(384, 384): 24, (1536, 384): 6, (384, 1536): 6}


def test_every_projection_goes_through_linear(encoder):
    seen = []

    def linear(projection, x):
        seen.append(projection.name)
        return fp32_linear(projection, x)

    encoder.embed(encoder.tokenize(["One sentence."]), linear)
    assert seen == [p.name for p in encoder.projections()]


def test_padding_changes_nothing(encoder, batch):
    """A sentence alone and the same one padded in a batch."""
    together = encoder.embed(batch, fp32_linear)
    shortest = int(batch.mask.sum(dim=1).argmin())
    alone = encoder.embed(encoder.tokenize([SENTENCES[shortest]]), fp32_linear)
    torch.testing.assert_close(together[shortest], alone[0], rtol=0, atol=1e-6)


def test_topical_pairs_are_neighbours(encoder, batch):
    assert nearest(encoder.embed(batch, fp32_linear)) == [i ^ 1 for i in range(len(SENTENCES))]


def test_calibration_text_is_not_in_the_batch():
    assert not set(CALIBRATION) & set(SENTENCES)
    assert len(set(SENTENCES)) == len(SENTENCES) >= 12


def test_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr(encoder_module, "MODEL_PACKAGE", "not_an_installed_package")
    with pytest.raises(ModuleNotFoundError, match=r"not_an_installed_package .*demo/requirements\.txt"):
        Encoder.installed()
