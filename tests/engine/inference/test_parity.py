"""Shards of tiny models on up to four ranks, against transformers on one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from tests.support.answers.sharded_runs import Run, forward
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

# An odd vocabulary and feed-forward, so that shares differ in size. Wide weights: a random model that always says
# the same would hide mistakes.
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": _LLAMA3},
    ),
    "llama-mqa-tied": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 6, "head_dim": 32}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
}
# On four ranks each: replicas do the same.
_LAYOUTS = {"tp2": (2, 2, 1), "tp4": (1, 4, 1), "pp2": (2, 1, 2), "tp2-pp2": (1, 2, 2), "one": (4, 1, 1)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model as transformers saves it."""
    found = {}
    for name, (config, model, changes) in _MODELS.items():
        torch.manual_seed(1)
        made = model(config(**(_SIZES | changes))).eval()
        with torch.no_grad():
            for parameter_name, parameter in made.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        found[name] = tmp_path_factory.mktemp("models") / name
        made.save_pretrained(found[name])
    return found


def run_of(layout: str, folder: Path, **changes: Any) -> Run:
    tokens = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(2)).tolist()
    # A prompt, a piece of several tokens, then single tokens: the cache is used in each way.
    given: dict[str, Any] = {"tokens": tokens, "pieces": (5, 4), "new_tokens": 6} | changes
    return Run(*_LAYOUTS[layout], str(folder), **given)


def spoken(answers: list[Any]) -> dict[str, Any]:
    """What the ranks of last stages found, which must be the same bits on all of them."""
    found = [answer for answer in answers if answer is not None]
    for answer in found:
        assert np.array_equal(answer["logits"], found[0]["logits"])
        assert np.array_equal(answer["tokens"], found[0]["tokens"])
    answer: dict[str, Any] = found[0]
    return answer


@torch.inference_mode()
def expected(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the tokens and greedy ones after them, from transformers."""
    peer = AutoModelForCausalLM.from_pretrained(run.folder, local_files_only=True, dtype=torch.float32).eval()
    tokens = torch.tensor(run.tokens)
    padding = torch.zeros(len(tokens), dtype=torch.int64) if run.padding is None else torch.tensor(run.padding)
    seen = (torch.arange(tokens.shape[1])[None] >= padding[:, None]).long()
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    logits = peer(input_ids=tokens, attention_mask=seen, position_ids=positions).logits
    new = peer.generate(
        input_ids=tokens, attention_mask=seen, do_sample=False, max_new_tokens=run.new_tokens, pad_token_id=0
    )
    return logits.numpy(), new[:, tokens.shape[1] :].numpy()


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    assert wanted.std() > 0.1
    assert np.abs(got - wanted).max() / np.abs(wanted).max() <= 1e-5


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2-pp2"])
@pytest.mark.parametrize("name", list(_MODELS))
def test_logits_and_tokens_are_those_of_transformers(
    pool: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    run = run_of(layout, folders[name])
    answer = spoken(pool.run(forward, run))
    logits, tokens = expected(run)
    assert_close(answer["logits"], logits)
    assert np.array_equal(answer["tokens"], tokens)


@pytest.mark.parametrize("name", ["llama", "llama-mqa-tied", "mistral"])
def test_more_ranks_than_key_and_value_heads(pool: RankPool, folders: dict[str, Path], name: str) -> None:
    run = run_of("tp4", folders[name])
    answer = spoken(pool.run(forward, run))
    logits, tokens = expected(run)
    assert_close(answer["logits"], logits)
    assert np.array_equal(answer["tokens"], tokens)


@pytest.mark.parametrize("layout", ["one", "tp2-pp2"])
@pytest.mark.parametrize("name", list(_MODELS))
def test_filling_at_the_left_changes_nothing(pool: RankPool, folders: dict[str, Path], name: str, layout: str) -> None:
    padding = [4, 0, 7]
    run = run_of(layout, folders[name], padding=padding)
    answer = spoken(pool.run(forward, run))
    logits, tokens = expected(run)
    for row, filling in enumerate(padding):
        assert_close(answer["logits"][row, filling:], logits[row, filling:])
    assert np.array_equal(answer["tokens"], tokens)


@pytest.mark.parametrize("balance", ["memory", "speed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_give_the_same_bits_as_one_rank(
    pool: RankPool, folders: dict[str, Path], dtype: str, balance: str
) -> None:
    for name in ("llama", "qwen2"):
        one = spoken(pool.run(forward, run_of("one", folders[name], dtype=dtype)))
        two = spoken(pool.run(forward, run_of("pp2", folders[name], dtype=dtype, stage_balance=balance)))
        assert np.array_equal(one["logits"], two["logits"])
        assert np.array_equal(one["tokens"], two["tokens"])


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    pool: RankPool, folders: dict[str, Path], layout: str
) -> None:
    run = run_of(layout, folders["qwen3"], dtype="bfloat16", new_tokens=0)
    got = spoken(pool.run(forward, run))["logits"]
    tokens = torch.tensor(run.tokens)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(run.folder, local_files_only=True, dtype=dtype)(tokens).logits.float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    error = np.sqrt(np.mean((got - exact.numpy()) ** 2))
    assert 0 < error <= 1.3 * (rounded - exact).pow(2).mean().sqrt().item()
