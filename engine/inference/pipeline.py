"""Pipelined decoding of a replica: stages work concurrently on different micro-batches, and only token ids return.

    replica = Replica(shard, pipeline, micro_batch_size, rows, capacity)
    for decoded in replica.decode(batch, new_tokens): ...

    replica = Replica(decoder, pipeline, micro_batch_size, rows, capacity, encoder)     # batches of sources
    states = Stage(encoder, pipeline).states(micro_batches(batch, size))                # an encoder alone

Every rank of a replica calls the same methods with the same batch. Work is numbered: number i is decode step i // M of
micro-batch i % M, of M. Each stage does its numbers in order; the first begins number i only when the token ids of
number i - (stages + 1) have come back, which keeps every stage busy and bounds the mailboxes between them.
"""

import time

import numpy as np
import torch
from torch import Tensor

from engine.correctness.answers import Consume
from engine.inference.cache import KeyValueCache
from engine.inference.model import Shard
from engine.inference.recorded import DecodePath, decode_step, path_of
from engine.parallel.communicator import Communicator
from engine.prompts.decoded import Decoded, synchroniser
from engine.prompts.tokens import PromptBatch

_LOGITS_BYTES = 32 << 20  # of logits alive at once while prompts are scored


def micro_batches(batch: PromptBatch, size: int) -> list[PromptBatch]:
    """Split a batch into parts of at most `size` rows, in order."""
    return [batch.rows(slice(start, start + size)) for start in range(0, batch.tokens.shape[0], size)]


class PipelineStage:
    """One stack's layers on this rank, and the previous and next stage."""

    def __init__(self, shard: Shard, pipeline: Communicator) -> None:
        self.shard, self.pipeline = shard, pipeline

    def inputs(self, tokens: Tensor) -> Tensor:
        """Return this stage's inputs: the tokens, or the hidden states [rows, length, hidden] of the previous stage."""
        if self.shard.first:
            return tokens
        shape = (*tokens.shape, self.shard.config.hidden)
        hidden = torch.empty(shape, dtype=self.shard.stream_dtype, device=self.shard.device)
        return self.pipeline.receive(hidden, self.pipeline.index - 1)

    def passed_on(self, hidden: Tensor) -> Tensor | None:
        """Send hidden states to the next stage; on the last stage return them, or their result."""
        if self.shard.last:
            return hidden
        self.pipeline.send(hidden, self.pipeline.index + 1)
        return None

    def states(self, pieces: list[PromptBatch]) -> list[Tensor]:
        """Return an encoder's last hidden states of micro-batches that pass through the stages in sequence.

        Only the last stage returns states; the others have passed theirs on.
        """
        found = [self.passed_on(self.shard.encode(self.inputs(piece.tokens), piece.padding)) for piece in pieces]
        return [states for states in found if states is not None]


