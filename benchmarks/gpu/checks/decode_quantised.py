"""Decode of the 8B shape with quantised weights, beside bfloat16 in the same process; and torchao's products alone.

A scheme that this engine refuses on the device is reported with its reason. torchao's products show what its kernels
would give at batch 1, compiled as it asks for.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.checks.decode import decode_seconds
from benchmarks.gpu.shapes import STEPS, large_model, random_tensors
from configs.families.config import ModelConfig
from engine.compression import Compressor
from engine.inference.assembly import Assembly
from engine.inference.model import Shard
from engine.inference.weights import cut
from engine.models.slots import wanted_slots
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

_DENSE = ""
_AO = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}


def run(bench: Bench) -> None:
    """Report milliseconds a token and the ratio to bfloat16 for each scheme, then torchao's products."""
    dense: dict[int, float] = {}
    for scheme in (_DENSE, "int8", "int4"):
        bench.attempt(scheme or "bfloat16", partial(_scheme, bench, scheme, dense), seconds=3.0)
    outputs, inputs = (256, 128) if bench.rehearsal else (14336, 4096)
    product = _product_seconds(bench, "bfloat16", nn.Linear(inputs, outputs, bias=False))
    for scheme in _AO:
        bench.attempt(f"torchao {scheme}", partial(_torchao, bench, scheme, inputs, outputs, product), seconds=3.0)


def _scheme(bench: Bench, scheme: str, dense: dict[int, float]) -> None:
    shard = _shard(bench, scheme)
    prompt, samples = (16, 5) if bench.rehearsal else (512, 15)
    for batch in (1, 2) if bench.rehearsal else (1, 8):
        cache = shard.new_cache(batch, prompt + (samples + 3) * STEPS)
        seconds = decode_seconds(bench, shard, cache, batch, prompt, samples)
        name = scheme or "bfloat16"
        taken = bench.figure(f"{name}, batch {batch}: a token", [one * 1e3 for one in seconds], "ms")
        dense.setdefault(batch, taken)
        if scheme:
            bench.figure(f"{name}, batch {batch}: tokens for one of bfloat16", [dense[batch] / taken])


def _shard(bench: Bench, scheme: str) -> Shard:
    """Return the model with its products compressed one by one, as a study loads it."""
    config, grid = ModelConfig.parse(large_model(bench)), Grid(1, 1, 1, 0)
    compressor = Compressor((scheme,) if scheme else (), torch.bfloat16, bench.device)
    slots = wanted_slots(config, grid)
    assembly = Assembly(config, grid, slots, torch.bfloat16, bench.device, False, compressor)
    tensors = dict(random_tensors(bench, config, torch.bfloat16))
    for piece in dict.fromkeys(slot.piece for slot in slots):
        assembly.put(piece, cut(tensors[piece.name], piece))
    return Shard(config, grid, Communicator((0,), 0), assembly.weights("decoder"))


def _torchao(bench: Bench, scheme: str, inputs: int, outputs: int, dense: float) -> None:
    import torchao.quantization as ao

    layer = nn.Linear(inputs, outputs, bias=False, device=bench.device, dtype=torch.bfloat16)
    try:
        ao.quantize_(layer, getattr(ao, _AO[scheme])())
    except ImportError as error:  # of a library that only this scheme's kernels need
        raise NotImplementedError(f"torchao: {error}") from error
    layer.compile()
    taken = _product_seconds(bench, f"torchao {scheme}", layer)
    bench.figure(f"torchao {scheme}: products for one of bfloat16", [dense / taken])


def _product_seconds(bench: Bench, name: str, layer: nn.Module) -> float:
    layer = layer.to(bench.device, torch.bfloat16) if name == "bfloat16" else layer
    width: Any = layer.in_features
    x = torch.randn(1, width, device=bench.device, dtype=torch.bfloat16)
    with torch.inference_mode():
        timed = bench.clock.seconds(lambda: layer(x), limit_seconds=3.0)
    bench.figure(f"{name}: one product, batch 1", [one * 1e6 for one in timed.samples], "us")
    free_memory(bench.device)
    return timed.median
