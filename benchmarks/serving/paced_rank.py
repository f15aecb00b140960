"""A rank that computes nothing: a token for every running answer in each step, at a fixed time.

    python -m benchmarks.serving.paced_rank SETTINGS_JSON SOCKET        (step time: STEP_SECONDS_VARIABLE)

In the place of `engine.serving.rank` behind a real HTTP process, it shows what that process can carry.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.serving.channel import Channel, ChannelClosedError
from engine.serving.messages import NewToken, StepReport, WantedAnswer

STEP_SECONDS_VARIABLE = "BENCH_STEP_SECONDS"
_WORDS, _IDLE_SECONDS = 20_000, 0.05


class PacedRank:
    """left: new tokens that each running answer is still to have."""

    def __init__(self, channel: Channel, step_seconds: float) -> None:
        self._channel, self._step_seconds = channel, step_seconds
        self._left: dict[str, int] = {}
        self._steps = 0

    def run(self) -> None:
        """Answer until the HTTP process ends. Raises ChannelClosedError when it is gone."""
        due = time.perf_counter()
        while True:
            wait = max(0.0, due - time.perf_counter()) if self._left else _IDLE_SECONDS
            for message in self._channel.receive(wait):
                if "end" in message:
                    return
                self._take(message)
            now = time.perf_counter()
            if self._left and now >= due:
                self._step()
                due = max(due + self._step_seconds, now)  # a step that came late delays those after it

    def _take(self, message: dict[str, Any]) -> None:
        if "add" in message:
            wanted = WantedAnswer.read(message["add"])
            self._left[wanted.key] = wanted.max_tokens
        else:
            self._left.pop(message["cancel"], None)

    def _step(self) -> None:
        self._steps += 1
        tokens = []
        for place, (key, left) in enumerate(list(self._left.items())):
            word = 100 + (self._steps * 31 + place) % _WORDS
            tokens.append(NewToken(key, word, "length" if left == 1 else None))
            if left == 1:
                del self._left[key]
            else:
                self._left[key] = left - 1
        report = StepReport(tuple(tokens), len(self._left), 0, 1, 0, 0, 0, len(tokens), self._step_seconds, 0.0)
        self._channel.send(report.message())


def main(arguments: list[str]) -> int:
    """Run it. Returns the exit code."""
    channel = Channel(Path(arguments[1]))
    channel.send({"ready": {"pid": os.getpid(), "cache_bytes": 0, "batch_invariant": False, "transport": "none"}})
    try:
        PacedRank(channel, float(os.environ[STEP_SECONDS_VARIABLE])).run()
    except ChannelClosedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
