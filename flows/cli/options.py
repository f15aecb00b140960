"""Arguments and options that several commands have, their help, and the refusal of those that would do nothing."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from configs.common.base import WrongArgument, write_atomically
from configs.common.execution import MAX_DEGREE

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="study file")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="parent folder of the run folders")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field: measuring.repeats=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Tp = Annotated[int, typer.Option(min=1, max=MAX_DEGREE, help="tensor-parallel degree")]
Pp = Annotated[int, typer.Option(min=1, max=MAX_DEGREE, help="pipeline stages")]


def write_output(file: Path, content: str | bytes) -> None:
    """Write a file that an option names, and make its folder: nobody should lose a long answer for want of one.

    Raises OSError.
    """
    with suppress(FileExistsError):  # no folder: writing says so
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)


def refuse_unused(context: typer.Context, unused: Mapping[str, str | None]) -> None:
    """Raise WrongArgument for an option on the command line that would do nothing.

    unused: by parameter what it lacks, as `without --format html`; None: it has an effect.
    """
    for option in context.command.params:
        why, source = unused.get(option.name or ""), context.get_parameter_source(option.name or "")
        if why is not None and source is not None and source.name == "COMMANDLINE":
            raise WrongArgument(f"{option.opts[0]}: has no effect {why}. Leave it out")


def _name_no_type_of_flags(parameters: Iterable[Any]) -> None:
    """Leave out `<bool>`, which typer writes behind each flag since 0.29: `--dry-run true` is an error."""
    for parameter in parameters:
        if getattr(parameter, "is_bool_flag", False) and parameter.metavar is None:
            parameter.metavar = ""


def _keep_brackets(parameters: Iterable[Any]) -> None:
    """Have `[default: the home region]` of a help printed: rich takes it for markup, which it leaves out."""
    from rich.markup import escape

    for parameter in parameters:
        text = getattr(parameter, "help", None)
        if text and "\\[" not in text:  # a help is asked for more than once
            parameter.help = escape(text)


class _Folding:
    """A highlighter of typer's whose text breaks a word that is too long for its column, where rich would cut it."""

    def __init__(self, highlighter: Any) -> None:
        self._highlighter = highlighter

    def __call__(self, text: Any) -> Any:
        found = self._highlighter(text)
        found.overflow = "fold"
        return found


def _cut_no_names() -> None:
    """Let `--help` on a terminal of 80 columns have `--max-step-tokens` on two lines, not `--max-step-tok...`."""
    from typer import rich_utils

    for name in ("highlighter", "negative_highlighter"):  # of names and descriptions; types are folded by typer
        if not isinstance(highlighter := getattr(rich_utils, name), _Folding):
            setattr(rich_utils, name, _Folding(highlighter))


class Command(TyperCommand):
    """A command whose `--help` has no type behind flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print it."""
        _name_no_type_of_flags(self.get_params(ctx))
        _keep_brackets(self.get_params(ctx))
        _cut_no_names()
        super().format_help(ctx, formatter)


class CommandGroup(TyperGroup):
    """A group of commands whose `--help` has no type behind flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print it."""
        _name_no_type_of_flags(self.get_params(ctx))
        _keep_brackets(self.get_params(ctx))
        super().format_help(ctx, formatter)
