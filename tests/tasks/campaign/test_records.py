"""Parts become records; what is damaged is set aside; what was not measured is given back."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.common.base import SCHEMA_VERSION
from configs.common.execution import Layout
from configs.common.failure_kinds import SUSPENDED
from configs.common.files import reading
from configs.plans.job import Job, JobEnd, Measurement, Progress
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import CellPoint, Plan, PlannedExperiment
from configs.records.record import Accounting, Failure, RankPart, SchemaError, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads.noop import NoopWorkload
from tasks.campaign.ledger import (
    missing_measurements,
    read_ledger,
    set_aside,
    set_aside_damaged,
    told_set_aside,
)
from tasks.campaign.records import collect_job, failed_records

CELLS = [Cell(workload=NoopWorkload(items=2, label=label), layout=Layout(dp=2)) for label in "abc"]
MEASUREMENTS = tuple(Measurement(cell=cell, repeat=0, attempt=1) for cell in CELLS)
NAME = "0001-timed-x"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = RunPaths(tmp_path / "run")
    run.job(NAME).parts.mkdir(parents=True)
    job = Job(
        name=NAME,
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        measurements=MEASUREMENTS,
        ranks_per_node=2,
        timeout_seconds=60,
        inputs="",
        cache="",
    )
    run.job(NAME).job.write_text(job.model_dump_json())
    return run


def plan() -> Plan:
    points = tuple(CellPoint(cell=cell.key, values={"label": "x"}, label="x") for cell in CELLS)
    return Plan(
        study="s",
        models=(),
        targets=(LocalTarget(),),
        measuring=Measuring(repeats=1, memory=False),
        pack=True,
        experiments=(PlannedExperiment(name="e", kind="sweep", model=None, points=points),),
        cells={cell.key: cell for cell in CELLS},
        repeats={cell.key: 1 for cell in CELLS},
    )


def leave_part(
    paths: JobPaths,
    measurement: Measurement,
    rank: int,
    failure: Failure | None = None,
    finished: str = "2026-01-01T00:00:02+00:00",
    heads_node: bool | None = None,
    host: str = "h",
    started: str = "2026-01-01T00:00:01+00:00",
) -> None:
    heads_node = rank == 0 if heads_node is None else heads_node
    of_node = {"cpu_busy_seconds": 3.4, "machine_cores": 2}
    part = RankPart(
        measurement=measurement.name,
        rank=rank,
        host=host,
        status=Status.FAILED if failure else Status.COMPLETED,
        started_at=started,
        finished_at=finished,
        failure=failure,
        environment={"torch": "x"} if rank == 0 else {},
        figures={"measurement_seconds": 2.0, "cpu_seconds": 1.0 + rank, "backend": "gloo"}
        | (of_node if heads_node else {}),
    )
    archive = io.BytesIO()
    np.savez(archive, pass_seconds=np.array([1.0, 2.0 + rank]))
    paths.samples(measurement.name, rank).write_bytes(archive.getvalue())
    paths.part(measurement.name, rank).write_text(part.model_dump_json())


def leave_end(paths: JobPaths, status: Status = Status.COMPLETED, measurement: Measurement | None = None) -> None:
    end = JobEnd(
        status=status,
        return_code=0,
        measurement=measurement.name if measurement else None,
        rank=1 if measurement else None,
        kind="SIGKILL" if measurement else None,
        message="rank 1 was killed" if measurement else None,
        finished_at="2026-01-01T00:00:09+00:00",
    )
    paths.end.write_text(end.model_dump_json())


def test_parts_of_all_ranks_become_one_record(run: RunPaths) -> None:
    paths = run.job(NAME)
    for measurement in MEASUREMENTS:
        for rank in range(2):
            leave_part(paths, measurement, rank)
    leave_end(paths)
    collected = collect_job(run, NAME)
    assert [record.status for record in collected.records] == [Status.COMPLETED] * 3
    record = next(iter(read_ledger(run).entries.values()))[0].record
    assert record.rank_figures["cpu_seconds"] == [1.0, 2.0] and "backend" not in record.rank_figures
    assert record.figures["backend"] == "gloo"
    # 3.4 busy seconds, of which 3.0 ours, over 2 cores times 2 seconds.
    assert record.figures["others_cpu_share"] == pytest.approx(0.1)
    with np.load(run.record(record.key, "timed", 0, 1).with_suffix(".npz")) as samples:
        assert samples["1/pass_seconds"].tolist() == [1.0, 3.0]
    assert record.environment is not None
    assert json.loads(run.environment(record.environment).read_bytes()) == {"torch": "x"}
    assert not list(paths.parts.iterdir()), "the parts are in the record now"


def test_merging_again_changes_nothing(run: RunPaths) -> None:
    for rank in range(2):
        leave_part(run.job(NAME), MEASUREMENTS[0], rank)
    leave_end(run.job(NAME))
    first = collect_job(run, NAME)
    before = {path: path.read_bytes() for path in run.records.rglob("*") if path.is_file()}
    again = collect_job(run, NAME)
    assert len(first.records) == 1 and not again.records
    assert {path: path.read_bytes() for path in run.records.rglob("*") if path.is_file()} == before


def test_a_merge_that_was_interrupted_is_finished(run: RunPaths) -> None:
    for rank in range(2):
        leave_part(run.job(NAME), MEASUREMENTS[0], rank)
    leave_end(run.job(NAME))
    collect_job(run, NAME)
    leave_part(run.job(NAME), MEASUREMENTS[0], 1)
    collect_job(run, NAME)
    assert not list(run.job(NAME).parts.iterdir())


def test_whoever_ended_the_launch_has_a_record_and_the_others_are_given_back(run: RunPaths) -> None:
    paths = run.job(NAME)
    for rank in range(2):
        leave_part(paths, MEASUREMENTS[0], rank)
    leave_part(paths, MEASUREMENTS[1], 0)
    leave_end(paths, Status.FAILED, MEASUREMENTS[1])
    collected = collect_job(run, NAME)
    assert [(record.status, record.key) for record in collected.records] == [
        (Status.COMPLETED, CELLS[0].key),
        (Status.FAILED, CELLS[1].key),
    ]
    failure = collected.records[1].failure
    assert failure is not None
    assert (failure.rank, failure.kind, failure.log) == (1, "SIGKILL", f"jobs/{NAME}/rank_1.log")
    assert [measurement.cell for measurement in collected.unreached] == [CELLS[2]]
    assert collected.start_failure is None


def test_a_measurement_with_a_pause_in_it_is_none_whatever_its_ranks_say(run: RunPaths) -> None:
    """They wake with their sleep over, and finish before the launcher has looked."""
    paths = run.job(NAME)
    for measurement in MEASUREMENTS[:2]:
        for rank in range(2):
            leave_part(paths, measurement, rank)
    end = JobEnd(
        status=Status.PREEMPTED,
        return_code=0,
        measurement=MEASUREMENTS[1].name,
        kind=SUSPENDED,
        message="the job was suspended for 16 s",
        finished_at="2026-01-01T00:00:09+00:00",
    )
    paths.end.write_text(end.model_dump_json())
    whole, paused = collect_job(run, NAME).records
    assert (whole.status, whole.failure) == (Status.COMPLETED, None)
    assert paused.status is Status.PREEMPTED
    assert paused.failure and paused.failure.message == "the job was suspended for 16 s"


def test_progress_tells_which_measurement_had_begun(run: RunPaths) -> None:
    paths = run.job(NAME)
    progress = Progress(rank=1, pid=1, pid_started=1, phase="measurement", measurement=MEASUREMENTS[0].name, since=0.0)
    paths.progress(1).write_text(progress.model_dump_json().ljust(4096))
    leave_end(paths, Status.LOST)
    collected = collect_job(run, NAME)
    assert [record.status for record in collected.records] == [Status.LOST]
    assert len(collected.unreached) == 2


def test_the_first_cause_counts_not_the_peers_that_saw_it(run: RunPaths) -> None:
    paths = run.job(NAME)
    leave_part(
        paths,
        MEASUREMENTS[0],
        0,
        Failure(message="connection closed", rank=0, kind="PeerLost"),
        finished="2026-01-01T00:00:02+00:00",
    )
    leave_part(
        paths,
        MEASUREMENTS[0],
        1,
        Failure(message="bad input", rank=1, kind="ValueError"),
        finished="2026-01-01T00:00:03+00:00",
    )
    leave_end(paths, Status.FAILED, MEASUREMENTS[0])
    failure = collect_job(run, NAME).records[0].failure
    assert failure is not None and failure.message == "bad input"


@pytest.mark.parametrize("minute", ["00", "09"], ids=["the later host's clock is slow", "and fast"])
def test_clocks_of_two_hosts_are_not_compared(run: RunPaths, minute: str) -> None:
    """The rank that failed 2 s after the other was called the cause where its host's clock was slow."""
    started = f"2026-01-01T00:{minute}:00+00:00"
    first, later = (Failure(message=text, rank=rank, kind="ValueError") for rank, text in enumerate(("bad", "odd")))
    begun, paths = "2026-01-01T00:05:00+00:00", run.job(NAME)
    leave_part(paths, MEASUREMENTS[0], 0, first, begun.replace(":00+", ":01+"), host="a", started=begun)
    leave_part(paths, MEASUREMENTS[0], 1, later, started.replace(":00+", ":03+"), host="b", started=started)
    leave_end(run.job(NAME), Status.FAILED, MEASUREMENTS[0])
    record = collect_job(run, NAME).records[0]
    assert record.failure is not None and record.failure.message == "bad"
    assert (record.started_at, record.finished_at) == (begun, "2026-01-01T00:05:03.000000+00:00")


