"""Tensor parallelism of our Llama for training, with torch.distributed.tensor.parallel.

    check_split(task, tp)
    split(task, mesh["tensor"])                 # before fully_shard
    gather_logits(task)                         # after it, so that FSDP2's output is not a view

Queries, keys, values, gate and up are split by columns, the products after them by rows: one all-reduce after attention
and one after the feed-forward. Embedding and head are split over the vocabulary; logits are gathered for the loss.
Norms are whole on each rank. A layer's all-reduces are never hidden, and not reported separately in the step time.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from engine.models.llama import Llama
from engine.training.trainer import Task

COLUMN_PARALLEL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Products of a block that are split by their outputs."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Products of a block that are split by their inputs; their outputs are summed over the ranks."""


def split(task: Task, mesh: DeviceMesh) -> None:
    """Split the task's model in place over the ranks of `mesh`."""
    model = task.model
    assert isinstance(model, Llama)
    for block in task.blocks:
        parallelize_module(block, mesh, _plan())
    plan: dict[str, ParallelStyle] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)

    def shared(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        # The head is a plain product with a split weight, so its input must be a DTensor too.
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)

    model.model.norm.register_forward_hook(shared)


def gather_logits(task: Task) -> None:
    """Gather the split model's logits, for any loss."""

    def gathered(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        assert isinstance(logits, DTensor)
        return logits.full_tensor()

    task.model.register_forward_hook(gathered)


def _plan() -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN_PARALLEL}
    return plan | {name: RowwiseParallel() for name in ROWS}


def check_split(task: Task, tp: int, vocabulary: bool = True) -> None:
    """Raise ValueError for a model that `tp` ranks cannot split evenly; vocabulary: whether it is split too."""
    if not isinstance(task.model, Llama):
        name = type(task.model).__name__
        raise ValueError(f"layout.tp: {name} is not split in training, only Llama and its kin; use dp")
    config = task.model.config
    parts = {
        "query heads": config.heads, "key and value heads": config.kv_heads,
        "feed-forward columns": config.feed_forward,
    }  # fmt: skip
    if vocabulary:
        parts["tokens of the vocabulary"] = config.vocabulary
    for name, count in parts.items():
        if count % tp:
            raise ValueError(f"layout.tp: {count} {name} cannot be split by {tp} in training; use a divisor of {count}")
    if config.head_norms:
        raise ValueError("layout.tp: norms of single heads (Qwen3) are not split in training; use dp")
