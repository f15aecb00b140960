"""Training a classifier from Python: names for scripts; see `recipe` for their use."""

from engine.api.node import (
    all_reduce_tensor,
    barrier,
    gather_tensors,
    get_node_info,
    is_master_node,
    is_master_process,
)
from engine.training.recipes.optimizer import OptimizerSpec
from engine.training.recipes.recipe import ClassifyRecipe

__all__ = [
    "ClassifyRecipe",
    "OptimizerSpec",
    "all_reduce_tensor",
    "barrier",
    "gather_tensors",
    "get_node_info",
    "is_master_node",
    "is_master_process",
]
