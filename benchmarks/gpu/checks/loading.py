"""Load of a 1B shape to the device: by our engine from disk and from the page cache, and by plain copies.

Cold means that the file's pages were dropped before, and the share still in memory is reported beside the figure. The
plain copies say what the host's memory and the bus allow: from mapped pages, through a pinned buffer, and pinned alone.
"""

import mmap
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.shapes import random_tensors, training_model
from benchmarks.gpu.tiny_models import manifest_of
from configs.families.config import ModelConfig
from engine.inference.weights import read_shard
from engine.loading.page_cache import evict, raw_read_seconds, warm
from engine.models.weights import write_weights
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

_BUFFER_BYTES = 64 << 20


def run(bench: Bench) -> None:
    """Report GB/s of each way."""
    folder = bench.folder / "model"
    config = training_model(bench)
    tensors = {name: tensor.cpu() for name, tensor in random_tensors(bench, ModelConfig.parse(config), torch.bfloat16)}
    write_weights(tensors, config, folder, torch.bfloat16)
    tensors.clear()
    free_memory(bench.device)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    bench.seen("size of the file", size / 1e9, "GB")
    load(bench, folder)  # compiles and connects what is needed once
    bench.attempt("pinned copy", partial(_pinned_alone, bench))
    for state in ("cold", "warm"):
        bench.attempt(f"plain read, {state}", partial(_plain_read, bench, file, size, state))
        bench.attempt(f"our load, {state}", partial(_our_load, bench, folder, size, state))
    bench.attempt("mapped", partial(_copied, bench, file, size, "mapped pages to the device, warm", _mapped))
    bench.attempt("pinned", partial(_copied, bench, file, size, "read into a pinned buffer and copied, warm", _pinned))


def load(bench: Bench, folder: Path) -> float:
    """Load the folder's model; return the seconds until its weights are on the device."""
    loaded = read_shard(manifest_of(folder), Grid(1, 1, 1, 0), Communicator((0,), 0), torch.bfloat16, bench.device)
    began = time.perf_counter()
    bench.clock.synchronise()
    return loaded.seconds + time.perf_counter() - began


def _prepare(file: Path, state: str) -> str:
    share = (evict if state == "cold" else warm)([file])
    return "" if share is None else f"{share:.0%} of the file in memory before"


def _plain_read(bench: Bench, file: Path, size: int, state: str) -> None:
    rates, note = [], ""
    for _ in range(3):
        note = _prepare(file, state)
        rates.append(size / raw_read_seconds([file]) / 1e9)
    bench.figure(f"plain read, {state}", rates, "GB/s", note=note)


def _our_load(bench: Bench, folder: Path, size: int, state: str) -> None:
    rates, note = [], ""
    for _ in range(3):
        note = _prepare(folder / "model.safetensors", state)
        rates.append(size / load(bench, folder) / 1e9)
        free_memory(bench.device)
    bench.figure(f"our load to the device, {state}", rates, "GB/s", note=note)


def _pinned_alone(bench: Bench) -> None:
    size = _BUFFER_BYTES if bench.rehearsal else 16 * _BUFFER_BYTES
    source = torch.ones(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    timed = bench.clock.seconds(lambda: target.copy_(source, non_blocking=True), samples=10, limit_seconds=2.0)
    bench.figure("copy of pinned memory to the device", [size / one / 1e9 for one in timed.samples], "GB/s")


def _copied(bench: Bench, file: Path, size: int, name: str, way: object) -> None:
    assert callable(way)
    rates = []
    for _ in range(3):
        warm([file])
        rates.append(size / bench.clock.once(partial(way, bench, file)) / 1e9)
    bench.figure(name, rates, "GB/s")


def _mapped(bench: Bench, file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        whole.to(bench.device, copy=True)
        bench.clock.synchronise()
        del whole  # the map cannot be closed under it


def _pinned(bench: Bench, file: Path) -> None:
    """Two pinned buffers: one is filled while the other is copied."""
    on_gpu = bench.device.type == "cuda"
    buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    target = torch.empty(file.stat().st_size, dtype=torch.uint8, device=bench.device)
    copied = [torch.cuda.Event() if on_gpu else None for _ in buffers]  # type: ignore[no-untyped-call]
    place = turn = 0
    with file.open("rb", buffering=0) as opened:
        while True:
            buffer, event = buffers[turn], copied[turn]
            if event is not None:
                event.synchronize()
            into: Any = buffer.numpy()
            count = os.readv(opened.fileno(), [into])
            if not count:
                break
            target[place : place + count].copy_(buffer[:count], non_blocking=True)
            if event is not None:
                event.record()
            place, turn = place + count, 1 - turn
