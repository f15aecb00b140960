"""Watch for cancellation and report progress to Prefect's API from a background thread.

A script that is cancelled through Prefect's API hears of it in no other way than by reading its own
flow run's state. A thread does that, and updates the progress artifact; when the API does not answer,
the measurement goes on and the thread tries again.
"""

import json
import logging
import threading
import time
from contextvars import copy_context
from types import TracebackType
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.states import Running

from tasks.campaign.progress import RunProgress
from tasks.prefect_api.api import api_error_text, quick_client
from tasks.prefect_api.ended import RunCancelled, RunSuspended

_POLL_SECONDS = 1.5
_ARTIFACT_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 10.0
"""Between looks for an API that is away."""
_THREAD = "api-watcher"


def _is_no_look(record: logging.LogRecord) -> bool:
    """Whether a line of httpx is not one of those that a watcher gives rise to every second or two."""
    return record.threadName != _THREAD or record.levelno >= logging.WARNING


class ApiWatcher:
    """A context: polls the flow run's state, keeps the progress and the table of jobs up to date."""

    def __init__(
        self,
        flow_run_id: UUID | None,
        run_progress: RunProgress,
        progress_artifact: UUID | None,
        jobs_artifact: UUID | None = None,
    ) -> None:
        self._flow_run_id = flow_run_id
        self._run_progress = run_progress
        self._artifact = progress_artifact
        self._jobs = jobs_artifact
        self._cancelled = threading.Event()
        self._suspended: State[Any] | None = None
        self._stop = threading.Event()
        # In the caller's context, which has the settings of its API: a profile that it chose, for one.
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), name=_THREAD, daemon=True)

    def __enter__(self) -> "ApiWatcher":
        if self._flow_run_id is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise RunCancelled if somebody cancelled the run, RunSuspended if it was suspended."""
        if self._suspended is not None:
            raise RunSuspended(self._suspended)
        if self.cancelled:
            raise RunCancelled

    def _watch(self) -> None:
        logging.getLogger("httpx").addFilter(_is_no_look)
        pause = _POLL_SECONDS
        while True:
            began = time.monotonic()
            try:
                with quick_client(retries=0 if self._stop.is_set() else 1) as client:
                    self._watch_with(client)
                    self._show_end(client)
                return
            except Exception as error:
                if self._stop.is_set():
                    return
                # An API that is away must not end a measurement; the next look may reach it.
                logging.getLogger(__name__).debug("Prefect API did not respond: %s", api_error_text(error))
                answered = time.monotonic() - began > LONGEST_PAUSE_SECONDS
                pause = _POLL_SECONDS if answered else min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._stop.wait(pause)

    def _watch_with(self, client: SyncPrefectClient) -> None:
        """Look until the end, or until the API does not answer. One client: to make one costs more than a look."""
        shown: tuple[float, str, str] | None = None
        waited = 0.0
        while not self._stop.wait(_POLL_SECONDS):
            waited += _POLL_SECONDS
            self._look(client)
            told = self._told()
            if waited >= _ARTIFACT_SECONDS and told != shown:
                shown, waited = told, 0.0
                self._show(client, *told)

    def _told(self) -> tuple[float, str, str]:
        """What the artifacts are to show: percent, description, table of jobs."""
        run_progress = self._run_progress
        jobs = json.dumps(run_progress.under_way()) if self._jobs else ""
        return run_progress.percent, run_progress.description, jobs

    def _show_end(self, client: SyncPrefectClient) -> None:
        """Whoever looks later sees how the run ended, not what it did when it was shown last."""
        assert self._flow_run_id is not None
        if self._run_progress.outcome == "interrupted":
            state = client.read_flow_run(self._flow_run_id).state
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                self._run_progress.outcome = "cancelled"  # a Prefect worker ends the process by a signal
        if self._run_progress.outcome:
            self._show(client, *self._told())

    def _look(self, client: SyncPrefectClient) -> None:
        assert self._flow_run_id is not None
        state = client.read_flow_run(self._flow_run_id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self._cancelled.set()
        elif state is not None and state.is_paused() and state.name == "Suspended":
            self._suspended = state
            self._cancelled.set()
        elif state is not None and state.is_crashed():
            # An API that was away missed the heartbeats, and took the run for lost.
            message = "still running; the API had missed its heartbeats"
            client.set_flow_run_state(self._flow_run_id, Running(message=message), force=True)

    def _show(self, client: SyncPrefectClient, percent: float, description: str, jobs: str) -> None:
        if self._artifact is not None:
            client.update_artifact(self._artifact, ArtifactUpdate(data=round(percent, 1), description=description))
        if self._jobs is not None:
            client.update_artifact(self._jobs, ArtifactUpdate(data=jobs))
