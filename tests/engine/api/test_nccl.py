"""Batched collectives of the Python surface, between real ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.api.nccl import NCCLCommunicator
from engine.api.orchestrator import MultiGPUOrchestrator
from engine.api.tensor_parallel import RowParallelLinear, TensorParallelConfig
from tests.support.api_groups import free_port, in_group, ranks_without_group
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with ranks_without_group(2) as pool:
        yield pool


def batch_of_sums(orchestrator: MultiGPUOrchestrator, world: Any) -> dict[str, Any]:
    communicator = NCCLCommunicator(world)
    events: list[str] = []
    world.listener = lambda event: events.append(event.operation)
    rank = communicator.rank
    tensors = [torch.full((size,), float(rank + size)) for size in (3, 5, 7)]
    tensors.append(torch.full((2, 4), rank + 1, dtype=torch.int64).t())
    sent = torch.full((4,), float(rank))
    with communicator.batch_operations() as batch:
        for tensor in tensors:
            batch.all_reduce(tensor)
        batch.broadcast(sent, source=1)
        gathered = [communicator.all_gather(torch.full((2, 3), 10.0 * rank + number)) for number in range(3)]
        before = (events.copy(), tensors[0].tolist())
    inside = events.copy()
    one_by_one = NCCLCommunicator(world)
    for size in (3, 5, 7):
        one_by_one.all_reduce(torch.ones(size))
    return {
        "before": before,
        "events": inside,
        "collectives": (communicator.collectives, one_by_one.collectives),
        "sums": [tensor.tolist() for tensor in tensors],
        "sent": sent.tolist(),
        "gathered": [tensor.tolist() for tensor in gathered],
        "transport": communicator.transport,
    }


def batches_that_fail(orchestrator: MultiGPUOrchestrator, world: Any) -> list[str]:
    communicator = NCCLCommunicator(world)
    said = []
    tensor = torch.ones(2)
    for wrong in ("nested", "twice", "own"):
        try:
            with communicator.batch_operations():
                communicator.all_reduce(tensor)
                if wrong == "nested":
                    with communicator.batch_operations():
                        pass
                elif wrong == "twice":
                    communicator.all_reduce(tensor)
                else:
                    raise KeyError("mine")
        except (ValueError, KeyError) as error:
            said.append(str(error))
    return [*said, str(tensor.tolist()), str(communicator.collectives)]


def parameters_from_the_first(orchestrator: MultiGPUOrchestrator, world: Any) -> list[list[float]]:
    communicator = NCCLCommunicator(world)
    model = torch.nn.Linear(2, 1)
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number + 10.0 * communicator.rank)
    with communicator.batch_operations():
        for parameter in model.parameters():
            communicator.broadcast(parameter)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def what_the_group_has_not(orchestrator: MultiGPUOrchestrator, world: Any) -> list[str]:
    communicator = NCCLCommunicator(world)
    said = []
    for call in (
        lambda: communicator.broadcast(torch.ones(2), 2),
        lambda: communicator.broadcast(torch.ones(2), -1),
        lambda: communicator.reduce_scatter(torch.ones(3, 2)),
        lambda: communicator.reduce_scatter(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    return [*said, str(communicator.collectives)]


def on_another_device(orchestrator: MultiGPUOrchestrator, world: Any) -> list[str]:
    """Tensors without memory stand for those of a GPU."""
    communicator, tensor = NCCLCommunicator(world), torch.ones(2, device="meta")
    config = TensorParallelConfig(2, communicator.rank, torch.device("meta"), 4, 4)
    said: list[str] = []
    if communicator.transport != "shared memory":
        return ["", communicator.transport, "0"]
    for call in (
        lambda: communicator.all_reduce(tensor),
        lambda: communicator.broadcast(tensor),
        lambda: communicator.all_gather(tensor),
        lambda: communicator.reduce_scatter(tensor),
        lambda: RowParallelLinear(config, world),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    return [*said, communicator.transport, str(communicator.collectives)]


def large_batch(orchestrator: MultiGPUOrchestrator, world: Any) -> tuple[int, int]:
    communicator = NCCLCommunicator(world)
    communicator.bucket_bytes = 100
    with communicator.batch_operations():
        for size in (10, 10, 10, 200, 10):  # 40 bytes each, and one that is larger than a bucket
            communicator.all_reduce(torch.ones(size))
    return communicator.collectives, communicator.bucket_bytes


def tuned(orchestrator: MultiGPUOrchestrator, world: Any) -> tuple[dict[int, float], int]:
    communicator = NCCLCommunicator(world)
    rates = communicator.optimize_for_bandwidth()
    return rates, communicator.bucket_bytes


@pytest.mark.parametrize("transport", ["as chosen", "gloo"])
def test_a_batch_is_few_collectives_with_the_same_results(two: RankPool, transport: str) -> None:
    for said in two.run(in_group, free_port(), transport, batch_of_sums):
        assert said["before"] == ([], said["before"][1]) and said["before"][1][0] in (3.0, 4.0)
        assert said["events"] == ["all_reduce", "all_reduce", "broadcast", "all_gather"]
        assert said["collectives"] == (4, 3)
        assert said["sums"] == [[2.0 * size + 1] * size for size in (3, 5, 7)] + [[[3, 3]] * 4]
        assert said["sent"] == [1.0] * 4
        assert said["gathered"] == [[[[number] * 3] * 2, [[10.0 + number] * 3] * 2] for number in range(3)]
        if transport == "gloo":
            assert said["transport"] == "gloo"


def test_batches_keep_to_their_size_and_refuse_what_has_no_meaning(two: RankPool) -> None:
    assert two.run(in_group, free_port(), "as chosen", large_batch) == [(4, 100)] * 2
    for nested, twice, own, tensor, collectives in two.run(in_group, free_port(), "as chosen", batches_that_fail):
        assert "a batch is open already" in nested and "waits in the batch already" in twice and own == "'mine'"
        assert (tensor, collectives) == ("[1.0, 1.0]", "0")


def test_a_models_parameters_are_broadcast_in_a_batch(two: RankPool) -> None:
    assert two.run(in_group, free_port(), "as chosen", parameters_from_the_first) == [[[0.0, 0.0], [1.0]]] * 2


def test_ranks_and_parts_that_the_group_has_not_are_refused(two: RankPool) -> None:
    for above, below, parts, scalar, collectives in two.run(in_group, free_port(), "as chosen", what_the_group_has_not):
        assert above == "source: 2 is not one of 2 ranks; ranks are numbered from 0"
        assert below.startswith("source: -1 is not one of 2 ranks")
        assert parts == "tensor: expected one part for each of 2 ranks, got shape [3, 2]"
        assert scalar.endswith("got shape []") and collectives == "0"


def test_tensors_of_a_device_that_the_group_cannot_read_are_refused(two: RankPool) -> None:
    """Ranks that share memory ended by SIGSEGV."""
    for *said, transport, collectives in two.run(in_group, free_port(), "as chosen", on_another_device):
        if transport != "shared memory":
            pytest.skip(f"the ranks are joined by {transport}")
        begins = "is on meta, but the ranks of this group exchange tensors on the CPU (shared memory); use the CPU"
        assert [one[: len(begins) + len("tensor: ")] for one in said[:4]] == [f"tensor: {begins}"] * 4
        assert said[4].startswith(f"device: {begins}") and collectives == "0"


def test_the_size_of_batches_is_measured_and_agreed_on(two: RankPool) -> None:
    (rates, size), (other_rates, other_size) = two.run(in_group, free_port(), "as chosen", tuned)
    assert rates == other_rates and size == other_size
    assert rates[size] >= 0.9 * max(rates.values()) and all(
        rate < rates[size] for one, rate in rates.items() if one < size
    )
    alone = NCCLCommunicator()
    assert (alone.size, alone.transport, alone.optimize_for_bandwidth()) == (1, "none", {})
    assert alone.all_gather(torch.ones(3)).tolist() == [[1.0] * 3]
    with alone.batch_operations():
        found = [alone.all_gather(each) for each in (torch.ones(0), torch.ones(2), torch.ones(0))]
    assert [each.tolist() for each in found] == [[[]], [[1.0, 1.0]], [[]]]
