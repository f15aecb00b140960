"""Every family that is not Llama's, on up to four ranks, against transformers on one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    OPTConfig,
    Phi3Config,
    T5Config,
)

from engine.inference.graphs import static_decode
from engine.inference.weights import read_shard
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from tests.support.answers.sharded_runs import Run, encode, forward, manifest_of, translate
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

# Odd vocabularies and feed-forwards, so that shares differ in size; wide weights, which do not hide mistakes. Heads of
# 8 or 12 elements lie in wider rows of the cache.
_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.3}
_SIZES = _TOKENS | {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2 = _TOKENS | {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 50}
_OPT = _TOKENS | {
    "vocab_size": 97,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DECODERS: dict[str, Any] = {
    "gpt2": GPT2Config(**_GPT2),
    "gpt2-small-heads": GPT2Config(
        **_GPT2 | {"n_embd": 48, "activation_function": "gelu", "tie_word_embeddings": False}
    ),
    "opt": OPTConfig(**_OPT),
    "opt-plain": OPTConfig(**_OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    "gpt_neox": GPTNeoXConfig(**_SIZES, rope_parameters=_ROPE | {"partial_rotary_factor": 0.25}),
    "gpt_neox-behind": GPTNeoXConfig(
        **_SIZES, use_parallel_residual=False, hidden_act="gelu_new", rope_parameters=_ROPE
    ),
    "gemma": GemmaConfig(**_SIZES, num_key_value_heads=2, head_dim=32),
    "gemma-one-key-head": GemmaConfig(**_SIZES, num_key_value_heads=1, head_dim=16, hidden_activation="gelu"),
    "phi3": Phi3Config(**_SIZES, num_key_value_heads=2, sliding_window=6, rope_parameters=_ROPE),
    "phi3-partial": Phi3Config(
        **_SIZES,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    ),
}
_ENCODERS: dict[str, Any] = {
    "bert": BertConfig(**_SIZES),
    "bert-small-heads": BertConfig(**_SIZES | {"hidden_size": 32}, hidden_act="gelu_new", type_vocab_size=1),
}
_T5 = {
    "vocab_size": 97,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 50,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_SEQ2SEQ: dict[str, Any] = {
    "t5": T5Config(**_T5),
    "t5-gated": T5Config(
        **_T5 | {"d_kv": 8, "num_decoder_layers": 2}, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
}
# On four ranks each: replicas do the same.
_LAYOUTS = {"tp2": (2, 2, 1), "pp2": (2, 1, 2), "tp2-pp2": (1, 2, 2), "one": (4, 1, 1)}
_PADDING = [4, 0, 7]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model as transformers saves it, with biases and norms that do something."""
    classes = {AutoModelForCausalLM: _DECODERS, AutoModel: _ENCODERS, AutoModelForSeq2SeqLM: _SEQ2SEQ}
    found = {}
    for maker, configs in classes.items():
        for name, config in configs.items():
            torch.manual_seed(1)
            made = maker.from_config(config).eval()
            with torch.no_grad():
                for parameter in made.parameters():
                    spread = 0.1 if parameter.dim() == 1 else 0.05
                    parameter.add_(torch.randn_like(parameter) * spread)
            found[name] = tmp_path_factory.mktemp("models") / name
            made.save_pretrained(found[name])
    return found


def run_of(layout: str, folder: Path, **changes: Any) -> Run:
    tokens = torch.randint(1, 97, (3, 12), generator=torch.Generator().manual_seed(2)).tolist()
    # A prompt, a piece of several tokens, then single tokens: the cache is used in each way.
    given: dict[str, Any] = {"tokens": tokens, "pieces": (5, 4), "new_tokens": 6} | changes
    return Run(*_LAYOUTS[layout], str(folder), **given)


def spoken(answers: list[Any]) -> dict[str, Any]:
    """What the ranks of last stages found, which must be the same bits on all of them."""
    found = [answer for answer in answers if answer is not None]
    for answer in found:
        assert all(np.array_equal(answer[name], found[0][name]) for name in found[0] if name != "speaks")
    answer: dict[str, Any] = found[0]
    return answer


def peer_of(run: Run, maker: Any, dtype: torch.dtype = torch.float32) -> Any:
    return maker.from_pretrained(run.folder, local_files_only=True, dtype=dtype).eval()


def seen_of(run: Run) -> torch.Tensor:
    padding = torch.zeros(len(run.tokens), dtype=torch.int64) if run.padding is None else torch.tensor(run.padding)
    return (torch.arange(len(run.tokens[0]))[None] >= padding[:, None]).long()


def assert_close(got: np.ndarray, wanted: np.ndarray, allowed: float = 1e-5) -> None:
    assert wanted.std() > 0.1
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() / np.abs(wanted).max() <= allowed


def assert_rows_close(got: np.ndarray, wanted: np.ndarray, padding: list[int] | None) -> None:
    """What comes of filling means nothing."""
    for row, filling in enumerate(padding or [0] * len(got)):
        assert_close(got[row, filling:], wanted[row, filling:])


