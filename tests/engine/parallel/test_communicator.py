"""Real ranks: sums and messages over every transport are right, in every group."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.common.execution import Layout
from engine.kernels.build import load_library
from engine.parallel import opening, peers, shared_memory, transports
from engine.parallel.communicator import Communicator, choose_backend, open_communicators
from engine.parallel.grid import Grid
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.float16)
SHARED, GLOO, BOTH = "shared memory", "gloo", "shared memory and gloo"
LIMIT_SECONDS = 30.0
compiled = pytest.mark.skipif(load_library(shared_memory._SOURCE) is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


# What the ranks run.

_open: dict[tuple[Any, ...], Any] = {}


@contextmanager
def pretending(module: Any, name: str, value: Any) -> Iterator[None]:
    """In the ranks there is no monkeypatch."""
    genuine = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, genuine)


def communicators(rank: int, grid: tuple[int, int, int], transport: str, hosts: tuple[int, ...] | None = None) -> Any:
    """Opened once in each process; `hosts`: on which host each rank believes itself to be. Cores are enough."""
    key = (grid, transport, hosts)
    if key not in _open:
        name = "here" if hosts is None else f"host {hosts[rank]}"
        with pretending(peers, "host_key", lambda: name), pretending(opening, "too_many_for_cores", lambda _: False):
            _open[key] = open_communicators(Grid(*grid, rank), CPU, "gloo", LIMIT_SECONDS, transport)
    return _open[key]


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of one rank; those of others can be made here too."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator, dtype=dtype)


def summed(ranks: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """In the order of ranks; 16-bit numbers in float32."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = part_of(ranks[0], shape, dtype).to(wide)
    for rank in ranks[1:]:
        total = total + part_of(rank, shape, dtype).to(wide)
    return total.to(dtype)


def check_collectives(rank: int, world: Communicator, counts: tuple[int, ...], exact: bool) -> None:
    """Every operation with every type and size against the same made from all parts here."""
    for dtype in DTYPES:
        for count in counts:
            shape, ranks = (count,), world.ranks
            tensor = part_of(rank, shape, dtype)
            assert world.all_reduce(tensor) is tensor
            expected = summed(ranks, shape, dtype)
            if exact:
                assert torch.equal(tensor, expected), (dtype, count)
            else:
                torch.testing.assert_close(tensor, expected, rtol=0.05, atol=0.05)
            bits = world.all_gather(tensor.view(torch.uint8))
            assert all(torch.equal(bits[0], other) for other in bits), "ranks got different sums"
            whole = world.all_gather(part_of(rank, shape, dtype))
            assert torch.equal(whole, torch.stack([part_of(peer, shape, dtype) for peer in ranks]))
            source = count % world.size
            tensor = part_of(rank, shape, dtype)
            world.broadcast(tensor, source)
            assert torch.equal(tensor, part_of(ranks[source], shape, dtype))
            parts = part_of(rank, (world.size, count), dtype)
            mine = world.reduce_scatter(parts)
            expected = summed(ranks, (world.size, count), dtype)[world.index]
            if exact:
                assert torch.equal(mine, expected), (dtype, count)
            else:
                torch.testing.assert_close(mine, expected, rtol=0.05, atol=0.05)
        world.barrier()


def collectives(rank: int, transport: str, counts: tuple[int, ...]) -> str:
    world = communicators(rank, (1, 4, 1), transport).world
    check_collectives(rank, world, counts, exact=transport == SHARED)
    return str(world.transport)


def as_nccl(rank: int) -> list[str]:
    """What the group is asked for, of gloo, by a transport that believes it to be NCCL's."""
    world = communicators(rank, (1, 4, 1), GLOO).world
    way: Any = world._way
    asked: list[str] = []

    def noted(name: str) -> Any:
        genuine = getattr(transports, name)

        def call(*given: Any, **named: Any) -> Any:
            asked.append(name)
            return genuine(*given, **named)

        return call

    singles = ("all_gather_single", "reduce_scatter_single")
    with ExitStack() as stack:
        stack.enter_context(pretending(way, "name", "nccl"))
        for name in singles:
            stack.enter_context(pretending(transports, name, noted(name)))
        check_collectives(rank, world, (1, 7, 4096), exact=False)
        scalars = world.all_gather(torch.tensor(float(rank)))
        assert scalars.tolist() == [0.0, 1.0, 2.0, 3.0]
    return sorted(set(asked))


