"""Row `throughput`: tokens per second at 1, 8 and 32 users, then P99 between tokens at one rate, on all servers.

Each round sends a slice to every server at every number of users; ratios are of the slices of one round.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender, counted, foreign_cores, whole_speed
from benchmarks.serving.servers import MeasuredServer, running, variants
from reports.numbers.percentiles import quantiles
from reports.numbers.statistics import Ratio, estimate, paired_ratio
from reports.text import Table, number

USERS = (1, 8, 32)
RATE_SHARE, LATENCY_SECONDS = 0.7, 10.0
OURS = "rankwise"


@dataclass
class Measured:
    """tokens: by server and users, of each round; foreign: cores that were busy with other work, before each slice.

    gaps: P99 of the time between tokens at `rate`, by server, of each round.
    """

    tokens: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    foreign: list[float] = field(default_factory=list)
    gaps: dict[str, dict[int, float]] = field(default_factory=dict)
    rate: float = 0.0

    def left(self, names: Sequence[str]) -> list[str]:
        """Servers without those that another setting of the same engine is ahead of at each number of users."""
        return [name for name in names if not any(self._beats(other, name) for other in names)]

    def _beats(self, one: str, other: str) -> bool:
        same = one != other and one.split()[0] == other.split()[0]
        return same and all(
            self.tokens[one, users][0] > values[0] for (name, users), values in self.tokens.items() if name == other
        )


@dataclass(frozen=True)
class Session:
    """What is measured: so many cores, engines beside ours, rounds, and rounds of latencies at one rate."""

    cores: int
    engines: Sequence[str]
    rounds: int
    users: Sequence[int] = USERS
    latency_rounds: int = 0


def measure(session: Session, files: ModelFiles, program: Path | None, folder: Path) -> Measured:
    """Measure all servers on so many cores; then, in as many rounds as asked for, latencies at one rate."""
    found, sender = Measured(), Sender(files)
    with running(variants(session.cores, session.engines), files, program, folder) as servers:
        for server in servers.values():  # the first requests find cold code
            with server.awake():
                sender.send(server, 2.0, users=8)
        names = list(servers)
        for turn in range(session.rounds):
            # The order turns, so that no server always follows the same one.
            order = names[turn % len(names) :] + names[: turn % len(names)]
            _round(turn, session.users, [servers[name] for name in order], sender, found)
            names = found.left(names) if turn == 0 else names
        if session.latency_rounds:
            best = max(_median(found.tokens[name, max(session.users)]) for name in names if name != OURS)
            found.rate = RATE_SHARE * best / sender.new_tokens
        for turn in range(session.latency_rounds):
            _latency_round(turn, [servers[name] for name in names], sender, found)
    return found


def _round(turn: int, users: Sequence[int], servers: Sequence[MeasuredServer], sender: Sender, found: Measured) -> None:
    for count in users:
        for server in servers:
            name = server.variant.name
            found.foreign.append(foreign_cores(0.2))
            with server.awake():
                value = whole_speed(sender.send_answers(server, users=count))
            found.tokens.setdefault((name, count), {})[turn] = value
            print(f"  round {turn} {count:2} users {name:16} {value:7.1f} tokens/s", file=sys.stderr, flush=True)


def _latency_round(turn: int, servers: Sequence[MeasuredServer], sender: Sender, found: Measured) -> None:
    for server in servers:
        name = server.variant.name
        with server.awake():
            run = sender.send(server, LATENCY_SECONDS, rate=found.rate)
        kept = counted(run).holds(run.columns["scheduled_seconds"]) & run.completed
        p99 = float(quantiles(run.gap_seconds[kept[run.gap_request]], (0.99,))[0])
        found.gaps.setdefault(name, {})[turn] = p99
        print(f"  round {turn} {name:16} P99 {p99 * 1000:6.0f} ms", file=sys.stderr, flush=True)


def table(cores: int, found: Measured) -> tuple[Table, bool]:
    """Medians, and ours against the best other server at each number of users."""
    names = list(dict.fromkeys(name for name, _ in found.tokens))
    rows, met = [], True
    for users in sorted({count for _, count in found.tokens}):
        medians = {name: _median(found.tokens[name, users]) for name in names}
        cells = [_cell(found.tokens[name, users], medians[name]) for name in names]
        others = [name for name in names if name != OURS]
        if not others:
            rows.append((str(users), *cells, "-", "-"))
            continue
        best = max(others, key=lambda name: medians[name])
        ratio = paired_ratio(found.tokens[OURS, users], found.tokens[best, users])
        assert ratio is not None
        met &= ratio.value > 1
        rows.append((str(users), *cells, best, ratio_cell(ratio)))
    columns = (f"users, {cores} core{'s' if cores > 1 else ''}", *names, "best other", "ours to it")
    return Table(columns, tuple(rows)), met


def latency_table(cores: int, found: Measured) -> tuple[Table, bool]:
    """P99 of the time between tokens of all servers at one rate: 70 % of the best other server's limit."""
    medians = {name: _median(values) for name, values in found.gaps.items()}
    best = min((name for name in medians if name != OURS), key=lambda name: medians[name])
    ratio = paired_ratio(found.gaps[OURS], found.gaps[best])
    assert ratio is not None
    rows = [(name, number(value * 1000)) for name, value in medians.items()]
    rows.append((f"ours to {best}", ratio_cell(ratio)))
    return Table(
        (f"{found.rate:.2f} requests/s, {cores} cores", "P99 between tokens, ms"), tuple(rows)
    ), ratio.value <= 1


def ratio_cell(ratio: Ratio) -> str:
    """The ratio with its interval, or the range of the rounds where there are too few."""
    low, high = ratio.bounds
    kind = "95 %" if ratio.interval else "range"
    return f"{ratio.value:.2f} ({low:.2f} to {high:.2f}, {kind}, n={ratio.count})"


def _cell(values: Mapping[int, float], median: float) -> str:
    return number(median) + ("" if len(values) > 1 else " (1 round)")


def _median(values: Mapping[int, float]) -> float:
    found = estimate(values.values())
    assert found is not None
    return found.median
