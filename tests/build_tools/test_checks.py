"""Check records: what is recorded, what the pack step refuses, and that the default kernels have records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from b12x._runtime.pack import Pack
from b12x.build_tools import checks
from b12x.build_tools.build import BuildOptions, build_pack
from b12x.build_tools.errors import BuildError
from b12x.build_tools.manifest import load_manifest
from b12x.verify.case import Judgement
from b12x.verify.runner import CaseResult, KernelResult, every_case
from tests.build_tools.conftest import ROOT

KEYS = ("quantization.nvfp4:dtype=bfloat16", "quantization.nvfp4:dtype=float16")


@pytest.fixture(scope="module")
def quantisers(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A pack of two kernels."""
    folder = tmp_path_factory.mktemp("pack")
    manifest = folder / "two.toml"
    manifest.write_text(
        'name = "two"\n[[op]]\nop = "quantization.nvfp4"\ndtype = ["bfloat16", "float16"]\nm = 1\nk = 64\n'
    )
    options = replace(BuildOptions.from_environment(), archs=("sm_120a",), allow_unchecked=True)
    return Pack.open(build_pack(load_manifest(manifest), folder / "two", options).path)


def kernel(key: str, *worst: float, wrong: int = 0) -> KernelResult:
    results = []
    for number, figure in enumerate(worst):
        case: Any = SimpleNamespace(name=f"case {number}", size="small")
        results.append(CaseResult("op", case, (key,), Judgement(wrong, 9, figure, figure / 1000)))
    return KernelResult(key, results)


def test_every_default_kernel_has_a_record() -> None:
    """As `make checks` leaves it: the present PTX of every kernel has passed every small case that is for it."""
    report = json.loads(_report_json())
    for row in report:
        assert "emulator" in row["checks"], f"{row['key']}: run `make checks`"
    recorded = {name for row in report for name in row["checks"]["emulator"]["cases"]}
    assert recorded == {case.name for _, case in every_case() if case.size == "small"}, "run `make checks`"


def _report_json() -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert checks.main(["report", "--json"]) == 0
    return out.getvalue()


def test_recording_again_gives_the_same_bytes(quantisers: Pack, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "records.json"
    contents = []
    for _ in range(2):
        command = ["record", "--target", "emulator", "--pack", str(quantisers.path), "-o", str(out)]
        assert checks.main(command) == 0
        contents.append(out.read_bytes())
    assert contents[0] == contents[1]
    records = checks.load(out)
    assert sorted(record["key"] for record in records.values()) == list(KEYS)
    assert set(records) == {quantisers.get(key).ptx for key in KEYS}
    shipped = checks.load()
    for digest, record in records.items():
        assert record["checks"][0] in shipped.get(digest, record | {"checks": []})["checks"], "run `make checks`"
    assert "passed     4 cases  0.00 of bound" in capsys.readouterr().out


def test_a_kernel_that_fails_is_not_recorded(
    quantisers: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from b12x.quantization.nvfp4 import cases

    wrong = Judgement(3, 9, 2.0, 0.5)
    monkeypatch.setattr(
        cases.Nvfp4Case, "_judge", lambda self, x, outputs: wrong if self.dtype == "float16" else Judgement(0, 9, 0, 0)
    )
    out = tmp_path / "records.json"
    assert checks.main(["record", "--target", "emulator", "--pack", str(quantisers.path), "-o", str(out)]) == 1
    assert [record["key"] for record in checks.load(out).values()] == [KEYS[0]]
    assert "3 of 9 elements wrong" in capsys.readouterr().out


def test_merging(quantisers: Pack) -> None:
    first, second = (quantisers.get(key).ptx for key in KEYS)
    old = {
        "gone": {"key": "x", "checks": [{"target": "emulator", "worst": 0.1, "relative": 0.1, "cases": ["a"]}]},
        first: {"key": KEYS[0], "checks": [{"target": "cuda", "worst": 0.5, "relative": 0.1, "cases": ["a"]}]},
        second: {"key": KEYS[1], "checks": [{"target": "emulator", "worst": 0.5, "relative": 0.1, "cases": ["a"]}]},
    }
    results = [kernel(KEYS[0], 0.123, 0.456), kernel(KEYS[1], 2.0, wrong=1)]
    assert checks.merge(old, quantisers, "emulator", results) == {
        first: {
            "key": KEYS[0],
            "checks": [
                {"target": "cuda", "worst": 0.5, "relative": 0.1, "cases": ["a"]},
                {"target": "emulator", "worst": 0.46, "relative": 0.00046, "cases": ["case 0", "case 1"]},
            ],
        }
    }
    assert checks.merge({}, quantisers, "cuda", [kernel(KEYS[0]), kernel(KEYS[1])]) == {}


def test_the_pack_carries_its_checks(base_pack: Path) -> None:
    records = checks.load()
    pack = Pack.open(base_pack)
    for key in pack.keys():  # noqa: SIM118
        artifact = pack.get(key)
        assert artifact.ptx in records, "run `make checks`"
        assert list(artifact.checks) == records[artifact.ptx]["checks"]


def test_the_pack_step_refuses_a_kernel_without_a_record(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "toys.toml"
    manifest.write_text('name = "toys"\n[[op]]\nop = "toy.scale"\nn = 1\n')
    monkeypatch.setenv(checks.ALLOW_UNCHECKED, "0")
    with pytest.raises(BuildError) as caught:
        build_pack(load_manifest(manifest), tmp_path / "out", BuildOptions(archs=("sm_120a",)))
    message = str(caught.value)
    for word in (
        "pack 'toys' was not written: 1 kernels have no check record",
        "toy.scale:variant=good,block=64 (PTX sha256 ",
        "`python -m b12x.build_tools.checks record --target emulator` makes the records",
        "for development, B12X_BUILD_ALLOW_UNCHECKED=1 builds without",
    ):
        assert word in message
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv(checks.ALLOW_UNCHECKED, "1")
    report = build_pack(load_manifest(manifest), tmp_path / "out", BuildOptions(archs=("sm_120a",)))
    pack = Pack.open(report.path)
    assert pack.get("toy.scale:variant=good,block=64").checks == ()
    digest = pack.get("toy.scale:variant=good,block=64").ptx
    assert digest in message


def test_report_lists_what_has_not_run(
    quantisers: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    records = checks.merge({}, quantisers, "emulator", [kernel(KEYS[0], 0.25)])
    monkeypatch.setattr(checks, "load", lambda: records)
    assert checks.main(["report", "--pack", str(quantisers.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  emulator       1 cases, 0.25 of bound, norm of error 0.00025" in lines
    assert lines.count("  emulator       not run") == 1
    assert lines.count("  rehost:sm_90a  not run") == 2
    assert "emulator: 1 of 2 kernels have run" in lines
    assert "cuda: 0 of 2 kernels have run" in lines


def test_outside_a_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(checks, "_MANIFESTS", tmp_path / "manifests")
    assert checks.main(["report"]) == 1
    assert "holds no manifests; run this in a source tree, or name a pack with --pack" in capsys.readouterr().err


def test_records_are_part_of_the_package() -> None:
    assert checks.FILE == ROOT / "build_tools" / "checks.json"
    assert checks.load(ROOT / "absent.json") == {}
