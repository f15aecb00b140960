"""`rankwise logs`: every writer of every job, in order of time, and whatever happens to the files meanwhile."""

import subprocess
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import pytest

from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.spec.measuring import Measuring
from flows.cli.results import logs
from tasks.campaign.run_lock import run_lock
from tests.support.run_folders.studies import RANKWISE, rankwise_here, wait_until

JOB = "0001-timed-ab"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run folder with one job folder."""
    paths = RunPaths(tmp_path / "runs" / "s")
    (paths.jobs / JOB).mkdir(parents=True)
    plan = Plan(
        study="s", models=(), targets=(), measuring=Measuring(), pack=True, experiments=(), cells={}, repeats={}
    )
    paths.plan.write_text(plan.model_dump_json())
    return paths


def stamped(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.000000+00:00 {text}\n"


def lines_of(run: RunPaths, *options: str) -> list[str]:
    """What the command prints."""
    done = rankwise_here("logs", run.folder, *options, cwd=run.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_lines_of_all_writers_stand_in_order_of_time(run: RunPaths) -> None:
    job = run.job(JOB)
    job.rank_log(0).write_text("begins\n" + stamped(1, "a") + "Traceback\n" + stamped(5, "e"))
    job.rank_log(1).write_text(stamped(2, "b") + stamped(4, "d without an end").rstrip())
    job.node_log(1).write_text(stamped(3, "c"))
    assert [line.split()[-1] for line in lines_of(run)] == ["begins", "a", "Traceback", "b", "c", "end", "e"]
    assert [line.split(":")[0] for line in lines_of(run)][3:5] == [f"{JOB}/rank_1", f"{JOB}/launcher_1"]


def test_what_slurm_kept_is_shown_through_its_links(run: RunPaths, tmp_path: Path) -> None:
    away = tmp_path / "away" / "jobs" / "0002-timed-cd"
    away.mkdir(parents=True)
    submitit = away.parent / "submitit"
    submitit.mkdir()
    (submitit / "7_0_log.out").write_text("srun: error: lab2\n")
    (away / "slurm_0.log").symlink_to("../submitit/7_0_log.out")
    (run.jobs / "0002-timed-cd").symlink_to(away)
    (run.jobs / "submitit").mkdir()
    (run.jobs / "submitit" / "8_0.log").write_text("of all jobs\n")
    assert lines_of(run) == ["0002-timed-cd/slurm_0: srun: error: lab2"]


def test_one_rank_or_one_job(run: RunPaths) -> None:
    (run.jobs / "0002-timed-cd").mkdir()
    for name in (JOB, "0002-timed-cd"):
        for rank in range(2):
            run.job(name).rank_log(rank).write_text("x\n")
    assert lines_of(run, "--rank", "1") == [f"{JOB}/rank_1: x", "0002-timed-cd/rank_1: x"]
    assert lines_of(run, "--job", "0002") == ["0002-timed-cd/rank_0: x", "0002-timed-cd/rank_1: x"]
    for option, value, told in (
        ("--job", "7", f"--job: no job whose name starts with '7'. The run has {JOB} to 0002-timed-cd\n"),
        ("--rank", "2", "--rank: no log of rank 2. There are logs of 2 ranks\n"),
    ):
        done = rankwise_here("logs", run.folder, option, value, cwd=run.folder)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_run_that_writes_all_the_time_has_its_logs_printed_once(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as there was a new line at each look the command went on, to the end of a run of hours."""
    log, read, looks = run.job(JOB).rank_log(0), logs.open_regular, 0
    log.write_text("begins\n")

    def growing(path: Path) -> BufferedReader:
        nonlocal looks
        looks += 1
        assert looks < 10
        with path.open("a") as file:
            file.write(f"step {looks}\n")
        return read(path)

    monkeypatch.setattr(logs, "open_regular", growing)
    assert logs.print_logs(run.folder, follow=False) == 0
    assert capsys.readouterr().out.splitlines() == [f"{JOB}/rank_0: begins", f"{JOB}/rank_0: step 1"]
    monkeypatch.setattr(logs, "_PIECE_BYTES", 16)  # of a log larger than a piece all that was there is read
    log.write_text("".join(f"line {number}\n" for number in range(6)))
    assert logs.print_logs(run.folder, follow=False) == 0
    assert f"{JOB}/rank_0: line 5" in capsys.readouterr().out.splitlines()


