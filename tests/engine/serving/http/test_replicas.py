"""A replica counts as hung when it computes nothing for its answers, and not when it had none. Answers get what it
hears."""

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.common.files import logs
from configs.serving.settings import ServerRendezvous, ServingSettings
from engine.planner import accelerators
from engine.planner.accelerators import LocalAccelerator
from engine.serving.http.answers import TokenQueue
from engine.serving.http.errors import ApiError
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.replicas import ReplicaRanks
from engine.serving.messages import NewToken, StepReport, WantedAnswer


@pytest.mark.parametrize("first_request", [True, False])
def test_the_first_request_after_a_pause_finds_no_hung_replica(tmp_path: Path, first_request: bool) -> None:
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)
    answer = TokenQueue(WantedAnswer("0", (1,), 2))

    async def hung() -> bool:
        program = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = await asyncio.create_subprocess_exec(*program)
        replica._processes = [process]
        watching = asyncio.create_task(replica._watch())
        await asyncio.sleep(0)
        replica._last_step = time.monotonic() - 1000  # the last step was long ago
        if first_request:
            replica.add(answer)
        else:
            replica.answers[answer.key] = answer  # it has waited since then
        replica.ready = True
        done, _ = await asyncio.wait({watching}, timeout=1.5)
        watching.cancel()
        process.kill()
        await process.wait()
        return bool(done)

    assert asyncio.run(hung()) is not first_request


@pytest.mark.parametrize("was_ready", [False, True])
def test_ranks_that_cannot_be_started_count_as_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], was_ready: bool
) -> None:
    """The server ends after such starts, or tries again where it was ready before; it does not wait for ever."""
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)

    replica.was_ready = was_ready

    async def refuse(*command: str, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def scenario() -> bool:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        keeping = asyncio.create_task(replica._keep_running())
        async with asyncio.timeout(30):
            while not keeping.done() and not replica.failures:
                await asyncio.sleep(0.01)
        keeping.cancel()
        return replica.failures == 1

    assert asyncio.run(scenario())
    said = capsys.readouterr().err
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in said
    assert ("starting it again" in said) is was_ready is not replica.cannot_start


def test_steps_that_are_heard_together_give_each_answer_its_tokens_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)

    def step(*tokens: NewToken) -> bytes:
        report = StepReport(tokens, 1, 0, 8, 0, 0, 0, len(tokens), 0.0, 0.0)
        return json.dumps(report.message()).encode() + b"\n"

    async def scenario() -> list[list[tuple[int, str | None]]]:
        answers = {key: TokenQueue(WantedAnswer(key, (1,), 4)) for key in ("0", "1", "2")}
        for answer in answers.values():
            replica.add(answer)
        read: list[list[tuple[int, str | None]]] = []

        async def follow(key: str) -> None:
            with suppress(ApiError):
                async for tokens in answers[key]:
                    read.append([(int(key) * 100 + one.token, one.reason) for one in tokens])

        following = [asyncio.create_task(follow(key)) for key in answers]
        monkeypatch.setattr(replica, "_keep_running", asyncio.Event().wait)  # no ranks but this test
        await replica.start()
        _, writer = await asyncio.open_unix_connection(replica._socket)
        refused = json.dumps({"refused": {"key": "2", "message": "its logits are not finite"}}).encode() + b"\n"
        steps = step(NewToken("0", 5), NewToken("1", 5), NewToken("2", 5)) + step(NewToken("0", 6), NewToken("1", 7))
        whole = steps + refused + step(NewToken("0", 8, "length"))
        writer.write(whole + step(NewToken("1", 9, "stop"))[:30])  # a line may come in parts
        await asyncio.sleep(0.2)
        writer.write(step(NewToken("1", 9, "stop"))[30:])
        await asyncio.wait_for(asyncio.gather(*following), 300)
        assert not replica.answers
        writer.close()
        await writer.wait_closed()
        await replica.stop()
        return read

    read = asyncio.run(scenario())
    assert sorted(read) == [
        [(5, None), (6, None), (8, "length")],
        [(105, None), (107, None)],
        [(109, "stop")],
        [(205, None)],
    ]


