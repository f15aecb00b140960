"""Which tokens are computed next: a pure function of queue and cache, without torch, clocks or processes.

    scheduler = Scheduler(SchedulerLimits(...), BlockPool(512, 16))
    scheduler.add(Request("a", (1, 2, 3), max_tokens=8))
    batch = scheduler.next_batch()                # None: nothing to do
    behind = scheduler.next_batch(ahead=True)     # if wanted: the step after it, before it is known what it chose
    ended = scheduler.advance(batch, chosen)      # token ids of the rows that chose one

A step has at most `max_step_tokens` tokens. Sequences that decode come first, one token each, so that no prompt delays
them by more than a step; what is left goes to prompts, in pieces. Requests start in the order of their arrival, when a
slot is free and the cache holds their whole prompt. When the cache is full, the sequence that arrived last gives its
blocks back and is computed again later, before any newer request.

A step that is scheduled behind another names the tokens that this one has yet to choose by their rows, as `~row`. That
a sequence ends with such a token is found out a step later: what was computed beyond it is left out.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.serving.blocks import BlockPool

FinishReason = Literal["stop", "length"]
_LEAST_SCORED = 64
"""Rows of a step whose prompt tokens are scored, where fewer sequences than that run at once."""


@dataclass(frozen=True)
class SchedulerLimits:
    """max_sequences: at once. max_step_tokens: of a step. max_length: tokens of a sequence, answer included."""

    max_sequences: int
    max_step_tokens: int
    max_length: int

    @property
    def max_scored(self) -> int:
        """Tokens of prompts that a step scores: each needs the logits of all words, as a row that chooses does."""
        return max(_LEAST_SCORED, self.max_sequences)

    def __post_init__(self) -> None:
        assert 0 < self.max_sequences <= self.max_step_tokens


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, at most `max_tokens` new ones, and the tokens that end the answer.

    min_tokens: as many come before any of `stop_tokens` counts. done: new ones that are known already. scored: the
    prompt's own tokens are to be scored, so that all of it is computed, whatever the cache holds.
    """

    key: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    done: tuple[int, ...] = ()
    scored: bool = False


