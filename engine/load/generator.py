"""The loops that send requests when they are due, whatever became of those before, and record what came back.

    facts = asyncio.run(Generator(job, token).run(folder))

An open loop sends at the times of its process; a request that finds the generator late is sent at once and counts from
when it was due. A closed loop has users, each of whom waits for an answer, thinks, and asks again; whoever got none
waits a second longer, so that a server that refuses is not asked thousands of times a second.
"""

import asyncio
import gc
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, process_time
from typing import NamedTuple

import numpy as np

from configs.common.base import utc_now
from configs.common.files.reading import SAMPLES_BYTES
from configs.common.printable import plural
from configs.load.arrivals import ClosedLoop, TraceArrivals
from configs.load.job import LoadJob
from configs.load.samples import LAG_EVERY_SECONDS, REQUEST_COLUMNS, LoadFacts, RequestOutcome
from engine.load.arrivals import TraceRow, arrival_seconds, read_trace
from engine.load.connections import NO_CONNECTION, ConnectionPool
from engine.load.contents import Conversation, RequestContent, RequestSource, body_of
from engine.load.recorder import RequestRecorder
from engine.load.replies import Reply

_ARRIVALS, _THINKING = 3, 4
"""Streams of random numbers of one seed, beside those of the contents."""
_LEAD_SECONDS = 0.1
"""Between the end of the preparations and the run's start."""
_UNANSWERED_SECONDS = 1.0
"""A user's pause after a request without an answer. As `Retry-After: 1`, the shortest that a server can ask for."""
_UNREACHED_SECONDS, _MIN_UNREACHED = 10.0, 3
"""So long after its first request, and after so many, a run ends that has had no connection: nobody is there."""
_FEW_COLLECTIONS = (100_000, 50, 1000)
_MAX_SAMPLES = (SAMPLES_BYTES - (64 << 20)) // 8
"""Numbers of 8 bytes in a file of samples, of a run or of all runs of a search, which is not read again where it is
larger."""


class _Talk(NamedTuple):
    """A conversation and its number."""

    number: int
    talk: Conversation


