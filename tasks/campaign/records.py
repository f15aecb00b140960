"""Merge the parts written by the ranks into records. Does not import Prefect.

Parts decide the outcome, not exit codes. A measurement that began but has an incomplete set of parts gets a record
with the job's failure; a measurement that never began is returned, to be measured in another launch.
"""

import io
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import canonical_json, content_hash, utc_now, write_atomically
from configs.common.failure_kinds import PEER_LOST, SUSPENDED
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.secrets import excerpt
from configs.plans.job import Job, JobEnd, Measurement, Progress
from configs.plans.paths import JobPaths, RunPaths
from configs.records.record import (
    MAX_AMOUNT,
    MAX_RECORD_BYTES,
    Accounting,
    Failure,
    Figure,
    RankPart,
    Record,
    SchemaError,
    Status,
    read_part,
    read_record,
)
from configs.records.samples import DamagedSamplesError, read_archive
from configs.targets.target import LocalTarget
from tasks.campaign.ledger import set_aside

_MAX_MESSAGE_CHARACTERS = 600


@dataclass
class Collected:
    """What became of one job's measurements."""

    records: list[Record] = field(default_factory=list)
    unreached: list[Measurement] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    start_failure: str | None = None
    end: JobEnd | None = None
    job: str = ""


def collect_job(run: RunPaths, name: str) -> Collected:
    """Merge what a job left behind that has ended. Merging again what was merged changes nothing."""
    paths = run.job(name)
    job = read_model(paths.job, Job, PLAN_BYTES)
    end = read_model(paths.end, JobEnd)
    ranks = _ranks(job)
    begun = {progress.measurement for progress in _progresses(paths, ranks) if progress.measurement} | {end.measurement}
    result = Collected(end=end, job=name)
    for position, measurement in enumerate(job.measurements):
        recorded = run.record(measurement.cell.key, job.measuring_pass, measurement.repeat, measurement.attempt)
        if recorded.exists():
            _finish_merging(paths, recorded, measurement, ranks)
            continue
        parts, damaged = _parts(run, paths, measurement, ranks)
        result.set_aside += damaged
        if len(parts) < ranks and not parts and measurement.name not in begun and not damaged:
            result.unreached.append(measurement)
            continue
        samples, torn = _samples(run, paths, measurement, parts)
        record = _small_enough(_merged(run, job, position, [] if torn else parts, end, damaged + torn))
        result.set_aside += torn
        _write(run, record, samples, _environment(parts))
        _keep_files(paths, recorded, measurement, ranks)
        _remove_parts(paths, measurement, ranks)
        result.records.append(record)
    if len(result.unreached) == len(job.measurements):
        result.start_failure = end.message or f"the launch ended ({end.status}) before the first cell"
    return result


def failed_records(
    run: RunPaths, job_name: str, measurements: list[Measurement], status: Status, message: str
) -> list[Record]:
    """Records for measurements that could not be made at all: no cell of the grid disappears."""
    records = []
    job = read_model(run.job(job_name).job, Job, PLAN_BYTES)
    for position, measurement in enumerate(measurements):
        record = Record(
            **_identity(job, position, measurement),
            status=status,
            started_at=None,
            finished_at=utc_now(),
            failure=Failure(message=excerpt(message, _MAX_MESSAGE_CHARACTERS), log=_log(run, job, None)),
            accounting=_accounting(run.job(job_name)),
        )
        _write(run, record, {}, {})
        records.append(record)
    return records


def _ranks(job: Job) -> int:
    return job.ranks_per_node * job.cell.nodes


def _progresses(paths: JobPaths, ranks: int) -> list[Progress]:
    found = []
    for rank in range(ranks):
        try:
            found.append(read_model(paths.progress(rank), Progress))
        except (OSError, ValueError):
            continue  # the rank never came so far
    return found


def _parts(run: RunPaths, paths: JobPaths, measurement: Measurement, ranks: int) -> tuple[list[RankPart], list[str]]:
    """The readable parts of one measurement, by rank, and a line for each that had to be set aside."""
    parts, damaged = [], []
    for rank in range(ranks):
        path = paths.part(measurement.name, rank)
        if not path.exists():
            continue
        try:
            parts.append(read_part(path))
        except SchemaError:
            raise
        except ValueError as error:
            damaged.append(set_aside(run, path, str(error)))
    return parts, damaged


