"""What the README says is so: its example runs, its tables are complete."""

from __future__ import annotations

import re

import numpy as np
import torch

import b12x
from b12x._runtime import env
from b12x.gemm.blockscaled import reference as gemm_reference
from b12x.quantization import scales
from b12x.quantization.nvfp4 import reference as nvfp4_reference
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)
N, K = 256, 128


def test_example(target, rng, monkeypatch):
    """The example on the target, with smaller sizes; N(0, 1) activations and weights."""
    monkeypatch.setattr("b12x._runtime.freeze._state", (False, None))
    example, _ = EXAMPLES
    sizes = "m, n, k = 4096, 7168, 2048"
    assert sizes in example
    example = example.replace(sizes, f"m, n, k = 128, {N}, {K}").replace('"cuda"', repr(target.device))
    weight = rng.standard_normal((N, K), dtype=np.float32)
    g_x, g_weight = 500.0, 600.0
    packed, codes = nvfp4_reference.quantize(weight, g_weight)
    names = {
        "g_x": torch.tensor([g_x], device=target.device),
        "alpha": torch.tensor([1 / (g_x * g_weight)], device=target.device),
        "weight": torch.from_numpy(packed).unsqueeze(-1).to(target.device),
        "weight_scales": scales.swizzle(torch.from_numpy(codes)).to(target.device),
    }
    exec(example, names)
    assert b12x.kernel_resolution_frozen()
    x = nvfp4_reference.quantize(names["x"].float().cpu().numpy(), g_x)
    a, b = nvfp4_reference.dequantize(*x, g_x), nvfp4_reference.dequantize(packed, codes, g_weight)
    error = np.abs(names["out"][:, :, 0].double().cpu().numpy() - gemm_reference.matmul(a, b))
    assert (error <= gemm_reference.tolerance(a, b, 1.0, "bfloat16")).all()


def test_one_shot_example(target, rng):
    """The linears and ``bmm`` on values of -1, 0 and 1 and scales of 1: every step is exact."""
    _, example = EXAMPLES
    arrays = {
        "x": rng.integers(-1, 2, (5, K)),
        "values": rng.integers(-1, 2, (N, K)),
        "bias": rng.integers(-1, 2, N),
        "lhs": rng.integers(-1, 2, (2, 5, K)),
        "w": rng.integers(-1, 2, (2, K, N)),
    }
    names = {name: torch.tensor(array).bfloat16().to(target.device) for name, array in arrays.items()}
    names |= {name: names[name].to(torch.float8_e4m3fn) for name in ("values", "w")}
    names |= {
        "x_e4m3": names["x"].to(torch.float8_e4m3fn),
        "scales": torch.full((N, K // 32), 127, dtype=torch.uint8, device=target.device),
        "block_scales": torch.ones(N // 128, K // 128, device=target.device),
        "input_scale": torch.tensor([0.5], device=target.device),
        "weight_scale": torch.tensor([2.0], device=target.device),
        "w_scales": torch.full((2, K, N // 32), 127, dtype=torch.uint8, device=target.device),
        "out": torch.empty(2, 5, N, dtype=torch.bfloat16, device=target.device),
    }
    exec(example, names)
    y = arrays["x"] @ arrays["values"].T
    wanted = {"y": y + arrays["bias"], "y_block": y, "y_tensor": y, "out": arrays["lhs"] @ arrays["w"]}
    for name, array in wanted.items():
        np.testing.assert_array_equal(names[name].float().cpu().numpy(), array, err_msg=name)


def test_every_op_is_listed():
    assert set(re.findall(r"^\| `(\w+\.\w+)` \|", README, re.M)) == {op.qualname for op in b12x.list_ops()}


def test_every_environment_variable_is_listed():
    listed = set(re.findall(r"^\| `(B12X_\w+)` \|", README, re.M))
    build = {
        name
        for file in (ROOT / "build_tools").glob("*.py")
        for name in re.findall(r"\bB12X_BUILD_\w+", file.read_text())
    }
    assert listed == set(env.TABLE) | build


def test_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []
