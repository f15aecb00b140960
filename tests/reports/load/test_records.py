"""Runs as a record of the workload `serve` keeps them."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from configs.common.arrays import Floats
from configs.load.objectives import RequestObjectives
from configs.load.samples import FACTS_FILE, SAMPLES_FILE, RequestOutcome
from configs.load.search import SEARCH_FILE
from configs.records.record import Figure, Record, Status
from configs.spec.cell import Cell
from configs.workloads.serve import ServeWorkload
from engine.workloads.serve import errors_text
from reports.load.metrics import serving_metrics
from reports.load.next_rate import goal_of, search_after
from reports.load.next_rate import main as next_rate
from reports.load.records import runs_of
from reports.load.samples import LoadRun
from reports.load.verdict import judged
from tests.support.run_folders.load_runs import made_run, samples_of

OBJECTIVES = RequestObjectives(ttft_seconds=1.0, share=0.5)


def kept(work: ServeWorkload, runs: Sequence[LoadRun], **figures: Figure) -> tuple[Record, dict[str, Floats]]:
    """The record and samples of these runs, as a launch leaves them."""
    cell = Cell(model="m", workload=work)
    record = Record(
        key=cell.key, cell=cell, repeat=0, attempt=1, status=Status.COMPLETED, job="job", position=0,
        started_at=None, finished_at=None, figures=figures,
    )  # fmt: skip
    return record, samples_of(runs)


def test_a_cap_that_ended_a_search_leaves_it_what_it_had_found() -> None:
    """The rate that passed before was forgotten: as if the cap had ended every run."""
    work = ServeWorkload(find="max_rate", rate=10, objectives=OBJECTIVES)
    runs = [made_run(np.arange(0, 60, 1 / rate), ttft=0.1) for rate in (10, 20)]
    record, samples = kept(work, runs, capped="max_tokens: 9,000 tokens asked for")
    found = search_after(goal_of(work.search(None)), OBJECTIVES, runs_of(record, samples, "here")).result()
    assert found.low is not None and round(found.low) == 10
    assert found.reason == "max_tokens: 9,000 tokens asked for"


def leave_runs(folder: Path, runs: Sequence[LoadRun]) -> None:
    """A search's folder, as its launch has it between two runs."""
    folder.mkdir()
    work = ServeWorkload(find="max_rate", rate=10, objectives=OBJECTIVES)
    (folder / SEARCH_FILE).write_text(work.search(None).model_dump_json())
    for number, run in enumerate(runs):
        (folder / f"run-{number:03d}").mkdir()
        (folder / f"run-{number:03d}" / FACTS_FILE).write_text(run.facts.model_dump_json())
        np.savez(folder / f"run-{number:03d}" / SAMPLES_FILE, **samples_of([run]))


def test_a_search_looks_at_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples of all its runs were in memory at once, beside the server that it measures."""
    run = made_run(np.arange(0, 60, 0.1), ttft=0.1, tokens=400)
    peaks = []
    for count in (1, 12):
        leave_runs(tmp_path / str(count), [run] * count)
        tracemalloc.start()
        assert next_rate([str(tmp_path / str(count))]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] > 4_000_000 and peaks[1] < 2 * peaks[0]
    assert [json.loads(line)["rate"] for line in capsys.readouterr().out.splitlines()] == [20.0, None]


def test_a_record_tells_why_requests_failed() -> None:
    outcome = np.where(np.arange(100) < 40, RequestOutcome.DROPPED, RequestOutcome.COMPLETED)
    run = made_run(np.arange(100) / 10, ttft=0.1, outcome=outcome)
    errors = {"not sent: Too many open files": 40}
    record, samples = kept(ServeWorkload(rate=10), [run], errors=errors_text(errors))
    (read,) = runs_of(record, samples, "here")
    assert judged(read, serving_metrics(read)).reason == "40 requests not sent: Too many open files"
    damaged, samples = kept(ServeWorkload(rate=10), [run], errors='{"HTTP 500: cut of')
    assert next(runs_of(damaged, samples, "here")).facts.errors == {}


def test_many_messages_stay_readable_in_the_size_of_a_record() -> None:
    errors = {f"HTTP 500: {number} {'x' * 140}": number for number in range(1, 21)}
    text = errors_text(errors)
    assert text is not None and len(text) <= 1500
    told = json.loads(text)
    assert sum(told.values()) == 210 and told["other errors"] > 0 and next(iter(told)).startswith("HTTP 500: 20 ")
    assert errors_text({}) is None and json.loads(errors_text({"\U0001f600" * 160: 3}) or "") == {"other errors": 3}
