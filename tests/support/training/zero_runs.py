"""What the ranks of test_training_zero do: train a small Llama by DeepSpeed, or in plain PyTorch to compare with.

Its matrices are larger than what stage 3 leaves whole on every rank, so that weights are gathered for real.
"""

import gc
import resource
import shutil
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.llama import Llama
from engine.training.checkpoints.saving import Saver, own_group
from engine.training.strategies.optimizers import make_optimizer, set_rate
from engine.training.trainer import Task, TrainerOptions, TrainingBatch
from engine.training.trainers import STRATEGIES

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 640,  # 122,880 elements a matrix: above the 100,000 below which stage 3 keeps them whole
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_hidden_layers": 2,
    "vocab_size": 211,  # no multiple of the ranks: partitions are padded
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GLOBAL_BATCH, LENGTH, EVALUATED_AFTER = 8, 16, 2


@dataclass(frozen=True)
class Case:
    """How one model is trained; `folder` for swapping and checkpoints."""

    strategy: Any = "zero2"
    dtype: Any = "float32"
    accumulation: int = 1
    clipping: float | None = 0.5
    offload: Any = "none"
    checkpointing: Any = "none"
    compiled: bool = False
    optimizer: str = "adamw"
    steps: int = 4
    dp: int = 2
    tp: int = 1
    biased: bool = False  # attention's products have biases
    folder: str = "/nonexistent"


