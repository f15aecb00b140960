"""Row `throughput`: tokens per second at 1, 8 and 32 users, ours beside the best of the others, in turn.

Each round sends a slice to every server at every number of users; ratios are of the slices of one round.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender, counted, foreign_cores, tokens_per_second
from benchmarks.serving.servers import running, variants
from reports.numbers.percentiles import quantiles
from reports.numbers.statistics import Ratio, estimate, paired_ratio
from reports.text import Table, number

USERS = (1, 8, 32)
SECONDS = {1: 4.0, 8: 5.0, 32: 10.0}
RATE_SHARE, LATENCY_SECONDS = 0.7, 12.0
OURS = "rankwise"


@dataclass
class Measured:
    """tokens: by server and users, of each round; foreign: cores that were busy with other work, before each slice."""

    tokens: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    foreign: list[float] = field(default_factory=list)


def measure(
    cores: int,
    engines: Sequence[str],
    files: ModelFiles,
    program: Path | None,
    folder: Path,
    rounds: int,
    users: Sequence[int] = USERS,
) -> Measured:
    """Measure all servers on so many cores."""
    found, sender = Measured(), Sender(files)
    with running(variants(cores, engines), files, program, folder) as servers:
        for server in servers.values():  # the first requests find cold code
            with server.awake():
                sender.send(server, 3.0, users=8)
        for turn in range(rounds):
            # The order turns, so that no server always follows the same one.
            names = list(servers)[turn % len(servers) :] + list(servers)[: turn % len(servers)]
            for count in users:
                for name in names:
                    found.foreign.append(foreign_cores(0.3))
                    with servers[name].awake():
                        run = sender.send(servers[name], SECONDS[count], users=count)
                    value = tokens_per_second(run)
                    found.tokens.setdefault((name, count), {})[turn] = value
                    print(
                        f"  round {turn} {count:2} users {name:16} {value:7.1f} tokens/s", file=sys.stderr, flush=True
                    )
    return found


def table(cores: int, found: Measured) -> tuple[Table, bool]:
    """Medians, and ours against the best other server at each number of users."""
    names = list(dict.fromkeys(name for name, _ in found.tokens))
    rows, met = [], True
    for users in sorted({count for _, count in found.tokens}):
        medians = {name: _median(found.tokens[name, users]) for name in names}
        best = max((name for name in names if name != OURS), key=lambda name: medians[name])
        ratio = paired_ratio(found.tokens[OURS, users], found.tokens[best, users])
        assert ratio is not None
        met &= ratio.value > 1
        rows.append((str(users), *(number(medians[name]) for name in names), best, ratio_cell(ratio)))
    return Table(
        (f"users, {cores} core{'s' if cores > 1 else ''}", *names, "best other", "ours to it"), tuple(rows)
    ), met


def latency_row(
    cores: int, engines: Sequence[str], files: ModelFiles, program: Path | None, folder: Path, rounds: int
) -> tuple[list[Table], bool]:
    """P99 of the time between tokens of all servers at one rate: 70 % of the best other server's limit."""
    sender, gaps = Sender(files), dict[str, dict[int, float]]()
    with running(variants(cores, engines), files, program, folder) as servers:
        limits = {}
        for name, server in servers.items():
            with server.awake():
                sender.send(server, 3.0, users=8)
                limits[name] = tokens_per_second(sender.send(server, LATENCY_SECONDS, users=32)) / sender.new_tokens
        rate = RATE_SHARE * max(limit for name, limit in limits.items() if name != OURS)
        for turn in range(rounds):
            for name, server in servers.items():
                with server.awake():
                    run = sender.send(server, LATENCY_SECONDS, rate=rate)
                kept = counted(run).holds(run.columns["scheduled_seconds"]) & run.completed
                values = run.gap_seconds[kept[run.gap_request]]
                gaps.setdefault(name, {})[turn] = float(quantiles(values, (0.99,))[0])
                print(f"  round {turn} {name:16} P99 {gaps[name][turn] * 1000:6.0f} ms", file=sys.stderr, flush=True)
    medians = {name: _median(values) for name, values in gaps.items()}
    best = min((name for name in medians if name != OURS), key=lambda name: medians[name])
    ratio = paired_ratio(gaps[OURS], gaps[best])
    assert ratio is not None
    rows = [(name, number(limits[name]), number(value * 1000)) for name, value in medians.items()]
    rows.append((f"ours to {best}", "", ratio_cell(ratio)))
    columns = (f"{rate:.2f} requests/s, {cores} cores", "limit, requests/s", "P99 between tokens, ms")
    return [Table(columns, tuple(rows))], ratio.value <= 1


def ratio_cell(ratio: Ratio) -> str:
    """The ratio with its interval, or the range of the rounds where there are too few."""
    low, high = ratio.bounds
    kind = "95 %" if ratio.interval else "range"
    return f"{ratio.value:.2f} ({low:.2f} to {high:.2f}, {kind}, n={ratio.count})"


def _median(values: Mapping[int, float]) -> float:
    found = estimate(values.values())
    assert found is not None
    return found.median
