"""The `rankwise` command line: one line of help for each thing that a user can want.

Commands import what they need when they are called, so that `rankwise --help` answers at once.
Exit codes: 0 all cells completed, 3 a report was written but some repeats have no measurement, 2 the
study file is wrong, 1 anything else.
"""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.team import app as team

app = typer.Typer(
    help="Run scaling studies: which layout, on which machines, shown with numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(team, name="team")

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="the study file")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder, such as runs/quickstart")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="folder that holds the run folders")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable")]


@app.callback()
def main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="show a traceback with every error")] = False,
) -> None:
    """Options that come before the command."""
    context.obj = {"debug": debug}


@app.command()
def run(
    context: typer.Context,
    study: StudyFile,
    runs: Runs = Path("runs"),
    assignments: Assignments = None,
    only_failed: Annotated[bool, typer.Option("--only-failed", help="measure only what failed before")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every cell and launch, start nothing")] = False,
    accept_environment: Annotated[
        bool, typer.Option("--accept-environment", help="go on in an environment unlike the one before")
    ] = False,
) -> None:
    """Measure a study, or what is missing of it, and write its report."""
    from flows.cli.run import dry_run_study, guarded, run_study

    if dry_run:
        work = lambda: dry_run_study(study, assignments or [], runs)  # noqa: E731
    else:
        work = lambda: run_study(study, assignments or [], runs, only_failed, accept_environment)  # noqa: E731
    raise typer.Exit(guarded(work, study, context.obj["debug"]))


@app.command()
def validate(context: typer.Context, study: StudyFile, assignments: Assignments = None) -> None:
    """Check a study file and what it names, and say how much it would measure."""
    from flows.cli.run import guarded, validate_study

    raise typer.Exit(guarded(lambda: validate_study(study, assignments or []), study, context.obj["debug"]))


@app.command()
def status(context: typer.Context, folder: RunFolder, as_json: AsJson = False) -> None:
    """Show every cell and repeat of a run."""
    from flows.cli.inspect import print_status
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: print_status(folder, as_json), folder, context.obj["debug"]))


@app.command()
def logs(
    context: typer.Context,
    folder: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", help="go on as the logs grow")] = False,
) -> None:
    """Print the logs of every rank."""
    from flows.cli.inspect import print_logs
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: print_logs(folder, follow), folder, context.obj["debug"]))


@app.command()
def report(context: typer.Context, folder: RunFolder) -> None:
    """Render a run's report again from its records."""
    from flows.cli.inspect import render_again
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: render_again(folder), folder, context.obj["debug"]))


@app.command()
def convert(context: typer.Context, source: Path, destination: Path) -> None:
    """Turn a pickled checkpoint into safetensors, in a process of its own that loads weights only."""
    from flows.cli.inspect import convert_checkpoint
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: convert_checkpoint(source, destination), source, context.obj["debug"]))


@app.command()
def doctor(
    as_json: AsJson = False,
    master: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="also try to reach this address")] = None,
) -> None:
    """Say what of this machine is usable, with the remedy for what is not."""
    from flows.cli.doctor import doctor as examine

    raise typer.Exit(examine(master, as_json))


@app.command()
def ui() -> None:
    """Bring up Prefect's UI to look at past runs, until Ctrl-C."""
    from flows.local_server import serve_ui

    serve_ui()


@app.command("deploy-flows")
def deploy_flows(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="where flow runs will work; runs end up in its folder `runs`")] = Path(),
    resume: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="switch a schedule on")] = None,
    pause: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="switch a schedule off")] = None,
) -> None:
    """Register deployments, schedules, limit and automation with the Prefect API; say it again at any time."""
    from flows.cli.deploy import deploy
    from flows.cli.run import guarded

    switch = dict.fromkeys(resume or [], True) | dict.fromkeys(pause or [], False)
    raise typer.Exit(guarded(lambda: deploy(folder, switch), folder, context.obj["debug"]))