@pytest.fixture
def followed(run: RunPaths, tmp_path: Path) -> Iterator[Path]:
    """What `logs --follow` prints while a run works in the folder; it has ended when the test has."""
    output = tmp_path / "followed.txt"
    with run_lock(run), output.open("w") as file:
        process = subprocess.Popen([RANKWISE, "logs", run.folder, "--follow"], stdout=file)
        yield output
        time.sleep(0.1)
    assert process.wait(timeout=600) == 0


def appears(output: Path, line: str) -> None:
    wait_until(lambda: line in output.read_text().splitlines(), what=line)


def test_following_sees_new_jobs_cut_files_and_moved_folders(run: RunPaths, followed: Path, tmp_path: Path) -> None:
    log = run.job(JOB).rank_log(0)
    log.write_text("first\nsecond\n")
    appears(followed, f"{JOB}/rank_0: second")
    log.write_text("third\n")  # cut off and begun anew
    appears(followed, f"{JOB}/rank_0: third")
    log.unlink()
    log.write_text("rotated, and longer than what was there before\n")
    appears(followed, f"{JOB}/rank_0: rotated, and longer than what was there before")
    away = tmp_path / "away"
    away.mkdir()
    (run.jobs / "0002-timed-cd").symlink_to(away)
    (away / "rank_0.log").write_text("on the cluster\n")
    appears(followed, "0002-timed-cd/rank_0: on the cluster")
    (run.jobs / "0002-timed-cd").unlink()
    away.rename(run.jobs / "0002-timed-cd")  # it comes home
    log.write_text("half")
    with log.open("a") as file:
        time.sleep(0.6)
        file.write(" and half\n")
    appears(followed, f"{JOB}/rank_0: half and half")
    printed = followed.read_text().splitlines()
    assert len(printed) == len(set(printed)), printed


def test_jobs_stand_in_order_of_their_numbers(run: RunPaths) -> None:
    """As text, the ten thousandth launch stood between the first and the second thousand."""
    for number in (9999, 10000, 2):
        folder = run.jobs / f"{number:04d}-timed-ab"
        folder.mkdir()
        JobPaths(folder).rank_log(0).write_text("says\n")
    assert [line.split("-")[0] for line in lines_of(run)] == ["0002", "9999", "10000"]
    refused = rankwise_here("logs", run.folder, "--job", "7", cwd=run.folder)
    assert "The run has 0001-timed-ab to 10000-timed-ab" in refused.stderr


def test_following_looks_at_launches_that_are_over_no_more(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folders of all launches were listed twice a second, of a study with thousands of them on a busy core."""
    for number in range(1, 51):
        job = run.job(f"{number:04d}-timed-ab")
        job.folder.mkdir(exist_ok=True)
        job.rank_log(0).write_text(f"launch {number}\n")
        if number < 50:
            job.collected.touch()
    looked: list[str] = []
    files, looks = logs._files, iter([True] * 10)

    def counted(paths: JobPaths, rank: int | None) -> list[Path]:
        looked.append(paths.folder.name)
        return files(paths, rank)

    def works(_: RunPaths) -> bool:
        if len(looked) == 52:
            with run.job("0050-timed-ab").rank_log(0).open("a") as file:
                file.write("goes on\n")
        return next(looks, False)

    monkeypatch.setattr(logs, "_files", counted)
    monkeypatch.setattr(logs, "_is_worked_on", works)
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.0)
    assert logs.print_logs(run.folder, follow=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 51 and printed[-1] == "0050-timed-ab/rank_0: goes on"
    assert len(looked) == 50 + 9 + 50, "all of them at the first look and the last one"


def test_logs_of_many_ranks_are_in_memory_in_part(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A piece of each file was read at a time, with thousands of ranks tens of gigabytes of them."""
    for rank in range(64):
        run.job(JOB).rank_log(rank).write_text("".join(f"{rank} says {number}\n" for number in range(100)))
    new_lines, at_once, most = logs._new_lines, 0, 0

    def counted(*asked: object) -> list[str]:
        nonlocal at_once, most
        lines = new_lines(*asked)  # type: ignore[arg-type]
        at_once += sum(map(len, lines))
        most = max(most, at_once)
        return lines

    def files(paths: JobPaths, rank: int | None) -> list[Path]:
        nonlocal at_once
        at_once = 0
        return sorted(paths.folder.glob("*.log"))

    monkeypatch.setattr(logs, "_LOOK_BYTES", 6400)
    monkeypatch.setattr(logs, "_new_lines", counted)
    monkeypatch.setattr(logs, "_files", files)
    assert logs.print_logs(run.folder, follow=False) == 0
    assert most <= 6400
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(set(printed)) == 6400 and f"{JOB}/rank_63: 63 says 99" in printed