def test_a_launch_that_never_began_says_so(run: RunPaths) -> None:
    leave_end(run.job(NAME), Status.FAILED)
    collected = collect_job(run, NAME)
    assert len(collected.unreached) == 3
    assert collected.start_failure == "the launch ended (failed) before the first cell"


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", f'{{"schema_version": {SCHEMA_VERSION}}}'.encode()], ids=repr)
def test_a_damaged_part_is_set_aside_and_its_repeat_measured_again(run: RunPaths, damage: bytes) -> None:
    paths = run.job(NAME)
    for rank in range(2):
        leave_part(paths, MEASUREMENTS[0], rank)
    paths.part(MEASUREMENTS[0].name, 1).write_bytes(damage)
    leave_end(paths)
    collected = collect_job(run, NAME)
    assert "is unreadable" in collected.set_aside[0]
    assert list(run.set_aside.iterdir())
    missing = missing_measurements(plan(), read_ledger(run), "timed", only_failed=False)
    assert {(measurement.cell.key, measurement.attempt) for measurement in missing} >= {(CELLS[0].key, 2)}


def test_samples_cut_short_in_a_part_are_noticed(run: RunPaths) -> None:
    paths = run.job(NAME)
    for rank in range(2):
        leave_part(paths, MEASUREMENTS[0], rank)
    samples = paths.samples(MEASUREMENTS[0].name, 1)
    samples.write_bytes(samples.read_bytes()[:-30])
    leave_end(paths)
    assert collect_job(run, NAME).records[0].status is Status.LOST


