"""One connection to a host, on a clock that passes only where nothing else is left to do: slow ones and dead ones."""

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from slurm.ssh.line import Line

PIECE = 64 << 10


class Instant(selectors.DefaultSelector):
    """Waits for nothing: the loop's clock is set to when it would have waited until."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits for ever"
            self.now += timeout
        return found


def at_once(work: Callable[[], Awaitable[None]]) -> float:
    """Run it. Returns the seconds that passed on its clock."""
    selector = Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(cast(Any, work()))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
    return selector.now


class SlowHost:
    """The other end: takes a piece and gives a piece in so many seconds; says nothing to `hang`."""

    def __init__(self, piece_seconds: float, body: bytes = b"") -> None:
        self.piece_seconds, self.body = piece_seconds, body
        self.stdout, self.stdin = asyncio.StreamReader(limit=1 << 30), self
        self.stalls_after: int | None = None
        self.requests: list[tuple[str, int]] = []
        self._taken, self._answers = b"", asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def write(self, piece: bytes) -> None:
        self._taken += piece
        while b"\n" in self._taken:
            head, _, rest = self._taken.partition(b"\n")
            told = json.loads(head)
            if len(rest) < told["body_bytes"]:
                return
            self._taken = rest[told["body_bytes"] :]
            self.requests.append((told["op"], told["body_bytes"]))
            if told["op"] != "hang":
                self._tasks.append(asyncio.create_task(self._answer(told["id"])))

    async def drain(self) -> None:
        await asyncio.sleep(self.piece_seconds)

    async def _answer(self, number: int) -> None:
        async with self._answers:
            self.stdout.feed_data(json.dumps({"id": number, "body_bytes": len(self.body)}).encode() + b"\n")
            for count, start in enumerate(range(0, len(self.body), PIECE)):
                if count == self.stalls_after:
                    return
                await asyncio.sleep(self.piece_seconds)
                self.stdout.feed_data(self.body[start : start + PIECE])


def line_to(host: SlowHost) -> Line:
    return Line([], cast(Any, host))


def test_an_answer_that_takes_minutes_to_come_is_waited_for() -> None:
    async def scenario() -> None:
        host = SlowHost(5.0, body=b"x" * (64 * PIECE))
        _, body = await line_to(host).answered("look", b"", {}, 30.0)
        assert body == host.body

    assert at_once(scenario) > 300


@pytest.mark.parametrize("stalls_after", [0, 3])
def test_an_answer_that_stops_on_its_way_is_not(stalls_after: int) -> None:
    async def scenario() -> None:
        host = SlowHost(5.0, body=b"x" * (64 * PIECE))
        host.stalls_after = stalls_after
        with pytest.raises(TimeoutError):
            await line_to(host).answered("look", b"", {}, 30.0)

    assert 30 <= at_once(scenario) <= 60


def test_a_question_behind_a_large_file_is_answered_when_that_is_there() -> None:
    async def scenario() -> None:
        host = SlowHost(2.0)
        line = line_to(host)
        file = asyncio.create_task(line.answered("put", b"x" * (64 * PIECE), {}, 600.0))
        await asyncio.sleep(1)
        await line.answered("offer", b"", {}, 30.0)
        await file
        assert [operation for operation, _ in host.requests] == ["put", "offer"]

    assert at_once(scenario) > 120


def test_the_answers_of_others_do_not_keep_a_request_waiting_that_gets_none() -> None:
    async def scenario() -> None:
        host = SlowHost(0.01, body=b"x" * 100)
        line = line_to(host)

        async def look() -> None:
            while True:
                await line.answered("look", b"", {}, 30.0)
                await asyncio.sleep(2)

        looks = asyncio.create_task(look())
        with pytest.raises(TimeoutError):
            await line.answered("hang", b"", {}, 30.0)
        looks.cancel()

    assert 30 <= at_once(scenario) <= 40


def test_a_request_that_is_given_up_while_it_is_sent_does_not_eat_the_next() -> None:
    async def scenario() -> None:
        host = SlowHost(1.0)
        line = line_to(host)
        given_up = [asyncio.create_task(line.answered("put", b"x" * (8 * PIECE), {}, 600.0)) for _ in range(2)]
        await asyncio.sleep(3)
        for each in given_up:
            each.cancel()
        await line.answered("look", b"", {}, 30.0)
        assert host.requests == [("put", 8 * PIECE), ("look", 0)], "the second was not begun"

    at_once(scenario)
