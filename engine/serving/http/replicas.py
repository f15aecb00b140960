"""A replica's ranks as processes: started, watched, fed with requests, and started again after a failure.

    replica = ReplicaRanks(0, settings, settings_path, metrics, lost)
    await replica.start()
    replica.add(answer); replica.cancel(answer)
    await replica.stop()

A rank that ends takes the others of its replica with it, and all are started again; meanwhile the replica is not ready.
Its answers go on, here or on another replica, after the tokens that they have. An answer that has seen this too often
ends with an error, as it may be the cause. Ranks end with the HTTP process, however that ends.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from configs.common.files.logs import cut_log
from configs.common.files.reading import read_tail
from configs.common.system.ports import free_port
from configs.serving.settings import API_KEY_VARIABLE, ServingSettings
from engine.rank.processes import LAUNCHER_VARIABLE
from engine.serving.http.answers import TokenQueue
from engine.serving.http.errors import ApiError
from engine.serving.http.metrics import ServerMetrics
from engine.serving.messages import NewToken, StepReport
from engine.serving.socket_folder import make_private, socket_folder

RANK_PROGRAM = "engine.serving.rank"
"""Module of the ranks."""
_SILENCES = 3
"""Time limits of the group without a step, with work to do, after which the ranks count as hung."""
MAX_FAILED_STARTS = 3
"""In a row, of ranks that have taken requests before; those that never did are not started again."""
_MAX_PAUSE_SECONDS = 30.0
_MAX_TRIES = 2
"""How often an answer goes on after a failure."""
_CUMULATIVE = ("preemptions", "prefix_tokens", "cached_tokens")


class _RankLink(asyncio.Protocol):
    """The connection of a replica's first rank, which sends lines of JSON."""

    def __init__(
        self,
        made: Callable[[asyncio.Transport], None],
        heard: Callable[[asyncio.Transport, Sequence[dict[str, Any]]], None],
    ) -> None:
        self._made, self._heard, self._rest = made, heard, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._made(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._heard(self._transport, [json.loads(line) for line in lines])


class ReplicaRanks:
    """The ranks of one replica. ready: they take requests; was_ready: they have. failures: failed starts in a row."""

    def __init__(
        self,
        index: int,
        settings: ServingSettings,
        settings_path: Path,
        metrics: ServerMetrics,
        lost: Callable[[list[TokenQueue]], None],
    ) -> None:
        """lost: takes the answers that go on after the ranks have failed."""
        self.index = index
        self.ready = self.was_ready = False
        self.failures = 0
        self.about: dict[str, Any] = {}
        self.last_error = ""
        self.answers: dict[str, TokenQueue] = {}
        self._settings, self._settings_path, self._metrics, self._lost = settings, settings_path, metrics, lost
        self._socket = socket_folder(settings.folder) / f"replica-{index}.sock"
        self._processes: list[asyncio.subprocess.Process] = []
        self._listener: asyncio.Server | None = None
        self._link: asyncio.Transport | None = None
        self._given_up = False
        self._last_step = time.monotonic()
        self._before = dict.fromkeys(_CUMULATIVE, 0)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Open the socket and begin to start the ranks."""
        make_private(self._socket.parent)
        self._socket.unlink(missing_ok=True)
        self._listener = await asyncio.get_running_loop().create_unix_server(
            lambda: _RankLink(self._link_made, self._heard), self._socket
        )
        self._task = asyncio.create_task(self._keep_running())

    def add(self, answer: TokenQueue) -> None:
        """Begin an answer; it is kept for later while the replica is not ready."""
        if not self.answers:
            self._last_step = time.monotonic()  # an idle replica computes nothing, and does not hang
        self.answers[answer.key] = answer
        if self.ready:
            self._tell(answer.wanted.message())

    def cancel(self, answer: TokenQueue) -> None:
        """End an answer, whose slot is free after the current step."""
        if self.answers.pop(answer.key, None) is not None and self.ready:
            self._tell({"cancel": answer.key})

    async def stop(self) -> None:
        """End the ranks."""
        self._stopping = True
        if self.ready:  # ranks that are loading hear nothing
            self._tell({"end": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await asyncio.gather(*(process.wait() for process in self._processes))
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._kill()
        if self._listener is not None:
            self._listener.close()
        self._socket.unlink(missing_ok=True)
        with suppress(OSError):  # another replica's socket is in it
            self._socket.parent.rmdir()

    @property
    def cannot_start(self) -> bool:
        """Whether the ranks are given up, with which the server ends."""
        return self.failures >= (MAX_FAILED_STARTS if self.was_ready else 1)

    @property
    def log(self) -> Path:
        """Where the ranks write."""
        return Path(self._settings.folder) / f"replica-{self.index}.log"

    async def _keep_running(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                await self._spawn()
                reason = await self._watch()
            except OSError as error:  # no more processes, a log that cannot be written: it may pass
                reason = f"replica {self.index} cannot be started: {error}"
            if self._stopping:
                return
            await self._fail(reason)
            # A failure soon after the start is likely to come again.
            soon = time.monotonic() - began < 60 and self.failures > 0
            pause = min(_MAX_PAUSE_SECONDS, 2.0**self.failures) if soon else 0.0

    async def _spawn(self) -> None:
        layout, settings, meeting = self._settings.layout, self._settings, self._settings.rendezvous
        world = layout.tp * layout.pp
        ranks = world // meeting.nodes if meeting else world
        address, port = (meeting.address, meeting.port) if meeting else ("127.0.0.1", free_port())
        command = [sys.executable, "-m", RANK_PROGRAM, str(self._settings_path), str(self._socket)]
        devices: dict[str, str] = {}
        if settings.first_device is not None:
            from engine.planner.accelerators import variables_for

            devices = variables_for(settings.first_device, layout.dp * ranks)
        self._processes, self._given_up = [], False
        with self.log.open("ab") as log:
            for rank in range(ranks):
                environment = (
                    os.environ
                    | devices
                    | {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_RANK": str(self.index * ranks + rank),
                        "LOCAL_WORLD_SIZE": str(layout.dp * ranks),
                        "MASTER_ADDR": address,
                        "MASTER_PORT": str(port),
                    }
                )
                environment.pop(LAUNCHER_VARIABLE, None)
                environment.pop(API_KEY_VARIABLE, None)
                if settings.device == "cpu":
                    environment["CUDA_VISIBLE_DEVICES"] = ""
                if meeting is None:  # no other machine reaches what they listen on
                    for name, interface in (("GLOO", "lo"), ("TP", "lo"), ("NCCL", "=lo")):
                        environment.setdefault(f"{name}_SOCKET_IFNAME", interface)
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )

    async def _watch(self) -> str:
        """Wait until a rank ends or all hang; return what happened."""
        self._last_step = time.monotonic()
        waits = [asyncio.create_task(process.wait()) for process in self._processes]
        silence = _SILENCES * self._settings.group_timeout_seconds
        try:
            while True:
                done, _ = await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                cut_log(self.log)
                if done:
                    rank = waits.index(next(iter(done)))
                    return f"rank {rank} of replica {self.index} ended with {self._processes[rank].returncode}"
                if self.ready and self.answers and time.monotonic() - self._last_step > silence:
                    limit = f"three times --group-timeout-seconds {self._settings.group_timeout_seconds:g}"
                    return f"replica {self.index} computed no step for {silence:.0f} s, {limit}"
        finally:
            for wait in waits:
                wait.cancel()

    async def _fail(self, reason: str) -> None:
        """Kill what is left of the ranks; answers are tried again or end."""
        if not self.ready:
            self.failures += 1
        self.ready = False
        self.last_error = f"{reason}: {_last_line(self.log)}"
        print(self.last_error + ("" if self.cannot_start else "; starting it again"), file=sys.stderr, flush=True)
        # Before they have ended: what they said last, that they are ready, is heard no more.
        self._given_up = True
        if self._link is not None:
            self._link.close()
            self._link = None
        await self._kill()
        self._metrics.restarted(self.index)
        self._metrics.state(self.index, 0, 0, 0.0)
        begun, self.answers = list(self.answers.values()), {}
        for answer in begun:
            answer.failures += 1
            if answer.failures > _MAX_TRIES:
                answer.fail(ApiError(500, "the engine failed while it answered", code="engine_failed"))
        self._lost([answer for answer in begun if answer.failures <= _MAX_TRIES])

    async def _kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._link is not None
        self._link.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _link_made(self, link: asyncio.Transport) -> None:
        if self._given_up:
            link.close()
        else:
            self._link = link

    def _heard(self, link: asyncio.Transport, messages: Sequence[dict[str, Any]]) -> None:
        """Take what the first rank says; several steps at once where this process is the slower one."""
        if link is not self._link:
            return  # a rank that was given up
        gained: dict[str, list[NewToken]] = {}
        for message in messages:
            if "step" in message:
                self._take_step(StepReport.read(message["step"]), gained)
            elif "refused" in message:
                self._deliver(gained)
                answer = self.answers.pop(message["refused"]["key"], None)
                if answer is not None:
                    answer.fail(ApiError(500, message["refused"]["message"], code="engine_failed"))
            else:
                self._take_ready(message["ready"])
        self._deliver(gained)

    def _take_ready(self, about: dict[str, Any]) -> None:
        self.about, self.failures = about, 0
        self.ready = self.was_ready = True
        self._before = dict.fromkeys(_CUMULATIVE, 0)
        self._last_step = time.monotonic()
        for answer in self.answers.values():
            self._tell(answer.wanted.message())

    def _deliver(self, gained: dict[str, list[NewToken]]) -> None:
        """Give answers the tokens of one or more steps, and empty `gained`."""
        for key, tokens in gained.items():
            answer = self.answers.get(key)
            if answer is not None:
                answer.put(tokens)
                if tokens[-1].reason is not None:
                    del self.answers[key]
        gained.clear()

    def _take_step(self, step: StepReport, gained: dict[str, list[NewToken]]) -> None:
        self._last_step = time.monotonic()
        for key, count in step.cached.items():
            answer = self.answers.get(key)
            if answer is not None and answer.cached_tokens is None:
                answer.cached_tokens = count
        for key, scores in step.scores.items():
            answer = self.answers.get(key)
            if answer is not None:
                answer.scores = scores
        for token in step.tokens:
            gained.setdefault(token.key, []).append(token)
        used = 1 - step.free_blocks / self._settings.blocks
        self._metrics.state(self.index, step.running, step.waiting, used)
        changes: dict[str, float] = {name: getattr(step, name) - self._before[name] for name in _CUMULATIVE}
        self._before = {name: getattr(step, name) for name in _CUMULATIVE}
        changes |= {"compute_seconds": step.compute_seconds, "other_seconds": step.other_seconds}
        self._metrics.step(self.index, int(step.computed_tokens > 0), changes)


class Router:
    """All replicas: a new answer goes to the one with the fewest, of those that are ready if any is."""

    def __init__(self, settings: ServingSettings, settings_path: Path, metrics: ServerMetrics) -> None:
        self.replicas = [
            ReplicaRanks(index, settings, settings_path, metrics, self._again) for index in range(settings.layout.dp)
        ]
        self._places: dict[str, ReplicaRanks] = {}

    @property
    def ready(self) -> bool:
        """Whether all replicas take requests."""
        return all(replica.ready for replica in self.replicas)

    @property
    def answers(self) -> int:
        """Answers in progress."""
        return sum(len(replica.answers) for replica in self.replicas)

    def start(self, answer: TokenQueue) -> None:
        """Begin an answer."""
        replica = min(self.replicas, key=lambda one: (not one.ready, len(one.answers), one.index))
        self._places[answer.key] = replica
        replica.add(answer)

    def finish(self, answer: TokenQueue) -> None:
        """End an answer, whether or not it is complete."""
        replica = self._places.pop(answer.key, None)
        if replica is not None:
            replica.cancel(answer)

    def _again(self, answers: list[TokenQueue]) -> None:
        for answer in answers:
            if answer.key in self._places:
                self.start(answer)


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in read_tail(log, 10_000).splitlines() if line.strip()]
    except OSError:
        return "its log cannot be read"
    return lines[-1].strip() if lines else "its log is empty"