def completed_run(run: RunPaths) -> Path:
    for measurement in MEASUREMENTS:
        for rank in range(2):
            leave_part(run.job(NAME), measurement, rank)
    leave_end(run.job(NAME))
    collect_job(run, NAME)
    return run.record(CELLS[0].key, "timed", 0, 1)


def test_what_is_set_aside_again_overwrites_nothing_and_looks_through_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole folder was listed for each file: 4,000 damaged records took 48 s, twice as many four times as long."""
    folder = RunPaths(tmp_path)
    path = folder.records / "0123456789abcdef" / "r0-a1.json"
    path.parent.mkdir(parents=True)

    def listed(place: Path) -> None:
        raise AssertionError(f"{place} was listed")

    monkeypatch.setattr(Path, "iterdir", listed)
    for content in ("first", "second", "third"):
        path.write_text(content)
        set_aside(folder, path, "damaged")
    kept = folder.set_aside / "0123456789abcdef--r0-a1.json"
    kept.unlink()  # by a person
    path.write_text("fourth")
    set_aside(folder, path, "damaged")
    names = ["", ".1", ".2"]
    assert [kept.with_name(kept.name + name).read_text() for name in names] == ["fourth", "second", "third"]


@pytest.mark.parametrize("suffix", [".json", ".npz"])
@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["emptied", "overwritten", "cut"])
def test_a_damaged_record_is_set_aside_and_measured_again(run: RunPaths, suffix: str, damage: bytes | None) -> None:
    path = completed_run(run).with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:-10] if damage is None else damage)
    assert len(read_ledger(run).damaged) == 1 and path.exists(), "to look at a folder changes nothing in it"
    ledger = set_aside_damaged(run)
    assert len(ledger.set_aside) == 1 and not path.exists()
    missing = missing_measurements(plan(), ledger, "timed", only_failed=False)
    assert [(measurement.cell.key, measurement.attempt) for measurement in missing] == [(CELLS[0].key, 2)]
    again = missing_measurements(plan(), read_ledger(run), "timed", only_failed=False)
    assert again == missing, "the attempt's number is remembered"


@pytest.fixture
def keep_shut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let the system refuse a file; the tests may run as root, whom no permission stops."""
    whole = reading.open_descriptor

    def keep(refused: Path) -> None:
        def opened(path: Path, *rest: int | None) -> object:
            if path == refused:
                raise PermissionError(13, "Permission denied", str(path))
            return whole(path, *rest)

        monkeypatch.setattr(reading, "open_descriptor", opened)

    return keep


