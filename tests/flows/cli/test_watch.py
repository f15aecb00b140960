"""The live page: a real server and a real browser see a run fill in; nothing else of the folder is served."""

import fcntl
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect
from typer.testing import CliRunner

from configs.hardware.prices import Price, TargetPrices
from configs.plans.paths import RunPaths
from configs.records.record import Status
from flows.cli.main import app
from flows.cli.results import watch
from flows.cli.results.watch import LivePage, live_server, progress
from tasks.campaign.run_lock import run_lock
from tests.support.browser import SLOW, chromium, find_chromium
from tests.support.run_folders.made_studies import (
    cells_of,
    planned,
    write_failure,
    write_measurements,
    write_plan,
    write_record,
)

STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
"""


@contextmanager
def served(run: RunPaths) -> Iterator[int]:
    """The port of a server of this run."""
    with live_server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_records_are_served_and_only_to_loopback(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    _, cell = cells_of(plan)[0]
    write_measurements(run, cell, 0.01)
    (run.folder / "secret.json").write_text("{}")
    record = next(run.records.glob("*/*.json"))
    with served(run) as port:
        assert get(port, "/")[0] == 200
        assert get(port, f"/{record.relative_to(run.folder)}") == (200, record.read_bytes())
        for path in ("/secret.json", "/plan.json", "/records/../plan.json", "/records/%2e%2e/plan.json"):
            assert get(port, path)[0] == 404, path
        assert get(port, "/", host=f"rebound.example:{port}")[0] == 403


def test_a_browser_that_leaves_before_its_answer_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_plan(tmp_path / "run", planned(STUDY))
    asked, left = threading.Event(), threading.Event()

    def slowly(_: LivePage) -> bytes:
        asked.set()
        left.wait(600)
        return b"x" * (32 << 20)

    monkeypatch.setattr(LivePage, "page", slowly)
    with served(run) as port:
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert asked.wait(600)
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset at its close
        left.set()
        assert get(port, "/version")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_how_far_a_run_is(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    assert progress(run, "v").text == "0 of 20 measurements, 0 failed, 0 running."
    (_, first), (_, second) = cells_of(plan)
    write_measurements(run, first, 0.01)
    found = progress(run, "v")
    assert (found.done, found.planned) == (10, 20) and "about 10:00 to go" in found.text
    write_measurements(run, second, 0.01)
    assert progress(run, "v").text.endswith("0 running; 2 of the memory pass to go."), "it was said to be complete"
    for cell in (first, second):
        write_record(run, cell, 0, measuring_pass="memory")
    assert progress(run, "v").text == "20 of 20 measurements, 0 failed, 0 running; complete."


@pytest.mark.parametrize(("kind", "usd"), [("slurm", "9.60"), ("local", "0.96")])
def test_jobs_that_run_at_a_time_are_all_paid_for(kind: str, usd: str, tmp_path: Path) -> None:
    """A cluster that runs many jobs at a time was said to cost what one of them does."""
    price = TargetPrices(price=Price(usd_per_hour=3.6, source="contract"))
    plan = planned(f"{STUDY}\ntargets: [{{kind: {kind}, name: lab}}]").model_copy(update={"prices": {"lab": price}})
    run, cell = write_plan(tmp_path / "run", plan), cells_of(plan)[0][1]
    for repeat in range(4):
        began, ended = f"2026-01-01T00:0{repeat}:00Z", f"2026-01-01T00:1{repeat}:00Z"
        write_record(run, cell, repeat, status=Status.FAILED, started_at=began, finished_at=ended)
    assert progress(run, "v").text.endswith(f"about 16:00 to go, about {usd} USD.")


def test_many_minutes_to_go_are_hours(tmp_path: Path) -> None:
    """19 hours were `1140:00`, which may as well be minutes and seconds of something longer."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    for repeat, hour in enumerate((1, 2)):
        began, moment = f"2026-01-01T{hour - 1:02}:00:00Z", f"2026-01-01T{hour:02}:00:00Z"
        write_record(run, cells_of(plan)[0][1], repeat, status=Status.FAILED, started_at=began, finished_at=moment)
    assert "about 18:00:00 to go" in progress(run, "v").text


