"""`make bench-serving`: our server beside others, row by row; docs/measurements/serving.md has what was found.

    python -m benchmarks.serving.bench --only throughput --cores 2 --rounds 5 --llama-server PATH

Other servers are those of `rankwise engine add`, and llama-server where it is named. All rows together take over an
hour on two cores, which should have nothing else to do. Exit code 1 where a bar is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.serving import clients, harness, http_alone, own, reliability, sampled, throughput
from benchmarks.serving.model import ModelFiles, write_model
from benchmarks.serving.servers import installed
from reports.text import Table, aligned


class Given(NamedTuple):
    """What a row is measured with."""

    files: ModelFiles
    engines: list[str]
    program: Path | None
    folder: Path
    rounds: int
    cores: tuple[int, ...]
    users: tuple[int, ...]
    clients: dict[str, Path]
    harness: Path | None
    latency_rounds: int


def _throughput(given: Given) -> tuple[list[Table], bool]:
    tables, met = [], True
    for cores in given.cores:
        latency = given.latency_rounds if given.engines and cores == max(given.cores) else 0
        session = throughput.Session(cores, given.engines, given.rounds, given.users, latency)
        found = throughput.measure(session, given.files, given.program, given.folder / "logs")
        table, ahead = throughput.table(cores, found)
        busy = sorted(found.foreign)[len(found.foreign) // 2]
        print(f"other work before the slices: {busy:.2f} cores at the median, {max(found.foreign):.2f} at most")
        tables.append(table)
        met &= ahead
        if found.gaps:
            table, ahead = throughput.latency_table(cores, found)
            tables.append(table)
            met &= ahead
    return tables, met


ROWS: dict[str, tuple[str, Callable[[Given], tuple[list[Table], bool]]]] = {
    "throughput": (
        "ahead of each server at each number of users; P99 between tokens no worse than the best of the others",
        _throughput,
    ),
    "layout": (
        "tp=2 1.55 times one rank, 1.75 in steps alone; at most 2 % between steps; 75 % of the engine alone",
        lambda given: own.layout_row(given.files, given.folder, given.rounds),
    ),
    "http": (
        "95 % of what ranks offer that cost nothing and step every 5 ms, 32 users",
        lambda given: http_alone.http_row(given.files, given.folder, given.rounds),
    ),
    "sampled": (
        "sampled answers at 0.9 times the speed of greedy ones",
        lambda given: sampled.sampled_row(given.files, given.folder, given.rounds),
    ),
    "prefix": ("at least 8 times shorter", lambda given: own.prefix_row(given.files, given.folder, given.rounds)),
    "invariant": (
        "200 of 200 with equal bits, at most 15 % slower",
        lambda given: own.invariant_row(given.files, given.folder, given.rounds),
    ),
    "limit": ("all five intervals overlap", lambda given: own.limit_row(given.files, given.folder)),
    "clients": (
        "all work; mean TTFT and TPOT within 10 % of the server's own, of the same requests",
        lambda given: clients.clients_row(given.files, given.folder, given.clients),
    ),
    "harness": (
        f"each score within {harness.WITHIN:g} of transformers'",
        lambda given: harness.harness_row(given.harness, given.folder),
    ),
    "kills": (
        "nothing hangs, back within 15 s, no wrong answer",
        lambda given: reliability.kills_row(given.folder / "logs"),
    ),
    "hostile": (
        "none crashes, hangs or is answered 200; all in the API's error form",
        lambda given: reliability.hostile_row(given.folder / "logs"),
    ),
    "memory": (
        "flat within 5 %, no block of the cache lost",
        lambda given: reliability.memory_row(given.folder / "logs"),
    ),
}


def main() -> int:
    """Measure the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ROWS, help="this row alone; may be repeated")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--latency-rounds", type=int, default=4, help="of latencies at one rate; 0: none")
    parser.add_argument("--cores", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--users", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--engine", action="append", help="other servers; default: all that are installed")
    parser.add_argument("--llama-server", type=Path, help="path of llama.cpp's llama-server, built for this machine")
    parser.add_argument("--aiperf", type=Path, help="path of the aiperf command, for the row clients")
    parser.add_argument("--guidellm", type=Path, help="path of the guidellm command, for the row clients")
    parser.add_argument("--lm-eval", type=Path, help="path of the lm_eval command, for the row harness")
    parser.add_argument("--folder", type=Path, help="keep the model's files and the servers' logs here")
    arguments = parser.parse_args()
    engines = installed(arguments.llama_server) if arguments.engine is None else arguments.engine
    met = True
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = write_model(folder, gguf="llama.cpp" in engines)
        given = Given(
            files,
            engines,
            arguments.llama_server,
            folder,
            arguments.rounds,
            tuple(arguments.cores or (1, 2)),
            tuple(arguments.users or throughput.USERS),
            {name: path for name, path in (("aiperf", arguments.aiperf), ("guidellm", arguments.guidellm)) if path},
            arguments.lm_eval,
            arguments.latency_rounds,
        )
        for name in arguments.only or ROWS:
            bar, measure = ROWS[name]
            print(f"{name}:", flush=True)
            tables, reached = measure(given)
            for table in tables:
                print(aligned(table))
            print(f"bar: {bar}: {'met' if reached else 'missed'}\n", flush=True)
            met &= reached
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