def test_samples_that_the_system_keeps_from_being_read_may_be_whole(
    run: RunPaths, keep_shut: Callable[[Path], None]
) -> None:
    samples = completed_run(run).with_suffix(".npz")
    keep_shut(samples)
    assert len(read_ledger(run).damaged) == 1
    with pytest.raises(PermissionError):
        set_aside_damaged(run)
    assert samples.exists() and not run.set_aside.exists()


def test_a_part_whose_samples_cannot_be_read_now_is_merged_later(
    run: RunPaths, keep_shut: Callable[[Path], None]
) -> None:
    paths = run.job(NAME)
    for rank in range(2):
        leave_part(paths, MEASUREMENTS[0], rank)
    leave_end(paths)
    keep_shut(paths.samples(MEASUREMENTS[0].name, 1))
    with pytest.raises(PermissionError):
        collect_job(run, NAME)
    keep_shut(run.folder)
    assert [record.status for record in collect_job(run, NAME).records] == [Status.COMPLETED]


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_stops_the_run(run: RunPaths, version: int) -> None:
    path = completed_run(run)
    data = json.loads(path.read_bytes())
    path.write_text(json.dumps(data | {"schema_version": version}))
    with pytest.raises(SchemaError, match=f"schema_version: got {version}, expected {SCHEMA_VERSION}. Use the version"):
        read_ledger(run)


def test_only_what_failed_is_asked_for(run: RunPaths) -> None:
    paths = run.job(NAME)
    leave_part(paths, MEASUREMENTS[0], 0, Failure(message="x", rank=0))
    leave_end(paths, Status.FAILED, MEASUREMENTS[0])
    collect_job(run, NAME)
    every = missing_measurements(plan(), read_ledger(run), "timed", only_failed=False)
    failed = missing_measurements(plan(), read_ledger(run), "timed", only_failed=True)
    assert len(every) == 3
    assert [(measurement.cell.key, measurement.attempt) for measurement in failed] == [(CELLS[0].key, 2)]


