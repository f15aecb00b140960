"""Commands that look at a run folder: they change nothing in it, wait for nothing, and end in a sentence."""

import hashlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from configs.common.base import SCHEMA_VERSION
from configs.plans.job import Job, Launcher, Progress, QueueState, Submission
from configs.plans.paths import RunPaths
from configs.records.record import Failure, Status
from flows.cli.main import app
from reports.render import render_report
from tasks.campaign.ledger import read_ledger, set_aside_damaged
from tests.support.patience import patient
from tests.support.run_folders.report_runs import experiment, generate, generated, plan_of, write_plan, write_record
from tests.support.run_folders.reports import whole_report

CELLS = [generate(new_tokens=tokens) for tokens in (3, 4, 5)]
AT = "2026-01-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Two measured cells and one that waits in a job; the first is the faster one."""
    base = tmp_path_factory.mktemp("runs")
    points = [(cell, {"new_tokens": index}, f"point {index}") for index, cell in enumerate(CELLS)]
    folder = write_plan(base / "made", plan_of(CELLS, [experiment("lengths", "sweep", points)], repeats=2))
    for repeat in range(2):
        write_record(folder, CELLS[0], repeat, samples=generated(CELLS[0], 1.0))
        write_record(folder, CELLS[1], repeat, samples=generated(CELLS[1], 4.0))
    paths = folder.job("0007-timed-abc")
    paths.folder.mkdir(parents=True)
    job = Job(
        name="0007-timed-abc",
        study="made",
        measuring_pass="timed",
        measuring=plan_of(CELLS, []).measuring,
        measurements=[{"cell": CELLS[2], "repeat": 0, "attempt": 1}],  # type: ignore[arg-type]
        ranks_per_node=1,
        timeout_seconds=60,
        inputs="inputs",
        cache="cache",
    )
    paths.job.write_text(job.model_dump_json())
    paths.launcher.write_text(Launcher(pid=1, pid_started=1, host="h", started_at=AT).model_dump_json())
    paths.submission.write_text(Submission(job_id="12", submitted_at=AT).model_dump_json())
    progress = Progress(
        rank=0, pid=1, pid_started=1, phase="measurement", measurement=job.measurements[0].name, since=1
    )
    paths.progress(0).write_text(progress.model_dump_json())
    paths.rank_log(0).write_text(f"{AT[:19]}.0+00:00 loading\x1b[31m weights\n")
    folder.lock.write_text("{}")
    render_report(folder)
    return folder


