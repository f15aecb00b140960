"""A shard on one rank: the step that is recorded on GPUs, smaller batches, choosing tokens, what is left behind."""

from typing import Any

import pytest
import torch

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.inference.graphs import static_decode
from engine.inference.model import Shard
from engine.inference.weights import shard_of
from engine.models.llama import Llama
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

pytestmark = pytest.mark.usefixtures("one_thread")

TINY: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 97,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = [
    {},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"model_type": "qwen3", "head_dim": 16},
]


def model_of(**changes: Any) -> Llama:
    torch.manual_seed(3)
    model = Llama(ModelConfig.parse(TINY | changes)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model


def shard_of_model(model: Llama) -> Shard:
    return shard_of(model.config, Grid(1, 1, 1, 0), Communicator((0,), 0), dict(model.named_parameters()))


def some_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(2))


def test_the_names_and_shapes_of_tensors_are_those_of_the_model() -> None:
    for changes in FAMILIES:
        model = model_of(**changes)
        assert model.config.tensor_shapes() == {name: tuple(one.shape) for name, one in model.named_parameters()}


@pytest.mark.parametrize("changes", FAMILIES)
@pytest.mark.parametrize("padding", [None, [0, 3]])
def test_the_step_for_recording_equals_the_ordinary_one(changes: dict[str, Any], padding: list[int] | None) -> None:
    shard, tokens = shard_of_model(model_of(**changes)), some_tokens(2, 12)
    filling = None if padding is None else torch.tensor(padding)
    plain, fixed = shard.new_cache(2, 16), shard.new_cache(2, 16)
    with torch.inference_mode():
        fixed.store.fill_(float("nan"))  # whatever lay in the memory must not come through the mask
        for _ in range(2):  # the second time with what the first has left
            plain.clear(), fixed.clear()
            shard.forward(tokens[:, :5], plain, filling)
            shard.forward(tokens[:, :5], fixed, filling)
            for place in range(5, 12):
                expected = shard.forward(tokens[:, place : place + 1], plain, filling)
                got = static_decode(shard, fixed, tokens[:, place : place + 1], filling)
                fixed.length += 1
                torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_fewer_rows_than_the_cache_has_and_a_cache_that_was_used() -> None:
    model = model_of()
    shard, tokens = shard_of_model(model), some_tokens(4, 9)
    cache = shard.new_cache(4, 9)
    shard.forward(tokens, cache)
    cache.clear()
    parts = [shard.forward(tokens[:2, :6], cache)]
    parts += [shard.forward(tokens[:2, place : place + 1], cache) for place in range(6, 9)]
    torch.testing.assert_close(shard.head(torch.cat(parts, 1)), model(tokens[:2]), rtol=0, atol=2e-4)


@torch.inference_mode()
def test_only_the_last_position_is_the_same_as_the_last_of_all() -> None:
    shard, tokens = shard_of_model(model_of()), some_tokens(2, 6)
    whole = shard.forward(tokens, shard.new_cache(2, 6))
    last = shard.forward(tokens, shard.new_cache(2, 6), last_only=True)
    assert torch.equal(last, whole[:, -1:])


def test_no_more_positions_than_the_cache_has() -> None:
    shard = shard_of_model(model_of())
    with pytest.raises(AssertionError, match="7 positions of 1 rows exceed the cache"):
        shard.forward(some_tokens(1, 7), shard.new_cache(1, 6))


class _Halves:
    """A communicator that knows what the other rank would say."""

    size, index, transport = 2, 0, "gloo"

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack((own, self.other))


@pytest.mark.parametrize(
    ("row", "token"), [([1, 5, 2, 5, 3], 1), ([1, 2, 0, 7, 7], 3), ([4, 4, 4, 4, 4], 0), ([0, 0, 1, 1, 0], 2)]
)
def test_of_equal_logits_on_two_ranks_the_lowest_token_wins(row: list[float], token: int) -> None:
    config = ModelConfig.parse(TINY | {"vocab_size": 5})
    left, right = torch.tensor([row[:3]]), torch.tensor([row[3:]])
    shards = []
    for rank in range(2):
        tensors = {name: torch.zeros(shape) for name, shape in config.tensor_shapes().items()}
        group: Any = _Halves(torch.empty(0))
        shards.append(shard_of(config, Grid(1, 2, 1, rank), group, tensors))
    values, places = right.max(-1)
    shards[0].group.other = torch.stack((values.double(), (places + 3).double()))
    assert shards[0].greedy(left).tolist() == [token] == torch.tensor([row]).argmax(-1).tolist()
    shards[0].group.other = torch.nn.functional.pad(right, (0, 1))
    assert shards[0].full_logits(left).tolist() == [row]