def test_a_record_of_many_ranks_is_no_error(run: RunPaths) -> None:
    ranks = 256
    cell = Cell(workload=NoopWorkload(items=ranks), layout=Layout(dp=ranks))
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths = run.job(NAME)
    job = Job.model_validate_json(paths.job.read_bytes())
    paths.job.write_text(
        job.model_copy(update={"measurements": (measurement,), "ranks_per_node": ranks}).model_dump_json()
    )
    for rank in range(ranks):
        leave_part(paths, measurement, rank)
    leave_end(paths)
    record = collect_job(run, NAME).records[0]
    assert record.status is Status.COMPLETED and len(record.rank_figures["cpu_seconds"]) == ranks


def test_a_long_cell_is_no_error(run: RunPaths) -> None:
    """A script may have a thousand arguments, and a target many variables."""
    cell = CELLS[0].model_copy(update={"env": {f"A{place}": "x" * 100 for place in range(100)}})
    paths = run.job(NAME)
    job = Job.model_validate_json(paths.job.read_bytes())
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths.job.write_text(job.model_copy(update={"measurements": (measurement,)}).model_dump_json())
    for rank in range(2):
        leave_part(paths, measurement, rank)
    leave_end(paths)
    assert collect_job(run, NAME).records[0].status is Status.COMPLETED
    assert len(read_ledger(run).entries) == 1


def test_more_figures_than_a_record_holds_are_a_failure(run: RunPaths) -> None:
    paths = run.job(NAME)
    for rank in range(2):
        leave_part(paths, MEASUREMENTS[0], rank)
        part = json.loads(paths.part(MEASUREMENTS[0].name, rank).read_text())
        part["figures"] |= {f"figure_{place}": "x" * 200 for place in range(50)}
        paths.part(MEASUREMENTS[0].name, rank).write_text(json.dumps(part))
    leave_end(paths)
    record = collect_job(run, NAME).records[0]
    assert record.status is Status.FAILED and record.failure is not None and record.figures == {}
    assert re.match(r"the figures take 1\d,\d{3} bytes of the record, expected at most 8,192", record.failure.message)
    assert len(read_ledger(run).entries) == 1


def test_a_launch_that_somebody_cancels_before_it_begins_counts_as_a_failed_start(run: RunPaths) -> None:
    leave_end(run.job(NAME), Status.CANCELLED)
    assert collect_job(run, NAME).start_failure is not None


def on_two_nodes(run: RunPaths) -> JobPaths:
    """The job as one of a cluster, with a rank on each of two nodes."""
    paths = run.job(NAME)
    job = Job.model_validate_json(paths.job.read_bytes())
    measurements = tuple(
        measurement.model_copy(update={"cell": measurement.cell.model_copy(update={"nodes": 2, "target": "slurm"})})
        for measurement in job.measurements
    )
    target = SlurmTarget(nodes=2)
    moved = job.model_copy(update={"measurements": measurements, "target": target, "ranks_per_node": 1})
    paths.job.write_text(moved.model_dump_json())
    return paths


def measurements_of(paths: JobPaths) -> tuple[Measurement, ...]:
    return Job.model_validate_json(paths.job.read_bytes()).measurements


def test_the_load_of_others_is_that_of_all_nodes(run: RunPaths) -> None:
    paths = on_two_nodes(run)
    for rank in range(2):
        leave_part(paths, measurements_of(paths)[0], rank, heads_node=True)
    leave_end(paths)
    (record,) = collect_job(run, NAME).records
    # Twice 3.4 busy seconds, of which 3.0 ours, over twice 2 cores times 2 seconds.
    assert record.figures["others_cpu_share"] == pytest.approx(0.475)


def test_a_server_and_its_load_generator_are_no_others(run: RunPaths) -> None:
    """Every served cell was said to be of a machine that was busy with something else."""
    paths = on_two_nodes(run)
    for rank in range(2):
        leave_part(paths, measurements_of(paths)[0], rank, heads_node=True)
    path = paths.part(measurements_of(paths)[0].name, 0)
    part = json.loads(path.read_text())
    path.write_text(json.dumps(part | {"figures": part["figures"] | {"children_cpu_seconds": 3.0}}))
    leave_end(paths)
    (record,) = collect_job(run, NAME).records
    # Twice 3.4 busy seconds, of which 6.0 ours, over twice 2 cores times 2 seconds.
    assert record.figures["others_cpu_share"] == pytest.approx(0.1)


