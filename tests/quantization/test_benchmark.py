"""``benchmarks/quantizers.py`` as far as it goes without a GPU: what torch.compile is given, buffers, failures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("quantizers", None)
    return importlib.import_module("quantizers")


@pytest.mark.parametrize("op", ["mxfp8", "nvfp4"])
def test_expression_gives_the_bytes_of_the_kernel(target, script, op):
    """So both versions do the same work on the same buffers."""
    make, expression = script.OPS[op]
    buffers = make(256, 384, target.device)
    buffers.source[3, :32] = 0
    for part in buffers.parts:
        part.fill_(0xA5)
    buffers.launch()
    wanted = [part.clone() for part in buffers.parts]
    for part in buffers.parts:
        part.fill_(0xA5)
    expression(buffers.source, *buffers.parts)
    assert all(torch.equal(a, b) for a, b in zip(buffers.parts, wanted, strict=True))
    scale_bytes = 256 * 384 // 32 * 2 if op == "mxfp8" else 256 * 384 // 16
    assert buffers.nbytes == 256 * 384 * (3 if op == "mxfp8" else 2.5) + scale_bytes


def test_buffers_exceed_the_l2(script):
    l2 = 50 * 2**20
    assert [script.sets_for(nbytes, l2) for nbytes in (2**30, 90 * 10**6, 10**6)] == [3, 3, 210]
    assert all(script.sets_for(n, l2) * n >= 4 * l2 for n in (10**6, 33 * 10**6, 90 * 10**6))


def test_one_failure_leaves_the_rest(script, tmp_path, monkeypatch):
    """Copy and one shape fail here; what was measured is in the file, with a verdict where there is a figure."""
    monkeypatch.setattr(script, "SHAPES", ((128, 128), (256, 128)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 1000}))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(script, "seconds", lambda launches: 1e-6 * len(launches))

    def make(m: int, k: int, device: str) -> object:
        if m == 256:
            raise RuntimeError("no memory")
        return type("B", (), {"nbytes": 4000, "launch": lambda: None, "source": None, "parts": ()})

    monkeypatch.setitem(script.OPS, "mxfp8", (make, None))
    monkeypatch.setattr(script, "copy_bandwidth", lambda device: 1 / 0)
    path = tmp_path / "part.json"
    script.measure_op("mxfp8", "cpu", script.Results(path, "mxfp8"))
    found = json.loads(path.read_text())
    assert {failure["what"] for failure in found["failures"]} >= {"copy", "kernel 256x128", "compiled 256x128"}
    kernel = found["entries"]["128x128"]["kernel"]
    assert (kernel["us"], kernel["of_copy"]) == (pytest.approx(3.0), None)
    assert script.judged(found)["128x128"] == {"of_copy": None, "faster": None}
    verdicts = script.judged(found | {"entries": {"a": {"kernel": {"of_copy": 0.9}, "times_faster": 1.2}, "b": {}}})
    assert verdicts == {"a": {"of_copy": True, "faster": True}, "b": {"of_copy": None, "faster": None}}