def make_model(case: Case) -> Llama:
    """The same small weights everywhere."""
    torch.manual_seed(0)
    model = Llama(ModelConfig.parse(CONFIG | {"attention_bias": case.biased}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.06)
    return model


def loss_of(module: nn.Module, batch: TrainingBatch) -> Tensor:
    logits = module(batch.inputs["tokens"][:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.inputs["tokens"][:, 1:].flatten())


def metrics_of(module: nn.Module, batch: TrainingBatch) -> dict[str, Tensor]:
    targets = batch.inputs["tokens"][:, 1:]
    return {"loss": loss_of(module, batch) * targets.numel(), "targets": torch.tensor(targets.numel())}


def make_task(case: Case) -> Task:
    model = make_model(case)
    return Task(model, list(model.model.layers), loss_of, metrics_of, CONFIG, lambda state, folder: None)


def rows_of(step: int) -> Tensor:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(CONFIG["vocab_size"], (GLOBAL_BATCH, LENGTH + 1), generator=generator)


def batches_of(step: int, rank: int, ranks: int, accumulation: int) -> list[TrainingBatch]:
    """A rank's micro-batches. Shares differ, as where texts differ in length: 3/2 and 1/2 of the mean in turns."""
    mine = rows_of(step).chunk(ranks)[rank].chunk(accumulation)
    even = 1 / (ranks * accumulation)
    shares = [even * (1.5 if (rank + number) % 2 == 0 else 0.5) for number in range(accumulation)]
    if ranks * accumulation == 1:
        shares = [1.0]
    return [
        TrainingBatch({"tokens": rows}, share, len(rows), rows.numel())
        for rows, share in zip(mine, shares, strict=True)
    ]


def rate_of(step: int) -> float:
    return 0.003 * (1 + step % 3)


def options_of(case: Case) -> TrainerOptions:
    return TrainerOptions(
        strategy=case.strategy,
        dtype=case.dtype,
        dp=case.dp,
        tp=case.tp,
        micro_batch_size=GLOBAL_BATCH // case.dp // case.accumulation,
        accumulation=case.accumulation,
        gradient_clipping=case.clipping,
        optimizer=case.optimizer,
        learning_rate=0.01,
        weight_decay=0.1,
        activation_checkpointing=case.checkpointing,
        offload=case.offload,
        compiled=case.compiled,
    )


def context_of(case: Case, rank: int) -> Context:
    work = TrainWorkload(global_batch_size=GLOBAL_BATCH)
    cell = Cell(model="m", workload=work, layout=Layout(dp=case.dp, tp=case.tp))
    job = Job(
        name="job", study="s", measuring_pass="timed", measuring=Measuring(), ranks_per_node=case.dp * case.tp,
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), timeout_seconds=60, inputs=case.folder,
        cache=case.folder,
    )  # fmt: skip
    return Context(job, JobPaths(Path(case.folder)), rank, case.dp * case.tp, torch.device("cpu"), None, lambda: None)


def alone(case: Case) -> dict[str, Any]:
    """The same steps in one process and plain PyTorch: float32 weights, the micro-batches of all ranks in a row."""
    model = make_model(case)
    options = options_of(case)
    optimizer = make_optimizer(model, options)
    losses, norms, evaluated = [], [], 0.0
    for step in range(case.steps):
        if step == EVALUATED_AFTER:
            with torch.no_grad():
                evaluated = mean_loss(model)
        summed = 0.0
        for rank in range(case.dp):
            for batch in batches_of(step, rank, case.dp, case.accumulation):
                loss = loss_of(model, batch) * batch.share
                loss.backward()  # type: ignore[no-untyped-call]
                summed += loss.item()
        limit = float("inf") if case.clipping is None else case.clipping
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        set_rate(optimizer, rate_of(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(summed)
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "model": model.state_dict()}


def open_trainer(case: Case, rank: int) -> Any:
    return make_trainer(make_task(case), case, rank)


def make_trainer(task: Task, case: Case, rank: int) -> Any:
    return STRATEGIES[case.strategy](task, options_of(case), context_of(case, rank))


def train_steps(trainer: Any, case: Case, rank: int, steps: range) -> dict[str, Any]:
    """Rank-local sums of losses; norms; and what was communicated in each step."""
    losses, norms, calls = [], [], []
    for step in steps:
        summed = 0.0
        counted = []
        batches = batches_of(step, rank // case.tp, case.dp, case.accumulation)
        for number, batch in enumerate(batches):
            before = trainer.exposed.calls
            loss = trainer.forward(batch)
            trainer.backward(loss, batch, last=number == len(batches) - 1)
            summed += loss.item() * batch.share
            counted.append(trainer.exposed.calls - before)
        end = trainer.step(rate_of(step))
        assert end.applied
        losses.append(summed)
        norms.append(end.norm)
        calls.append(counted)
    return {"losses": losses, "norms": norms, "calls": calls}


def trained(rank: int, case: Case) -> dict[str, Any]:
    """A whole run of one case, with an evaluation in the middle that must not change anything."""
    trainer = open_trainer(case, rank)
    found = train_steps(trainer, case, rank, range(EVALUATED_AFTER))
    with trainer.evaluating():
        evaluated = mean_loss(trainer.module)
    more = train_steps(trainer, case, rank, range(EVALUATED_AFTER, case.steps))
    result = {name: found[name] + more[name] for name in found}
    result |= {
        "model": trainer.whole_model(),
        "evaluated": evaluated,
        "exposed": trainer.exposed,
    }
    trainer.close()
    return result


def mean_loss(module: nn.Module) -> float:
    """Of a batch that is never trained on."""
    sums = metrics_of(module, batches_of(99, 0, 1, 1)[0])
    return float(sums["loss"] / sums["targets"])


def resumed(rank: int, case: Case) -> dict[str, Any]:
    """A run that saves after two steps and goes on; and another that begins there."""
    folder = Path(case.folder) / "checkpoint"
    folder.mkdir(exist_ok=True)
    first = open_trainer(case, rank)
    train_steps(first, case, rank, range(2))
    first.save(folder)
    whole = train_steps(first, case, rank, range(2, case.steps)) | {"model": first.whole_model()}
    first.close()
    second = open_trainer(case, rank)
    second.restore(folder)
    rest = train_steps(second, case, rank, range(2, case.steps)) | {"model": second.whole_model()}
    second.close()
    return {"whole": whole, "rest": rest}


def refused(rank: int, case: Case) -> str:
    """What a restore, or already the making of a trainer, says."""
    try:
        trainer = open_trainer(case, rank)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    try:
        trainer.restore(Path(case.folder) / "checkpoint")
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def without_numbers(rank: int, case: Case) -> tuple[float, bool, bool]:
    """A step whose gradients are no numbers: its norm, whether it was applied, and whether weights stayed."""
    trainer = open_trainer(case, rank)
    before = trainer.whole_model()
    batch = replace(batches_of(0, rank, case.dp, 1)[0], share=float("nan"))
    trainer.backward(trainer.forward(batch), batch, last=True)
    end = trainer.step(0.1)
    stayed = all(torch.equal(weight, before[name]) for name, weight in trainer.whole_model().items())
    trainer.close()
    return end.norm, end.applied, stayed


def leftovers(rank: int, case: Case) -> list[str]:
    """What is still alive of a trainer that was closed and forgotten, and what it left changed in torch."""
    linear = functional.linear
    task = make_task(case)
    trainer = make_trainer(task, case, rank)
    train_steps(trainer, case, rank, range(2))
    held = [one for group in trainer.module.optimizer.optimizer.param_groups for one in group["params"]]
    held += [moment for state in trainer.module.optimizer.optimizer.state.values() for moment in state.values()]
    held += getattr(trainer.module.optimizer, "fp32_partitioned_groups_flat", [])
    held += task.model.parameters()
    held += [one.ds_tensor for one in task.model.parameters() if hasattr(one, "ds_tensor")]
    watched = [weakref.ref(one) for one in held]
    trainer.close()
    del held, task, trainer
    gc.collect()
    changed = [] if functional.linear is linear else ["functional.linear"]
    return [f"{one().numel()} elements" for one in watched if one() is not None and one().numel()] + changed


def saved_on_a_small_disk(rank: int, case: Case, short_rank: int) -> tuple[list[str], int, list[float]]:
    """Why a checkpoint failed that one rank could not write; how many succeeded; losses of the steps after it."""
    trainer = open_trainer(case, rank)
    train_steps(trainer, case, rank, range(1))
    saver = Saver(Path(case.folder) / "saved", group=own_group())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == short_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        saver.save_with(trainer.save, 1, {}, "deepspeed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    losses = train_steps(trainer, case, rank, range(1, 2))["losses"]
    saver.save_with(trainer.save, 2, {}, "deepspeed")
    trainer.close()
    return saver.failures, saver.count, losses


def decays_after_resuming(rank: int, case: Case) -> list[float]:
    """The weight decay of each group, and so of matrices and of vectors, in a run that goes on with one of its own."""
    folder = Path(case.folder) / "checkpoint"
    folder.mkdir(exist_ok=True)
    first = open_trainer(case, rank)
    train_steps(first, case, rank, range(1))
    state = None
    if case.strategy.startswith("zero"):
        first.save(folder)
        first.close()
    else:
        state = first.state()
    options = replace(options_of(case), weight_decay=0.5)
    second = STRATEGIES[case.strategy](make_task(case), options, context_of(case, rank))
    if state is None:
        second.restore(folder)
    else:
        second.load(state)
    train_steps(second, case, rank, range(1, 2))
    optimizer = second.module.optimizer.optimizer if state is None else second._optimizer
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    second.close()
    return decays


class _Copying:
    """As much of DeepSpeed's engine as a checkpoint of what is offloaded to a disk asks for."""

    def __init__(self, source: Path) -> None:
        self.checkpoint_engine, self._source = self, source

    def save(self, state: Any, path: str) -> None:
        pass

    def _copy_recovery_script(self, folder: str) -> None:
        pass

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        from shutil import copytree  # as DeepSpeed does it

        copytree(self._source, Path(folder) / tag / f"rank{dist.get_rank()}")
        dist.barrier()


def saved_without_swapped_files(rank: int, folder: str, short_rank: int) -> tuple[str, bool]:
    """What is raised where the files that one rank has offloaded cannot be copied; and whether shutil is as before."""
    from engine.training.zero.checkpoint import save

    source, before = Path(folder) / f"swapped{rank}", shutil.copytree
    if rank != short_rank:
        source.mkdir()
    try:
        save(_Copying(source), Path(folder))
    except OSError as error:
        return str(error), shutil.copytree is before
    return "", False


def without_a_swap_folder(rank: int, case: Case, short_rank: int) -> str:
    """What is raised where one rank cannot make its folder for NVMe; the operator that reads it is not looked for."""
    from engine.training.zero import trainer

    cache = Path(case.folder) / f"cache{rank}"
    if rank == short_rank:
        cache.write_bytes(b"no folder")
    checked, trainer.need_supported = trainer.need_supported, lambda options, context: None
    try:
        open_trainer(replace(case, folder=str(cache)), rank)
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        trainer.need_supported = checked
    return ""
