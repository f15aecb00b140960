"""Each rank loads its part of a checkpoint, and asks for no more bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from configs.families.config import ModelConfig
from tests.support.api_groups import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder


def load_part(rank: int, folder: str, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    loader = engine.DistributedCheckpointLoader(folder, rank=rank, world_size=2, **options)
    tensors = loader.load()
    assert loader.report is not None
    return tensors, loader.report.asked_bytes, loader.report.checkpoint_bytes


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
def test_each_rank_loads_its_part(checkpoint: Path, mapped: bool, prefetch: bool) -> None:
    whole = load_file(checkpoint / "model-1.safetensors") | load_file(checkpoint / "model-2.safetensors")
    parts = [load_part(rank, str(checkpoint), use_memory_map=mapped, enable_prefetch=prefetch)[0] for rank in range(2)]
    for name, tensor in whole.items():
        found = [part[name] for part in parts]
        if tensor.dim() == 1:
            assert all(torch.equal(one, tensor) for one in found), name
        else:
            dimension = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat(found, dimension), tensor), name
            assert found[0].shape == found[1].shape


def test_a_rank_asks_for_half_of_the_bytes(checkpoint: Path) -> None:
    _, asked, stored = load_part(1, str(checkpoint))
    assert 0.5 <= asked / stored <= 0.55


def test_a_loader_converts_and_refuses(checkpoint: Path, tmp_path: Path) -> None:
    loader = engine.DistributedCheckpointLoader(checkpoint, 0, 1)
    assert {tensor.dtype for tensor in loader.load(torch.float32).values()} == {torch.float32}
    with pytest.raises(ValueError, match=r"3 ranks cannot share 4 attention heads .*; use one of: 1, 2, 4"):
        engine.DistributedCheckpointLoader(checkpoint, 0, 3)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        engine.DistributedCheckpointLoader(tmp_path)
    with pytest.raises(ValueError, match="rank: 4 is not one of world_size=2"):
        engine.DistributedCheckpointLoader(checkpoint, 4, 2)


def test_a_bias_after_the_sum_over_ranks_is_the_first_ranks(tmp_path: Path) -> None:
    config = {
        "model_type": "opt", "vocab_size": 16, "hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8, "word_embed_proj_dim": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = ModelConfig.parse(config).tensor_shapes()
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    first, second = (engine.DistributedCheckpointLoader(tmp_path, rank, 2).load() for rank in range(2))
    assert {name.rpartition("layers.0.")[2] for name in first.keys() - second.keys()} == {
        "self_attn.out_proj.bias",
        "fc2.bias",
    }
