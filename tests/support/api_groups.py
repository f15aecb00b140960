"""Ranks in a group of the Python surface's orchestrator, and a checkpoint that two of them can share.

with ranks_without_group(2) as two:
    answers = two.run(in_group, free_port(), "gloo", function)     # function(orchestrator, world) on each
"""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from configs.families.config import ModelConfig
from engine.api.current_group import world_communicator
from engine.api.orchestrator import MultiGPUOrchestrator
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ranks_without_group(size: int) -> Iterator[RankPool]:
    """Processes without a group."""
    with RankPool(size) as pool:
        pool.run(leave_the_pools_group)
        yield pool


def leave_the_pools_group(rank: int) -> None:
    dist.destroy_process_group()


def in_group(rank: int, port: int, transport: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` within the group of an orchestrator. `transport` gloo: also where memory could be shared."""
    orchestrator = MultiGPUOrchestrator(rank, 2, backend="gloo", device="cpu", timeout_seconds=30)
    orchestrator.initialize(master_port=port)
    try:
        world = world_communicator()
        if transport == "gloo":
            world = open_communicators(Grid(1, 2, 1, rank), CPU, "gloo", 30, "gloo").world
        return function(orchestrator, world, *arguments)
    finally:
        orchestrator.cleanup()


def write_checkpoint(folder: Path) -> None:
    """A model of random numbers in two files with an index."""
    generator = torch.Generator().manual_seed(0)
    shapes = ModelConfig.parse(_CONFIG).tensor_shapes()
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    names = sorted(tensors)
    places = {name: f"model-{1 + (number > len(names) // 2)}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
