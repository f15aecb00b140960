"""DeepSpeed's ZeRO on two ranks: equal to one process in plain PyTorch, resumed bit for bit, nothing left behind.

Tolerances. float32: sums in another order, 2e-6 of the loss; Adam divides by the root of tiny gradients, so that a
weight may differ by a part of a step's 0.009. bfloat16 keeps 8 bits of weights and gradients: 1 % of losses and norms.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.common.execution import Layout
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from engine.training.checkpoints.files import steps_in
from tests.support.rank_pool import RankPool
from tests.support.training.zero_runs import (
    Case,
    alone,
    decays_after_resuming,
    leftovers,
    refused,
    resumed,
    saved_on_a_small_disk,
    saved_without_swapped_files,
    trained,
    without_a_swap_folder,
    without_numbers,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS = {"float32": 1e-5, "bfloat16": 0.05}
NORM = {"float32": 1e-5, "bfloat16": 0.01}
WEIGHT = {"float32": 1e-3, "bfloat16": 0.05}
STRATEGIES = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_seconds=120) as ranks:
        yield ranks


def follows_one_process(pool: RankPool, case: Case) -> None:
    parts, one = pool.run(trained, case), alone(case)
    replicas = parts[:: case.tp]
    losses = [sum(shares) for shares in zip(*(part["losses"] for part in replicas), strict=True)]
    assert len(set(losses)) == case.steps and min(one["norms"]) > 2 * (case.clipping or 0), "clipping must bite"
    assert losses == pytest.approx(one["losses"], abs=LOSS[case.dtype])
    for part in parts:
        assert part["norms"] == pytest.approx(one["norms"], rel=NORM[case.dtype])
        assert part["evaluated"] == pytest.approx(one["evaluated"], abs=LOSS[case.dtype])
        assert part["exposed"].known is (case.tp == 1), "the sums of a layer are not told apart"
        if case.tp > 1:
            continue
        inner = [calls[:-1] for calls in part["calls"]]
        exchanges = case.strategy != "zero1"  # stages 2 and 3 cannot keep whole gradients
        assert all((calls > 0) is exchanges for step in inner for calls in step)
        assert all(calls[-1] > 0 for calls in part["calls"])
        elements = sum(weight.numel() for name, weight in one["model"].items())
        width = 4 if case.dtype == "float32" else 2
        assert part["exposed"].seconds > 0
        assert part["exposed"].bytes > case.steps * elements * width  # gradients alone
    assert all(part["model"] == {} for part in parts[1:]) and parts[0]["model"].keys() == one["model"].keys()
    for name, weight in one["model"].items():
        torch.testing.assert_close(parts[0]["model"][name], weight, atol=WEIGHT[case.dtype], rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        Case("zero1", accumulation=4, clipping=None),
        Case("zero2", offload="cpu", checkpointing="full"),
        pytest.param(Case("zero2", "bfloat16", accumulation=4), marks=pytest.mark.slow),
        Case("zero3", accumulation=4, checkpointing="selective"),
        pytest.param(Case("zero3", "bfloat16", offload="cpu", clipping=None), marks=pytest.mark.nightly),
        pytest.param(Case("zero2", optimizer="sgd", accumulation=2), marks=pytest.mark.nightly),
    ],
    ids=lambda case: f"{case.strategy} {case.dtype} {case.offload} {case.checkpointing} {case.optimizer}",
)
def test_follows_one_process(pool: RankPool, case: Case, tmp_path: Path) -> None:
    follows_one_process(pool, replace(case, folder=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("zero1", accumulation=2),
        Case("zero2", "bfloat16", checkpointing="full"),
        Case("zero3", accumulation=2, clipping=None, biased=True),
        pytest.param(Case("zero2", offload="cpu", checkpointing="selective"), marks=pytest.mark.nightly),
        pytest.param(Case("zero3", offload="cpu", accumulation=2), marks=pytest.mark.nightly),
        pytest.param(Case("zero2", compiled=True), marks=pytest.mark.nightly),
    ],
    ids=lambda case: f"{case.strategy} {case.dtype} {case.offload} {case.checkpointing} {case.compiled}",
)
def test_tensor_parallel_ranks_follow_one_process(pool: RankPool, case: Case, tmp_path: Path) -> None:
    follows_one_process(pool, replace(case, dp=1, tp=2, folder=str(tmp_path)))


@pytest.mark.nightly
def test_tensor_and_data_parallel_ranks_follow_one_process(tmp_path: Path) -> None:
    with RankPool(4, timeout_seconds=300) as ranks:
        for strategy in STRATEGIES:
            for dtype in ("float32", "bfloat16"):
                follows_one_process(ranks, Case(strategy, dtype, accumulation=2, tp=2, folder=str(tmp_path)))


def test_what_tensor_parallel_ranks_cannot_share_is_named(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(refused, Case("zero1", dp=1, tp=3, folder=str(tmp_path))):
        assert said.startswith("layout.tp: 4 query heads cannot be split by 3")


@pytest.mark.nightly
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_follows_one_process(
    pool: RankPool, tmp_path: Path, strategy: str, dtype: str, accumulation: int, offload: str
) -> None:
    for clipping in (None, 0.5):
        follows_one_process(pool, Case(strategy, dtype, accumulation, clipping, offload, folder=str(tmp_path)))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_compiled_follows_one_process(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    follows_one_process(pool, Case(strategy, accumulation=2, compiled=True, folder=str(tmp_path)))


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # compiles operators of DeepSpeed, with PyTorch's headers, beside whatever else is tested
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="DeepSpeed reads NVMe by libaio: libaio-dev")
def test_offload_to_a_disk_follows_one_process(tmp_path: Path) -> None:
    with RankPool(2, timeout_seconds=600) as ranks:  # the operator is compiled first
        follows_one_process(ranks, Case("zero3", offload="nvme", folder=str(tmp_path)))


@pytest.mark.slow
def test_tensor_parallel_ranks_resume_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    """And others than those that wrote the checkpoint are refused."""
    case = Case("zero2", accumulation=2, dp=1, tp=2, folder=str(tmp_path))
    for part in pool.run(resumed, case):
        whole, rest = part["whole"], part["rest"]
        assert rest["losses"] == whole["losses"] and rest["norms"] == whole["norms"]
        assert all(torch.equal(weight, whole["model"][name]) for name, weight in rest["model"].items())
    for said in pool.run(refused, replace(case, dp=2, tp=1)):
        assert "written with tp=2, not 1" in said


@pytest.mark.parametrize(
    ("strategy", "dtype", "offload"),
    [("zero2", "float32", "cpu"), pytest.param("zero3", "bfloat16", "none", marks=pytest.mark.slow)],
)
def test_resumes_bit_for_bit(pool: RankPool, tmp_path: Path, strategy: str, dtype: str, offload: str) -> None:
    case = Case(strategy, dtype, accumulation=2, offload=offload, folder=str(tmp_path))
    before = os.listdir()
    for part in pool.run(resumed, case):
        whole, rest = part["whole"], part["rest"]
        assert rest["losses"] == whole["losses"] and rest["norms"] == whole["norms"]
        assert rest["model"].keys() == whole["model"].keys()
        assert all(torch.equal(weight, whole["model"][name]) for name, weight in rest["model"].items())
    assert os.listdir() == before, "nothing is left in the working folder"
    next((tmp_path / "checkpoint" / "zero").glob("*rank_1_*optim*")).unlink()
    for said in pool.run(refused, case):
        assert "written by 1 rank and" in said and "not by 2" in said and "resume with 1" in said
    shutil.rmtree(tmp_path / "checkpoint")
    assert all("no checkpoint of ZeRO" in said for said in pool.run(refused, case))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_the_studys_weight_decay_holds_after_resuming(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    """As its learning rate does, and not the one that the checkpoint was made with."""
    assert pool.run(decays_after_resuming, Case(strategy, folder=str(tmp_path))) == [[0.5, 0.0]] * 2


@pytest.mark.parametrize("short_rank", [0, 1])
def test_a_full_disk_costs_the_checkpoint_and_no_training(pool: RankPool, tmp_path: Path, short_rank: int) -> None:
    for failures, written, losses in pool.run(saved_on_a_small_disk, Case("zero2", folder=str(tmp_path)), short_rank):
        assert (len(failures), written, len(losses)) == (1, 1, 1)
        assert failures[0].startswith(f"rank {short_rank} could not write its part (")
    assert steps_in(tmp_path / "saved") == [2] and not list((tmp_path / "saved").glob(".*"))


@pytest.mark.parametrize("short_rank", [0, 1])
def test_offloaded_files_that_one_rank_cannot_copy_fail_on_all(pool: RankPool, tmp_path: Path, short_rank: int) -> None:
    for said, restored in pool.run(saved_without_swapped_files, str(tmp_path), short_rank):
        assert said.startswith(f"rank {short_rank} could not write its part (") and restored
        assert f"swapped{short_rank}" in said


def test_a_folder_for_nvme_that_one_rank_cannot_make_ends_all(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(without_a_swap_folder, Case("zero3", offload="nvme", folder=str(tmp_path)), 1):
        assert "cache1" in said


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_close_gives_all_memory_back(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    assert pool.run(leftovers, Case(strategy, accumulation=2, folder=str(tmp_path))) == [[], []]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_gradients_that_are_no_numbers_change_nothing(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    for norm, applied, stayed in pool.run(without_numbers, Case(strategy, folder=str(tmp_path))):
        assert not math.isfinite(norm) and applied and stayed


def test_what_cannot_be_done_here_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        for said in pool.run(refused, Case("zero1", "float16", folder=str(tmp_path))):
            assert said.startswith("dtype: float16 is not computed by DeepSpeed") and "bfloat16" in said
    if not Path("/usr/include/libaio.h").exists():
        for said in pool.run(refused, Case("zero3", offload="nvme", folder=str(tmp_path))):
            assert (
                said.startswith("workload.offload: nvme needs") and "libaio-dev" in said and "use offload cpu" in said
            )


@pytest.mark.parametrize(
    ("strategy", "work", "says"),
    [("zero2", {"offload": "nvme"}, "Use cpu, or zero3"), ("zero3", {"compiled": True}, "Use fsdp or zero2")],
)
def test_cells_that_deepspeed_cannot_train_are_refused(strategy: str, work: dict[str, Any], says: str) -> None:
    layout = Layout.model_validate({"dp": 2, "strategy": strategy})
    with pytest.raises(ValueError, match=says):
        Cell(model="m", workload=TrainWorkload(**work), layout=layout)
