"""A real server of a small trained model: what it answers, alone and in company, and what it refuses."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from benchmarks.serving.hostile import ask, faults_of, hostile_request
from tests.support.servers.inference_server import TINY, RunningServer, running_server

PROMPTS = ["def main():\n", "import os\n", "class Node:\n    def __init__(self", "for " * 150, "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("served"), max_body_bytes=200_000, body_seconds=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> dict[str, list[int]]:
    """Greedy answers of unmodified transformers."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        found[prompt] = tokens[0, ids.shape[1] :].tolist()
    return found


def test_answers_are_those_of_transformers(server: RunningServer, reference: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        assert server.tokens(prompt=prompt, max_tokens=24, ignore_eos=True)[:24] == reference[prompt][:24]


def test_company_changes_no_bit_of_an_answer(server: RunningServer) -> None:
    """Tokens and log-probabilities of seeded requests, alone and among others, with and without a cached beginning."""
    asked = [
        {"prompt": prompt, "max_tokens": 20, "temperature": 0.8, "seed": seed, "logprobs": 3, "return_token_ids": True}
        for seed, prompt in enumerate(PROMPTS * 4)
    ]
    asked += [{"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True} for prompt in PROMPTS]
    alone = [server.complete(**one)["choices"] for one in asked]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: server.complete(**one)["choices"], asked))
    assert together == alone
    assert len({tuple(one[0]["token_ids"]) for one in alone}) > 15
    assert server.metric("vllm:prefix_cache_hits_total") > 0
    assert server.about["replicas"][0]["batch_invariant"] is True


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(server: RunningServer) -> None:
    """As evaluation harnesses ask for them: of texts and ids, several at once, found in the cache or not."""
    from transformers import AutoModelForCausalLM

    from engine.prompts.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert max(map(len, prompts)) > 128, "one is computed in parts"
    answer = server.complete(prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234, ignore_eos=True)
    again = server.complete(prompt=PROMPTS, max_tokens=0, logprobs=1, echo=True)
    assert again["usage"]["completion_tokens"] == 0 and answer["usage"]["completion_tokens"] == len(PROMPTS)
    for ids, prompt, choice, only in zip(prompts, PROMPTS, answer["choices"], again["choices"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found = choice["logprobs"]
        assert choice["text"].startswith(prompt) and only["text"] == prompt
        assert only["logprobs"] == {name: values[: len(ids)] for name, values in found.items()}
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        wanted = expected[range(len(ids) - 1), ids[1:]].tolist()
        assert found["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)
        assert [max(top.values()) for top in found["top_logprobs"][1:]] == pytest.approx(
            expected.amax(-1).tolist(), abs=1e-4
        )
        whole = choice["text"]
        assert [whole[at:].startswith(text) for at, text in zip(found["text_offset"], found["tokens"], strict=True)]


def test_an_echoed_prompt_is_the_first_of_a_stream(server: RunningServer) -> None:
    for fields in ({}, {"logprobs": 2}, {"max_tokens": 0}, {"stop": ["zzzz"]}):
        asked: dict[str, Any] = {"prompt": PROMPTS[2], "max_tokens": 5, "echo": True, "ignore_eos": True, **fields}
        [whole] = server.complete(**asked)["choices"]
        events = server.events(**asked, stream_options={"include_usage": True})
        *parts, usage = events
        assert parts[0]["choices"][0]["text"].startswith(PROMPTS[2])
        assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"]
        assert usage["usage"]["completion_tokens"] == asked["max_tokens"]
        assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
        if "logprobs" in fields:
            for name, values in whole["logprobs"].items():
                assert [one for part in parts for one in part["choices"][0]["logprobs"][name]] == values
    server.wait_until_idle()


def test_a_stream_gives_the_same_as_a_whole_answer(server: RunningServer) -> None:
    whole = server.complete(prompt=PROMPTS[0], max_tokens=12, logprobs=2)
    events = server.events(prompt=PROMPTS[0], max_tokens=12, logprobs=2, stream_options={"include_usage": True})
    *steps, usage = events
    assert len(steps) == 12 == whole["usage"]["completion_tokens"]
    assert "".join(step["choices"][0]["text"] for step in steps) == whole["choices"][0]["text"]
    together = [step["choices"][0]["logprobs"]["token_logprobs"][0] for step in steps]
    assert together == whole["choices"][0]["logprobs"]["token_logprobs"]
    assert [step["choices"][0]["finish_reason"] for step in steps] == [None] * 11 + ["length"]
    assert usage["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


def test_a_stop_string_ends_the_answer_before_it(server: RunningServer) -> None:
    free = server.complete(prompt=PROMPTS[0], max_tokens=24)["choices"][0]["text"]
    stop = free[9:13]
    cut = server.complete(prompt=PROMPTS[0], max_tokens=24, stop=[stop])["choices"][0]
    assert cut["text"] == free[: free.index(stop)] and cut["finish_reason"] == "stop"
    streamed = server.events(prompt=PROMPTS[0], max_tokens=24, stop=[stop])
    assert "".join(one["choices"][0]["text"] for one in streamed) == cut["text"]
    server.wait_until_idle()


def test_stop_tokens_and_min_tokens(server: RunningServer) -> None:
    free = server.tokens(prompt=PROMPTS[1], max_tokens=16, ignore_eos=True)
    cut = server.complete(prompt=PROMPTS[1], max_tokens=16, stop_token_ids=[free[4]], return_token_ids=True)
    place = free.index(free[4])
    assert cut["choices"][0]["token_ids"] == free[: place + 1] and cut["choices"][0]["finish_reason"] == "stop"
    later = server.tokens(prompt=PROMPTS[1], max_tokens=16, stop_token_ids=[free[4]], min_tokens=place + 3)
    assert len(later) >= place + 3 and free[4] not in later[: place + 3]


def test_several_prompts_and_choices(server: RunningServer) -> None:
    answer = server.complete(prompt=PROMPTS[:3], n=2, max_tokens=6, temperature=1.0, seed=5, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]
    assert answer["usage"]["completion_tokens"] == 36
    one = server.complete(prompt=PROMPTS[1], n=2, max_tokens=6, temperature=1.0, seed=5, return_token_ids=True)
    assert [choice["token_ids"] for choice in one["choices"]] == [
        choice["token_ids"] for choice in answer["choices"][2:4]
    ]


def test_a_prompt_may_be_token_ids(server: RunningServer) -> None:
    assert server.tokens(prompt=[5, 6, 7], max_tokens=4) == server.tokens(prompt=[[5, 6, 7]], max_tokens=4)


def test_the_openai_client_works(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "system", "content": "Python"}, {"role": "user", "content": "loop"}]
        chat = client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        text = chat.choices[0].message.content
        assert text and chat.usage and chat.usage.completion_tokens == 8
        assert chat.choices[0].logprobs and len(chat.choices[0].logprobs.content or []) == 8
        prompt = "<s># system\nPython\n# user\nloop\n# assistant\n"
        rendered = server.complete(prompt=_ids_without_special(prompt), max_tokens=8)["choices"][0]["text"]
        assert text == rendered
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=8, temperature=0, stream=True
        )
        assert "".join(event.choices[0].delta.content or "" for event in stream) == text
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", suffix="y")
        assert refused.value.param == "suffix"


def _ids_without_special(text: str) -> list[int]:
    from engine.prompts.tokenizer import load_tokenizer

    return list(load_tokenizer(TINY / "tokenizer.json").encode(text, add_special_tokens=False).ids)


REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/v1/completions", {"prompt": "x", "max_toens": 3}, 400, "max_toens"),
    ("/v1/completions", {"prompt": "x", "echo": 1}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": False}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "0"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {"prompt": "x", "n": 100}, 400, "n"),
    ("/v1/completions", {"prompt": ["x"] * 17}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 512}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2**40}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "min_tokens": 30}, 400, "min_tokens"),
    ("/v1/completions", {"prompt": "x", "stop": ""}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"4096": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [4096]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a " * 5000}, 400, "max_tokens"),
    ("/v1/completions", {"max_tokens": 3}, 400, "prompt"),
    ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": []}, 400, "tools"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        400,
        "response_format",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/embeddings", {"input": "x"}, 404, None),
]


@pytest.mark.parametrize(("path", "fields", "status", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_supported_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = server.post(path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert error["message"] and error["type"] and (param is None or param in error["message"])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"a":' * 5000, b'{"model": NaN}', b"1" * 5000],
    ids=lambda body: str(body[:10]),
)
def test_bodies_that_are_no_requests(server: RunningServer, body: bytes) -> None:
    answer = server.client.post("/v1/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_bodies_that_are_large_or_slow(server: RunningServer) -> None:
    large = server.client.post("/v1/completions", content=b" " * 300_000)
    assert large.status_code == 413 and "200000" in large.json()["error"]["message"]
    hold = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b'{"model": "tiny", '
        hold.wait(3)

    slow = server.client.post("/v1/completions", content=slowly())
    hold.set()
    assert slow.status_code == 408
    assert server.tokens(prompt="x", max_tokens=2)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_frees_its_slot(server: RunningServer, streaming: bool) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": streaming}
    for _ in range(10):  # a busy machine may come to the client when all is computed
        server.wait_until_idle()
        before = server.metric("rankwise:steps_total")
        if streaming:
            with server.client.stream("POST", "/v1/completions", json=body) as stream:
                next(stream.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                # 500 tokens of this model take 0.3 s on a quiet machine.
                server.client.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))
        server.wait_until_idle()
        # Tokens that nobody waits for are not counted; the ranks' steps are. Each makes one token.
        if server.metric("rankwise:steps_total") - before < 499:
            return
    pytest.fail("each answer went on to its end")


def test_metrics_have_vllms_names(server: RunningServer) -> None:
    before = {name: server.metric(f"vllm:{name}_total") for name in ("prompt_tokens", "generation_tokens")}
    server.complete(prompt=[5] * 40, max_tokens=7, ignore_eos=True)
    assert server.metric("vllm:prompt_tokens_total") - before["prompt_tokens"] == 40
    assert server.metric("vllm:generation_tokens_total") - before["generation_tokens"] == 7
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert server.metric(f"vllm:{name}_count") > 0


@pytest.mark.parametrize(
    ("dp", "tp", "pp"),
    [
        pytest.param(1, 2, 1, id="tp2"),
        pytest.param(1, 1, 2, id="pp2", marks=pytest.mark.slow),
        pytest.param(2, 1, 1, id="dp2", marks=pytest.mark.slow),
    ],
)
def test_layouts_answer_alike(
    tmp_path: Path, server: RunningServer, reference: dict[str, list[int]], dp: int, tp: int, pp: int
) -> None:
    with running_server(tmp_path, dp, tp, pp) as other:
        assert len(other.ranks()) == dp * tp * pp
        with ThreadPoolExecutor(5) as pool:
            found = pool.map(lambda one: other.tokens(prompt=one, max_tokens=24, ignore_eos=True), PROMPTS)
            assert dict(zip(PROMPTS, found, strict=True)) == reference
        mixed = [
            {"prompt": prompt, "max_tokens": 8, "ignore_eos": True} | fields
            for prompt in PROMPTS
            for fields in ({}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0, "logprobs": 1})
        ]
        with ThreadPoolExecutor(len(mixed)) as pool:
            assert list(pool.map(lambda one: other.tokens(**one), mixed)) == [server.tokens(**one) for one in mixed]
        scoring = {"prompt": PROMPTS, "max_tokens": 1, "logprobs": 1, "echo": True}
        for scored, alike in zip(*(one.complete(**scoring)["choices"] for one in (server, other)), strict=True):
            ours, theirs = (one["logprobs"]["token_logprobs"] for one in (scored, alike))
            assert theirs[0] is None and theirs[1:] == pytest.approx(ours[1:], abs=1e-4)
        if dp == 2:
            used = [
                line for line in other.client.get("/metrics").text.splitlines() if line.startswith("rankwise:steps")
            ]
            assert all(float(line.rsplit(" ", 1)[1]) > 0 for line in used if "_total" in line) and len(used) >= 2


@pytest.mark.slow
def test_a_small_cache_preempts_and_answers_the_same(tmp_path: Path, server: RunningServer) -> None:
    """Room for one sequence at its longest, and eight that want it."""
    prompts = [f"{word} = " for word in ("a", "bb", "c3", "dd", "e", "f0", "g", "h")]
    fields: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    alone = [server.tokens(prompt=prompt, **fields) for prompt in prompts]
    with running_server(tmp_path, kv_cache_gib=0.0022, max_length=256) as small, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda one: small.tokens(prompt=one, **fields), prompts))
        assert small.metric("vllm:num_preemptions_total") > 0
        small.wait_until_idle()
    assert together == alone


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a token, one slot and room for one more request."""
    folder = tmp_path_factory.mktemp("guarded")
    with running_server(folder, key="a-long-secret", max_sequences=1, max_queue=1) as running:
        yield running


def test_a_full_queue_is_answered_429(guarded: RunningServer) -> None:
    with ThreadPoolExecutor(6) as pool:
        fields: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        asked = [pool.submit(guarded.post, **fields) for _ in range(6)]
        answers = [one.result() for one in asked]
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) > 0 and refused.json()["error"]["type"] == "rate_limit_error"


def test_the_token_is_required(guarded: RunningServer) -> None:
    guarded.wait_until_idle()
    assert guarded.tokens(prompt="x", max_tokens=2)
    own = guarded.client.headers.pop("Authorization")
    try:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic a-long-secret"}):
            for path in ("/v1/models", "/metrics"):
                assert guarded.client.get(path, headers=headers).status_code == 401
            answer = guarded.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert guarded.client.get("/healthz").status_code == 200
    finally:
        guarded.client.headers["Authorization"] = own
    processes = [psutil.Process(guarded.process.pid), *guarded.ranks()]
    shown = [argument for process in processes for argument in process.cmdline()]
    assert "engine.serving.http.main" in shown and "engine.serving.rank" in shown
    assert "a-long-secret" not in " ".join(shown) + json.dumps(guarded.process.settings.model_dump())


@pytest.mark.parametrize("number", range(66))
def test_hostile_requests_are_refused_in_the_form_of_the_api(server: RunningServer, number: int) -> None:
    """Of each kind of `make bench-serving ONLY=hostile` some: also what is no HTTP."""
    asked = hostile_request(number, "tiny")
    assert faults_of(asked.kind, *ask(server.url, asked)) == []


def test_counts_in_every_event(server: RunningServer) -> None:
    """As guidellm asks for them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(prompt="x = ", max_tokens=5, ignore_eos=True, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 5]
    plain = server.events(prompt="x = ", max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    assert ["usage" in event for event in plain] == [False] * 5 + [True]


def test_a_stream_that_nobody_reads_frees_its_slot(server: RunningServer) -> None:
    """Also where the client is gone before the first token."""
    parts = httpx.URL(server.url)
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection((str(parts.host), parts.port or 80)) as connection:
            connection.sendall(head + body)
    assert server.tokens(prompt="y", max_tokens=2, ignore_eos=True)  # those before it have reached the server
    server.wait_until_idle()
