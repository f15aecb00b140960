"""Training a classifier from Python: on one process, under torchrun, or on several hosts with the set-up script.

    from engine.training.recipes import ClassifyRecipe, OptimizerSpec, is_master_process

    recipe = ClassifyRecipe(model, nn.CrossEntropyLoss(), OptimizerSpec("Adam", patterns=["*"], lr=0.001))
    history = recipe.train(train_loader, min_period="30s", max_period="2m", val_data=val_loader,
                           checkpoints="checkpoints", verbose=is_master_process())

The strategies, checkpoints and bounds are those of the `train` workload. The loader's batch size is per process, so the
global batch is that times the processes (times `accumulation`). After a lost process (`torchrun --max-restarts 3`) the
script restarts, and `train` resumes from the last checkpoint; with fewer processes it accumulates, so that the global
batch is unchanged.
"""

import atexit
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader

from configs.common.base import period_seconds
from configs.common.execution import Dtype, Layout, Strategy
from configs.common.files.reading import validation_text
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.api.node import barrier, gather_tensors
from engine.context import Context
from engine.rank.agreement import max_over_ranks_of
from engine.rank.gloo_threads import wait_for_gloo
from engine.rank.joining import alone_device, choose_device
from engine.rank.processes import place_from_environment
from engine.training.recipes.loaders import SharedLoader, share_out
from engine.training.recipes.loop import CheckpointRules, Loop, checkpointed_batch, newest_of_all
from engine.training.recipes.optimizer import OptimizerSpec, build, spec_by_parameter
from engine.training.task_types.reach import leaves_weights_out
from engine.training.trainer import Task, TrainerOptions, TrainingBatch, TrainingHistory
from engine.training.trainers import STRATEGIES

LossFunction = Callable[[Tensor, Tensor], Tensor]
Loader = DataLoader[Any]
Backend = Literal["nccl", "gloo", "mpi"]