def test_a_rank_that_was_given_up_makes_no_replica_ready(tmp_path: Path) -> None:
    """What it said last is read while its processes end."""
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)
    (tmp_path / "replica-0.log").write_text("killed")

    async def scenario() -> None:
        replica._keep_running = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        await replica.start()
        _, writer = await asyncio.open_unix_connection(replica._socket)
        while replica._link is None:
            await asyncio.sleep(0.01)

        async def kill() -> None:
            _, late = await asyncio.open_unix_connection(replica._socket)
            for one in (writer, late):
                one.write(b'{"ready": {}}\n')
            await asyncio.sleep(0.2)
            late.close()

        replica._kill = kill  # type: ignore[method-assign]
        await replica._fail("rank 0 of replica 0 ended with -9")
        assert not replica.ready and replica.failures == 1
        replica.add(TokenQueue(WantedAnswer("0", (1,), 2)))  # kept for the next ranks
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        await replica.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranks_of_one_machine_talk_on_its_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    meeting = ServerRendezvous(nodes=2, node=0, address="10.0.0.1", port=2000) if elsewhere else None
    settings = ServingSettings(
        name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8, layout=Layout(tp=2), rendezvous=meeting
    )
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)
    started: list[dict[str, str]] = []

    async def start(*command: str, env: dict[str, str], **options: object) -> None:
        started.append(env)

    for name in ("GLOO", "TP", "NCCL"):
        monkeypatch.delenv(f"{name}_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    asyncio.run(replica._spawn())
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    here = ("10.0.0.1", None, None) if elsewhere else ("127.0.0.1", "lo", "=lo")
    assert [tuple(map(env.get, names)) for env in started] == [here] * (1 if elsewhere else 2)
    # They bind it seconds later: the kernel must not give it to somebody meanwhile.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(int(env["MASTER_PORT"]) < lowest for env in started)


def test_the_log_of_ranks_that_run_on_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 100)
    replica.log.write_text("early\n" + "x" * 2000 + "\nlast\n")

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        replica._processes = [process]
        watching = asyncio.create_task(replica._watch())
        async with asyncio.timeout(30):
            while "early" in replica.log.read_text():
                await asyncio.sleep(0.05)
        process.kill()
        await watching

    asyncio.run(scenario())
    assert replica.log.read_text() == "last\n"


def test_ranks_that_are_loading_are_not_waited_for(tmp_path: Path) -> None:
    """Those of several replicas, one after the other, took longer than whoever ends the server waits for it."""
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8)
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)

    class Process:
        def __init__(self) -> None:
            self.asked: list[str] = []
            self.killed = asyncio.Event()

        async def wait(self) -> int:
            self.asked.append("wait")
            await self.killed.wait()
            return -9

        def kill(self) -> None:
            self.asked.append("kill")
            self.killed.set()

    async def scenario() -> list[str]:
        process = Process()
        replica._keep_running = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        await replica.start()
        replica._processes = [process]  # type: ignore[list-item]
        await replica.stop()
        return process.asked

    assert asyncio.run(scenario()) == ["kill", "wait"]


def test_ranks_of_a_server_that_shares_a_machine_see_their_own_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServingSettings(
        name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8, layout=Layout(tp=2), first_device=2
    )
    replica = ReplicaRanks(0, settings, tmp_path / "settings.json", ServerMetrics("m"), lambda lost: None)
    started: list[dict[str, str]] = []

    async def start(*command: str, env: dict[str, str], **options: object) -> None:
        started.append(env)

    gpus = tuple(LocalAccelerator("A10G", uuid=f"GPU-{number}") for number in range(4))
    monkeypatch.setattr(accelerators, "local_accelerators", lambda environment: gpus)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    asyncio.run(replica._spawn())
    assert [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in started] == [
        (rank, "GPU-2,GPU-3") for rank in ("0", "1")
    ]
