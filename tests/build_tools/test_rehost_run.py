"""The scripts of the H200 run, as far as they go without one: operands, judging, reports, merging."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime.pack import Pack, index_bytes, ptx_blob, write_pack
from b12x.build_tools.rehost import rewrite
from b12x.gemm.blockscaled import reference
from b12x.quantization import nvfp4
from tests.nvfp4_data import golden_quantize, pack

FOLDER = Path(__file__).parent.parent.parent / "benchmarks" / "h200"
MODULES = ("agreement", "cases", "models", "operands", "report", "run", "small")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts as modules, with everything on the CPU."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in MODULES:
        sys.modules.pop(name, None)
    importlib.import_module("operands").DEVICE = "cpu"
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(5)


def entries(path: Path) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(path.read_text())["entries"]}


def test_operands_and_bound_are_those_of_the_library(target, scripts, generator) -> None:
    a = scripts.operands.random_operand(generator, 5, 256, "octaves", 2)
    b = scripts.operands.random_operand(generator, 7, 256, "normal", 2)
    left, right = a.values(), b.values()
    expected = scripts.operands.product(left, right) * 0.5
    magnitude = scripts.operands.product(left.abs(), right.abs()) * 0.5
    for c_dtype in scripts.operands.DTYPES:
        bound = scripts.operands.tolerance(expected, magnitude, 256, c_dtype)
        for index in range(2):
            one = reference.tolerance(left[index].numpy(), right[index].numpy(), 0.5, c_dtype)
            np.testing.assert_allclose(bound[index].numpy(), one, rtol=1e-12)
    rows = a.rows(3)
    assert rows.packed.shape == (3, 128, 2)
    assert torch.equal(rows.values(), left[:, :3])


def test_contract_in_torch_is_the_reference(scripts, generator) -> None:
    x = torch.randn((33, 128), generator=generator).bfloat16().float()
    x[3] = 0
    x[4, 5] = float("inf")
    global_scale = torch.tensor([2.75])
    codes, scale_bytes = golden_quantize(x.numpy(), 2.75)
    found_codes, found_scales = scripts.models._contract(x, global_scale)
    np.testing.assert_array_equal(found_scales.numpy(), scale_bytes)
    np.testing.assert_array_equal(found_codes.numpy(), pack(codes))


def test_small_section_is_right_and_runs_every_kernel(target, scripts, base_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    report = scripts.report.Report(out)
    scripts.small.run(tmp_path, 1, report)
    data = json.loads(out.read_text())
    assert not data["failures"]
    assert set(data["launches"]) == set(Pack.open(base_pack).keys())
    assert {entry["wrong"] for entry in data["entries"]} == {0}


@pytest.fixture
def rewritten_pack(base_pack: Path, tmp_path: Path) -> Path:
    """The base pack with its PTX rewritten for Hopper, which the emulator can run too."""
    source = Pack.open(base_pack)
    entries, blobs = {}, {}
    for key in source.keys():  # noqa: SIM118
        artifact = source.get(key)
        digest, name, data = ptx_blob(rewrite(source.ptx(artifact)).ptx)
        entries[key], blobs[name] = replace(artifact, ptx=digest, cubins={}), data
    index = index_bytes(name="rewritten", dsl="", ptxas="", archs=(), manifests={}, entries=entries)
    write_pack(tmp_path / "rewritten", index, blobs)
    return tmp_path / "rewritten"


@pytest.mark.parametrize(("m", "n", "k"), [(5, 72, 384), (70, 136, 256)])
def test_rewritten_kernels_compute_the_same(target, scripts, generator, rewritten_pack, monkeypatch, m, n, k) -> None:
    x = torch.randn((m, k), generator=generator).bfloat16()
    one = torch.ones(1)
    a = scripts.operands.random_operand(generator, m, k, "grid")
    b = scripts.operands.random_operand(generator, n, k, "grid")
    expected = nvfp4.quantize(x, one)
    product = scripts.agreement._multiply(a.pair, b.pair, one, "float32", (m, n, k, 1))
    b12x.clear_all_caches()
    with monkeypatch.context() as patch, b12x.target("emulator", sm_count=2):
        patch.setenv("B12X_PACK_PATH", str(rewritten_pack))
        found = nvfp4.quantize(x, one)
        assert torch.equal(found.packed_a_storage, expected.packed_a_storage)
        assert torch.equal(found.scale_storage, expected.scale_storage)
        assert torch.equal(scripts.agreement._multiply(a.pair, b.pair, one, "float32", (m, n, k, 1)), product)
    b12x.clear_all_caches()


def test_ragged_shape_is_judged(target, scripts, generator, tmp_path: Path) -> None:
    report = scripts.report.Report(tmp_path / "r.json")
    scripts.models._ragged(generator, (3, 72, 256, 2), "octaves", report)
    scripts.models._quantise(generator, 17, 192, "bfloat16", report)
    found = entries(tmp_path / "r.json")
    assert all(entry["ok"] for entry in found.values())
    assert len(found) == 4
    assert 0 < found["gemm 3x72x256x2 float32 octaves"]["worst_of_bound"] < 1


def test_wrong_results_are_reported(target, scripts, generator, tmp_path: Path, monkeypatch) -> None:
    right = scripts.models.blockscaled.run

    def wrong(**arguments: Any) -> torch.Tensor:
        out = right(**arguments)
        out[1, 2, 0] *= 1.01
        return out

    monkeypatch.setattr(scripts.models.blockscaled, "run", wrong)
    report = scripts.report.Report(tmp_path / "r.json")
    scripts.models._ragged(generator, (3, 72, 256, 1), "normal", report)
    assert len(report.data["failures"]) == 3
    assert entries(tmp_path / "r.json")["gemm 3x72x256x1 float32 normal"]["beyond_bound"] == 1


def test_agreement_needs_equal_bits_where_sums_are_exact(target, scripts, generator, tmp_path: Path) -> None:
    report = scripts.report.Report(tmp_path / "r.json")
    scripts.agreement._gemm(generator, (5, 72, 256, 1), "grid", "float32", report)
    scripts.agreement._quantise(generator, 3, 64, "float16", report)
    assert not report.data["failures"]
    assert report.data["entries"][0]["equal_bits"] == 1.0


def test_a_failing_entry_loses_nothing(scripts, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    report = scripts.report.Report(out)
    report.add("first", True, value=1)
    with report.guard("second"):
        raise RuntimeError("broken")
    found = json.loads(out.read_text())
    assert found["failures"] == ["second"]
    assert found["entries"][1]["error"] == "RuntimeError: broken"
    assert "test_rehost_run.py" in found["entries"][1]["traceback"]


def test_a_dying_section_keeps_its_results(scripts, tmp_path: Path, monkeypatch) -> None:
    arguments = SimpleNamespace(out=tmp_path / "all.json", seed=1, prepared=tmp_path)
    part = tmp_path / ".all.models.json"
    writes = f"import json, os; json.dump({{'entries': [1], 'failures': []}}, open({str(part)!r}, 'w')); "
    section = scripts.run._child(arguments, "models", 20, [sys.executable, "-c", writes + "os._exit(3)"])
    assert (section["status"], section["entries"], section["wrong"]) == ("3", [1], ["exit status 3"])
    section = scripts.run._child(
        arguments, "models", 0.5, [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(9)"]
    )
    assert section["wrong"] == ["exit status timeout"]
    assert section["output"] == "begun\n"
    assert scripts.run._child(arguments, "models", 20, ["true"])["wrong"] == ["no entries"]


def test_keys_that_no_section_ran_are_listed(scripts) -> None:
    results = {"prepared": {"kernels": {"a": "", "b": ""}}, "sections": {"x": {"launches": {"a": 3}}, "y": {}}}
    assert scripts.run._not_run(results) == ["b"]
