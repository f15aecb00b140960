"""The command line as a whole: what `rankwise --help` shows, and how wrong arguments end."""

import errno
import re
from pathlib import Path
from typing import NoReturn

import pytest
import typer
from typer.testing import CliRunner

from flows.cli.errors import guarded
from flows.cli.main import app
from tasks.campaign.progress import current_progress, new_progress
from tasks.models.sources import TransientFetchError
from tests.support.run_folders.studies import write_study


def test_help_groups_all_commands_in_the_order_of_work() -> None:
    """Every command stands under a heading, the first study's before the others'."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "110"}).output
    headings = ("Studies", "Results", "Planning", "Models", "Serving", "Deployments", "Machines", "Prefect")
    places = [shown.index(f"─ {heading} ") for heading in headings]
    assert places == sorted(places) and "─ Commands ─" not in shown
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in commands:
        assert f"│ {name} " in shown, name
    assert shown.index("│ init ") < shown.index("│ run ") < shown.index("│ report ")


def test_help_names_no_type_behind_flags() -> None:
    """Typer 0.29 writes `--dry-run <bool>`, which who writes `--dry-run true` is refused; values keep their types."""
    command = typer.main.get_command(app)
    pages = {"": CliRunner().invoke(app, ["--help"]).output}
    for name, member in command.commands.items():  # type: ignore[attr-defined]
        pages[name] = CliRunner().invoke(app, [name, "--help"]).output
        for below in getattr(member, "commands", {}):
            pages[f"{name} {below}"] = CliRunner().invoke(app, [name, below, "--help"]).output
    assert "--debug" in pages[""] and "--dry-run" in pages["run"] and "lab up" in pages
    assert " DIR " in pages["run"]
    assert [name for name, page in pages.items() if "<bool>" in page] == []


def test_help_keeps_what_is_in_brackets() -> None:
    """`tokens of prompt and answer  [default: 2048]`: rich took the default for markup, and left it out."""
    checked = 0
    for name, member in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        commands = {(name,): member} | {(name, below): each for below, each in getattr(member, "commands", {}).items()}
        for words, command in commands.items():
            notes: list[str] = [
                note for each in command.params for note in re.findall(r"\[default: [^]]*\]", each.help or "")
            ]
            if not notes:
                continue
            for _ in range(2):  # a help may be asked for again
                shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=300, env={"COLUMNS": "300"}).output
                assert [note for note in notes if note not in shown] == [] and "\\[" not in shown, words
            checked += len(notes)
    assert checked > 15


@pytest.mark.parametrize("name", ["plan", "serve", "generate", "deploy"])
def test_help_of_80_columns_cuts_no_word(name: str) -> None:
    """`--max-step-tok…` and `h100-80gb.memory_bytes…` could not be typed."""
    assert "…" not in CliRunner().invoke(app, [name, "--help"], terminal_width=80, env={"COLUMNS": "80"}).output


@pytest.mark.parametrize(
    "words", [["init", "--from", "train.py", "--output"], ["lab", "status", "--folder"], ["site", ".", "--out"]]
)
def test_a_link_to_itself_is_no_traceback(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('step 1 loss 2.0')\n")
    (tmp_path / "loop").symlink_to("loop")
    done = CliRunner().invoke(app, [*words, "loop"])
    assert isinstance(done.exception, SystemExit | None), done.exception


@pytest.mark.parametrize(
    "words",
    [
        ["lab", "status", "--folder", "~no-such-user/lab"],
        ["plan", "--gpus", "1", "--model", "~no-such-user/model"],
        ["report", "--results", "~no-such-user/runs"],
    ],
)
def test_the_home_of_nobody_is_no_traceback(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SystemExit) and done.exit_code != 0, done.exception


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deploy", "--model", "/nosuch", "--target", "local:cpu"], "--model: /nosuch: no such folder"),
        (["deploy", "--model", "t5-small", "--target", "aws:nosuch"], "--target: unknown instance 'aws/nosuch'"),
        (["deploy", "--target", "local:cpu"], "--model: missing"),
        (["undeploy", "nosuch"], "nosuch: no deployment of this name. Known: none"),
        (["route", "../nosuch"], "--name: got '../nosuch'"),
        (["collect", "/nosuch"], "/nosuch: not a bundle"),
        (["benchmark", "--models", "t5-small", "--config", "/nosuch.json"], "/nosuch.json: No such file"),
        (["benchmark", "--models", "t5-small", "--nodes", ""], "--nodes: got nothing"),
        (["benchmark", "--models", "t5-small", "--batch-sizes", ""], "--batch-sizes: got nothing"),
        (["benchmark", "--models", "t5-small", "--batch-sizes", "2\u00b2"], "--batch-sizes: got '2\u00b2', expected"),
        (
            ["benchmark", "--models", "synthetic:llama-1m@0,synthetic:llama-1m@0"],
            "--models: synthetic:llama-1m@0 is named twice",
        ),
        (["benchmark", "--models", "synthetic:vit-2m@0"], "--models: synthetic:vit-2m@0: an image model"),
        (["plan", "--model", "opt-6.7b", "--gpus", "8", "--catalog", "/nosuch.yaml"], "/nosuch.yaml: No such file"),
        (["report", "/nosuch"], "/nosuch: not a run folder"),
        (["publish", "/nosuch"], "/nosuch: no report of a run here"),
        (["examples", "nosuch"], "no example 'nosuch'\n  use one of: bandwidth"),
        (["history", "show", "nosuch"], "runs/history.sqlite: no history here"),
        (["manifest", "k8s", "--out", "k8s", "/nosuch"], "/nosuch: no bundle, deployment or study file"),
    ],
)
def test_what_the_command_line_names_and_is_not_there_ends_with_exit_code_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message begins with what the user wrote, and promises nothing about measurements that were never begun."""
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert done.stderr.startswith(said), done.stderr
    assert "kept" not in done.stderr


