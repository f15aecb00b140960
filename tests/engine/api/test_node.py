"""The few collectives of a script, and what the environment says of its place: alone and within a job."""

from typing import Any

import pytest
import torch

from engine.api import node
from tests.support.rank_pool import RankPool


def node_functions(rank: int) -> dict[str, Any]:
    """What a script sees of them within a job of four."""
    node.barrier()
    own = torch.tensor([float(rank), 10.0 * rank])
    ways = {op: node.all_reduce_tensor(own, op=op).tolist() for op in ("mean", "sum", "min", "max", "product")}
    assert own.tolist() == [rank, 10.0 * rank]
    whole = node.all_reduce_tensor(torch.tensor(rank)).item()
    gathered = [tensor.tolist() for tensor in node.gather_tensors(own)]
    info = node.get_node_info()
    return ways | {"whole": whole, "gathered": gathered, "master": node.is_master_process(), "size": info["world_size"]}


def means(rank: int) -> dict[str, Any]:
    """Means of values whose sum over four ranks is too large for their type, and of one matrix in two memory orders."""
    values = {
        "bool": torch.tensor([True, rank > 0]),
        "uint8": torch.tensor([200, 100 + rank], dtype=torch.uint8),
        "int16": torch.tensor([30_000], dtype=torch.int16),
        "int32": torch.tensor([2**31 - 1], dtype=torch.int32),
        "float16": torch.tensor([40_000.0], dtype=torch.float16),
    }
    found = {name: node.all_reduce_tensor(value) for name, value in values.items()}
    square = torch.arange(4.0).reshape(2, 2)
    stored = square.t().contiguous().t() if rank else square
    matrices = {op: node.all_reduce_tensor(stored, op=op).tolist() for op in ("mean", "max")}
    return {name: mean.tolist() for name, mean in found.items()} | matrices | {"kept": found["float16"].dtype}


NODE_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE",
)  # fmt: skip


def test_node_functions_within_a_job() -> None:
    with RankPool(4) as pool:
        answers = pool.run(node_functions)
    for rank, found in enumerate(answers):
        assert found == {
            "mean": [1.5, 15.0], "sum": [6.0, 60.0], "min": [0.0, 0.0], "max": [3.0, 30.0], "product": [0.0, 0.0],
            "whole": 1.5, "gathered": [[float(peer), 10.0 * peer] for peer in range(4)], "master": rank == 0, "size": 4,
        }  # fmt: skip


def test_a_mean_is_of_the_values_whatever_their_type_and_order_in_memory() -> None:
    with RankPool(4) as pool:
        answers = pool.run(means)
    for found in answers:
        assert found == {
            "bool": [1.0, 0.75], "uint8": [200.0, 101.5], "int16": [30_000.0], "int32": [float(2**31)],
            "float16": [40_000.0], "kept": torch.float16, "mean": [[0.0, 1.0], [2.0, 3.0]],
            "max": [[0.0, 1.0], [2.0, 3.0]],
        }  # fmt: skip


def test_node_functions_of_a_process_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    node.barrier()
    own = torch.tensor([2.0])
    assert node.all_reduce_tensor(own).tolist() == node.all_reduce_tensor(own, op="sum").tolist() == [2.0]
    assert [tensor.tolist() for tensor in node.gather_tensors(own)] == [[2.0]]
    assert node.is_master_node() and node.is_master_process()
    with pytest.raises(ValueError, match="'median' is not one of mean, sum"):
        node.all_reduce_tensor(own, op="median")
    documented = {
        "master_addr": "localhost", "master_port": 29500, "nnodes": 2, "nproc_per_node": 2, "node_rank": 0,
        "local_rank": 0, "world_size": 4,
    }  # fmt: skip
    assert node.get_node_info().items() >= documented.items()


def test_node_functions_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("NNODES", "3"), ("NPROC_PER_NODE", "4"), ("NODE_RANK", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    info = node.get_node_info()
    assert (info["world_size"], info["rank"], info["is_master_node"]) == (12, 9, False)
    monkeypatch.setenv("WORLD_SIZE", "11")
    monkeypatch.setenv("RANK", "7")
    info = node.get_node_info()
    assert (info["world_size"], info["rank"], info["is_master_process"]) == (11, 7, False)
    monkeypatch.setenv("NNODES", "many")
    with pytest.raises(ValueError, match="NNODES='many' is not a whole number"):
        node.get_node_info()
