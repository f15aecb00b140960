"""The `rankwise` command-line interface: all commands with their options and help texts.

Commands import their dependencies when called, which keeps `rankwise --help` fast.
Exit codes: 0 all cells completed, 3 a report was written but some repeats have no measurement, 2 invalid
study file (or other argument), 4 `compare` found a regression or `verify` a defect, 1 any other error.
`plan`: 3 nothing fits.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.benchmark import benchmark as benchmark_command
from flows.cli.catalog import app as catalog_commands
from flows.cli.cluster.bundle import app as bundle_commands
from flows.cli.cluster.lab import app as lab
from flows.cli.deploy import command as deploy_commands
from flows.cli.engines.command import app as engine_commands
from flows.cli.errors import plainly
from flows.cli.export import export as export_command
from flows.cli.first_study.command import init as init_command
from flows.cli.first_study.command import schema as schema_command
from flows.cli.list_nodes import list_nodes as list_nodes_command
from flows.cli.load.command import measure_server as load_command
from flows.cli.manifest.command import app as manifest_commands
from flows.cli.nodes import app as nodes_commands
from flows.cli.nodes import reap as reap_command
from flows.cli.plan.command import plan as plan_command
from flows.cli.results.history import HistoryFile
from flows.cli.results.history import app as history_commands
from flows.cli.server.team import app as team
from flows.cli.serving.command import generate as generate_command
from flows.cli.serving.command import serve as serve_command
from flows.cli.verify.command import verify as verify_command

app = typer.Typer(
    help="Measure how ML inference and training scale over layouts, ranks and machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(team, name="team")
app.add_typer(lab, name="lab")
app.add_typer(bundle_commands, name="bundle")
app.add_typer(history_commands, name="history")
app.add_typer(catalog_commands, name="catalog")
app.add_typer(engine_commands, name="engine")
app.add_typer(nodes_commands, name="nodes")
app.add_typer(manifest_commands, name="manifest")
app.command("reap")(reap_command)
app.command("list-nodes")(list_nodes_command)
app.command("benchmark")(benchmark_command)
app.command("plan")(plan_command)
app.command("verify")(verify_command)
app.command("export")(export_command)
app.command("serve")(serve_command)
app.command("generate")(generate_command)
app.command("load")(load_command)
app.command("deploy")(deploy_commands.deploy)
app.command("deployments")(deploy_commands.deployments)
app.command("undeploy")(deploy_commands.undeploy)
app.command("scale")(deploy_commands.scale)
app.command("rollout")(deploy_commands.rollout)
app.command("route")(deploy_commands.route)
app.command("init")(init_command)
app.command("schema")(schema_command)

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="study file")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="parent folder of the run folders")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import version

    from slurm.staging.version import code_version

    code = code_version()
    commit = f", commit {code['RANKWISE_COMMIT'][:12]}" if "RANKWISE_COMMIT" in code else ""
    changed = " with uncommitted changes" if code.get("RANKWISE_DIRTY") == "1" else ""
    print(f"rankwise {version('rankwise')}{commit}{changed}")
    raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="print a traceback with every error")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and the commit"),
    ] = False,
) -> None:
    """Store the global options."""
    context.obj = {"debug": debug}


@app.command()
def run(
    context: typer.Context,
    study: StudyFile,
    runs: Runs = Path("runs"),
    assignments: Assignments = None,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="measure only the repeats that failed before")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print all cells and launches without starting them")
    ] = False,
    accept_environment: Annotated[
        bool, typer.Option("--accept-environment", help="resume although the environment has changed")
    ] = False,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="skip the one-time calibration of this machine")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="rent nodes without asking for the price")] = False,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="add repeats, up to measuring.max_repeats, until the decision is sure"),
    ] = False,
) -> None:
    """Measure a study, or resume it, and write its report."""
    from flows.cli.run import dry_run_study, guarded, run_study
    from flows.cli.until_decided import run_until_decided

    if dry_run:
        work = lambda: dry_run_study(study, assignments or [], runs)  # noqa: E731
    else:
        measured = run_until_decided if until_decided else run_study
        work = lambda: measured(  # noqa: E731
            study, assignments or [], runs, only_failed, accept_environment, calibrate=not no_calibrate, yes=yes
        )
    raise typer.Exit(guarded(work, study, context.obj["debug"]))


@app.command()
def examples(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="the study to copy, such as quickstart")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="where to copy it")] = Path(),
) -> None:
    """List the shipped studies, or copy one with the files that it names."""
    from flows.cli.examples import copy_example, print_examples
    from flows.cli.run import guarded

    work = print_examples if name is None else lambda: copy_example(name, out)
    raise typer.Exit(guarded(work, out, context.obj["debug"]))


@app.command()
def validate(context: typer.Context, study: StudyFile, assignments: Assignments = None) -> None:
    """Validate a study file and everything it refers to, and print the number of measurements."""
    from flows.cli.run import guarded, validate_study

    raise typer.Exit(guarded(lambda: validate_study(study, assignments or []), study, context.obj["debug"]))


@app.command()
def status(context: typer.Context, folder: RunFolder, as_json: AsJson = False) -> None:
    """Show every cell and repeat of a run."""
    from flows.cli.results.inspect import print_status
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: plainly(lambda: print_status(folder, as_json)), folder, context.obj["debug"]))


@app.command("export-run")
def export_run(
    context: typer.Context,
    folder: RunFolder,
    to: Annotated[
        Literal["parquet", "prometheus", "tensorboard", "mlflow", "wandb", "optimum", "huggingface"],
        typer.Option("--to", help="format"),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="folder  [default: RUN/exports/FORMAT]")] = None,
) -> None:
    """Write a run's figures in the format of another program; nothing is sent."""
    from flows.cli.results.inspect import export_figures
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: plainly(lambda: export_figures(folder, to, out)), folder, context.obj["debug"]))


