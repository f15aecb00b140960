"""What sbatch would refuse is asked of sbatch itself (here a program of its name), without submitting a job."""

from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.trial import trial


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int) -> Path:
    """An `sbatch` first on PATH that notes its arguments, says something on stderr and ends with a code."""
    program, seen = folder / "sbatch", folder / "seen"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {seen}\ncat >&2 <<'END'\n{says}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return seen


def test_an_option_that_sbatch_refuses_is_named_with_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(tmp_path, monkeypatch, "sbatch: unrecognized option '--foo=bar'\nTry \"sbatch --help\"", 1)
    target = SlurmTarget(
        name="gpus", nodes=4, ranks_per_node=2, partition="p", gpus_per_node=2, exclusive=True,
        time_limit_minutes=30, memory_per_node="16G", extra={"foo": "bar", "licenses": "a:1", "spread-job": True},
    )  # fmt: skip
    told = trial(target, nodes=2, cores=4)
    assert told is not None and told.startswith("target.extra ")
    assert "sbatch: unrecognized option '--foo=bar'" in told and told.isprintable()
    arguments = seen.read_text().splitlines()
    assert {"--test-only", "--wrap=true", "--nodes=2", "--cpus-per-task=4", "--partition=p"} <= set(arguments)
    assert {"--time=30", "--mem=16G", "--gpus-per-node=2", "--exclusive"} <= set(arguments)
    assert {"--foo=bar", "--licenses=a:1", "--spread-job"} <= set(arguments)


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("sbatch: Job 7 to start at 2026-01-01T00:00:00 using 4 processors on nodes a", 0),
        ("sbatch: fatal: Could not establish a configuration source", 1),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", 1),
    ],
)
def test_what_is_no_refusal_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int) -> None:
    stand_in(tmp_path, monkeypatch, says, code)
    assert trial(SlurmTarget(), nodes=1, cores=1) is None


def test_a_partition_that_is_not_for_the_user_s_group_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "User's group not permitted to use this partition"
    stand_in(tmp_path, monkeypatch, f"allocation failure: {words}", 1)  # Slurm 22.05
    told = trial(SlurmTarget(name="c", partition="staff"), nodes=1, cores=1)
    assert told == f"target.partition 'staff' of c: sbatch: allocation failure: {words}"


def test_an_option_that_rankwise_sets_is_named_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = trial(SlurmTarget(extra={"requeue": True}), nodes=1, cores=1)
    assert told == "target.extra: requeue is set by Rankwise. Leave it out"


def test_without_sbatch_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trial(SlurmTarget(), nodes=1, cores=1) is None


def test_gpus_are_asked_for_as_the_job_will_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(tmp_path, monkeypatch, "sbatch: error: Invalid generic resource (gres) specification", 1)
    target = SlurmTarget(name="gpus", gpus_per_node=4, ranks_per_node=4, gres="gpu:a100:4")
    assert trial(target, nodes=1, cores=4) is not None
    arguments = seen.read_text().splitlines()
    assert "--gres=gpu:a100:4" in arguments and not [each for each in arguments if each.startswith("--gpus-per-node")]
