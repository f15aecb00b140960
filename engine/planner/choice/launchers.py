"""Write launcher files for torchrun, DeepSpeed, Accelerate, Hugging Face's Trainer.

    written = launcher_files(setup)                 # of a TrainingSetup
    written.files["deepspeed.json"]                 # name -> text
    written.left_out                                # launcher -> why it cannot express this setup

    FILE_MAKERS["deepspeed"](LaunchedTraining(layout, micro_batch=4), recipe)      # one file, of a step by itself

    sh torchrun.sh train.py                         # the script reads torchrun.json, or hands deepspeed.json on
    sh accelerate.sh train.py
    TrainingArguments(output_dir="out", **json.load(open("training_arguments.json")))

Learning rates come from `recipe`, whose defaults are those of a study's training workload. Every file states gradient
clipping, because DeepSpeed clips at 1.0 by default.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.common.execution import Layout, Strategy
from configs.workloads.train import Offload, TrainWorkload
from engine.planner.setup import TrainingSetup

FILES = frozenset(
    {
        "torchrun.sh",
        "torchrun.json",
        "deepspeed.json",
        "accelerate.json",
        "accelerate.sh",
        "training_arguments.json",
    }
)
"""All file names that `launcher_files` may return."""
NVME_PATH = "/local_nvme"
"""Mount point of a drive in DeepSpeed's documentation; edit it for other machines."""
_ADAM_BETAS, _ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class LaunchedTraining:
    """What launcher files say of a training step, whatever the model is.

    micro_batch: sequences that a rank computes at once; accumulation: micro-batches of a rank in a step; sixteen_bit:
    torch's name of the format, None for float32; deepspeed_file: name of DeepSpeed's file, for Accelerate's.
    """

    layout: Layout
    micro_batch: int | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    sixteen_bit: str | None = None
    float8: bool = False
    checkpointing: str = "none"
    optimizer: str = "adamw"
    offload: Offload = "none"
    compiled: bool = False
    on_cpu: bool = False
    nodes: int = 1
    deepspeed_file: str = "deepspeed.json"

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return self.layout.ranks // self.nodes


def launched(setup: TrainingSetup) -> LaunchedTraining:
    """Return what files say of a setup. Raises ValueError if its ranks do not fill its nodes equally."""
    nodes, _ = nodes_of(setup)
    return LaunchedTraining(
        layout=setup.layout,
        micro_batch=setup.micro_batch,
        accumulation=setup.accumulation,
        sequence_length=setup.sequence_length,
        sixteen_bit=sixteen_bit(setup),
        float8=setup.precision == "float8_mixed",
        checkpointing=setup.checkpointing,
        optimizer=setup.optimizer,
        offload=setup.offload,
        compiled=setup.compiled,
        on_cpu=setup.machine.accelerator.kind == "cpu",
        nodes=nodes,
    )


@dataclass(frozen=True)
class LauncherFiles:
    """File names and contents, and the launchers that cannot express this setup with their reasons."""

    files: dict[str, str]
    left_out: dict[str, str]


def launcher_files(setup: TrainingSetup, recipe: TrainWorkload | None = None) -> LauncherFiles:
    """Return all files that start this setup. Raises ValueError if its ranks do not fill its nodes equally."""
    recipe = recipe or TrainWorkload()
    step = launched(setup)
    files = {"torchrun.sh": torchrun_command(step)}
    left_out: dict[str, str] = {}
    for kind, name in _NAMES.items():
        try:
            files[name] = json.dumps(FILE_MAKERS[kind](step, recipe), indent=2) + "\n"
        except ValueError as error:
            left_out[name] = str(error)
    if "accelerate.json" in files:
        files["accelerate.sh"] = accelerate_command(step)
    return LauncherFiles(files, left_out)