@app.command()
def watch(
    context: typer.Context,
    folder: RunFolder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free one")] = 0,
) -> None:
    """Serve the report's page on loopback while a run goes on, until Ctrl-C."""
    from flows.cli.results.watch import serve_page as serve_page
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: plainly(lambda: serve_page(folder, port)), folder, context.obj["debug"]))


@app.command()
def logs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, or the name of a deployment")],
    follow: Annotated[bool, typer.Option("--follow", help="print new lines until the run ends")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="only this rank")] = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="only jobs whose name starts with this: 0007")] = "",
) -> None:
    """Print the logs of all ranks, launchers and scheduler jobs, or of a deployment's servers."""
    from flows.cli.results.logs import print_logs
    from flows.cli.run import guarded

    if not folder.exists() and "/" not in str(folder):
        from flows.cli.deploy.listing import print_deployment_logs, store_of_user

        if any(each.name == str(folder) for each in store_of_user().all()):
            work = lambda: plainly(lambda: print_deployment_logs(str(folder)))  # noqa: E731
            raise typer.Exit(guarded(work, folder, context.obj["debug"]))
    raise typer.Exit(
        guarded(lambda: plainly(lambda: print_logs(folder, follow, rank, job)), folder, context.obj["debug"])
    )


@app.command()
def push(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="a Slurm target of the study")],
    study: Annotated[Path, typer.Option("--study", metavar="STUDY.yaml", help="study file")],
    assignments: Assignments = None,
) -> None:
    """Stage code, libraries and models in a cluster's shared folder before a run."""
    from flows.cli.cluster.push import push as push_to
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: push_to(target, study, assignments or []), study, context.obj["debug"]))


@app.command()
def collect(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder written by `rankwise bundle sbatch`, after its job")
    ],
) -> None:
    """Write the records and the report of a bundle after its job has run."""
    from flows.cli.cluster.bundle import run_collect
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: run_collect(folder), folder, context.obj["debug"]))


@app.command()
def report(
    context: typer.Context,
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="compare all runs that match: folders, or files of `benchmark`"),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="file for the comparison of --results")] = Path(
        "joined.md"
    ),
    form: Annotated[
        Literal["md", "html", "pdf", "json"],
        typer.Option(
            "--format",
            help="md: write report.md and appendix.md; html: report.html; pdf: paper.pdf and its source; "
            "json: print the answers, write nothing",
        ),
    ] = "md",
    style: Annotated[Literal["paper"], typer.Option(help="of a PDF: a paper in two columns")] = "paper",
) -> None:
    """Re-render the report of a run, or compare several runs in one report."""
    from flows.cli.results.compare import join_runs
    from flows.cli.results.inspect import print_answers, render_again, render_html, render_paper
    from flows.cli.run import guarded

    given = folders or []
    if results is None and len(given) != 1:
        typer.echo("RUN: expected either one run folder or --results GLOB", err=True)
        raise typer.Exit(2)
    if results is not None:
        patterns = [results, *given]  # a shell has expanded an unquoted pattern
        raise typer.Exit(
            guarded(lambda: plainly(lambda: join_runs(patterns, output)), Path(results), context.obj["debug"])
        )
    run = Path(given[0])
    made = {"md": render_again, "html": render_html, "pdf": render_paper, "json": print_answers}[form]
    raise typer.Exit(guarded(lambda: plainly(lambda: made(run)), run, context.obj["debug"]))


@app.command()
def publish(context: typer.Context, folder: RunFolder) -> None:
    """Copy the report of a run to Prefect's UI, after a run without a Prefect server."""
    from flows.cli.run import guarded, publish_folder

    raise typer.Exit(guarded(lambda: publish_folder(folder), folder, context.obj["debug"]))