def hierarchy(rank: int, hosts: tuple[int, ...], counts: tuple[int, ...]) -> list[str]:
    """The sum over two levels is the sum; and messages find their way."""
    opened = communicators(rank, (1, 2, 2), "auto", hosts)
    check_collectives(rank, opened.world, counts, exact=False)
    integers = part_of(rank, (1001,), torch.int64)
    assert torch.equal(opened.world.all_reduce(integers), summed((0, 1, 2, 3), (1001,), torch.int64))
    messages(rank, opened.world)
    return [opened.tensor.transport, opened.pipeline.transport, opened.world.transport]


def messages(rank: int, world: Communicator) -> None:
    """Several from each rank to each other one, all sent before one is received; below and above a piece."""
    sizes = (0, 1, 17, 70_000, 131_072, 5, 1_000_003)
    for distance in range(1, world.size):
        to, source = (world.index + distance) % world.size, (world.index - distance) % world.size
        for number, size in enumerate(sizes):
            outgoing = part_of(world.index, (size,), torch.float32) + number
            world.send(outgoing, to)
            outgoing.fill_(-1.0)  # it may be changed at once
        for number, size in enumerate(sizes):
            incoming = world.receive(torch.empty(size), source)
            assert torch.equal(incoming, part_of(source, (size,), torch.float32) + number)
    world.barrier()


def message_order(rank: int, transport: str) -> None:
    messages(rank, communicators(rank, (1, 4, 1), transport).world)


def buffered(rank: int) -> float:
    """Seconds that many small messages take to send while nobody receives."""
    world = communicators(rank, (1, 4, 1), SHARED).world
    world.barrier()
    took = 0.0
    if rank == 0:
        began = time.perf_counter()
        for number in range(40):
            world.send(torch.full((1000,), float(number)), 1)
        took = time.perf_counter() - began
    world.barrier()
    if rank == 1:
        for number in range(40):
            assert world.receive(torch.empty(1000), 0).eq(number).all()
    return took


def not_contiguous(rank: int, transport: str) -> None:
    world = communicators(rank, (1, 4, 1), transport).world
    matrix = part_of(rank, (6, 10), torch.float32)
    expected = summed(world.ranks, (6, 10), torch.float32)
    untouched = matrix[:, 1::2].clone()
    view = matrix[:, ::2]
    assert world.all_reduce(view) is view
    torch.testing.assert_close(matrix[:, ::2], expected[:, ::2])
    assert torch.equal(matrix[:, 1::2], untouched)
    sent = part_of(rank, (6, 10), torch.float32).T
    torch.testing.assert_close(world.all_gather(sent)[2], part_of(2, (6, 10), torch.float32).T)
    received = torch.zeros(10, 6).T
    world.broadcast(received if rank else part_of(0, (6, 10), torch.float32), 0)
    assert rank == 0 or torch.equal(received, part_of(0, (6, 10), torch.float32))


def groups(rank: int, transport: str) -> list[tuple[str, tuple[int, ...]]]:
    """Sums along every axis of a grid, mixed with each other, are those of the right ranks."""
    opened = communicators(rank, (1, 2, 2), transport)
    for turn in range(20):
        for group in (opened.tensor, opened.world, opened.pipeline, opened.data):
            shape = (turn * 37 + 1,)
            tensor = group.all_reduce(part_of(rank, shape, torch.float32))
            torch.testing.assert_close(tensor, summed(group.ranks, shape, torch.float32))
    return [(group.transport, group.ranks) for group in (opened.tensor, opened.pipeline, opened.data, opened.world)]


