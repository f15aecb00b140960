"""Rows `kills`, `hostile` and `memory`: what a server bears, on the shipped tiny model with two ranks.

table, met = kills(server)
"""

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving import hostile
from benchmarks.serving.model import ModelFiles
from benchmarks.serving.servers import START_SECONDS, MeasuredServer, Variant, start
from reports.text import Table, number

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-stdlib"
KILLS, BACK_SECONDS = 20, 15.0
REQUESTS, HANG_SECONDS = 10_000, 120.0
FLAT = 0.05
_USERS = 8
_WARM_SHARE = 0.3
"""Of the requests of the row `memory`, before its first look: caches and allocators grow until they are full."""


@contextmanager
def tiny_server(folder: Path, *options: str, ranks: int = 2) -> Iterator[MeasuredServer]:
    """A server of the tiny model."""
    variant = Variant("rankwise tiny", "rankwise", ranks, ranks, ("--max-length", "512", *options))
    server = start(variant, ModelFiles(TINY, TINY, None), None, folder)
    try:
        server.server.wait_until_ready(START_SECONDS)
        yield server
    finally:
        server.end()


def hostile_row(folder: Path) -> tuple[list[Table], bool]:
    """2,000 hostile requests, after which the server answers as before."""
    with tiny_server(folder) as server:
        before = _tokens(server, "def f(", 16)
        ranks = {process.pid for process in _ranks(server)}
        table, met = hostile.measure(server.url, server.model)
        same = _tokens(server, "def f(", 16) == before
        alive = ranks == {process.pid for process in _ranks(server)}
        print(f"the answer afterwards is {'the same' if same else 'another'}; "
              f"{'no rank ended' if alive else 'ranks ended'}")  # fmt: skip
    return [table], met and same and alive


