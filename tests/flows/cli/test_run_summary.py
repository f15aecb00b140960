"""What `rankwise run` asks before it measures, and the summary that it prints at its end."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from configs.plans.paths import RunPaths
from configs.plans.plan import UnusableModel
from flows.cli.errors import ALL_COMPLETED, OTHER_ERROR, SOME_UNMEASURED, guarded
from flows.cli.run import _asked_to_accept, _print_summary, _print_unusable, _shown_at, _unusable
from flows.scaling_study import RunSummary
from tasks.campaign.progress import RunProgress
from tests.support.run_folders.studies import rankwise, write_study
from tests.support.servers.hub_server import HubServer, Repository, make_model


def test_a_folder_in_brackets_is_named_as_it_is() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200, highlight=False)
    folder = Path("[old]/[/b]/run")
    assert _print_summary(
        console, ["fine"], {"completed": 1, "failed": 2, "out_of_memory": 1}, folder / "report.md", folder
    ) == (SOME_UNMEASURED)
    assert "Not measured: 2 failed, 1 out of memory (see [old]/[/b]/run/report.md)" in written.getvalue()


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


@pytest.mark.slow
def test_a_model_of_a_hub_whose_files_cannot_be_measured_is_left_out_and_told(tmp_path: Path) -> None:
    """Its config.json is known once it is fetched: the run ended with 0 and named no model, the report with 3."""
    make_model(tmp_path / "served")  # config.json lacks what a model needs
    study = write_study(
        tmp_path,
        models=[{"id": "synthetic:llama-1m@0", "name": "good"}, {"id": "acme/broken"}],
        workload={"kind": "generate", "prompt_tokens": 4, "new_tokens": 2},
        experiments={"grid": {"kind": "sweep", "over": {"batch_size": [1]}}},
        measuring={"min_passes": 1, "min_seconds": 0},
    )
    with HubServer({"acme/broken": Repository(tmp_path / "served")}) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "RANKWISE_CACHE": str(tmp_path / "cache"), "HF_TOKEN": ""}
        environment["HF_HUB_OFFLINE"] = "0"  # whatever this process's libraries were told
        done = rankwise("run", study, "--no-calibrate", cwd=tmp_path, **environment)
    assert done.returncode == SOME_UNMEASURED, done.stdout + done.stderr
    assert "Not measured: model broken: models[1].id: broken: config.json: vocab_size is missing" in done.stdout


def test_models_that_a_run_has_left_out_are_its_own() -> None:
    """The check before the run cannot see the files of a hub's model."""
    broken = UnusableModel(name="broken", reason="no config.json")
    summary = RunSummary(
        folder="s", report="s/report.md", sentences=[], measurements=1, already_measured=0, statuses={"completed": 1},
        unusable=(broken,),
    )  # fmt: skip
    checked: Any = SimpleNamespace(unusable=())
    written = io.StringIO()
    left_out = _unusable(summary, checked)
    assert _print_unusable(Console(file=written, width=200), left_out, ALL_COMPLETED) == SOME_UNMEASURED
    assert written.getvalue() == "Not measured: model broken: no config.json\n"


@pytest.mark.parametrize(("home", "shown"), [(None, "http://h"), (Path("data"), "http://h; later: rankwise ui")])
def test_the_address_of_a_server_that_ends_is_told_with_how_to_start_it_again(home: Path | None, shown: str) -> None:
    """`published: http://127.0.0.1:28419` named a server that was gone three seconds later."""
    assert _shown_at(SimpleNamespace(ui="http://h", home=home)) == shown  # type: ignore[arg-type]
