"""`make bench-load`: is the generator on time, and does the search find known limits?

    python -m benchmarks.load.bench [--rounds 8] [--seconds 8] [--rate 500]

Lateness: in turn, a bare loop that sleeps until each due time and does nothing, and the generator against a server that
does nothing, each in a process of its own with the same due times. Search: against servers in virtual time, 20 seeds
each. Exit code 1 where a bar is missed.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.load.simulated import BatchingServer, SingleServer
from configs.common.arrays import Floats
from configs.load.arrivals import PoissonArrivals
from configs.load.job import Contents, Endpoint, LoadJob
from configs.load.samples import JOB_FILE
from reports.load.metrics import WARM_UP_SHARE, serving_metrics
from reports.load.samples import read_load_run
from reports.load.search import FoundRate, RateSearch, SearchGoal
from reports.load.verdict import judged
from reports.numbers.percentiles import quantiles
from reports.numbers.statistics import estimate
from reports.text import Table, aligned, estimate_cell, number

MAX_MORE_SECONDS = 0.002
"""The bar: P99 of the generator's lateness above that of the bare loop, median over rounds."""
SEEDS = 20
WITHIN = 0.05
SHARE = 0.99
_LONG_SECONDS, _LONG_RUNS = 10_000.0, 4
Scores = Callable[[float, int], Floats]
"""Scores of a run at a rate, with a seed."""


