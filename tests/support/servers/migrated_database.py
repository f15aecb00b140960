"""Prefect's database as its migrations leave it: they are two thirds of the CPU time of a server's first start.

    put_database(data / "prefect" / "prefect.db")

They are made once for each version of Prefect, in pytest's cache folder, and tested where a server starts without a
database (`tests/flows/server/test_local_server.py`, `tests/flows/team/test_team.py`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.server.process import locked, prefect_version
from flows.server.settings import server_settings

_FOLDER = Path(__file__).parents[3] / ".pytest_cache" / "prefect"


def put_database(path: Path, make: bool = True) -> None:
    """Write a copy, which holds no flows yet, where a server will look for its database.

    make: whether to make the first one; not for sessions that may start no server at all.
    """
    made = _FOLDER / f"{prefect_version()}.db"
    if not (make or made.exists()):
        return
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with locked(_FOLDER / "lock"):
        if not made.exists():
            _migrate(made)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(made, path)


def _migrate(made: Path) -> None:
    """Create the tables as a server does, by Prefect's own command."""
    with TemporaryDirectory(dir=_FOLDER) as name:
        folder = Path(name)
        environment = os.environ | server_settings("http://127.0.0.1:4200/api", folder)
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
        (folder / "prefect.db").replace(made)
