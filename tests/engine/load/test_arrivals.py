from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load.arrivals import MIN_BURSTINESS, ConstantArrivals, GammaArrivals, PoissonArrivals
from configs.load.lengths import Lengths, LognormalLengths, UniformLengths
from engine.load.arrivals import TraceRow, arrival_seconds, read_trace
from engine.load.lengths import draw_length

RATES = st.floats(0.1, 500)
PROCESSES = (
    st.builds(PoissonArrivals, rate=RATES)
    | st.builds(GammaArrivals, rate=RATES, burstiness=st.floats(MIN_BURSTINESS, 50))
    | st.builds(ConstantArrivals, rate=RATES)
)
SIZES = st.integers(1, 99)
LENGTHS = (
    st.integers(1, 4096)
    | st.builds(lambda one, other: UniformLengths(low=min(one, other), high=max(one, other)), SIZES, SIZES)
    | st.builds(LognormalLengths, mean=st.floats(0.1, 5000), sigma=st.floats(0.01, 4))
)


@given(PROCESSES, st.floats(0.1, 20), st.none() | st.integers(1, 50), st.integers(0, 9))
def test_due_times_ascend_within_the_bounds_and_follow_the_seed(
    process: PoissonArrivals | GammaArrivals | ConstantArrivals, seconds: float, most: int | None, seed: int
) -> None:
    times = arrival_seconds(process, seconds, most, np.random.default_rng(seed))
    assert (np.diff(times) >= 0).all() and (times >= 0).all() and (times < seconds).all()
    assert most is None or len(times) <= most
    again = arrival_seconds(process, seconds, most, np.random.default_rng(seed))
    assert np.array_equal(times, again)


@pytest.mark.parametrize(
    ("process", "variation"),
    [(PoissonArrivals(rate=7), 1.0), (GammaArrivals(rate=7, burstiness=0.25), 2.0), (ConstantArrivals(rate=7), 0.0)],
)
def test_rate_and_variation_are_those_asked_for(
    process: PoissonArrivals | GammaArrivals | ConstantArrivals, variation: float
) -> None:
    times = arrival_seconds(process, None, 40_000, np.random.default_rng(1))
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(7, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.04, abs=1e-9)


def test_a_longer_run_begins_with_the_same_requests() -> None:
    short, long = (arrival_seconds(PoissonArrivals(rate=5), s, None, np.random.default_rng(3)) for s in (10, 40))
    assert np.array_equal(short, long[: len(short)])


@given(LENGTHS, st.integers(0, 99))
def test_lengths_stay_within_their_bounds(lengths: Lengths, seed: int) -> None:
    drawn = draw_length(lengths, np.random.default_rng(seed))
    low, high = (
        (lengths.low, lengths.high)
        if isinstance(lengths, UniformLengths)
        else (1, lengths.max)
        if isinstance(lengths, LognormalLengths)
        else (lengths, lengths)
    )
    assert low <= drawn <= high


def test_the_mean_of_lognormal_lengths_is_that_of_the_lengths() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_length(LognormalLengths(mean=128, sigma=0.7, max=100_000), rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(128, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.7, rel=0.03)


def test_a_trace_begins_at_its_first_request_and_is_sped_up(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"seconds": 14, "new_tokens": 3}\n\n{"seconds": 10, "prompt_tokens": 7}\n')
    assert read_trace(file, 2.0) == [TraceRow(0.0, 7, None), TraceRow(2.0, None, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ('{"seconds": -1}', "line 1: `seconds`: expected seconds from 0 to below 10,000,000,000, got -1"),
        ('{"seconds": true}', "expected seconds from 0"),
        ('{"seconds": 1718000000000}', "expected seconds from 0 to below 10,000,000,000, got 1718000000000"),
        ('{"seconds": 1}\n{"seconds": 2, "new_tokens": 0}', "line 2: `new_tokens`"),
        ("[1]", "expected an object"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(file, 1.0)


def test_a_trace_is_in_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(f'{{"seconds": {second}}}' for second in (3, 1, 2)))
    assert all(first.seconds <= second.seconds for first, second in pairwise(read_trace(file, 1.0)))


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"seconds": 1}\r\n{"seconds": 3}\r\n')
    assert [row.seconds for row in read_trace(path, 2.0)] == [0.0, 1.0]
