"""Rows of our server alone: `layout`, `prefix`, `invariant`, `limit`, and the bound that its engine sets.

tables, met = layout_row(files, folder, rounds)
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.inference.bench import run_shipped
from benchmarks.inference.rows import read_measured
from benchmarks.serving.cores import product_cores
from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender, whole_speed
from benchmarks.serving.servers import MeasuredServer, Variant, running
from benchmarks.serving.throughput import ratio_cell
from configs.load.job import Contents
from configs.load.objectives import RequestObjectives
from reports.load.metrics import scores_after_warm_up
from reports.load.search import FoundRate, RateSearch, SearchGoal
from reports.numbers.statistics import paired_ratio
from reports.text import Table, number

STUDY = Path(__file__).parents[1] / "studies" / "bench_serving_bound.yaml"
END_TO_END_BAR, STEPS_BAR, OVERHEAD_BAR, BOUND_BAR = 1.55, 1.75, 0.02, 0.75
PREFIX_REQUESTS = 64
PREFIX_BAR, INVARIANT_REQUESTS, COST_BAR = 8.0, 200, 0.15
SHARE, SEARCH_RUNS, SEARCH_SECONDS = 0.9, 16, 15.0
"""Of each search for the limit of the real server: bounds that 90 % of the requests meet, within so many runs. A run is
so long that a rate a tenth above what the server can do makes its requests wait for longer than the bound.
"""
_COMPUTE, _BETWEEN = "rankwise:compute_seconds_total", "rankwise:between_steps_seconds_total"
_TOKENS = "vllm:generation_tokens_total"


def bounds() -> dict[int, float]:
    """Tokens per second of the engine alone at 32 sequences, prompts included, by ranks."""
    with tempfile.TemporaryDirectory(prefix="rankwise-bound-") as runs:
        records = read_measured(run_shipped(STUDY, Path(runs), []))
    found: dict[int, list[float]] = {}
    for measured in records:
        cell = measured.cell
        seconds = np.asarray(measured.samples["0/pass_seconds"], dtype=np.float64)
        work: Any = cell.workload
        rate = work.batch_size * work.new_tokens / float(np.median(seconds))
        found.setdefault(cell.layout.tp, []).append(rate)
    return {ranks: float(np.median(rates)) for ranks, rates in found.items()}


def layout_row(files: ModelFiles, folder: Path, rounds: int) -> tuple[list[Table], bool]:
    """tp=2 against one rank at 32 users, time between steps, and the share of the engine's own speed."""
    alone = bounds()
    wanted = [Variant(f"tp={ranks}", "rankwise", ranks, ranks) for ranks in (1, 2)]
    speeds: dict[str, dict[int, float]] = {one.name: {} for one in wanted}
    steps: dict[str, dict[int, float]] = {one.name: {} for one in wanted}
    between: dict[str, list[float]] = {one.name: [] for one in wanted}
    products: dict[bool, dict[int, float]] = {False: {}, True: {}}
    sender = Sender(files)
    with running(wanted, files, None, folder / "logs") as servers, product_cores(files.folder) as cores:
        for server in servers.values():
            sender.send(server, 3.0, users=8)
        for turn in range(rounds):
            for in_step, gains in products.items():
                gains[turn] = cores.gain(in_step)
            for name, server in servers.items():
                before = _counters(server)
                speeds[name][turn] = whole_speed(sender.send_answers(server, users=32))
                compute, other, tokens = (now - then for now, then in zip(_counters(server), before, strict=True))
                steps[name][turn] = tokens / compute
                between[name].append(other / (other + compute))
                print(f"  round {turn} {name} {speeds[name][turn]:.0f} tokens/s, {between[name][-1]:.1%} between steps",
                      file=sys.stderr, flush=True)  # fmt: skip
    whole, engine = paired_ratio(speeds["tp=2"], speeds["tp=1"]), paired_ratio(steps["tp=2"], steps["tp=1"])
    assert whole is not None and engine is not None
    rows = [
        ("tp=2 against one rank, end to end", ratio_cell(whole), f"at least {END_TO_END_BAR}"),
        ("the same, the engine's steps alone", ratio_cell(engine), f"at least {STEPS_BAR}"),
        *_product_rows(products),
    ]
    met = whole.value >= END_TO_END_BAR and engine.value >= STEPS_BAR
    for ranks, name in ((1, "tp=1"), (2, "tp=2")):
        share = float(np.median(between[name]))
        speed = float(np.median(list(speeds[name].values())))
        met &= share <= OVERHEAD_BAR and speed >= BOUND_BAR * alone[ranks]
        rows.append((f"{name}: time between steps, %", number(share * 100), f"at most {OVERHEAD_BAR * 100:g}"))
        rows.append((f"{name}: tokens/s at 32 users", number(speed), ""))
        rows.append((f"{name}: tokens/s of the engine alone", number(alone[ranks]), ""))
        told = f"at least {BOUND_BAR * 100:g}"
        rows.append((f"{name}: server of engine alone, %", number(100 * speed / alone[ranks]), told))
    return [Table(("32 users, 64 in 64 out", "found", "bar"), tuple(rows))], met


