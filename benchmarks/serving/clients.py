"""Row `clients`: openai, aiperf and guidellm, unmodified, and our generator, each beside the server's counters.

Our definitions: TPOT is (last token - first token) / (tokens - 1) of each answer; the time between tokens is every gap.
aiperf calls our TPOT `inter_token_latency`, guidellm `inter_token_latency_ms`; guidellm's `time_per_output_token_ms`
is the whole time of a request over all its tokens, the first one included.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import openai

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender
from benchmarks.serving.servers import MeasuredServer, Variant, running
from configs.common.arrays import Floats
from configs.load.job import Contents
from reports.text import Table, number

USERS, REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 4, 60, 64, 32
WITHIN = 0.1
_COUNTERS = (
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
)
Found = dict[str, float]
_TIMEOUT_SECONDS = 240


def clients_row(files: ModelFiles, folder: Path, given: dict[str, Path]) -> tuple[list[Table], bool]:
    """Each client's figures, and beside its means those that the server has of the same requests.

    given: commands of aiperf and guidellm. A client takes CPU from a server on the same cores, each another share, so
    medians of separate runs differ; what the server saw of a client's run is what that client should report.
    """
    with running([Variant("rankwise", "rankwise", 2, 2)], files, None, folder / "logs") as servers:
        server = servers["rankwise"]
        sender = Sender(files, new_tokens=NEW_TOKENS)
        answered = _openai(server, files)
        sender.send(server, 3.0, users=USERS)
        seen = {"ours": _beside_server(server, lambda: _ours(sender, server))}
        for name, program in given.items():
            client = partial(_CLIENTS[name], program, server, files, folder)
            seen[name] = _beside_server(server, client)
    told = "listed, completed, streamed, and refused by name" if answered else "FAILS"
    print(f"openai {openai.__version__}: {told}")
    ratios = [one.ratios() for one in seen.values()]
    met = answered and len(seen) == 1 + len(_CLIENTS)
    met &= all(abs(ratio - 1) <= WITHIN for found in ratios for ratio in found.values())
    return [_means_table(seen), _medians_table(seen)], met


@dataclass(frozen=True)
class SeenRun:
    """What a client reports of a run in seconds, and what the server's counters say of the same requests."""

    client: Found
    server_ttft: float
    server_gap: float

    def ratios(self) -> dict[str, float]:
        """The client's mean times over the server's."""
        pairs = {"mean_ttft": self.server_ttft, "mean_tpot": self.server_gap}
        return {name: told / seen for name, seen in pairs.items() if (told := self.client.get(name)) is not None}


def _beside_server(server: MeasuredServer, client: Callable[[], Found]) -> SeenRun:
    before = {name: server.metric(name) for name in _COUNTERS}
    found = client()
    ttft, firsts, gap, gaps = (server.metric(name) - before[name] for name in _COUNTERS)
    return SeenRun(found, ttft / firsts, gap / gaps)


def _means_table(seen: dict[str, SeenRun]) -> Table:
    rows = []
    for name, run in seen.items():
        ratios = run.ratios()
        for figure, server in (("mean_ttft", run.server_ttft), ("mean_tpot", run.server_gap)):
            value = run.client.get(figure)
            if value is not None:
                cells = (number(value * 1000), number(server * 1000), f"{ratios[figure]:.3f}")
                rows.append((name, figure.removeprefix("mean_").upper(), *cells))
    columns = (f"means at {USERS} users, ms", "figure", "the client's", "the server's, same requests", "ratio")
    return Table(columns, tuple(rows))


def _medians_table(seen: dict[str, SeenRun]) -> Table:
    """Both definitions of TPOT, as each client has them, in runs one after the other."""
    rows = []
    for figure, shown in (
        ("ttft", "TTFT"),
        ("tpot", "TPOT, first token left out"),
        ("tpot_with_first", "TPOT with it"),
    ):
        values = [run.client.get(figure) for run in seen.values()]
        rows.append((shown, *("-" if value is None else number(value * 1000) for value in values)))
    return Table((f"P50 at {USERS} users, ms", *seen), tuple(rows))