def test_a_run_folder_that_cannot_be_published_is_not_blamed_on_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Prefect API http://...: plan.json: schema_version ...; not published`, after a server was started for it."""
    (tmp_path / "plan.json").write_text('{"schema_version": 2}')
    (tmp_path / "report.md").write_text("# old\n")
    monkeypatch.setattr("flows.cli.run._begin_api", lambda leases: (None, "no API is asked"))
    done = CliRunner().invoke(app, ["publish", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"{tmp_path}/plan.json: schema_version: got 2, expected"), done.stderr


def test_addresses_and_paths_are_printed_as_they_are() -> None:
    """`:b:` and `:x:` are emoji to the library that prints, and parts of addresses and names here."""
    for written in ("/nosuch/fe80::b:1", "/nosuch:x:[red]/:100:"):
        assert CliRunner().invoke(app, ["report", written]).stderr.startswith(f"{written}: not a run folder")


@pytest.mark.parametrize(
    "words",
    [
        ["bundle", "setup-script", "--out", "/nosuch/script.sh"],
        ["bundle", "multi-node-example", "--out", "/nosuch/script.py"],
        ["logs", "x" * 300],
    ],
)
def test_what_the_system_refuses_is_said_in_one_line(words: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, words, env={"RANKWISE_DATA": str(tmp_path)})
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1
    assert done.stderr.startswith(words[-1]) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["export", "acme/tiny", "--to", "onnx"], ["bundle", "sbatch", "s.yaml"], ["run", "s.yaml"]]
)
def test_a_hub_that_is_away_is_said_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> NoReturn:
        raise TransientFetchError("acme/tiny at main: https://hub returned HTTP 503. Try again")

    slurm = {"kind": "slurm", "partition": "gpu", "nodes": 2}
    write_study(
        tmp_path, models=[{"id": "acme/tiny"}], targets=[slurm] if words[0] == "bundle" else [{"kind": "local"}]
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr("tasks.models.model_cache.look_up", away)
    monkeypatch.setattr("tasks.prefect_api.stages._BACKOFF_SECONDS", 0.0)
    done = CliRunner().invoke(app, words if words[0] == "run" else [*words, "--out", "out"])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception
    assert done.stderr == "acme/tiny at main: https://hub returned HTTP 503. Try again\n"


@pytest.mark.parametrize(
    "words",
    [
        ["report", "runs/a", "--output", "joined.md"],
        ["report", "runs/a", "--format", "html", "--style", "paper"],
        ["report", "--results", "runs/*", "--format", "html"],
        ["compare", "runs/a", "runs/b", "--output", "page.html"],
        ["compare", "runs/a", "--within", "gate", "--history", "runs.sqlite"],
        ["history", "list", "--output", "page.html"],
        ["history", "show", "main", "--output", "page.html"],
        ["doctor", "--calibrate", "--master", "host:1"],
        ["examples", "--out", "studies"],
        ["team", "up", "--api", "http://127.0.0.1:9/api", "--host", "0.0.0.0"],
        ["team", "up", "--api", "http://127.0.0.1:9/api", "--port", "4201"],
        ["team", "up", "--api", "http://127.0.0.1:9/api", "--database", "postgresql://db/prefect"],
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that nobody writes is missed only when it is looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and done.stderr.startswith(f"{words[-2]}: has no effect with"), done.stderr
    assert not list(tmp_path.iterdir())


def test_a_schedule_is_not_both_resumed_and_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was paused."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    done = CliRunner().invoke(app, ["deploy-flows", "--resume", "weekly", "--resume", "daily", "--pause", "weekly"])
    assert (done.exit_code, done.stderr) == (2, "--resume, --pause: got weekly for both. Name it once\n")


def test_only_a_run_that_has_begun_says_what_becomes_of_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in `plan` or `compare` told of launches and measurements."""

    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", "models/a")

    new_progress()
    for study, ended, kept in (
        ("", "", ""),
        ("s", ": all launches ended, completed measurements are kept",
         ". Completed measurements are kept; correct this and run again to resume"),
    ):  # fmt: skip
        current_progress().study = study
        assert [guarded(work, Path("s.yaml"), False) for work in (interrupted, full)] == [1, 1]
        assert capsys.readouterr().err == f"interrupted{ended}\nmodels/a: No space left on device{kept}\n"
    new_progress()


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--model", "opt-1.3b", "--gpus", "8", "--accelerator", "a100-80gb", "--output", "plan.json"],
        ["manifest", "apptainer", "--out", "engine.def"],
    ],
)
def test_a_full_disk_is_no_wrong_argument(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path))
    monkeypatch.setattr("configs.common.base._write_and_rename", full)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (1, f"{words[-1]}: No space left on device\n")
