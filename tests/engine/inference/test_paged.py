"""A paged cache gives each sequence the bits that it has alone, whatever else is in the step and however it is cut."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from engine.inference.model import Shard
from engine.inference.paged import PagedCache, PagedSizes
from engine.inference.weights import read_shard
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

_WORDS = 61
_WILD = {"vocab_size": _WORDS, "initializer_range": 0.3, "init_std": 0.3}
_NAMES = ["llama-1m", "mistral-1m", "qwen2-1m", "qwen3-1m", "gpt2-1m", "opt-1m", "gpt-neox-1m", "gemma-1m", "phi3-1m"]
_LENGTHS = (37, 5, 70, 16, 33)


def config_of(name: str) -> dict[str, Any]:
    """A family's smallest model; where it has a window, one that is crossed."""
    config = ARCHITECTURES[name] | _WILD
    return config | {"sliding_window": 9} if config.get("sliding_window") else config


@pytest.fixture(autouse=True)
def _inference_mode(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def shard_of(name: str, dtype: torch.dtype) -> Shard:
    manifest = ModelManifest(
        identity="synthetic:tiny@7", source="synthetic", folder="", files={}, config=config_of(name)
    )
    return read_shard(manifest, Grid(1, 1, 1, 0), Communicator((0,), 0), dtype, torch.device("cpu")).shard


def made_sequences() -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randint(0, _WORDS, (length,), generator=made) for length in _LENGTHS]


def token_by_token(shard: Shard, tokens: Tensor) -> Tensor:
    """The hidden states of one sequence through the contiguous cache, one position a pass: [length, hidden]."""
    cache = shard.new_cache(1, len(tokens))
    return torch.cat([shard.forward(token.view(1, 1), cache)[0] for token in tokens])


def new_cache(shard: Shard, block: int = 16) -> PagedCache:
    return shard.new_paged_cache(PagedSizes(blocks=40, block=block, sequences=8, max_length=80, max_tokens=64))


def in_company(shard: Shard, cache: PagedCache, sequences: list[Tensor], seed: int) -> list[Tensor]:
    """The hidden states of all sequences, in steps of random pieces of some of them, in blocks of random numbers."""
    chance = random.Random(seed)
    free = list(range(cache.sizes.blocks))
    chance.shuffle(free)
    slots = chance.sample(range(cache.sizes.sequences), len(sequences))
    done, found = [0] * len(sequences), [[] for _ in sequences]
    while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
        pieces = []
        for place, tokens in enumerate(sequences):
            length = min(chance.choice([0, 1, 1, 3, 12]), len(tokens) - done[place])
            if length:
                for position in range(done[place], done[place] + length):
                    if position % cache.sizes.block == 0:
                        numbers = [torch.tensor([one], dtype=torch.int32) for one in
                                   (slots[place], position // cache.sizes.block, free.pop())]  # fmt: skip
                        cache.assign(*numbers)
                pieces.append((place, done[place], length))
        if not pieces:
            continue
        chance.shuffle(pieces)
        rows = torch.tensor([slots[place] for place, _, length in pieces for _ in range(length)], dtype=torch.int32)
        positions = torch.cat([torch.arange(first, first + length) for _, first, length in pieces]).int()
        tokens = torch.cat([sequences[place][first : first + length] for place, first, length in pieces])
        hidden = shard.compute(tokens[None], cache.step(rows, positions), last_only=False)[0]
        for (place, _, length), part in zip(pieces, hidden.split([length for *_, length in pieces]), strict=True):
            found[place].append(part)
            done[place] += length
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _NAMES)
def test_company_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    shard, sequences = shard_of(name, dtype), made_sequences()
    cache = new_cache(shard)
    if not cache.batch_invariant:
        pytest.skip("no kernel of ours here")
    alone = [token_by_token(shard, tokens) for tokens in sequences]
    for seed in range(2):
        together = in_company(shard, cache, sequences, seed)
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    shard, sequences = shard_of("llama-1m", torch.float32), made_sequences()
    alone = [token_by_token(shard, tokens) for tokens in sequences]
    torch.set_num_threads(threads)
    together = in_company(shard, new_cache(shard), sequences, 7)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", _NAMES)
def test_without_our_kernels_the_results_are_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", "off")
    shard, sequences = shard_of(name, torch.float32), made_sequences()
    cache = new_cache(shard)
    assert not cache.batch_invariant
    for one, other in zip([token_by_token(shard, tokens) for tokens in sequences],
                          in_company(shard, cache, sequences, 1), strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_block_of_another_size() -> None:
    shard, sequences = shard_of("llama-1m", torch.float32), made_sequences()
    cache = shard.new_paged_cache(PagedSizes(blocks=90, block=5, sequences=8, max_length=80, max_tokens=64))
    for one, other in zip([token_by_token(shard, tokens) for tokens in sequences],
                          in_company(shard, cache, sequences, 1), strict=True):  # fmt: skip
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "word"), [("t5-1m", "decoders"), ("bert-1m", "decoders")])
def test_only_decoders_have_one(name: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        shard_of(name, torch.float32).new_paged_cache(PagedSizes(4, 16, 1, 32, 16))


def test_learned_positions_are_a_limit() -> None:
    shard = shard_of("gpt2-1m", torch.float32)
    limit = ModelConfig.parse(config_of("gpt2-1m")).max_positions
    with pytest.raises(ValueError, match=str(limit)):
        shard.new_paged_cache(PagedSizes(4, 16, 1, limit + 16, 16))
