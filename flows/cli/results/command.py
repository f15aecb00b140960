"""The commands that read a run folder: their options; the work is done beside this module.

Dependencies are imported when a command is called, which keeps `rankwise --help` fast.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.errors import plainly
from flows.cli.options import AsJson, RunFolder, refuse_unused
from flows.cli.results.history import Form, HistoryFile


def status_command(context: typer.Context, folder: RunFolder, as_json: AsJson = False) -> None:
    """Show every cell and repeat of a run."""
    from flows.cli.errors import guarded
    from flows.cli.results.inspect import print_status

    raise typer.Exit(guarded(lambda: plainly(lambda: print_status(folder, as_json)), folder, context.obj["debug"]))


def watch(
    context: typer.Context,
    folder: RunFolder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free one")] = 0,
) -> None:
    """Serve the report's page on loopback while a run goes on, until Ctrl-C."""
    from flows.cli.errors import guarded
    from flows.cli.results.watch import serve_page as serve_page

    raise typer.Exit(guarded(lambda: plainly(lambda: serve_page(folder, port)), folder, context.obj["debug"]))


def logs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, or the name of a deployment")],
    follow: Annotated[bool, typer.Option("--follow", help="print new lines until the run ends")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="only this rank")] = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="only jobs whose name starts with this: 0007")] = "",
) -> None:
    """Print the logs of all ranks, launchers and scheduler jobs, or of a deployment's servers."""
    from flows.cli.errors import guarded
    from flows.cli.results.logs import print_logs

    def work() -> int:
        if not folder.exists() and "/" not in str(folder):
            from flows.cli.deploy.listing import print_deployment_logs, store_of_user

            if any(each.name == str(folder) for each in store_of_user().all()):
                refuse_unused(context, dict.fromkeys(("follow", "rank", "job"), "on a deployment"))
                return print_deployment_logs(str(folder))
        return print_logs(folder, follow, rank, job)

    raise typer.Exit(guarded(lambda: plainly(work), folder, context.obj["debug"]))


def report_command(
    context: typer.Context,
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="run folder, for example runs/quickstart")
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="compare all runs that match: folders, or files of `benchmark`"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file for the comparison of --results; joined.md if not given")
    ] = None,
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
    from flows.cli.errors import guarded
    from flows.cli.results.compare import join_runs
    from flows.cli.results.inspect import print_answers, render_again, render_html, render_paper

    given, patterns = folders or [], results or []
    if not patterns and len(given) != 1:
        typer.echo("RUN: expected either one run folder or --results GLOB", err=True)
        raise typer.Exit(2)
    paper = None if form == "pdf" else "without --format pdf"
    run = Path([*patterns, *given][0])

    def work() -> int:
        if patterns:
            refuse_unused(context, dict.fromkeys(("form", "style"), "with --results, which writes Markdown"))
            return join_runs([*patterns, *given], output)  # a shell has expanded an unquoted pattern
        refuse_unused(context, {"output": "without --results", "style": paper})
        return {"md": render_again, "html": render_html, "pdf": render_paper, "json": print_answers}[form](run)

    raise typer.Exit(guarded(lambda: plainly(work), run, context.obj["debug"]))


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
    from flows.cli.errors import guarded
    from flows.cli.results.inspect import export_figures

    raise typer.Exit(guarded(lambda: plainly(lambda: export_figures(folder, to, out)), folder, context.obj["debug"]))


def publish_command(context: typer.Context, folder: RunFolder) -> None:
    """Copy the report of a run to Prefect's UI, after a run without a Prefect server."""
    from flows.cli.errors import guarded
    from flows.cli.run import publish_folder

    raise typer.Exit(guarded(lambda: publish_folder(folder), folder, context.obj["debug"]))


def compare_command(
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
    form: Form = "text",
    output: Annotated[Path, typer.Option(metavar="FILE", help="file of the page")] = Path("compare.html"),
) -> None:
    """Compare two runs, a run with a baseline, or variants of one run; exit code 4 on a regression."""
    from flows.cli.errors import guarded
    from flows.cli.results.compare import compare_runs

    page = output if form == "html" else None
    lacks = "without --format html" if page is None else None

    def work() -> int:
        alone = None if within is None else "with --within, whose variants share their blocks"
        refuse_unused(context, {"output": lacks, "history": alone})
        return compare_runs(
            first, second, baseline, threshold, markdown, junit, as_json, history, within, page, undisturbed
        )

    raise typer.Exit(guarded(lambda: plainly(work), first, context.obj["debug"]))


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
    from flows.cli.errors import guarded
    from flows.cli.results.fit import fit_file

    raise typer.Exit(
        guarded(lambda: plainly(lambda: fit_file(file, as_json, plot, residuals)), file, context.obj["debug"])
    )
