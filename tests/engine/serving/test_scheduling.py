"""The scheduler against a model of the cache that notices every wrong, stale or lost position."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving import scheduling
from engine.serving.blocks import BlockPool
from engine.serving.scheduling import Request, ScheduledStep, Scheduler, SchedulerLimits, positions_of

_WORDS = 7


def next_token(tokens: list[int]) -> int:
    """A model whose next token depends on every token before."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 1) % 10007
    return value % _WORDS


def answer(request: Request) -> list[int]:
    """What a request is answered when it is alone."""
    tokens = list(request.prompt)
    for count in range(1, request.max_tokens + 1):
        tokens.append(next_token(tokens))
        if count >= request.min_tokens and tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]


@dataclass
class CacheModel:
    """Tables and blocks as the ranks have them: each position holds the token that was computed there."""

    size: int
    tables: dict[tuple[int, int], int] = field(default_factory=dict)
    store: dict[tuple[int, int], int] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    scored: dict[str, list[int]] = field(default_factory=dict)

    def run(self, batch: ScheduledStep) -> dict[str, int]:
        # On a GPU all are written at once: of two for one place either may win.
        assert len({entry[:2] for entry in batch.assigned}) == len(batch.assigned)
        for slot, place, block in batch.assigned:
            self.tables[slot, place] = block
        slots, positions, rows = positions_of(batch.pieces)
        assert len(slots) == len(batch.tokens)
        for slot, position, token in zip(slots, positions, batch.tokens, strict=True):
            self.store[self._at(slot, position)] = token if token >= 0 else self.chosen[~token]
        choosing, scoring = rows[: len(batch.choosing)], rows[len(batch.choosing) :]
        assert [slots[row] for row in choosing] == [piece.slot for piece in batch.choosing]
        assert [slots[row] for row in scoring] == [piece.slot for piece in batch.pieces for _ in range(piece.scored)]
        for piece in batch.pieces:
            own = [positions[row] for row in scoring if slots[row] == piece.slot]
            assert own == list(range(piece.first, piece.first + piece.scored))
            if own:
                before = self.scored.setdefault(piece.key, [])
                before[piece.first :] = own  # again, where it was preempted
        chosen = {
            piece.key: next_token([self.store[self._at(piece.slot, p)] for p in range(piece.first + piece.length)])
            for piece in batch.choosing
        }
        self.chosen = list(chosen.values())
        return chosen

    def _at(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot, position // self.size], position % self.size


class Server:
    """Scheduler and cache, with the answers so far. ahead: a step is scheduled before the one before is known."""

    def __init__(
        self, blocks: int, size: int, limits: SchedulerLimits, caching: bool = True, ahead: bool = False
    ) -> None:
        self.ahead = ahead
        self.launched: tuple[ScheduledStep, dict[str, int]] | None = None
        self.overlapped = 0
        self.pool = BlockPool(blocks, size, caching)
        self.scheduler = Scheduler(limits, self.pool)
        self.cache = CacheModel(size)
        self.answers: dict[str, list[int]] = {}
        self.started: list[str] = []
        self.ended: dict[str, str] = {}
        self.cancelled: set[str] = set()

    def step(self) -> ScheduledStep | None:
        batch = self._launch()
        if batch is None:
            return None
        if not self.ahead:
            self._finish()
        return batch

    def _launch(self) -> ScheduledStep | None:
        batch = self.scheduler.next_batch(ahead=self.launched is not None)
        if batch is None and self.launched is not None:
            self._finish()
            batch = self.scheduler.next_batch()
        if batch is None:
            return None
        assert len(batch.tokens) <= self.scheduler.limits.max_step_tokens
        assert sum(piece.scored for piece in batch.pieces) <= self.scheduler.limits.max_scored
        assert len({piece.slot for piece in batch.pieces}) == len(batch.pieces)
        for piece in batch.pieces:
            assert piece.first + piece.length < self.scheduler.limits.max_length, "the last token is never computed"
            if piece.key not in self.started:
                self.started.append(piece.key)
        chosen = self.cache.run(batch)
        if self.launched is not None:
            self.overlapped += 1
            self._finish()
        self.launched = batch, chosen
        return batch

    def _finish(self) -> None:
        assert self.launched is not None
        (batch, chosen), self.launched = self.launched, None
        for key, token in chosen.items():
            if key not in self.ended and key not in self.cancelled:
                self.answers.setdefault(key, []).append(token)
        self.ended |= self.scheduler.advance(batch, chosen)

    def cancel(self, key: str) -> bool:
        found = self.scheduler.cancel(key)
        if found:
            self.cancelled.add(key)
        return found

    def finish(self) -> None:
        for _ in range(5000):
            if self.step() is None:
                return
        raise AssertionError("the server does not come to an end")


_requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which beginning
        st.integers(1, 25),  # tokens of it
        st.lists(st.integers(0, _WORDS - 1), max_size=4),  # a tail of its own
        st.integers(1, 12),
        st.sets(st.integers(0, _WORDS - 1), max_size=2),
        st.integers(0, 30),  # after how many steps it arrives
        st.one_of(st.none(), st.integers(0, 40)),  # at which step it is cancelled
        st.sampled_from([False, False, True]),  # whether its prompt is scored
    ),
    min_size=1,
    max_size=12,
)


