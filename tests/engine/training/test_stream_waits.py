"""Exposed communication on a GPU, by events of a stream. GPU and events are made up and tell scripted times."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.training import steps
from engine.training.steps import Stopwatch
from engine.training.strategies.exposed import BucketHook, time_stream_waits
from engine.training.trainer import Exposed

GPU = torch.device("cuda", 0)


class Clock:
    """Of the made-up GPU, in milliseconds; its events may be read only when it has been synchronised."""

    def __init__(self) -> None:
        self.now = 0.0
        self.synchronised = True


class Stream:
    """The class that libraries call `wait_event` of: here each wait takes what the event says."""

    clock: Clock

    def wait_event(self, milliseconds: float) -> None:
        self.clock.now += milliseconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    Stream.clock = clock

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any = None) -> None:
            self.at, clock.synchronised = clock.now, False

        def elapsed_time(self, other: Any) -> float:
            assert clock.synchronised, "read before the device was synchronised"
            return float(other.at - self.at)

    computing = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: computing)
    yield clock


def exposed_of_gpu() -> Exposed:
    return Exposed(stream=torch.cuda.current_stream(GPU))


def test_waits_of_the_computing_stream_count_in_their_phase_and_no_others(clock: Clock) -> None:
    exposed, own = exposed_of_gpu(), Stream.wait_event
    remove = time_stream_waits(exposed)
    assert Stream.wait_event is not own
    computing, other = exposed.stream, Stream()
    assert computing is not None
    watch = Stopwatch(exposed, GPU)
    watch.begin()
    clock.now += 10
    watch.lap("data")
    computing.wait_event(3.0)  # type: ignore[arg-type]
    clock.now += 20
    watch.lap("forward")
    other.wait_event(40.0)  # of a stream for communication: hidden
    computing.wait_event(5.0)  # type: ignore[arg-type]
    watch.lap("backward")
    with pytest.raises(AssertionError, match="before the device was synchronised"):
        watch.read()
    clock.synchronised = True
    seconds, waited = watch.read()
    assert waited == pytest.approx(0.008) and exposed.seconds == pytest.approx(0.008)
    assert [seconds[name] for name in ("data", "forward", "backward")] == pytest.approx([0.010, 0.020, 0.040])
    remove()
    assert Stream.wait_event is own
    # The next step begins anew.
    watch.begin()
    with exposed.waiting():
        clock.now += 2
    watch.lap("optimizer")
    clock.synchronised = True
    assert watch.read()[1] == pytest.approx(0.002) and exposed.seconds == pytest.approx(0.010)


def test_the_last_bucket_of_ddp_is_marked_in_the_stream(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    exposed = exposed_of_gpu()
    hook = BucketHook(exposed, None)

    class Work:
        def get_future(self) -> Any:
            return torch.futures.Future()

    class Bucket:
        def buffer(self) -> torch.Tensor:
            return torch.ones(4)

    monkeypatch.setattr("torch.distributed.all_reduce", lambda *given, **named: Work())
    for _ in range(2):  # only what follows the last one is exposed
        hook.hand_over(None, Bucket())  # type: ignore[arg-type]
        clock.now += 7
    hook.backward_ended()
    hook.backward_ended()  # of a micro-batch without an exchange
    clock.synchronised = True
    assert exposed.settle() == pytest.approx([0.007]) and exposed.seconds == pytest.approx(0.007)
    assert exposed.bytes == 32 and exposed.calls == 2


def test_a_cpu_has_no_streams_to_wait_for() -> None:
    own = torch.cuda.Stream.wait_event
    time_stream_waits(Exposed())()
    assert torch.cuda.Stream.wait_event is own and steps.PHASES
