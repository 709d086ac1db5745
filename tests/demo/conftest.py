"""The model and what the demo derives from it, once per session."""

from __future__ import annotations

import pytest

from demo.encoder import Batch, Encoder
from demo.linears import QuantizedWeight, activation_scales, quantize_weights
from demo.sentences import CALIBRATION, SENTENCES


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.installed()


@pytest.fixture(scope="session")
def batch(encoder) -> Batch:
    return encoder.tokenize(SENTENCES)


@pytest.fixture(scope="session")
def weights(encoder) -> dict[str, QuantizedWeight]:
    return quantize_weights(encoder.projections())


@pytest.fixture(scope="session")
def x_scales(encoder) -> dict[str, float]:
    return activation_scales(encoder, CALIBRATION)