def _samples(
    run: RunPaths, paths: JobPaths, measurement: Measurement, parts: list[RankPart]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Columns of all ranks as `<rank>/<column>`; none, and why, if one archive is damaged."""
    columns: dict[str, np.ndarray] = {}
    for part in parts:
        path = paths.samples(measurement.name, part.rank)
        if not path.exists():
            continue
        try:
            columns |= {f"{part.rank}/{name}": column for name, column in read_archive(path).items()}
        except DamagedSamplesError as error:
            if error.refusal is not None:
                raise error.refusal from error
            return {}, [set_aside(run, path.with_suffix(".json"), str(error))]
    return columns, []


def _merged(run: RunPaths, job: Job, position: int, parts: list[RankPart], end: JobEnd, damaged: list[str]) -> Record:
    measurement, paths = job.measurements[position], run.job(job.name)
    status, failure = _verdict(measurement.name, parts, end, _ranks(job), damaged)
    started_at, finished_at = _span(parts) if parts else (None, end.finished_at)
    if status is Status.COMPLETED and job.measuring_pass == "nsys":
        status, failure = _nsys_verdict(paths, measurement, _ranks(job))
    return Record(
        **_identity(job, position, measurement),
        status=status,
        started_at=started_at,
        finished_at=finished_at,
        failure=failure and failure.model_copy(update={"log": _log(run, job, failure.rank)}),
        hosts=[part.host for part in parts],
        accounting=_accounting(paths),
        **_figures(parts),
    )


def _identity(job: Job, position: int, measurement: Measurement) -> dict[str, Any]:
    """The fields of a record that say of what it is."""
    return {
        "key": measurement.cell.key,
        "cell": measurement.cell,
        "measuring_pass": job.measuring_pass,
        "repeat": measurement.repeat,
        "attempt": measurement.attempt,
        "job": job.name,
        "position": position,
    }


def _verdict(
    measurement: str, parts: list[RankPart], end: JobEnd, ranks: int, damaged: list[str]
) -> tuple[Status, Failure | None]:
    """How the measurement ended: the ranks' own word first, then the launcher's; of a pause they know nothing."""
    message = end.message or f"the launch ended: {end.status}"
    told = end.status, Failure(message=excerpt(message, _MAX_MESSAGE_CHARACTERS), rank=end.rank, kind=end.kind)
    if (end.kind, end.measurement) == (SUSPENDED, measurement):
        return told
    failures = [part for part in parts if part.status is not Status.COMPLETED]
    if not failures and len(parts) == ranks:
        return Status.COMPLETED, None
    primary = [part for part in failures if part.failure is None or part.failure.kind != PEER_LOST]
    if primary:
        seconds = _seconds_until_end(parts)
        first = min(primary, key=lambda part: seconds[part.rank])
        return first.status, first.failure
    if damaged:
        return Status.LOST, Failure(message=excerpt(damaged[0], _MAX_MESSAGE_CHARACTERS))
    if end.status is Status.COMPLETED:
        return Status.LOST, Failure(message="the ranks exited without an error and without a result")
    return told


def _seconds_until_end(parts: list[RankPart]) -> dict[int, float]:
    """Seconds from the measurement's start to each rank's end, by rank, each by its own host's clock.

    Clocks of hosts differ by more than the ranks' starts do, which the collectives of the measurement before align.
    """
    began: dict[str, datetime] = {}
    for part in parts:
        at = datetime.fromisoformat(part.started_at)
        began[part.host] = min(at, began.get(part.host, at))
    return {part.rank: (datetime.fromisoformat(part.finished_at) - began[part.host]).total_seconds() for part in parts}


def _span(parts: list[RankPart]) -> tuple[str, str]:
    """When a measurement started and finished, by the clock of the first rank's host alone."""
    started_at = min(part.started_at for part in parts if part.host == parts[0].host)
    seconds = _seconds_until_end(parts)
    last = max(parts, key=lambda part: seconds[part.rank])
    if last.host == parts[0].host:
        return started_at, last.finished_at
    finished = datetime.fromisoformat(started_at) + timedelta(seconds=seconds[last.rank])
    return started_at, finished.isoformat(timespec="microseconds")


def _nsys_verdict(paths: JobPaths, measurement: Measurement, ranks: int) -> tuple[Status, Failure | None]:
    """A measurement whose ranks are content still failed where nsys left no report: there is nothing to look at."""
    for rank in range(ranks):
        if not paths.nsys_report(measurement.name, rank).exists():
            message = f"nsys wrote no report of rank {rank}; see the rank's log"
            return Status.FAILED, Failure(message=message, rank=rank)
    return Status.COMPLETED, None


def _environment(parts: list[RankPart]) -> dict[str, Any]:
    return next((part.environment for part in parts if part.environment), {})


def _log(run: RunPaths, job: Job, rank: int | None) -> str:
    """Where to read more, relative to the run folder."""
    paths = run.job(job.name)
    path = _launcher_log(paths, job) if rank is None else paths.rank_log(rank)
    return str(path.relative_to(run.folder))


def _launcher_log(paths: JobPaths, job: Job) -> Path:
    """Of several nodes the first that says that something was wrong."""
    if isinstance(job.target, LocalTarget):
        return paths.launcher_log
    for node_rank in range(job.cell.nodes):
        with suppress(OSError, ValueError):
            end = read_model(paths.node_end(node_rank), JobEnd)
            if end.status is not Status.COMPLETED:
                return paths.node_log(node_rank)
    return paths.node_log(0)


def _accounting(paths: JobPaths) -> Accounting | None:
    """What the scheduler says of the job; None where it keeps no accounts."""
    try:
        return read_model(paths.accounting, Accounting)
    except (FileNotFoundError, ValueError):
        return None


def _figures(parts: list[RankPart]) -> dict[str, Any]:
    """Figures of rank 0; by rank where they differ; and the share of the CPUs that others took."""
    if not parts:
        return {}
    # Some figures are only of ranks after the first: of the stage that has the head, for one.
    figures = {name: None for part in parts for name in part.figures} | parts[0].figures
    by_rank = {
        name: [part.figures.get(name) for part in parts]
        for name in figures
        if len({repr(part.figures.get(name)) for part in parts}) > 1
    }
    figures["others_cpu_share"] = _others_cpu_share(parts)
    return {"figures": figures, "rank_figures": by_rank}


def _others_cpu_share(parts: list[RankPart]) -> float | None:
    """CPU seconds of processes that are not ours over those that the machine had, 0 to 1."""
    first = parts[0].figures
    # The first rank of each node says what its machine had.
    heads = [part.figures for part in parts if part.figures.get("machine_cores") is not None]
    wall, own = first.get("measurement_seconds"), [part.figures.get("cpu_seconds") for part in parts]
    # A server and what sends its requests, or a script's launcher, are processes of their own, and ours.
    own += [part.figures["children_cpu_seconds"] for part in parts if "children_cpu_seconds" in part.figures]
    busy, cores = ([head.get(name) for head in heads] for name in ("cpu_busy_seconds", "machine_cores"))
    if not heads or not wall or not all(isinstance(value, int | float) for value in (wall, *busy, *cores, *own)):
        return None
    others, had = _total(busy) - _total(own), _total([wall]) * _total(cores)
    # A script's own figures may bear these names.
    return round(min(1.0, max(0.0, others) / had), 4) if had > 0 else None


def _total(values: list[Figure]) -> float:
    """The sum of numbers that are amounts."""
    return math.fsum(value for value in values if isinstance(value, int | float) and abs(value) <= MAX_AMOUNT)


def _write(run: RunPaths, record: Record, samples: dict[str, np.ndarray], environment: dict[str, Any]) -> None:
    """Samples first, the record last: a record's existence means that it is whole."""
    path = run.record(record.key, record.measuring_pass, record.repeat, record.attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    updates: dict[str, Any] = {"num_columns": len(samples)}
    if environment:
        updates["environment"] = content_hash(environment)
        run.environments.mkdir(exist_ok=True)
        if not run.environment(updates["environment"]).exists():
            write_atomically(run.environment(updates["environment"]), canonical_json(environment))
    if samples:
        archive = io.BytesIO()
        np.savez(archive, allow_pickle=False, **samples)
        write_atomically(path.with_suffix(".npz"), archive.getvalue())
    record = record.model_copy(update=updates)
    size = _size(record)
    assert size <= MAX_RECORD_BYTES + 100, f"record of {record.key} has {size} bytes"  # its updates are bytes more
    write_atomically(path, record.model_dump_json())


def _size(record: Record) -> int:
    """Bytes of a record that count towards its limit."""
    return len(
        record.model_dump_json(exclude={"cell": True, "rank_figures": True, "hosts": True, "accounting": {"nodes"}})
    )


def _small_enough(record: Record) -> Record:
    """The record, or one without figures where a script has told more of them than a record holds."""
    size = _size(record)
    if size <= MAX_RECORD_BYTES:
        return record
    told = f"the figures take {size:,} bytes of the record, expected at most {MAX_RECORD_BYTES:,}. Name fewer figures"
    failure = Failure(message=told, log=record.failure.log if record.failure else None)
    lost = {"status": Status.FAILED, "failure": failure, "figures": {}, "rank_figures": {}}
    return record.model_copy(update=lost)


def _finish_merging(paths: JobPaths, recorded: Path, measurement: Measurement, ranks: int) -> None:
    """Do what is left where a run was killed between writing a record and clearing its parts away.

    Parts beside a record of another job are left: they are work done twice, which must not be hidden.
    """
    try:
        mine = read_record(recorded).job == paths.folder.name
    except SchemaError:
        raise
    except ValueError:
        return  # the ledger sets it aside
    if mine:
        _keep_files(paths, recorded, measurement, ranks)
        _remove_parts(paths, measurement, ranks)


def _keep_files(paths: JobPaths, recorded: Path, measurement: Measurement, ranks: int) -> None:
    """Move what ranks left for people beside the record: texts, traces, what they did last before they failed."""
    for rank in range(ranks):
        found = (
            paths.completions(measurement.name, rank),
            paths.trace(measurement.name, rank),
            paths.perf_text(measurement.name, rank),
            paths.perf_data(measurement.name, rank),
            paths.nsys_report(measurement.name, rank),
            paths.flight_recorder(measurement.name, rank),
        )
        for path in found:
            if path.exists():
                # The job folder may lie on a cluster's disk.
                shutil.move(path, recorded.with_name(recorded.stem + path.name.removeprefix(measurement.name)))


def _remove_parts(paths: JobPaths, measurement: Measurement, ranks: int) -> None:
    """The record holds all that the parts held."""
    for rank in range(ranks):
        paths.part(measurement.name, rank).unlink(missing_ok=True)
        paths.samples(measurement.name, rank).unlink(missing_ok=True)
