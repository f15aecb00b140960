"""The `rankwise` command-line interface: which commands there are, in the order of work.

Commands import their dependencies when called, which keeps `rankwise --help` fast.
Exit codes: 0 all cells completed, 3 a report was written but some repeats have no measurement, 2 invalid
study file (or other argument), 4 `compare` found a regression or `verify` a defect, 1 any other error.
`plan`: 3 nothing fits.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.common.base import WrongArgument
from configs.common.system.collector import collect_seldom
from flows.cli import benchmark, catalog, export
from flows.cli.cluster import bundle, lab
from flows.cli.cluster import command as cluster
from flows.cli.deploy import command as deploy
from flows.cli.engines import command as engines
from flows.cli.first_study import command as first_study
from flows.cli.load import command as load
from flows.cli.manifest import command as manifest
from flows.cli.nodes import command as nodes
from flows.cli.nodes import listing
from flows.cli.options import AsJson, Assignments, Command, CommandGroup, Runs, StudyFile, refuse_unused
from flows.cli.plan import command as plan
from flows.cli.results import command as results
from flows.cli.results import history
from flows.cli.server import team
from flows.cli.serving import command as serving
from flows.cli.streams import open_missing_streams, print_every_character, whole_output
from flows.cli.verify import command as verify


class _Commands(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        open_missing_streams()
        print_every_character()
        _note_missing_folder()
        with whole_output():
            return super().__call__(*args, **kwargs)


app = _Commands(
    cls=CommandGroup,
    help="Measure how ML inference and training scale over layouts, ranks and machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _note_missing_folder() -> None:
    """Say that the working folder is gone, of which the system's own error is `No such file or directory` alone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("note: the working folder was removed. Change to another one", file=sys.stderr)


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
    collect_seldom()


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
    yes: Annotated[bool, typer.Option("--yes", help="rent nodes without asking for confirmation")] = False,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="add repeats, up to measuring.max_repeats, until the decision is sure"),
    ] = False,
) -> None:
    """Measure a study, or resume it, and write its report."""
    from flows.cli.errors import guarded
    from flows.cli.run import dry_run_study, run_study
    from flows.cli.until_decided import run_until_decided

    if until_decided and only_failed:
        typer.echo("--until-decided: adds repeats, and --only-failed measures no new ones. Leave one out", err=True)
        raise typer.Exit(2)
    if dry_run:
        work = lambda: dry_run_study(study, assignments or [], runs, only_failed)  # noqa: E731
    else:

        def measure(given: list[str]) -> int:
            return run_study(study, given, runs, only_failed, accept_environment, calibrate=not no_calibrate, yes=yes)

        given = assignments or []
        work = lambda: run_until_decided(study, given, runs, measure) if until_decided else measure(given)  # noqa: E731
    raise typer.Exit(guarded(work, study, context.obj["debug"]))


def examples(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="the study to copy, such as quickstart")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="where to copy it")] = Path(),
) -> None:
    """List the shipped studies, or copy one with the files that it names."""
    from flows.cli.errors import guarded, plainly
    from flows.cli.examples import copy_example, print_examples

    def work() -> int:
        if name is not None:
            return copy_example(name, out)
        refuse_unused(context, {"out": "without the NAME of a study"})
        return print_examples()

    raise typer.Exit(guarded(lambda: plainly(work), out, context.obj["debug"]))


def validate(context: typer.Context, study: StudyFile, assignments: Assignments = None) -> None:
    """Validate a study file and everything it refers to, and print the number of measurements."""
    from flows.cli.errors import guarded
    from flows.cli.run import validate_study

    raise typer.Exit(guarded(lambda: validate_study(study, assignments or []), study, context.obj["debug"]))


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="FROM", help="folder of the model with pickled weights")],
    destination: Annotated[Path, typer.Argument(metavar="TO", help="folder to write: a model with safetensors")],
) -> None:
    """Convert a pickled checkpoint to safetensors, in a separate process that loads weights only."""
    from flows.cli.errors import guarded, plainly
    from flows.cli.results.inspect import convert_checkpoint

    work = lambda: plainly(lambda: convert_checkpoint(source, destination))  # noqa: E731
    raise typer.Exit(guarded(work, source, context.obj["debug"]))


