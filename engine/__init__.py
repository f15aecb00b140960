"""What runs on the ranks, and the Python surface of the engine (docs/reference/python-api.md).

    from engine import MultiGPUOrchestrator, DistributedCheckpointLoader

Names are imported when they are first used: importing the package, or a light part of it, never imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api.checkpoint_loader import DistributedCheckpointLoader
    from engine.api.inference_benchmark import BenchmarkConfig, BenchmarkResults, DistributedInferenceBenchmark
    from engine.api.nccl import NCCLCommunicator
    from engine.api.node import (
        all_reduce_tensor,
        barrier,
        gather_tensors,
        get_node_info,
        is_master_node,
        is_master_process,
    )
    from engine.api.orchestrator import MultiGPUOrchestrator
    from engine.api.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        TensorParallelConfig,
        create_tensor_parallel_config,
    )
    from engine.training.recipes import ClassifyRecipe, OptimizerSpec

_HOMES = {
    "BenchmarkConfig": "api.inference_benchmark",
    "BenchmarkResults": "api.inference_benchmark",
    "ClassifyRecipe": "training.recipes",
    "ColumnParallelLinear": "api.tensor_parallel",
    "DistributedCheckpointLoader": "api.checkpoint_loader",
    "DistributedInferenceBenchmark": "api.inference_benchmark",
    "MultiGPUOrchestrator": "api.orchestrator",
    "NCCLCommunicator": "api.nccl",
    "OptimizerSpec": "training.recipes",
    "RowParallelLinear": "api.tensor_parallel",
    "TensorParallelConfig": "api.tensor_parallel",
    "all_reduce_tensor": "api.node",
    "barrier": "api.node",
    "create_tensor_parallel_config": "api.tensor_parallel",
    "gather_tensors": "api.node",
    "get_node_info": "api.node",
    "is_master_node": "api.node",
    "is_master_process": "api.node",
}

__all__ = [
    "BenchmarkConfig",
    "BenchmarkResults",
    "ClassifyRecipe",
    "ColumnParallelLinear",
    "DistributedCheckpointLoader",
    "DistributedInferenceBenchmark",
    "MultiGPUOrchestrator",
    "NCCLCommunicator",
    "OptimizerSpec",
    "RowParallelLinear",
    "TensorParallelConfig",
    "all_reduce_tensor",
    "barrier",
    "create_tensor_parallel_config",
    "gather_tensors",
    "get_node_info",
    "is_master_node",
    "is_master_process",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