def test_the_time_between_two_runs_of_a_study_is_not_waited_for(tmp_path: Path) -> None:
    """A study that went on after ten days had months to go, at the price of months."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    cell, now = cells_of(plan)[0][1], datetime.now(UTC)

    def measured(repeat: int, minutes: float) -> None:
        ended = now + timedelta(minutes=minutes)
        stamps = {"started_at": (ended - timedelta(seconds=30)).isoformat(), "finished_at": ended.isoformat()}
        write_record(run, cell, repeat, status=Status.FAILED, **stamps)

    days = 10 * 24 * 60
    for repeat, minutes in enumerate((-days - 2, -days - 1, -days)):
        measured(repeat, minutes)
    measured(3, -5)
    assert "about 13:20 to go" in progress(run, "v").text, "2:30 for three, without the ten days"
    run.lock.write_text(json.dumps({"pid": 1, "host": "h", "since": (now - timedelta(minutes=7)).isoformat()}))
    assert "about 13:20 to go" in progress(run, "v").text, "nobody works in the folder"
    with run.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "about 32:00 to go" in progress(run, "v").text, "this run has taken two minutes for one"
        run.lock.write_text("{")
        assert "about 13:20 to go" in progress(run, "v").text


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    run = write_plan(tmp_path / "run", planned(STUDY))
    with served(run) as port:
        done = CliRunner().invoke(app, ["watch", str(run.folder), "--port", str(port)])
    assert (done.exit_code, done.stderr) == (1, f"--port {port}: Address already in use\n")


def test_what_was_cancelled_did_not_fail(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    (_, first), (_, second) = cells_of(plan)
    write_failure(run, first, Status.CANCELLED, "cancelled on request")
    write_failure(run, second, Status.FAILED, "RuntimeError")
    assert progress(run, "v").text.startswith("2 of 20 measurements, 1 failed, 0 running, 1 cancelled")


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_browser_sees_cells_fill_in(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    (_, first), (_, second) = cells_of(plan)
    write_measurements(run, first, 0.01)
    with served(run) as port, chromium() as browser:
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator(".live")).to_contain_text("10 of 20 measurements")
        write_measurements(run, second, 0.02)
        expect(page.locator(".live")).to_contain_text("20 of 20 measurements", timeout=SLOW)
        expect(page.locator("#cells-table tbody")).not_to_contain_text("missing")
        page.locator("#cells-table tbody button").first.click()
        expect(page.locator("#cell")).to_be_visible()
        assert [text for text in said if "favicon" not in text and "404" not in text] == []


def test_pages_of_a_large_run_take_a_small_share_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a run with 100,000 records takes 40 s of a core, and was made again two seconds later."""
    run, now, rendered = write_plan(tmp_path / "run", planned(STUDY)), [0.0], list[float]()

    def render(*_: object) -> str:
        rendered.append(now[0])
        now[0] += 40.0
        return f"page {len(rendered)}"

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(watch, "render_page", render)
    monkeypatch.setattr(watch, "progress", lambda *_: None)
    monkeypatch.setattr(LivePage, "version", lambda self: f"{now[0]}")
    live = LivePage(run)

    def watched(seconds: float) -> int:
        """A browser asks every two seconds, and takes a page that is new."""
        begun, until, seen = len(rendered), now[0] + seconds, ""
        while now[0] < until:
            now[0] += 2.0
            if (version := live.shown()) != seen:
                seen = version
                live.page()
        return len(rendered) - begun

    with run_lock(run):
        assert 15 <= watched(3600) <= 20, "a fifth of the time at most"
    assert watched(420) == 10, "with nothing to disturb, as soon as it can be"
