"""Points in time of a device's work: of the calling thread on a CPU, of the current stream on an NVIDIA or AMD GPU.

first = mark(on_gpu); ...; second = mark(on_gpu)
seconds = between(first, second)        # of a GPU only when it has been synchronised
"""

import time

import torch

Mark = float | torch.cuda.Event


def mark(on_gpu: bool, stream: torch.cuda.Stream | None = None) -> Mark:
    """Return the present point in time; stream: of the GPU's work, None for the current one."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def between(first: Mark, second: Mark) -> float:
    """Return the seconds between two marks of one kind."""
    if isinstance(first, float):
        assert isinstance(second, float)
        return second - first
    assert not isinstance(second, float)
    return float(first.elapsed_time(second)) / 1000  # milliseconds