def _product_rows(products: dict[bool, dict[int, float]]) -> Iterator[tuple[str, str, str]]:
    """What two processes without an engine gain in the same minutes: no bar, but the ceiling of those above."""
    names = {False: "the steps' products alone, apart", True: "the same, in step"}
    for in_step, gains in products.items():
        found = paired_ratio(gains, dict.fromkeys(gains, 1.0))
        assert found is not None
        yield names[in_step], ratio_cell(found), ""


def _counters(server: MeasuredServer) -> tuple[float, float, float]:
    return server.metric(_COMPUTE), server.metric(_BETWEEN), server.metric(_TOKENS)


def prefix_row(files: ModelFiles, folder: Path, rounds: int) -> tuple[list[Table], bool]:
    """Time to first token of 32 users whose prompts begin with the same 1,000 tokens."""
    wanted = [
        Variant("with the cache", "rankwise", 2, 2),
        Variant("without", "rankwise", 2, 2, ("--no-prefix-caching",)),
    ]
    contents = Contents(shared_prefix_tokens=1000, prompt_tokens=32, new_tokens=8, vocabulary=(10, 30_000), exact=True)
    found: dict[str, dict[int, float]] = {one.name: {} for one in wanted}
    sender = Sender(files)
    with running(wanted, files, None, folder / "logs") as servers:
        for turn in range(rounds):
            for name, server in servers.items():
                seed = 1000 + turn  # a prefix of its own, which one request computes before the users come
                sender.send(server, None, users=1, contents=contents, requests=1, seed=seed)
                run = sender.send(server, None, users=32, contents=contents, requests=PREFIX_REQUESTS, seed=seed)
                found[name][turn] = float(np.median(run.ttft_seconds[run.completed]))
                print(f"  round {turn} {name}: {found[name][turn] * 1000:.0f} ms", file=sys.stderr, flush=True)
    ratio = paired_ratio(found["without"], found["with the cache"])
    assert ratio is not None
    medians = {name: number(float(np.median(list(values.values()))) * 1000) for name, values in found.items()}
    rows = (
        *((f"TTFT {name}, ms, P50", value) for name, value in medians.items()),
        ("times shorter", ratio_cell(ratio)),
    )
    return [Table(("32 users, 1,000 shared tokens and 32 of their own", ""), rows)], ratio.value >= PREFIX_BAR