def nodes_of(setup: TrainingSetup) -> tuple[int, int]:
    """Return the number of nodes, and of ranks on each. Raises ValueError if ranks cannot be divided equally."""
    ranks, most = setup.layout.ranks, setup.machine.accelerators
    nodes = -(-ranks // most)
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks do not fill {nodes} nodes of {most} equally; use a multiple of {nodes}")
    return nodes, ranks // nodes


def sixteen_bit(setup: TrainingSetup) -> str | None:
    """Return torch's name of the 16-bit format in use; None for float32. Devices without bfloat16 get float16."""
    if setup.precision == "float32":
        return None
    if setup.precision == "float16_mixed" or "bfloat16" not in setup.machine.accelerator.peak_flops:
        return "float16"
    return "bfloat16"


def torchrun_command(step: LaunchedTraining) -> str:
    """Return a shell script that starts the ranks of one node; its arguments are the training script and its own."""
    nodes, each = step.nodes, step.ranks_per_node
    lines = ["#!/bin/sh"]
    if nodes == 1:
        lines += [
            f"# {each} rank{'s' if each > 1 else ''} on one node:  sh torchrun.sh train.py [ARGUMENTS]",
            "set -eu",
        ]
        where = ["--standalone"]
    else:
        lines += [
            f"# {nodes * each} ranks on {nodes} nodes. On node 0, 1, ... {nodes - 1}:",
            "#   NODE_RANK=0 MASTER_ADDR=<host of node 0> sh torchrun.sh train.py [ARGUMENTS]",
            "set -eu",
        ]
        where = [
            f"--nnodes {nodes}",
            '--node-rank "${NODE_RANK:?number of this node, from 0}"',
            '--master-addr "${MASTER_ADDR:?host of node 0}"',
            '--master-port "${MASTER_PORT:-29500}"',
        ]
    if step.on_cpu:
        # Without this, DeepSpeed on CPUs crashes under torchrun.
        lines.append(f"export LOCAL_SIZE={each}")
    command = " ".join(["exec torchrun", *where, f"--nproc-per-node {each}"])
    return "\n".join([*lines, f'{command} "$@"', ""])


def torch_settings(step: LaunchedTraining, recipe: TrainWorkload) -> dict[str, Any]:
    """Return the settings for a plain PyTorch script under torch's names, so that values can be passed on unchanged.

    Raises ValueError for DeepSpeed's strategies.
    """
    strategy = step.layout.strategy
    if strategy.startswith("zero"):
        raise ValueError(
            f"ZeRO-{zero_stage(strategy)} is DeepSpeed's; its settings are in deepspeed.json, torchrun.sh starts it"
        )
    half = step.sixteen_bit
    # Unused settings are left out, so that scripts need no test for null.
    settings: dict[str, Any] = {
        "backend": "gloo" if step.on_cpu else "nccl",
        "mesh": {"dp": step.layout.dp, "tp": step.layout.tp, "pp": step.layout.pp},
        "batch_size": step.micro_batch,
        "gradient_accumulation_steps": step.accumulation,
        "sequence_length": step.sequence_length,
        "activation_checkpointing": step.checkpointing,
        "compile": step.compiled,
        "max_norm": recipe.gradient_clipping,
    }
    if step.optimizer == "adamw":
        settings["AdamW"] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, "fused": True}
    else:
        settings["SGD"] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if strategy == "fsdp":
        settings["fully_shard"] = {"reshard_after_forward": True}
        if half:
            settings["MixedPrecisionPolicy"] = {"param_dtype": half, "reduce_dtype": "float32"}
        if step.offload == "cpu":
            settings["CPUOffloadPolicy"] = {"pin_memory": True}
    else:
        if strategy == "ddp":
            # Gradients are views of the reduction buckets instead of separate tensors.
            settings["DistributedDataParallel"] = {"gradient_as_bucket_view": True}
        if half:
            settings["autocast"] = {"dtype": half}
    return settings


