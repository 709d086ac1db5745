"""The whole demo as a user runs it, with and without a corrupted scale, on the pack of its manifest."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from demo import run
from tests.conftest import ROOT

SEED = 1


@pytest.fixture(scope="module")
def demo_pack(tmp_path_factory):
    from b12x.build_tools.build import BuildOptions, build_pack
    from b12x.build_tools.manifest import load_manifest

    manifest = load_manifest(ROOT / "manifests" / "demo.toml")
    return build_pack(manifest, tmp_path_factory.mktemp("packs") / "demo", BuildOptions.from_environment()).path


@pytest.fixture(scope="module")
def runs(demo_pack, tmp_path_factory):
    """Exit code, output and report of the right and of the corrupted run, which run side by side."""
    folder = tmp_path_factory.mktemp("reports")
    environment = {**os.environ, "B12X_PACK_PATH": str(demo_pack)}
    started = {}
    for name, extra in (("right", []), ("flipped", ["--flip-scale-byte", str(SEED)])):
        report = folder / f"{name}.json"
        command = [sys.executable, "-m", "demo.run", "--json", str(report), *extra]
        started[name] = report, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    results = {}
    for name, (report, process) in started.items():
        output, _ = process.communicate(timeout=600)
        results[name] = process.returncode, output, json.loads(report.read_text())
    return results


def test_right_run_passes(runs):
    status, output, report = runs["right"]
    assert status == 0, output
    assert [gate["name"] for gate in report["gates"] if not gate["passed"]] == []
    assert len(report["sentences"]) >= 12
    kernels = report["kernels"]
    assert (kernels["prebuilt"], kernels["resolved"], kernels["compiled"]) == (5, 5, 0)
    assert sum(kernels["launches"].values()) == 72
    assert {key.partition(":")[0]: count for key, count in kernels["launches"].items()} == {
        "gemm.blockscaled": 36,
        "quantization.nvfp4": 36,
    }
    assert 0 < report["seconds"]["first_projection"] < report["seconds"]["first_embeddings"]


def test_miss_is_explained(runs):
    output = runs["right"][1]
    assert "c_dtype=float32" in output
    assert "reason: demo" in output


def test_corrupted_run_fails_for_that_reason(runs):
    status, output, report = runs["flipped"]
    assert status == run.GATE_FAILED, output
    failed = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    assert {"kernels = reference, embeddings", "kernels = reference, worst channel"} <= set(failed)
    assert report["flip"]["before"] != report["flip"]["after"]


def test_seconds_since_the_process_started(monkeypatch):
    assert 0 < run.process_seconds() < 86400
    monkeypatch.setattr(run, "_IMPORTED", run.time.monotonic() - 5)
    monkeypatch.setattr(run.os, "sysconf", lambda name: (_ for _ in ()).throw(OSError))
    assert 5 <= run.process_seconds() < 6
