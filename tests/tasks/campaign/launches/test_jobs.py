"""Time limits of a job that is followed, on a clock that the test moves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.plans.job import Job
from configs.plans.packing import Launch
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Status
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget, SlurmTarget
from slurm.launcher.job_files import write_unlaunched_end
from tasks.campaign.launches import jobs
from tests.support.cluster.launches import noop_measurement, read_end

JOB = Job(
    name="0001-timed-x", study="s", measuring_pass="timed", measuring=Measuring(), target=SlurmTarget(nodes=2),
    measurements=(noop_measurement("a"),), ranks_per_node=1, timeout_seconds=100, inputs="", cache="",
)  # fmt: skip


class Slow:
    """An adapter each of whose looks takes ten seconds: two hours in the queue, then running."""

    def __init__(self, running_seconds: float) -> None:
        self.now, self.cancelled, self.running_seconds = 0.0, False, running_seconds

    def poll(self, folder: Path) -> str:
        self.now += 10
        ended = self.cancelled or self.now > 7200 + self.running_seconds
        return "ended" if ended else "waiting" if self.now <= 7200 else "running"

    def await_end(self, folder: Path, seconds: float) -> None:
        self.now += seconds

    def cancel(self, folder: Path) -> None:
        self.cancelled = True


@pytest.mark.parametrize(("running_seconds", "cancelled"), [(80, False), (400, True)])
def test_waiting_counts_to_no_limit_however_slow_the_looks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running_seconds: float, cancelled: bool
) -> None:
    adapter, waited = Slow(running_seconds), []
    monkeypatch.setattr(jobs, "adapter_for", lambda name: adapter)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: adapter.now))

    def look(state: Any, waited_seconds: float) -> None:
        waited.append(waited_seconds)

    jobs.follow_job(JOB, RunPaths(tmp_path), look)
    assert adapter.cancelled is cancelled and max(waited) == pytest.approx(7200, abs=30)


@pytest.mark.parametrize(("told", "status"), [(Status.CANCELLED, Status.TIMEOUT), (Status.COMPLETED, Status.COMPLETED)])
def test_a_launch_that_outlives_its_limit_is_no_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Status, status: Status
) -> None:
    """Its launcher hangs: whoever ends it says only that it was told to."""
    paths = RunPaths(tmp_path).job("0001-timed-x")
    paths.folder.mkdir(parents=True)

    class Hanging(Slow):
        def cancel(self, folder: Path) -> None:
            super().cancel(folder)
            write_unlaunched_end(paths, told, "cancelled on request")

    adapter = Hanging(400)
    monkeypatch.setattr(jobs, "adapter_for", lambda name: adapter)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: adapter.now))
    jobs.follow_job(JOB, RunPaths(tmp_path), lambda state, waited_seconds: None)
    end = read_end(paths)
    assert adapter.cancelled and end.status is status
    assert status is Status.COMPLETED or (end.kind, end.message) == (
        "JobTimeout",
        "time-out of the job after 100 s, which its launcher did not end",
    )


def test_a_folder_that_somebody_put_beside_the_jobs_counts_for_no_number(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    for name in ("0003-timed-ab", "3b-copy", "2026.11-kept"):
        run.job(name).folder.mkdir(parents=True)
    plan = Plan(
        study="s", models=(), targets=(LocalTarget(),), measuring=Measuring(), pack=True, experiments=(), cells={},
        repeats={},
    )  # fmt: skip
    launch = Launch("timed", (noop_measurement("a"),))
    assert jobs.job_of(launch, plan, run, tmp_path).name.startswith("0004-timed-")
    assert jobs.write_job(launch, plan, run, tmp_path).name.startswith("0004-timed-"), "nothing was written before"
    assert jobs.write_job(launch, plan, run, tmp_path).name.startswith("0005-timed-")


def test_the_folder_of_jobs_is_not_listed_for_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time to write the jobs of a study grew with the square of its launches."""
    run, launch = RunPaths(tmp_path), Launch("timed", (noop_measurement("a"),))
    plan = Plan(
        study="s", models=(), targets=(LocalTarget(),), measuring=Measuring(), pack=True, experiments=(), cells={},
        repeats={},
    )  # fmt: skip
    listed, glob = [], Path.glob

    def counted(self: Path, pattern: str) -> Any:
        listed.append(self)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    made = [jobs.write_job(launch, plan, run, tmp_path).name for _ in range(20)]
    assert len(set(made)) == 20 and made[-1].startswith("0020-")
    assert listed == [run.jobs]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_measured_is_counted_without_a_list_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Each look, some in a second on the machine that is measured, listed the files of all cells and ranks."""
    run, cells = RunPaths(tmp_path), 50
    job = Job(
        name="0001-timed-x", study="s", measuring_pass="timed", measuring=Measuring(), target=LocalTarget(),
        measurements=tuple(noop_measurement(str(number)) for number in range(cells)), ranks_per_node=ranks,
        timeout_seconds=100, inputs="", cache="",
    )  # fmt: skip
    paths, asked, exists = run.job(job.name), list[Path](), Path.exists
    paths.parts.mkdir(parents=True)
    assert jobs.measured_so_far(job, run) == 0
    monkeypatch.setattr(Path, "exists", lambda self: (asked.append(self), exists(self))[1])
    known = 0
    for number, measurement in enumerate(job.measurements):
        for rank in range(ranks):
            paths.part(measurement.name, rank).touch()
        known = jobs.measured_so_far(job, run, known)
        assert known == number + 1 == jobs.measured_so_far(job, run, known)
    assert len(asked) <= 3 * cells and jobs.measured_so_far(job, run) == cells
