"""Row `sampled`: what it costs that tokens are drawn, and not the most likely, on one server in turn.

tables, met = sampled_row(files, folder, rounds)
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.model import ModelFiles
from benchmarks.serving.sending import Sender, whole_speed
from benchmarks.serving.servers import Variant, running
from benchmarks.serving.throughput import ratio_cell
from configs.load.job import Contents
from reports.numbers.statistics import paired_ratio
from reports.text import Table

USERS, NEW_TOKENS = 32, 64
SAMPLED_BAR = 0.9
_GREEDY = "greedy"
SAMPLINGS: dict[str, dict[str, Any]] = {
    _GREEDY: {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "fields": {"top_p": 0.9}},
    "temperature 1, top_k 40": {"temperature": 1.0, "fields": {"top_k": 40}},
    "presence_penalty 0.5": {"fields": {"presence_penalty": 0.5}},
}
"""Temperature 1 is what a request without one means in the API."""


def sampled_row(files: ModelFiles, folder: Path, rounds: int) -> tuple[list[Table], bool]:
    """Tokens per second of sampled answers to those of greedy ones: 32 users, 64 in 64 out, one and two ranks."""
    rows, met = [], True
    sender = Sender(files)
    for ranks in (1, 2):
        wanted = Variant(f"tp={ranks}", "rankwise", ranks, ranks)
        speeds: dict[str, dict[int, float]] = {name: {} for name in SAMPLINGS}
        with running([wanted], files, None, folder / "logs") as servers:
            server = servers[wanted.name]
            sender.send(server, 3.0, users=8)
            for turn in range(rounds):
                for name, fields in SAMPLINGS.items():
                    contents = Contents(
                        prompt_tokens=64, new_tokens=NEW_TOKENS, vocabulary=(10, 30_000), exact=True, **fields
                    )
                    run = sender.send(server, None, users=USERS, contents=contents, requests=3 * USERS)
                    speeds[name][turn] = whole_speed(run)
                    print(f"  round {turn} {wanted.name} {name}: {speeds[name][turn]:.0f} tokens/s", file=sys.stderr)
        for name in SAMPLINGS:
            if name == _GREEDY:
                continue
            ratio = paired_ratio(speeds[name], speeds[_GREEDY])
            assert ratio is not None
            rows.append((wanted.name, name, ratio_cell(ratio)))
            met &= ratio.value >= SAMPLED_BAR
    return [Table(("32 users", "answers", "tokens/s for one of greedy ones"), tuple(rows))], met
