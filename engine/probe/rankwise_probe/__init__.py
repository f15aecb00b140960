"""Step times, tokens and loss of a training script, for Rankwise. Without Rankwise around it, it does nothing.

    from rankwise_probe import step

    step(tokens=4096, loss=loss)                 # a step ends here; it began where the last one ended
    with step(tokens=4096) as this:              # or: the step is what happens inside
        this.loss = train(batch)
    mark("data_seconds", 0.004)                  # a figure of one's own, of the current step

A call never waits for a GPU: it records an event on the current CUDA stream and reads the time of that event, and
values that live on the GPU, which it copies in the order of the stream, in a later call. So steps are timed by when the
device finished them, and the script runs as it does without the call. Samples lie in a file that is mapped into memory,
so they survive a SIGKILL.

Standard library alone, Python 3.8 or later.
"""

import os
import time

__all__ = ["mark", "step"]

VARIABLE = "RANKWISE_PROBE"
"""Names the folder where each rank leaves its samples; not set: nothing is done."""


class _Nothing:
    """What a call returns where nothing is measured. One for each: a loss that is set holds its graph and weights."""

    __slots__ = ("loss", "tokens")

    def __init__(self, tokens):
        self.loss = None
        self.tokens = tokens

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def _step(tokens=None, loss=None):
    return _Nothing(tokens)


def _mark(name, value):
    return None


class _Opening:
    """The first call opens the file, since only then is the rank known to every launcher."""

    def __init__(self):
        self.recorder = None
        self.failed = False

    def recorder_of_rank(self):
        if self.recorder is None and not self.failed:
            try:
                from rankwise_probe.recording import StepRecorder

                self.recorder = StepRecorder(os.environ[VARIABLE])
            except Exception as error:
                self.failed = True
                os.write(2, ("rankwise_probe: no samples are kept: %s\n" % error).encode("utf-8", "replace"))
        return self.recorder


if VARIABLE in os.environ:
    _opening = _Opening()

    def step(tokens=None, loss=None):
        """End a step: `tokens` of this rank in it, and its loss (numbers, or tensors of one element)."""
        now = time.perf_counter()
        recorder = _opening.recorder or _opening.recorder_of_rank()
        return _Nothing(tokens) if recorder is None else recorder.step(now, tokens, loss)

    def mark(name, value):
        """Keep a figure of one's own with the current step; at most 8 names."""
        recorder = _opening.recorder or _opening.recorder_of_rank()
        if recorder is not None:
            recorder.mark(name, value)

else:
    step, mark = _step, _mark
