"""Answers to one request as they end: each frees its slot, and an error of one ends all of them."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models

from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http import endpoints
from engine.serving.http.answers import ChoicePiece
from engine.serving.http.endpoints import whole
from engine.serving.http.errors import ApiError
from engine.serving.http.responses import ResponseForm
from engine.serving.http.schema import ChatRequest, read_request
from tests.support.servers.answers_by_hand import completion, give, new, service
from tests.support.servers.inference_server import TINY


def test_a_stop_string_frees_the_slot_while_other_answers_go_on(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[bool], dict[str, Any]]:
        generation, router = service(tmp_path)
        form, choices = await generation.complete(completion(n=2, stop=[" 7"]))
        working = asyncio.create_task(whole(generation, form, choices))
        give(choices[0], new(5), new(7), new(8))
        give(choices[1], new(5))
        await asyncio.sleep(0.01)
        held = [choice.answer.key in router.replicas[0].answers for choice in choices]
        give(choices[1], new(6, "length"))
        return held, await working

    held, answer = asyncio.run(scenario())
    assert held == [False, True]
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [(" 5", "stop"), (" 5 6", "length")]
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_an_answer(tmp_path: Path, ignore_eos: bool) -> None:
    """Special tokens are left out of texts: an answer with the stop string `<|im_end|>` went on behind it."""
    generation, _ = service(tmp_path, tokenizer=True)
    tokenizer = generation._model.tokenizer
    assert tokenizer is not None
    special = tokenizer.token_to_id("<|endoftext|>")
    for stop, expected in ((["x", "<|endoftext|>"], (special,)), ("<|endoftext|>", (special,)), ("<|endoftext", ())):
        _, choices = asyncio.run(generation.complete(completion(stop=stop, ignore_eos=ignore_eos)))
        assert choices[0].answer.wanted.stop_tokens == expected


def test_a_message_ends_with_its_tokenizers_end_of_text(tmp_path: Path) -> None:
    """Tuned models often name the end of a turn in their tokenizer alone: an answer went on with the user's turn."""
    generation, _ = service(tmp_path, tokenizer=True)
    tokenizer = generation._model.tokenizer
    assert tokenizer is not None
    special = tokenizer.token_to_id("<|endoftext|>")
    template = Environment().from_string("{{ messages[0].content }}")
    generation._model = replace(
        generation._model, template=template, end_tokens=frozenset({7}), special={"eos_token": "<|endoftext|>"}
    )
    asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

    def stops(**fields: Any) -> tuple[int, ...]:
        wanted = read_request(json.dumps(asked | fields).encode(), ChatRequest)
        _, choices = asyncio.run(generation.chat(wanted))
        return choices[0].answer.wanted.stop_tokens

    assert special not in (7, None) and stops() == tuple(sorted((special, 7))) and stops(ignore_eos=True) == ()
    _, choices = asyncio.run(generation.complete(completion()))
    assert choices[0].answer.wanted.stop_tokens == (7,), "as transformers generates"


