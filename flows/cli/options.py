"""Arguments and options that several commands have, and the refusal of those that would do nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from configs.common.base import WrongArgument

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="study file")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="parent folder of the run folders")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def refuse_unused(context: typer.Context, unused: Mapping[str, str | None]) -> None:
    """Raise WrongArgument for an option on the command line that would do nothing.

    unused: by parameter what it lacks, as `without --format html`; None: it has an effect.
    """
    for option in context.command.params:
        why, source = unused.get(option.name or ""), context.get_parameter_source(option.name or "")
        if why is not None and source is not None and source.name == "COMMANDLINE":
            raise WrongArgument(f"{option.opts[0]}: has no effect {why}. Leave it out")
