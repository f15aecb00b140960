"""The commit of the running code where git does not say all of it."""

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