@pytest.mark.parametrize("figures", [{"machine_cores": 0}, {"cpu_busy_seconds": 1e308}])
def test_a_scripts_figures_may_bear_the_names_of_ours(run: RunPaths, figures: dict[str, float]) -> None:
    """The run ended in a ZeroDivisionError, again each time that it went on."""
    paths = on_two_nodes(run)
    for rank in range(2):
        leave_part(paths, measurements_of(paths)[0], rank, heads_node=True)
        path = paths.part(measurements_of(paths)[0].name, rank)
        part = json.loads(path.read_text())
        path.write_text(json.dumps(part | {"figures": part["figures"] | figures}))
    leave_end(paths)
    (record,) = collect_job(run, NAME).records
    assert record.status is Status.COMPLETED and record.figures["others_cpu_share"] in (None, 0)


def test_what_the_scheduler_says_is_in_every_record_of_the_job(run: RunPaths) -> None:
    paths = on_two_nodes(run)
    accounting = Accounting(job_id="12_3", state="NODE_FAIL", nodes=("lab1", "lab2"), elapsed_seconds=7.0)
    paths.accounting.write_text(accounting.model_dump_json())
    for rank in range(2):
        leave_part(paths, measurements_of(paths)[0], rank)
    leave_end(paths, Status.NODE_FAILED, measurements_of(paths)[1])
    done, lost = collect_job(run, NAME).records
    assert (done.status, lost.status) == (Status.COMPLETED, Status.NODE_FAILED)
    assert done.accounting == lost.accounting == accounting
    record = read_ledger(run).entries[lost.key, "timed", 0][0].record
    assert record.accounting == accounting, "as it was written"


def test_a_failure_of_no_rank_points_to_the_node_that_knows_of_it(run: RunPaths) -> None:
    paths = on_two_nodes(run)
    leave_end(paths, Status.NODE_FAILED, measurements_of(paths)[0])
    for node, status in enumerate((Status.COMPLETED, Status.NODE_FAILED)):
        end = JobEnd(status=status, return_code=None, finished_at="2026-01-01T00:00:09+00:00")
        paths.node_end(node).write_text(end.model_dump_json())
    whole = JobEnd.model_validate_json(paths.end.read_bytes())
    paths.end.write_text(whole.model_copy(update={"rank": None}).model_dump_json())
    failure = collect_job(run, NAME).records[0].failure
    assert failure is not None and failure.log == f"jobs/{NAME}/launcher_1.log"


@pytest.mark.parametrize("place", range(575, 600, 6))
def test_a_secret_where_a_long_message_is_cut_is_hidden(
    place: int, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it has no form that gives it away, and is no value of the environment. The cut is seen."""
    monkeypatch.setenv("MIRROR_PASSWORD", "c4n4ry-of-the-mirror")
    token = "hf_" + "Zq7" * 11
    for secret in (token, "c4n4ry-of-the-mirror"):
        text = f"{'x ' * place}"[:place] + f" {secret} and so on"
        measurements = list(MEASUREMENTS[:1])
        [record] = failed_records(run, NAME, measurements, Status.FAILED, text)
        told = [record.failure.message if record.failure else "", str(StudyError([text]))]
        assert not any(secret[:8] in each for each in told), told
        assert all(len(each) <= 600 for each in told)
    [record] = failed_records(run, NAME, measurements, Status.FAILED, "word " * 200)
    assert record.failure is not None and record.failure.message.endswith("…")


def test_thousands_of_damaged_records_are_told_in_a_few_lines() -> None:
    """Each had a line of its own on the terminal, before the result."""
    lines = [f"records/{number} is unreadable" for number in range(3000)]
    assert told_set_aside(lines)[:2] == lines[:2] and told_set_aside(lines[:9]) == lines[:9]
    assert len(told_set_aside(lines)) == 9
    assert told_set_aside(lines)[-1] == "2,992 more unreadable files were moved to set_aside/"