@pytest.fixture
def run(made: RunPaths, tmp_path: Path) -> RunPaths:
    """A copy of that run with its report, to damage."""
    return RunPaths(shutil.copytree(made.folder, tmp_path / "runs" / "made"))


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def content(folder: Path, *left_out: str) -> dict[str, str]:
    """Each file of a folder and a hash of what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(left_out) and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


REPORT = ("report.md", "appendix.md", "plots/", "cells.csv", "records.parquet")


@pytest.mark.slow
def test_commands_that_look_change_nothing(run: RunPaths) -> None:
    """One record is cut short: each command says so, none moves it, and looking twice gives the same answer."""
    damaged = run.record(CELLS[0].key, "timed", 0, 1)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    other = run.folder.with_name("other")
    plan = plan_of(CELLS, [])
    write_plan(other, plan)
    write_record(RunPaths(other), CELLS[0], samples=generated(CELLS[0], 1.0))
    before = content(run.folder)
    relative = damaged.relative_to(run.folder).as_posix()
    first = command("status", run.folder)
    assert first.exit_code == 0
    assert relative in first.output and "unreadable" in first.output and "running" in first.output
    rows = json.loads(command("status", run.folder, "--json").output)
    assert [row["status"] for row in rows if row["key"] == CELLS[0].key] == ["unreadable", "completed"]
    assert "not JSON" in next(row["failure"] for row in rows if row["status"] == "unreadable")
    assert command("logs", run.folder).exit_code == 0
    compared = command("compare", run.folder, other, "--history", run.folder.with_name("none.sqlite"))
    assert compared.exit_code == 2 and "no such history" in compared.output
    compared = command("compare", run.folder, other)
    assert compared.exit_code in (0, 4) and f"{run.folder}/{relative}: left out: not JSON" in compared.output
    assert command("forecast", run.folder).exit_code == 2  # there is no scaling experiment
    assert content(run.folder) == before
    reported = command("report", run.folder)
    assert reported.exit_code == 3 and f"1 file of the run cannot be read: {relative}" in reported.output
    assert content(run.folder, *REPORT) == {
        name: digest for name, digest in before.items() if not name.startswith(REPORT)
    }
    text = whole_report(run)
    assert command("status", run.folder).output == first.output
    assert command("report", run.folder).output == reported.output and whole_report(run) == text


def test_only_a_run_sets_aside(run: RunPaths) -> None:
    damaged = run.record(CELLS[0].key, "timed", 0, 1)
    damaged.write_text("{")
    assert read_ledger(run).set_aside == [] and damaged.exists()
    [line] = set_aside_damaged(run).set_aside
    assert "was moved to set_aside/: not JSON" in line and not damaged.exists()
    assert str(run.folder) not in line


def test_what_the_system_does_not_let_us_read_is_not_damaged(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, whom no permission stops."""
    import configs.common.files.reading as reading

    refused = run.record(CELLS[0].key, "timed", 0, 1)
    whole = reading.open_descriptor

    def opened(path: Path, *rest: int | None) -> object:
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *rest)

    monkeypatch.setattr(reading, "open_descriptor", opened)
    with pytest.raises(PermissionError):
        set_aside_damaged(run)
    assert refused.exists() and not run.set_aside.exists()
    assert "Permission denied" in command("report", run.folder).output
    looked = command("status", run.folder).output
    assert looked.splitlines()[-1] == f"{refused.relative_to(run.folder)} is unreadable: Permission denied"
    assert "Errno" not in looked
    refused = run.environment("e1")
    reported = command("report", run.folder).output
    assert "environments/e1.json (Permission denied)" in reported and "Errno" not in reported
    refused = run.plan
    found = command("status", run.folder)
    assert found.exit_code == 1 and found.output == f"{run.plan}: Permission denied\n"


