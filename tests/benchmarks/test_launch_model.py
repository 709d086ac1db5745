"""Shapes from configurations, CTAs dealt to multiprocessors, and launches that are recorded without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import launch_model
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import recorder, shapes, work

from b12x._runtime import driver
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.recipes import RECIPES

GQA = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 32000,
}
MLA = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 512,
    "vocab_size": 32000,
}


def test_layers_of_a_dense_model(tmp_path: Path) -> None:
    found = {label: (n, k) for label, n, k in shapes.shards(GQA)}
    assert found["qkv"] == (1536, 1024)
    assert found["qkv / tp2"] == (768, 1024)
    assert found["down / tp2"] == (1024, 1536)  # 1440 columns, padded
    assert found["gate_up"] == (5760, 1024)
    assert found["lm_head / tp4"] == (8000, 1024)
    (tmp_path / "org--dense_config.json").write_text(json.dumps(GQA))
    (tmp_path / "org--dense_hf_quant_config.json").write_text("{}")
    pairs = shapes.derive(tmp_path)
    assert "dense qkv" in pairs[1536, 1024]
    (tmp_path / "shapes.toml").write_text(shapes.to_toml(pairs))
    assert list(shapes.read(tmp_path / "shapes.toml")) == list(pairs)


def test_layers_of_a_latent_attention_model_with_experts() -> None:
    found = {label: (n, k) for label, n, k in shapes.shards({"text_config": MLA})}
    assert found["q_a + kv_a"] == (832, 2048)
    assert found["q_b / tp4"] == (768, 512)
    assert found["o / tp8"] == (2048, 256)
    assert not any("gate_up" in label for label in found), "routed experts are no linear layers"


def test_the_committed_shapes() -> None:
    pairs = shapes.read(launch_model.SHAPES)
    assert len(pairs) >= 60
    assert all(k % shapes.K_MULTIPLE == 0 for _, k in pairs)
    named = " ".join(pairs.values())
    assert all(word in named for word in ("q_a", "kv_a", "q_b", "qkv", "gate_up", "down", "expert", "lm_head", "tp8"))


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=200),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 3),
    st.sampled_from(sorted(work.GPCS)),
)
def test_dealing_loses_nothing(sizes: list[int], cluster: int, slots: int, sm_count: int) -> None:
    per_cta = np.repeat(np.array(sizes, float), cluster)
    total = work.deal(per_cta, cluster, slots, sm_count)
    assert len(total) == sm_count
    assert total.sum() == pytest.approx(per_cta.sum())


def test_dealing_evenly() -> None:
    assert (work.deal(np.ones(340), 1, 2, 170) == 2).all()
    assert (work.deal(np.ones(340), 2, 2, 170) == 2).all()
    assert work.deal(np.ones(171), 1, 1, 170).max() == 2
    # Clusters of four leave two multiprocessors of a GPC of fourteen without work.
    assert (work.deal(np.ones(164), 4, 1, 170) == 0).sum() == 6
    # The long CTA's multiprocessor gets nothing else while the others go on.
    assert work.deal(np.array([9.0, *np.ones(47 * 3)]), 1, 1, 48).max() == 9


@pytest.mark.parametrize(
    ("role", "split"), [("decode", 1), ("decode", 4), ("middle", 1), ("middle", 2), ("prefill", 1)]
)
@pytest.mark.parametrize("n", [512, 712])
def test_the_work_of_a_launch(role: str, split: int, n: int) -> None:
    """A recorded launch is the one that the plan's table wants; its CTAs read every weight once for each row tile."""
    m, k = (8 if role == "decode" else 200), 1024
    caps = launch_model.plan_caps("nvfp4", n, k)
    table = [planner.Choice(planner.DECODE_M if role == "decode" else None, role, split)]
    if role == "decode":
        table.append(planner.Choice(None, "prefill", 1))
    specs = [spec for each in planner.roles(caps) for spec in each.candidates]
    problem = work.Problem("nvfp4", "bfloat16", m, n, k)
    with recorder.recording(specs, 84) as stand_in:
        plan = blockscaled.plan(caps, table=table)
        (launch,) = launch_model.launch(stand_in, plan, problem, launch_model.operand(problem, n))
    assert driver._driver() is not stand_in
    spec = planner.spec(caps, role)
    assert launch.spec == spec
    assert launch.cluster == (split, 1, 1)
    assert launch.block == spec.abi().launch.block
    assert launch.smem == spec.abi().launch.dynamic_smem
    done = work.MODELS[spec.kernel](launch, problem)
    assert len(done.per_cta) == launch.ctas
    assert (done.exchanged > 0) == (split > 1)
    stored = m * n * 2
    if role == "decode":
        groups = launch.ctas // split
        expected = problem.operand_bytes(n) + groups * problem.operand_bytes(m) + stored
    else:
        tiles = planner.tiles(spec, m, n, 1)
        codes = RECIPES["nvfp4"].row_bytes(k)
        row_tiles, column_tiles = -(-m // spec.tile_m), -(-n // spec.tile_n)
        steps = k // spec.tile_k
        expected = codes * (n * row_tiles + m * column_tiles) + tiles * steps * 2 * spec.scale_bytes + stored
    assert done.per_cta.sum() == pytest.approx(expected)


@settings(max_examples=6)
@given(
    st.sampled_from(sorted(launch_model.RECIPES)),
    st.integers(1, 9000),
    st.integers(1, 80),
    st.sampled_from(sorted(launch_model.CARDS)),
)
def test_every_m_launches_one_kernel_that_the_plan_lists(recipe: str, n: int, steps: int, sm_count: int) -> None:
    """M from 1 to 300: one launch each, of a spec among the plan's roles, with the split that the table says."""
    k = planner.K_QUANTUM * steps
    caps = launch_model.plan_caps(recipe, n, k)
    specs = [spec for role in planner.roles(caps) for spec in role.candidates]
    with recorder.recording(specs, sm_count) as stand_in:
        plan = blockscaled.plan(caps)
        rhs = launch_model.operand(work.Problem(recipe, "bfloat16", n, n, k), n)
        for m in range(1, 301):
            (launch,) = launch_model.launch(stand_in, plan, work.Problem(recipe, "bfloat16", m, n, k), rhs)
            choice = planner.choose(plan.table, m)
            assert launch.spec == planner.spec(caps, choice.role)
            assert launch.spec in specs
            assert launch.cluster == (choice.split, 1, 1)


def test_a_summary_of_everything() -> None:
    """Two pairs through all cards and rows: every case is judged, and the worst are explained."""
    pairs = {(512, 7168): "q_a", (4096, 2048): "o"}
    results, lacking = launch_model.measure(pairs, {})
    assert not lacking
    assert len(results) == 2 * len(launch_model.RECIPES) * len(launch_model.CARDS) * len(launch_model.ROWS)
    found = launch_model.summary(results, len(pairs))
    assert {(row["n"], row["k"]) for row in found["worst"]} == set(pairs)
    assert list(found["even_by_n"]) == ["1 to 512", "2049 to 4096"]
    assert all(row["why"] and row["largest_over_mean"] >= 0.999 for row in found["worst"])
    assert all(row["busiest_us"] >= row["floor_us"] * 0.999 for row in found["worst"])
    json.dumps(found)
