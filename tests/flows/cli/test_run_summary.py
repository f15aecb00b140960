"""What `rankwise run` asks before it measures, and the summary that it prints at its end."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from configs.plans.paths import RunPaths
from flows.cli.run import OTHER_ERROR, SOME_UNMEASURED, _asked_to_accept, _print_summary, guarded
from tasks.campaign.progress import RunProgress


def test_a_folder_in_brackets_is_named_as_it_is() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200, highlight=False)
    folder = Path("[old]/[/b]/run")
    assert _print_summary(console, ["fine"], {"completed": 1, "failed": 2}, folder / "report.md", folder) == (
        SOME_UNMEASURED
    )
    assert "Not measured: 2 failed (see [old]/[/b]/run/report.md)" in written.getvalue()


@pytest.mark.parametrize(("answer", "accepted"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_another_environment_is_accepted_by_a_yes_alone(
    answer: str, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty answer is the end of the input, Ctrl-D."""
    (tmp_path / "environment.json").write_text('{"python": "2.7"}')
    typed = io.StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    plan: Any = SimpleNamespace(targets=(), cells={}, engines={})
    assert _asked_to_accept(RunPaths(tmp_path), plan) is accepted


@pytest.mark.parametrize(
    ("study", "said"),
    [("", "interrupted\n"), ("s", "interrupted: all launches ended, completed measurements are kept\n")],
)
def test_only_a_run_that_was_begun_tells_of_launches_when_it_is_interrupted(
    study: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `plan`, `convert` or `engine add` promised that measurements are kept."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.campaign.progress._current", RunProgress(study=study))
    assert guarded(interrupted, Path(), debug=False) == OTHER_ERROR
    assert capsys.readouterr().err == said
