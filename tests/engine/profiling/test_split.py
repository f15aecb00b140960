"""Which time of a region is communication, which compute, and how collectives are told apart."""

from typing import Any

from engine.profiling.collectives import RecordedCollective, collectives, columns, group_of
from engine.profiling.events import ProfilerEvent
from engine.profiling.split import split_region


def operator(began: float, ended: float, name: str = "aten::mm", thread: int = 1, **more: Any) -> ProfilerEvent:
    return ProfilerEvent(name, more.pop("kind", "cpu_op"), thread, began, ended, **more)


def kernel(began: float, ended: float, name: str = "gemm") -> ProfilerEvent:
    return ProfilerEvent(name, "kernel", 7, began, ended)


def shares(
    wall: float, events: list[ProfilerEvent], reported: list[RecordedCollective] | None = None
) -> tuple[float, ...]:
    """Compute, communication, exposed communication, idle."""
    found = split_region(wall, events, collectives(events, reported or []))
    return tuple(
        round(share, 9)
        for share in (
            found.compute_share, found.communication_share, found.exposed_communication_share, found.idle_share,
        )
    )  # fmt: skip


def test_overlapping_work_counts_once() -> None:
    nested = [operator(0, 4), operator(1, 2), operator(3, 5, thread=2)]
    assert shares(10, nested) == (0.5, 0, 0, 0.5)


def test_an_asynchronous_sum_is_in_flight_from_the_call_to_its_end() -> None:
    events = [
        operator(0, 6),
        operator(6, 6.5, "c10d::allreduce_"),
        operator(6.5, 8),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 7, 9, 4096),
        operator(7.5, 8.5, "aten::copy_", thread=2),  # gloo's own copying is no compute
    ]
    # In flight from 6 to 9, 6.5 to 8 of it behind an operator.
    assert shares(10, events) == (0.75, 0.3, 0.15, 0.1)
    (found,) = collectives(events, [])
    assert (found.operation, found.began, found.ended, found.size_bytes) == ("allreduce", 6, 9, 4096)


def test_a_collective_inside_of_an_operator_is_communication() -> None:
    inside = [operator(0, 8, "TensorParallelBackward"), operator(2, 6, "c10d::allgather_")]
    assert shares(8, inside) == (0.5, 0.5, 0.5, 0)
    shared_memory = RecordedCollective("all_reduce", 5, 0, 64, 2, 6, thread=1)
    assert shares(8, inside[:1], [shared_memory]) == (0.5, 0.5, 0.5, 0)


def test_what_our_communicator_reports_is_not_counted_twice() -> None:
    reported = RecordedCollective("all_reduce", 5, 3, 64, 1, 4, thread=1)
    events = [
        operator(1.1, 1.2, "c10d::allreduce_"),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 1.3, 3.9, 64),
        operator(5, 5.1, "c10d::barrier"),
    ]
    found = collectives(events, [reported])
    assert [(item.operation, item.began, item.sequence) for item in found] == [("all_reduce", 1, 3), ("barrier", 5, 0)]


def test_collectives_are_paired_by_name_and_numbered_by_operation() -> None:
    events = [
        operator(0, 1, "c10d::allreduce_"),
        operator(1, 2, "c10d::broadcast_"),
        operator(2, 3, "c10d::allreduce_"),
        ProfilerEvent("gloo:broadcast", "user_annotation", 3, 1.5, 4, 8),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 0.5, 5, 16),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 5, 6, 32),
    ]
    found = collectives(events, [])
    assert [(item.operation, item.sequence, item.began, item.ended, item.size_bytes) for item in found] == [
        ("allreduce", 0, 0, 5, 16), ("broadcast", 0, 1, 4, 8), ("allreduce", 1, 2, 6, 32),
    ]  # fmt: skip
    assert found[0].group == found[2].group == group_of("allreduce") != found[1].group
    made = columns(found)
    assert made["collective_seconds"].tolist() == [5, 3, 4] and made["collective_bytes"].tolist() == [16, 8, 32]
    assert all(column.ndim == 1 for column in made.values())


def gloo(began: float, ended: float, name: str, size: int | None = None) -> ProfilerEvent:
    return ProfilerEvent(f"gloo:{name}", "user_annotation", 2, began, ended, size)


def test_a_functional_collective_is_one() -> None:
    """As torch 2.13 records those of DTensors: three operators on the thread, one execution by gloo."""
    events = [
        operator(0, 2, "_c10d_functional::all_reduce", size_bytes=8),
        operator(0.5, 1.9, "c10d::allreduce_"),
        gloo(1, 4, "all_reduce", 8),
        operator(2, 2.2, "_c10d_functional::_wrap_tensor_autograd", size_bytes=8),
        operator(3, 4, "_c10d_functional::wait_tensor", size_bytes=8),
        operator(6, 7, "_c10d_functional::all_gather_into_tensor", size_bytes=8),
        operator(6.1, 6.9, "c10d::allgather_into_tensor_coalesced_"),
        gloo(6.2, 7.5, "all_gather", 8),
    ]
    found = [(item.operation, item.began, item.ended, item.size_bytes) for item in collectives(events, [])]
    assert found == [("allreduce", 0.5, 4, 8), ("allgather", 6.1, 7.5, 8)]


def test_an_execution_is_of_a_request_before_it() -> None:
    """Of FSDP and the norm of its gradients: gloo sums where parts were asked for. Each lasted until the next one."""
    events = [
        operator(0, 0.2, "c10d::_reduce_scatter_base_", size_bytes=12),
        gloo(0.1, 1, "all_reduce", 8),
        operator(4, 4.2, "c10d::_reduce_scatter_base_", size_bytes=12),
        gloo(4.1, 5, "all_reduce", 8),
        operator(8, 8.2, "c10d::allreduce_"),
        gloo(8.1, 9, "all_reduce", 4),
        operator(10, 10.1, "c10d::monitored_barrier_"),  # has no event of gloo's
        gloo(10.5, 10.6, "broadcast", 4),  # asked for before the region
    ]
    found = [(item.began, item.ended, item.size_bytes) for item in collectives(events, [])]
    assert found == [(0, 1, 8), (4, 5, 8), (8, 9, 4), (10, 10.1, None), (10.5, 10.6, 4)]


def test_waiting_for_what_was_asked_for_is_communication() -> None:
    events = [operator(0, 4), operator(4, 9, "_c10d_functional::wait_tensor")]
    assert shares(10, events) == (0.4, 0.5, 0.5, 0.1)
    assert collectives(events, []) == []


def test_on_a_gpu_kernels_count_and_what_the_cpu_launches_does_not() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)"
    events = [
        operator(0, 9),
        operator(1, 3, "c10d::allreduce_"),
        kernel(2, 5),
        kernel(4, 8, nccl),
        ProfilerEvent("Memcpy DtoH", "gpu_memcpy", 7, 8, 9),
    ]
    assert shares(10, events) == (0.4, 0.4, 0.3, 0.3)
    (found,) = collectives(events, [])
    assert (found.operation, found.size_bytes) == ("allreduce", None)
    (found,) = collectives(events, [RecordedCollective("all_reduce", 5, 2, 64, 1, 1.1, thread=1, on_device=True)])
    assert (found.operation, found.group, found.sequence, found.size_bytes) == ("all_reduce", 5, 2, 64)
    assert (found.began, found.ended) == (4, 8)


def test_nothing_beyond_the_region_counts() -> None:
    assert shares(4, [operator(3, 9)]) == (0.25, 0, 0, 0.75)
