"""Layers that ranks share compute what whole ones do."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from engine.api.orchestrator import MultiGPUOrchestrator
from engine.api.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    create_tensor_parallel_config,
)
from tests.support.api_groups import CPU, free_port, in_group, ranks_without_group
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with ranks_without_group(2) as pool:
        yield pool


def whole_layer(output_size: int, input_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output_size, input_size, generator=generator), torch.randn(output_size, generator=generator)


def split_layers(orchestrator: MultiGPUOrchestrator, world: Any) -> dict[str, Any]:
    rank = orchestrator.get_rank()
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    weight, bias = whole_layer(12, 8)
    config = TensorParallelConfig(world_size=2, rank=rank, device=CPU, input_size=8, output_size=12)
    gathered = ColumnParallelLinear(config)
    gathered.load(weight, bias)
    config.gather_output = False
    own = ColumnParallelLinear(config)
    own.load(weight, bias)
    row = RowParallelLinear(config)
    row.load(weight, bias)
    torch.manual_seed(3)
    drawn = ColumnParallelLinear(TensorParallelConfig(2, rank, CPU, 8, 12, bias=False))
    shape = create_tensor_parallel_config(2, rank, CPU, hidden_size=8, intermediate_size=12, num_attention_heads=4)
    up, down = ColumnParallelLinear(shape.up), RowParallelLinear(shape.down)
    up.load(weight)
    down.load(whole_layer(8, 12)[0])
    return {
        "gathered": gathered(x),
        "own": own(x),
        "row": row(x),
        "row_of_part": row(x[..., 4 * rank : 4 * rank + 4]),
        "drawn": drawn(x),
        "pair": down(torch.relu(up(x))),
    }


def other_size(orchestrator: MultiGPUOrchestrator, world: Any) -> str:
    try:
        ColumnParallelLinear(TensorParallelConfig(4, 0, CPU, 8, 12))
    except ValueError as error:
        return str(error)
    return ""


def test_split_layers_compute_what_a_whole_one_does(two: RankPool) -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    weight, bias = whole_layer(12, 8)
    whole = functional.linear(x, weight, bias)
    torch.manual_seed(3)
    drawn = functional.linear(x, torch.empty(12, 8).normal_(0, 0.02))
    pair = functional.linear(torch.relu(functional.linear(x, weight)), whole_layer(8, 12)[0])
    for rank, got in enumerate(two.run(in_group, free_port(), "as chosen", split_layers)):
        torch.testing.assert_close(got["gathered"], whole)
        torch.testing.assert_close(got["own"], whole[..., 6 * rank : 6 * rank + 6])
        torch.testing.assert_close(got["row"], whole)
        torch.testing.assert_close(got["row_of_part"], whole)
        torch.testing.assert_close(got["drawn"], drawn)
        torch.testing.assert_close(got["pair"], pair)


def test_layers_ask_for_the_group_that_there_is(two: RankPool) -> None:
    for said in two.run(in_group, free_port(), "as chosen", other_size):
        assert re.match(r"world_size, rank: 4, 0 are not those of this process's group \(2, [01]\); initialize", said)
    layer = ColumnParallelLinear(TensorParallelConfig(1, 0, CPU, 4, 6, init_method="zeros"))
    assert layer(torch.ones(4)).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match=r"shapes are \(6, 4\) and \(6,\) for the bias, not \(4, 6\)"):
        layer.load(torch.ones(4, 6), torch.ones(6))
    with pytest.raises(ValueError, match="made with bias=True"):
        layer.load(torch.ones(6, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_keeps_its_values_when_the_tensors_it_was_loaded_from_change(kind: Any, dtype: torch.dtype) -> None:
    weight, bias = (tensor.to(dtype) for tensor in whole_layer(4, 6))
    layer, x = kind(TensorParallelConfig(1, 0, CPU, 6, 4), dtype=dtype), torch.ones(2, 6, dtype=dtype)
    layer.load(weight, bias)
    before = layer(x).clone()
    weight.zero_()  # such as a buffer into which the next layer is read
    bias.zero_()
    assert torch.equal(layer(x), before) and bool(before.any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank: 2 is not one of world_size=2"),
        ({"init_method": "magic"}, "init_method: 'magic' is not one of normal, xavier, kaiming, zeros"),
        ({"output_size": 0}, "input_size, output_size: 8, 0"),
    ],
)
def test_a_layers_config_is_checked(change: dict[str, Any], message: str) -> None:
    fields = {"world_size": 2, "rank": 0, "device": "cpu", "input_size": 8, "output_size": 12}
    assert TensorParallelConfig(**fields).device == CPU  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorParallelConfig(**(fields | change))


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="world_size: 5 does not divide output_size 12; use one of: 1, 2, 3, 4, 6, 12"):
        ColumnParallelLinear(TensorParallelConfig(5, 0, CPU, 8, 12))
    with pytest.raises(ValueError, match=r"3 ranks cannot share 16 attention heads .*; use one of: 1, 2, 4, 8, 16"):
        create_tensor_parallel_config(3, 0, CPU, 1024, 4096, 16)
    with pytest.raises(ValueError, match="num_attention_heads: 7 does not divide hidden_size 1024"):
        create_tensor_parallel_config(2, 0, CPU, 1024, 4096, 7)


def test_the_config_of_a_transformer_says_what_each_rank_has() -> None:
    config = create_tensor_parallel_config(
        world_size=4,
        rank=3,
        device=CPU,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    assert isinstance(config, TensorParallelConfig)
    assert (config.heads, config.kv_heads, config.feed_forward) == (range(12, 16), range(1, 2), range(3072, 4096))
    assert (config.head_dim, config.query.output_size, config.down.input_size) == (64, 1024, 4096)
    assert not config.up.gather_output and not config.bias


def test_integers_of_numpy_are_integers() -> None:
    """Sizes of an array or a table: the error was one of numpy's, on the truth of an empty array."""
    sizes = np.array([1, 0, 64, 256, 8])
    world_size, rank, hidden, feed_forward, heads = sizes
    config = create_tensor_parallel_config(world_size, rank, CPU, hidden, feed_forward, heads)
    assert config == create_tensor_parallel_config(1, 0, CPU, 64, 256, 8) and type(config.heads.stop) is int
    assert ColumnParallelLinear(config.up)(torch.ones(2, 64)).shape == (2, 256)
