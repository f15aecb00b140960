"""Row `clients`: the openai client, aiperf and guidellm, unmodified, beside our generator at the same load.

Our definitions: TPOT is (last token - first token) / (tokens - 1) of each answer; the time between tokens is every gap.
aiperf calls our TPOT `inter_token_latency`, guidellm `inter_token_latency_ms`; guidellm's `time_per_output_token_ms`
is the whole time of a request over all its tokens, the first one included.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import openai

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender
from benchmarks.serving.servers import MeasuredServer, Variant, running
from configs.common.arrays import Floats
from configs.load.job import Contents
from reports.text import Table, number

USERS, REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 4, 60, 64, 32
WITHIN = 0.15
Found = dict[str, float | None]
_TIMEOUT_SECONDS = 240


def clients_row(files: ModelFiles, folder: Path, given: dict[str, Path]) -> tuple[list[Table], bool]:
    """Each client's P50 beside ours, which is measured before and after. given: commands of aiperf and guidellm."""
    with running([Variant("rankwise", "rankwise", 2, 2)], files, None, folder / "logs") as servers:
        server = servers["rankwise"]
        sender = Sender(files, new_tokens=NEW_TOKENS)
        ours = [_ours(sender, server)]
        answered = _openai(server, files)
        others: dict[str, Found] = {}
        for name, program in given.items():
            others[name] = _CLIENTS[name](program, server, files, folder)
            ours.append(_ours(sender, server))
    names = ("ttft", "tpot", "itl", "tpot_with_first")
    rows, met = [], answered and len(others) == len(_CLIENTS)
    for name in names:
        values = [one[name] for one in ours if one[name] is not None]
        middle = median(value for value in values if value is not None)
        cells = [number(middle * 1000), f"{number(min(values) * 1000)} to {number(max(values) * 1000)}"]  # type: ignore[type-var, operator]
        for found in others.values():
            value = found.get(name)
            cells.append("-" if value is None else number(value * 1000))
            met &= value is None or abs(value / middle - 1) <= WITHIN
        rows.append((name.replace("_", " "), *cells))
    told = "listed, completed, streamed, and refused by name" if answered else "FAILS"
    print(f"openai {openai.__version__}: {told}")
    columns = (f"P50 at {USERS} users, ms", "ours", "range of our runs", *others)
    return [Table(columns, tuple(rows))], met


def _ours(sender: Sender, server: MeasuredServer) -> Found:
    contents = Contents(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, vocabulary=(300, 30_000), exact=True)
    run = sender.send(server, None, users=USERS, contents=contents, requests=REQUESTS)
    due = run.completed

    def middle(values: Floats) -> float:
        return float(np.median(values))

    return {
        "ttft": middle(run.ttft_seconds[due]),
        "tpot": middle(run.tpot_seconds[due]),
        "itl": middle(run.gap_seconds[due[run.gap_request]]),
        "tpot_with_first": middle(run.tpot_with_first_seconds[due]),
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
    return {"ttft": _p50(told, "time_to_first_token"), "tpot": _p50(told, "inter_token_latency")}


def _p50(told: dict[str, Any], name: str) -> float:
    return float(told[name]["p50"]) / 1000


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

    def middle(name: str) -> float:
        return float(metrics[name]["successful"]["median"]) / 1000

    return {
        "ttft": middle("time_to_first_token_ms"),
        "tpot": middle("inter_token_latency_ms"),
        "tpot_with_first": middle("time_per_output_token_ms"),
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
