"""The two programs of a team's set-up, as supervisord starts them: server and Prefect worker.

Prefect's own commands would do but for how they end. `prefect worker start` answers SIGTERM by SIGKILL to its
flow runs: their launches go on measuring for nobody, and the API shows them as running. Here the worker takes
no new runs, has the flow runs end themselves, and ends when it has told the API. `prefect server start` waits
without limit for browsers to hang up. Both end when supervisord dies, so nothing is left behind it.

    python -m flows.team.programs server HOST PORT
    python -m flows.team.programs worker API_TO_WAIT_FOR|- LIMIT
"""

import asyncio
import os
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from configs.common.system.proc import end_with_parent
from flows.server.process import run_api_server
from flows.team.api import Api
from flows.team.processes import end_flow_runs_left, flow_processes, log_program_line
from flows.team.setup import POOL, WORKER_STOP_SECONDS

if TYPE_CHECKING:
    from prefect.workers.process import ProcessWorker

_FLOW_RUNS_SECONDS = WORKER_STOP_SECONDS - 5.0
_PASSING = (408, 429)
"""Client errors of HTTP that are none of the client's: a request took too long, or there were too many."""


def serve(host: str, port: int) -> NoReturn:
    """Run Prefect's API, UI and services until SIGTERM.

    At normal priority: several people wait for it, and beside two busy processes it would answer them in 20 s at
    nice 19. What it takes from measured ranks is in their records, as the share of CPU taken by others.
    """
    run_api_server(None, yields=False, host=host, port=port)


def work(server: str | None, limit: int) -> None:
    """Run flow runs of the work pool, `limit` at a time, until SIGTERM. Waits for the server if it is ours."""
    while server and not Api(server, own=True, environment={}).answers():
        time.sleep(0.5)
    # Flow runs need no secrets of the server.
    for name in [name for name in os.environ if name.startswith("PREFECT_SERVER_") and "EPHEMERAL" not in name]:
        del os.environ[name]
    worker = _worker(limit)
    # Flow runs only: this process has read its settings. Of a worker that was killed they live on, and a log
    # line into its closed pipe would end them. The API gets all lines.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    asyncio.run(_until_told(worker))


def _worker(limit: int) -> "ProcessWorker":
    import httpx
    from prefect.client.schemas.objects import FlowRun
    from prefect.workers.process import ProcessWorker

    with warnings.catch_warnings():
        # That it takes the place of Prefect's process worker in this process is what we want.
        warnings.filterwarnings("ignore", message="Type 'TeamWorker'")

        class TeamWorker(ProcessWorker):
            """Outlives outages of the API: Prefect's gives up after some minutes, and its flow runs with it."""

            async def get_and_submit_flow_runs(self) -> list[FlowRun]:
                try:
                    return [] if _ending.is_set() else await super().get_and_submit_flow_runs()
                except httpx.HTTPError as error:
                    _told_unless_final(error, self)
                    return []

            async def sync_with_backend(self) -> None:
                try:
                    await super().sync_with_backend()
                except httpx.HTTPError as error:
                    _told_unless_final(error, self)

            async def _submit_run(self, flow_run: FlowRun) -> None:
                """Where this raises, Prefect ends all flow runs of the worker. The run stays scheduled."""
                try:
                    await super()._submit_run(flow_run)
                except httpx.HTTPError as error:
                    log_program_line(f"flow run {flow_run.name} not started, retrying: {_words(error)}")
                    self._release_limit_slot(flow_run.id)
                    self._submitting_flow_run_ids.discard(flow_run.id)
                    if self._cancelling_observer is not None:
                        self._cancelling_observer.remove_in_flight_flow_run_id(flow_run.id)

    def _told_unless_final(error: httpx.HTTPError, worker: ProcessWorker) -> None:
        """Raise what waiting does not change, such as a wrong key; not while flow runs would end with the worker."""
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 503
        if status < 500 and status not in _PASSING and not worker.limiter.borrowed_tokens:
            raise error
        what = "refuses requests" if status < 500 else "does not respond"
        log_program_line(f"the API {what}, retrying: {_words(error)}")

    def _words(error: httpx.HTTPError) -> str:
        return str(error) or type(error).__name__

    return TeamWorker(name=socket.gethostname(), work_pool_name=POOL, limit=limit, heartbeat_interval_seconds=30)


_ending = asyncio.Event()


async def _until_told(worker: "ProcessWorker") -> None:
    """Poll until SIGTERM or SIGINT; then end what runs, within the time that supervisord gives."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _ending.set)
    polling = asyncio.create_task(worker.start(printer=log_program_line))
    told = asyncio.create_task(_ending.wait())
    await asyncio.wait((polling, told), return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        await _end_flow_runs(worker)
    told.cancel()
    polling.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(polling, 2)


async def _end_flow_runs(worker: "ProcessWorker") -> None:
    """SIGTERM to each flow run, also to those that are just being started; wait until their end is told.

    On SIGTERM a flow run ends its launches, keeps what was measured, and tells the API that it crashed. The
    worker tells it of those that were too young to do so.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + _FLOW_RUNS_SECONDS
    while (living := flow_processes()) or worker.limiter.borrowed_tokens:
        for process in living:
            if process.pid not in asked:
                log_program_line(f"ending the flow run with pid {process.pid}")
                asked.add(process.pid)
                process.terminate()
        if time.monotonic() > deadline:
            log_program_line(f"{len(living)} flow runs did not end; killing them")
            break
        await asyncio.sleep(0.2)
    end_flow_runs_left()


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    if sys.argv[1] == "server":
        serve(sys.argv[2], int(sys.argv[3]))
    work(None if sys.argv[2] == "-" else sys.argv[2], int(sys.argv[3]))