@contextmanager
def idle_server() -> Iterator[str]:
    """A server that does nothing, in a process of its own; its URL."""
    command = [sys.executable, "-m", "benchmarks.load.server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def bare_loop(rate: float, seconds: float, seed: int) -> Floats:
    """Lateness in seconds of a loop that only sleeps until each due time of the generator's."""
    command = [sys.executable, "-m", "benchmarks.load.bare_loop", str(rate), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.array(done.stdout.split(), dtype=np.float64)


def lateness(rounds: int, seconds: float, rate: float) -> tuple[Table, bool]:
    """P50 and P99 of both, over rounds; and whether the bar is met."""
    found: dict[str, list[float]] = {name: [] for name in ("bare50", "bare99", "late50", "late99", "sent99", "cpu")}
    verdicts = []
    with idle_server() as url, tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            bare = quantiles(bare_loop(rate, seconds, seed), (0.5, SHARE))
            job = LoadJob(
                endpoint=Endpoint(url=url, model="m"),
                arrivals=PoissonArrivals(rate=rate),
                contents=Contents(new_tokens=16, prompt_tokens=64),
                duration_seconds=seconds,
                seed=seed,
            )
            (Path(folder) / JOB_FILE).write_text(job.model_dump_json())
            subprocess.run([sys.executable, "-m", "engine.load", f"{folder}/{JOB_FILE}", folder], check=True)
            run = read_load_run(Path(folder))
            sent = run.columns["sent_seconds"] - run.columns["scheduled_seconds"]
            late = quantiles(run.late_seconds, (0.5, SHARE))
            row = (*bare, *late, quantiles(sent, (SHARE,))[0], run.facts.cpu_share)
            for name, value in zip(found, row, strict=True):
                found[name].append(value)
            verdicts.append(str(judged(run, serving_metrics(run)).verdict))
    more = [late - bare for late, bare in zip(found["sent99"], found["bare99"], strict=True)]
    rows = [(name, estimate_cell(estimate(values), 1000)) for name, values in (
        ("bare loop, P50, ms", found["bare50"]), ("bare loop, P99, ms", found["bare99"]),
        ("generator turns to a request, P50, ms", found["late50"]),
        ("generator turns to a request, P99, ms", found["late99"]),
        ("last byte written, P99, ms", found["sent99"]), ("the same above the bare loop, ms", more),
    )]  # fmt: skip
    rows.append(("CPU of the generator, % of one core", estimate_cell(estimate(found["cpu"]), 100)))
    rows.append(("verdicts", ", ".join(sorted(set(verdicts)))))
    return Table((f"{rate:g} requests/s, {rounds} rounds of {seconds:g} s", "median"), tuple(rows)), (
        median(more) <= MAX_MORE_SECONDS
    )


def searches() -> tuple[Table, bool]:
    """The search against each simulated server; and whether all seeds met both bars."""
    single, batching = SingleServer(20.0), BatchingServer()
    bounds = {"ttft_seconds": 1.0, "tpot_seconds": 0.06}
    rows, all_met = [], True
    for ttft in (0.7, 1.5, 5.0):
        scores_of = partial(_single_scores, single, ttft)
        found = [_search(scores_of, seed) for seed in range(SEEDS)]
        row, met = _row(f"one at a time, TTFT up to {ttft:g} s", single.limit(ttft, SHARE), found)
        rows.append(row)
        all_met &= met
    limit = _long_run_limit(batching, bounds)
    found = [_search(partial(_batching_scores, batching, bounds), seed) for seed in range(SEEDS)]
    row, met = _row("batches of up to 16, TTFT up to 1 s, TPOT up to 60 ms", limit, found)
    columns = (
        "server",
        "limit, requests/s",
        "within 5 %",
        "interval holds it",
        "largest error, %",
        "interval, %",
        "runs",
    )
    return Table(columns, (*rows, row)), all_met and met


def _single_scores(server: SingleServer, ttft_seconds: float, rate: float, seed: int) -> Floats:
    return server.scores(rate, 1200.0, seed, ttft_seconds)


def _batching_scores(server: BatchingServer, bounds: dict[str, float], rate: float, seed: int) -> Floats:
    return server.scores(rate, 600.0, seed, **bounds)


def _search(scores_of: Scores, seed: int) -> FoundRate:
    search, run = RateSearch(SearchGoal(share=SHARE, first_rate=1.0)), 0
    while (rate := search.next_rate()) is not None:
        run += 1
        scores = scores_of(rate, 1000 * seed + run)
        search.add(rate, scores[int(WARM_UP_SHARE * len(scores)) :])
    return search.result()


def _row(name: str, limit: float, found: list[FoundRate]) -> tuple[tuple[str, ...], bool]:
    errors = [abs((one.estimate or 0.0) / limit - 1) for one in found]
    held = sum(one.low is not None and one.high is not None and one.low <= limit <= one.high for one in found)
    widths = [one.high / one.low - 1 for one in found if one.low is not None and one.high is not None]
    runs = [float(sum(len(probe.runs) for probe in one.probes)) for one in found]
    within = sum(error < WITHIN for error in errors)
    of_all = f" of {len(found)}"
    cells = (f"{within}{of_all}", f"{held}{of_all}", number(max(errors) * 100), number(median(widths) * 100))
    return (name, number(limit, 4), *cells, number(median(runs))), within == held == len(found)


def _long_run_limit(server: BatchingServer, bounds: dict[str, float]) -> float:
    """Where the quantile of very long runs reaches 1, by bisection; the same seeds at every rate."""
    low, high = 10.0, 30.0
    while high / low > 1.002:
        rate = sqrt(low * high)
        runs = [server.scores(rate, _LONG_SECONDS, 900_000 + seed, **bounds) for seed in range(_LONG_RUNS)]
        passes = quantiles(np.concatenate(runs), (SHARE,))[0] <= 1
        low, high = (rate, high) if passes else (low, rate)
    return sqrt(low * high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--only", choices=("lateness", "search"))
    given = parser.parse_args()
    met = []
    if given.only != "search":
        table, on_time = lateness(given.rounds, given.seconds, given.rate)
        print(
            aligned(table), f"\nbar: at most {MAX_MORE_SECONDS * 1000:g} ms above the bare loop:", _met(on_time), "\n"
        )
        met.append(on_time)
    if given.only != "lateness":
        table, all_found = searches()
        print(aligned(table), f"\nbar: {SEEDS} of {SEEDS} within 5 % and held by the interval:", _met(all_found))
        met.append(all_found)
    return 0 if all(met) else 1


def _met(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    sys.exit(main())
