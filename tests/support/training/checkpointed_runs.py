"""What ranks do in the tests of checkpoints: train a tiny model, stop somewhere, go on."""

import json
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.training.checkpoints import measurement as measured_checkpoints
from engine.training.checkpoints.measurement import latest, load, open_checkpoints, read_checkpoint_progress, save
from engine.training.shares import make_feed
from engine.training.task_types import make_task
from engine.training.trainer import TrainerOptions, TrainingHistory
from engine.training.trainers import STRATEGIES

CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
_groups: dict[int, Any] = {}


@dataclass(frozen=True)
class Training:
    """One attempt: it begins anew or from the newest checkpoint in `folder`, and stops after so many steps in all."""

    folder: str
    strategy: str
    ranks: int
    stop_after: int
    dtype: str = "float32"
    seed: int = 0
    work: dict[str, Any] = field(default_factory=dict)


def train(rank: int, training: Training) -> dict[str, Any]:
    """Losses (mean over the global batch) and norms of all steps, and the figures of the checkpoints."""
    measurement, context = surroundings(rank, training)
    options = TrainerOptions.of(measurement.cell)
    assert isinstance(measurement.cell.workload, TrainWorkload)
    task = make_task(measurement.cell.workload, context)
    feed = make_feed(measurement.cell.workload, options, context, task)
    trainer = STRATEGIES[options.strategy](task, options, context)
    checkpoints = open_checkpoints(trainer, feed, measurement, context, task)
    _groups[training.ranks] = context.kept.get("checkpoint_group")
    history = checkpoints.resume() or TrainingHistory()
    while history.steps < training.stop_after:
        batches = feed.step(history.steps)
        mine = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            loss = trainer.forward(batch)
            trainer.backward(loss, batch, last=number == len(batches) - 1)
            mine += loss.detach().double() * batch.share
        end = trainer.step(1e-2)
        if training.ranks > 1:
            dist.all_reduce(mine)
        history.losses.append(mine.item())
        history.norms.append(end.norm)
        if checkpoints.due(history.steps):
            checkpoints.after_step(history)
    checkpoints.close()
    weights = {name: weight.numpy().copy() for name, weight in trainer.whole_model().items()}
    trainer.close()
    feed.close()
    return {
        "losses": history.losses,
        "norms": history.norms,
        "figures": checkpoints.figures(),
        "weights": weights,
    }


def train_on_a_small_disk(rank: int, training: Training, short_rank: int) -> dict[str, Any]:
    """The same, and one rank cannot write a file of more than some kilobytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == short_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        return train(rank, training)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_where_one_sees_nothing(rank: int, training: Training, blind: int) -> str:
    """What a rank raises where one of them does not see the checkpoint yet, as on a shared disk that lags."""
    read = measured_checkpoints.read_checkpoint_progress

    def lagging(checkpoint: Path) -> dict[str, Any]:
        return read(checkpoint / "later" if rank == blind else checkpoint)

    measured_checkpoints.read_checkpoint_progress = lagging
    try:
        train(rank, training)
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        measured_checkpoints.read_checkpoint_progress = read
    return ""


def save_by_hand(rank: int, folder: str, steps: tuple[int, ...]) -> list[str]:
    """What a loop of somebody's own would do: a state of tensors, some equal on all ranks, some sharded."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu") if dist.is_initialized() else None
    saved = []
    for step in steps:
        state = by_hand(step, mesh)
        found = save(Path(folder), state, step=step, progress={"epoch": step / 2})
        saved.append(str(found))
    return saved


def load_by_hand(rank: int, folder: str) -> tuple[int, float, list[list[float]], int]:
    """Step, epoch, all numbers and the plain value of the newest checkpoint."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu") if dist.is_initialized() else None
    found = latest(Path(folder))
    assert found is not None
    state = by_hand(0, mesh)
    load(found, state)
    tensors = [state["model"]["bias"], state["model"]["weight"]]
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return (
        state["steps"],
        read_checkpoint_progress(found)["epoch"],
        [tensor.flatten().tolist() for tensor in whole],
        len(state),
    )


def by_hand(step: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A state that tells its step."""
    weight: torch.Tensor = torch.arange(12.0).reshape(4, 3) + 100 * step
    if mesh is not None:
        weight = distribute_tensor(weight, mesh, [Shard(0)])
    return {"model": {"weight": weight, "bias": torch.full((3,), float(step))}, "steps": step}


def surroundings(rank: int, training: Training) -> tuple[Measurement, Context]:
    """The measurement and what it is given; the model is synthetic, and so are the data."""
    defaults = {"global_batch_size": 4, "sequence_length": 16, "checkpoint_every": 2, "micro_batch_size": 1}
    cell = Cell(
        model="m",
        workload=TrainWorkload(**defaults | training.work),
        layout=Layout(dp=training.ranks, strategy=training.strategy),  # type: ignore[arg-type]
        dtype=training.dtype,  # type: ignore[arg-type]
    )
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    job = Job(
        name="job",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(seed=training.seed),
        measurements=(measurement,),
        ranks_per_node=training.ranks,
        timeout_seconds=60,
        inputs=training.folder,
        cache=training.folder,
    )
    manifest = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=CONFIG)
    barrier = dist.barrier if training.ranks > 1 else lambda: None
    paths = JobPaths(Path(training.folder))
    context = Context(job, paths, rank, training.ranks, torch.device("cpu"), manifest, barrier)
    if training.ranks in _groups:
        context.kept["checkpoint_group"] = _groups[training.ranks]
    return measurement, context


def checkpoints_of(training: Training) -> Path:
    """Where they lie."""
    measurement, context = surroundings(0, training)
    return context.paths.folder / "checkpoints" / f"{measurement.cell.key}-r0"


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """As it stands in the file."""
    manifest: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_text())
    return manifest
