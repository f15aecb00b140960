"""Models whose training memory is measured: the product's Llama, and a GPT with LayerNorm, GELU and biases.

`save_model` leaves a folder that transformers loads.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.families.config import ModelConfig
from engine.models.llama import Llama
from engine.models.weights import write_weights


class GptBlock(nn.Module):
    """Attention with one product for queries, keys and values, and a feed-forward of two matrices."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.qkv(self.norm_1(hidden)).split(width, dim=2)
        queries, keys, values = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.down(functional.gelu(self.up(self.norm_2(hidden)), approximate="tanh"))
        return out


class Gpt(nn.Module):
    """GPT-2's architecture in PyTorch's own operators; the head is the embedding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["n_embd"]
        self.tokens = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["n_positions"], hidden)
        self.layers = nn.ModuleList(GptBlock(hidden, config["n_head"]) for _ in range(config["n_layer"]))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def build(config: dict[str, Any]) -> tuple[nn.Module, nn.ModuleList]:
    """A model of a config.json with small random weights, and its blocks."""
    model: nn.Module
    if config["model_type"] == "llama":
        model = Llama(ModelConfig.parse(config))
        blocks = model.model.layers
    else:
        model = Gpt(config)
        blocks = model.layers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model, blocks


def save_model(model: Llama, config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Leave a folder that transformers loads: config.json and model.safetensors in `dtype`."""
    tensors = {name: parameter.detach().to("cpu", dtype).contiguous() for name, parameter in model.named_parameters()}
    write_weights(tensors, config, folder, dtype)
