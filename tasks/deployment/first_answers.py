"""Send a server the requests whose answers are known, and say what is wrong with its answers.

    problem = first_answers(url, key, bundle)            # None: they are right
    timed_answers(url, key, bundle, seconds=3.0)         # latency and throughput as one user sees them

Greedy tokens must be equal up to the first tie: where the known answer's logit leads by less than TIES, another order
of summation may choose the other token, and what follows is not comparable. Vectors must have the same direction.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import httpx

from configs.common.execution import Dtype
from configs.common.printable import printable
from configs.common.secrets import excerpt
from configs.serving.deployment import FirstRequest, ServingBundle

TIES: dict[Dtype, float] = {"float32": 1e-5, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Shares of a logit: some units in the last place of a number of that type (24, 11 and 8 bits)."""
MIN_COSINE = 0.999
_REQUEST_SECONDS, _REQUEST_TIMEOUTS = 120.0, 6
"""How long an answer is waited for; where ranks may wait for each other for longer, six times as long as they may."""


@dataclass(frozen=True)
class Timing:
    """As one user sees it: median seconds of a request, and tokens or embeddings a second."""

    seconds: float
    per_second: float
    unit: str
    requests: int


def first_answers(url: str, key: str | None, bundle: ServingBundle) -> str | None:
    """Return what is wrong with a server's first answers; None: nothing. Raises httpx.HTTPError."""
    compared = 0
    with _client(url, key) as client:
        for request in bundle.first_requests:
            answer = _send(client, bundle, request)
            if answer.status_code != 200:
                return f"status {answer.status_code}: {excerpt(answer.text, 200)}"
            try:
                count, problem = _compare(request, answer.json(), TIES[bundle.dtype])
            except (ValueError, LookupError, TypeError):
                return f"not an answer of the API: {printable(excerpt(answer.text, 200))}"
            if problem is not None:
                return problem
            compared += count
    if not bundle.first_requests:
        return "the bundle has no answers to compare with"
    return None if compared else "no answer could be compared: every known answer begins with a tie"


def timed_answers(url: str, key: str | None, bundle: ServingBundle, seconds: float) -> Timing:
    """Send the first requests one after the other. Raises httpx.HTTPError, ValueError for a refusal."""
    taken: list[float] = []
    units = 0
    began = time.perf_counter()
    with _client(url, key) as client:
        while not taken or time.perf_counter() - began < seconds:
            request = bundle.first_requests[len(taken) % len(bundle.first_requests)]
            sent = time.perf_counter()
            answer = _send(client, bundle, request)
            if answer.status_code != 200:
                raise ValueError(f"{url}: status {answer.status_code}: {excerpt(answer.text, 200)}")
            taken.append(time.perf_counter() - sent)
            units += len(request.tokens) or 1
    whole = time.perf_counter() - began
    unit = "embeddings/s" if bundle.kind == "encoder" else "tokens/s"
    return Timing(sorted(taken)[len(taken) // 2], units / whole, unit, len(taken))


def _client(url: str, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, trust_env=False)


def _send(client: httpx.Client, bundle: ServingBundle, request: FirstRequest) -> httpx.Response:
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    seconds = max(_REQUEST_SECONDS, _REQUEST_TIMEOUTS * bundle.group_timeout_seconds)
    if bundle.kind == "encoder":
        return client.post("/v1/embeddings", json={"model": bundle.model, "input": prompt}, timeout=seconds)
    body: dict[str, object] = {"model": bundle.model, "prompt": prompt, "max_tokens": len(request.tokens)}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return client.post("/v1/completions", json=body, timeout=seconds)


def _compare(request: FirstRequest, answer: dict[str, Any], tie: float) -> tuple[int, str | None]:
    """Return how many tokens or vectors were compared, and what differs."""
    if request.vector:
        found = answer["data"][0]["embedding"]
        cosine = _cosine(request.vector, found)
        return 1, None if cosine >= MIN_COSINE else f"an embedding differs: cosine {cosine:.4f}, expected 1"
    tokens = answer["choices"][0]["token_ids"]
    for place, (known, gap) in enumerate(zip(request.tokens, request.gaps, strict=True)):
        if gap < tie:
            return place, None
        if place >= len(tokens) or tokens[place] != known:
            got = tokens[place] if place < len(tokens) else "nothing"
            return place, f"token {place} of an answer differs: got {got}, expected {known}"
    return len(request.tokens), None


def _cosine(known: tuple[float, ...], found: list[float]) -> float:
    if len(known) != len(found):
        return 0.0
    norm = math.sqrt(sum(x * x for x in known)) * math.sqrt(sum(x * x for x in found))
    return sum(x * y for x, y in zip(known, found, strict=True)) / norm if norm > 0 else 0.0
