"""What `test_planner_launchers.py` starts on every rank: two steps of a tiny model with the real libraries.

    torchrun --nproc-per-node 2 tests/support/training/launched_training.py LIBRARY FOLDER...

Every folder holds the files of one setup. Rank 0 writes `result.json` there: losses, and what the library made of the
file. Steps are two per folder, on random tokens that are the same in every library.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, VOCABULARY, HIDDEN = 2, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """The shape of a language model, without attention: what is launched matters here, not what is learnt."""

    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def model_and_tokens(batch_size: int, length: int = 16) -> tuple[Tiny, Any]:
    torch.manual_seed(0)
    model = Tiny()
    rank = int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(1 + rank)
    return model, lambda: torch.randint(VOCABULARY, (batch_size, length), generator=generator)


def write(folder: Path, **result: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "result.json").write_text(json.dumps(result))


def without_compiler() -> None:
    """On CPUs DeepSpeed would first compile, for minutes, its sums over shared memory and its AdamW for GPUs."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.ops.adam.FusedAdam = lambda given, adam_w_mode, **options: torch.optim.AdamW(given, **options)


def with_torch(folder: Path) -> None:
    """A plain script that passes the values of torchrun.json on as they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    settings = json.loads((folder / "torchrun.json").read_text())
    if not dist.is_initialized():
        dist.init_process_group(settings["backend"])
    mesh = settings["mesh"]
    assert mesh["dp"] * mesh["tp"] * mesh["pp"] == dist.get_world_size()
    inner, tokens = model_and_tokens(settings["batch_size"], settings["sequence_length"])
    model: nn.Module = inner
    if "fully_shard" in settings:
        options: dict[str, Any] = dict(settings["fully_shard"], mesh=init_device_mesh("cpu", (mesh["dp"],)))
        if policy := settings.get("MixedPrecisionPolicy"):
            options["mp_policy"] = MixedPrecisionPolicy(**{key: getattr(torch, name) for key, name in policy.items()})
        if "CPUOffloadPolicy" in settings:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # nothing to pin without a GPU
        for module in (*inner.blocks, inner):
            fully_shard(module, **options)
    else:
        model = DistributedDataParallel(inner, **settings["DistributedDataParallel"])
    optimizer = torch.optim.AdamW(model.parameters(), **settings["AdamW"])
    half = settings.get("autocast")
    losses = []
    for _ in range(STEPS):
        for micro in range(settings["gradient_accumulation_steps"]):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro == settings["gradient_accumulation_steps"] - 1
            with torch.autocast("cpu", getattr(torch, half["dtype"])) if half else torch.autocast("cpu", enabled=False):
                loss = model(tokens())
            (loss / settings["gradient_accumulation_steps"]).backward()
        if settings["max_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in inner.parameters())
    write(folder, losses=losses, held=held, parameters=sum(p.numel() for p in inner.parameters()))


def with_deepspeed(folder: Path) -> None:
    import deepspeed

    without_compiler()
    config = json.loads((folder / "deepspeed.json").read_text())
    model, tokens = model_and_tokens(config["train_micro_batch_size_per_gpu"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(STEPS * config["gradient_accumulation_steps"]):
        loss = engine(tokens().to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    write(
        folder,
        losses=losses,
        steps=engine.global_steps,
        stage=engine.zero_optimization_stage(),
        clipping=engine.gradient_clipping(),
        batch=engine.train_batch_size(),
        optimizer=type(engine.basic_optimizer).__name__,
        dtype=str(engine.get_data_types()[0]),
    )


def as_if_on_gpus() -> None:
    """Accelerate ignores FSDP, and half of DeepSpeed, on CPUs; so it is told that these ranks are GPUs on gloo."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *given, **more: ("gloo", DistributedType.MULTI_GPU)


def with_accelerate(folder: Path) -> None:
    """Started by accelerate.sh, whose file and variables Accelerator() reads from its environment."""
    from accelerate import Accelerator

    written = json.loads((folder / "accelerate.json").read_text())
    if not written["use_cpu"]:
        as_if_on_gpus()
    if "deepspeed_config" in written:
        without_compiler()
    accelerator = Accelerator()
    model, tokens = model_and_tokens(2)
    if accelerator.distributed_type == "DEEPSPEED":
        from accelerate.utils import DummyOptim

        optimizer: Any = DummyOptim(model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(STEPS * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            loss = model(tokens().to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    write(
        folder,
        losses=losses,
        distributed_type=str(accelerator.distributed_type.value),
        processes=accelerator.num_processes,
        accumulation=accelerator.gradient_accumulation_steps,
        mixed_precision=accelerator.mixed_precision,
        kind=type(model).__name__,
        held=sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters()),
    )
    accelerator.end_training()


def with_trainer(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, training_args

    arguments = json.loads((folder / "training_arguments.json").read_text())
    if not arguments["use_cpu"]:
        as_if_on_gpus()
        training_args.is_torch_bf16_gpu_available = lambda: True
    if "deepspeed" in arguments:
        without_compiler()
    args = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=STEPS, save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="steps", logging_steps=1, **arguments,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip
    rows = torch.randint(VOCABULARY, (64, 16), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    result = trainer.train()
    write(
        folder,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        steps=result.global_step,
        distributed_type=str(trainer.accelerator.distributed_type.value),
        batch=args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
        kind=type(trainer.model_wrapped).__name__,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the libraries' own, about each other
    work = {"torch": with_torch, "deepspeed": with_deepspeed, "accelerate": with_accelerate, "trainer": with_trainer}
    for name in sys.argv[2:]:
        work[sys.argv[1]](Path(name))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a device mesh on gloo may abort at exit
