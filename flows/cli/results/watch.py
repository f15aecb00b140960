"""`rankwise watch`: the report's page on loopback, made anew while a run goes on.

The page asks for `version` every two seconds and takes the new page when that has changed. Only GET is answered, only
to a browser that names loopback as the host (a page elsewhere could otherwise read it through a name that it points
here), and of the run folder only records are served.
"""

import re
import sys
import threading
import time
from collections import Counter
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

from configs.common.dollars import dollars
from configs.common.files.reading import read_bytes
from configs.common.printable import plural
from configs.hardware.prices import TargetPrices
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.targets.target import LocalTarget
from flows.cli.results.inspect import open_run
from reports.document.html import LiveHeader, policy
from reports.render import render_page

_RECORD = re.compile(r"/(records/[0-9a-f]{4,64}/[A-Za-z0-9_.-]{1,100}\.(?:json|npz))")
_RECORD_BYTES = 256 * 2**20
_LEAST_SECONDS = 2.0
"""Between two renderings."""
_MAX_SHARE = 0.2
"""Of the time in which a run goes on, for renderings: of a large run one takes most of a minute of a core."""


class LivePage:
    """The page of a run, rendered again where the records have changed since. Safe to ask from several threads."""

    def __init__(self, run: RunPaths) -> None:
        self._run, self._lock = run, threading.Lock()
        self._version, self._page, self._made, self._took = "", b"", 0.0, 0.0

    def version(self) -> str:
        """Changes with each record."""
        records = list(self._run.records.glob("*/*.json"))
        newest = max((path.stat().st_mtime_ns for path in records if path.exists()), default=0)
        plan = self._run.plan.stat().st_mtime_ns
        return f"{len(records)}-{newest}-{plan}"

    def page(self) -> bytes:
        """The page of now; of a moment ago where it was just made."""
        with self._lock:
            version = self.version()
            if not self._page or (version != self._version and self._may_render()):
                began = time.monotonic()
                self._page = render_page(self._run, progress(self._run, version)).encode()
                self._version, self._made = version, time.monotonic()
                self._took = self._made - began
            return self._page

    def shown(self) -> str:
        """The version that a reader should have; the last one until a newer page may be made."""
        version = self.version()
        return version if self._may_render() else self._version

    def _may_render(self) -> bool:
        """Whether enough time went by since the last rendering; of a run that goes on it takes a small share."""
        from tasks.campaign.run_lock import is_locked

        paused = time.monotonic() - self._made
        busy = self._took * (1 / _MAX_SHARE - 1)
        return paused > _LEAST_SECONDS and (paused > busy or not is_locked(self._run))


def progress(run: RunPaths, version: str) -> LiveHeader:
    """How far a run is, and how long and at what price the rest may take, judged by the measurements so far."""
    from flows.cli.live import duration
    from flows.cli.results.inspect import status_rows
    from tasks.campaign.ledger import planned_repeats, read_ledger
    from tasks.campaign.run_lock import held_since

    _, plan = open_run(run.folder)
    ledger = read_ledger(run)
    rows = status_rows(run, plan, ledger)
    ended = [row for row in rows if row["finished_at"]]
    cancelled = sum(row["status"] == "cancelled" for row in ended)
    failed = sum(row["status"] != "completed" for row in ended) - cancelled
    running = sum(row["status"] == "running" for row in rows)
    text = f"{len(ended)} of {plural(len(rows), 'measurement')}, {failed} failed, {running} running" + (
        f", {cancelled} cancelled" if cancelled else ""
    )
    left = len(rows) - len(ended)
    if left and len(ended) > 1:
        seconds = _seconds_a_measurement(ended, held_since(run)) * left
        text += f"; about {duration(seconds)} to go"
        usd = _usd_to_go(run, plan, seconds, left / len(ended))
        text += f", about {dollars(usd)} USD" if usd else ""
    elif not left:
        untimed = Counter(place[1] for place in planned_repeats(plan) if ledger.decisive(place) is None)
        passes = ", ".join(f"{count} of the {name} pass" for name, count in untimed.items())
        text += f"; {passes} to go" if passes else "; complete"
    return LiveHeader(version, text + ".", len(ended), len(rows))


def _usd_to_go(run: RunPaths, plan: Plan, seconds: float, share: float) -> float | None:
    """What the rest costs; None with several targets or without a price.

    This machine is paid for as long as it takes, a cluster's nodes as long as jobs have them, several at a time.
    share: the measurements to go, of those that have ended.
    """
    from tasks.campaign.repeats import launched_usd

    if len(plan.targets) > 1:
        return None
    [target] = plan.targets
    price = plan.prices.get(target.name, TargetPrices()).price
    if price is None:
        return None
    if isinstance(target, LocalTarget):
        return seconds / 3600 * price.usd_per_hour
    return launched_usd(plan, run, {target.name}) * share


def _seconds_a_measurement(ended: list[dict[str, Any]], since: float | None) -> float:
    """By the run that goes on, where one has ended any; else from the first end to the last, without the pauses.

    since: when the run that goes on began. Time between two runs of a study is neither waited for nor paid for.
    """
    from reports.decisions.spending import PAUSE_SECONDS

    times = sorted((_moment(row["finished_at"]), _moment(row["started_at"] or row["finished_at"])) for row in ended)
    here = [finished for finished, _ in times if since is not None and finished > since]
    if since is not None and here:
        return (here[-1] - since) / len(here)
    seconds = 0.0
    for (before, _), (finished, started) in pairwise(times):
        idle = max(0.0, started - before)
        seconds += finished - before - (idle if idle > PAUSE_SECONDS else 0.0)
    return seconds / (len(times) - 1)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def live_server(run: RunPaths, port: int) -> ThreadingHTTPServer:
    """A server on loopback, not yet serving; port 0 takes any free one."""
    live = LivePage(run)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "rankwise", ""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "")
            if host not in {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}:  # type: ignore[attr-defined]
                return self._answer(HTTPStatus.FORBIDDEN, b"open the address that rankwise watch printed", "text/plain")
            try:
                self._serve(self.path.partition("?")[0])
            except ConnectionError:
                raise  # nobody is there to be answered
            except (OSError, ValueError) as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain")

        def _serve(self, path: str) -> None:
            record = _RECORD.fullmatch(path)
            if path == "/":
                self._answer(HTTPStatus.OK, live.page(), "text/html; charset=utf-8")
            elif path == "/version":
                self._answer(HTTPStatus.OK, live.shown().encode(), "text/plain")
            elif record:
                content = read_bytes(run.folder / record[1], _RECORD_BYTES)
                kind = "application/json" if path.endswith(".json") else "application/octet-stream"
                self._answer(HTTPStatus.OK, content, kind)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"no such page", "text/plain")

        def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
            self.send_response(status)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Content-Security-Policy": policy(live=True),
                "Cross-Origin-Resource-Policy": "same-origin",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: a request every two seconds is no news."""

    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    """Says nothing of a browser that has left before it was answered."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def serve_page(folder: Path, port: int) -> int:
    """Serve until Ctrl-C. Raises WrongArgument for a folder without a run, OSError naming a port in use."""
    run, _ = open_run(folder)
    try:
        server = live_server(run, port)
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror or error}") from error
    with server:
        print(f"Page       http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