@torch.inference_mode()
def expected(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the tokens and greedy ones after them, from transformers."""
    peer, seen = peer_of(run, AutoModelForCausalLM), seen_of(run)
    tokens, positions = torch.tensor(run.tokens), (seen.cumsum(-1) - 1).clamp(min=0)
    logits = peer(input_ids=tokens, attention_mask=seen, position_ids=positions).logits
    new = peer.generate(
        input_ids=tokens, attention_mask=seen, do_sample=False, max_new_tokens=run.new_tokens, pad_token_id=0
    )
    return logits.numpy(), new[:, tokens.shape[1] :].numpy()


@pytest.mark.parametrize("layout", list(_LAYOUTS))
@pytest.mark.parametrize("name", list(_DECODERS))
def test_logits_and_tokens_are_those_of_transformers(
    pool: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    for padding in (None, _PADDING):
        run = run_of(layout, folders[name], padding=padding)
        answer = spoken(pool.run(forward, run))
        logits, tokens = expected(run)
        assert_rows_close(answer["logits"], logits, padding)
        assert np.array_equal(answer["tokens"], tokens)


@torch.inference_mode()
@pytest.mark.parametrize("layout", list(_LAYOUTS))
@pytest.mark.parametrize("name", list(_ENCODERS))
def test_states_of_encoders_are_those_of_transformers(
    pool: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    for padding in (None, _PADDING):
        run = run_of(layout, folders[name], padding=padding)
        answer = spoken(pool.run(encode, run))
        seen = seen_of(run)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        peer = peer_of(run, AutoModel)
        states = peer(input_ids=torch.tensor(run.tokens), attention_mask=seen, position_ids=positions)
        assert_rows_close(answer["states"], states.last_hidden_state.numpy(), padding)


@torch.inference_mode()
@pytest.mark.parametrize("layout", list(_LAYOUTS))
@pytest.mark.parametrize("name", list(_SEQ2SEQ))
def test_encoder_decoders_are_those_of_transformers(
    pool: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    peer = None
    for padding in (None, _PADDING):
        run = run_of(layout, folders[name], padding=padding)
        forced = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(5))
        forced[:, 0] = 0
        answer = spoken(pool.run(translate, run, forced.tolist()))
        peer = peer or peer_of(run, AutoModelForSeq2SeqLM)
        tokens, seen = torch.tensor(run.tokens), seen_of(run)
        wanted = peer(input_ids=tokens, attention_mask=seen, decoder_input_ids=forced)
        assert_rows_close(answer["states"], wanted.encoder_last_hidden_state.numpy(), padding)
        assert_close(answer["logits"], wanted.logits.numpy())
        new = peer.generate(input_ids=tokens, attention_mask=seen, do_sample=False, max_new_tokens=6, min_new_tokens=6)
        assert np.array_equal(answer["tokens"], new[:, 1:].numpy())


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["one", "tp2"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "gemma", "phi3"])
def test_decoders_in_bfloat16_are_as_near_to_float32_as_transformers_is(
    pool: RankPool, folders: dict[str, Path], name: str, layout: str
) -> None:
    run = run_of(layout, folders[name], dtype="bfloat16", new_tokens=0)
    got = spoken(pool.run(forward, run))["logits"]
    tokens = torch.tensor(run.tokens)
    exact, rounded = (
        peer_of(run, AutoModelForCausalLM, dtype)(tokens).logits.float() for dtype in (torch.float32, torch.bfloat16)
    )
    error = np.sqrt(np.mean((got - exact.numpy()) ** 2))
    assert 0 < error <= 1.3 * (rounded - exact).pow(2).mean().sqrt().item()


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_the_others_in_bfloat16_too(pool: RankPool, folders: dict[str, Path], layout: str) -> None:
    run = run_of(layout, folders["bert"], dtype="bfloat16")
    tokens = torch.tensor(run.tokens)
    got = spoken(pool.run(encode, run))["states"]
    exact, rounded = (
        peer_of(run, AutoModel, dtype)(tokens).last_hidden_state.float() for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < np.sqrt(np.mean((got - exact.numpy()) ** 2)) <= 1.3 * (rounded - exact).pow(2).mean().sqrt().item()
    run = run_of(layout, folders["t5"], dtype="bfloat16")
    got = spoken(pool.run(translate, run, run.tokens))["logits"]
    exact, rounded = (
        peer_of(run, AutoModelForSeq2SeqLM, dtype)(tokens, decoder_input_ids=tokens).logits.float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < np.sqrt(np.mean((got - exact.numpy()) ** 2)) <= 1.3 * (rounded - exact).pow(2).mean().sqrt().item()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "gemma", "phi3", "t5"])
@pytest.mark.parametrize("padding", [None, _PADDING])
def test_the_step_for_recording_on_a_gpu_equals_the_ordinary_one(
    folders: dict[str, Path], name: str, padding: list[int] | None
) -> None:
    manifest, one = manifest_of(str(folders[name])), Grid(1, 1, 1, 0)
    shards = read_shard(manifest, one, Communicator((0,), 0), torch.float32, torch.device("cpu")).shards
    run = run_of("one", folders[name])
    tokens, filling = torch.tensor(run.tokens), None if padding is None else torch.tensor(padding)
    shard = shards["decoder"]
    plain, fixed = shard.new_cache(3, 16), shard.new_cache(3, 16)
    fixed.store.fill_(float("nan"))  # whatever lay in the memory must not come through the mask
    for length in (12, 9):  # a second request, with another source
        plain.clear(), fixed.clear()
        if "encoder" in shards:
            states = shards["encoder"].encode(tokens[:, :length], filling)
            plain.set_source(states, filling), fixed.set_source(states, filling)
        own = None if "encoder" in shards else filling
        shard.forward(tokens[:, :8], plain, own), shard.forward(tokens[:, :8], fixed, own)
        for place in range(8, 12):
            expected = shard.forward(tokens[:, place : place + 1], plain, own)
            got = static_decode(shard, fixed, tokens[:, place : place + 1], own)
            fixed.length += 1
            torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)


def test_more_tokens_than_learned_positions_are_refused(pool: RankPool, folders: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match="70 tokens of a prompt and its answer are more than the 64 positions"):
        pool.run(forward, run_of("one", folders["gpt2"], new_tokens=58))