@dataclass
class _Sequence:
    """A request in progress.

    tokens: the last may be ~row, to be chosen by that row of the step that was scheduled last; computed: positions in
    the cache, those of scheduled steps included; kept: full blocks that the pool knows; slot: its row of the tables,
    while it runs; cached: tokens found in the cache when it first started.
    """

    request: Request
    tokens: list[int]
    arrival: int
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    kept: int = 0
    slot: int | None = None
    cached: int | None = None

    @property
    def answered(self) -> int:
        """Number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Number of tokens to compute; none while the last token of the answer is being chosen."""
        return len(self.tokens) - self.computed if self.answered < self.request.max_tokens else 0

    def scored(self, first: int, end: int) -> int:
        """Number of tokens of a piece that score the next one: of a prompt, up to its first answered token."""
        if not self.request.scored or self.answered:
            return 0
        return max(0, min(end, len(self.request.prompt) - 1) - first)


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one sequence: `length` from position `first`. chooses: whether the last chooses a token.

    scored: so many of them, the first ones, score the prompt's token behind them.
    """

    key: str
    slot: int
    first: int
    length: int
    chooses: bool
    scored: int = 0


@dataclass(frozen=True)
class ScheduledStep:
    """A step: its pieces and their tokens in order; new entries (slot, place, block) of the tables.

    A token ~row is the one that this row of the step before chooses.
    """

    pieces: tuple[TokenRun, ...]
    tokens: tuple[int, ...]
    assigned: tuple[tuple[int, int, int], ...]

    @property
    def choosing(self) -> tuple[TokenRun, ...]:
        """Pieces that choose a token, in order."""
        return tuple(piece for piece in self.pieces if piece.chooses)


@dataclass
class Counts:
    """What happened so far. prefix_tokens: of prompts when they start; cached_tokens: of those, found in the cache."""

    preemptions: int = 0
    prefix_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0


class Scheduler:
    """Queue, running sequences and their blocks."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        assert pool.count * pool.size >= limits.max_length, "the cache must hold the longest sequence"
        self.limits, self.pool = limits, pool
        self.counts = Counts()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._slots = list(range(limits.max_sequences - 1, -1, -1))
        self._by_key: dict[str, _Sequence] = {}
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def cached_tokens(self, key: str) -> int:
        """Return how many tokens of a prompt were found in the cache when it first started."""
        return self._by_key[key].cached or 0

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Raises ValueError if it can never run."""
        if not request.prompt:
            raise ValueError("the prompt has no tokens")
        if len(request.prompt) + request.max_tokens > self.limits.max_length:
            raise ValueError(
                f"{len(request.prompt)} tokens and {request.max_tokens} new ones exceed {self.limits.max_length}"
            )
        assert request.key not in self._by_key and request.max_tokens > len(request.done)
        self._by_key[request.key] = sequence = _Sequence(request, [*request.prompt, *request.done], self._arrivals)
        self._arrivals += 1
        self._waiting.append(sequence)

    def cancel(self, key: str) -> bool:
        """Remove a request, wherever it is; its blocks are free at once. Returns whether it was there."""
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        return True

    def next_batch(self, ahead: bool = False) -> ScheduledStep | None:
        """Choose the next step, and take its blocks; None if nothing is to be done.

        ahead: before the tokens of the step before are known (of one at most). None then also if a sequence would have
        to be preempted, which needs to know them.
        """
        if ahead and not self._has_blocks():
            return None
        room, scored_room = self.limits.max_step_tokens, self.limits.max_scored
        assigned: list[tuple[int, int, int]] = []
        pieces: list[TokenRun] = []
        decoding: list[_Sequence] = []
        prompts: list[_Sequence] = []
        for one in self._running:
            if left := one.left:
                (decoding if left == 1 else prompts).append(one)
        for sequence in (*decoding, *prompts):
            if sequence.slot is None or room == 0:  # preempted for an earlier one; or no room for a prompt now
                continue
            piece = self._piece(sequence, room, scored_room, assigned)
            if piece is not None:
                pieces.append(piece)
                room, scored_room = room - piece.length, scored_room - piece.scored
        while room and self._waiting and self._slots:
            if (self._waiting[0].request.scored and not scored_room) or not self._admit(assigned):
                break
            piece = self._piece(self._running[-1], room, scored_room, assigned)
            assert piece is not None, "a request is admitted with room for its prompt"
            pieces.append(piece)
            room, scored_room = room - piece.length, scored_room - piece.scored
        # Sequences run in the order of their arrival, so the last one, which is preempted, has no piece yet.
        assert all(self._by_key[piece.key].slot == piece.slot for piece in pieces)
        if not pieces:
            return None
        self.counts.steps += 1
        tokens: list[int] = []
        rows = 0
        for piece in pieces:
            sequence = self._by_key[piece.key]
            sequence.computed = piece.first + piece.length
            tokens += sequence.tokens[piece.first : sequence.computed]
            if piece.chooses:
                sequence.tokens.append(~rows)
                rows += 1
        return ScheduledStep(tuple(pieces), tuple(tokens), tuple(assigned))

    def advance(self, batch: ScheduledStep, chosen: Mapping[str, int]) -> dict[str, FinishReason]:
        """Note that the older of the scheduled steps was computed, and what its choosing sequences chose, by key.

        Returns the sequences that have ended. Sequences that were cancelled or have ended since then are left out.
        """
        ended: dict[str, FinishReason] = {}
        for piece in batch.pieces:
            sequence = self._by_key.get(piece.key)
            if sequence is None:
                continue
            end = piece.first + piece.length
            self._keep_full_blocks(sequence, end)
            if not piece.chooses:
                continue
            sequence.tokens[end] = token = chosen[piece.key]
            reason = _reason(sequence.request, end + 1 - len(sequence.request.prompt), token)
            if reason is not None:
                ended[piece.key] = reason
                del self._by_key[piece.key]
                self._leave(sequence)
        return ended

    def _piece(
        self, sequence: _Sequence, room: int, scored_room: int, assigned: list[tuple[int, int, int]]
    ) -> TokenRun | None:
        """Take blocks for the next tokens of a running sequence, at most `room`, of which so many are scored.

        None if it was preempted itself, or if it needs room for scores and there is none.
        """
        assert sequence.slot is not None
        first = sequence.computed
        length = min(sequence.left, room)
        if sequence.scored(first, first + length) > scored_room:
            length = scored_room
        if not length:
            return None
        end = first + length
        while len(sequence.blocks) * self.pool.size < end:
            block = self.pool.take()
            if block is None:
                last = max(self._running, key=lambda one: one.arrival)
                # Its slot may begin another sequence in this very step.
                assigned[:] = (entry for entry in assigned if entry[0] != last.slot)
                self._preempt(last)
                if last is sequence:
                    return None
                continue
            assigned.append((sequence.slot, len(sequence.blocks), block))
            sequence.blocks.append(block)
        chooses, scored = end == len(sequence.tokens), sequence.scored(first, end)
        return TokenRun(sequence.request.key, sequence.slot, first, length, chooses, scored)

    def _has_blocks(self) -> bool:
        """Return whether the running sequences' next pieces fit into what is free."""
        most = len(self._running) + -(-self.limits.max_step_tokens // self.pool.size)
        if most <= self.pool.free:
            return True
        ends = ((one, one.computed + min(one.left, self.limits.max_step_tokens)) for one in self._running)
        return sum(max(0, -(-end // self.pool.size) - len(one.blocks)) for one, end in ends) <= self.pool.free

    def _admit(self, assigned: list[tuple[int, int, int]]) -> bool:
        """Start the first request of the queue if the cache holds its tokens, those it shares included."""
        sequence = self._waiting[0]
        count = len(sequence.tokens)
        if self.pool.caching:
            self.pool.extend_hashes(sequence.hashes, sequence.tokens, count)
        # The last token is always computed: it chooses the next one. So are those that score others.
        known = 0 if sequence.scored(0, count) else (count - 1) // self.pool.size
        shared = self.pool.match(sequence.hashes[:known])
        wanted = -(-count // self.pool.size) - len(shared)
        if wanted > self.pool.free - self.pool.unused(shared):
            return False
        self._waiting.popleft()
        self.pool.share(shared)
        sequence.slot = self._slots.pop()
        sequence.blocks = list(shared)
        assigned += ((sequence.slot, place, block) for place, block in enumerate(shared))
        sequence.kept = len(shared)
        sequence.computed = len(shared) * self.pool.size
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.counts.prefix_tokens += count
            self.counts.cached_tokens += sequence.computed
        self._running.append(sequence)
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        """Take everything from a running sequence and put it first in the queue, behind older preempted ones."""
        self.counts.preemptions += 1
        self._leave(sequence)
        sequence.computed = 0
        behind = 0
        while behind < len(self._waiting) and self._waiting[behind].arrival < sequence.arrival:
            behind += 1
        self._waiting.insert(behind, sequence)

    def _leave(self, sequence: _Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], None

    def _keep_full_blocks(self, sequence: _Sequence, computed: int) -> None:
        """Tell the pool of full blocks within the positions that have been computed."""
        if not self.pool.caching:
            return
        self.pool.extend_hashes(sequence.hashes, sequence.tokens, computed)
        for place in range(sequence.kept, computed // self.pool.size):
            self.pool.keep(sequence.blocks[place], sequence.hashes[place])
            sequence.kept = place + 1


def _reason(request: Request, answered: int, token: int) -> FinishReason | None:
    """Return why a request ends with its new token number `answered`; None if it goes on."""
    if answered >= request.min_tokens and token in request.stop_tokens:
        return "stop"
    return "length" if answered >= request.max_tokens else None


def positions_of(pieces: Sequence[TokenRun]) -> tuple[list[int], list[int], list[int]]:
    """Return slot and position of each token of a step, and the rows whose logits are needed.

    These are the row that each choosing piece ends with, then those that score tokens of prompts, piece by piece.
    """
    slots: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    scoring: list[int] = []
    for piece in pieces:
        scoring += range(len(slots), len(slots) + piece.scored)
        slots += [piece.slot] * piece.length
        positions += range(piece.first, piece.first + piece.length)
        if piece.chooses:
            rows.append(len(slots) - 1)
    return slots, positions, rows + scoring
