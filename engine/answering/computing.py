"""The computing process as the HTTP side sees it: started again when it ends, one batch at a time.

computing = Computing(settings_path, log_path, max_waiting, limit_seconds)
await computing.start()
vectors = (await computing.ask([[101, 102]], 0))["vectors"]       # ApiError 500, 503, 504
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.common.printable import plural
from configs.serving.settings import API_KEY_VARIABLE
from engine.serving.http.errors import ApiError

_LINE_BYTES = 64 << 20
_LONGEST_PAUSE_SECONDS = 15.0
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""A pod of a distributed training has those of one of its ranks, and this one would wait for the others."""


class Computing:
    """The process and its pipe. failures: starts in a row that did not get ready; about: what it said of itself."""

    def __init__(self, settings: Path, log: Path, max_waiting: int, limit_seconds: float) -> None:
        self.log = log
        self.ready = False
        self.was_ready = False
        self._started = False
        self.failures = 0
        self.about: dict[str, Any] = {}
        self._asked = 0
        self._settings, self._max_waiting, self._limit_seconds = settings, max_waiting, limit_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._limits: dict[int, asyncio.TimerHandle] = {}  # of the batches that the process has and has not answered

    @property
    def waiting(self) -> int:
        """Batches that wait, without the one that is computed."""
        return self._asked - self._turn.locked()

    async def start(self) -> None:
        """Begin to keep the process running."""
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def ask(self, tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Have a batch computed. Raises ApiError.

        Who is cancelled leaves the queue; a batch that has begun is computed, and its answer dropped.
        """
        if self.waiting >= self._max_waiting:
            raise ApiError(429, f"already waiting: {plural(self._max_waiting, 'request')}", retry_after=1)
        self._asked += 1
        try:
            async with self._turn:
                if not self.ready or self._process is None or self._process.stdin is None:
                    raise ApiError(503, "the model is being loaded", retry_after=5)
                self._number += 1
                asked = {"id": self._number, "tokens": tokens, "new_tokens": new_tokens}
                loop = asyncio.get_running_loop()
                self._answer = loop.create_future()
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                # Of the batch, whoever waits for it.
                self._limits[self._number] = loop.call_later(self._limit_seconds, self._end_hung, self._answer)
                told = await self._answer
        finally:
            self._asked -= 1
        if "error" in told:
            raise ApiError(500, told["error"], code="engine_failed")
        return told

    def _end_hung(self, answer: "asyncio.Future[dict[str, Any]]") -> None:
        """End the process: it hangs, and would keep every further request waiting."""
        self.ready = False
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        if not answer.done():
            answer.set_exception(ApiError(504, f"no answer within {self._limit_seconds:.0f} s"))

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._run_once()
            except (OSError, ValueError) as error:  # no more processes, a log that cannot be written: it may pass
                print(f"the computing process cannot be used: {error}", file=sys.stderr, flush=True)
                await self._kill()
            # One that got ready and was ended because it hung has not failed to start: the model can be loaded.
            self.failures = 0 if self._started else self.failures + 1
            self.ready = self._started = False
            for limit in self._limits.values():
                limit.cancel()
            self._limits.clear()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result({"error": "the engine failed while it answered"})
            await asyncio.sleep(min(2.0**self.failures - 1, _LONGEST_PAUSE_SECONDS))

    async def _run_once(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE} | _ALONE
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine.answering.rank", str(self._settings), env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=_LINE_BYTES,
            )  # fmt: skip
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            if "ready" in told:
                self.about = told["ready"]
                self.ready = self.was_ready = self._started = True
                continue
            if (limit := self._limits.pop(told["id"], None)) is not None:
                limit.cancel()
            if self._answer is not None and not self._answer.done() and told["id"] == self._number:
                self._answer.set_result(told)
        await self._process.wait()