class ClassifyRecipe:
    """A model that maps inputs to a score for each class, with its loss and optimizer.

    loss(outputs, targets): the mean over a batch, as torch.nn.CrossEntropyLoss gives. optimizer: one description, or
    several for groups of parameters. use_distributed: join the other processes of torchrun or of the set-up script; a
    process started alone trains alone. strategy: ddp, or fsdp where weights do not fit on one device. blocks: what fsdp
    shards one by one (default: the model's children). dtype: of products, or of gathered weights with fsdp; weights
    stay float32. accumulation: batches of a process in one step. backend: of the process group; default: nccl on CUDA,
    else gloo, else mpi.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: OptimizerSpec | Sequence[OptimizerSpec],
        use_distributed: bool = True,
        *,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        blocks: Sequence[nn.Module] | None = None,
        dtype: Dtype = "float32",
        gradient_clipping: float | None = None,
        accumulation: int = 1,
        backend: Backend | None = None,
        timeout_seconds: float = 600.0,
        seed: int = 0,
    ) -> None:
        if strategy not in ("ddp", "fsdp"):
            raise ValueError(f"strategy: {strategy!r} is none of a recipe's; use ddp or fsdp")
        _check_counts(accumulation=accumulation)
        self.specs = [optimizer] if isinstance(optimizer, OptimizerSpec) else list(optimizer)
        self._taken = spec_by_parameter(model, self.specs)
        if use_distributed:
            self._device = _join(backend, timeout_seconds)
        else:
            self._device = torch.device("cuda") if torch.cuda.is_available() else alone_device()
        self.world_size = dist.get_world_size() if use_distributed and dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self._strategy: Strategy = strategy if self.world_size > 1 else "none"
        if self._strategy == "fsdp" and self.specs[0].name in _UNSHARDED:
            raise ValueError(f"optimizer.name: torch's {self.specs[0].name} takes no sharded weights; use strategy ddp")
        self.model, self.loss = model.to(self._device), loss
        self._blocks = list(blocks) if blocks is not None else _children(model)
        self._dtype, self._clipping, self._accumulation = dtype, gradient_clipping, accumulation
        self._timeout_seconds, self._seed = timeout_seconds, seed
        self._trained = False

    def train(
        self,
        train_data: Loader,
        min_period: str | float | None = None,
        max_period: str | float | None = None,
        val_data: Loader | None = None,
        *,
        epochs: int | None = None,
        target_loss: float | None = None,
        checkpoints: str | Path | None = None,
        checkpoint_every: int = 100,
        checkpoints_kept: int = 2,
        verbose: bool | None = None,
    ) -> TrainingHistory:
        """Train; return losses and norms of each step, and an evaluation (sums) at the end of each epoch.

        It ends after `epochs`; or at `max_period` (30s, 2m, 1h, or seconds), or as soon as `min_period` is over and the
        loss (of the validation data, if there is any) is at most `target_loss` at the end of an epoch; with min_period
        alone, when that is over. Default: one epoch. checkpoints: a folder visible to all hosts; training resumes from
        a checkpoint in it with the optimizers of this script, and periods include earlier training. verbose: whether
        this process prints progress; default: the master. All processes call it.

        Raises ValueError for inconsistent arguments, FloatingPointError for a non-finite loss.
        """
        if self._trained:
            raise ValueError("train: this recipe has been trained; make a new one for the next training")
        _check_counts(epochs=epochs, checkpoint_every=checkpoint_every, checkpoints_kept=checkpoints_kept)
        verbose = self.rank == 0 if verbose is None else verbose
        shared, held = self._shared(train_data, val_data)
        folder = None if checkpoints is None else Path(checkpoints)
        accumulation = self._accumulated(shared, folder)
        cell = self._cell(
            global_batch_size=shared.batch_size * self.world_size * accumulation,
            micro_batch_size=shared.batch_size,
            steps=self._steps(shared.batches, accumulation, epochs, min_period, max_period),
            min_period_seconds=period_seconds(min_period),
            max_period_seconds=period_seconds(max_period),
            target_loss=target_loss,
            gradient_clipping=self._clipping,
        )
        context, task = self._context(cell), self._task()
        self._prepare()
        task.leaves_weights_out = self._leaves_weights_out(task, shared, context)
        self._trained = True
        self._trainer = STRATEGIES[self._strategy](task, TrainerOptions.of(cell), context)
        assert isinstance(cell.workload, TrainWorkload)
        loop = Loop(
            context=context,
            workload=cell.workload,
            task=task,
            trainer=self._trainer,
            data=shared,
            validation=held,
            batch_of=self._batch,
            accumulation=accumulation,
            rate=self.specs[0].lr,
            saving=None if folder is None else CheckpointRules(folder, checkpoint_every, checkpoints_kept),
            say=_printed if verbose else _unsaid,
        )
        if verbose and shared.remade and self.world_size > 1:
            _printed(f"train_data: a DistributedSampler was put in, for {self.world_size} processes")
        return loop.run()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the trained weights, unsharded, on the CPU of the master process; {} on the others.

        All processes call it.
        """
        alone = not self._trained or self.world_size == 1
        found = self.model.state_dict() if alone else self._trainer.whole_model()
        live = self._device.type == "cpu"  # further training would change them
        return {name: tensor.detach().to("cpu", copy=live) for name, tensor in found.items()}

    def _shared(self, train_data: Loader, val_data: Loader | None) -> tuple[SharedLoader, SharedLoader | None]:
        shared = share_out(train_data, self.world_size, self.rank, self._seed)
        held = None if val_data is None else share_out(val_data, self.world_size, self.rank, self._seed, "val_data")
        sizes = torch.tensor([shared.batches, shared.batch_size, held.batches if held else 0])
        of_all = gather_tensors(sizes.to(self._device)) if self.world_size > 1 else []
        if any(not torch.equal(sizes, other.cpu()) for other in of_all):
            raise ValueError("train_data: processes have loaders of different lengths; give all the same data")
        if held is not None and held.batches == 0:
            raise ValueError("val_data: it has no batch to evaluate; give it examples, or leave it out")
        return shared, held

    def _steps(self, batches: int, accumulation: int, epochs: int | None, *periods: str | float | None) -> int | None:
        """Return the steps of the epochs; None where a period ends the training."""
        if accumulation > batches:
            raise ValueError(
                f"train_data: {batches} batches for each of {self.world_size} processes are less than the "
                f"{accumulation} of one step; use smaller batches or more data"
            )
        if all(period is None for period in periods):
            return (1 if epochs is None else epochs) * (batches // accumulation)
        if epochs is not None:
            raise ValueError("epochs: a period is given; leave one of them out")
        return None

    def _accumulated(self, shared: SharedLoader, folder: Path | None) -> int:
        """Return the batches of a process in a step, keeping the resumed checkpoint's global batch."""
        own = shared.batch_size * self.world_size
        wanted = own * self._accumulation
        found = None if folder is None else newest_of_all(folder, self.world_size)
        before = wanted if found is None else checkpointed_batch(found)
        if before % own:
            if self.rank == 0:
                _printed(f"the checkpoint's global batch of {before} is no multiple of {own}: {wanted} from here on")
            return self._accumulation
        return before // own

    def _cell(self, **work: Any) -> Cell:
        layout = Layout(dp=self.world_size, strategy=self._strategy)
        try:
            return Cell(model="recipe", workload=TrainWorkload(**work), layout=layout, dtype=self._dtype)
        except ValidationError as error:  # it names fields of a study
            said = validation_text(error)
            for field, own in _OWN_NAMES.items():
                said = said.replace(field, own)
            raise ValueError(said) from error

    def _context(self, cell: Cell) -> Context:
        """Return the launch context for strategies and bounds."""
        job = Job(
            name="recipe",
            study="recipe",
            measuring_pass="timed",
            measuring=Measuring(warmup=0, seed=self._seed, group_timeout_seconds=self._timeout_seconds),
            measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)),
            timeout_seconds=self._timeout_seconds,
            inputs="",
            cache="",
        )
        return Context(job, JobPaths(Path()), self.rank, self.world_size, self._device, None, barrier)

    def _task(self) -> Task:
        def loss(module: nn.Module, batch: TrainingBatch) -> Tensor:
            return self.loss(_outputs(module, batch), batch.inputs["targets"]).float()

        def metrics(module: nn.Module, batch: TrainingBatch) -> dict[str, Tensor]:
            """Return sums over the first `real` examples."""
            real, targets = int(batch.inputs["real"]), batch.inputs["targets"]
            outputs, targets = _outputs(module, batch)[:real], targets[:real]
            mean = self.loss(outputs, targets).float() if real else torch.zeros((), device=self._device)
            sums = {"loss": mean * real, "targets": torch.tensor(float(real))}
            if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
                sums["correct"] = (outputs.argmax(1) == targets).float().mean() * real if real else torch.zeros(())
            return sums

        return Task(
            self.model, self._blocks, loss, metrics, {}, lambda state, folder: None,
            lambda module: build(self.model, self.specs, self._taken),
        )  # fmt: skip

    def _prepare(self) -> None:
        """Freeze parameters without a matching pattern, and broadcast the master's weights to all processes."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self._taken)
        if self.world_size > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def _leaves_weights_out(self, task: Task, shared: SharedLoader, context: Context) -> bool:
        """Return whether the first batch's loss depends on a part of the weights only, which ddp has to know."""
        if self._strategy != "ddp":
            return False
        drawn = random.getstate(), np.random.get_state()  # what is drawn for this batch is drawn for training again
        with torch.random.fork_rng(devices=[]):
            inputs = self._batch(next(iter(shared.loader)))
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        count = len(inputs["targets"])
        found = leaves_weights_out(task, TrainingBatch(inputs, 1.0, count, count))
        return max_over_ranks_of(float(found), context) > 0

    def _batch(self, raw: Any) -> dict[str, Any]:
        """Return inputs, targets of a loader's item: a pair, or a mapping that has `labels` or `targets`."""
        if isinstance(raw, Mapping):
            named = dict(raw)
            key = next((name for name in ("labels", "targets", "label") if name in named), None)
            if key is None:
                raise ValueError(f"train_data: batches have {', '.join(named)}, but no labels; name them `labels`")
            targets = named.pop(key)
            return {name: value.to(self._device) for name, value in named.items()} | {
                "targets": targets.to(self._device)
            }
        if not isinstance(raw, Sequence) or len(raw) != 2:
            raise ValueError(f"train_data: a batch is a {type(raw).__name__}; give pairs of inputs and targets")
        return {_INPUTS: raw[0].to(self._device), "targets": raw[1].to(self._device)}


