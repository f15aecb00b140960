"""`rankwise manifest ...` and `rankwise collect`: studies for clusters on which nothing but sbatch may be used."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Write scripts for clusters on which nothing but sbatch may be used.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="write it here instead of printing it")]


@app.command("sbatch")
def sbatch_command(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="the study file")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="a folder that is not there yet, or is empty")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="NAME", help="which Slurm target, where there are several")
    ] = None,
) -> None:
    """Write a study as a folder with submit.sbatch, which measures it as one Slurm job."""
    from flows.cli.run import guarded

    work = lambda: write(study, assignments or [], out, target)  # noqa: E731
    raise typer.Exit(guarded(work, study, context.obj["debug"]))


@app.command("setup-script")
def setup_script_command(out: Out = None) -> None:
    """Write a script that starts one node's part of a PyTorch job on several nodes, without any scheduler."""
    from slurm.manifests.scripts import setup_script

    _give(setup_script(), out, executable=True)


@app.command("definition")
def definition_command(out: Out = None) -> None:
    """Write Apptainer's definition file of an image with Rankwise."""
    from slurm.manifests.scripts import definition

    _give(definition(), out, executable=False)


def write(path: Path, assignments: list[str], out: Path, target: str | None) -> int:
    """`rankwise manifest sbatch`. Returns the exit code."""
    from configs.study import load_study
    from flows.folders import cache_folder
    from tasks.manifest import write_manifest

    study = load_study(path, assignments)
    written = write_manifest(study, path.parent, cache_folder(), out, target)
    print(f"{out}: {written.launches} launches, {written.visits} visits, on at most {written.nodes} nodes")
    for model in written.large_models:
        print(f"  weights of {model.name} are not in it: copy {model.folder} to $SCRATCH_ROOT/models/{model.name}")
    print(
        f"  copy it to the cluster, submit submit.sbatch there, copy it home, `rankwise collect {out}`; see README.md"
    )
    return 0


def collect(folder: Path) -> int:
    """`rankwise collect`. Returns the exit code."""
    from configs.paths import RunPaths
    from flows.cli.run import ALL_COMPLETED, SOME_UNMEASURED
    from reports.render import render_report
    from tasks.manifest_collect import collect_manifest

    collected = collect_manifest(folder)
    summary = render_report(RunPaths(folder.absolute()))
    for line in [*collected.notes, *summary.sentences]:
        print(line)
    failures = {name: count for name, count in summary.statuses.items() if name != "completed"}
    print(f"{len(collected.records)} new records")
    if failures:
        print(f"Without a figure: {', '.join(f'{count} {name}' for name, count in failures.items())}")
    if collected.missing:
        launches = f" ({collected.not_begun} launches never began)" if collected.not_begun else ""
        print(f"{collected.missing} visits are not measured{launches}: submit submit.sbatch again and it goes on")
    print(f"Report     {summary.path}")
    return SOME_UNMEASURED if failures or collected.missing else ALL_COMPLETED


def _give(text: str, out: Path | None, executable: bool) -> None:
    if out is None:
        print(text, end="")
        return
    out.write_text(text)
    out.chmod(0o755 if executable else 0o644)
