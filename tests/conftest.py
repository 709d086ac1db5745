"""Fixtures of all tests: the target that kernels run on, and the pack that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import b12x

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class TargetUnderTest:
    """Device to allocate on, and the name of the target that serves it."""

    device: str
    name: str


@pytest.fixture(scope="session")
def base_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default manifest, built for this session (from the build cache where nothing changed)."""
    from b12x.build_tools.build import BuildOptions, build_pack
    from b12x.build_tools.manifest import load_manifest

    manifest = load_manifest(ROOT / "manifests" / "base.toml")
    return build_pack(manifest, tmp_path_factory.mktemp("packs") / "base", BuildOptions.from_environment()).path


@pytest.fixture(scope="module")
def target(base_pack: Path) -> Iterator[TargetUnderTest]:
    """Kernels of the base pack, run by the emulator."""
    with pytest.MonkeyPatch.context() as patch, b12x.target("emulator", sm_count=8):
        patch.setenv("B12X_PACK_PATH", str(base_pack))
        b12x.clear_all_caches()
        yield TargetUnderTest("cpu", "emulator")
    b12x.clear_all_caches()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and repeat between runs."""
    seed = np.frombuffer(request.node.nodeid.encode(), np.uint8)
    return np.random.default_rng(seed)
