"""The endpoints that generate: requests to answers, answers to JSON or to a stream of events.

service = Generation(model, settings, router, metrics)
response = await service.complete(CompletionRequest(...))
response = await service.chat(ChatRequest(...))
"""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from configs.common.printable import plural
from configs.serving.settings import ServingSettings
from engine.serving.http.answers import ChoicePiece, GrowingChoice, TokenQueue
from engine.serving.http.errors import ApiError, other_model
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import LONG_TEXT, ServedModel
from engine.serving.http.replicas import Router
from engine.serving.http.schema import ChatRequest, CompletionRequest, GenerationRequest
from engine.serving.http.text import AnswerText, token_text
from engine.serving.messages import WantedAnswer
from engine.serving.sampling import Sampling

_RETRY_SECONDS = 5
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_MARK = "\x00text\x00"
"""Stands for the text of an event."""


class ResponseForm:
    """How answers look: `/v1/completions` or `/v1/chat/completions`."""

    def __init__(self, model: ServedModel, wanted: GenerationRequest, chat: bool) -> None:
        self._model, self._wanted, self._chat = model, wanted, chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, choices: Sequence[GrowingChoice], pieces: Sequence[list[ChoicePiece]]) -> dict[str, Any]:
        """Return the complete response."""
        parts = []
        for choice, own in zip(choices, pieces, strict=True):
            text = "".join(piece.text for piece in own)
            body: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            parts.append(self._choice(choice, body, own, choice.reason))
        kind = "chat.completion" if self._chat else "text_completion"
        return self._frame(kind, parts) | {"usage": usage_of(choices, sum(map(len, pieces)))}

    def opening(self, choice: GrowingChoice) -> dict[str, Any] | None:
        """Return the first event of a choice; only conversations have one."""
        if not self._chat:
            return None
        body = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._frame("chat.completion.chunk", [body])

    def event(self, piece: ChoicePiece) -> dict[str, Any]:
        """Return the event of a piece."""
        body: dict[str, Any] = {"delta": {"content": piece.text} if piece.text else {}}
        body = body if self._chat else {"text": piece.text}
        part = self._choice(piece.choice, body, [piece], piece.reason)
        return self._frame("chat.completion.chunk" if self._chat else "text_completion", [part])

    def encoded(self, piece: ChoicePiece) -> bytes:
        """Return the event of a piece as bytes: the same as all others of its choice, but for the text."""
        if (
            not piece.text
            or piece.reason is not None
            or piece.token.logprob is not None
            or self._wanted.return_token_ids
        ):
            return event_bytes(self.event(piece))
        around = self._around.get(piece.choice.index)
        if around is None:
            whole = event_bytes(self.event(piece._replace(text=_MARK)))
            before, _, after = whole.rpartition(_ENCODER.encode(_MARK).encode())  # the text follows the model's name
            around = self._around[piece.choice.index] = before, after
        return around[0] + _ENCODER.encode(piece.text).encode() + around[1]

    def usage_event(self, choices: Sequence[GrowingChoice], generated: int) -> dict[str, Any]:
        """Return the event with the counts of tokens."""
        frame = self._frame("chat.completion.chunk" if self._chat else "text_completion", [])
        return frame | {"usage": usage_of(choices, generated)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(
        self, choice: GrowingChoice, body: dict[str, Any], pieces: list[ChoicePiece], reason: str | None
    ) -> dict[str, Any]:
        part = {"index": choice.index, **body, "logprobs": self._logprobs(pieces), "finish_reason": reason}
        if self._wanted.return_token_ids:
            part["token_ids"] = [piece.token.token for piece in pieces]
        return part

    def _logprobs(self, pieces: list[ChoicePiece]) -> dict[str, Any] | None:
        tokens = [piece.token for piece in pieces]
        if not tokens or tokens[0].logprob is None:
            return None

        def text(token: int) -> str:
            return token_text(self._model.tokenizer, token)

        if not self._chat:
            return {
                "tokens": [text(one.token) for one in tokens],
                "token_logprobs": [one.logprob for one in tokens],
                # Of words with equal texts, such as parts of characters, the most likely one stands. The drawn one is
                # always among them, as with OpenAI.
                "top_logprobs": [
                    {text(word): value for word, value in ((one.token, one.logprob), *reversed(one.top))}
                    for one in tokens
                ],
                # As OpenAI counts, from the prompt's beginning, also where the prompt is not part of the answer.
                "text_offset": [piece.offset for piece in pieces],
            }

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            shown = text(token)
            # A part of a character has other bytes than its text, which is U+FFFD.
            return {"token": shown, "logprob": logprob, "bytes": None if "\ufffd" in shown else list(shown.encode())}

        return {
            "content": [
                entry(one.token, one.logprob) | {"top_logprobs": [entry(word, value) for word, value in one.top]}
                for one in tokens
            ]
        }


def event_bytes(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


def usage_of(choices: Sequence[GrowingChoice], generated: int) -> dict[str, Any]:
    """Return the counts of tokens; a prompt with several answers counts once."""
    first_answers = [choice.answer for choice in choices if choice.choice == 0]
    prompt = sum(answer.prompt_tokens for answer in first_answers)
    cached = sum(answer.cached_tokens or 0 for answer in first_answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Generation:
    """Both endpoints over the replicas."""

    def __init__(self, model: ServedModel, settings: ServingSettings, router: Router, metrics: ServerMetrics) -> None:
        self._model, self._settings, self._router, self._metrics = model, settings, router, metrics
        self._keys = itertools.count()

    async def complete(self, wanted: CompletionRequest) -> tuple[ResponseForm, list[GrowingChoice]]:
        """Begin the answers to a completion request. Raises ApiError."""
        self._check(wanted)
        given = wanted.prompt
        texts = [given] if isinstance(given, str) else given
        if not texts:
            raise ApiError(400, "prompt: has no tokens", "prompt")
        if isinstance(texts[0], int):
            texts = [texts]  # a list of ids is one prompt
        self._check_choices(len(texts) * (wanted.n or 1), "prompt" if len(texts) > 1 else "n")
        is_long = sum(len(one) for one in texts if isinstance(one, str)) > LONG_TEXT
        prompts = [tuple(one) if isinstance(one, list) else tuple(await self._encoded(one, is_long)) for one in texts]
        answers = self._answers(
            wanted, prompts, 16 if wanted.max_tokens is None else wanted.max_tokens, wanted.logprobs
        )
        starts = [0 if wanted.logprobs is None else self._model.characters(one) for one in texts]
        return ResponseForm(self._model, wanted, chat=False), self._begin(wanted, answers, starts)

    async def chat(self, wanted: ChatRequest) -> tuple[ResponseForm, list[GrowingChoice]]:
        """Begin the answers to a conversation. Raises ApiError."""
        self._check(wanted)
        if wanted.top_logprobs and not wanted.logprobs:
            raise ApiError(400, "top_logprobs: requires logprobs: true", "top_logprobs")
        if wanted.max_tokens is not None and wanted.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens: cannot be combined with max_completion_tokens", "max_tokens")
        self._check_choices(wanted.n or 1, "n")
        messages = [message.as_template_data() for message in wanted.messages]
        prompt = tuple(await asyncio.to_thread(self._model.encode_chat, messages))
        room = self._model.max_length - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"messages: {len(prompt)} tokens leave no room for an answer within the {self._model.max_length} "
                "of this server",
                "messages",
                "context_length_exceeded",
            )
        limit = wanted.max_completion_tokens or wanted.max_tokens or room
        logprobs = (wanted.top_logprobs or 0) if wanted.logprobs else None
        return ResponseForm(self._model, wanted, chat=True), self._begin(
            wanted, self._answers(wanted, [prompt], limit, logprobs)
        )

    async def pieces(self, choices: Sequence[GrowingChoice]) -> AsyncGenerator[list[ChoicePiece], None]:
        """Yield what the choices gain, as it comes. Raises ApiError; ends all answers when it is closed."""
        source = self._followed(choices[0]) if len(choices) == 1 else self._merged(choices)
        try:
            async with asyncio.timeout(self._settings.limits.request_seconds):
                async for pieces in source:
                    yield pieces
        except TimeoutError:
            raise ApiError(504, f"no answer within {self._settings.limits.request_seconds:.0f} s") from None
        finally:
            await source.aclose()
            self.end(choices)

    async def _merged(self, choices: Sequence[GrowingChoice]) -> AsyncGenerator[list[ChoicePiece], None]:
        """Yield the pieces of several choices, in the order in which they come."""
        queue: asyncio.Queue[list[ChoicePiece] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._queued(choice, queue)) for choice in choices]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def end(self, choices: Sequence[GrowingChoice]) -> None:
        """End answers, complete or not."""
        for choice in choices:
            self._router.finish(choice.answer)

    async def _queued(
        self, choice: GrowingChoice, queue: "asyncio.Queue[list[ChoicePiece] | Exception | None]"
    ) -> None:
        try:
            async for pieces in self._followed(choice):
                queue.put_nowait(pieces)
            queue.put_nowait(None)
        except Exception as error:  # whatever it is: the request would wait for this choice until its time limit
            queue.put_nowait(error)

    async def _followed(self, choice: GrowingChoice) -> AsyncGenerator[list[ChoicePiece], None]:
        """Turn a choice's tokens into pieces."""
        async for tokens in choice.answer:
            pieces = []
            for token in tokens:
                pieces.append(choice.add(token))
                if choice.reason is not None:
                    break
            self.note(choice, len(pieces))
            if choice.reason is not None:
                self._router.finish(choice.answer)  # after a stop string, while others of the request go on
                self._metrics.finished(choice.reason, time.perf_counter() - choice.began)
            yield pieces
            if choice.reason is not None:
                break

    def note(self, choice: GrowingChoice, tokens: int) -> None:
        """Note tokens that are sent together."""
        now = time.perf_counter()
        if choice.last is None:
            self._metrics.first_token(now - choice.began)
        self._metrics.tokens(tokens, None if choice.last is None else now - choice.last)
        choice.last = now

    def _check(self, wanted: GenerationRequest) -> None:
        if wanted.model != self._model.name:
            raise other_model(self._model.name)
        if wanted.stream_options is not None and not wanted.stream:
            raise ApiError(400, "stream_options: requires stream: true", "stream_options")

    def _check_choices(self, count: int, field: str) -> None:
        # More than an idle server takes would be told to come back for ever.
        most = min(self._settings.limits.max_choices, self._room)
        if count > most:
            raise ApiError(400, f"{field}: {count} answers to one request; at most {most}", field)
        self._check_room(count)

    @property
    def _room(self) -> int:
        """Answers that are computed or wait at once."""
        return self._settings.limits.max_queue + self._settings.layout.dp * self._settings.max_sequences

    def _check_room(self, count: int) -> None:
        limits = self._settings.limits
        if self._router.answers + count > self._room:
            raise ApiError(
                429,
                f"already waiting: {plural(limits.max_queue, 'request')}",
                code="queue_full",
                retry_after=_RETRY_SECONDS,
            )

    async def _encoded(self, text: str, is_long: bool) -> list[int]:
        if is_long:
            return await asyncio.to_thread(self._model.encode, text)
        return self._model.encode(text)

    def _answers(
        self, wanted: GenerationRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int, logprobs: int | None
    ) -> list[WantedAnswer]:
        """Return `n` answers for each prompt, checked against the model's limits."""
        model = self._model
        named = isinstance(wanted, ChatRequest) and wanted.max_completion_tokens is not None
        limit_field = "max_completion_tokens" if named else "max_tokens"
        for prompt in prompts:
            model.check_tokens(prompt)
            model.check_room(prompt, max_tokens, limit_field)
        own_stops = {*(wanted.stop_token_ids or ()), *model.special_tokens_of(wanted.stops)}
        ends = model.message_ends if isinstance(wanted, ChatRequest) else model.end_tokens
        stops = tuple(sorted(own_stops if wanted.ignore_eos else own_stops | ends))
        min_tokens = wanted.min_tokens or 0
        if min_tokens > max_tokens:
            raise ApiError(400, f"min_tokens: {min_tokens} is more than the {max_tokens} at most", "min_tokens")
        # Without a seed equal prompts of one request have independent answers.
        seeds = [secrets.randbits(63) if wanted.seed is None else wanted.seed % (1 << 64) for _ in prompts]
        banned = tuple(one for one in (stops if min_tokens else ()) if one < model.vocabulary)
        if len(banned) == model.vocabulary:
            raise ApiError(400, "min_tokens: each token of this model is one that ends the answer", "min_tokens")
        return [
            WantedAnswer(
                key=str(next(self._keys)),
                prompt=prompt,
                max_tokens=max_tokens,
                stop_tokens=stops,
                min_tokens=min_tokens,
                sampling=Sampling(
                    temperature=_given(wanted.temperature, 1.0),
                    top_p=_given(wanted.top_p, 1.0),
                    top_k=max(0, wanted.top_k or 0),
                    min_p=_given(wanted.min_p, 0.0),
                    presence_penalty=_given(wanted.presence_penalty, 0.0),
                    frequency_penalty=_given(wanted.frequency_penalty, 0.0),
                    repetition_penalty=_given(wanted.repetition_penalty, 1.0),
                    seed=seed,
                    choice=choice,
                    logprobs=logprobs,
                    min_tokens=min_tokens,
                    banned=banned,
                    bias=wanted.bias(model.vocabulary),
                ),
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
            for choice in range(wanted.n or 1)
        ]

    def _begin(
        self, wanted: GenerationRequest, answers: Sequence[WantedAnswer], starts: Sequence[int] = (0,)
    ) -> list[GrowingChoice]:
        """Begin answers, `n` to each prompt; starts: characters of the prompts."""
        self._check_room(len(answers))  # others have begun while the prompts were tokenised
        stops, began = wanted.stops, time.perf_counter()
        choices = []
        for index, answer in enumerate(answers):
            # A message is a text of its own; a completion continues its prompt.
            continued = answer.prompt if isinstance(wanted, CompletionRequest) else ()
            text = AnswerText(self._model.tokenizer, stops, answer.min_tokens, continued)
            start = starts[index * len(starts) // len(answers)]
            choices.append(GrowingChoice(index, answer.sampling.choice, TokenQueue(answer), text, began, start=start))
        for choice in choices:
            self._metrics.started(choice.answer.prompt_tokens)
            self._router.start(choice.answer)
        return choices


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


async def whole(service: Generation, form: ResponseForm, choices: Sequence[GrowingChoice]) -> dict[str, Any]:
    """Return the complete response."""
    pieces: list[list[ChoicePiece]] = [[] for _ in choices]
    async for gained in service.pieces(choices):
        pieces[gained[0].choice.index] += gained
    return form.whole(choices, pieces)