def deepspeed_config(step: LaunchedTraining, recipe: TrainWorkload) -> dict[str, Any]:
    """Return a DeepSpeed configuration. Raises ValueError for settings that DeepSpeed cannot express."""
    _plain_layout(step, "DeepSpeed")
    _whole_checkpointing(step, "DeepSpeed")
    if step.layout.strategy == "fsdp":
        raise ValueError("FSDP is PyTorch's; the nearest of DeepSpeed is ZeRO-3")
    if step.micro_batch is None:
        raise ValueError("DeepSpeed's file states the micro batch, which is not set")
    config: dict[str, Any] = {
        "train_batch_size": step.micro_batch * step.accumulation * step.layout.dp,
        "train_micro_batch_size_per_gpu": step.micro_batch,
        "gradient_accumulation_steps": step.accumulation,
        "gradient_clipping": recipe.gradient_clipping or 0.0,
        "zero_optimization": zero_section(step.layout.strategy, step.offload),
    }
    half = step.sixteen_bit
    if half:
        config["bf16" if half == "bfloat16" else "fp16"] = {"enabled": True}
    if step.layout.strategy.startswith("zero") and step.optimizer == "adamw":
        config["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": recipe.learning_rate,
                "betas": list(_ADAM_BETAS),
                "eps": _ADAM_EPS,
                "weight_decay": recipe.weight_decay,
                # On a CPU, DeepSpeed's AdamW would have to be compiled first, without benefit.
                **({"torch_adam": True} if step.on_cpu else {}),
            },
        }
    return config


def zero_section(strategy: Strategy, offload: Offload) -> dict[str, Any]:
    """Return DeepSpeed's `zero_optimization`: the stage and the offload targets.

    Stages 1 and 2 offload optimizer states only (DeepSpeed offloads parameters in stage 3 alone).
    """
    stage = zero_stage(strategy)
    section: dict[str, Any] = {"stage": stage}
    if offload != "none":
        place = {"device": "nvme", "nvme_path": NVME_PATH} if offload == "nvme" else {"device": "cpu"}
        section["offload_optimizer"] = {**place, "pin_memory": True}
        if stage == 3:
            section["offload_param"] = {**place, "pin_memory": True}
    return section


def zero_stage(strategy: Strategy) -> int:
    """Return 1, 2 or 3; 0 without DeepSpeed sharding."""
    return int(strategy[-1]) if strategy.startswith("zero") else 0


def accelerate_config(step: LaunchedTraining) -> dict[str, Any]:
    """Return a file for `accelerate launch --config_file`, which detects JSON by the file extension.

    It has no key for accumulation outside DeepSpeed; `accelerate.sh` passes it. Raises ValueError for settings that
    Accelerate's file cannot express.
    """
    _plain_layout(step, "Accelerate")
    _whole_checkpointing(step, "Accelerate")
    _sharded_on_gpus(step, "Accelerate")
    nodes = step.nodes
    strategy = step.layout.strategy
    half = step.sixteen_bit
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": nodes,
        "num_processes": step.layout.ranks,
        "use_cpu": step.on_cpu,
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16", None: "no"}[half],
    }
    if strategy.startswith("zero"):
        config["distributed_type"] = "DEEPSPEED"
        del config["mixed_precision"]  # set in deepspeed.json; Accelerate rejects a second setting
        config["deepspeed_config"] = {"deepspeed_config_file": step.deepspeed_file, "zero3_init_flag": False}
        if nodes > 1:
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    elif strategy == "fsdp":
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": step.offload == "cpu",
            "fsdp_activation_checkpointing": step.checkpointing == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    else:
        # MULTI_CPU would start one process only and expect MPI to start the others.
        config["distributed_type"] = "MULTI_GPU" if step.layout.ranks > 1 else "NO"
    return config