_UNSHARDED = ("Adafactor", "Rprop")
"""Optimizers of torch 2.13 whose operators DTensor refuses."""
_INPUTS = "inputs of a pair"
_OWN_NAMES = {
    "workload.": "", "min_period_seconds": "min_period", "max_period_seconds": "max_period", "steps": "epochs",
}  # fmt: skip
"""Fields of the `train` workload -> arguments of a recipe."""


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}: {count} is not above 0")
        if count is not None and not isinstance(count, int):
            raise ValueError(f"{name}: expected a whole number, got {count!r}")


def _outputs(module: nn.Module, batch: TrainingBatch) -> Tensor:
    """Call a model with the inputs of a pair, or with those of a mapping by name."""
    if _INPUTS in batch.inputs:
        outputs: Any = module(batch.inputs[_INPUTS])
    else:
        outputs = module(**{name: value for name, value in batch.inputs.items() if name not in ("targets", "real")})
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def _children(model: nn.Module) -> list[nn.Module]:
    """Return children with parameters, with module lists flattened; without those that share one with another, which
    fsdp keeps together with the rest of the model.
    """
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    holders = Counter(id(one) for child in found for one in child.parameters())
    holders.update(id(one) for one in model.parameters(recurse=False))
    own = [[holders[id(one)] == 1 for one in child.parameters()] for child in found]
    return [child for child, alone in zip(found, own, strict=True) if alone and all(alone)]


def _join(backend: Backend | None, timeout_seconds: float) -> torch.device:
    """Return this process's device, and join the group of all processes if torchrun has started several."""
    device, chosen = choose_device(place_from_environment())
    if chosen is not None and not dist.is_initialized():
        _meet(backend or chosen, timedelta(seconds=timeout_seconds))
        atexit.register(_leave)
    return device


def _meet(backend: str, timeout: timedelta) -> None:
    """Create the default process group of the processes in the current torchrun generation.

    The agent keeps one store for all restarts, with the addresses of ended processes
    (torch.distributed.elastic.rendezvous.dynamic_rendezvous); so each generation uses separate keys.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    keys = f"rankwise/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world_size}"
    generation = (store.add(keys, 1) - 1) // world_size  # nodes that join or leave are not counted as restarts
    own = dist.PrefixStore(f"{keys}/{generation}", store)  # type: ignore[attr-defined]  # not in __all__
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def _leave() -> None:
    """Destroy the groups at the end of the script: otherwise the interpreter's exit can abort.

    A model wrapped by DDP keeps its group, and gloo's threads with it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo()


def _printed(line: str) -> None:
    print(line, flush=True)


def _unsaid(line: str) -> None:
    pass
