"""A rank of a server's replica: it computes steps until the HTTP process is gone or says that it ends.

    python -m engine.serving.rank SETTINGS_JSON SOCKET      (RANK, LOCAL_RANK, WORLD_SIZE... as torchrun sets them)

The first rank takes requests from the socket, schedules them, tells the others each step and sends what was chosen.
"""

import gc
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.rank.processes import RankPlace, die_with_parent, leave, place_from_environment
from engine.serving.messages import NewToken, StepReport, WantedAnswer

if TYPE_CHECKING:
    from torch import Tensor

    from configs.plans.job import Job
    from configs.serving.settings import ServingSettings
    from engine.context import Context
    from engine.inference.model import Shard
    from engine.inference.paged import PagedSizes
    from engine.serving.channel import Channel
    from engine.serving.sampling import Chosen
    from engine.serving.scheduling import ScheduledStep, Scheduler
    from engine.serving.step_message import StepMessage
    from engine.serving.stepping import StepRunner

_IDLE_SHARE = 0.2
"""Of the time limit of the group: an idle rank tells the others so often that it lives."""


def as_job(settings: "ServingSettings") -> "Job":
    """Return the launch that a replica's ranks are, for what they share with measurements."""
    from configs.plans.job import Job, Measurement
    from configs.spec.cell import Cell
    from configs.spec.measuring import Measuring
    from configs.targets.target import LocalTarget
    from configs.workloads.generate import GenerateWorkload

    layout = settings.layout.model_copy(update={"dp": 1})
    cell = Cell(
        workload=GenerateWorkload(),
        layout=layout,
        dtype=settings.dtype,
        compression=settings.compression,
        cores_per_rank=settings.cores_per_rank,
    )
    return Job(
        name="serve",
        study="serve",
        measuring_pass="timed",
        measuring=Measuring(group_timeout_seconds=settings.group_timeout_seconds),
        target=LocalTarget(device=settings.device),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=layout.ranks,
        timeout_seconds=1,
        manifest=settings.manifest,
        inputs=settings.folder,
        cache=settings.folder,
    )


def sizes_of(settings: "ServingSettings") -> "PagedSizes":
    """Return the sizes of each rank's cache."""
    from engine.inference.paged import PagedSizes

    return PagedSizes(
        settings.blocks, settings.block, settings.max_sequences, settings.max_length, settings.max_step_tokens
    )


class FirstRank:
    """The loop of the first rank: requests in, steps, tokens out."""

    def __init__(
        self, channel: "Channel", scheduler: "Scheduler", message: "StepMessage", idle_seconds: float, defers: bool
    ) -> None:
        """defers: a step's tokens are kept until `send_unsent`, so that ranks compute the next meanwhile."""
        self._channel, self._scheduler, self._message = channel, scheduler, message
        self._idle_seconds, self._defers = idle_seconds, defers
        self._unsent: StepReport | None = None
        self._wanted: dict[str, WantedAnswer] = {}
        self._answers: dict[str, list[int]] = {}
        self._started: set[str] = set()
        self._cancelled = False
        self._ended = time.perf_counter()

    def next_step(self) -> "ScheduledStep | None":
        """Take requests until there is a step, and write it; None if there is nothing to do for a while.

        Raises ChannelClosedError when the HTTP process is gone, EOFError when it says that the server ends.
        """
        self._take(0.0)
        batch = self._scheduler.next_batch()
        if batch is None:
            self.send_unsent()
            if self._cancelled:  # no step tells the state after it
                self._report((), 0, 0.0, {})
                self.send_unsent()
            self._take(self._idle_seconds)
            self._ended = time.perf_counter()
            batch = self._scheduler.next_batch()
        if batch is None:
            self._message.write_idle()
            return None
        full_logits = any(self._wanted[piece.key].sampling.needs_logits for piece in batch.choosing)
        self._message.write(batch, full_logits)
        return batch

    def finish(self, batch: "ScheduledStep", found: "Tensor | None", compute_seconds: float) -> None:
        """Choose tokens, note them and send them. found: token ids [rows], or logits [rows, vocabulary]."""
        chosen = self._chosen(batch, found)
        cached = self._newly_started(batch)
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
        self._report(tuple(tokens), len(batch.tokens), compute_seconds, cached)

    def _report(
        self, tokens: tuple[NewToken, ...], computed_tokens: int, compute_seconds: float, cached: dict[str, int]
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
        )
        self._ended, self._cancelled = now, False
        if not self._defers:
            self.send_unsent()

    def send_unsent(self) -> None:
        """Send the report that was kept. Raises ChannelClosedError when the HTTP process is gone."""
        report, self._unsent = self._unsent, None
        if report is not None:
            self._channel.send(report.message())

    def _newly_started(self, batch: "ScheduledStep") -> dict[str, int]:
        """Return how many tokens of a prompt were in the cache, for the answers that begin with this step."""
        new = [piece.key for piece in batch.choosing if piece.key not in self._started]
        self._started.update(new)
        return {key: self._scheduler.cached_tokens(key) for key in new}

    def _chosen(self, batch: "ScheduledStep", found: "Tensor | None") -> "dict[str, Chosen | None]":
        """Return the token of each choosing sequence; None where the logits are not finite."""
        from engine.serving.sampling import Chosen, next_token

        if found is None:
            return {}
        pieces = batch.choosing
        if found.dim() == 1:
            return {
                piece.key: Chosen(token) if token >= 0 else None
                for piece, token in zip(pieces, found.tolist(), strict=True)
            }
        chosen: dict[str, Chosen | None] = {}
        for piece, logits in zip(pieces, found.cpu().numpy(), strict=True):
            wanted = self._wanted[piece.key]
            try:
                chosen[piece.key] = next_token(logits, wanted.sampling, wanted.prompt, self._answers[piece.key])
            except FloatingPointError:
                chosen[piece.key] = None
        return chosen

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
        self._started.discard(key)

    def _refuse(self, key: str, message: str) -> None:
        self.send_unsent()  # it may hold earlier tokens of this answer
        self._channel.send({"refused": {"key": key, "message": message}})


