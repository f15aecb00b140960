"""Slices of traffic: the load generator against one server for some answers or seconds, and what of it
counts.

run = sender.send_answers(server, users=32)     # so many answers to each user
whole_speed(run)                                # tokens per second
run = sender.send(server, 12.0, rate=5.0)       # for a time
tokens_per_second(run)                          # of the part that counts
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.serving.model import ModelFiles
from configs.load.arrivals import ClosedLoop, PoissonArrivals
from configs.load.job import Contents, Endpoint, LoadJob
from configs.load.samples import JOB_FILE
from reports.load.metrics import tokens_within
from reports.load.samples import LoadRun, read_load_run
from reports.load.steady import Window

ANSWERS_EACH = 5
RAMP_SHARE = 0.25
"""Of a slice of a fixed time, not counted: its users all begin together."""
_NICE = -10


class ServerAddress(Protocol):
    """Where requests go: to `model` at `url`. exact: answers are as long as asked for. name: in what is printed."""

    url: str
    model: str
    exact: bool
    name: str


@dataclass
class Sender:
    """Sends slices; the seed of each slice is its own, so that no prompt comes again within 20,000."""

    files: ModelFiles
    new_tokens: int = 64
    sent: int = field(default=0)

    def send_answers(self, server: ServerAddress, users: int) -> LoadRun:
        """Send a slice of ANSWERS_EACH answers to each user.

        Servers that are compared do the same work. Users begin together: a slice of a time holds more of the first
        prompts, and of the last, small batches, the longer an answer takes.
        """
        return self.send(server, None, users=users, requests=ANSWERS_EACH * users)

    def send(
        self,
        server: ServerAddress,
        seconds: float | None,
        users: int | None = None,
        rate: float | None = None,
        contents: Contents | None = None,
        requests: int | None = None,
        seed: int | None = None,
    ) -> LoadRun:
        """Send a slice of so many users, or at a rate, until a time or a number of requests.

        Raises RuntimeError where no request was answered.
        """
        self.sent += 1
        assert (users is None) != (rate is None)
        arrivals = ClosedLoop(users=users) if rate is None else PoissonArrivals(rate=rate)
        own = contents or Contents(prompts=str(self._prompts()), new_tokens=self.new_tokens, exact=server.exact)
        job = LoadJob(
            endpoint=Endpoint(url=server.url, model=server.model),
            arrivals=arrivals,
            contents=own,
            duration_seconds=seconds,
            max_requests=requests,
            seed=self.sent if seed is None else seed,
        )
        with tempfile.TemporaryDirectory(prefix="rankwise-slice-") as name:
            (Path(name) / JOB_FILE).write_text(job.model_dump_json())
            command = [sys.executable, "-m", "engine.load", f"{name}/{JOB_FILE}", name]
            with subprocess.Popen(command) as process:
                # As in a launch: a generator that shares the server's cores is woken in time.
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
                code = process.wait()
            if code:
                raise RuntimeError(f"{server.name}: the generator ended with {code}")
            run = read_load_run(Path(name))
        if not run.completed.any():
            raise RuntimeError(f"{server.name}: no request was answered: {run.facts.errors}")
        if not run.completed.all():
            print(f"  {server.name}: {run.facts.errors}", file=sys.stderr, flush=True)
        return run

    def _prompts(self) -> Path:
        """A file of prompts that this slice alone uses: a cache of prefixes may know none of them."""
        lines = self.files.prompts.read_text().splitlines(keepends=True)
        each = 400
        first = (self.sent * each) % (len(lines) - each)
        file = self.files.prompts.with_name("prompts-of-slice.jsonl")
        file.write_text("".join(lines[first : first + each]))
        return file


def counted(run: LoadRun) -> Window:
    """The part of a slice that counts."""
    end = run.facts.issuing_seconds
    return Window(RAMP_SHARE * end, end, None, "a fixed share")


def whole_speed(run: LoadRun) -> float:
    """Tokens per second from the first request to the end of the last answer."""
    return float(run.tokens[run.completed].sum() / run.columns["ended_seconds"][run.completed].max())


def tokens_per_second(run: LoadRun) -> float:
    """Of the part that counts."""
    window = counted(run)
    return tokens_within(run, window) / window.seconds


def foreign_cores(seconds: float = 1.0) -> float:
    """Cores that are busy now, while everything of ours is held."""
    return psutil.cpu_percent(seconds) / 100 * (psutil.cpu_count() or 1)
