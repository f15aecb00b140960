"""The orchestrator: real groups of ranks that meet, tell of themselves, and go on without lost ones."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.api import orchestrator as orchestrators
from engine.api.current_group import world_communicator
from engine.api.orchestrator import MultiGPUOrchestrator
from engine.rank import devices
from engine.rank.devices import VisibleDevice
from tests.support.api_groups import free_port, leave_the_pools_group, ranks_without_group
from tests.support.patience import patient
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with ranks_without_group(2) as pool:
        yield pool


def describe(rank: int, port: int, **options: Any) -> dict[str, Any]:
    orchestrator = MultiGPUOrchestrator(rank, 2, timeout_seconds=30, **options)
    orchestrator.initialize(master_addr="127.0.0.1", master_port=port)
    orchestrator.barrier()
    healthy = orchestrator.check_health()
    stats = orchestrator.get_performance_stats()
    said = {
        "rank": orchestrator.get_rank(),
        "size": orchestrator.get_world_size(),
        "device": str(orchestrator.get_device()),
        "master": orchestrator.is_master(),
        "healthy": healthy,
        "initialized": dist.is_initialized(),
        "stats": stats,
    }
    orchestrator.cleanup()
    orchestrator.cleanup()
    return said | {"left": not dist.is_initialized(), "after": orchestrator.check_health()}


def test_one_rank_needs_no_group() -> None:
    orchestrator = MultiGPUOrchestrator(rank=0, world_size=1)
    assert not orchestrator.check_health() and not orchestrator.attempt_recovery()
    with pytest.raises(ValueError, match="call initialize"):
        orchestrator.barrier()
    orchestrator.initialize()
    orchestrator.barrier()
    assert orchestrator.check_health() and orchestrator.is_master() and not dist.is_initialized()
    assert orchestrator.attempt_recovery()
    stats = orchestrator.get_performance_stats()
    assert f"{stats['communication_time']['mean']:.3f}s {stats['uptime_seconds']:.0f}s" == "0.000s 0s"
    assert (stats["failure_count"], stats["recovery_count"], stats["transport"]) == (0, 1, "none")
    with pytest.raises(ValueError, match="initialized already"):
        orchestrator.initialize()
    orchestrator.cleanup()
    assert not orchestrator.check_health()


def test_a_group_that_is_joined_again_has_its_device_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cleanup` releases it: another run took the GPU, whose memory both then filled, for idle."""
    gpu = VisibleDevice(0, "GPU-a", 1 << 30)
    monkeypatch.setenv("RANKWISE_LOCKS", str(tmp_path))
    monkeypatch.setattr(devices, "visible_accelerators", lambda: [gpu])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    orchestrator = MultiGPUOrchestrator(rank=0, world_size=1)
    for _ in range(2):
        orchestrator.initialize()
        assert str(orchestrator.get_device()) == "cuda:0"
        with pytest.raises(ValueError, match="all 1 accelerators are taken"):
            devices.claim_device(None)
        orchestrator.cleanup()
        devices.claim_device(None).release()
    MultiGPUOrchestrator(rank=0, world_size=1)
    MultiGPUOrchestrator(rank=0, world_size=1).initialize()  # its group is used on
    with pytest.raises(ValueError, match="all 1 accelerators are taken"):
        devices.claim_device(None)
    orchestrators._in_use.pop().release()
    orchestrators.set_world_communicator(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: 2 is not one of world_size=2"),
        ({"rank": 0, "world_size": 0}, "rank: 0 is not one of world_size=0"),
        ({"rank": 0, "world_size": 1, "backend": "tcp"}, "backend: 'tcp' is not known; use one of: nccl, gloo, mpi"),
        ({"rank": 0, "world_size": 1, "device": "gpu7"}, "device: 'gpu7' is not a device of torch"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MultiGPUOrchestrator(**arguments)


def test_two_ranks_meet_and_tell_of_themselves(two: RankPool) -> None:
    for rank, said in enumerate(two.run(describe, free_port())):
        assert (said["rank"], said["size"], said["master"]) == (rank, 2, rank == 0)
        assert said["healthy"] and said["initialized"] and said["left"] and not said["after"]
        stats, times = said["stats"], said["stats"]["communication_time"]
        assert (stats["backend"], stats["requested_backend"]) in (("gloo", "nccl"), ("nccl", "nccl"))
        assert times["count"] == 3  # the barrier of initialize, ours, and the health check
        assert 0 < times["min"] <= times["mean"] <= times["max"] <= times["total"] < stats["uptime_seconds"] + 1
        assert stats["communication_bytes"] == 4 and stats["failure_count"] == 0


def without_monitoring(rank: int, port: int) -> dict[str, Any]:
    return describe(rank, port, device="cpu", backend="gloo", enable_monitoring=False)


def test_without_monitoring_nothing_is_counted(two: RankPool) -> None:
    for said in two.run(without_monitoring, free_port()):
        assert said["healthy"]
        assert said["stats"]["communication_time"] == {"count": 0, "total": 0, "mean": 0, "min": 0, "max": 0}


def test_ranks_that_do_not_come_are_named() -> None:
    first = MultiGPUOrchestrator(0, 3, device="cpu", timeout_seconds=0.3)
    port = free_port()
    for _ in range(2):  # the second attempt found the port taken, by the first
        with pytest.raises(TimeoutError, match=r"ranks 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 0\.3 s"):
            first.initialize(master_port=port)
    first.cleanup()
    later = MultiGPUOrchestrator(1, 2, device="cpu", timeout_seconds=0.3)
    with pytest.raises(TimeoutError, match=r"rank 0 did not answer at 127\.0\.0\.1:\d+ within 0\.3 s"):
        later.initialize(master_port=free_port())
    later.cleanup()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        orchestrator = MultiGPUOrchestrator(0, 2, device="cpu", timeout_seconds=1)
        with pytest.raises(ValueError, match=f"master_port: {port} cannot be used on this host"):
            orchestrator.initialize(master_port=port)


# Lost ranks.

_held: list[MultiGPUOrchestrator] = []


def join(rank: int, port: int) -> int:
    dist.destroy_process_group()
    _held.append(MultiGPUOrchestrator(rank, 4, device="cpu", timeout_seconds=20))
    _held[0].initialize(master_port=port)
    return os.getpid()


def freeze(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def join_three(rank: int, port: int) -> None:
    _held[:] = [MultiGPUOrchestrator(rank, 3, device="cpu", timeout_seconds=40)]
    _held[0].initialize(master_port=port)


def join_two(rank: int, port: int) -> None:
    _held[:] = [MultiGPUOrchestrator(rank, 2, device="cpu", timeout_seconds=3)]
    _held[0].initialize(master_port=port)


def die(rank: int) -> None:
    os._exit(9)


def recover(rank: int) -> tuple[Any, ...]:
    held = _held[0]
    healthy = held.check_health()
    recovered = healthy or held.attempt_recovery()
    total = world_communicator().all_reduce(torch.tensor([10.0 ** held.get_rank()])).item() if recovered else None
    stats = held.get_performance_stats()
    return healthy, recovered, held.get_rank(), held.get_world_size(), total, stats["failure_count"]


def ask(pool: RankPool, ranks: tuple[int, ...], function: Callable[..., Any]) -> list[Any]:
    """What some of the ranks answer."""
    pipes = [pool._pipes[rank] for rank in ranks]
    for pipe in pipes:
        pipe.send((function, ()))
    answers = []
    for pipe in pipes:
        assert wait([pipe], 60), "no answer"
        fine, answer = pipe.recv()
        assert fine, answer
        answers.append(answer)
    return answers


def test_the_others_go_on_without_a_lost_rank_and_without_the_first_one() -> None:
    with RankPool(4) as pool:
        pool.run(join, free_port())
        pool._pipes[2].send((die, ()))
        pool._processes[2].join(600)
        assert ask(pool, (0, 1, 3), recover) == [(False, True, place, 3, 111.0, 1) for place in range(3)]
        # Rank 0 served the store in which they met.
        pool._pipes[0].send((die, ()))
        pool._processes[0].join(600)
        assert ask(pool, (1, 3), recover) == [(False, True, place, 2, 11.0, 2) for place in range(2)]
        assert ask(pool, (1, 3), recover) == [(True, True, place, 2, 11.0, 2) for place in range(2)]


def test_a_rank_whose_store_is_slow_is_not_left_behind() -> None:
    """As on a busy machine. The others took it for lost after two seconds, and there were two groups."""
    with RankPool(3) as pool:
        pool.run(leave_the_pools_group)
        pool.run(join_three, free_port())
        slow = pool._processes[0].pid or 0
        os.kill(slow, signal.SIGSTOP)
        awake = threading.Timer(4.0, os.kill, (slow, signal.SIGCONT))
        awake.start()
        pool._pipes[2].send((die, ()))
        assert ask(pool, (0, 1), recover) == [(False, True, place, 2, 11.0, 1) for place in range(2)]
        awake.join()


def test_a_rank_that_hangs_is_left_behind_within_the_time_limits() -> None:
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        pool.run(join_two, free_port())
        pool._pipes[0].send((freeze, ()))
        began = time.monotonic()
        # Its store is silent too, so rank 1 meets in its own.
        assert ask(pool, (1,), recover) == [(False, True, 0, 1, 1.0, 1)]
        assert time.monotonic() - began < patient(30)
        os.kill(pool._processes[0].pid or 0, signal.SIGCONT)


def meet_again(rank: int, port: int) -> tuple[int, int, bool]:
    held = _held[0]
    held.cleanup()
    held.initialize(master_port=port)
    return held.get_rank(), held.get_world_size(), held.check_health()


def come_instead(rank: int, number: int, port: int) -> tuple[int, int, bool]:
    """A new process for rank `number` of three."""
    dist.destroy_process_group()
    _held[:] = [MultiGPUOrchestrator(number, 3, device="cpu", timeout_seconds=20)]
    return meet_again(rank, port)


def test_all_ranks_join_again_after_a_recovery_without_one() -> None:
    """Those that had recovered went on as two, and waited for each other in another group than the new third."""
    with RankPool(3) as pool, RankPool(1) as new:
        pool.run(leave_the_pools_group)
        pool.run(join_three, free_port())
        pool._pipes[0].send((die, ()))
        pool._processes[0].join(600)
        assert ask(pool, (1, 2), recover) == [(False, True, place, 2, 11.0, 1) for place in range(2)]
        port = free_port()
        for pipe in pool._pipes[1:]:
            pipe.send((meet_again, (port,)))
        assert new.run(come_instead, 0, port) == [(0, 3, True)]
        assert [pipe.recv() for pipe in pool._pipes[1:]] == [(True, (rank, 3, True)) for rank in (1, 2)]


def lose_the_other(rank: int, port: int) -> list[str]:
    """Rank 1 ends when all have met, before they have a group."""
    orchestrator = MultiGPUOrchestrator(rank, 2, device="cpu", timeout_seconds=4)
    if rank:
        orchestrator._form = lambda: os._exit(9)  # type: ignore[method-assign]
    said = []
    for _ in range(2):
        try:
            orchestrator.initialize(master_port=port)
        except (RuntimeError, TimeoutError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_group_that_cannot_be_formed_leaves_nothing_behind() -> None:
    """The second attempt was refused: the process had a group already, that of the first one."""
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        port = free_port()
        for pipe in pool._pipes:
            pipe.send((lose_the_other, (port,)))
        fine, (first, second) = pool._pipes[0].recv()
        assert fine and "did not come" not in first
        assert second == f"TimeoutError: initialize: ranks 1 of 2 did not come to 127.0.0.1:{port} within 4 s"
