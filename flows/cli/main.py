"""The `rankwise` command line: one line of help for each thing that a user can want.

Commands import what they need when they are called, so that `rankwise --help` answers at once.
Exit codes: 0 all cells completed, 3 a report was written but some repeats have no measurement, 2 the
study file (or another argument) is wrong, 4 `compare` found a regression or `verify` a defect, 1 anything else.
`plan`: 3 nothing fits.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.catalog import app as catalog_commands
from flows.cli.export import export as export_command
from flows.cli.history import HistoryFile
from flows.cli.history import app as history_commands
from flows.cli.lab import app as lab
from flows.cli.manifest import app as manifest
from flows.cli.plan_command import plan as plan_command
from flows.cli.team import app as team
from flows.cli.verify import verify as verify_command

app = typer.Typer(
    help="Run scaling studies: which layout, on which machines, shown with numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(team, name="team")
app.add_typer(lab, name="lab")
app.add_typer(manifest, name="manifest")
app.add_typer(history_commands, name="history")
app.add_typer(catalog_commands, name="catalog")
app.command("plan")(plan_command)
app.command("verify")(verify_command)
app.command("export")(export_command)

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
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="do not measure this machine first, where that was never done")
    ] = False,
) -> None:
    """Measure a study, or what is missing of it, and write its report."""
    from flows.cli.run import dry_run_study, guarded, run_study

    if dry_run:
        work = lambda: dry_run_study(study, assignments or [], runs)  # noqa: E731
    else:
        work = lambda: run_study(  # noqa: E731
            study, assignments or [], runs, only_failed, accept_environment, calibrate=not no_calibrate
        )
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
    follow: Annotated[bool, typer.Option("--follow", help="go on as the logs grow, until the run ends")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="only of this rank")] = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="only of jobs whose name begins so: 0007")] = "",
) -> None:
    """Print what every rank and launcher wrote, and what the scheduler kept of it."""
    from flows.cli.logs import print_logs
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: print_logs(folder, follow, rank, job), folder, context.obj["debug"]))


@app.command()
def push(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="name of a Slurm target of the study")],
    study: Annotated[Path, typer.Option("--study", metavar="STUDY.yaml", help="the study file")],
    assignments: Assignments = None,
) -> None:
    """Bring code, libraries and models to a cluster's shared folder before a run needs them."""
    from flows.cli.push import push as push_to
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: push_to(target, study, assignments or []), study, context.obj["debug"]))


@app.command()
def collect(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of `rankwise manifest sbatch`, come home")],
) -> None:
    """Make records and the report of what the job of a manifest left in its folder."""
    from flows.cli.manifest import collect as collect_folder
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: collect_folder(folder), folder, context.obj["debug"]))


@app.command()
def report(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="a run folder, such as runs/quickstart")] = None,
    results: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="join these runs into one comparison; quote it"),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="of the joined comparison")] = Path("joined.md"),
) -> None:
    """Render a run's report again from its records, or join several runs into one comparison."""
    from flows.cli.compare import join_runs
    from flows.cli.inspect import render_again
    from flows.cli.run import guarded

    if (folder is None) == (results is None):
        typer.echo("give one run folder, or --results GLOB", err=True)
        raise typer.Exit(2)
    if results is not None:
        pattern = results
        raise typer.Exit(guarded(lambda: join_runs(pattern, output), Path(results), context.obj["debug"]))
    assert folder is not None
    run = folder
    raise typer.Exit(guarded(lambda: render_again(run), run, context.obj["debug"]))


@app.command()
def compare(
    context: typer.Context,
    first: RunFolder,
    second: Annotated[Path | None, typer.Argument(metavar="RUN_B", help="the newer run")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="compare with this run of the history instead")
    ] = None,
    threshold: Annotated[float, typer.Option(metavar="PERCENT", help="a regression is worse by more than this")] = 5.0,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="write a comment here")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="write a test case for each cell here")] = None,
    as_json: AsJson = False,
    history: HistoryFile = None,
) -> None:
    """Hold a run against another, or against a baseline; exit code 4 on a regression."""
    from flows.cli.compare import compare_runs
    from flows.cli.run import guarded

    work = lambda: compare_runs(first, second, baseline, threshold, markdown, junit, as_json, history)  # noqa: E731
    raise typer.Exit(guarded(work, first, context.obj["debug"]))


@app.command()
def fit(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="columns ranks, throughput; optionally repeat, kind")
    ],
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="where to draw; also .svg")] = None,
    residuals: Annotated[
        Literal["relative", "absolute"], typer.Option(help="what is made small; other tools use absolute")
    ] = "relative",
) -> None:
    """Fit scaling laws to throughput over ranks, and say which of them the numbers support."""
    from flows.cli.fit import fit_file
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: fit_file(file, as_json, plot, residuals), file, context.obj["debug"]))


@app.command()
def forecast(
    context: typer.Context,
    folder: RunFolder,
    to: Annotated[int | None, typer.Option(metavar="N", help="most ranks, up to 4096")] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="over whose interconnect: aws/p5.48xlarge")
    ] = None,
) -> None:
    """Forecast a run's scaling beyond what was measured, over a stated interconnect."""
    from flows.cli.forecast import print_forecast
    from flows.cli.run import WRONG_STUDY, guarded

    work = lambda: print_forecast(folder, to, machine)  # noqa: E731
    raise typer.Exit(guarded(work, folder, context.obj["debug"], wrong_value=WRONG_STUDY))


@app.command("plan-check")
def plan_check(
    context: typer.Context,
    predict: Annotated[Path, typer.Option(metavar="B.csv", help="rows to predict")],
    fit: Annotated[Path | None, typer.Option(metavar="A.csv", help="measured rows to learn from")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a file of measurements, and print the errors."""
    from flows.cli.plan_check import plan_check as check
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: check(predict, fit, as_json), predict, context.obj["debug"]))


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
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="measure this machine instead, for the planner's predictions")
    ] = False,
) -> None:
    """Say what of this machine is usable, with the remedy for what is not."""
    from flows.cli.calibrate import calibrate_command
    from flows.cli.doctor import doctor as examine

    if calibrate:
        raise typer.Exit(calibrate_command(as_json))
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
