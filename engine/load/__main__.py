"""Run a load generator: `python -m engine.load JOB.json FOLDER [PID]`. Writes samples.npz and run.json into the folder.

It stops when the process PID, its parent, ends. The bearer token is read from the variable that the job names.
Exit code 2: the job, or a file that it names, is wrong.
"""

import os
import signal
import sys
from pathlib import Path

from configs.common.files.reading import read_model
from configs.common.system.open_files import allow_connections
from configs.common.system.proc import end_with_parent
from configs.load.job import LoadJob
from engine.load.generator import Generator
from engine.load.timing import run_precisely


def main(arguments: list[str]) -> int:
    """Run the job of the first argument, write into the folder of the second."""
    job_file, folder = map(Path, arguments[:2])
    try:
        if len(arguments) > 2:
            end_with_parent(signal.SIGTERM, int(arguments[2]))
        job = read_model(job_file, LoadJob)
        allow_connections()
        run_precisely(_run(job, bearer_token(job.endpoint.token_variable), folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{error.strerror or error}", file=sys.stderr)
        return 2
    return 0


async def _run(job: LoadJob, token: str | None, folder: Path) -> None:
    await Generator(job, token).run(folder)


def bearer_token(variable: str | None) -> str | None:
    """The token of the environment. Raises ValueError where the variable is not set or holds no token."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"endpoint.token_variable: {variable} is not set. Export the token in it")
    if not token.isascii() or not token.isprintable():
        raise ValueError(f"endpoint.token_variable: {variable}: expected printable ASCII")
    return token


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
