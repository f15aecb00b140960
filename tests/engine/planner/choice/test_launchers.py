"""The planner's files are fed to the real libraries, which train two steps with them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.common.execution import Layout, Strategy
from configs.hardware.hardware import Accelerator, Machine
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.choice.descriptions import deepspeed_dict
from engine.planner.choice.launchers import LauncherFiles, deepspeed_config, launcher_files, torch_settings
from engine.planner.choice.launchers import launched as launched_step
from engine.planner.setup import TrainingSetup

SCRIPT = Path(__file__).parents[3] / "support" / "training" / "launched_training.py"
PARAMETERS = 64 * 32 + 2 * (32 * 128 + 128 + 128 * 32 + 32) + 32 * 64 + 64
TINY = Architecture(
    "tiny", "decoder", "llama", 2, 2, 32, 128, 4, 4, 8, 64, 0, False, "gelu", "layernorm", False, ()
)  # fmt: skip
CPU = Accelerator(
    name="cpu", kind="cpu", memory_bytes=8 * 2**30, bytes_per_second=2e10,
    peak_flops={"float32": 1e11, "bfloat16": 2e11}, source="for tests",
)  # fmt: skip
GPU = CPU.model_copy(update={"name": "gpu", "kind": "cuda"})
OLD_GPU = GPU.model_copy(update={"name": "old-gpu", "peak_flops": {"float32": 1e11, "float16": 2e11}})


def setup_of(strategy: Strategy, accelerator: Accelerator = CPU, **changes: Any) -> TrainingSetup:
    layout = changes.pop("layout", Layout(dp=2, strategy=strategy))
    precision = "bfloat16_autocast" if strategy in ("none", "ddp") else "bfloat16_mixed"
    machine = Machine(name="node", accelerator=accelerator, accelerators=changes.pop("accelerators", 2))
    base = TrainingSetup(TINY, machine, layout, 2, 16, 2, precision)
    return base.replace(**changes)


def written(folder: Path, setup: TrainingSetup) -> Path:
    folder.mkdir()
    for name, text in launcher_files(setup).files.items():
        (folder / name).write_text(text)
    return folder


def launched(script: str, library: str, folders: list[Path]) -> list[dict[str, Any]]:
    """What rank 0 of each folder's run has written."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = ["sh", str(folders[0] / script), str(SCRIPT), library, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folders[0])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


@pytest.mark.slow
def test_torchrun_trains_replicas_and_shards_alike(tmp_path: Path) -> None:
    folders = [written(tmp_path / strategy, setup_of(strategy)) for strategy in ("ddp", "fsdp")]
    ddp, fsdp = launched("torchrun.sh", "torch", folders)
    assert ddp["held"] == ddp["parameters"] == PARAMETERS
    assert fsdp["held"] == PARAMETERS // 2
    assert ddp["losses"] == pytest.approx(fsdp["losses"], rel=0.01)


@pytest.mark.slow
def test_deepspeed_takes_its_file_in_every_stage(tmp_path: Path) -> None:
    folders = [written(tmp_path / strategy, setup_of(strategy)) for strategy in ("zero1", "zero2", "zero3")]
    folders.append(written(tmp_path / "by_hand", setup_of("zero2")))
    by_hand = json.loads((folders[-1] / "deepspeed.json").read_text())
    # As a script puts it together from what the selector answers, None where nothing is offloaded.
    chosen = deepspeed_dict(setup_of("zero2"))
    by_hand["zero_optimization"] = {
        "stage": chosen.get("zero_stage", 1),
        "offload_optimizer": chosen.get("offload_optimizer", False),
        "offload_param": chosen.get("offload_param", False),
    }
    (folders[-1] / "deepspeed.json").write_text(json.dumps(by_hand))
    results = launched("torchrun.sh", "deepspeed", folders)
    for stage, result in zip((1, 2, 3, 2), results, strict=True):
        assert (result["stage"], result["steps"], result["batch"]) == (stage, 2, 8)
        assert result["dtype"] == "torch.bfloat16"
        assert result["clipping"] == 1.0
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accelerator", "kind", "held"),
    [
        pytest.param("ddp", CPU, "MULTI_CPU", PARAMETERS, marks=pytest.mark.nightly),
        ("fsdp", GPU, "FSDP", PARAMETERS // 2),
        pytest.param("zero2", GPU, "DEEPSPEED", PARAMETERS, marks=pytest.mark.nightly),
    ],
)
def test_accelerate_takes_its_file(
    tmp_path: Path, strategy: Strategy, accelerator: Accelerator, kind: str, held: int
) -> None:
    (result,) = launched("accelerate.sh", "accelerate", [written(tmp_path / "a", setup_of(strategy, accelerator))])
    assert result["distributed_type"] == kind
    assert (result["processes"], result["accumulation"]) == (2, 2)
    assert result["mixed_precision"] == "bf16"
    assert result["held"] == held
    assert len(result["losses"]) == 4