def doctor(
    context: typer.Context,
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
    from flows.cli.errors import guarded_alone, plainly

    debug = context.obj["debug"]
    if calibrate and master is not None:
        typer.echo("--master: has no effect with --calibrate. Leave it out", err=True)
        raise typer.Exit(2)
    if calibrate:
        from flows.cli.errors import guarded

        raise typer.Exit(guarded(lambda: plainly(lambda: calibrate_command(as_json)), Path("doctor"), debug))
    # Not `guarded`: it needs the packages that the doctor may find shadowed by others.
    raise typer.Exit(guarded_alone(lambda: examine(master, as_json), debug))


def ui(context: typer.Context) -> None:
    """Serve Prefect's UI with past runs until Ctrl-C."""
    from flows.cli.errors import guarded
    from flows.server.local import serve_ui

    raise typer.Exit(guarded(serve_ui, Path("ui"), context.obj["debug"]))


def deploy_flows(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Option(help="working folder of flow runs; results go to its subfolder `runs`")
    ] = Path(),
    resume: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="resume a schedule")] = None,
    pause: Annotated[list[str] | None, typer.Option(metavar="SLUG", help="pause a schedule")] = None,
) -> None:
    """Register deployments, schedules and automation with the Prefect API; idempotent."""
    from flows.cli.errors import guarded
    from flows.cli.server.deploy import register_flows

    def work() -> int:
        for slug in resume or []:
            if slug in (pause or []):
                raise WrongArgument(f"--resume, --pause: got {slug} for both. Name it once")
        switch = dict.fromkeys(resume or [], True) | dict.fromkeys(pause or [], False)
        return register_flows(folder, switch)

    raise typer.Exit(guarded(work, folder, context.obj["debug"]))


def _register(panel: str, **commands: Callable[..., None] | typer.Typer) -> None:
    """Commands and groups under one heading of `--help`. Names: with _ for -."""
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            for member in command.registered_commands:
                member.cls = Command
            app.add_typer(command, name=name.replace("_", "-"), rich_help_panel=panel, cls=CommandGroup)
        else:
            app.command(name.replace("_", "-"), rich_help_panel=panel, cls=Command)(command)


_register(
    "Studies", init=first_study.init, examples=examples, validate=validate, run=run, benchmark=benchmark.benchmark,
    status=results.status_command, watch=results.watch, logs=results.logs, schema=first_study.schema,
)  # fmt: skip
_register(
    "Results", report=results.report_command, compare=results.compare_command, site=history.site,
    export_run=results.export_run, publish=results.publish_command, fit=results.fit, history=history.app,
)  # fmt: skip
_register(
    "Planning", plan=plan.plan, plan_check=plan.plan_check_command, forecast=plan.forecast_command,
    list_nodes=listing.list_nodes, catalog=catalog.app,
)  # fmt: skip
_register("Models", verify=verify.verify, generate=serving.generate, convert=convert, export=export.export)
_register("Serving", serve=serving.serve, load=load.measure_server, engine=engines.app)
_register(
    "Deployments", deploy=deploy.deploy, deployments=deploy.deployments, rollout=deploy.rollout, scale=deploy.scale,
    route=deploy.route, undeploy=deploy.undeploy, manifest=manifest.app,
)  # fmt: skip
_register(
    "Machines", doctor=doctor, reap=nodes.reap, push=cluster.push_command, collect=cluster.collect_command,
    nodes=nodes.app, bundle=bundle.app, lab=lab.app,
)  # fmt: skip
_register("Prefect", ui=ui, deploy_flows=deploy_flows, team=team.app)