def accelerate_command(step: LaunchedTraining) -> str:
    """Return a shell script around `accelerate launch` for settings without a key in its file."""
    nodes = step.nodes
    lines = ["#!/bin/sh", "# sh accelerate.sh train.py [ARGUMENTS]", "set -eu", 'here=$(dirname "$0")']
    options = ""
    if step.layout.strategy.startswith("zero"):
        options = ' --deepspeed_config_file "$here/deepspeed.json"'
    if nodes > 1:
        lines[1] = (
            "# On node 0, 1, ...:  NODE_RANK=0 MASTER_ADDR=<host of node 0> sh accelerate.sh train.py [ARGUMENTS]"
        )
        options += (
            ' --machine_rank "${NODE_RANK:?number of this node, from 0}"'
            ' --main_process_ip "${MASTER_ADDR:?host of node 0}" --main_process_port "${MASTER_PORT:-29500}"'
        )
    lines.append(f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={step.accumulation}")
    if step.on_cpu:
        lines.append("export ACCELERATE_USE_CPU=true")
    return "\n".join([*lines, f'exec accelerate launch --config_file "$here/accelerate.json"{options} "$@"', ""])


def training_arguments(step: LaunchedTraining, recipe: TrainWorkload) -> dict[str, Any]:
    """Return keyword arguments of transformers' TrainingArguments; the caller adds `output_dir` and the duration.

    Raises ValueError for settings that they cannot express.
    """
    _plain_layout(step, "Trainer")
    _whole_checkpointing(step, "Trainer")
    _sharded_on_gpus(step, "Trainer")
    strategy, half = step.layout.strategy, step.sixteen_bit
    if step.micro_batch is None:
        raise ValueError("the Trainer's arguments state the micro batch, which is not set")
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": step.micro_batch,
        "gradient_accumulation_steps": step.accumulation,
        "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "warmup_steps": recipe.learning_rate_warmup_steps,
        "max_grad_norm": recipe.gradient_clipping or 0.0,
        "bf16": half == "bfloat16",
        "fp16": half == "float16",
        "use_cpu": step.on_cpu,
        "torch_compile": step.compiled,
    }
    if step.optimizer == "sgd":
        arguments["optim"] = "sgd"
    if strategy == "fsdp":
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "cpu_offload": step.offload == "cpu",
            "activation_checkpointing": step.checkpointing == "full",
        }
        return arguments
    arguments["gradient_checkpointing"] = step.checkpointing == "full"
    if strategy == "ddp":
        arguments["ddp_find_unused_parameters"] = False
    if strategy.startswith("zero"):
        arguments["deepspeed"] = deepspeed_config(step, recipe)
    return arguments


def _plain_layout(step: LaunchedTraining, launcher: str) -> None:
    layout = step.layout
    if layout.tp > 1 or layout.pp > 1:
        raise ValueError(
            f"{launcher}'s file cannot say {layout}: tensor and pipeline parallelism are in the training script; "
            "torchrun.json names the degrees"
        )
    if step.float8:
        raise ValueError(f"{launcher}'s file cannot say float8 by itself; the training script converts the layers")


def _sharded_on_gpus(step: LaunchedTraining, launcher: str) -> None:
    # accelerate 1.15, state.py: only the distributed types of accelerators become FSDP; DeepSpeed counts one process.
    if step.on_cpu and step.layout.strategy not in ("none", "ddp"):
        raise ValueError(
            f"{launcher} leaves FSDP and DeepSpeed out on CPUs without a word and trains replicas; use torchrun.sh"
        )


def _whole_checkpointing(step: LaunchedTraining, launcher: str) -> None:
    if step.checkpointing == "selective":
        raise ValueError(f"{launcher}'s file knows activation checkpointing of whole blocks only, not selective")


FILE_MAKERS: dict[str, Callable[[LaunchedTraining, TrainWorkload], dict[str, Any]]] = {
    "torch": torch_settings,
    "deepspeed": deepspeed_config,
    "accelerate": lambda step, _: accelerate_config(step),
    "trainer": training_arguments,
}
"""Kind of a file -> what makes its content. Each raises ValueError for settings that its file cannot express."""
_NAMES = {
    "torch": "torchrun.json",
    "deepspeed": "deepspeed.json",
    "accelerate": "accelerate.json",
    "trainer": "training_arguments.json",
}