@app.command()
def compare(
    context: typer.Context,
    first: RunFolder,
    second: Annotated[Path | None, typer.Argument(metavar="RUN_B", help="the newer run")] = None,
    baseline: Annotated[str | None, typer.Option(metavar="NAME", help="compare with this run of the history")] = None,
    within: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="compare the variants of this experiment of one run")
    ] = None,
    undisturbed: Annotated[
        bool,
        typer.Option("--undisturbed", help="with --within: judge the fastest tenth of the steps, for busy machines"),
    ] = False,
    threshold: Annotated[
        float, typer.Option(metavar="PERCENT", help="minimum slow-down reported as a regression")
    ] = 5.0,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the comparison as Markdown")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="also write one JUnit test case per cell")] = None,
    as_json: AsJson = False,
    history: HistoryFile = None,
) -> None:
    """Compare two runs, a run with a baseline, or variants of one run; exit code 4 on a regression."""
    from flows.cli.results.compare import compare_runs
    from flows.cli.run import guarded

    work = lambda: compare_runs(  # noqa: E731
        first, second, baseline, threshold, markdown, junit, as_json, history, within, undisturbed
    )
    raise typer.Exit(guarded(lambda: plainly(work), first, context.obj["debug"]))


@app.command()
def fit(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="columns ranks, throughput; optionally repeat, kind")
    ],
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="file for the plot; also .svg")] = None,
    residuals: Annotated[
        Literal["relative", "absolute"], typer.Option(help="residuals to minimise; most tools use absolute")
    ] = "relative",
) -> None:
    """Fit scaling laws to throughput over ranks and rank them by their support in the data."""
    from flows.cli.results.fit import fit_file
    from flows.cli.run import guarded

    raise typer.Exit(
        guarded(lambda: plainly(lambda: fit_file(file, as_json, plot, residuals)), file, context.obj["debug"])
    )


@app.command()
def forecast(
    context: typer.Context,
    folder: RunFolder,
    to: Annotated[int | None, typer.Option(metavar="N", help="maximum number of ranks, up to 4096")] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="machine with the interconnect: aws/p5.48xlarge")
    ] = None,
) -> None:
    """Forecast a run's scaling beyond the measured ranks, for a given interconnect."""
    from flows.cli.plan.forecast import print_forecast
    from flows.cli.run import guarded

    work = lambda: print_forecast(folder, to, machine)  # noqa: E731
    raise typer.Exit(guarded(work, folder, context.obj["debug"]))


@app.command("plan-check")
def plan_check(
    context: typer.Context,
    predict: Annotated[Path, typer.Option(metavar="B.csv", help="rows to predict")],
    fit: Annotated[Path | None, typer.Option(metavar="A.csv", help="measured rows to calibrate with")] = None,
    column: Annotated[
        list[str], typer.Option(metavar="NAME=COLUMN", help="name of a column in your files, repeatable")
    ] = [],  # noqa: B006
    value: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="value of a column that your files lack, repeatable")
    ] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a file of measurements and print the prediction errors."""
    from flows.cli.plan.check import plan_check as check
    from flows.cli.run import guarded

    raise typer.Exit(
        guarded(lambda: plainly(lambda: check(predict, fit, as_json, column, value)), predict, context.obj["debug"])
    )


@app.command()
def convert(context: typer.Context, source: Path, destination: Path) -> None:
    """Convert a pickled checkpoint to safetensors, in a separate process that loads weights only."""
    from flows.cli.results.inspect import convert_checkpoint
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: convert_checkpoint(source, destination), source, context.obj["debug"]))


@app.command()
def doctor(
    as_json: AsJson = False,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="also test a connection to this address")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="calibrate the planner on this machine instead")
    ] = False,
) -> None:
    """Check this machine and print a remedy for each problem."""
    from flows.cli.doctor.calibrate import calibrate_command
    from flows.cli.doctor.command import doctor as examine

    if calibrate:
        raise typer.Exit(calibrate_command(as_json))
    raise typer.Exit(examine(master, as_json))


@app.command()
def ui(context: typer.Context) -> None:
    """Serve Prefect's UI with past runs until Ctrl-C."""
    from flows.cli.run import guarded
    from flows.server.local import serve_ui

    raise typer.Exit(guarded(serve_ui, Path("ui"), context.obj["debug"]))


@app.command("deploy-flows")
def deploy_flows(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Option(help="working folder of flow runs; results go to its subfolder `runs`")
    ] = Path(),
    resume: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="resume a schedule")] = None,
    pause: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="pause a schedule")] = None,
) -> None:
    """Register deployments, schedules and automation with the Prefect API; idempotent."""
    from flows.cli.run import guarded
    from flows.cli.server.deploy import register_flows

    switch = dict.fromkeys(resume or [], True) | dict.fromkeys(pause or [], False)
    raise typer.Exit(guarded(lambda: register_flows(folder, switch), folder, context.obj["debug"]))