@pytest.mark.nightly
def test_the_trainer_takes_its_arguments(tmp_path: Path) -> None:
    folders = [
        written(tmp_path / "ddp", setup_of("ddp", checkpointing="full")),
        written(tmp_path / "fsdp", setup_of("fsdp", GPU, checkpointing="full")),
        written(tmp_path / "zero3", setup_of("zero3", GPU, checkpointing="full")),
    ]
    results = launched("torchrun.sh", "trainer", folders)
    assert [result["distributed_type"] for result in results] == ["MULTI_CPU", "FSDP", "DEEPSPEED"]
    for result in results:
        assert (result["steps"], result["batch"]) == (2, 8)
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=0.01)


def made(setup: TrainingSetup) -> tuple[dict[str, Any], LauncherFiles]:
    files = launcher_files(setup)
    return {name: json.loads(text) for name, text in files.files.items() if name.endswith(".json")}, files


def test_several_nodes_are_started_by_rank_and_host() -> None:
    _, files = made(setup_of("fsdp", GPU, layout=Layout(dp=16, strategy="fsdp"), accelerators=8))
    assert "--nnodes 2" in files.files["torchrun.sh"]
    assert "--nproc-per-node 8" in files.files["torchrun.sh"]
    assert "${MASTER_ADDR:?" in files.files["torchrun.sh"]
    assert "--main_process_ip" in files.files["accelerate.sh"]


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="9 ranks do not fill 2 nodes of 8"):
        launcher_files(setup_of("fsdp", GPU, layout=Layout(dp=9, strategy="fsdp"), accelerators=8))


def test_offload_is_written_where_each_stage_knows_it() -> None:
    two, _ = made(setup_of("zero2", GPU, offload="cpu"))
    assert two["deepspeed.json"]["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    three, _ = made(setup_of("zero3", GPU, offload="nvme"))
    assert three["deepspeed.json"]["zero_optimization"]["offload_param"]["nvme_path"]
    fsdp, _ = made(setup_of("fsdp", GPU, offload="cpu"))
    assert fsdp["accelerate.json"]["fsdp_config"]["fsdp_offload_params"] is True
    assert fsdp["training_arguments.json"]["fsdp_config"]["cpu_offload"] is True
    assert "CPUOffloadPolicy" in fsdp["torchrun.json"]


def test_devices_without_bfloat16_get_float16() -> None:
    files, _ = made(setup_of("zero2", OLD_GPU))
    assert "bf16" not in files["deepspeed.json"]
    assert files["deepspeed.json"]["fp16"] == {"enabled": True}
    assert files["training_arguments.json"]["fp16"] is True
    plain, _ = made(setup_of("ddp", OLD_GPU, precision="float32"))
    assert plain["accelerate.json"]["mixed_precision"] == "no"
    assert "autocast" not in plain["torchrun.json"]


def test_clipping_is_always_said() -> None:
    recipe = TrainWorkload(gradient_clipping=None, learning_rate=1e-3)
    assert deepspeed_config(launched_step(setup_of("zero1")), recipe)["gradient_clipping"] == 0.0
    assert torch_settings(launched_step(setup_of("ddp")), recipe)["max_norm"] is None
    assert torch_settings(launched_step(setup_of("ddp")), recipe)["AdamW"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("setup", "left_out", "reason"),
    [
        (setup_of("fsdp", GPU), "deepspeed.json", "nearest of DeepSpeed is ZeRO-3"),
        (setup_of("zero3", GPU), "torchrun.json", "in deepspeed.json"),
        (setup_of("fsdp", CPU), "accelerate.json", "on CPUs"),
        (setup_of("zero1", CPU), "training_arguments.json", "on CPUs"),
        (setup_of("ddp", GPU, checkpointing="selective"), "deepspeed.json", "not selective"),
        (setup_of("ddp", GPU, layout=Layout(dp=1, tp=2)), "accelerate.json", "tensor and pipeline"),
    ],
)
def test_what_a_launcher_cannot_say_is_left_out_with_its_reason(
    setup: TrainingSetup, left_out: str, reason: str
) -> None:
    files = launcher_files(setup)
    assert left_out not in files.files
    assert reason in files.left_out[left_out]
    assert "torchrun.sh" in files.files
