"""The endpoints that generate: requests to answers, answers to JSON or to a stream of events.

service = Generation(model, settings, router, metrics)
response = await service.complete(CompletionRequest(...))
response = await service.chat(ChatRequest(...))
"""

import asyncio
import itertools
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
from engine.serving.http.responses import ResponseForm, answered
from engine.serving.http.schema import ChatRequest, CompletionRequest, GenerationRequest
from engine.serving.http.text import AnswerText, EchoedPrompt
from engine.serving.messages import WantedAnswer
from engine.serving.sampling import Sampling

_RETRY_SECONDS = 5
MOST_SCORED = 1 << 17
"""Tokens of prompts that a request may have scored, over all its answers: each is a hundred bytes of the response."""


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
        most = 16 if wanted.max_tokens is None else wanted.max_tokens
        if most == 0 and not wanted.echo:
            raise ApiError(400, "max_tokens: 0 new tokens need echo: true", "max_tokens")
        scored = sum(map(len, prompts)) * (wanted.n or 1) if wanted.echo and wanted.logprobs is not None else 0
        if scored > MOST_SCORED:
            raise ApiError(400, f"prompt: {scored} tokens to be scored by one request; at most {MOST_SCORED}", "prompt")
        # A prompt is computed for the token behind it, which is left out where nobody wants it.
        answers = self._answers(wanted, prompts, max(1, most), wanted.logprobs)
        starts = [0 if wanted.logprobs is None else self._model.characters(one) for one in texts]
        form = ResponseForm(self._model, wanted, chat=False)
        if not wanted.echo:
            return form, self._begin(wanted, answers, starts)
        echoes = await asyncio.to_thread(self._echoes, texts, prompts, wanted.logprobs is not None)
        return form, self._begin(wanted, answers, starts, echoes, only_echo=most == 0)

    def _echoes(
        self, given: Sequence[str | list[int]], prompts: Sequence[tuple[int, ...]], offsets: bool
    ) -> list[EchoedPrompt]:
        return [
            EchoedPrompt.of(self._model.tokenizer, one if isinstance(one, str) else None, tokens, offsets)
            for one, tokens in zip(given, prompts, strict=True)
        ]

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
            self.note(choice, len(answered(pieces)))
            if choice.reason is not None:
                self._router.finish(choice.answer)  # after a stop string, while others of the request go on
                self._metrics.finished(choice.reason, time.perf_counter() - choice.began)
            yield pieces
            if choice.reason is not None:
                break

    def note(self, choice: GrowingChoice, tokens: int) -> None:
        """Note tokens that are sent together; of a prompt that was asked for alone there are none."""
        if not tokens:
            return
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
                scored=isinstance(wanted, CompletionRequest) and bool(wanted.echo) and logprobs is not None,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
            for choice in range(wanted.n or 1)
        ]

    def _begin(
        self,
        wanted: GenerationRequest,
        answers: Sequence[WantedAnswer],
        starts: Sequence[int] = (0,),
        echoes: Sequence[EchoedPrompt | None] = (None,),
        only_echo: bool = False,
    ) -> list[GrowingChoice]:
        """Begin answers, `n` to each prompt; starts: characters of the prompts; echoes: those that belong to them."""
        self._check_room(len(answers))  # others have begun while the prompts were tokenised
        stops, began = wanted.stops, time.perf_counter()
        choices = []
        for index, answer in enumerate(answers):
            # A message is a text of its own; a completion continues its prompt.
            continued = answer.prompt if isinstance(wanted, CompletionRequest) else ()
            text = AnswerText(self._model.tokenizer, stops, answer.min_tokens, continued)
            start, echo = starts[index * len(starts) // len(answers)], echoes[index * len(echoes) // len(answers)]
            choices.append(
                GrowingChoice(
                    index, answer.sampling.choice, TokenQueue(answer), text, began,
                    start=start, echo=echo, only_echo=only_echo,
                )
            )  # fmt: skip
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
    if any(choice.answer.scores for choice in choices):  # thousands of tokens, perhaps: others would wait
        return await asyncio.to_thread(form.whole, choices, pieces)
    return form.whole(choices, pieces)
