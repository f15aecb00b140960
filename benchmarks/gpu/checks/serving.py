"""Our server on the device under load, beside the engine's own decode rate for as many sequences in the same minute.

The server is the one that `rankwise serve` starts, with its HTTP process and its scheduler; the load generator is that
of `load` experiments, on other cores of the same machine. Prompts of 64 tokens, answers of 64, closed loop.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.checks.decode import decode_seconds
from benchmarks.gpu.shapes import one_shard, random_tensors, training_model
from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.load.arrivals import ClosedLoop
from configs.load.job import Contents, Endpoint, LoadJob
from configs.load.samples import JOB_FILE
from engine.models.weights import write_weights
from engine.workloads.servers.watching import read_metrics
from reports.load.metrics import tokens_within
from reports.load.samples import LoadRun, read_load_run
from reports.load.steady import Window
from tasks.serving.process import ServerProcess
from tasks.serving.settings import ServerRequest, make_settings

TOKENS, USERS = 64, (1, 8, 32)
_MAX_LENGTH = 4 * TOKENS
_LEAST_SHARE, _MOST_BETWEEN = 0.75, 0.02
_RAMP_SHARE = 0.25  # of a run, not counted: its users all begin together
_DRAWN: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "fields": {"top_p": 0.9}},
    "presence_penalty": {"temperature": 1.0, "fields": {"presence_penalty": 0.5}},
}
"""What is not greedy; the last is chosen on the host."""
_COMPUTE, _BETWEEN = "rankwise:compute_seconds_total", "rankwise:between_steps_seconds_total"


def run(bench: Bench) -> None:
    """Report the engine's rate, then the server's for each number of users, and answers alone and in company."""
    config = training_model(bench)
    users = (1, 2) if bench.rehearsal else USERS
    alone = _engine(bench, config, users[-1])
    folder = bench.folder / "model"
    tensors = {name: tensor.cpu() for name, tensor in random_tensors(bench, ModelConfig.parse(config), torch.bfloat16)}
    write_weights(tensors, config, folder, torch.bfloat16)
    tensors.clear()
    free_memory(bench.device)
    asked = ServerRequest(
        model=str(folder),
        layout=Layout(),
        device=None if bench.device.type == "cuda" else "cpu",
        cores_per_rank=1,
        name="model",
        port=0,
        max_length=_MAX_LENGTH,
        max_sequences=users[-1],
        kv_cache_gib=0.05 if bench.rehearsal else 8.0,
    )
    own = bench.folder / "server"
    own.mkdir()
    began = time.perf_counter()
    with ServerProcess(make_settings(asked, own, bench.folder / "cache", Path.cwd()), api_key=None) as server:
        url = str(server.wait_until_ready()["url"])
        bench.seen("from start to ready", time.perf_counter() - began, "s")
        bench.attempt("answers", partial(_answers, bench, url, users[-1], config["vocab_size"]))
        for count in users:
            bench.attempt(f"{count} users", partial(_load, bench, url, count, config["vocab_size"], alone, users[-1]))
        for name, fields in _DRAWN.items():
            bench.attempt(name, partial(_drawn, bench, url, users[-1], config["vocab_size"], name, fields))


def _engine(bench: Bench, config: dict[str, object], sequences: int) -> float:
    """Report and return tokens per second of decoding alone, with the positions that a request has on average."""
    shard = one_shard(bench, config, torch.bfloat16)
    cache = shard.new_cache(sequences, _MAX_LENGTH)
    seconds = decode_seconds(bench, shard, cache, sequences, TOKENS, 5)
    return bench.figure(
        f"the engine's decode of {sequences} sequences", [sequences / one for one in seconds], "tokens/s"
    )


def _load(bench: Bench, url: str, users: int, vocabulary: int, alone: float, most: int) -> None:
    before = _times(url)
    name = f"{users} users"
    run = _sent(bench, url, users, vocabulary, name)
    compute, between = (now - then for now, then in zip(_times(url), before, strict=True))
    speed = _speed(run)
    bench.seen(f"{name}: tokens/s", speed)
    bench.seen(f"{name}: TTFT, P50", float(np.median(run.ttft_seconds[run.completed])) * 1e3, "ms")
    bench.figure(f"{name}: time between steps", [between / (between + compute)], "", _MOST_BETWEEN, "at most", "share")
    if users == most:
        bench.figure(f"{name}: tokens/s of the engine's decode alone", [speed / alone], bar=_LEAST_SHARE)


def _drawn(bench: Bench, url: str, users: int, vocabulary: int, name: str, fields: dict[str, Any]) -> None:
    name = f"{users} users, {name}"
    bench.seen(f"{name}: tokens/s", _speed(_sent(bench, url, users, vocabulary, name, **fields)))


def _speed(run: LoadRun) -> float:
    window = Window(_RAMP_SHARE * run.facts.issuing_seconds, run.facts.issuing_seconds, None, "a fixed share")
    return tokens_within(run, window) / window.seconds


def _sent(bench: Bench, url: str, users: int, vocabulary: int, name: str, **fields: Any) -> LoadRun:
    folder = bench.folder / f"load-{name.replace(' ', '-').replace(',', '')}"
    folder.mkdir()
    contents = Contents(prompt_tokens=TOKENS, new_tokens=TOKENS, vocabulary=(10, vocabulary), exact=True, **fields)
    job = LoadJob(
        endpoint=Endpoint(url=url, model="model"),
        arrivals=ClosedLoop(users=users),
        contents=contents,
        duration_seconds=2.0 if bench.rehearsal else 4.0,
    )
    (folder / JOB_FILE).write_text(job.model_dump_json())
    subprocess.run([sys.executable, "-m", "engine.load", str(folder / JOB_FILE), str(folder)], check=True)
    return read_load_run(folder)


def _answers(bench: Bench, url: str, company: int, vocabulary: int) -> None:
    """Report the share of greedy answers that are the same alone and in company."""
    random = np.random.default_rng(0)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        prompts = [random.integers(10, vocabulary, 24).tolist() for _ in range(company)]

        def ask(prompt: list[int]) -> list[int]:
            body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            told = client.post("/v1/completions", json=body | {"return_token_ids": True})
            told.raise_for_status()
            tokens: list[int] = told.json()["choices"][0]["token_ids"]
            return tokens

        single = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(company) as pool:
            together = list(pool.map(ask, prompts))
    same = sum(one == other for one, other in zip(single, together, strict=True)) / company
    first = sum(one[0] == other[0] for one, other in zip(single, together, strict=True)) / company
    bench.seen("answers that are the same alone and in company", same, note=f"first tokens: {first:g}")


def _times(url: str) -> tuple[float, float]:
    found = read_metrics(httpx.get(f"{url}/metrics", trust_env=False).content)
    return found[_COMPUTE], found[_BETWEEN]