def disagree(rank: int) -> str:
    """Ranks that do not take part in the same operation are told so, and nobody waits for ever."""
    opened = open_communicators(Grid(1, 4, 1, rank), CPU, "gloo", 10.0, SHARED)
    try:
        if rank == 1:
            opened.world.barrier()
        else:
            opened.world.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return "no error"


def refused(rank: int, transport: str, hosts: tuple[int, ...] | None) -> str:
    try:
        communicators(rank, (1, 4, 1), transport, hosts)
    except ValueError as error:
        return str(error)
    return "no error"


def events(rank: int) -> list[tuple[str, int, int, bool]]:
    world = communicators(rank, (1, 4, 1), GLOO).world
    seen: list[Any] = []
    world.listener = seen.append
    began = time.perf_counter()
    world.all_reduce(torch.ones(100))
    world.all_gather(torch.ones(10))
    world.listener = None
    world.barrier()
    ended = time.perf_counter()
    numbers = [event.sequence - seen[0].sequence for event in seen]
    return [
        (event.operation, number, event.size_bytes, began < event.began < event.ended < ended)
        for event, number in zip(seen, numbers, strict=True)
    ]


def waiting(rank: int) -> tuple[float, float]:
    """Seconds from the arrival of a rank 5 ms late to the return of this one, first quartile; wake-ups a second."""
    world = communicators(rank, (1, 4, 1), SHARED).world
    lags = []
    for _ in range(60):
        world.barrier()
        if rank == 0:
            time.sleep(0.005)
        arrived = torch.tensor([time.monotonic()], dtype=torch.float64)
        world.broadcast(arrived, 0)
        lags.append(time.monotonic() - arrived.item())
    if rank == 0:
        time.sleep(1.0)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    world.barrier()
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    return sorted(lags)[len(lags) // 4], switches / (time.perf_counter() - began)


def unreachable(rank: int) -> str:
    """One of four ranks cannot open what another made: none of them uses it."""
    mine = shared_memory.open_segment if rank != 2 else lambda *offer: None
    with pretending(opening, "open_segment", mine), pretending(opening, "too_many_for_cores", lambda _: False):
        opened = open_communicators(Grid(1, 4, 1, rank), CPU, "gloo", LIMIT_SECONDS, "auto")
    assert opened.world.all_reduce(torch.ones(3)).eq(4).all()
    return str(opened.world.transport)


def crowded(rank: int) -> str:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        return str(open_communicators(Grid(1, 4, 1, rank), CPU, "gloo", LIMIT_SECONDS).world.transport)
    finally:
        os.sched_setaffinity(0, allowed)


def traces(rank: int) -> tuple[int, int, list[str]]:
    """Mappings of segments, descriptors of them, and files in /dev/shm with a name of ours."""
    communicators(rank, (1, 4, 1), SHARED)
    mappings = Path("/proc/self/maps").read_text().count("/memfd:rankwise (deleted)")
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()]
    named = [path.name for path in Path("/dev/shm").iterdir() if "rankwise" in path.name]
    return mappings, sum("rankwise" in link for link in links), named


def closing(rank: int) -> int:
    """Mappings that are left of communicators that were closed, twice."""
    before = Path("/proc/self/maps").read_text().count("/memfd:rankwise")
    opened = open_communicators(Grid(2, 2, 1, rank), CPU, "gloo", LIMIT_SECONDS, SHARED)
    opened.world.barrier()
    assert Path("/proc/self/maps").read_text().count("/memfd:rankwise") > before
    opened.close()
    opened.close()
    return Path("/proc/self/maps").read_text().count("/memfd:rankwise") - before


# The tests.

SMALL, LARGE = (1, 257), (40_001, 300_007)


def test_nccl_gathers_and_scatters_one_tensor(four: RankPool) -> None:
    """For a list it fills a buffer of its own and copies each part: `all_gather` was measured with a copy of it all."""
    assert four.run(as_nccl) == [["all_gather_single", "reduce_scatter_single"]] * 4


@compiled
def test_shared_memory_sums_exactly_and_alike_on_all_ranks(four: RankPool) -> None:
    assert four.run(collectives, SHARED, (*SMALL, *LARGE)) == [SHARED] * 4