def kills_row(folder: Path) -> tuple[list[Table], bool]:
    """Ranks killed under load: every answer right or an error, the server back in time."""
    with tiny_server(folder) as server:
        prompts = [f"def f{number}(" for number in range(_USERS)]
        expected = {prompt: _tokens(server, prompt, 150) for prompt in prompts}
        load = _Load(server, expected)
        load.begin()
        back = []
        rng = random.Random(0)
        for _ in range(KILLS):
            time.sleep(rng.uniform(1.0, 3.0))
            pids = {process.pid for process in _ranks(server)}
            began = time.monotonic()
            psutil.Process(rng.choice(sorted(pids))).kill()
            back.append(_seconds_until_back(server, pids, began))
            print(f"  kill {len(back)}: back after {back[-1]:.1f} s, {dict(load.counts)}", file=sys.stderr, flush=True)
        time.sleep(2.0)
        hung = load.end()
    counts = load.counts
    rows = (
        ("kills", str(KILLS)),
        ("longest until /readyz said 200 again, s", number(max(back))),
        ("median, s", number(sorted(back)[len(back) // 2])),
        ("answers that were right", str(counts["right"])),
        ("answers that were wrong", str(counts["wrong"])),
        ("answered with an error", str(counts["error"])),
        ("requests that hung", str(hung + counts["hung"])),
    )
    met = max(back) <= BACK_SECONDS and not counts["wrong"] and not hung and not counts["hung"] and counts["right"] > 0
    return [Table(("kills of a rank under load", ""), rows)], met


def memory_row(folder: Path) -> tuple[list[Table], bool]:
    """10,000 requests of mixed lengths, a fifth of whose clients hang up."""
    with tiny_server(folder, "--kv-cache-gib", "0.02") as server:
        looks: list[tuple[int, float]] = []
        done = 0
        with (
            httpx.Client(base_url=server.url, timeout=HANG_SECONDS, trust_env=False) as client,
            ThreadPoolExecutor(16) as pool,
        ):
            for share in (_WARM_SHARE, 0.65, 1.0):
                until = int(share * REQUESTS)
                outcomes = Counter(pool.map(lambda one: _mixed(client, server.model, one), range(done, until)))
                done = until
                time.sleep(1.0)
                looks.append((done, sum(_own_bytes(process) for process in server.processes()) / 2**20))
                print(f"  {done} requests: {looks[-1][1]:.0f} MiB, {dict(outcomes)}", flush=True)
        used = server.metric("vllm:kv_cache_usage_perc")
        running = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
    growth = looks[-1][1] / looks[0][1] - 1
    rows = (
        *((f"memory after {count} requests, MiB", number(mib)) for count, mib in looks),
        ("growth after the first look, %", number(growth * 100)),
        ("share of the cache in use at the end, %", number(used * 100)),
        ("requests in progress at the end", number(running)),
    )
    return [Table((f"{REQUESTS} requests", ""), rows)], abs(growth) <= FLAT and used == 0 and running == 0


def _own_bytes(process: psutil.Process) -> int:
    """Memory of a process, what it shares counted in part."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _mixed(client: httpx.Client, model: str, seed: int) -> str:
    """Send a request of this number: of any length, streamed or not, some cut off by the client."""
    rng = random.Random(seed)
    prompt = "".join(rng.choice("abcdefgh =(){}\n") for _ in range(int(rng.lognormvariate(4, 0.8)) + 1))[:300]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": min(120, int(rng.lognormvariate(2, 0.8)) + 1),
        "temperature": rng.choice([0, 0, 1]),
        "stream": rng.random() < 0.6,
    }
    hang_up = rng.random() < 0.2
    try:
        if not hang_up:
            return str(client.post("/v1/completions", json=body).status_code)
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 120}) as stream:
            for _ in stream.iter_lines():
                if rng.random() < 0.3:
                    break
        return "hung up"
    except httpx.HTTPError as error:
        return type(error).__name__


def _tokens(server: MeasuredServer, prompt: str, count: int) -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=HANG_SECONDS, trust_env=False
    )
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def _ranks(server: MeasuredServer) -> list[psutil.Process]:
    found = []
    for process in server.processes():
        try:
            if "engine.serving.rank" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def _seconds_until_back(server: MeasuredServer, before: set[int], began: float) -> float:
    """Wait until ranks that are all new take requests; HANG_SECONDS where they never do."""
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        while (waited := time.monotonic() - began) < HANG_SECONDS:
            now = {process.pid for process in _ranks(server)}
            if now and not now & before and client.get("/readyz").status_code == 200:
                return waited
            time.sleep(0.05)
    return HANG_SECONDS


class _Load:
    """Users who ask for answers that are known, half of them streamed, until the end."""

    def __init__(self, server: MeasuredServer, expected: dict[str, list[int]]) -> None:
        self.counts: Counter[str] = Counter()
        self._server, self._expected = server, expected
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._user, args=(place, prompt), daemon=True)
            for place, prompt in enumerate(expected)
        ]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> int:
        """Return how many users still wait."""
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        return sum(thread.is_alive() for thread in self._threads)

    def _user(self, place: int, prompt: str) -> None:
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": 150, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True, "stream": place % 2 == 1}
        with httpx.Client(base_url=self._server.url, timeout=HANG_SECONDS, trust_env=False) as client:
            while not self._stop.is_set():
                outcome = self._asked(client, body, self._expected[prompt])
                self.counts[outcome] += 1
                if outcome == "error":
                    time.sleep(0.2)

    def _asked(self, client: httpx.Client, body: dict[str, Any], expected: list[int]) -> str:
        try:
            if not body["stream"]:
                answer = client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    return "error"
                return "right" if answer.json()["choices"][0]["token_ids"] == expected else "wrong"
            tokens: list[int] = []
            with client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code != 200:
                    return "error"
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return "error" if tokens == expected[: len(tokens)] else "wrong"
                        tokens += event["choices"][0]["token_ids"]
            return "right" if tokens == expected else "wrong"
        except httpx.TimeoutException:
            return "hung"
        except httpx.HTTPError:
            return "error"
