"""A few ranks that live as long as a test module: a launch for each test would take longer than the tests.

    with RankPool(4) as pool:
        answers = pool.run(function, argument)       # function(rank, argument) on each rank; what each returned

Functions are sent by name, so they must stand in a module that imports nothing heavy but torch. A rank that raises
ends the test with its traceback; one that does not answer in time ends the pool.

Ranks are forked from a process that has torch and nothing else: to import it takes longer than most tests.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankPool:
    """Processes with a default process group on gloo among them, one thread each."""

    def __init__(self, size: int, timeout_seconds: float = 60) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="rankwise-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.rank_imports"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            given = (rank, size, self._folder.name, theirs, dict(os.environ))
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returned on each rank, in their order."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while len(answers) + len(failures) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, self.timeout_seconds)
            if not ready or failures:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    fine, answer = self._pipes[rank].recv()
                except EOFError:
                    fine, answer = False, f"rank {rank} ended"
                if fine:
                    answers[rank] = answer
                else:
                    failures.append(f"rank {rank}: {answer}")
        assert not failures, "\n".join(failures)
        assert len(answers) == self.size, f"only ranks {sorted(answers)} answered in {self.timeout_seconds} s"
        return [answers[rank] for rank in range(self.size)]


def _serve(rank: int, size: int, folder: str, pipe: Connection, environment: dict[str, str]) -> None:
    # The process that forks has the environment of the first pool.
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(rank, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # gloo's threads may outlive a tidy end
