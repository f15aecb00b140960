"""Preflight checks: jobs that test the nodes of a target, and their verdicts. Does not import Prefect.

    found = check_nodes(target, plan, run, cache, told)          # a TargetPreflight

A check job requests as many nodes as a job of the target may have. If a node prevents its start or is slow, another
check without that node tests the replacements. A failing rank condemns its node only if a check without the node
succeeds, because an installation error fails on every node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from configs.common.base import content_hash, utc_now
from configs.common.execution import Layout
from configs.common.failure_kinds import PEER_LOST
from configs.common.files.reading import read_model
from configs.plans.job import Job, JobEnd, Launcher, Measurement
from configs.plans.packing import Launch
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.plans.preflight import NodeFigures, PairFigures, TargetPreflight, rounds_of_pairs
from configs.records.record import Figure, Record, Status
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from configs.targets.resources import ClusterTarget
from configs.workloads.preflight import PreflightWorkload
from reports.preflight import judge_nodes
from slurm.schedulers.inventory import usable_nodes
from slurm.schedulers.refusals import Refused, Unavailable
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.launches.leftovers import mark_collected
from tasks.campaign.records import Collected

_CHECK_SECONDS = 120.0
_COLUMNS = ("first_node", "second_node", "latency_seconds", "bytes_per_second", "sum_seconds", "message_seconds")


@dataclass(frozen=True)
class Observer:
    """Whom to tell what a trial waits for, and whom to ask whether to go on: `check` raises where not."""

    notice: Callable[[str], None]
    check: Callable[[], None]


@dataclass
class NodeCheck:
    """One job that tested nodes. `broken` and `suspects` are names of nodes, with what happened there."""

    nodes: list[NodeFigures] = field(default_factory=list)
    pairs: list[PairFigures] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class _Seen:
    """What all trials of a target have shown."""

    nodes: dict[str, NodeFigures] = field(default_factory=dict)
    pairs: dict[tuple[str, str], PairFigures] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def judged(self) -> tuple[tuple[NodeFigures, ...], tuple[PairFigures, ...]]:
        """Measured nodes and pairs with their verdicts."""
        return judge_nodes(list(self.nodes.values()), list(self.pairs.values()))

    def avoided(self) -> set[str]:
        """Nodes that the next trial does without."""
        slow = {node.node for node in self.judged()[0] if node.verdict == "slow"}
        return slow | self.broken.keys() | self.suspects.keys()


def settings_of(target: ClusterTarget) -> str:
    """Changes when a target's trial would."""
    return content_hash(target.model_dump(mode="json", exclude={"price_usd_per_hour", "machine"}), digits=8)


def check_nodes(target: ClusterTarget, plan: Plan, run: RunPaths, cache: Path, told: Observer) -> TargetPreflight:
    """Test the target's nodes by jobs in the folder `run`."""
    return checked(target, lambda: usable_nodes(target), partial(_check, target, plan, run, cache, told))


def checked(
    target: ClusterTarget, usable: Callable[[], Sequence[str]], test: Callable[[int, Sequence[str]], NodeCheck]
) -> TargetPreflight:
    """Test until enough nodes were found sound, or no more can be learnt.

    usable: names of nodes that could be tested, none where the scheduler cannot say. test: one trial on so many
    nodes, without those named.
    """
    seen = _Seen()
    for _ in range(1 + target.retries):
        there, avoided = set(usable()), seen.avoided()
        asked = min(target.nodes, len(there - avoided)) if there else target.nodes
        if asked < 1:
            seen.notes.append("no other node left to check")
            break
        check = test(asked, sorted(avoided))
        if not _learn(seen, check):
            break
        sound = seen.nodes.keys() - seen.avoided()
        untested = there - seen.nodes.keys() - seen.avoided()
        if check.failure is None and (len(sound) >= target.nodes or not untested):
            break
    return _found(target, seen)


def _learn(seen: _Seen, check: NodeCheck) -> bool:
    """Take up what a trial has shown; False where another could not show more."""
    if check.failure is None:
        seen.nodes |= {node.node: node for node in check.nodes}
        seen.pairs |= {pair.nodes: pair for pair in check.pairs}
        seen.broken |= seen.suspects  # it works without them
        seen.suspects = {}
        return True
    if seen.suspects:
        seen.notes.append(f"preflight checks failed, not because of a single node: {check.failure}")
        seen.suspects = {}
        return False
    seen.broken |= check.broken
    seen.suspects = check.suspects
    if not check.broken and not check.suspects:
        seen.notes.append(f"preflight checks failed: {check.failure}")
    return bool(check.broken or check.suspects)


