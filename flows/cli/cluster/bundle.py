"""`rankwise bundle ...` and `rankwise collect`: studies for clusters that only allow sbatch."""

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from configs.common.printable import plural

app = typer.Typer(help="Export studies and scripts for clusters that only allow sbatch.", no_args_is_help=True)

OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="output file instead of standard output")]


@app.command("sbatch")
def sbatch_command(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="study file")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="new or empty folder")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="NAME", help="Slurm target, if the study has several")
    ] = None,
) -> None:
    """Export a study as a folder whose submit.sbatch measures it in one Slurm job."""
    from flows.cli.errors import guarded, plainly

    work = lambda: plainly(lambda: write(study, assignments or [], out, target))  # noqa: E731
    raise typer.Exit(guarded(work, study, context.obj["debug"]))


@app.command("setup-script")
def setup_script_command(context: typer.Context, out: OutFile = None) -> None:
    """Write a script that starts one node of a multi-node PyTorch job without a scheduler."""
    from slurm.sbatch_bundle.scripts import setup_script

    _give(context, setup_script, out, mode=0o755)


@app.command("multi-node-example")
def multi_node_example_command(context: typer.Context, out: OutFile = None) -> None:
    """Write a training script that runs on one or several hosts, a template for your own."""
    from slurm.sbatch_bundle.scripts import multi_node_example

    _give(context, multi_node_example, out, mode=0o644)


def write(path: Path, assignments: list[str], out: Path, target: str | None) -> int:
    """Run `rankwise bundle sbatch` and return the exit code."""
    from configs.spec.study import load_study
    from flows.folders import cache_folder
    from tasks.bundle.write import write_bundle

    study = load_study(path, assignments)
    written = write_bundle(study, path.parent, cache_folder(), out, target)
    print(
        f"{out}: {plural(written.launches, 'launch')}, {plural(written.measurements, 'measurement')}, "
        f"up to {plural(written.nodes, 'node')}"
    )
    for note in written.notes:
        print(f"  note: {note}, pinned in plan.json")
    for model in written.large_models:
        print(f"  weights of {model.name} not included: copy {model.folder} to $SCRATCH_ROOT/models/{model.name}")
    print(
        "  next: copy the folder to the cluster, submit submit.sbatch, copy the folder back and run "
        f"`rankwise collect {quote(str(out))}` (see README.md)"
    )
    return 0


def run_collect(folder: Path) -> int:
    """Run `rankwise collect` and return the exit code."""
    from configs.plans.paths import RunPaths
    from flows.cli.errors import ALL_COMPLETED, SOME_UNMEASURED
    from reports.render import render_report
    from tasks.bundle.collect import collect_bundle

    collected = collect_bundle(folder)
    summary = render_report(RunPaths(folder.absolute()))
    for line in [*collected.notes, *summary.sentences]:
        print(line)
    failures = {name: count for name, count in summary.statuses.items() if name != "completed"}
    print(plural(len(collected.records), "new record"))
    if failures:
        listed = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failures.items())
        print(f"Not measured: {listed}")
    if collected.missing:
        launches = f" ({plural(collected.not_begun, 'launch')} not started)" if collected.not_begun else ""
        print(f"{plural(collected.missing, 'measurement')} missing{launches}. Submit submit.sbatch again to resume")
    print(f"Report     {summary.path}")
    return SOME_UNMEASURED if failures or collected.missing else ALL_COMPLETED


def _give(context: typer.Context, text: Callable[[], str], out: Path | None, mode: int) -> None:
    """Write a text to a file, else to standard output, and exit."""
    from configs.common.base import write_atomically
    from flows.cli.errors import guarded, plainly

    def work() -> int:
        if out is None:
            print(text(), end="")
        else:
            write_atomically(out, text(), mode)
        return 0

    raise typer.Exit(guarded(lambda: plainly(work), out or Path(), bool((context.obj or {}).get("debug"))))
