"""What processes do in the tests of recipes: a small classifier of points on three rays.

Also a script, for torchrun and the set-up script, which leaves what the master saw:

    torchrun --nproc-per-node=2 tests/support/training/recipe_runs.py OUT_JSON [checkpoints [rank step]]

rank, step: that rank is killed there, once.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from engine.training.recipes import ClassifyRecipe, OptimizerSpec, get_node_info, is_master_process

EXAMPLES, HELD, FEATURES, CLASSES, GLOBAL_BATCH = 200, 37, 6, 3, 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points near one of three centres. kill_at: the example at whose loading this process is killed."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.inputs = centres[self.targets] * 2 + torch.randn(count, FEATURES, generator=generator)
        self.loaded = 0
        self.kill_at: int | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        self.loaded += 1
        if self.loaded == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[place], self.targets[place]


@dataclass(frozen=True)
class Run:
    """A recipe's training. ranks: processes, so that the global batch is the same for any number."""

    ranks: int = 1
    epochs: int | None = 2
    strategy: Any = "ddp"
    dtype: Any = "float32"
    norm: bool = False
    spare: bool = False
    tied: bool = False
    checkpoints: str | None = None
    checkpoint_every: int = 7
    accumulation: int = 1
    optimizer: str = "Adam"
    times: dict[str, Any] | None = None
    seed: int = 0


def make_model(norm: bool = False) -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(FEATURES, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers)


def tied_model() -> nn.Module:
    """Two of its layers have one weight."""
    torch.manual_seed(5)
    first, again = nn.Linear(16, 16), nn.Linear(16, 16)
    again.weight = first.weight
    return nn.Sequential(nn.Linear(FEATURES, 16), first, nn.Tanh(), again, nn.Tanh(), nn.Linear(16, CLASSES))


class Partly(nn.Module):
    """Has a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = make_model(), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.used(inputs)
        return scores


def train(rank: int, run: Run, points: Points | None = None) -> dict[str, Any]:
    """What one process saw: the curve, evaluations, and the weights (of the master)."""
    model = Partly() if run.spare else tied_model() if run.tied else make_model(run.norm)
    recipe = ClassifyRecipe(
        model, nn.CrossEntropyLoss(), OptimizerSpec(run.optimizer, patterns=["*"], lr=0.01), use_distributed=True,
        strategy=run.strategy, dtype=run.dtype, accumulation=run.accumulation, timeout_seconds=40, seed=run.seed,
    )  # fmt: skip
    size = GLOBAL_BATCH // run.ranks // run.accumulation
    history = recipe.train(
        DataLoader(points or Points(EXAMPLES, 2), batch_size=size, shuffle=True),
        val_data=DataLoader(Points(HELD, 3), batch_size=size),
        **(run.times or {"epochs": run.epochs}),
        checkpoints=run.checkpoints, checkpoint_every=run.checkpoint_every,
    )  # fmt: skip
    weights = {name: tensor.tolist() for name, tensor in recipe.state_dict().items()}
    return {
        "losses": history.losses, "norms": history.norms, "evaluations": history.evaluations, "weights": weights,
        "seconds": history.trained_seconds,
    }  # fmt: skip


def refused(rank: int, name: str) -> str:
    """What is said of an optimizer of torch's with sharded weights."""
    try:
        ClassifyRecipe(make_model(), nn.CrossEntropyLoss(), OptimizerSpec(name), strategy="fsdp")
    except ValueError as error:
        return str(error)
    return ""


def train_apart(rank: int, folder: str, epochs: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a process that trains a model of its own, whatever groups it is in."""
    torch.manual_seed(rank)
    model = nn.Linear(FEATURES, CLASSES)
    recipe = ClassifyRecipe(model, nn.CrossEntropyLoss(), OptimizerSpec("Adam", lr=0.01), use_distributed=False)
    loader = DataLoader(Points(24 + 8 * rank, 2), batch_size=8)
    history = recipe.train(loader, epochs=epochs, checkpoints=f"{folder}/{rank}", checkpoint_every=2, verbose=False)
    return history.losses, {name: tensor.tolist() for name, tensor in recipe.state_dict().items()}


def main(arguments: list[str]) -> None:
    """See the module."""
    out, *rest = arguments
    points = Points(EXAMPLES, 2)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if len(rest) > 1 and os.environ["RANK"] == rest[1] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        # ddp looks at the first batch before it trains on it.
        points.kill_at = (int(rest[2]) + 1) * GLOBAL_BATCH // world + 1
    seen = train(0, Run(ranks=world, epochs=3, checkpoints=rest[0] if rest else None), points)
    if is_master_process():
        info = get_node_info()
        Path(out).write_text(json.dumps(seen | {"world_size": info["world_size"], "nnodes": info["nnodes"]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
