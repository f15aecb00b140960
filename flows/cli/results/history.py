"""`rankwise history`: a small file with the figures of many runs, for baselines and trends."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.errors import plainly
from flows.cli.options import refuse_unused

app = typer.Typer(help="Track the figures of many runs in one small file: baselines and trends.", no_args_is_help=True)

HistoryFile = Annotated[
    Path | None,
    typer.Option("--history", metavar="FILE", help="history file  [default: history.sqlite beside the run folder]"),
]
_KeptHistory = Annotated[
    Path | None, typer.Option("--history", metavar="FILE", help="history file  [default: runs/history.sqlite]")
]
_RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")]
Form = Annotated[Literal["text", "html"], typer.Option("--format", help="html: also write a page to --output")]
_Output = Annotated[Path, typer.Option("--output", metavar="FILE", help="file of the page")]
_AsJson = Annotated[bool, typer.Option("--json", help="machine-readable")]


@app.command("add")
def add(
    context: typer.Context,
    folder: _RunFolder,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="name for this run, used with --baseline")
    ] = None,
    history: HistoryFile = None,
) -> None:
    """Add a run's figures to the history."""
    from flows.cli.errors import guarded
    from flows.cli.results.compare import history_add as add

    raise typer.Exit(guarded(lambda: plainly(lambda: add(folder, name, history)), folder, _debug(context)))


@app.command("list")
def list_runs(
    context: typer.Context,
    as_json: _AsJson = False,
    history: _KeptHistory = None,
    form: Form = "text",
    output: _Output = Path("history.html"),
) -> None:
    """List all runs of the history."""
    from flows.cli.errors import guarded
    from flows.cli.results.compare import history_list as show

    def work() -> int:
        return show(history, as_json, _page(context, form, output))

    raise typer.Exit(guarded(lambda: plainly(work), Path(), _debug(context)))


@app.command("show")
def show(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="WHAT", help="a run's name or number, or a cell's key or name")],
    figure: Annotated[str, typer.Option(help="throughput, ttft_seconds, peak_memory_bytes ...")] = "throughput",
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="draw the cell's figure over the runs")] = None,
    as_json: _AsJson = False,
    history: _KeptHistory = None,
    form: Form = "text",
    output: _Output = Path("history.html"),
) -> None:
    """Show a run's cells, or one cell over the runs."""
    from flows.cli.errors import guarded
    from flows.cli.results.compare import history_show as show

    def work() -> int:
        return show(what, history, figure, plot, as_json, _page(context, form, output))

    raise typer.Exit(guarded(lambda: plainly(work), Path(), _debug(context)))


def _page(context: typer.Context, form: str, output: Path) -> Path | None:
    """The file of the page, where one is wanted. Raises WrongArgument for its name without it."""
    refuse_unused(context, {"output": None if form == "html" else "without --format html"})
    return output if form == "html" else None


def _debug(context: typer.Context) -> bool:
    return bool((context.obj or {}).get("debug"))


def site(
    context: typer.Context,
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="folder with run folders below it")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the site")],
    title: Annotated[str, typer.Option(help="heading of the index")] = "Runs",
) -> None:
    """Write a static site of all runs: index with search, pages, comparisons and history."""
    from flows.cli.errors import guarded
    from flows.cli.results.site import build_site

    raise typer.Exit(guarded(lambda: plainly(lambda: build_site(runs, out, title)), runs, _debug(context)))
