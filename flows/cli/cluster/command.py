"""`rankwise push` and `rankwise collect`: their options; the work is done beside this module."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Assignments


def push_command(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="target of the study: slurm or pbs with `shared`, or ssh")
    ],
    study: Annotated[Path, typer.Option("--study", metavar="STUDY.yaml", help="study file")],
    assignments: Assignments = None,
) -> None:
    """Stage code, libraries and models in a cluster's shared folder, or on SSH hosts, before a run."""
    from flows.cli.cluster.push import push as push_to
    from flows.cli.errors import guarded

    raise typer.Exit(guarded(lambda: push_to(target, study, assignments or []), study, context.obj["debug"]))


def collect_command(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder written by `rankwise bundle sbatch`, after its job")
    ],
) -> None:
    """Write the records and the report of a bundle after its job has run."""
    from flows.cli.cluster.bundle import run_collect
    from flows.cli.errors import guarded

    raise typer.Exit(guarded(lambda: run_collect(folder), folder, context.obj["debug"]))