def test_gloo_does_the_same(four: RankPool) -> None:
    assert four.run(collectives, GLOO, SMALL) == [GLOO] * 4


@compiled
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ((0, 0, 1, 1), [[SHARED, GLOO, BOTH]] * 4),
        ((0, 1, 1, 1), [[GLOO, GLOO, BOTH], [GLOO, SHARED, BOTH], [SHARED, GLOO, BOTH], [SHARED, SHARED, BOTH]]),
    ],
)
def test_several_hosts(four: RankPool, hosts: tuple[int, ...], expected: list[list[str]]) -> None:
    assert four.run(hierarchy, hosts, (1, 1000, 40_001)) == expected


@pytest.mark.parametrize("transport", [pytest.param(SHARED, marks=compiled), GLOO])
def test_messages_arrive_in_order(four: RankPool, transport: str) -> None:
    four.run(message_order, transport)


@compiled
def test_sending_through_shared_memory_does_not_wait(four: RankPool) -> None:
    assert four.run(buffered)[0] < 5  # it would be for ever


@compiled
def test_a_rank_that_waits_long_sleeps_until_it_is_woken(four: RankPool) -> None:
    """Sleeping ranks look every 20 ms whether the others live: woken by that alone, most would be over 4 ms late."""
    for late, wake_ups in four.run(waiting)[1:]:
        assert late < 0.002
        assert wake_ups < 200


@pytest.mark.parametrize("transport", [pytest.param(SHARED, marks=compiled), GLOO])
def test_views_are_summed_in_place(four: RankPool, transport: str) -> None:
    four.run(not_contiguous, transport)


@pytest.mark.parametrize("transport", [pytest.param(SHARED, marks=compiled), GLOO])
def test_groups_do_not_disturb_each_other(four: RankPool, transport: str) -> None:
    found = four.run(groups, transport)
    world = (transport, (0, 1, 2, 3))
    tensor, pipeline = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]
    for rank in range(4):
        assert found[rank] == [(transport, tensor[rank]), (transport, pipeline[rank]), ("none", (rank,)), world]


@compiled
def test_ranks_that_do_different_things_are_told(four: RankPool) -> None:
    found = four.run(disagree)
    assert all("same operation" in text or "did not arrive" in text for text in found)
    assert any("same operation" in text for text in found)


@compiled
def test_transports_that_cannot_be_are_refused(four: RankPool) -> None:
    assert "use one of: auto, shared memory, gloo" in four.run(refused, "nccl", None)[0]
    assert "'pigeons' is not one of" in four.run(refused, "pigeons", None)[1]
    assert "ranks 0, 1, 2, 3 are on several hosts; use auto or gloo" in four.run(refused, SHARED, (0, 0, 1, 1))[2]


@compiled
def test_gloo_where_shared_memory_cannot_be(four: RankPool) -> None:
    assert four.run(unreachable) == [GLOO] * 4
    assert four.run(crowded) == [GLOO] * 4


def test_a_listener_is_told_of_every_operation(four: RankPool) -> None:
    assert four.run(events) == [[("all_reduce", 0, 400, True), ("all_gather", 1, 160, True)]] * 4


@compiled
def test_nothing_has_a_name_that_could_be_left(four: RankPool) -> None:
    for mappings, descriptors, named in four.run(traces):
        assert mappings >= 1
        assert descriptors == 0
        assert named == []
    assert four.run(closing) == [0] * 4


def test_cpus_talk_over_gloo() -> None:
    assert choose_backend(CPU) == "gloo"


def test_one_rank_alone_needs_no_process_group() -> None:
    opened = open_communicators(Grid.of(Layout(), 0), CPU, None, 1.0)
    tensor = torch.arange(3.0)
    assert opened.world is opened.tensor
    assert opened.world.transport == "none"
    assert opened.world.all_reduce(tensor) is tensor
    assert opened.world.all_gather(tensor).tolist() == [[0, 1, 2]]
    assert opened.world.reduce_scatter(tensor[None]).tolist() == [0, 1, 2]
    opened.world.barrier()
    opened.close()