def _ours(sender: Sender, server: MeasuredServer) -> Found:
    contents = Contents(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, vocabulary=(300, 30_000), exact=True)
    run = sender.send(server, None, users=USERS, contents=contents, requests=REQUESTS)
    due = run.completed

    def middle(values: Floats) -> float:
        return float(np.median(values))

    return {
        "ttft": middle(run.ttft_seconds[due]),
        "tpot": middle(run.tpot_seconds[due]),
        "tpot_with_first": middle(run.tpot_with_first_seconds[due]),
        "mean_ttft": float(np.mean(run.ttft_seconds[due])),
        "mean_tpot": float(np.mean(run.tpot_seconds[due])),
    }


def _openai(server: MeasuredServer, files: ModelFiles) -> bool:
    """Use the openai client as a program would: list, complete, stream, be refused."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    prompt = json.loads(files.prompts.read_text().splitlines()[0])["prompt"]
    listed = [one.id for one in client.models.list()]
    whole = client.completions.create(model=server.model, prompt=prompt, max_tokens=16, temperature=0)
    stream = client.completions.create(model=server.model, prompt=prompt, max_tokens=16, temperature=0, stream=True)
    text = "".join(event.choices[0].text for event in stream)
    try:
        client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "x"}])
        refused = False
    except openai.BadRequestError as error:
        refused = "chat template" in str(error)
    usage = whole.usage
    return (
        listed == [server.model]
        and text == whole.choices[0].text
        and refused
        and usage is not None
        and (usage.completion_tokens == 16)
    )


def _aiperf(program: Path, server: MeasuredServer, files: ModelFiles, folder: Path) -> Found:
    out = folder / "aiperf"
    _run([
        str(program), "profile", "--model", server.model, "--url", server.url, "--endpoint-type", "completions",
        "--streaming", "--tokenizer", str(files.folder), "--concurrency", str(USERS), "--request-count", str(REQUESTS),
        "--isl", str(PROMPT_TOKENS), "--osl", str(NEW_TOKENS), "--ui", "none", "--artifact-dir", str(out),
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{NEW_TOKENS}",
    ], folder / "aiperf.log")  # fmt: skip
    file = next(out.rglob("profile_export_aiperf.json"))
    told = json.loads(file.read_text())

    def seconds(name: str, of: str) -> float:
        return float(told[name][of]) / 1000

    return {
        "ttft": seconds("time_to_first_token", "p50"),
        "tpot": seconds("inter_token_latency", "p50"),
        "mean_ttft": seconds("time_to_first_token", "avg"),
        "mean_tpot": seconds("inter_token_latency", "avg"),
    }


def _guidellm(program: Path, server: MeasuredServer, files: ModelFiles, folder: Path) -> Found:
    out = folder / "guidellm.json"
    _run([
        str(program), "run",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={USERS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={files.folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "--output", f"kind=json,path={out}", "--disable-console-interactive",
    ], folder / "guidellm.log")  # fmt: skip
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def seconds(name: str, of: str = "median") -> float:
        return float(metrics[name]["successful"][of]) / 1000

    return {
        "ttft": seconds("time_to_first_token_ms"),
        "tpot": seconds("inter_token_latency_ms"),
        "tpot_with_first": seconds("time_per_output_token_ms"),
        "mean_ttft": seconds("time_to_first_token_ms", "mean"),
        "mean_tpot": seconds("inter_token_latency_ms", "mean"),
    }


_CLIENTS: dict[str, Callable[[Path, MeasuredServer, ModelFiles, Path], Found]] = {
    "aiperf": _aiperf,
    "guidellm": _guidellm,
}


def _run(command: list[str], log: Path) -> None:
    """Run a client. Raises RuntimeError where it fails."""
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        print(log.read_text()[-1500:], file=sys.stderr)
        raise RuntimeError(f"{command[0]}: ended with exit code {done.returncode}; see {log}")
