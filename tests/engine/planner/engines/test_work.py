"""The work of a generation by an engine, by hand."""

import pytest

from configs.hardware.catalog import instance
from engine.planner.catalog import find_model
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.work import PhaseWork


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        # 32 layers and heads of 128: four products' worth of half of 8,192 tokens.
        ("llama-3-8b", 32 * 32 * 4 * 128 * 8192 / 2),
        # 10 of 62 layers attend to everything, 52 to 1,024 tokens, fewer at the beginning; 32 heads of 128.
        ("gemma-3-27b", 32 * 4 * 128 * (10 * 8192 / 2 + 52 * 1024 * (1 - 1024 / 16384))),
        # Latent attention: 128 heads of 192 for queries and keys, and of 128 for values.
        ("deepseek-v3", 61 * 128 * 2 * (192 + 128) * 8192 / 2),
    ],
)
def test_attention_of_a_prompt_minds_windows_and_the_length_of_values(model: str, flops: float) -> None:
    machine = instance("aws/p6-b300.48xlarge").model_copy(update={"accelerators": 8})
    huge = machine.accelerator.model_copy(update={"memory_bytes": 10**13})
    machine = machine.model_copy(update={"accelerator": huge})
    work = PhaseWork.of([BatchPoint("vllm", find_model(model), machine, 1, 1, 8192, 16)])
    assert work.attention_flops[0] == pytest.approx(flops)
