"""What runs on the ranks, and the Python surface of the engine (docs/python-api.md).

    from engine import MultiGPUOrchestrator, DistributedCheckpointLoader

Names are imported when they are first used: importing the package, or a light part of it, never imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.checkpoint_loader import DistributedCheckpointLoader
    from engine.inference_benchmark import BenchmarkConfig, BenchmarkResults, DistributedInferenceBenchmark
    from engine.nccl import NCCLCommunicator
    from engine.orchestrator import MultiGPUOrchestrator
    from engine.parallel.node import (
        all_reduce_tensor,
        barrier,
        gather_tensors,
        get_node_info,
        is_master_node,
        is_master_process,
    )
    from engine.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        TensorParallelConfig,
        create_tensor_parallel_config,
    )
    from engine.training.recipes import ClassifyRecipe, OptimizerSpec

_HOMES = {
    "BenchmarkConfig": "inference_benchmark",
    "BenchmarkResults": "inference_benchmark",
    "ClassifyRecipe": "training.recipes",
    "ColumnParallelLinear": "tensor_parallel",
    "DistributedCheckpointLoader": "checkpoint_loader",
    "DistributedInferenceBenchmark": "inference_benchmark",
    "MultiGPUOrchestrator": "orchestrator",
    "NCCLCommunicator": "nccl",
    "OptimizerSpec": "training.recipes",
    "RowParallelLinear": "tensor_parallel",
    "TensorParallelConfig": "tensor_parallel",
    "all_reduce_tensor": "parallel.node",
    "barrier": "parallel.node",
    "create_tensor_parallel_config": "tensor_parallel",
    "gather_tensors": "parallel.node",
    "get_node_info": "parallel.node",
    "is_master_node": "parallel.node",
    "is_master_process": "parallel.node",
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
