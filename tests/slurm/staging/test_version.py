"""The commit of the running code where git does not say all of it."""

import subprocess
from pathlib import Path

import pytest

from slurm.staging import version

SLOW = "exec sleep 60"
REFUSED = 'echo "fatal: detected dubious ownership in repository" >&2; echo "To add an exception" >&2; exit 128'


@pytest.mark.parametrize(
    ("of_commit", "of_state", "found", "said"),
    [
        ("echo 0e1f", "echo ' M a.py'", {"RANKWISE_COMMIT": "0e1f", "RANKWISE_DIRTY": "1"}, ""),
        ("echo 0e1f", SLOW, {"RANKWISE_COMMIT": "0e1f"}, "since its commit is unknown: git took longer than 0.5 s\n"),
        (SLOW, "true", {}, "the commit of the code is unknown: git took longer than 0.5 s\n"),
        (REFUSED, "true", {}, "the code is unknown: fatal: detected dubious ownership in repository\n"),
    ],
)  # fmt: skip
def test_what_git_does_not_say_is_told(
    of_commit: str,
    of_state: str,
    found: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Records had no commit where `git status` took long, and nobody was told."""
    (tmp_path / ".git").mkdir()
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\nif test "$3" = rev-parse; then\n{of_commit}\nelse\n{of_state}\nfi\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(version, "ROOT", tmp_path)
    monkeypatch.setattr(version, "_GIT_SECONDS", 0.5)
    assert version.code_version.__wrapped__() == found
    told = capsys.readouterr().err
    assert told.endswith(said) and bool(told) == bool(said)


def test_the_commit_is_the_codes_own_within_a_git_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git tells hooks, and what `git rebase --exec` starts, by variables which repository it works on."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("code", "model"):
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "init", "--quiet", name], check=True)
        subprocess.run([*git, "-C", name, "commit", "--quiet", "--allow-empty", "--message", name], check=True)
    monkeypatch.setattr(version, "ROOT", tmp_path / "code")
    alone = version.code_version.__wrapped__()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "model" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "model" / ".git" / "index"))
    assert version.code_version.__wrapped__() == alone != {}
