"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="study file")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="parent folder of the run folders")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