class Generator:
    """One run of a job. Raises ValueError for a file that the job names and OSError where the host has no address."""

    def __init__(self, job: LoadJob, token: str | None = None) -> None:
        self.job = job
        self._source = RequestSource(job.contents, job.seed)
        self._trace = _trace_of(job)
        self._pool = ConnectionPool(job.endpoint, token)
        self._thinking = np.random.default_rng((job.seed, _THINKING))
        self._recorder = RequestRecorder(0.0)
        self._due_requests = 0
        self._last_due = 0.0
        self._refused_due: float | None = None  # of the first request that a count or a cap left out
        self._asked_tokens = job.caps.spent_tokens
        self._coming = 0  # samples of requests that are allowed and have not ended, at most
        self._in_flight = 0
        self._unreached = 0  # requests without a connection, until the first one that has one
        self._first_started: float | None = None
        self._lately = deque[float]()  # when requests were sent, as far back as the cap of rate looks
        self._capped: str | None = None
        self._stopped = False
        self._sleepers: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[float]] = set()

    async def run(self, folder: Path) -> LoadFacts:
        """Run the job and write its samples. SIGTERM and SIGINT end it early, with the samples so far."""
        await self._pool.resolve()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, "interrupted")
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_FEW_COLLECTIONS)
        started_at, cpu_seconds = utc_now(), process_time()
        self._recorder = RequestRecorder(monotonic() + _LEAD_SECONDS)
        lag = asyncio.create_task(self._watch_lag())
        arrivals = self.job.arrivals
        await (self._closed_loop(arrivals) if isinstance(arrivals, ClosedLoop) else self._open_loop())
        issuing_seconds = self._issuing_seconds()
        while self._tasks:
            await asyncio.wait([*self._tasks])
        wall_seconds = max(0.0, self._now())  # where no request was due, the run ends before its start
        lag.cancel()
        self._pool.close()
        facts = LoadFacts(
            job=self.job,
            started_at=started_at,
            issuing_seconds=issuing_seconds,
            wall_seconds=wall_seconds,
            cpu_share=(process_time() - cpu_seconds) / max(wall_seconds, 1e-9),
            requests=len(self._recorder),
            connections=self._pool.connections,
            capped=self._capped,
            errors=self._recorder.errors,
        )
        self._recorder.write(folder, facts)
        return facts

    def _now(self) -> float:
        """Seconds since the run's start."""
        return monotonic() - self._recorder.origin

    def _issuing_seconds(self) -> float:
        """How long requests were issued: the whole duration, or until the first one would have been due that a count or
        a cap left out, since up to the last one there is one gap less than requests. Users, who first ask all at once,
        count up to the last one: as many answers have ended by then as requests followed them.
        """
        job = self.job
        is_closed = isinstance(job.arrivals, ClosedLoop)
        if self._refused_due is not None and not is_closed:
            ended = max(self._last_due, self._refused_due)
            return ended if job.duration_seconds is None else min(ended, job.duration_seconds)
        cut = self._trace is not None or self._capped is not None or (is_closed and self._counted_out)
        return self._last_due if job.duration_seconds is None or cut else job.duration_seconds

    @property
    def _counted_out(self) -> bool:
        return self.job.max_requests is not None and self._due_requests >= self.job.max_requests

    async def _open_loop(self) -> None:
        for number, row in enumerate(self._rows()):
            if self._counted_out:
                self._refused_due = row.seconds
                break
            talk = _Talk(number, self._source.conversation(number, row))
            turn = talk.talk.first()
            body = body_of(turn, self.job)  # before it is due: long prompts take a while
            if not await self._wait_until(row.seconds) or not self._allowed(turn, row.seconds):
                break
            self._spawn(talk, turn, body, row.seconds)

    def _rows(self) -> Iterator[TraceRow]:
        """When conversations of an open loop begin, and their lengths where a trace gives them."""
        job = self.job
        if self._trace is not None:
            return (row for row in self._trace if job.duration_seconds is None or row.seconds < job.duration_seconds)
        assert not isinstance(job.arrivals, ClosedLoop | TraceArrivals)
        rng = np.random.default_rng((job.seed, _ARRIVALS))
        most = None if job.max_requests is None else job.max_requests + 1  # with the first one that is left out
        times = arrival_seconds(job.arrivals, job.duration_seconds, most, rng)
        return (TraceRow(float(seconds)) for seconds in times)

    def _spawn(self, talk: _Talk, turn: RequestContent, body: bytes, due: float) -> None:
        task = asyncio.create_task(self._converse(talk, turn, body, due, self.job.contents.think_seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _closed_loop(self, users: ClosedLoop) -> None:
        numbers = iter(range(1 << 62))
        await asyncio.gather(*(self._user(numbers, users.think_seconds) for _ in range(users.users)))

    async def _user(self, numbers: Iterator[int], think_seconds: float) -> None:
        due = 0.0
        while True:
            number = next(numbers)
            talk = _Talk(number, self._source.conversation(number))
            turn = talk.talk.first()
            body = body_of(turn, self.job)
            if self._over(due) or not await self._wait_until(due) or not self._allowed(turn, due):
                return
            due = await self._converse(talk, turn, body, due, think_seconds)
            due += self._thought(think_seconds)

    async def _converse(
        self, talk: _Talk, turn: RequestContent, body: bytes, due: float, think_seconds: float
    ) -> float:
        """Send all turns of a conversation; when its user is free again, in seconds since the run's start."""
        turns = self.job.contents.turns
        place = 0
        while True:
            reply = await self._request(turn, body, due, (talk.number, place))
            ended, place = self._now(), place + 1
            due = ended + self._thought(think_seconds)
            if reply.outcome is not RequestOutcome.COMPLETED:
                return ended + _UNANSWERED_SECONDS
            if place == turns or self._over(due):
                return ended
            answered = reply.new_tokens if reply.new_tokens is not None else len(reply.chunk_seconds)
            # No answer has more tokens than were asked for: a wrong usage must not decide the length of what follows.
            turn = talk.talk.following("".join(reply.text), min(answered, turn.new_tokens))
            body = body_of(turn, self.job)
            if not await self._wait_until(due) or not self._allowed(turn, due):
                return ended

    async def _request(self, turn: RequestContent, body: bytes, due: float, place: tuple[int, int]) -> Reply:
        started = monotonic()
        self._first_started = started if self._first_started is None else self._first_started
        caps = self.job.caps
        if self._in_flight >= caps.max_in_flight:
            reply, sent = Reply(), None
            reply.fail(RequestOutcome.DROPPED, f"not sent: {plural(caps.max_in_flight, 'request')} in flight")
        else:
            self._in_flight += 1
            try:
                reply, sent = await self._pool.post(body, caps.timeout_seconds, self.job.contents.turns > 1)
            finally:
                self._in_flight -= 1
        self._recorder.add(turn, place, due, started, sent, monotonic(), reply)
        self._coming -= _samples_of(turn)
        if reply.outcome is RequestOutcome.CONNECTION and not self._pool.connections:
            self._end_if_nobody_is_there(reply, monotonic() - self._first_started)
        return reply

    def _end_if_nobody_is_there(self, reply: Reply, tried_seconds: float) -> None:
        self._unreached += 1
        if self._unreached >= _MIN_UNREACHED and tried_seconds >= _UNREACHED_SECONDS and self._capped is None:
            why = reply.message.removeprefix(f"{NO_CONNECTION}: ")
            tried = f"{tried_seconds:.0f} s"
            self._stop(f"{NO_CONNECTION} in {tried}: {why}", told=f"given up after {tried}")

    def _thought(self, mean_seconds: float) -> float:
        return float(self._thinking.exponential(mean_seconds)) if mean_seconds else 0.0

    def _over(self, due: float) -> bool:
        duration = self.job.duration_seconds
        return self._capped is not None or (duration is not None and due >= duration)

    def _allowed(self, turn: RequestContent, due: float) -> bool:
        """Count a request that is about to be sent; False where it would pass the bounds of the job."""
        if self._capped is not None:
            return False
        asked = turn.asked_tokens
        if self._counted_out or self._is_burst() or self._is_above_tokens(asked) or self._is_full(turn):
            self._refused_due = due if self._refused_due is None else min(due, self._refused_due)
            return False
        self._asked_tokens += asked
        self._coming += _samples_of(turn)
        self._due_requests += 1
        self._last_due = max(self._last_due, due)
        return True

    def _is_above_tokens(self, asked: int) -> bool:
        """Stop where so many tokens more would be too many for the cap of tokens."""
        most = self.job.caps.max_tokens
        if most is None or self._asked_tokens + asked <= most:
            return False
        self._stop(f"max_tokens: {most:,} tokens asked for", abort=False)
        return True

    def _is_full(self, turn: RequestContent) -> bool:
        """Stop where one more request's samples would be more than are read again: all of them would be lost."""
        kept = self.job.caps.spent_samples + self._recorder.num_samples
        if kept + self._coming + _samples_of(turn) <= _MAX_SAMPLES:
            return False
        self._stop(f"samples: {_MAX_SAMPLES:,} numbers, most of them arrivals of tokens", abort=False)
        return True

    def _is_burst(self) -> bool:
        """Stop where one more request now would be too many in a short time for the cap of rate.

        Whatever brings them together: the draws of a process, turns of conversations, a generator that was held up.
        """
        bound = self.job.caps.burst
        if bound is None:
            return False
        count, seconds = bound
        now = self._now()
        while self._lately and self._lately[0] <= now - seconds:
            self._lately.popleft()
        if len(self._lately) + 1 > count:
            self._stop(f"max_rate: more than {count:g} requests within {seconds:g} s", abort=False)
            return True
        self._lately.append(now)
        return False

    async def _wait_until(self, due: float) -> bool:
        """Sleep until a time since the run's start; False where the run was stopped."""
        if due <= self._now():
            # Whoever is behind never sleeps: what was sent, what arrives and signals would wait until it has caught up.
            await asyncio.sleep(0)
        elif not self._stopped:
            loop = asyncio.get_running_loop()
            sleeper = loop.create_future()
            self._sleepers.add(sleeper)
            timer = loop.call_at(due + self._recorder.origin, _wake, sleeper)
            try:
                await sleeper
            finally:
                timer.cancel()
                self._sleepers.discard(sleeper)
        return not self._stopped

    def _stop(self, reason: str, abort: bool = True, told: str = "interrupted") -> None:
        """Send nothing more; abort: end what is in flight too, which `told` says of it."""
        self._capped = self._capped or reason
        self._stopped = True
        for sleeper in self._sleepers:
            _wake(sleeper)
        if abort:
            self._pool.close(told)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + LAG_EVERY_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())
            self._recorder.add_lag(loop.time() - due)


def _samples_of(turn: RequestContent) -> int:
    """How many numbers are kept of a request: its row, and the arrival of each token."""
    return len(REQUEST_COLUMNS) + turn.new_tokens


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


def _trace_of(job: LoadJob) -> list[TraceRow] | None:
    """The rows of the job's trace. Raises ValueError for a file that cannot be used or is above the cap of rate."""
    if not isinstance(job.arrivals, TraceArrivals):
        return None
    rows = read_trace(Path(job.arrivals.file), job.arrivals.speed)
    seconds, requests = rows[-1].seconds, len(rows) * job.contents.turns
    rate = requests / seconds if seconds else float("inf")
    if requests > 1 and job.caps.max_rate is not None and rate > job.caps.max_rate:
        raise ValueError(f"arrivals.file: {rate:.4g} requests/s, above the cap of {job.caps.max_rate:g}")
    _check_bursts(rows, job)
    return rows


def _check_bursts(rows: list[TraceRow], job: LoadJob) -> None:
    """Raise ValueError where more requests of a trace come together than the cap of rate allows."""
    bound = job.caps.burst
    if bound is None:
        return
    count, seconds = bound
    lately = deque[float]()
    for row in rows:
        while lately and lately[0] <= row.seconds - seconds:
            lately.popleft()
        lately.append(row.seconds)
        if len(lately) > count:
            raise ValueError(
                f"arrivals.file: more than {count:g} requests within {seconds:g} s, from {lately[0]:g} s on, above "
                f"the cap of {job.caps.max_rate:g} requests/s"
            )