def unusual(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replaced(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    replaced.__name__ = make.__name__
    return replaced


@unusual
def pipe(path: Path) -> None:
    os.mkfifo(path)


@unusual
def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@unusual
def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


FILES = (
    "plan.json",
    "records/{key}/r0-a1.json",
    "records/{key}/r0-a1.npz",
    "environments/e1.json",
    "jobs/0007-timed-abc/job.json",
    "jobs/0007-timed-abc/launcher.json",
    "jobs/0007-timed-abc/progress_0.json",
    "jobs/0007-timed-abc/submission.json",
    "jobs/0007-timed-abc/accounting.json",
    "jobs/0007-timed-abc/rank_0.log",
    "preflight.json",
    "run.lock",
)


def placed(others: pytest.MarkDecorator) -> list[Any]:
    """Each file as one of three kinds of files; as the other two with a mark."""
    return [
        pytest.param(make, name, id=f"{make.__name__}-{name}", marks=[] if number % 3 == kind else [others])
        for number, name in enumerate(FILES)
        for kind, make in enumerate((pipe, device, sparse))
    ]


@pytest.mark.parametrize(("make", "name"), placed(pytest.mark.nightly))
def test_nothing_is_waited_for(run: RunPaths, make: Callable[[Path], None], name: str) -> None:
    """A command that hangs ends the test run: all have ten seconds on a quiet machine."""
    path = run.folder / name.format(key=CELLS[0].key)
    path.parent.mkdir(exist_ok=True)
    make(path)
    other = run.folder.with_name("other")
    write_plan(other, plan_of(CELLS, []))
    write_record(RunPaths(other), CELLS[0], samples=generated(CELLS[0], 1.0))
    ended = threading.Event()
    watchdog = threading.Timer(patient(10), lambda: None if ended.is_set() else os._exit(70))
    watchdog.start()
    try:
        for arguments in (["status", run.folder], ["report", run.folder], ["compare", run.folder, other]):
            found = command(*arguments)
            assert found.exit_code == (1 if name == "plan.json" else found.exit_code) and len(found.output) < 10_000
            if name == "plan.json":
                assert re.match(rf"{run.plan}: (is a |53,687,091,200 bytes)", found.output)
        if make is not sparse:  # a log of 50 GB is read
            command("logs", run.folder)
    finally:
        ended.set()
        watchdog.cancel()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[]", "got list, expected a JSON object"),
        (f'{{"schema_version": {SCHEMA_VERSION}}}', "study: is missing"),
        (f'{{"schema_version": {SCHEMA_VERSION}, "study": ' + "9" * 5000 + "}", "a number is too long"),
        ('{"schema_version": 99}', "Use the version of Rankwise that wrote the file"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested more than 200 levels deep"),
    ],
)
def test_a_damaged_plan_is_told_in_a_sentence(run: RunPaths, text: str, told: str) -> None:
    run.plan.write_text(text)
    other = str(run.folder)
    for arguments in (["status", other], ["report", other], ["logs", other], ["forecast", other]):
        found = command(*arguments)
        assert found.exit_code == 1
        assert found.output.startswith(f"{run.plan}: ") and told in found.output
        assert "pydantic" not in found.output and len(found.output) < 600 and found.output.count("\n") == 1


@pytest.mark.parametrize("name", ["status", "report", "logs", "forecast", "compare", "history"])
def test_a_run_that_is_not_there_is_a_wrong_argument(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for missing, why in (("nowhere", "no such folder"), ("empty", "no plan.json"), ("file", "a file")):
        arguments = [name, *(["add"] if name == "history" else []), tmp_path / missing]
        arguments += [tmp_path] if name == "compare" else []
        found = command(*arguments)
        assert found.exit_code == 2
        assert found.output == (
            f"{tmp_path / missing}: not a run folder ({why}). Expected a folder such as runs/quickstart\n"
        )


def test_a_report_that_cannot_be_written_is_named(run: RunPaths) -> None:
    run.report.unlink()
    run.report.mkdir()
    found = command("report", run.folder)
    assert found.exit_code == 1 and found.output == f"{run.report}: Is a directory\n"


def test_names_of_others_are_text_on_a_terminal(run: RunPaths) -> None:
    evil = "\x1b[2J[red]\u202e[/nothing]\nline"
    plan = json.loads(run.plan.read_text())
    plan["models"][0]["name"] = evil
    plan["experiments"][0]["name"] = evil
    run.plan.write_text(json.dumps(plan))
    failure = Failure(message=evil)
    write_record(run, CELLS[2], 1, status=Status.FAILED, failure=failure, hosts=[evil])
    for arguments in (["status", run.folder], ["report", run.folder], ["logs", run.folder]):
        found = command(*arguments)
        assert not set(found.output) & set("\x1b\u202e"), arguments
    assert r"\x1b[2J[red]\u202e[/nothing] line" in command("status", run.folder).output
    assert r"loading\x1b[31m weights" in command("logs", run.folder).output
    assert command("status", run.folder, "--json").exit_code == 0


def test_looking_while_a_run_writes(run: RunPaths) -> None:
    """Records come, are rewritten and are set aside; each look sees whole files and ends well."""
    ended = threading.Event()
    path = run.record(CELLS[1].key, "timed", 1, 1)
    whole = path.read_bytes(), path.with_suffix(".npz").read_bytes()

    def write() -> None:
        while not ended.is_set():
            draft = path.with_name(".draft")
            for content, place in ((whole[1], path.with_suffix(".npz")), (whole[0], path)):
                draft.write_bytes(content)
                draft.replace(place)
            path.unlink()
            path.with_suffix(".npz").unlink()
            run.job("0007-timed-abc").progress(0).write_bytes(b'{"rank": 0')

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            assert command("status", run.folder).exit_code == 0
        for _ in range(3):
            assert command("report", run.folder).exit_code in (0, 3)
    finally:
        ended.set()
        writer.join()


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_status_names_every_state_on_a_terminal_of_any_width(run: RunPaths, columns: str) -> None:
    """A narrow terminal wraps the lines itself; what is cut out of a table is lost."""
    write_record(run, CELLS[1], 1, status=Status.FAILED, attempt=2, failure=Failure(message="no room " * 30))
    shown = {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": columns, "TERM": "xterm"}
    found = CliRunner().invoke(app, ["status", str(run.folder)], env=shown, catch_exceptions=False).output
    rows = json.loads(command("status", run.folder, "--json").output)
    lines = [line for line in found.splitlines() if re.match(r"[0-9a-f]{16} ", re.sub(r"\x1b\[[0-9;]*m", "", line))]
    assert len(lines) == len(rows) and "…" not in found
    for line, row in zip(lines, rows, strict=True):
        assert all(str(row[name]) in line for name in ("key", "repeat", "status", "attempts")), line


def test_status_names_cells_by_what_tells_them_apart(tmp_path: Path) -> None:
    """A sweep's lines were `1 rank, float32, batch 4, 5 tokens` all of them: which one failed only a hash told."""
    cells = [generate(prompt_tokens=length) for length in (8, 16, 32)]
    plan = plan_of(cells, [], repeats=1)
    run = write_plan(tmp_path / "run", plan)
    write_record(run, cells[2], status=Status.OUT_OF_MEMORY, failure=Failure(message="no memory left"))
    lines = CliRunner().invoke(app, ["status", str(run.folder)], catch_exceptions=False).output.splitlines()
    (failed,) = (line for line in lines if "out_of_memory" in line)
    assert "tiny  1 rank, float32, batch 4, 5 tokens, prompt_tokens 32" in failed
    assert all(any(f"prompt_tokens {length}" in line for line in lines) for length in (8, 16))


def test_a_suspended_job_is_not_said_to_run(run: RunPaths) -> None:
    """Slurm has stopped its processes: its measurement stood as running, for hours."""
    paths = run.job("0007-timed-abc")
    shutil.move(paths.launcher, paths.node_launcher(0))
    for state, said in (("PENDING", "running"), ("SUSPENDED", "suspended"), ("RUNNING", "running")):
        paths.queue.write_text(QueueState(state=state, reason="", since=AT).model_dump_json())
        rows = json.loads(command("status", run.folder, "--json").output)
        assert [row["status"] for row in rows if row["key"] == CELLS[2].key] == [said, "waiting"]


def test_a_measurement_that_is_tried_again_is_said_to_run(run: RunPaths) -> None:
    """It stood as failed, with the failure of the attempt before, while its second job was in the queue or ran."""
    write_record(run, CELLS[2], 0, status=Status.NODE_FAILED, failure=Failure(message="the node failed"))
    paths = run.job("0007-timed-abc")
    first = paths.job.read_text()
    for attempt, said in ((1, "node_failed"), (2, "running")):
        paths.job.write_text(first.replace('"attempt":1', f'"attempt":{attempt}'))
        made = Job.model_validate_json(paths.job.read_text()).measurements[0]
        progress = Progress(rank=0, pid=1, pid_started=1, phase="measurement", measurement=made.name, since=1)
        paths.progress(0).write_text(progress.model_dump_json())
        rows = json.loads(command("status", run.folder, "--json").output)
        (row,) = [row for row in rows if (row["key"], row["repeat"]) == (CELLS[2].key, 0)]
        assert (row["status"], row["failure"] is None, row["attempts"]) == (said, attempt == 2, 1)


def test_what_a_restart_of_the_machine_ended_is_not_said_to_run(run: RunPaths) -> None:
    """Neither the launcher nor the run had the time to say so; the next run records the measurement as lost."""
    paths = run.job("0007-timed-abc")
    paths.submission.unlink()
    ended = Launcher(pid=2**22 + 1, pid_started=1, host=socket.gethostname(), started_at=AT)
    for launcher, said in ((ended, "waiting"), (ended.model_copy(update={"host": "elsewhere"}), "running")):
        paths.launcher.write_text(launcher.model_dump_json())
        rows = json.loads(command("status", run.folder, "--json").output)
        assert [row["status"] for row in rows if row["key"] == CELLS[2].key] == [said, "waiting"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("stopped", {"gone": "most repeats"}, "stopped: no cell 'gone'"),
        ("candidates", [{"label": "a", "layout": {}, "prediction": {}, "cell": "gone"}],
         "experiments: 'lengths': no cell 'gone'"),
    ],
)  # fmt: skip
def test_a_plan_that_names_a_cell_it_lacks_is_told_in_a_sentence(
    run: RunPaths, field: str, value: object, told: str
) -> None:
    """It was a KeyError where the report came to that cell."""
    plan = json.loads(run.plan.read_text())
    (plan if field == "stopped" else plan["experiments"][0])[field] = value
    run.plan.write_text(json.dumps(plan))
    found = command("report", run.folder)
    assert (found.exit_code, found.output) == (1, f"{run.plan}: {told}\n")
