"""What a rank does in the tests of training strategies: a tiny Llama of random weights, the same on every rank.

Everything that a strategy sees is real: context, options, the table of strategies, gloo between processes. Data is
random, the same global batch for any number of ranks.
"""

import gc
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.llama import Llama
from engine.training.trainer import Task, Trainer, TrainerOptions, TrainingBatch
from engine.training.trainers import STRATEGIES

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
LENGTH = 16


LATE_SECONDS = 1.2


@dataclass(frozen=True)
class Training:
    """A training run: the cell's choices, on how many ranks, and what is looked at."""

    strategy: str = "none"
    dtype: str = "float32"
    dp: int = 1
    tp: int = 1
    steps: int = 6
    rate: float = 0.01
    ranks_per_node: int = 8
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    work: dict[str, Any] = field(default_factory=dict)
    first: int = 0  # number of the first step
    share: float = 1.0  # a mistake: what shares are multiplied by
    scale: float | None = None  # the loss scale to begin with
    late_rank: int | None = None  # comes to each loss LATE_SECONDS late
    load: str | None = None  # folder of a checkpoint to begin with
    save: str | None = None  # folder that takes a checkpoint at the end

    def replace(self, **changes: Any) -> "Training":
        """The same but for some fields; those of the workload are changed one by one."""
        work = self.work | changes.pop("work", {})
        return replace(self, work=work, **changes)


_KEPT: dict[str, Any] = {}


def make_context(training: Training, rank: int) -> tuple[Cell, Context]:
    """As a launch would have it, but for the model's files. Meshes live as long as the process."""
    fields = {"global_batch_size": 8, "sequence_length": LENGTH, "steps": training.steps, "gradient_clipping": 0.3}
    layout = Layout(dp=training.dp, tp=training.tp, strategy=training.strategy)  # type: ignore[arg-type]
    cell = Cell(model="m", workload=TrainWorkload(**fields | training.work), layout=layout, dtype=training.dtype)  # type: ignore[arg-type]
    job = Job(
        name="job",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(warmup=1, group_timeout_seconds=40),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=training.ranks_per_node,
        timeout_seconds=60,
        inputs=".",
        cache=".",
    )
    barrier = dist.barrier if dist.is_initialized() else (lambda: None)
    paths = JobPaths(Path(tempfile.gettempdir()))
    ranks = layout.ranks
    context = Context(job, paths, rank, ranks, torch.device("cpu"), None, barrier, kept=_KEPT)
    return cell, context


def forget_meshes() -> None:
    """After a process group was destroyed."""
    _KEPT.clear()


