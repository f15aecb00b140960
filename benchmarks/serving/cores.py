"""What a second core gives to the products of a model's step, without an engine: the ceiling of the row `layout`.

    with product_cores(files.folder) as cores:
        cores.gain(in_step=False)      # time of one process with all weights, over that of two with half of them each
        cores.gain(in_step=True)       # the same, when the two wait for each other where tensor parallel ranks do

Two processes with half of the weights each exchange nothing, so no tensor parallel server can gain more of a machine
than they do, but for what caches hold of the smaller half. In step they wait after each layer's attention, after its
feed-forward part, and after the last projection: what one of them loses to a neighbour, both lose.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

ROWS, STEPS = 32, 12


@dataclass(frozen=True)
class ProductCores:
    """Processes that compute when they are asked to: one with all weights, two with half of them."""

    whole: Connection
    halves: tuple[Connection, Connection]

    def gain(self, in_step: bool) -> float:
        """Return how many times faster the two are, over STEPS steps of ROWS rows, each side once."""
        alone = _seconds([self.whole], False)
        return alone / _seconds(list(self.halves), in_step)


@contextmanager
def product_cores(model: Path) -> Iterator[ProductCores]:
    """Start the three processes with random weights of the shapes that the folder's config.json describes."""
    config = json.loads((model / "config.json").read_text())
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    done = context.Array("q", 16, lock=False)
    ends = []
    processes = []
    for place in (None, 0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=_compute, args=(config, place, theirs, barrier, done), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        for end in ends:
            end.recv()
        yield ProductCores(ends[0], (ends[1], ends[2]))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _seconds(sides: list[Connection], in_step: bool) -> float:
    for side in sides:
        side.send(in_step)
    return max(float(side.recv()) for side in sides)


def _shapes(config: dict[str, Any], ranks: int) -> list[list[tuple[int, int]]]:
    """Return (outputs, inputs) of a rank's products, in groups after each of which ranks exchange."""
    hidden, size = int(config["hidden_size"]), int(config["head_dim"])
    forward, words = int(config["intermediate_size"]) // ranks, int(config["vocab_size"]) // ranks
    heads, key_value = int(config["num_attention_heads"]) // ranks, int(config["num_key_value_heads"]) // ranks
    attention = [((heads + 2 * key_value) * size, hidden), (hidden, heads * size)]
    layer = [attention, [(2 * forward, hidden), (hidden, forward)]]
    return layer * int(config["num_hidden_layers"]) + [[(words, hidden)]]


def _compute(config: dict[str, Any], place: int | None, asked: Connection, barrier: Barrier, done: Any) -> None:
    """Compute STEPS steps for each message, which says whether to wait for the other process; answer with seconds."""
    import torch

    from engine.kernels.linear import pack_linear

    torch.set_num_threads(1)
    groups = []
    for shapes in _shapes(config, 1 if place is None else 2):
        layers = [pack_linear((torch.randn(shape) * 0.02).to(torch.bfloat16)) for shape in shapes]
        groups.append([(layer, torch.randn(ROWS, layer.in_features).to(torch.bfloat16)) for layer in layers])
    asked.send(None)
    while True:
        in_step = asked.recv()
        if place is not None:
            barrier.wait()  # an interpreter's start and the pipe's way do not count
        began = time.perf_counter()
        for step in range(STEPS):
            for number, group in enumerate(groups):
                for layer, x in group:
                    layer(x)
                if place is not None and in_step:
                    _await_other(done, place, step * len(groups) + number + 1)
        seconds = time.perf_counter() - began
        if place is not None:
            barrier.wait()
            done[place * 8] = 0  # 8 apart: each on a cache line of its own
            barrier.wait()
        asked.send(seconds)


def _await_other(done: Any, place: int, number: int) -> None:
    """Wait as ranks do that share a machine: look for some 100 microseconds, then offer the core."""
    done[place * 8] = number
    other = 8 - place * 8
    began = time.perf_counter()
    while done[other] < number:
        if time.perf_counter() - began > 1e-4:
            os.sched_yield()