def serve(settings: "ServingSettings", place: RankPlace, context: "Context", socket_path: Path) -> int:
    """Compute steps until the server ends. Returns the exit code."""
    import torch

    from engine.inference.weights import finalize_weights, load_shard
    from engine.models.weights import DTYPES, check_kind
    from engine.rank.agreement import raise_on_all_ranks
    from engine.serving.step_message import StepMessage
    from engine.serving.stepping import StepRunner

    raise_on_all_ranks(lambda: check_kind(context, "generate"), context)
    shard = raise_on_all_ranks(lambda: load_shard(context, DTYPES[settings.dtype]), context)
    finalize_weights(context)
    cache = raise_on_all_ranks(lambda: shard.new_paged_cache(sizes_of(settings)), context)
    obstacle = batch_dependence(shard, cache.batch_invariant)
    if settings.batch_invariant and obstacle is not None:
        raise ValueError(f"--batch-invariant: {obstacle}")
    runner = StepRunner(shard, context.communicators.pipeline, cache)
    # One rank alone reads what it wrote.
    device = context.device if context.communicators.world.size > 1 else torch.device("cpu")
    message = StepMessage(settings.max_step_tokens, settings.max_sequences, settings.max_length, settings.block, device)
    runner.warm_up()
    gc.freeze()  # the model and the libraries stay until the end: the collector need not look at them between steps
    context.barrier()
    if place.rank:
        return _follow(runner, message, context)
    ready = {
        "pid": os.getpid(),
        "cache_bytes": cache.nbytes,
        "batch_invariant": obstacle is None,
        "transport": context.communicators.tensor.transport,
    }
    return _lead(settings, runner, message, context, socket_path, ready)


def batch_dependence(shard: "Shard", attention_invariant: bool) -> str | None:
    """Return why a request's bits may depend on its company; None if they do not."""
    if not attention_invariant:
        return "attention here is torch's, whose sums depend on the batch (our kernels need float32 or bfloat16, a CPU)"
    paths = {one.path for one in shard.weights.packed()} & {"mkldnn", "torch"}
    if paths:
        return f"products here are of {', '.join(sorted(paths))}, whose sums depend on the batch"
    return None


def _follow(runner: "StepRunner", message: "StepMessage", context: "Context") -> int:
    world = context.communicators.world
    while True:
        message.share(world)
        step = message.read()
        if step is None:
            return 0
        if len(step.tokens):
            runner.run(step)


def _lead(
    settings: "ServingSettings",
    runner: "StepRunner",
    message: "StepMessage",
    context: "Context",
    socket_path: Path,
    ready: dict[str, Any],
) -> int:
    from engine.serving.blocks import BlockPool
    from engine.serving.channel import Channel, ChannelClosedError
    from engine.serving.scheduling import Scheduler, SchedulerLimits

    world, on_gpu = context.communicators.world, context.device.type == "cuda"
    channel = Channel(socket_path)
    limits = SchedulerLimits(settings.max_sequences, settings.max_step_tokens, settings.max_length)
    pool = BlockPool(settings.blocks, settings.block, settings.prefix_caching)
    first = FirstRank(
        channel,
        Scheduler(limits, pool),
        message,
        idle_seconds=_IDLE_SHARE * settings.group_timeout_seconds,
        defers=on_gpu or world.size > 1,
    )
    channel.send({"ready": ready})
    while True:
        try:
            batch = first.next_step()
        except (ChannelClosedError, EOFError):
            message.write_end()
            message.share(world)
            return 0
        message.share(world)
        if batch is None:
            continue
        began = time.perf_counter()
        step = message.read()
        assert step is not None
        # The next step finds out too that the HTTP process is gone, and ends the others, which compute this one.
        with suppress(ChannelClosedError):
            if not on_gpu:
                first.send_unsent()  # another rank computes while the HTTP process takes this one's core
        found = runner.run(step)
        with suppress(ChannelClosedError):
            first.send_unsent()  # the GPU computes
            found = None if found is None else found.cpu()  # waits for a GPU
            first.finish(batch, found, time.perf_counter() - began)


def main(arguments: list[str]) -> int:
    """Run a rank. Returns the exit code."""
    die_with_parent()
    from configs.common.files.reading import PLAN_BYTES, read_model
    from configs.plans.paths import JobPaths
    from configs.serving.settings import ServingSettings
    from engine.rank.binding import bind, devices_of_ranks
    from engine.rank.joining import make_context

    settings = read_model(Path(arguments[0]), ServingSettings, PLAN_BYTES)
    place, job = place_from_environment(), as_job(settings)
    bind(place, settings.cores_per_rank, devices_of_ranks(place, job.target))
    context, _ = make_context(job, JobPaths(Path(settings.folder)), place)
    return serve(settings, place, context, Path(arguments[1]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
