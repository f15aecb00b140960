"""What a record says of attention, graphs and compilation."""

from typing import Any

import pytest
import torch

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.spec.cell import Cell
from engine.rank import computing
from engine.rank.computing import attention_kernel, computing_environment

CONFIG = ModelConfig.parse(ARCHITECTURES["llama-1m"])
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def cell(kind: str = "generate", **fields: Any) -> Cell:
    work = {"kind": kind, "prompt_tokens": 8, "new_tokens": 4} if kind == "generate" else {"kind": kind, "steps": 1}
    return Cell.model_validate({"model": "m", "workload": work, **fields})


def test_a_cpu_says_torchs_choice_for_the_prompt() -> None:
    said = computing_environment(cell(), CPU, CONFIG)
    assert said["attention_prefill"] in ("flash_attention", "math") and said["attention_decode"] is None
    assert (said["cuda_graphs"], said["compiled"], said["attention_allowed"]) == (False, False, None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert computing_environment(cell(), CPU, CONFIG)["attention_prefill"] == "math"
    assert computing_environment(cell(), CPU, None)["attention_prefill"] is None


def test_a_gpu_is_asked_about_both_passes_and_records_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def kernel(config: Any, dtype: str, device: Any, one_token: bool = False) -> str:
        assert device == GPU
        asked.append(one_token)
        return "efficient_attention" if one_token else "flash_attention"

    monkeypatch.setattr(computing, "attention_kernel", kernel)
    said = computing_environment(cell(dtype="bfloat16"), GPU, CONFIG)
    assert asked == [False, True] and said["cuda_graphs"] is True
    assert (said["attention_prefill"], said["attention_decode"]) == ("flash_attention", "efficient_attention")
    assert {"flash_attention", "math"} <= set(said["attention_allowed"])
    peer = computing_environment(cell(engine="transformers", engine_mode="compiled"), GPU, CONFIG)
    assert (peer["compiled"], peer["cuda_graphs"], peer["attention_prefill"]) == (True, False, None)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_one_token_with_a_mask_has_a_kernel_too(dtype: str) -> None:
    assert attention_kernel(CONFIG, dtype, CPU, True) in computing._BACKENDS.values()