def make_task(config: dict[str, Any] = CONFIG) -> Task:
    """Causal language modelling of a Llama whose weights come from one seed."""
    model = Llama(ModelConfig.parse(config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return task_of(model)


def task_of(model: Llama) -> Task:
    """A task around a model."""

    def loss(module: nn.Module, batch: TrainingBatch) -> Tensor:
        rows = batch.inputs["tokens"]
        logits = module(rows[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def metrics(module: nn.Module, batch: TrainingBatch) -> dict[str, Tensor]:
        return {"loss": loss(module, batch)}

    return Task(model, list(model.model.layers), loss, metrics, {}, lambda state, folder: None)


def batches_of(
    step: int, options: TrainerOptions, vocabulary: int, dp_rank: int, shares: float = 1.0
) -> list[TrainingBatch]:
    """This replica's micro-batches of a step's global batch."""
    size = options.micro_batch_size
    total = size * options.accumulation * options.dp
    rows = torch.randint(vocabulary, (total, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    start = dp_rank * size * options.accumulation
    share = shares / (options.dp * options.accumulation)
    parts = [rows[start + number * size : start + (number + 1) * size] for number in range(options.accumulation)]
    return [TrainingBatch({"tokens": part}, share, size, size * LENGTH) for part in parts]


class Collectives(TorchDispatchMode):
    """Counts collectives by name, wherever they are called from."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function._schema.name.split("::")[1]] += 1
        return function(*arguments, **keywords or {})


def train_all(rank: int, trainings: list[Training]) -> list[dict[str, Any]]:
    """One after another in one process, as the measurements of a launch."""
    return [train(rank, training) for training in trainings]


def train(rank: int, training: Training) -> dict[str, Any]:
    """Train; losses of the global batch, norms, and what was seen on the way."""
    cell, context = make_context(training, rank)
    options = TrainerOptions.of(cell)
    task = make_task(training.config)
    trainer = STRATEGIES[options.strategy](task, options, context)
    if training.load:
        restore(trainer, training.load)
    if training.scale:
        trainer.loss_scale.scale = training.scale  # type: ignore[attr-defined]
    if training.late_rank == rank:
        task.loss = late(task.loss)
    result = _steps(trainer, training, options, context)
    alone = replace(options, dp=1, accumulation=1, micro_batch_size=8)
    with trainer.evaluating():
        whole = batches_of(1000, alone, task_vocabulary(training), 0)
        result["evaluated"] = float(task.metrics(trainer.module, whole[0])["loss"])
    if training.save:
        store(trainer, training.save)
    model = trainer.whole_model()
    result["model"] = {name: value.clone().numpy() for name, value in model.items()}
    result["held"] = sum(local.numel() for local in _locals(trainer))
    trainer.close()
    del trainer, task
    gc.collect()
    return result


def task_vocabulary(training: Training) -> int:
    return int(training.config["vocab_size"])


def _locals(trainer: Trainer) -> list[Tensor]:
    return [getattr(one, "to_local", lambda one=one: one)() for one in trainer.module.parameters()]


def _steps(trainer: Trainer, training: Training, options: TrainerOptions, context: Context) -> dict[str, Any]:
    losses, result = [], {"norms": [], "applied": [], "scales": [], "inner": [], "outer": [], "exposed": []}  # type: ignore[var-annotated]
    for step in range(training.first, training.first + training.steps):
        batches = batches_of(step, options, task_vocabulary(training), context.grid.dp_rank, training.share)
        mean = torch.zeros((), dtype=torch.float64)
        before = trainer.exposed.seconds
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # torch.compile does nothing under a dispatch mode.
            with Collectives() if not options.compiled else nullcontext(Collectives()) as seen:
                loss = trainer.forward(batch)
                trainer.backward(loss, batch, last)
            result["outer" if last else "inner"].append(dict(seen.counts))
            mean += loss.detach().double() * batch.share
        result["exposed"].append(trainer.exposed.seconds - before)
        end = trainer.step(training.rate)
        losses.append(mean)
        for key, value in (("norms", end.norm), ("applied", end.applied), ("scales", end.loss_scale)):
            result[key].append(value)
    curve = torch.stack(losses)
    if context.world_size > 1:
        dist.all_reduce(curve)
        curve /= options.tp
    return result | {"losses": curve.tolist(), "bytes": trainer.exposed.bytes, "known": trainer.exposed.known}


def late(loss: Any) -> Any:
    """The same loss, later."""

    def waited(*arguments: Any) -> Tensor:
        time.sleep(LATE_SECONDS)
        return loss(*arguments)  # type: ignore[no-any-return]

    return waited


def bare_ddp(rank: int, training: Training) -> dict[str, Any]:
    """Weights after a loop as anybody writes it: torch's own averages and AdamW, nothing of ours but the model."""
    options = TrainerOptions.of(make_context(training, rank)[0])
    task = make_task(training.config)
    module = nn.parallel.DistributedDataParallel(task.model)
    matrices = [one for one in task.model.parameters() if one.dim() > 1]
    vectors = [one for one in task.model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.rate, betas=(0.9, 0.95), fused=True)
    for step in range(training.steps):
        (batch,) = batches_of(step, options, task_vocabulary(training), rank)
        task.loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weights.detach().numpy() for name, weights in task.model.named_parameters()}


def store(trainer: Trainer, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process alone
        dcp.save(trainer.state(), checkpoint_id=folder, no_dist=not dist.is_initialized())


def restore(trainer: Trainer, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = trainer.state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process alone
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    trainer.load(state)
