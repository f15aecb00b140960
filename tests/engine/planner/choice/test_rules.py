"""The table of rules of thumb, row by row, its overlaps included."""

import pytest

from configs.common.execution import Layout, Strategy
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.architecture import Architecture
from engine.planner.choice.rules import Rule, rule_of_thumb
from engine.planner.setup import TrainingSetup

BILLION = 10**9
GPU = Accelerator(
    name="gpu", kind="cuda", memory_bytes=10**10, bytes_per_second=1e12, peak_flops={"bfloat16": 1e14}, source="tests"
)
TINY = Architecture(
    "tiny", "decoder", "llama", 2, 2, 32, 128, 4, 4, 8, 64, 0, False, "gelu", "layernorm", False, ()
)  # fmt: skip
BASE = TrainingSetup(TINY, Machine(name="node", accelerator=GPU, accelerators=8), micro_batch=2, accumulation=3)


@pytest.mark.parametrize(
    ("parameters", "gpus", "words"),
    [
        (BILLION - 1, 1, "DDP"),
        (BILLION - 1, 4, "DDP"),
        (BILLION - 1, 5, "DDP"),
        (BILLION, 1, "DDP with gradient checkpointing"),
        (6.7 * BILLION, 2, "DDP with gradient checkpointing"),
        (6.7 * BILLION, 3, "FSDP"),
        (6.7 * BILLION, 4, "FSDP"),
        (6.7 * BILLION, 8, "FSDP"),
        (6.7 * BILLION, 9, "FSDP"),
        (10 * BILLION, 1, "FSDP with CPU offloading"),
        (10 * BILLION, 4, "FSDP with CPU offloading"),
        (70 * BILLION, 5, "DeepSpeed ZeRO-3"),
        (70 * BILLION, 8, "DeepSpeed ZeRO-3"),
        (70 * BILLION, 9, "DeepSpeed ZeRO-3 with ZeRO-Infinity"),
    ],
)
def test_each_row_of_the_table(parameters: float, gpus: int, words: str) -> None:
    assert rule_of_thumb(parameters, gpus).words == words


@pytest.mark.parametrize(
    ("parameters", "gpus", "first", "second"),
    [(BILLION / 2, 8, "DDP", "FSDP"), (5 * BILLION, 16, "FSDP", "DeepSpeed ZeRO-3")],
)
def test_rows_with_two_choices_go_by_memory(parameters: float, gpus: int, first: str, second: str) -> None:
    asked: list[Rule] = []

    def fits(rule: Rule) -> bool:
        asked.append(rule)
        return False

    assert rule_of_thumb(parameters, gpus, lambda _: True).words == first
    assert rule_of_thumb(parameters, gpus, fits).words == second
    assert [rule.words for rule in asked] == [first]


def test_a_row_with_one_choice_does_not_ask() -> None:
    assert rule_of_thumb(5 * BILLION, 4, lambda _: pytest.fail("asked")).words == "FSDP"


@pytest.mark.parametrize(
    ("parameters", "gpus", "strategy", "checkpointing", "offload", "precision"),
    [
        (BILLION / 2, 4, "ddp", "none", "none", "bfloat16_autocast"),
        (BILLION / 2, 1, "none", "none", "none", "bfloat16_autocast"),
        (5 * BILLION, 2, "ddp", "full", "none", "bfloat16_autocast"),
        (5 * BILLION, 8, "fsdp", "none", "none", "bfloat16_mixed"),
        (20 * BILLION, 4, "fsdp", "none", "cpu", "bfloat16_mixed"),
        (20 * BILLION, 16, "zero3", "none", "nvme", "bfloat16_mixed"),
    ],
)
def test_the_choice_as_a_setup(
    parameters: float, gpus: int, strategy: Strategy, checkpointing: str, offload: str, precision: str
) -> None:
    setup = rule_of_thumb(parameters, gpus).setup(BASE, gpus)
    assert setup.layout == Layout(dp=gpus, strategy=strategy)
    assert (setup.checkpointing, setup.offload, setup.precision) == (checkpointing, offload, precision)
    assert (setup.micro_batch, setup.accumulation) == (2, 3)


def test_no_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="gpu_count: 0"):
        rule_of_thumb(BILLION, 0)