def made_request(key: int, beginning: int, length: int, tail: list[int], new: int, stops: set[int]) -> Request:
    prompt = [(beginning + place * (beginning + 1)) % _WORDS for place in range(length)] + tail
    return Request(str(key), tuple(prompt), new, frozenset(stops))


@settings(max_examples=400, deadline=None)
@given(
    _requests,
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
)
def test_every_answer_is_the_one_given_alone(
    wanted: list[Any], size: int, spare: int, sequences: int, more: int, caching: bool, ahead: bool
) -> None:
    limits = SchedulerLimits(sequences, sequences + more, 41)
    server = Server(-(-41 // size) + spare, size, limits, caching, ahead)
    requests = [replace(made_request(key, *one[:5]), scored=one[7]) for key, one in enumerate(wanted)]
    cancelled = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduling, "_LEAST_SCORED", 1)
        for step in range(60):
            for request, one in zip(requests, wanted, strict=True):
                if one[5] == step:
                    server.scheduler.add(request)
                if one[6] is not None and one[5] <= one[6] == step:
                    cancelled[request.key] = server.cancel(request.key)
            server.step()
        server.finish()
    for request in requests:
        expected = answer(request)
        if cancelled.get(request.key):
            got = server.answers.get(request.key, [])
            assert got == expected[: len(got)] and request.key not in server.ended
        else:
            assert server.answers[request.key] == expected
            assert server.ended[request.key] == ("stop" if expected[-1] in request.stop_tokens else "length")
            every = range(len(request.prompt) - 1) if request.scored else ()
            assert server.cache.scored.get(request.key, []) == list(every)
    assert server.pool.free == server.pool.count, "a block is lost"
    assert server.scheduler.running == server.scheduler.waiting == 0


def requests_of(count: int, prompt: int, new: int) -> list[Request]:
    return [made_request(key, 0, prompt, [key % _WORDS, key // _WORDS % _WORDS], new, set()) for key in range(count)]


def test_requests_start_in_the_order_of_arrival() -> None:
    server = Server(12, 4, SchedulerLimits(3, 6, 40))
    for request in requests_of(9, 12, 6):
        server.scheduler.add(request)
    server.finish()
    assert server.started == [str(key) for key in range(9)]


def test_a_full_cache_preempts_and_loses_nothing() -> None:
    server = Server(10, 4, SchedulerLimits(4, 16, 40), caching=False)
    requests = requests_of(4, 6, 20)
    for request in requests:
        server.scheduler.add(request)
    server.finish()
    assert server.scheduler.counts.preemptions > 0
    assert server.answers == {request.key: answer(request) for request in requests}
    assert server.scheduler.counts.prefix_tokens == sum(len(request.prompt) for request in requests)


def test_a_slot_that_changes_hands_within_a_step_is_told_its_new_blocks_alone() -> None:
    """The second request takes a block, finds no other, and starts again at once with blocks of the first."""
    server = Server(4, 4, SchedulerLimits(2, 8, 16))
    first = made_request(0, 2, 4, [], 3, set())
    second = made_request(1, 2, 9, [], 1, set())
    for request in (first, second):
        server.scheduler.add(request)
    server.step()
    batch = server.step()
    assert server.scheduler.counts.preemptions == 1 and batch is not None
    assert [piece.key for piece in batch.pieces] == ["0", "1"]
    server.finish()
    assert server.answers == {"0": answer(first), "1": answer(second)}


def test_a_shared_beginning_is_computed_once() -> None:
    server = Server(100, 4, SchedulerLimits(8, 64, 80))
    requests = requests_of(8, 32, 2)
    server.scheduler.add(requests[0])
    server.finish()
    for request in requests[1:]:
        server.scheduler.add(request)
    batch = server.step()
    assert batch is not None and len(batch.tokens) == 7 * 2
    server.finish()
    assert server.answers == {request.key: answer(request) for request in requests}
    assert server.scheduler.counts.cached_tokens == 7 * 32


def test_a_known_block_goes_only_when_room_is_needed_the_oldest_first() -> None:
    server = Server(10, 4, SchedulerLimits(1, 40, 40))
    first, second = made_request(0, 1, 16, [], 1, set()), made_request(1, 2, 16, [], 1, set())
    for request in (first, second, Request("2", first.prompt, 1), Request("3", second.prompt, 1)):
        server.scheduler.add(request)
        server.finish()
    assert server.scheduler.counts.cached_tokens == 2 * 12
    server.scheduler.add(made_request(4, 3, 25, [], 8, set()))
    server.finish()
    server.scheduler.add(Request("5", second.prompt, 1))
    server.finish()
    server.scheduler.add(Request("6", first.prompt, 1))
    server.finish()
    found = server.scheduler.counts.cached_tokens - 2 * 12
    assert 0 < found < 12, "the beginning of the newer one stayed, the older went"


def test_a_prompt_that_is_scored_is_computed_from_its_beginning_in_parts() -> None:
    """A block that is found in the cache has no logits; those of a long prompt at once are gigabytes."""
    server = Server(100, 4, SchedulerLimits(4, 200, 230))
    plain = made_request(0, 1, 150, [], 1, set())
    scored = replace(plain, key="1", scored=True)
    for request in (plain, scored, replace(scored, key="2", done=(3,), max_tokens=2)):
        server.scheduler.add(request)
        server.finish()
    assert server.cache.scored == {"1": list(range(149))}, "an answer that goes on has its scores"
    assert server.scheduler.counts.steps == 1 + 3 + 1
    assert server.scheduler.counts.cached_tokens == 148, "of the last one alone"


def test_decoding_is_never_behind_prompts() -> None:
    server = Server(100, 4, SchedulerLimits(4, 8, 80))
    requests = [made_request(0, 1, 3, [], 20, set()), *requests_of(4, 40, 2)[1:]]
    for request in requests:
        server.scheduler.add(request)
    server.step()
    for _ in range(15):
        batch = server.step()
        assert batch is not None and batch.pieces[0].key == "0" and batch.pieces[0].chooses


@pytest.mark.parametrize(("prompt", "new", "word"), [((), 1, "no tokens"), ((1,) * 30, 20, "exceed 41")])
def test_what_can_never_run_is_refused(prompt: tuple[int, ...], new: int, word: str) -> None:
    scheduler = Scheduler(SchedulerLimits(2, 8, 41), BlockPool(12, 4))
    with pytest.raises(ValueError, match=word):
        scheduler.add(Request("a", prompt, new))
    assert scheduler.waiting == 0


def test_a_cancelled_request_frees_its_slot_at_once() -> None:
    server = Server(30, 4, SchedulerLimits(1, 8, 41))
    for request in requests_of(2, 6, 10):
        server.scheduler.add(request)
    server.step()
    assert server.scheduler.cancel("0") and not server.scheduler.cancel("0")
    batch = server.step()
    assert batch is not None and batch.pieces[0].key == "1"


def test_a_step_behind_another_needs_no_token_of_it() -> None:
    server = Server(40, 4, SchedulerLimits(4, 16, 29), ahead=True)
    requests = [*requests_of(3, 7, 20), made_request(3, 1, 9, [], 20, {3})]
    for request in requests:
        server.scheduler.add(request)
    server.finish()
    assert server.answers == {request.key: answer(request) for request in requests}
    assert server.ended["3"] == "stop", "the case must have an end that is known a step late"
    assert server.overlapped == server.scheduler.counts.steps - 1, "every step but the first was behind another"
    assert server.pool.free == server.pool.count


def test_a_full_cache_waits_for_the_tokens_of_a_step_before_it_preempts() -> None:
    server = Server(10, 4, SchedulerLimits(4, 16, 40), caching=False, ahead=True)
    requests = requests_of(4, 6, 20)
    for request in requests:
        server.scheduler.add(request)
    server.finish()
    assert server.scheduler.counts.preemptions > 0 and server.overlapped > 0
    assert server.answers == {request.key: answer(request) for request in requests}
