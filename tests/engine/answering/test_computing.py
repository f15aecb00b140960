"""The computing process of an encoder's server: one that hangs is ended, and the next request is answered."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.answering import computing
from engine.answering.computing import Computing
from engine.serving.http.errors import ApiError

SCRIPT = """#!/bin/sh
echo '{"ready": {}}'
read asked
[ -e "$0.hung" ] || { touch "$0.hung"; exec sleep 600; }
echo '{"id": 2, "vectors": [[1.0]]}'
read asked
"""
"""The first one hangs when it is asked; the second one answers."""


def test_a_process_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setattr(computing, "sys", SimpleNamespace(executable=str(program)))

    async def scenario() -> dict[str, object]:
        made = Computing(tmp_path / "settings.json", tmp_path / "rank.log", max_waiting=4, limit_seconds=0.3)
        await made.start()
        try:
            await ready(made)
            hung = made._process
            assert hung is not None
            with pytest.raises(ApiError) as caught:
                await made.ask([[1]], 0)
            assert caught.value.status == 504
            await asyncio.wait_for(hung.wait(), 300)
            await ready(made)
            made._limit_seconds = 60.0
            return await made.ask([[1]], 0)
        finally:
            await made.stop()

    assert asyncio.run(scenario())["vectors"] == [[1.0]]
    assert os.path.exists(f"{program}.hung")


async def ready(made: Computing) -> None:
    async with asyncio.timeout(60):
        while not made.ready:
            await asyncio.sleep(0.01)


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setattr(computing, "sys", SimpleNamespace(executable=str(program), stderr=None))

    async def scenario() -> bool:
        log = tmp_path / "later" / "rank.log"
        made = Computing(tmp_path / "settings.json", log, max_waiting=4, limit_seconds=60.0)
        await made.start()
        try:
            async with asyncio.timeout(30):
                while not made.failures:
                    await asyncio.sleep(0.01)
            log.parent.mkdir()
            await ready(made)
            return made.was_ready
        finally:
            await made.stop()

    assert asyncio.run(scenario())


ALWAYS_HANGS = """#!/bin/sh
echo '{"ready": {}}'
exec sleep 600
"""


def test_processes_that_hang_when_they_are_asked_are_not_counted_as_failed_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failed starts in a row end the server."""
    program = tmp_path / "python"
    program.write_text(ALWAYS_HANGS)
    program.chmod(0o755)
    monkeypatch.setattr(computing, "sys", SimpleNamespace(executable=str(program)))

    async def scenario() -> list[int]:
        made = Computing(tmp_path / "settings.json", tmp_path / "rank.log", max_waiting=4, limit_seconds=0.05)
        await made.start()
        found = []
        try:
            for _ in range(2):
                await ready(made)
                with pytest.raises(ApiError):
                    await made.ask([[1]], 0)
                await ready(made)
                found.append(made.failures)
            return found
        finally:
            await made.stop()

    assert asyncio.run(scenario()) == [0, 0]


def test_the_batch_that_is_computed_does_not_wait(tmp_path: Path) -> None:
    """It was counted as one that waits, and took its place in the queue."""

    async def scenario() -> None:
        made = Computing(tmp_path / "settings.json", tmp_path / "rank.log", max_waiting=1, limit_seconds=60.0)
        made.ready, process = True, SimpleNamespace(stdin=SimpleNamespace(write=lambda _: None))
        made._process = process  # type: ignore[assignment]
        asked = []
        for waiting in (0, 1):
            asked.append(asyncio.create_task(made.ask([[1]], 0)))
            await asyncio.sleep(0.01)
            assert made.waiting == waiting
        with pytest.raises(ApiError, match="already waiting: 1 request"):
            await made.ask([[1]], 0)
        for left in (0, 0):
            assert made._answer is not None
            made._answer.set_result({})
            await asyncio.sleep(0.01)
            assert made.waiting == left
        assert await asyncio.gather(*asked) == [{}, {}]

    asyncio.run(scenario())


def test_who_is_cancelled_leaves_the_queue_and_a_hung_process_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setattr(computing, "sys", SimpleNamespace(executable=str(program)))

    async def scenario() -> dict[str, object]:
        made = Computing(tmp_path / "settings.json", tmp_path / "rank.log", max_waiting=4, limit_seconds=1.0)
        await made.start()
        try:
            await ready(made)
            hung = made._process
            assert hung is not None
            asked = [asyncio.create_task(made.ask([[1]], 0)) for _ in range(3)]
            await asyncio.sleep(0.01)
            for one in reversed(asked):
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert made.waiting == 0 and made._number == 1, "those that waited were never computed"
            await asyncio.wait_for(hung.wait(), 300)
            await ready(made)
            made._limit_seconds = 60.0
            return await made.ask([[1]], 0)
        finally:
            await made.stop()

    assert asyncio.run(scenario())["vectors"] == [[1.0]]


def test_the_computing_process_is_the_only_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod of a distributed training, whose variables name one of its ranks, it waited for the other ones."""
    program = tmp_path / "python"
    place = "[$RANK, $LOCAL_RANK, $WORLD_SIZE, $LOCAL_WORLD_SIZE]"
    program.write_text(f'#!/bin/sh\necho "{{\\"ready\\": {{\\"place\\": {place}}}}}"\nread asked\n')
    program.chmod(0o755)
    monkeypatch.setattr(computing, "sys", SimpleNamespace(executable=str(program)))
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    async def scenario() -> dict[str, object]:
        made = Computing(tmp_path / "settings.json", tmp_path / "rank.log", max_waiting=4, limit_seconds=60.0)
        await made.start()
        try:
            await ready(made)
            return made.about
        finally:
            await made.stop()

    assert asyncio.run(scenario()) == {"place": [0, 0, 1, 1]}
