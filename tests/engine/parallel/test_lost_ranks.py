"""A rank that ends or stops in the middle is named to all others, by rank and host, within the time limit."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.build import load_library
from engine.parallel import flight_recorder as flight
from engine.parallel import peers, shared_memory
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")
SHARED, GLOO = "shared memory", "gloo"
compiled = pytest.mark.skipif(load_library(shared_memory._SOURCE) is None, reason="there is no C compiler")


def lose(rank: int, transport: str, limit_seconds: float, lost: int, signal_number: int, call: str) -> Any:
    """One rank ends or stops in the middle; what the others then see, and after how long."""
    world = open_communicators(Grid(1, 3, 1, rank), CPU, "gloo", limit_seconds, transport).world
    world.all_reduce(torch.ones(10))
    world.barrier()
    if rank == lost:
        os.kill(os.getpid(), signal_number)
    began = time.perf_counter()
    try:
        if call == "all_reduce":
            while True:
                world.all_reduce(torch.ones(100))
        world.receive(torch.ones(10), (rank - 1) % 3)
    except peers.PeerLostError as error:
        took = time.perf_counter() - began
        flight.dump(Path(os.environ["FLIGHT"].format(rank)))
        time.sleep(0.5)  # not so fast that the next rank sees this one end
        return error.rank, error.host, error.silent, str(error), took


FAULTS = [
    # transport, time limit, rank that is lost, how, the others are in
    pytest.param(SHARED, 20.0, 1, signal.SIGKILL, "all_reduce", marks=compiled),
    pytest.param(SHARED, 3.0, 0, signal.SIGSTOP, "all_reduce", marks=compiled),
    pytest.param(SHARED, 3.0, 1, signal.SIGSTOP, "receive", marks=compiled),  # rank 0 waits for rank 2, that for 1
    pytest.param(GLOO, 20.0, 2, signal.SIGKILL, "all_reduce"),
    pytest.param(GLOO, 3.0, 1, signal.SIGSTOP, "all_reduce"),
]


@pytest.mark.parametrize(("transport", "limit_seconds", "lost", "how", "call"), FAULTS)
def test_a_lost_rank_is_named_in_time(
    transport: str,
    limit_seconds: float,
    lost: int,
    how: int,
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLIGHT", str(tmp_path / "flight_recorder_rank_{}.json"))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    with RankPool(3) as pool:
        for pipe in pool._pipes:
            pipe.send((lose, (transport, limit_seconds, lost, int(how), call)))
        survivors = [rank for rank in range(3) if rank != lost]
        for rank in survivors:
            assert pool._pipes[rank].poll(60), f"rank {rank} waits for ever"
            fine, answer = pool._pipes[rank].recv()
            assert fine, answer
            named, host, silent, text, took = answer
            assert (named, host) == (lost, socket.gethostname()), text
            assert f"rank {lost} on host {socket.gethostname()}" in text
            assert silent == (how == signal.SIGSTOP), text
            assert took < (limit_seconds + 2 if silent else 10), text
        pool._processes[lost].kill()
    for rank in survivors:
        recorded = json.loads((tmp_path / f"flight_recorder_rank_{rank}.json").read_text())
        last = recorded["operations"][-1]
        assert (last["operation"], last["ended"]) == (call, None)
        assert transport == SHARED or any("all_reduce" in one["profiling_name"] for one in recorded["torch"]["entries"])
