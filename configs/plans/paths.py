"""Paths of all files in a run folder.

<runs>/<study>/
  study.yaml  plan.json  report.md  appendix.md  report.html  paper.typ  paper.pdf  cells.csv  records.parquet  plots/
  run.lock            who works here now
  run.id              tells the folder from others of its path, as in containers
  inputs/<sha256>.*   prompts and texts
  environments/<hash>.json
  jobs/<job>/         one launch: job.json, what its ranks left, logs
  checkpoints/<key>-r<repeat>/  of a training measurement, shared by its attempts
  records/<key>/      one JSON and one .npz for each repeat and attempt
  set_aside/          what could not be read
  live/               what training told while it went on: event files, mlflow.db, wandb's offline runs
  rentals.json        what was rented for the study, at which price, and what became of it
  preflight.json      what the nodes of a cluster showed before; preflight/ holds the jobs that tested them
"""

from dataclasses import dataclass
from pathlib import Path

from configs.records.record import MeasuringPass, record_name


@dataclass(frozen=True)
class JobPaths:
    """Files of one job folder."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def launcher(self) -> Path:
        return self.folder / "launcher.json"

    @property
    def end(self) -> Path:
        return self.folder / "end.json"

    @property
    def submitted(self) -> Path:
        """Of a job on this machine: touched when it is submitted."""
        return self.folder / "submitted"

    @property
    def submitting(self) -> Path:
        return self.folder / "submitting.json"

    @property
    def submission(self) -> Path:
        return self.folder / "submission.json"

    @property
    def queue(self) -> Path:
        """Of a job under a scheduler: why it waits, is suspended, or is not taken."""
        return self.folder / "queue.json"

    @property
    def srun(self) -> Path:
        """Of a step of an allocation: the process that started it."""
        return self.folder / "srun.json"

    @property
    def srun_log(self) -> Path:
        """Of a step of an allocation: what srun says of it."""
        return self.folder / "srun.log"

    @property
    def hosts(self) -> Path:
        """Of a job on hosts that are reached by SSH: which ones it has."""
        return self.folder / "hosts.json"

    @property
    def go(self) -> Path:
        """Of a job on several such hosts: there when all of them are free, and its ranks may start."""
        return self.folder / "go"

    @property
    def requeued(self) -> Path:
        """Of a job under a scheduler: there where it was put back into the queue after it had begun."""
        return self.folder / "requeued"

    @property
    def collected(self) -> Path:
        """There when nothing is left to merge in the folder."""
        return self.folder / "collected"

    @property
    def accounting(self) -> Path:
        return self.folder / "accounting.json"

    def node_launcher(self, node_rank: int) -> Path:
        """Of a job under a scheduler: who runs it on one of its nodes."""
        return self.folder / f"launcher_{node_rank}.json"

    def node_end(self, node_rank: int) -> Path:
        """Of a job under a scheduler: how it ended on one of its nodes."""
        return self.folder / f"end_{node_rank}.json"

    def node_log(self, node_rank: int) -> Path:
        """Of a job under a scheduler: what the launcher of one node says."""
        return self.folder / f"launcher_{node_rank}.log"

    def scheduler_log(self, node_rank: int) -> Path:
        """Of a job under a scheduler: what its own programs say on one node; a link."""
        return self.folder / f"slurm_{node_rank}.log"

    @property
    def launcher_log(self) -> Path:
        return self.folder / "launcher.log"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    @property
    def exports(self) -> Path:
        return self.folder / "exports"

    @property
    def live(self) -> Path:
        """Of the whole run, so that its cells are seen side by side; of a job that lies in no run folder, its own."""
        run = self.folder.absolute().parent
        return run.parent / "live" if run.name == "jobs" else self.folder / "live"

    def rank_log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.log"

    def progress(self, rank: int) -> Path:
        return self.folder / f"progress_{rank}.json"

    def part(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.rank_{rank}.json"

    def samples(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.rank_{rank}.npz"

    def script(self, measurement: str, node_rank: int) -> Path:
        """Where a script runs on one node, with its inputs and what it writes: removed when it has ended."""
        return self.folder / f".script_{measurement}" / str(node_rank)

    def scripts(self, node_rank: int | None = None) -> list[Path]:
        """Those that are there, of one node or of all: of a script whose agent was killed with it."""
        return sorted(self.folder.glob(f".script_*/{'*' if node_rank is None else node_rank}"))

    def flight_recorder(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.flight_recorder_rank_{rank}.jsonl"

    def completions(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.completions_rank_{rank}.jsonl"

    def trace(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.trace_rank_{rank}.json.gz"

    def perf_text(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.perf_rank_{rank}.txt"

    def perf_data(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.perf_rank_{rank}.data"

    def nsys_report(self, measurement: str, rank: int) -> Path:
        return self.parts / f"{measurement}.nsys_rank_{rank}.nsys-rep"


def job_order(name: str) -> tuple[int, str]:
    """Return the key by which names of job folders sort in order of creation: `10000-...` is behind `9999-...`."""
    first = name.partition("-")[0]
    return int(first) if first.isdecimal() else 0, name  # a person may have put others there


@dataclass(frozen=True)
class RunPaths:
    """Files of one run folder."""

    folder: Path

    @property
    def study(self) -> Path:
        return self.folder / "study.yaml"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def lock(self) -> Path:
        return self.folder / "run.lock"

    @property
    def id(self) -> Path:
        return self.folder / "run.id"

    @property
    def inputs(self) -> Path:
        return self.folder / "inputs"

    @property
    def environments(self) -> Path:
        return self.folder / "environments"

    @property
    def rentals(self) -> Path:
        return self.folder / "rentals.json"

    @property
    def preflight(self) -> Path:
        return self.folder / "preflight.json"

    @property
    def preflight_run(self) -> "RunPaths":
        """Where the jobs that test nodes lie: beside the study's own, whose records they must not meet."""
        return RunPaths(self.folder / "preflight")

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def records(self) -> Path:
        return self.folder / "records"

    @property
    def set_aside(self) -> Path:
        return self.folder / "set_aside"

    @property
    def report(self) -> Path:
        return self.folder / "report.md"

    @property
    def appendix(self) -> Path:
        """The evidence behind the report."""
        return self.folder / "appendix.md"

    @property
    def page(self) -> Path:
        """The report as one HTML page."""
        return self.folder / "report.html"

    @property
    def paper(self) -> Path:
        """The report as a paper."""
        return self.folder / "paper.pdf"

    @property
    def paper_source(self) -> Path:
        """What the paper is compiled from, with the figures in `plots`."""
        return self.folder / "paper.typ"

    @property
    def plots(self) -> Path:
        return self.folder / "plots"

    @property
    def cells_csv(self) -> Path:
        return self.folder / "cells.csv"

    @property
    def records_parquet(self) -> Path:
        return self.folder / "records.parquet"

    def job(self, name: str) -> JobPaths:
        return JobPaths(self.jobs / name)

    def record(self, key: str, measuring_pass: MeasuringPass, repeat: int, attempt: int) -> Path:
        return self.records / key / record_name(measuring_pass, repeat, attempt)

    def environment(self, digest: str) -> Path:
        return self.environments / f"{digest}.json"
