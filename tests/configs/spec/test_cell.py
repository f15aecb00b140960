"""Keys name a measurement for ever; launches hold what may share a process."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.common.execution import Layout
from configs.plans.job import Measurement
from configs.plans.packing import pack_launches
from configs.spec.cell import Cell
from configs.workloads.communication import CommunicationWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from configs.workloads.serve import ServeWorkload
from configs.workloads.train import TrainWorkload


def cell(**changes: object) -> Cell:
    return Cell.model_validate({"model": "synthetic:llama-1m@0", "workload": GenerateWorkload(num_prompts=4)} | changes)


def test_the_key_does_not_move() -> None:
    # Written down on purpose: a change here orphans every record that users have.
    assert cell().key == "b0c92eeb3452d31b"
    assert Cell(workload=NoopWorkload()).key == "8cd1cded73dd0114"
    assert Cell(model="m", workload=ServeWorkload(), target="local").key == "82d09e4141aaf536"


def test_a_default_that_is_spelt_out_has_the_same_key() -> None:
    assert cell().key == cell(dtype="float32", layout=Layout(dp=1), engine="rankwise").key


@pytest.mark.parametrize(
    "change",
    [
        {"model": "synthetic:llama-1m@1"},
        {"dtype": "bfloat16"},
        {"layout": Layout(dp=2)},
        {"cores_per_rank": 2},
        {"env": {"OMP_PROC_BIND": "true"}},
        {"target": "other"},
        {"workload": GenerateWorkload(num_prompts=5)},
        {"workload": TrainWorkload()},
    ],
    ids=str,
)
def test_whatever_changes_the_measurement_changes_the_key(change: dict[str, object]) -> None:
    assert cell(**change).key != cell().key


def test_only_workload_fields_vary_inside_a_launch() -> None:
    assert cell().pack_key == cell(workload=GenerateWorkload(num_prompts=9, batch_size=3)).pack_key
    assert cell().pack_key != cell(dtype="bfloat16").pack_key
    assert cell().pack_key != cell(workload=TrainWorkload()).pack_key


def test_servers_with_different_times_to_be_ready_share_no_launch_and_have_the_time_within_its_limit() -> None:
    """The time was 300 s for all: a model that loads longer could never be measured."""
    plain, slow = (cell(workload=ServeWorkload(ready_seconds=seconds)) for seconds in (300, 1800))
    assert plain.pack_key != slow.pack_key
    assert slow.workload.min_timeout_seconds - plain.workload.min_timeout_seconds == 1500
    for wrong in (0.5, 90_000, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="ready_seconds"):
            ServeWorkload(ready_seconds=wrong)


def test_training_on_several_ranks_is_ddp() -> None:
    assert cell(workload=TrainWorkload(), layout=Layout(dp=2)).layout.strategy == "ddp"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": TrainWorkload(), "layout": Layout(pp=2)}, "pipeline parallelism is not supported in training"),
        ({"workload": TrainWorkload(global_batch_size=3), "layout": Layout(dp=2)}, "is not divisible"),
        ({"workload": TrainWorkload(micro_batch_size=3)}, "got 3, which does not divide"),
        ({"workload": TrainWorkload(offload="cpu")}, "not supported by none. Use fsdp"),
        ({"workload": TrainWorkload(offload="nvme"), "layout": Layout(dp=2, strategy="fsdp")}, "zero3 for nvme"),
        ({"workload": TrainWorkload(sharding="hybrid"), "layout": Layout(dp=2)}, "requires fsdp, got ddp"),
        ({"workload": CommunicationWorkload()}, "tp of 2 or more"),
        ({"engine": "deepspeed"}, "tp of 2 or more"),
        ({"engine": "deepspeed", "workload": TrainWorkload(), "layout": Layout(dp=2)}, "tp of 2 or more"),
        ({"engine": "transformers", "workload": TrainWorkload()}, "transformers supports generate"),
        ({"engine_mode": "static"}, "engine_mode"),
        ({"workload": GenerateWorkload(batch_size=2, micro_batch_size=4)}, "more than the batch"),
        ({"layout": Layout(dp=2, strategy="ddp")}, "supports none only"),
        ({"engine": "transformers", "layout": Layout(dp=2)}, "one rank"),
        ({"layout": Layout(dp=8)}, "fewer than replicas \\(dp=8\\)"),
        ({"workload": NoopWorkload(fault="kill", fault_rank=1)}, "fault_rank"),
        ({"compression": "prune_50+float8+int8"}, "float8 and int8 are mutually exclusive"),
        ({"compression": "int4+float8"}, "int4 and float8 are mutually exclusive"),
        ({"surprise": 1}, "Extra inputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_cell_that_cannot_be_measured_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cell(**change)


def measurements(repeats: int) -> list[Measurement]:
    cells = [cell(workload=GenerateWorkload(num_prompts=n)) for n in (2, 4, 6, 8)]
    cells += [cell(dtype="bfloat16", workload=GenerateWorkload(num_prompts=n)) for n in (2, 4)]
    return [Measurement(cell=each, repeat=repeat, attempt=1) for each in cells for repeat in range(repeats)]


def test_every_measurement_is_made_once_and_no_two_repeats_share_a_launch() -> None:
    launches = pack_launches(measurements(3), "timed", seed=0)
    made = [measurement.name for launch in launches for measurement in launch.measurements]
    assert sorted(made) == sorted(measurement.name for measurement in measurements(3))
    for launch in launches:
        assert len({measurement.cell.key for measurement in launch.measurements}) == len(launch.measurements)
        assert len({measurement.cell.pack_key for measurement in launch.measurements}) == 1
    assert [launch.block for launch in launches] == [0, 0, 1, 1, 2, 2]


def test_the_order_is_random_but_the_same_for_a_seed() -> None:
    assert pack_launches(measurements(3), "timed", 0) == pack_launches(reversed(measurements(3)), "timed", 0)
    orders = {tuple(v.name[:16] for v in launch.measurements) for launch in pack_launches(measurements(9), "timed", 0)}
    assert len(orders) > 4, "blocks differ in order"
    assert pack_launches(measurements(3), "timed", 1) != pack_launches(measurements(3), "timed", 0)


def test_unpacked_every_measurement_is_alone() -> None:
    launches = pack_launches(measurements(2), "timed", 0, pack=False)
    assert [len(launch.measurements) for launch in launches] == [1] * 12


def test_one_stage_has_no_balance() -> None:
    assert cell(layout=Layout(stage_balance="speed")).key == cell().key, "a sweep over pp measures it once"
    staged = cell(layout=Layout(pp=2, stage_balance="speed"))
    assert staged.key != cell(layout=Layout(pp=2)).key and str(staged.layout) == "pp=2 by speed"


def test_random_prompts_are_refused_for_a_server_that_takes_texts_only() -> None:
    served: dict[str, Any] = {"kind": "serve", "users": 2}
    with pytest.raises(ValidationError, match=r"prompts: a server of transformers takes texts only.*prompts: FILE"):
        Cell(model="m", engine="transformers", workload=served)
    assert Cell(model="m", engine="transformers", workload={**served, "prompts": "p.jsonl"}).engine == "transformers"