def test_a_stop_string_ends_no_answer_before_its_min_tokens(tmp_path: Path) -> None:
    async def scenario() -> dict[str, Any]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(stop=[" 7"], min_tokens=3))
        give(choices[0], *(new(number) for number in (7, 5, 7, 6, 7, 8)))
        return await whole(generation, form, choices)

    [choice] = asyncio.run(scenario())["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" 7 5 7 6", "stop")


def test_equal_prompts_of_one_request_have_independent_answers_without_a_seed(tmp_path: Path) -> None:
    """All of them drew the same random numbers, and were answered alike."""
    generation, _ = service(tmp_path)

    def drawn(**fields: Any) -> list[tuple[int, int]]:
        asked = completion(prompt=[[1, 2], [1, 2]], n=2, **fields)
        _, choices = asyncio.run(generation.complete(asked))
        samplings = [choice.answer.wanted.sampling for choice in choices]
        return [(one.seed, one.choice) for one in samplings]

    assert len(set(drawn())) == 4
    assert drawn(seed=5) == [(5, 0), (5, 1), (5, 0), (5, 1)]


def test_a_minimum_of_tokens_needs_one_that_does_not_end_the_answer(tmp_path: Path) -> None:
    """To draw from no token at all ends the ranks."""
    generation, router = service(tmp_path)
    generation._model = replace(generation._model, vocabulary=5, end_tokens=frozenset({4, 7}))
    asked = {"min_tokens": 1, "top_p": 0.9, "max_tokens": 2}
    with pytest.raises(ApiError, match="each token of this model is one that ends the answer") as caught:
        asyncio.run(generation.complete(completion(stop_token_ids=[0, 1, 2, 3], **asked)))
    assert (caught.value.status, caught.value.param) == (400, "min_tokens") and not router.answers
    for fields in ({"stop_token_ids": [0, 1, 2]}, {"stop_token_ids": [0, 1, 2, 3], "ignore_eos": True}):
        _, [choice] = asyncio.run(generation.complete(completion(**fields, **asked)))
        assert len(choice.answer.wanted.sampling.banned) == 4


def test_more_answers_than_an_idle_server_takes_are_not_told_to_come_back(tmp_path: Path) -> None:
    generation, _ = service(tmp_path)
    limits = generation._settings.limits.model_copy(update={"max_queue": 2})
    generation._settings = generation._settings.model_copy(update={"max_sequences": 1, "limits": limits})
    with pytest.raises(ApiError, match=r"^n: 4 answers to one request; at most 3$") as caught:
        asyncio.run(generation.complete(completion(n=4)))
    assert (caught.value.status, caught.value.retry_after) == (400, None)
    assert len(asyncio.run(generation.complete(completion(n=3)))[1]) == 3
    with pytest.raises(ApiError, match="already waiting: 2 requests") as caught:
        asyncio.run(generation.complete(completion()))
    assert caught.value.status == 429


def test_an_unexpected_error_in_one_answer_ends_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        generation, router = service(tmp_path)
        form, choices = await generation.complete(completion(n=2))
        choices[1].text.add = _broken  # type: ignore[method-assign]
        give(choices[1], new(5))
        try:
            await asyncio.wait_for(whole(generation, form, choices), 300)
        finally:
            assert not router.answers

    with pytest.raises(OverflowError):
        asyncio.run(scenario())


@pytest.mark.parametrize(("chat", "text"), [(False, " word"), (True, "word")])
def test_a_completion_continues_its_prompt_and_a_message_begins_a_text(tmp_path: Path, chat: bool, text: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581word": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])

    async def scenario() -> dict[str, Any]:
        generation, _ = service(tmp_path)
        generation._model = replace(generation._model, tokenizer=tokenizer)
        object.__setattr__(generation._model, "encode_chat", lambda messages: [0, 0])
        if chat:
            asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            form, choices = await generation.chat(read_request(json.dumps(asked).encode(), ChatRequest))
        else:
            form, choices = await generation.complete(completion(prompt=[0, 0]))
        give(choices[0], new(1, "length"))
        return await whole(generation, form, choices)

    [choice] = asyncio.run(scenario())["choices"]
    assert (choice["message"]["content"] if chat else choice["text"]) == text


def _broken(token: int) -> str:
    raise OverflowError


def test_parts_of_characters_keep_the_likeliest_log_probability_and_have_no_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    first, second = [one for one in range(300) if tokenizer.decode([one]) == "\ufffd"][:2]

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        generation, _ = service(tmp_path, tokenizer=True)
        form, choices = await generation.complete(completion(logprobs=2))
        give(choices[0], new(first, "length", logprob=-0.5, top=((first, -0.5), (second, -3.0))))
        answer = await whole(generation, form, choices)
        form._chat = True
        return answer, form._choice(choices[0], {}, [ChoicePiece(choices[0], "", new(first, logprob=-0.5), None)], None)

    answer, chat = asyncio.run(scenario())
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]
    assert chat["logprobs"]["content"][0]["bytes"] is None


@pytest.mark.parametrize("stop", [None, ["never"]])
@pytest.mark.parametrize("as_text", [True, False])
def test_offsets_of_tokens_are_their_places_behind_the_prompt(tmp_path: Path, as_text: bool, stop: Any) -> None:
    """As OpenAI counts: characters from the beginning of the prompt. Parts of a character have its place."""
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    prompts = ["def \u00e9(", "x"]
    answers = [tokenizer.encode(text).ids for text in ("a \U0001f600 b", "self.x", "\U0001f600\U0001f600", "one two")]
    given: Any = prompts if as_text else [tokenizer.encode(prompt).ids for prompt in prompts]

    async def scenario() -> tuple[dict[str, Any], list[list[int]]]:
        generation, _ = service(tmp_path, tokenizer=True)
        asked = completion(prompt=given, n=2, logprobs=1, max_tokens=16, stop=stop)
        form, choices = await generation.complete(asked)
        for choice, tokens in zip(choices, answers, strict=True):
            reasons = [None] * (len(tokens) - 1) + ["length"]
            give(choice, *(new(one, why, logprob=-1.0) for one, why in zip(tokens, reasons, strict=True)))
        answer = await whole(generation, form, choices)
        # A stream's events have the same ones.
        form, choices = await generation.complete(asked)
        events = [
            [form.event(choice.add(new(one, logprob=-1.0)))["choices"][0] for one in tokens]
            for choice, tokens in zip(choices, answers, strict=True)
        ]
        return answer, [[at for one in part for at in one["logprobs"]["text_offset"]] for part in events]

    answer, streamed = asyncio.run(scenario())
    for index, (choice, tokens) in enumerate(zip(answer["choices"], answers, strict=True)):
        found = choice["logprobs"]["text_offset"]
        decoded = [tokenizer.decode(tokens[:count]).rstrip("\ufffd") for count in range(len(tokens))]
        assert found == [len(prompts[index // 2]) + len(before) for before in decoded]
        assert found == streamed[index]


@pytest.mark.parametrize(("count", "others"), [(0, ()), (2, ((7, -0.2), (8, -2.0)))])
def test_the_drawn_token_is_among_the_likeliest(
    tmp_path: Path, count: int, others: tuple[tuple[int, float], ...]
) -> None:
    """OpenAI answers with one more where it is not among those asked for; `logprobs: 0` asks for it alone."""

    async def scenario() -> dict[str, Any]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(logprobs=count))
        give(choices[0], new(3, "length", logprob=-5.0, top=others))
        return await whole(generation, form, choices)

    [choice] = asyncio.run(scenario())["choices"]
    [found] = choice["logprobs"]["top_logprobs"]
    assert sorted(found.values(), reverse=True) == [*(value for _, value in others), -5.0]
    assert found[choice["logprobs"]["tokens"][0]] == -5.0


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_too_long_an_answer_is_refused_by_the_field_that_asks_for_it(tmp_path: Path, field: str) -> None:
    generation, _ = service(tmp_path)
    object.__setattr__(generation._model, "encode_chat", lambda messages: [0, 0])
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: 31}
    with pytest.raises(ApiError, match=rf"^{field}: 31 new tokens after 2 of the prompt exceed the 32") as caught:
        asyncio.run(generation.chat(read_request(json.dumps(asked).encode(), ChatRequest)))
    assert (caught.value.status, caught.value.param) == (400, field)


def test_a_conversation_without_room_for_an_answer_is_refused_by_its_length(tmp_path: Path) -> None:
    async def scenario() -> None:
        generation, _ = service(tmp_path)
        object.__setattr__(generation._model, "encode_chat", lambda messages: list(range(40)))
        asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        await generation.chat(read_request(json.dumps(asked).encode(), ChatRequest))

    with pytest.raises(ApiError, match=r"^messages: 40 tokens leave no room"):
        asyncio.run(scenario())


def test_requests_that_are_tokenised_together_fill_the_queue_and_no_more(tmp_path: Path) -> None:
    """None of them has begun while the others are let in."""

    async def scenario() -> tuple[list[Any], int]:
        generation, router = service(tmp_path)
        object.__setattr__(generation._model, "encode_chat", lambda messages: [1, 2])
        asked = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        wanted = read_request(json.dumps(asked).encode(), ChatRequest)
        begun = await asyncio.gather(*(generation.chat(wanted) for _ in range(300)), return_exceptions=True)
        return begun, router.answers

    begun, answers = asyncio.run(scenario())
    room = 256 + 32  # --max-queue and --max-sequences
    refused = [one for one in begun if isinstance(one, ApiError)]
    assert answers == room and [one.status for one in refused] == [429] * (300 - room)


@pytest.mark.parametrize(("texts", "elsewhere"), [(["a" * 1500] * 16, True), (["a" * 1500] * 3, False)])
def test_texts_that_are_long_together_are_tokenised_in_another_thread(
    tmp_path: Path, texts: list[str], elsewhere: bool
) -> None:
    """Others waited for all of them, where each was short enough by itself."""

    async def scenario() -> set[int]:
        generation, _ = service(tmp_path)
        threads: set[int] = set()
        object.__setattr__(generation._model, "encode", lambda text: threads.add(threading.get_ident()) or [1])
        await generation.complete(completion(prompt=texts))
        return threads

    assert (threading.get_ident() not in asyncio.run(scenario())) is elsewhere


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", ["m", 'a "model" é', "\x00text\x00"])
def test_an_event_made_from_the_one_before_equals_one_made_anew(chat: bool, name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        generation, _ = service(tmp_path)
        _, choices = await generation.complete(completion(n=2))
        object.__setattr__(generation._model, "name", name)
        form = ResponseForm(generation._model, completion(), chat)
        for text in ("a", 'quote " and \\', "é\u2028\n\x00", "\ufffd", "", "\x00text\x00"):
            for choice in choices:
                for token, reason in ((new(5), None), (new(5, "stop"), "stop"), (new(5, logprob=-1.0), None)):
                    piece = ChoicePiece(choice, text, token, reason)
                    made = form.encoded(piece)
                    assert made.startswith(b"data: ") and made.endswith(b"\n\n")
                    assert json.loads(made[6:]) == json.loads(json.dumps(form.event(piece)))

    asyncio.run(scenario())


def test_a_client_that_did_not_read_for_long_gets_its_answer_in_parts(tmp_path: Path) -> None:
    """All at once would hold up every other answer for as long as its events take to make."""

    async def scenario() -> list[list[int]]:
        generation, _ = service(tmp_path)
        _, choices = await generation.complete(completion())
        give(choices[0], *(new(number) for number in range(150)))
        choices[0].answer.fail(ApiError(500, "the engine failed"))
        parts: list[list[int]] = []
        with pytest.raises(ApiError, match="the engine failed"):
            async for tokens in choices[0].answer:
                parts.append([one.token for one in tokens])
        return parts

    parts = asyncio.run(scenario())
    assert [len(part) for part in parts] == [64, 64, 22]
    assert [token for part in parts for token in part] == list(range(150))


def test_each_answer_begins_with_its_own_prompt_where_that_is_echoed(tmp_path: Path) -> None:
    """Without a tokenizer a text is the numbers of its tokens; the prompt is searched for no stop string."""

    async def scenario() -> dict[str, Any]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(prompt=[[1, 2], [3]], n=2, echo=True, stop=[" 2"]))
        assert not any(choice.answer.wanted.scored for choice in choices), "without log-probabilities nothing is scored"
        for number, choice in enumerate(choices):
            give(choice, new(10 + number), new(5, "length"))
        return await whole(generation, form, choices)

    answer = asyncio.run(scenario())
    assert [one["text"] for one in answer["choices"]] == [" 1 2 10 5", " 1 2 11 5", " 3 12 5", " 3 13 5"]
    assert answer["usage"]["completion_tokens"] == 8


def test_a_request_has_no_more_tokens_scored_than_a_response_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MOST_SCORED", 8)
    generation, router = service(tmp_path)
    asked = {"prompt": [[1, 2, 3], [4]], "max_tokens": 1, "n": 2}
    for more in ({"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 1}):
        _, choices = asyncio.run(generation.complete(completion(**asked | more)))
        generation.end(choices)
    with pytest.raises(ApiError, match="prompt: 9 tokens to be scored by one request; at most 8"):
        asyncio.run(
            generation.complete(completion(**asked | {"n": 3, "prompt": [1, 2, 3], "echo": True, "logprobs": 0}))
        )
    assert not router.replicas[0].answers


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_one_token_alone_has_no_log_probability(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> dict[str, Any]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(prompt=[7], max_tokens=0, echo=True, logprobs=1))
        piece = new(5, "length", logprob=-0.5, top=((5, -0.5),))
        if stream:
            return form.event(choices[0].add(piece))
        give(choices[0], piece)
        return await whole(generation, form, choices)

    [choice] = asyncio.run(scenario())["choices"]
    assert choice["text"] == " 7" and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": [" 7"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0],
    }  # fmt: skip


def test_a_prompt_asked_for_alone_is_no_generated_token(tmp_path: Path) -> None:
    """Its answer has none, and a gap less than none was counted: Prometheus' `rate` takes that for a restart."""

    async def scenario() -> str:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(max_tokens=0, echo=True))
        give(choices[0], new(5, "length"))
        await whole(generation, form, choices)
        return generation._metrics.write().decode()

    samples = [one for family in text_string_to_metric_families(asyncio.run(scenario())) for one in family.samples]
    assert {one.value for one in samples if one.name == "vllm:request_success_total"} >= {1.0}
    for name in ("generation_tokens", "inter_token_latency_seconds", "time_to_first_token_seconds"):
        found = [one for one in samples if one.name.startswith(f"vllm:{name}") and not one.name.endswith("_created")]
        assert found and not any(one.value for one in found), found
