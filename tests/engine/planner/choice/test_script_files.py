"""Files of the planner: each cell's layout is in them, the study adds to them, and what they cannot say is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.common.execution import Layout, Strategy
from configs.spec.cell import Cell
from configs.spec.study import parse_study
from configs.workloads.script import ScriptWorkload
from engine.planner.choice.script_files import planned_contents
from engine.scripts.commands import NodePlace, node_command
from engine.scripts.workdir import fill_workdir
from tasks.planning.script_inputs import unexpressed, unreached

PLANNED = {"deepspeed.json": "deepspeed"}
TWO_NODES = NodePlace(1, 2, 2, "10.0.0.1", 29500, "10.0.0.2", ("a", "b"), 1, gpus=False)


def script(**fields: Any) -> ScriptWorkload:
    return ScriptWorkload.model_validate({"command": ("train.py",), "micro_batch_size": 4, **fields})


@pytest.mark.parametrize(("strategy", "stage"), [("ddp", 0), ("zero1", 1), ("zero3", 3)])
def test_the_cell_is_in_the_file_and_the_study_adds_to_it(tmp_path: Path, strategy: Strategy, stage: int) -> None:
    added = {"zero_optimization": {"overlap_comm": False}, "optimizer": {"params": {"lr": "{params.lr}"}}}
    work = script(
        planned_files=PLANNED, accumulation_steps=3, params={"lr": 0.5}, config_files={"deepspeed.json": added}
    )
    layout = Layout(dp=2, strategy=strategy)
    planned = planned_contents(work, layout, "bfloat16", 1, on_cpu=True)
    fill_workdir(work, tmp_path, tmp_path / "work", work.values(layout), planned)
    written = json.loads((tmp_path / "work" / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": stage, "overlap_comm": False}
    assert (written["train_batch_size"], written["train_micro_batch_size_per_gpu"]) == (24, 4)
    assert written["bf16"] == {"enabled": True}
    assert written["gradient_clipping"] == 1.0
    assert written["optimizer"]["params"]["lr"] == 0.5
    assert written["optimizer"].get("type") == ("AdamW" if stage else None)


def test_accelerate_reads_its_file_and_no_second_precision() -> None:
    plain = node_command(script(launcher="accelerate"), ["train.py"], TWO_NODES, Path("logs"))
    work = script(launcher="accelerate", planned_files={"accelerate.json": "accelerate"})
    planned = node_command(work, ["train.py"], TWO_NODES, Path("logs"))
    assert plain is not None and planned is not None
    assert "--mixed_precision" in plain and plain[plain.index("--config_file") + 1] != "accelerate.json"
    assert planned[planned.index("--config_file") + 1] == "accelerate.json" and "--mixed_precision" not in planned
    content = planned_contents(work, Layout(dp=4, strategy="ddp"), "float16", 2, on_cpu=True)["accelerate.json"]
    assert (content["num_machines"], content["num_processes"], content["mixed_precision"]) == (2, 4, "fp16")


_DEFAULTS = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
gpu_ids: '0'
num_machines: 1
num_processes: 1
use_cpu: false
"""
_VALIDATED = """
import sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
found = _validate_launch_command(launch_command_parser().parse_args([*sys.argv[1:], "train.py"]))[0]
print(found.num_processes, found.gpu_ids, found.multi_gpu, found.use_fsdp, found.debug, found.mixed_precision)
"""


@pytest.mark.parametrize(
    ("place", "validated"),
    [(TWO_NODES, "4 all True False False no"), (replace(TWO_NODES, nodes=1, ranks_per_node=1, gpus=True),
                                                "1 all False False False no")],
    ids=["ranks", "one GPU"],
)  # fmt: skip
def test_accelerate_takes_nothing_of_what_accelerate_config_wrote(
    place: NodePlace, validated: str, tmp_path: Path
) -> None:
    """It chose GPUs, FSDP and debugging for scripts of every study, or refused each launch (`gpu_ids: '0'`)."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(_DEFAULTS)
    command = node_command(script(launcher="accelerate"), ["train.py"], place, Path("logs"))
    assert command is not None
    options = command[command.index("accelerate.commands.launch") + 1 : command.index("-I") - 1]
    done = subprocess.run(
        [sys.executable, "-c", _VALIDATED, *options],
        capture_output=True, text=True, env=os.environ | {"HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == f"{validated}\n", done.stderr


@pytest.mark.parametrize(
    ("fields", "layout", "problem"),
    [
        ({"planned_files": PLANNED}, Layout(dp=2, strategy="fsdp"), "deepspeed.json: FSDP is PyTorch's"),
        ({"planned_files": PLANNED, "micro_batch_size": None}, Layout(), "deepspeed.json: .*micro batch"),
        ({"planned_files": {"t.json": "torch"}}, Layout(dp=2, strategy="zero2"), "t.json: ZeRO-2 is DeepSpeed's"),
        ({"planned_files": {"a.json": "trainer"}}, Layout(tp=2), "a.json: Trainer's file cannot say"),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_its_name(fields: dict[str, Any], layout: Layout, problem: str) -> None:
    with pytest.raises(ValueError, match=f"workload.planned_files.{problem}"):
        planned_contents(script(**fields), layout, "float32", 1, on_cpu=False)
    cell = Cell(workload=script(**fields), layout=layout)
    assert len(unexpressed([cell, cell])) == 1


def test_sharding_that_a_cpu_would_leave_out_is_refused_there() -> None:
    work = script(planned_files={"a.json": "trainer"})
    layout = Layout(dp=2, strategy="fsdp")
    assert planned_contents(work, layout, "float32", 1, on_cpu=False)
    with pytest.raises(ValueError, match="on CPUs without a word"):
        planned_contents(work, layout, "float32", 1, on_cpu=True)


def test_zero_under_accelerate_wants_both_files() -> None:
    with pytest.raises(ValueError, match=r"Add deepspeed.json: deepspeed"):
        script(planned_files={"a.json": "accelerate"}).check(Layout(dp=2, strategy="zero2"))
    both = script(planned_files={"a.json": "accelerate", "d.json": "deepspeed"})
    both.check(Layout(dp=2, strategy="zero2"))
    found = planned_contents(both, Layout(dp=2, strategy="zero2"), "float32", 1, on_cpu=False)
    assert found["a.json"]["deepspeed_config"]["deepspeed_config_file"] == "d.json"


@pytest.mark.parametrize(
    ("kind", "over", "reached"),
    [
        ("deepspeed", {"strategy": ["ddp", "zero1"]}, True),
        ("deepspeed", {"dtype": ["float32", "bfloat16"]}, True),
        ("deepspeed", {"activation_checkpointing": ["none", "full"]}, False),
        ("accelerate", {"micro_batch_size": [1, 2]}, False),
        ("trainer", {"activation_checkpointing": ["none", "full"]}, True),
    ],
)
def test_swept_fields_reach_the_script_by_files_of_the_planner(
    tmp_path: Path, kind: str, over: dict[str, list[object]], reached: bool
) -> None:
    work = {"kind": "script", "command": ["t.py"], "micro_batch_size": 1, "planned_files": {"f.json": kind}}
    study = {"study": "s", "workload": work, "experiments": {"a": {"kind": "sweep", "base": {"dp": 2}, "over": over}}}
    assert bool(unreached(parse_study(study), tmp_path)) is not reached


def test_files_lie_in_the_scripts_folder() -> None:
    with pytest.raises(ValueError, match="expected a relative name"):
        script(planned_files={"../x.json": "deepspeed"})