def _found(target: ClusterTarget, seen: _Seen) -> TargetPreflight:
    nodes, pairs = seen.judged()
    for name, failure in seen.suspects.items():
        seen.notes.append(f"node {name} failed, and no check without it was possible: {failure}")
    broken = [NodeFigures(node=name, verdict="broken", reason=reason) for name, reason in seen.broken.items()]
    kept = [node for node in nodes if node.node not in seen.broken]
    return TargetPreflight(
        target=target.name,
        settings=settings_of(target),
        at=utc_now(),
        ranks_per_node=target.ranks_per_node,
        nodes=tuple(sorted([*kept, *broken], key=lambda node: node.node)),
        pairs=pairs,
        notes=tuple(seen.notes),
    )


def _check(
    target: ClusterTarget, plan: Plan, run: RunPaths, cache: Path, told: Observer, nodes: int, without: Sequence[str]
) -> NodeCheck:
    """One job on so many nodes, seen to its end."""
    cell = Cell(
        workload=PreflightWorkload(),
        layout=Layout(dp=nodes * target.ranks_per_node),
        target=target.name,
        nodes=nodes,
        cores_per_rank=target.cores_per_rank,
        env=target.env,
    )
    rules = plan.measuring.model_copy(update={"cell_timeout_seconds": _CHECK_SECONDS})
    check_plan = plan.model_copy(update={"measuring": rules})
    run.jobs.mkdir(parents=True, exist_ok=True)
    attempt = 1 + sum(1 for _ in run.jobs.iterdir())
    launch = Launch("timed", (Measurement(cell=cell, repeat=0, attempt=attempt),))
    job = write_job(launch, check_plan, run, cache, exclude=without)
    try:
        collected = run_job(job, run, told.notice, told.check)
    except (Refused, Unavailable) as error:
        return NodeCheck(failure=str(error))
    mark_collected(run, job.name)
    if collected.records and collected.records[0].status is Status.COMPLETED:
        return _measured(collected.records[0], run)
    return _failed(job, run.job(job.name), collected)


def _measured(record: Record, run: RunPaths) -> NodeCheck:
    """Figures by node, the slowest rank's, and by pair, as the first node's first rank saw it."""
    cell = record.cell
    a_node = cell.layout.ranks // cell.nodes
    names = [str(name) for name in _by_rank(record, "node")[::a_node]]
    nodes = [
        NodeFigures(
            node=name,
            gemm_flops_per_second=_min(_by_rank(record, "gemm_flops_per_second"), place, a_node),
            read_bytes_per_second=_min(_by_rank(record, "read_bytes_per_second"), place, a_node),
        )
        for place, name in enumerate(names)
    ]
    path = run.record(record.key, record.measuring_pass, record.repeat, record.attempt).with_suffix(".npz")
    columns = read_samples(path, _COLUMNS) if cell.nodes > 1 else {}
    known: dict[tuple[int, int], tuple[float, ...]] = {}
    for place in range(cell.nodes if columns else 0):
        of_rank = [columns[f"{place * a_node}/{name}"] for name in _COLUMNS]
        for first, second, *figures in zip(*of_rank, strict=True):
            known[int(first), int(second)] = tuple(map(float, figures))
    assert len(known) == sum(map(len, rounds_of_pairs(cell.nodes))), "every pair was measured"
    pairs = [
        PairFigures(
            nodes=_sorted_pair(names[first], names[second]),
            latency_seconds=latency,
            bytes_per_second=rate,
            sum_seconds=summed or None,
            message_seconds=message or None,
        )
        for (first, second), (latency, rate, summed, message) in sorted(known.items())
    ]
    return NodeCheck(nodes, pairs)


def _by_rank(record: Record, figure: str) -> list[Figure]:
    """Where all ranks have the same, the record holds it once."""
    return record.rank_figures.get(figure) or [record.figures[figure]] * record.cell.layout.ranks


def _min(values: Sequence[Figure], node: int, a_node: int) -> float:
    return min(float(value) for value in values[node * a_node : (node + 1) * a_node] if value is not None)


def _sorted_pair(first: str, second: str) -> tuple[str, str]:
    return (first, second) if first < second else (second, first)


def _failed(job: Job, paths: JobPaths, collected: Collected) -> NodeCheck:
    """Return the nodes blamed by the launchers or the scheduler, else the node of the first failed rank."""
    end = read_model(paths.end, JobEnd)
    failure = collected.records[0].failure if collected.records else None
    message = (failure and failure.message) or end.message or f"the job ended: {end.status}"
    if end.nodes:
        return NodeCheck(broken=dict.fromkeys(end.nodes, message), failure=message)
    rank = failure.rank if failure and failure.kind != PEER_LOST else end.rank if end.kind != PEER_LOST else None
    suspect = None if rank is None or job.cell.nodes == 1 else _node_of(paths, rank // job.ranks_per_node)
    return NodeCheck(suspects={suspect: message} if suspect else {}, failure=message)


def _node_of(paths: JobPaths, node_rank: int) -> str | None:
    try:
        return read_model(paths.node_launcher(node_rank), Launcher).host
    except (OSError, ValueError):
        return None
