"""The (N, K) of a model's linear layers, from its configuration, for tensor-parallel sizes 1 to 8."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TENSOR_PARALLEL = (1, 2, 4, 8)
#: K is padded to a multiple of this when a weight is prepared.
K_MULTIPLE = 128
#: Layers that the file names for a pair.
_NAMED = 3

#: Layer, N, K, and which of the two is cut by tensor parallelism (None: every rank holds the whole).
Layer = tuple[str, int, int, str | None]


def layers(config: Mapping[str, Any]) -> Iterator[Layer]:
    """The linear layers of a Hugging Face configuration as serving stacks run them.

    Of multimodal models those of the text. Projections of one input are one layer (q, k and v; gate and up; q_a and
    kv_a). Routed experts are no linear layers.
    """
    c = config.get("text_config", config)
    hidden = c["hidden_size"]
    if "q_lora_rank" in c and "kv_lora_rank" in c:
        yield from _mla(c, hidden)
    elif "o_lora_rank" in c:
        yield from _shared_kv(c, hidden)
    else:
        yield from _gqa(c, hidden)
    if "index_n_heads" in c:
        yield "indexer q", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"], None
        yield "indexer k", c["index_head_dim"], hidden, None
    if "linear_num_value_heads" in c:
        value = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        yield "linear attention in", 2 * key + 2 * value, hidden, "n"
        yield "linear attention out", hidden, value, "k"
    if "mamba_num_heads" in c:
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        yield "mamba in", 2 * inner + 2 * c["n_groups"] * c["ssm_state_size"] + c["mamba_num_heads"], hidden, "n"
        yield "mamba out", hidden, inner, "k"
    yield from _feed_forward(c, hidden)
    yield "lm_head", c["vocab_size"], hidden, "n"


def _mla(c: Mapping[str, Any], hidden: int) -> Iterator[Layer]:
    heads, rope, nope = c["num_attention_heads"], c["qk_rope_head_dim"], c["qk_nope_head_dim"]
    q_rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
    yield "q_a + kv_a", q_rank + kv_rank + rope, hidden, None
    yield "q_b", heads * (nope + rope), q_rank, "n"
    yield "kv_b", heads * (nope + c["v_head_dim"]), kv_rank, "n"
    yield "o", hidden, heads * c["v_head_dim"], "k"


def _shared_kv(c: Mapping[str, Any], hidden: int) -> Iterator[Layer]:
    """One latent key/value head, and an output projection in two steps."""
    yield "q_a + kv", c["q_lora_rank"] + c["head_dim"], hidden, None
    yield "q_b", c["num_attention_heads"] * c["head_dim"], c["q_lora_rank"], "n"
    yield "o_b", hidden, c["o_groups"] * c["o_lora_rank"], "k"


def _gqa(c: Mapping[str, Any], hidden: int) -> Iterator[Layer]:
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    size = c.get("head_dim") or hidden // heads
    gate = 2 if c.get("attn_output_gate") else 1
    yield "qkv", (gate * heads + 2 * groups) * size, hidden, "n"
    yield "o", hidden, heads * size, "k"


def _feed_forward(c: Mapping[str, Any], hidden: int) -> Iterator[Layer]:
    gated = 1 if c.get("mlp_hidden_act") == "relu2" else 2
    experts = next((c[n] for n in ("n_routed_experts", "num_experts", "num_local_experts") if c.get(n)), 0)
    if "intermediate_size" in c and (not experts or c.get("first_k_dense_replace")):
        yield "gate_up", gated * c["intermediate_size"], hidden, "n"
        yield "down", hidden, c["intermediate_size"], "k"
    shared = c.get("shared_expert_intermediate_size") or c.get("moe_shared_expert_intermediate_size")
    if shared:
        yield "shared expert gate_up", gated * shared, hidden, "n"
        yield "shared expert down", hidden, shared, "k"


def shards(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(layer and shard, N, K) of every rank's part; K padded as a weight is prepared."""
    for name, n, k, cut in layers(config):
        for size in TENSOR_PARALLEL if cut else (1,):
            rows, columns = (-(-n // size), k) if cut == "n" else (n, -(-k // size) if cut == "k" else k)
            label = name if size == 1 else f"{name} / tp{size}"
            yield label, rows, -(-columns // K_MULTIPLE) * K_MULTIPLE


def derive(folder: Path) -> dict[tuple[int, int], list[str]]:
    """(N, K) -> which layers have it, from every ``*_config.json`` of a folder."""
    found: dict[tuple[int, int], list[str]] = {}
    for file in sorted(folder.glob("*_config.json")):
        if file.name.endswith("_hf_quant_config.json"):
            continue
        model = file.name.removesuffix("_config.json").partition("--")[2]
        for label, n, k in shards(json.loads(file.read_text())):
            names = found.setdefault((n, k), [])
            if f"{model} {label}" not in names:
                names.append(f"{model} {label}")
    return dict(sorted(found.items()))


def to_toml(pairs: Mapping[tuple[int, int], list[str]]) -> str:
    """One line a pair, with the first few layers that have it."""
    lines = [
        "# (N, K) of linear layers of public models, whole and as tensor-parallel shards; K is padded to a multiple of",
        f"# {K_MULTIPLE}. Made by benchmarks/launch_model.py --configs FOLDER from the models' configurations.",
        "pairs = [",
    ]
    for (n, k), names in pairs.items():
        shown = names[:_NAMED] + ([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])
        lines.append(f'    {{ n = {n}, k = {k}, layers = "{"; ".join(shown)}" }},')
    return "\n".join([*lines, "]"]) + "\n"


def read(path: Path) -> dict[tuple[int, int], str]:
    """(N, K) -> the layers that have it."""
    with path.open("rb") as file:
        pairs = tomllib.load(file)["pairs"]
    return {(pair["n"], pair["k"]): pair["layers"] for pair in pairs}
