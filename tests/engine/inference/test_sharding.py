"""Which part of a model each rank holds: arithmetic over layouts, checked on the whole grid at once."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import pytest

from configs.common.execution import Layout, StageBalance
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.models.sharding import Share, check_degrees, working_degrees
from engine.models.slots import wanted_pieces
from engine.models.stages import stage_layers
from engine.parallel.grid import Grid


def config_of(**changes: Any) -> ModelConfig:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 96}
    return ModelConfig.parse(ARCHITECTURES["llama-1m"] | sizes | {"num_hidden_layers": 5} | changes)


def grids(tp: int, pp: int) -> Iterator[Grid]:
    return (Grid(1, tp, pp, rank) for rank in range(tp * pp))


@pytest.mark.parametrize(
    ("kv_heads", "degrees"),
    [(12, [1, 2, 3, 4, 6, 12]), (4, [1, 2, 4, 12]), (1, [1, 2, 3, 4, 6, 12]), (2, [1, 2, 4, 6, 12])],
)
def test_degrees_that_split_heads_evenly(kv_heads: int, degrees: list[int]) -> None:
    assert working_degrees(config_of(num_key_value_heads=kv_heads)) == degrees


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (5, 1, r"layout\.tp: 5 ranks cannot share 12 attention heads with 4 .* use one of: 1, 2, 4, 12"),
        (3, 1, "use one of: 1, 2, 4, 12"),  # divides the heads, but neither divides nor repeats those of keys
        (1, 6, r"layout\.pp: 6 stages need a layer each, but the model has 5; use 1 to 5"),
    ],
)
def test_degrees_that_do_not_work_name_those_that_do(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_degrees(config_of(), tp, pp)


def test_more_ranks_than_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"more than the words \(3\) .* use one of: 1, 2"):
        check_degrees(config_of(vocab_size=3), 4, 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_each_query_head_meets_its_own_key_head(tp: int) -> None:
    config = config_of()
    for index in range(tp):
        share = Share.of(config, tp, index)
        group = len(share.heads) // len(share.kv_heads)
        for place, head in enumerate(share.heads):
            assert share.kv_heads[place // group] == head // 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), list(product([1, 2, 4, 12], [1, 2, 5])))
def test_all_ranks_together_hold_all_of_every_tensor(tp: int, pp: int, tied: bool) -> None:
    config = config_of(
        tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, vocab_size=97, intermediate_size=50
    )
    shapes = config.tensor_shapes()
    seen: dict[str, list[tuple[range, range]]] = {name: [] for name in shapes}
    for grid in grids(tp, pp):
        for piece in wanted_pieces(config, grid):
            name = piece.name
            rows, columns = (shapes[name][0], shapes[name][1] if len(shapes[name]) == 2 else 1)
            seen[name].append((range(*(piece.rows or (0, rows))), range(*(piece.columns or (0, columns)))))
    for name, parts in seen.items():
        covered = {(row, column) for rows, columns in parts for row in rows for column in (columns[0], columns[-1])}
        assert {row for row, _ in covered} == set(range(shapes[name][0])), name
        elements = sum(len(rows) * len(columns) for rows, columns in parts)
        copies = elements / prod(shapes[name])
        if "norm" in name:
            assert copies == tp
        elif "k_proj" in name or "v_proj" in name:
            assert copies == max(1, tp // config.kv_heads)
        elif tied and "embed" in name:
            assert copies == (1 if pp == 1 else 2)
        else:
            assert copies == 1, name  # the biases of projections split by columns too: they are added once


def test_shares_of_words_and_columns_differ_by_one_at_most() -> None:
    config = config_of(vocab_size=97, intermediate_size=50)
    shares = [Share.of(config, 4, index) for index in range(4)]
    assert [len(share.vocabulary) for share in shares] == [25, 24, 24, 24]
    assert [len(share.feed_forward) for share in shares] == [13, 13, 12, 12]


def layers_of(config: ModelConfig, pp: int) -> list[int]:
    return [len(layers) for layers in stage_layers(config, pp)]


def test_stages_hold_consecutive_layers_each_once() -> None:
    config = config_of(num_hidden_layers=7)
    for pp in range(1, 8):
        stages = stage_layers(config, pp)
        assert [layer for layers in stages for layer in layers] == list(range(7))
        assert all(stages)


def test_tables_count_for_the_first_and_the_last_stage() -> None:
    # A layer of this size weighs as much as 1376 words.
    small, large = config_of(num_hidden_layers=8, vocab_size=64), config_of(num_hidden_layers=8, vocab_size=2752)
    assert layers_of(small, 2) == layers_of(large, 2) == [4, 4]
    assert layers_of(small, 4) == [2, 2, 2, 2]
    assert layers_of(large, 4) == [1, 3, 3, 1]
    assert layers_of(config_of(num_hidden_layers=8, vocab_size=100_000), 4) == [1, 3, 3, 1]


def test_ranks_load_the_layers_of_their_balance() -> None:
    config = config_of(num_hidden_layers=8, vocab_size=2752)
    for balance, layers in (("memory", [4, 4]), ("speed", [5, 3])):
        layout = Layout.model_validate({"pp": 2, "stage_balance": balance})
        wanted = [[piece.name for piece in wanted_pieces(config, Grid.of(layout, rank))] for rank in range(2)]
        assert [len({name.split(".")[2] for name in names if ".layers." in name}) for names in wanted] == layers


@pytest.mark.parametrize("balance", ["memory", "speed"])
def test_no_other_split_has_a_lighter_fullest_stage(balance: StageBalance) -> None:
    for words, layers in product([64, 1000, 3000, 9000], [6, 9]):
        config = config_of(num_hidden_layers=layers, vocab_size=words)
        shapes = config.tensor_shapes()
        layer = sum(prod(shape) for name, shape in shapes.items() if ".layers.0." in name)

        def fullest(counts: tuple[int, ...], layer: int = layer, table: int = words * 96) -> int:
            tables = (0, len(counts) - 1) if balance == "memory" else (len(counts) - 1,)
            return max(count * layer + (table if place in tables else 0) for place, count in enumerate(counts))

        for pp in (2, 3):
            splits = [split for split in product(range(1, layers), repeat=pp) if sum(split) == layers]
            found = tuple(len(layers) for layers in stage_layers(config, pp, balance))
            assert fullest(found) == min(map(fullest, splits))
