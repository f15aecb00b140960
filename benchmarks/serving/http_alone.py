"""Row `http`: what the HTTP process carries when the ranks cost nothing, at the step times of faster machines.

tables, met = http_row(files, folder, rounds)

As a program it is that HTTP process, with ranks of `paced_rank`.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.paced_rank import STEP_SECONDS_VARIABLE
from benchmarks.serving.sending import Sender, tokens_per_second
from engine.serving.http import main as http_process
from engine.serving.http import replicas
from reports.text import Table, number
from tasks.serving.process import ServerProcess
from tasks.serving.settings import ServerRequest, make_settings

STEP_SECONDS = (0.02, 0.005, 0.0025, 0.001, 0.0005)
USERS, SECONDS = 32, 6.0
CARRIED_BAR = 0.95
"""Of the tokens that the ranks offer at a step of 5 ms."""
_BAR_STEP = 0.005


def http_row(files: ModelFiles, folder: Path, rounds: int) -> tuple[list[Table], bool]:
    """Tokens per second at each step time, against those offered; the process's CPU time for each token."""
    rows, met = [], True
    for step in STEP_SECONDS:
        carried, costs, busy = [], [], []
        for _ in range(rounds):
            speed, cost, generator = _slice(files, folder, step)
            carried.append(speed)
            costs.append(cost)
            busy.append(generator)
            print(f"  step {step * 1000:g} ms {speed:.0f} tokens/s, {cost * 1e6:.0f} µs", file=sys.stderr, flush=True)
        offered = USERS / step
        share = float(np.median(carried)) / offered
        met &= step != _BAR_STEP or share >= CARRIED_BAR
        rows.append(
            (
                f"{step * 1000:g}",
                number(offered),
                number(float(np.median(carried))),
                number(100 * share),
                number(float(np.median(costs)) * 1e6),
                number(float(np.median(busy))),
            )
        )
    columns = (
        "step, ms",
        "tokens/s offered",
        "carried",
        "%",
        "CPU of the HTTP process, µs a token",
        "generator, cores",
    )
    return [Table(columns, tuple(rows))], met


@dataclass
class _PacedServer:
    url: str
    model: str
    exact: bool = True
    name: str = "paced"


def _slice(files: ModelFiles, folder: Path, step: float) -> tuple[float, float, float]:
    """Return tokens per second, seconds of CPU for a token, and the generator's cores."""
    with tempfile.TemporaryDirectory(prefix="rankwise-http-") as name:
        asked = ServerRequest(model=str(files.folder), name="model", port=0, max_length=256, device="cpu")
        settings = make_settings(asked, Path(name), folder / "cache", folder)
        os.environ[STEP_SECONDS_VARIABLE] = str(step)
        with ServerProcess(settings, None, "benchmarks.serving.http_alone") as server:
            url = server.wait_until_ready()["url"]
            process = psutil.Process(server.pid)
            before = process.cpu_times()
            run = Sender(files).send(_PacedServer(url, settings.name), SECONDS, users=USERS)
            after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    tokens = len(run.gap_seconds) + int(run.completed.sum())
    return tokens_per_second(run), used / tokens, run.facts.cpu_share


if __name__ == "__main__":
    replicas.RANK_PROGRAM = "benchmarks.serving.paced_rank"
    sys.exit(http_process.main(sys.argv[1:]))
