"""`rankwise team`: a permanent Prefect server, worker and schedules for a team on one machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Keep a Prefect server, a worker and schedules running for a team.", no_args_is_help=True)

TeamFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="folder of database, logs and runs  [default: `team` in the data folder]"),
]


@app.command()
def up(
    context: typer.Context,
    folder: TeamFolder = None,
    host: Annotated[str, typer.Option(help="listening address of the server")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="listening port of the server", min=1, max=65535)] = 4200,
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="postgresql://USER@HOST/NAME instead of SQLite")
    ] = None,
    workers: Annotated[int, typer.Option(help="maximum concurrent flow runs", min=1)] = 1,
    api: Annotated[
        str | None, typer.Option(metavar="URL", help="API of a remote server; starts only the worker")
    ] = None,
    background: Annotated[bool, typer.Option("--background", help="return once everything is running")] = False,
) -> None:
    """Start server and worker, register the flows, and run until Ctrl-C or SIGTERM."""
    from flows.cli.options import refuse_unused
    from flows.team.setup import TeamSetup
    from flows.team.up import start_team

    def work(where: Path) -> int:
        refuse_unused(
            context, dict.fromkeys(("host", "port", "database"), "with --api, which starts no server" if api else None)
        )
        return start_team(TeamSetup(where, host, port, database, workers, api.rstrip("/") if api else None), background)

    _exit(context, work, folder)


@app.command("status")
def status_command(context: typer.Context, folder: TeamFolder = None) -> None:
    """Show the state of server and worker; exit code 0 if both run."""
    from flows.team.up import print_team_status

    _exit(context, print_team_status, folder)


@app.command()
def down(context: typer.Context, folder: TeamFolder = None) -> None:
    """Stop server, worker and flow runs within 30 seconds; completed measurements are kept."""
    from flows.team.up import end_team

    _exit(context, end_team, folder)


def _folder(named: Path | None) -> Path:
    from flows.team.setup import default_folder, found_folder

    return found_folder(named) if named else default_folder()


def _exit(context: typer.Context, work: Callable[[Path], int], folder: Path | None) -> None:
    from flows.cli.errors import guarded

    debug = bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(lambda: work(_folder(folder)), folder or Path("team"), debug))