def invariant_row(files: ModelFiles, folder: Path, rounds: int) -> tuple[list[Table], bool]:
    """The same requests alone and in random company, bit by bit; and what the option costs."""
    wanted = [
        Variant("batch-invariant", "rankwise", 2, 2, ("--batch-invariant",)),
        Variant("default", "rankwise", 2, 2),
    ]
    speeds: dict[tuple[str, int], dict[int, float]] = {}
    sender = Sender(files)
    with running(wanted, files, None, folder / "logs") as servers:
        equal = _equal_bits(servers["batch-invariant"], files, INVARIANT_REQUESTS)
        for turn in range(rounds):
            for users in (1, 8, 32):
                for name, server in servers.items():
                    run = sender.send_answers(server, users=users)
                    speeds.setdefault((name, users), {})[turn] = whole_speed(run)
    rows = [("requests with equal bits alone and in company", f"{equal} of {INVARIANT_REQUESTS}")]
    met = equal == INVARIANT_REQUESTS
    for users in (1, 8, 32):
        ratio = paired_ratio(speeds["batch-invariant", users], speeds["default", users])
        assert ratio is not None
        met &= ratio.value >= 1 - COST_BAR
        rows.append((f"tokens/s at {users} users, of those without the option", ratio_cell(ratio)))
    return [Table(("--batch-invariant, tp=2", ""), tuple(rows))], met


def _equal_bits(server: MeasuredServer, files: ModelFiles, count: int) -> int:
    """Requests whose tokens and log-probabilities are the same alone and among up to 63 others of other lengths."""
    rng = random.Random(0)
    lines = files.prompts.read_text().splitlines()
    asked = [
        {
            "model": server.model,
            "prompt": " ".join(json.loads(line)["prompt"] for line in rng.sample(lines, rng.choice([1, 1, 2, 5]))),
            "max_tokens": rng.randint(2, 24),
            "ignore_eos": True,
            "temperature": rng.choice([0, 0.8]),
            "seed": number,
            "logprobs": 3,
            "return_token_ids": True,
        }
        for number in range(count)
    ]
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False, limits=limits) as client:

        def answer(body: dict[str, Any]) -> Any:
            told = client.post("/v1/completions", json=body).json()["choices"][0]
            return told["token_ids"], told["logprobs"]["token_logprobs"], told["logprobs"]["top_logprobs"]

        alone = [answer(body) for body in asked]
        order = rng.sample(range(count), count)
        with ThreadPoolExecutor(64) as pool:
            again = dict(zip(order, pool.map(lambda one: answer(asked[one]), order), strict=True))
    return sum(alone[one] == again[one] for one in range(count))


def limit_row(files: ModelFiles, folder: Path, searches: int = 5) -> tuple[list[Table], bool]:
    """The highest rate under objectives, found so many times on one real server: do the intervals overlap?"""
    objectives = RequestObjectives(ttft_seconds=1.0, tpot_seconds=0.1)
    found: list[FoundRate] = []
    sender = Sender(files, new_tokens=16)
    with running([Variant("rankwise", "rankwise", 2, 2)], files, None, folder / "logs") as servers:
        server = servers["rankwise"]
        for turn in range(searches):
            search = RateSearch(SearchGoal(share=SHARE, first_rate=10.0, max_rate=200.0, max_runs=SEARCH_RUNS))
            while (rate := search.next_rate()) is not None:
                run = sender.send(server, SEARCH_SECONDS, rate=rate)
                search.add(rate, scores_after_warm_up(run, objectives))
            found.append(search.result())
            _print_search(turn, found[-1])
    pairs = [(one, other) for place, one in enumerate(found) for other in found[place + 1 :]]
    overlap = sum(_overlap(one, other) for one, other in pairs)
    rows = tuple(
        (str(turn), *(number(value) if value is not None else "-" for value in (one.estimate, one.low, one.high)))
        for turn, one in enumerate(found)
    )
    print(f"intervals that overlap: {overlap} of {len(pairs)} pairs")
    return [Table(("search", "requests/s", "from", "to"), rows)], overlap == len(pairs)


def _print_search(turn: int, found: FoundRate) -> None:
    said = {True: "passes", False: "fails", None: "undecided"}
    probes = ", ".join(
        f"{probe.rate:.3g} {said[probe.passes]} ({len(probe.runs)} runs, {probe.quantile:.2f} of the bound)"
        for probe in found.probes
    )
    print(f"  search {turn}: {found.estimate}; {found.reason}: {probes}", file=sys.stderr, flush=True)


def _overlap(one: FoundRate, other: FoundRate) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high