class Replica:
    """This rank's part of a replica, with a key-value cache for every concurrent micro-batch.

    rows: sequences of the largest batch. capacity: positions of the longest sequence, new tokens included. encoder:
    this rank's encoder layers of an encoder-decoder; batches to decode are then sources, and batches to score have a
    source. recorded: whether steps on a CPU may be replayed from a recording, which hides operators from a profiler.
    """

    def __init__(
        self,
        shard: Shard,
        pipeline: Communicator,
        micro_batch_size: int,
        rows: int,
        capacity: int,
        encoder: Shard | None = None,
        recorded: bool = True,
    ) -> None:
        self.shard, self.pipeline, self.micro_batch_size = shard, pipeline, micro_batch_size
        self.records = recorded and shard.device.type == "cpu"
        self.stage = PipelineStage(shard, pipeline)
        self._encoder = None if encoder is None else PipelineStage(encoder, pipeline)
        count = -(-rows // micro_batch_size)
        self._caches = [shard.new_cache(min(micro_batch_size, rows), capacity) for _ in range(count)]
        self._synchronise = synchroniser(shard.device)
        self._scored = 0

    @torch.inference_mode()
    def decode(self, batch: PromptBatch, new_tokens: int) -> list[Decoded]:
        """Decode `new_tokens` tokens greedily after each prompt; yield one result for each micro-batch."""
        pieces = micro_batches(batch, self.micro_batch_size)
        run = _Run(self, [self._opening(piece) for piece in pieces], new_tokens)
        self._synchronise()
        began = time.perf_counter()
        for cache in self._caches:
            cache.clear()
        if self._encoder is not None:
            self._read_sources(pieces, self._caches)
        run.to_the_end()
        return [Decoded(began, stamps, tokens) for stamps, tokens in zip(run.stamps, run.tokens, strict=True)]

    @property
    def decode_path(self) -> DecodePath:
        """Current path of this rank's decode steps; CUDA graphs are recorded, too."""
        return (
            "recorded"
            if self.shard.uses_graphs or all(path_of(cache) == "recorded" for cache in self._caches)
            else "steps"
        )

    def _opening(self, piece: PromptBatch) -> PromptBatch:
        """Return the decoder's first input: the prompts, or the start token of an encoder-decoder."""
        if self._encoder is None:
            return piece
        return PromptBatch(torch.full_like(piece.tokens[:, :1], self.shard.config.start_token), None, piece)

    def _read_sources(self, sources: list[PromptBatch], caches: list[KeyValueCache]) -> None:
        """Encode micro-batches and set the source of each cache, on every stage."""
        assert self._encoder is not None
        found = self._encoder.states(sources)
        config = self.shard.config
        for place, (source, cache) in enumerate(zip(sources, caches, strict=False)):
            shape = (*source.tokens.shape, config.hidden)
            states = found[place] if found else torch.empty(shape, dtype=self.shard.dtype, device=self.shard.device)
            cache.set_source(self.pipeline.broadcast(states, self.pipeline.size - 1), source.padding)

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Compute logits of all positions of prompts [rows, length], at most a micro-batch, from one prefill."""
        cache = self._next_cache(batch)
        self._score(batch.tokens, cache, batch.padding, 0, consume)

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Compute logits of the last `steps` positions: the rest is prefilled, these are decoded one by one."""
        cache = self._next_cache(batch)
        length = batch.tokens.shape[1]
        assert 0 < steps < length
        self._through(batch.tokens[:, : length - steps], cache, batch.padding, last_only=True)
        for position in range(length - steps, length):
            self._score(batch.tokens[:, position : position + 1], cache, batch.padding, position, consume)

    def _next_cache(self, batch: PromptBatch) -> KeyValueCache:
        """Return the caches in turn, so that each is reused after other prompts."""
        cache = self._caches[self._scored % len(self._caches)]
        self._scored += 1
        cache.clear()
        if batch.source is not None:
            self._read_sources([batch.source], [cache])
        return cache

    def _score(
        self, tokens: Tensor, cache: KeyValueCache, padding: Tensor | None, first: int, consume: Consume
    ) -> None:
        hidden = self._through(tokens, cache, padding, last_only=False)
        if hidden is None:
            return
        rows, length = tokens.shape
        at_once = max(1, _LOGITS_BYTES // (4 * rows * self.shard.config.vocabulary))
        for start in range(0, length, at_once):
            logits = self.shard.full_logits(self.shard.head(hidden[:, start : start + at_once]))
            if self.shard.grid.reports_results:
                consume(first + start, logits.float())

    def _through(self, tokens: Tensor, cache: KeyValueCache, padding: Tensor | None, last_only: bool) -> Tensor | None:
        """Run all stages in sequence. Returns the last hidden states on the last stage, else None."""
        hidden = self.shard.forward(self.stage.inputs(tokens), cache, padding, last_only and self.shard.last)
        return self.stage.passed_on(hidden)

    def cache_of(self, place: int) -> KeyValueCache:
        """Return the cache of a micro-batch of the batch being decoded."""
        return self._caches[place]

    def synchronise(self) -> None:
        """Wait until the device has finished."""
        self._synchronise()


class _Run:
    """One batch in progress: this rank's known tokens, and their times."""

    def __init__(self, replica: Replica, pieces: list[PromptBatch], new_tokens: int) -> None:
        self.replica, self.pieces, self.steps = replica, pieces, new_tokens
        self.stamps = [np.zeros(new_tokens) for _ in pieces]
        self.tokens = [torch.empty((piece.tokens.shape[0], new_tokens), dtype=torch.int64) for piece in pieces]
        self.tokens = [tokens.to(replica.shard.device) for tokens in self.tokens]
        # Each step's column, for writing and for reading: creating all views at once is cheaper than one by one.
        self.columns = [tokens.unbind(1) for tokens in self.tokens]
        self.inputs = [tokens[:, :, None].unbind(1) for tokens in self.tokens]
        self.returned = 0

    def to_the_end(self) -> None:
        """Process all numbers of this stage, in order; then receive outstanding ids, on the first of several stages."""
        total = self.steps * len(self.pieces)
        ahead = min(len(self.pieces), self.replica.pipeline.size + 1)
        waits = self.replica.shard.first and not self.replica.shard.last
        for number in range(total):
            if waits:
                self._take_back(number - ahead + 1)
            self._one(number)
        if waits:
            self._take_back(total)

    def _one(self, number: int) -> None:
        """Run one stage on one micro-batch."""
        step, place = divmod(number, len(self.pieces))
        piece, replica = self.pieces[place], self.replica
        shard, stage = replica.shard, replica.stage
        # Only the first stage needs the ids; the others need their number.
        tokens = piece.tokens if step == 0 else self.inputs[place][step - 1]
        inputs, cache = stage.inputs(tokens), replica.cache_of(place)
        if replica.records and tokens.shape[1] == 1:
            made = decode_step(shard, cache, inputs, piece.padding)
        else:
            hidden = shard.forward(inputs, cache, piece.padding, last_only=shard.last)
            made = shard.greedy(shard.head(hidden)[:, -1]) if shard.last else hidden
        chosen = stage.passed_on(made)
        if chosen is None:
            return
        replica.synchronise()
        self.stamps[place][step] = time.perf_counter()
        self.columns[place][step].copy_(chosen)
        if not shard.first:
            replica.pipeline.send(chosen, 0)

    def _take_back(self, until: int) -> None:
        """Receive the ids of all numbers below `until`, on the first stage."""
        while self.returned < until:
            step, place = divmod(self.returned, len(self.pieces))
            rows = self.tokens[place].shape[0]
            chosen = torch.empty(rows, dtype=torch.int64, device=self.replica.shard.device)
            self.replica.pipeline.receive(chosen, self.replica.pipeline.size - 1)
            self.columns[place][step].copy_(chosen)
            self.stamps[place][step] = time.perf_counter()
            self.returned += 1
