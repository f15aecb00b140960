"""The generator against a server of known answers, in its own process as always."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.load.server import Script, serving
from configs.common.arrays import Floats
from configs.common.files.reading import read_model
from configs.load.arrivals import Arrivals, ClosedLoop, ConstantArrivals, GammaArrivals, PoissonArrivals, TraceArrivals
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.load.samples import SAMPLE_COLUMNS, FinishCode, LoadFacts, RequestOutcome
from configs.records.samples import read_samples
from engine.load import generator
from engine.load.generator import Generator
from engine.load.recorder import RequestRecorder
from engine.load.replies import Reply
from reports.load.metrics import serving_metrics
from reports.load.samples import read_load_run
from reports.load.verdict import Verdict, judged

TOKEN = "LOAD_TEST_TOKEN"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def run(
    folder: Path, url: str, arrivals: Arrivals, env: dict[str, str] | None = None, **fields: Any
) -> subprocess.CompletedProcess[str]:
    with started(folder, url, arrivals, env, **fields) as process:
        out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def started(
    folder: Path, url: str, arrivals: Arrivals, env: dict[str, str] | None = None, **fields: Any
) -> subprocess.Popen[str]:
    token = TOKEN if env else None
    job = LoadJob(endpoint=Endpoint(url=url, model="m", token_variable=token), arrivals=arrivals, **fields)
    (folder / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "engine.load", str(folder / "job.json"), str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )


def samples(folder: Path) -> tuple[dict[str, Floats], LoadFacts]:
    read = read_samples(folder / "samples.npz", SAMPLE_COLUMNS)
    columns = {name.removeprefix("0/"): np.asarray(column, float) for name, column in read.items()}
    return columns, read_model(folder / "run.json", LoadFacts)


def test_an_open_loop_records_what_the_server_did(tmp_path: Path, script: Script, url: str) -> None:
    script.first_seconds, script.chunk_seconds = 0.05, 0.01
    contents = Contents(new_tokens=4, prompt_tokens=9, exact=True)
    done = run(tmp_path, url, PoissonArrivals(rate=30), contents=contents, duration_seconds=1.5)
    assert done.returncode == 0, done.stderr
    columns, facts = samples(tmp_path)
    count = facts.requests
    assert count == len(script.seen or ()) > 20
    assert set(columns["outcome"]) == {RequestOutcome.COMPLETED} and set(columns["finish"]) == {FinishCode.LENGTH}
    assert set(columns["asked_prompt_tokens"]) == {9}
    assert set(columns["new_tokens"]) == set(columns["chunks"]) == set(columns["asked_new_tokens"]) == {4}
    assert len(columns["chunk_seconds"]) == 4 * count
    gaps = np.diff(columns["chunk_seconds"].reshape(count, 4), axis=1)
    order = ("scheduled_seconds", "started_seconds", "sent_seconds", "first_seconds", "last_seconds", "ended_seconds")
    for earlier, later in pairwise(order):
        assert (columns[earlier] <= columns[later] + 1e-4).all(), (earlier, later)
    # From the start: a busy machine can note the end of sending after the server has begun to wait.
    assert (columns["first_seconds"] - columns["started_seconds"] >= 0.05 - 1e-3).all()
    assert np.median(gaps) >= 0.009
    assert facts.issuing_seconds == 1.5 and not facts.errors and len(columns["lag_seconds"])
    assert {body["min_tokens"] for body, _ in script.seen or ()} == {4}


def test_a_seed_repeats_its_requests(tmp_path: Path, script: Script, url: str) -> None:
    asked = []
    for _ in range(2):
        run(tmp_path, url, PoissonArrivals(rate=200), contents=Contents(new_tokens=1), max_requests=40)
        asked.append(sorted(json.dumps(body, sort_keys=True) for body, _ in script.seen or ()))
        (script.seen or []).clear()
    assert asked[0] == asked[1] and len(asked[0]) == 40


def test_users_wait_for_their_answers(tmp_path: Path, script: Script, url: str) -> None:
    script.first_seconds = 0.05
    run(tmp_path, url, ClosedLoop(users=3), contents=Contents(new_tokens=1), duration_seconds=1.0)
    columns, _ = samples(tmp_path)
    changes = sorted([(t, 1) for t in columns["sent_seconds"]] + [(t, -1) for t in columns["ended_seconds"]])
    assert max(np.cumsum([change for _, change in changes])) == 3
    assert 6 <= len(columns["outcome"]) <= 60


@pytest.mark.parametrize("bounds", [{"max_requests": 4}, {"duration_seconds": 30, "caps": Caps(max_tokens=9)}])
def test_a_run_that_a_count_ends_lasts_until_the_next_request_would_be_due(
    tmp_path: Path, script: Script, url: str, bounds: dict[str, Any]
) -> None:
    """Up to the last one it had three gaps for four requests, so that 27 requests/s were told of 20 asked for."""
    contents = Contents(prompt_tokens=1, new_tokens=1)
    run(tmp_path, url, ConstantArrivals(rate=20), contents=contents, **bounds)
    assert samples(tmp_path)[1].issuing_seconds == 0.2
    figures = serving_metrics(read_load_run(tmp_path))
    assert (figures.due, figures.offered_rate) == (4, pytest.approx(20))


def test_users_whom_a_count_ends_are_counted_until_the_last_one_asks(tmp_path: Path, script: Script, url: str) -> None:
    """As many answers have ended by then as requests followed them; a round later some end just behind the end."""
    script.first_seconds = 0.3
    run(tmp_path, url, ClosedLoop(users=2), max_requests=6)
    columns, facts = samples(tmp_path)
    assert facts.issuing_seconds == columns["scheduled_seconds"].max()
    assert (columns["ended_seconds"] <= facts.issuing_seconds).sum() == 4


def test_a_run_whose_next_request_is_due_after_its_end_lasts_its_duration(
    tmp_path: Path, script: Script, url: str
) -> None:
    run(tmp_path, url, ConstantArrivals(rate=20), max_requests=4, duration_seconds=0.18)
    assert samples(tmp_path)[1].issuing_seconds == 0.18


def test_users_who_are_refused_wait_before_they_ask_again(tmp_path: Path, script: Script, url: str) -> None:
    """They asked thousands of times a second, and so decided what else the server could do."""
    script.refuse = lambda body, headers: (429, "full")
    run(tmp_path, url, ClosedLoop(users=3), contents=Contents(new_tokens=1), max_requests=6)
    columns, _ = samples(tmp_path)
    assert set(columns["outcome"]) == {RequestOutcome.REFUSED} and len(columns["outcome"]) == 6
    again = sorted(columns["scheduled_seconds"])[3:]
    assert (np.array(again) >= np.array(sorted(columns["ended_seconds"])[:3]) + 1.0).all()


def test_turns_of_a_conversation_follow_each_other(tmp_path: Path, script: Script, url: str) -> None:
    contents = Contents(new_tokens=2, prompt_tokens=3, turns=3)
    run(tmp_path, url, PoissonArrivals(rate=100), contents=contents, max_requests=30)
    columns, facts = samples(tmp_path)
    assert facts.requests == 30
    assert set(columns["turn"]) <= {0, 1, 2} and {len(body["prompt"]) for body, _ in script.seen or ()} >= {3, 8}
    for talk in set(columns["conversation"]):
        own = np.flatnonzero(columns["conversation"] == talk)
        own = own[np.argsort(columns["turn"][own])]
        assert (columns["scheduled_seconds"][own][1:] >= columns["ended_seconds"][own][:-1] - 1e-3).all()


def test_a_wrong_usage_does_not_make_the_next_prompt_endless(tmp_path: Path, script: Script, url: str) -> None:
    """The conversation was lost for want of terabytes of memory, and nobody told."""
    script.usage_tokens = lambda chunks: 1 << 39
    contents = Contents(new_tokens=2, prompt_tokens=3, turns=2)
    done = run(tmp_path, url, PoissonArrivals(rate=100), contents=contents, max_requests=8)
    assert not done.stderr
    assert {len(body["prompt"]) for body, _ in script.seen or ()} == {3, 8}


def test_a_trace_decides_times_and_lengths(tmp_path: Path, script: Script, url: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"seconds": n / 50, "new_tokens": n + 1}) for n in range(10)))
    run(tmp_path, url, TraceArrivals(file=str(trace)))
    columns, _ = samples(tmp_path)
    order = np.argsort(columns["scheduled_seconds"])
    assert columns["scheduled_seconds"][order] == pytest.approx(np.arange(10) / 50)
    assert list(columns["chunks"][order]) == list(range(1, 11))


def test_the_token_comes_from_the_environment_and_is_written_nowhere(tmp_path: Path, script: Script, url: str) -> None:
    done = run(tmp_path, url, PoissonArrivals(rate=50), {TOKEN: "s3cret-bearer"}, max_requests=3)
    assert done.returncode == 0
    assert {headers.get("authorization") for _, headers in script.seen or ()} == {"Bearer s3cret-bearer"}
    assert not [path for path in tmp_path.iterdir() if b"s3cret" in path.read_bytes()]
    done = run(tmp_path, url, PoissonArrivals(rate=50), {TOKEN: ""}, max_requests=3)
    assert done.returncode == 2 and f"{TOKEN} is not set" in done.stderr


def test_errors_are_counted_by_message(tmp_path: Path, script: Script, url: str) -> None:
    script.refuse = lambda body, headers: (503, "busy") if len(script.seen or ()) % 2 else None
    run(tmp_path, url, PoissonArrivals(rate=100), contents=Contents(new_tokens=1), max_requests=20)
    columns, facts = samples(tmp_path)
    assert facts.errors == {"HTTP 503: busy": 10}
    assert (columns["outcome"] == RequestOutcome.REFUSED).sum() == 10 == (columns["http_status"] == 503).sum()


def test_a_cut_stream_is_no_answer(tmp_path: Path, script: Script, url: str) -> None:
    script.cut_after = 2
    run(tmp_path, url, PoissonArrivals(rate=100), contents=Contents(new_tokens=5), max_requests=4)
    columns, facts = samples(tmp_path)
    assert set(columns["outcome"]) == {RequestOutcome.CONNECTION} and set(columns["chunks"]) == {2}
    assert list(facts.errors) == ["connection lost: closed by the server"]


def test_a_request_that_takes_too_long_is_ended(tmp_path: Path, script: Script, url: str) -> None:
    script.first_seconds = 30.0
    run(tmp_path, url, PoissonArrivals(rate=100), caps=Caps(timeout_seconds=0.3), max_requests=3)
    columns, _ = samples(tmp_path)
    assert set(columns["outcome"]) == {RequestOutcome.TIMEOUT}
    assert (columns["ended_seconds"] < 20).all() and np.isnan(columns["first_seconds"]).all()


def test_connections_that_the_server_closes_are_opened_again(tmp_path: Path, script: Script, url: str) -> None:
    script.ends_connections = True
    run(tmp_path, url, PoissonArrivals(rate=60), contents=Contents(new_tokens=1), max_requests=60)
    columns, facts = samples(tmp_path)
    assert set(columns["outcome"]) == {RequestOutcome.COMPLETED}
    assert facts.connections > 1


def test_no_server_is_an_error_of_each_request(tmp_path: Path) -> None:
    with serving(Script()) as url:
        pass
    done = run(tmp_path, url, PoissonArrivals(rate=100), max_requests=5)
    columns, facts = samples(tmp_path)
    assert done.returncode == 0 and set(columns["outcome"]) == {RequestOutcome.CONNECTION}
    assert len(facts.errors) == 1 and "no connection" in next(iter(facts.errors))


@pytest.mark.parametrize(
    "arrivals", [PoissonArrivals(rate=4), pytest.param(ClosedLoop(users=2), marks=pytest.mark.slow)]
)
def test_a_run_that_no_server_takes_ends_early(tmp_path: Path, arrivals: Arrivals) -> None:
    """A wrong address was told at the end of the run, with hours of samples of nothing."""
    with serving(Script()) as url:
        pass
    began = time.monotonic()
    done = run(tmp_path, url, arrivals, duration_seconds=120)
    columns, facts = samples(tmp_path)
    assert done.returncode == 0 and 8 <= time.monotonic() - began < 60, done.stderr
    assert facts.capped is not None and re.match(r"no connection in 1\d s: Connection refused$", facts.capped)
    assert len(columns["outcome"]) == facts.requests >= 3
    assert judged(read_load_run(tmp_path), serving_metrics(read_load_run(tmp_path))).verdict is Verdict.NO_ANSWERS


def test_a_server_that_was_reached_once_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its absence is then data: requests are sent for the whole run."""
    monkeypatch.setattr("engine.load.generator._UNREACHED_SECONDS", 0.2)

    async def scenario(answers: bool) -> LoadFacts:
        ports: list[int] = []

        async def answer_none(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.close()
            writer.close()

        server = await asyncio.start_server(answer_none, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        if not answers:
            server.close()
        endpoint = Endpoint(url=f"http://127.0.0.1:{ports[0]}", model="m")
        job = LoadJob(endpoint=endpoint, arrivals=ConstantArrivals(rate=20), duration_seconds=1.5)
        return await Generator(job).run(tmp_path)

    assert asyncio.run(scenario(answers=True)).capped is None
    assert "no connection in" in (asyncio.run(scenario(answers=False)).capped or "")


def test_connections_that_are_still_tried_end_with_the_run_that_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for its own time limit, half a minute behind the end; they are told as what they are."""
    monkeypatch.setattr("engine.load.generator._UNREACHED_SECONDS", 0.5)

    async def scenario() -> LoadFacts:
        tried = 0

        async def create_connection(*_: object, **__: object) -> None:
            nonlocal tried
            tried += 1
            await asyncio.sleep(0.05 if tried <= 3 else 300)
            raise OSError(errno.EHOSTUNREACH, "No route to host")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
        endpoint = Endpoint(url="http://127.0.0.1:9", model="m")
        job = LoadJob(endpoint=endpoint, arrivals=ConstantArrivals(rate=20), duration_seconds=100)
        return await Generator(job).run(tmp_path)

    monkeypatch.setattr("engine.load.connections._CONNECT_SECONDS", 2.0)
    facts = asyncio.run(scenario())
    assert facts.wall_seconds < 20 and facts.capped == "no connection in 2 s: the server did not accept it in time"
    assert "no connection: given up after 2 s" in facts.errors and "interrupted" not in str(facts.errors)


def test_caps_of_tokens_and_requests_in_flight_protect_the_server(tmp_path: Path, script: Script, url: str) -> None:
    contents = Contents(prompt_tokens=10, new_tokens=10)
    caps = Caps(max_tokens=205, spent_tokens=100)
    run(tmp_path, url, PoissonArrivals(rate=200), contents=contents, caps=caps, duration_seconds=30)
    columns, facts = samples(tmp_path)
    assert len(columns["outcome"]) == 5
    assert facts.capped == "max_tokens: 205 tokens asked for" and facts.issuing_seconds < 20
    script.first_seconds = 0.5
    run(tmp_path, url, PoissonArrivals(rate=200), contents=contents, caps=Caps(max_in_flight=4), max_requests=20)
    columns, _ = samples(tmp_path)
    assert (columns["outcome"] == RequestOutcome.COMPLETED).sum() >= 4 and (
        columns["outcome"] == RequestOutcome.DROPPED
    ).any()
    assert np.isnan(columns["sent_seconds"][columns["outcome"] == RequestOutcome.DROPPED]).all()


@pytest.mark.parametrize("arrivals", [ConstantArrivals(rate=200), ClosedLoop(users=3)])
def test_a_run_ends_before_its_samples_are_too_many_to_be_read(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, arrivals: Arrivals
) -> None:
    """Those of a million long answers were written, refused for their size, and the hours of the run were lost."""
    monkeypatch.setattr(generator, "_MAX_SAMPLES", 6000)
    contents, caps = Contents(prompt_tokens=5, new_tokens=20), Caps(spent_samples=5000)  # by earlier runs of a search
    endpoint = Endpoint(url=url, model="m")
    job = LoadJob(endpoint=endpoint, arrivals=arrivals, contents=contents, caps=caps, duration_seconds=60)
    facts = asyncio.run(Generator(job).run(tmp_path))
    assert facts.capped == "samples: 6,000 numbers, most of them arrivals of tokens" and facts.wall_seconds < 30
    columns, _ = samples(tmp_path)
    assert 15 <= facts.requests <= 1000 // 36 and (columns["outcome"] == RequestOutcome.COMPLETED).all()
    assert sum(map(len, columns.values())) <= 1000 + 50 * facts.wall_seconds + 50, "the timer's own samples aside"


def test_an_interrupted_run_keeps_its_samples(tmp_path: Path, script: Script, url: str) -> None:
    with started(tmp_path, url, PoissonArrivals(rate=50), duration_seconds=300) as process:
        while len(script.seen or ()) < 5:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    columns, facts = samples(tmp_path)
    assert facts.capped == "interrupted" and len(columns["outcome"]) >= 4


@pytest.mark.parametrize(
    ("job", "message"),
    [('{"kind": "load"}', "endpoint: is missing"), ("{", "not JSON")],
)
def test_a_wrong_job_is_refused(tmp_path: Path, job: str, message: str) -> None:
    (tmp_path / "job.json").write_text(job)
    command = [sys.executable, "-m", "engine.load", str(tmp_path / "job.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_run_without_a_request_is_a_run(tmp_path: Path) -> None:
    """At low rates chance may have it that none is due: a search goes on after it."""
    done = run(tmp_path, "http://127.0.0.1:9", PoissonArrivals(rate=1e-6), duration_seconds=0.1)
    assert done.returncode == 0, done.stderr
    columns, facts = samples(tmp_path)
    assert facts.requests == len(columns["outcome"]) == 0 and facts.wall_seconds == 0
    figures = serving_metrics(read_load_run(tmp_path))
    assert judged(read_load_run(tmp_path), figures).reason == "no request was due"


@pytest.mark.parametrize(("rows", "turns", "refused"), [(11, 2, True), (11, 1, False), (1, 1, False), (1, 2, True)])
def test_a_trace_of_conversations_counts_every_turn_under_the_cap(
    tmp_path: Path, rows: int, turns: int, refused: bool
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"seconds": row}) for row in range(rows)))
    job = LoadJob(
        endpoint=Endpoint(url="http://127.0.0.1:9", model="m"),
        arrivals=TraceArrivals(file=str(trace)),
        contents=Contents(turns=turns),
        caps=Caps(max_rate=2.0),
    )
    if refused:
        with pytest.raises(ValueError, match=r"requests/s, above the cap of 2"):
            Generator(job)
    else:
        Generator(job)


@pytest.mark.parametrize(("together", "refused"), [(31, True), (30, False)])
def test_a_trace_with_a_burst_above_the_cap_is_refused(tmp_path: Path, together: int, refused: bool) -> None:
    """Its mean is far below the cap: a thousand seconds pass after the burst."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"seconds": row}) for row in (*[5.0] * together, 1000.0)))
    job = LoadJob(
        endpoint=Endpoint(url="http://127.0.0.1:9", model="m"),
        arrivals=TraceArrivals(file=str(trace)),
        caps=Caps(max_rate=2.0),
    )
    if refused:
        with pytest.raises(ValueError, match=r"more than 30 requests within 5 s, from 0 s on, above the cap of 2 "):
            Generator(job)
    else:
        Generator(job)


def test_a_burst_of_drawn_arrivals_ends_a_run_at_the_cap() -> None:
    """Gamma gaps of this shape are nearly all 0: hundreds of requests come together at a mean of one a second."""
    job = LoadJob(
        endpoint=Endpoint(url="http://127.0.0.1:9", model="m"),
        arrivals=GammaArrivals(rate=1.0, burstiness=0.001),
        caps=Caps(max_rate=1.0),
        max_requests=200,
        seed=0,
    )
    generator = Generator(job)
    generator._recorder = RequestRecorder(time.monotonic())
    generator._pool = AtOnce(generator)  # type: ignore[assignment]

    async def work() -> None:
        await generator._open_loop()
        await asyncio.gather(*generator._tasks)

    asyncio.run(work())
    assert generator._due_requests == 30
    assert generator._capped == "max_rate: more than 30 requests within 10 s"


class AtOnce:
    """A pool whose every request ends at once: answered, or refused as by one without file descriptors.

    heard: requests that had come due when the loop turned to something else after the first one.
    """

    def __init__(self, generator: Generator, answered: bool = False) -> None:
        self.generator = generator
        self.answered = answered
        self.heard: list[int] = []

    async def post(self, *_: object) -> tuple[Reply, None]:
        asyncio.get_running_loop().call_soon(lambda: self.heard.append(self.generator._due_requests))
        reply = Reply()
        if self.answered:
            reply.outcome = RequestOutcome.COMPLETED
        else:
            reply.fail(RequestOutcome.DROPPED, "not sent: Too many open files")
        return reply, None


@pytest.mark.parametrize("arrivals", [PoissonArrivals(rate=1000), ClosedLoop(users=2)])
def test_a_generator_that_is_behind_still_sends_and_listens(arrivals: Arrivals) -> None:
    """It sent nothing, read no answer and heard no signal before it had caught up, which it never did."""
    job = LoadJob(endpoint=Endpoint(url="http://127.0.0.1:9", model="m"), arrivals=arrivals, max_requests=50)
    generator = Generator(job)  # its run began when the clock did
    pool = AtOnce(generator, isinstance(arrivals, ClosedLoop))
    generator._pool = pool  # type: ignore[assignment]

    async def work() -> None:
        await (generator._closed_loop(arrivals) if isinstance(arrivals, ClosedLoop) else generator._open_loop())
        await asyncio.gather(*generator._tasks)

    asyncio.run(work())
    assert generator._due_requests == 50 and pool.heard[0] < 10
