"""The first rank of a replica: requests in, steps scheduled and told, tokens out.

    first = FirstRank(channel, scheduler, message, idle_seconds, defers)
    first.lead(runner, world)          # until the HTTP process is gone or says that the server ends

Where a GPU computes a step, the next one is scheduled and launched behind it before its tokens are known, so that the
device does not wait for the host. Not where logits are needed to choose them: those go to the host first.
"""

import time
from contextlib import suppress

from engine.parallel.communicator import Communicator
from engine.serving.channel import Channel, ChannelClosedError
from engine.serving.choosing import Chosen, Logits, next_token, scored
from engine.serving.drawing import as_draws
from engine.serving.messages import NewToken, ScoredToken, StepReport, WantedAnswer
from engine.serving.scheduling import ScheduledStep, Scheduler
from engine.serving.step_message import StepMessage
from engine.serving.stepping import LaunchedStep, StepRunner


class FirstRank:
    """What the first rank does between steps, and while they are computed."""

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler,
        message: StepMessage,
        idle_seconds: float,
        defers: bool,
    ) -> None:
        """defers: a step's tokens are kept until the next is launched, so that they are sent while ranks compute."""
        self._channel, self._scheduler, self._message = channel, scheduler, message
        self._idle_seconds, self._defers = idle_seconds, defers
        self._launched: tuple[ScheduledStep, LaunchedStep, list[int]] | None = None  # with its logit rows
        self._unsent: StepReport | None = None
        self._wanted: dict[str, WantedAnswer] = {}
        self._answers: dict[str, list[int]] = {}
        self._scores: dict[str, list[ScoredToken]] = {}  # of prompts, until their answers begin
        self._started: set[str] = set()
        self._cancelled = False
        self._ended = time.perf_counter()

    def lead(self, runner: StepRunner, world: Communicator) -> None:
        """Compute steps until the HTTP process is gone, or says that the server ends; tell the other ranks."""
        while True:
            try:
                batch = self._next_step()
            except (ChannelClosedError, EOFError):
                self._message.write_end()
                self._message.share(world)
                return
            if batch is None and self._launched is not None:
                with suppress(ChannelClosedError):
                    self._finish_launched()
                continue
            self._message.share(world)
            if batch is not None:
                self._compute(batch, runner)

    def _compute(self, batch: ScheduledStep, runner: StepRunner) -> None:
        """Launch a step and finish the one before meanwhile; also this one, where none can be launched behind it."""
        began = time.perf_counter()
        step = self._message.read()
        assert step is not None
        # The next step finds out too that the HTTP process is gone, and ends the others, which compute this one.
        with suppress(ChannelClosedError):
            if not runner.on_gpu:
                self._send_unsent()  # another rank computes while the HTTP process takes this one's core
        launched = runner.launch(step, began)
        # The rows are read now: the next step is written to the same memory.
        before, self._launched = self._launched, (batch, launched, step.logit_rows.tolist())
        with suppress(ChannelClosedError):
            self._send_unsent()  # the GPU computes
            if before is not None:
                self._finish(*before)
                self._send_unsent()
            if not runner.overlaps or len(step.logit_rows):
                self._finish_launched()

    def _finish_launched(self) -> None:
        assert self._launched is not None
        launched, self._launched = self._launched, None
        self._finish(*launched)

    def _next_step(self) -> ScheduledStep | None:
        """Take requests until there is a step, and write it; None if there is nothing to do for a while.

        While a step is computed: the one behind it; None if that cannot be scheduled yet.
        Raises ChannelClosedError when the HTTP process is gone, EOFError when it says that the server ends.
        """
        self._take(0.0)
        if self._launched is not None:
            batch = self._scheduler.next_batch(ahead=True)
        else:
            batch = self._scheduler.next_batch() or self._step_after_waiting()
            if batch is None:
                self._message.write_idle()
        if batch is not None:
            self._write(batch)
        return batch

    def _write(self, batch: ScheduledStep) -> None:
        """Tell the ranks a step: which rows they draw, and of which the logits are needed here."""
        logit_rows, drawn = [], []
        for row, piece in enumerate(batch.choosing):
            wanted = self._wanted[piece.key]
            if wanted.sampling.needs_host:
                logit_rows.append(row)
            elif not wanted.sampling.is_greedy:
                drawn.append((row, wanted.sampling, piece.first + piece.length - len(wanted.prompt)))
        scoring = sum(piece.scored for piece in batch.pieces)
        logit_rows += range(len(batch.choosing), len(batch.choosing) + scoring)
        if drawn:
            self._message.write(batch, logit_rows, as_draws(drawn))
        else:
            self._message.write(batch, logit_rows)

    def _step_after_waiting(self) -> ScheduledStep | None:
        """Wait for requests, with all told before."""
        self._send_unsent()
        if self._cancelled:  # no step tells the state after it
            self._report((), 0, 0.0, {}, {})
            self._send_unsent()
        self._take(self._idle_seconds)
        self._ended = time.perf_counter()
        return self._scheduler.next_batch()

    def _finish(self, batch: ScheduledStep, launched: LaunchedStep, logit_rows: list[int]) -> None:
        """Choose tokens, note them and report them. Answers that have ended since the launch get none."""
        found, compute_seconds = launched.wait()
        logits = (
            {} if found is None or found.logits is None else dict(zip(logit_rows, found.logits.numpy(), strict=True))
        )
        chosen = {} if found is None else self._chosen(batch, found.tokens.tolist(), logits)
        chosen |= dict.fromkeys(self._score_prompts(batch, logits))
        cached = self._newly_started(batch)
        scores = {key: tuple(self._scores.pop(key)) for key in chosen if key in self._scores}
        failed = {key for key, one in chosen.items() if one is None}
        for key in failed:
            self._scheduler.cancel(key)
        ended = self._scheduler.advance(batch, {key: one.token for key, one in chosen.items() if one is not None})
        tokens = []
        for key, one in chosen.items():
            if one is not None:
                self._answers[key].append(one.token)
                tokens.append(NewToken(key, one.token, ended.get(key), one.logprob, one.top))
        for key in (*ended, *failed):
            self._forget(key)
        for key in failed:
            self._refuse(key, "the model's logits are not finite")
        self._report(tuple(tokens), len(batch.tokens), compute_seconds, cached, scores)

    def _report(
        self,
        tokens: tuple[NewToken, ...],
        computed_tokens: int,
        compute_seconds: float,
        cached: dict[str, int],
        scores: dict[str, tuple[ScoredToken, ...]],
    ) -> None:
        counts, now = self._scheduler.counts, time.perf_counter()
        self._unsent = StepReport(
            tokens=tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            free_blocks=self._scheduler.pool.free,
            preemptions=counts.preemptions,
            prefix_tokens=counts.prefix_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=computed_tokens,
            compute_seconds=compute_seconds,
            other_seconds=max(0.0, now - self._ended - compute_seconds) if computed_tokens else 0.0,
            cached=cached,
            scores=scores,
        )
        self._ended, self._cancelled = now, False
        if not self._defers:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send the report that was kept. Raises ChannelClosedError when the HTTP process is gone."""
        report, self._unsent = self._unsent, None
        if report is not None:
            self._channel.send(report.message())

    def _newly_started(self, batch: ScheduledStep) -> dict[str, int]:
        """Return how many tokens of a prompt were in the cache, for the answers that begin with this step."""
        new = [one.key for one in batch.choosing if one.key in self._wanted and one.key not in self._started]
        self._started.update(new)
        return {key: self._scheduler.cached_tokens(key) for key in new}

    def _chosen(self, batch: ScheduledStep, tokens: list[int], logits: dict[int, Logits]) -> dict[str, Chosen | None]:
        """Return the token of each choosing sequence that goes on; None where the logits are not finite."""
        chosen: dict[str, Chosen | None] = {}
        # Rows that score tokens of prompts come after those that choose.
        for row, (piece, token) in enumerate(zip(batch.choosing, tokens, strict=False)):
            wanted = self._wanted.get(piece.key)
            if wanted is None:  # it was cancelled, or has ended with the step before
                continue
            if row not in logits:
                chosen[piece.key] = Chosen(token) if token >= 0 else None
                continue
            try:
                chosen[piece.key] = next_token(logits[row], wanted.sampling, wanted.prompt, self._answers[piece.key])
            except FloatingPointError:
                chosen[piece.key] = None
        return chosen

    def _score_prompts(self, batch: ScheduledStep, logits: dict[int, Logits]) -> list[str]:
        """Score the tokens of prompts that a step has computed. Returns whose logits are not finite."""
        row = len(batch.choosing)
        failed = []
        for piece in batch.pieces:
            own = [logits[one] for one in range(row, row + piece.scored)]
            row += piece.scored
            wanted = self._wanted.get(piece.key)
            if wanted is None or not own:
                continue
            scores = self._scores.setdefault(piece.key, [])
            del scores[piece.first :]  # after a preemption they are computed again
            behind = wanted.prompt[piece.first + 1 : piece.first + 1 + piece.scored]
            try:
                found = [
                    scored(one, token, wanted.sampling.logprobs or 0) for one, token in zip(own, behind, strict=True)
                ]
            except FloatingPointError:
                failed.append(piece.key)
                continue
            scores += found
        return failed

    def _take(self, wait_seconds: float) -> None:
        for message in self._channel.receive(wait_seconds):
            if "add" in message:
                self._add(WantedAnswer.read(message["add"]))
            elif "cancel" in message:
                if self._scheduler.cancel(message["cancel"]):
                    self._forget(message["cancel"])
                    self._cancelled = True
            else:
                raise EOFError("the server ends")

    def _add(self, wanted: WantedAnswer) -> None:
        try:
            self._scheduler.add(wanted.request())
        except ValueError as error:
            self._refuse(wanted.key, str(error))
            return
        self._wanted[wanted.key], self._answers[wanted.key] = wanted, list(wanted.done)

    def _forget(self, key: str) -> None:
        del self._wanted[key], self._answers[key]
        self._scores.pop(key, None)
        self._started.discard(key)

    def _refuse(self, key: str, message: str) -> None:
        self._send_unsent()  # it may hold earlier tokens of this answer
        self._channel.send({"refused": {"key": key, "message": message}})
