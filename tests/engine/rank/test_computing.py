"""What a record says of attention, graphs and compilation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.spec.cell import Cell
from engine.inference import model
from engine.inference.model import Shard
from engine.inference.weights import shard_of
from engine.kernels import gpu
from engine.kernels.gpu import why_no_gpu_kernels
from engine.models.llama import Llama
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.parallel.transports import graph_obstacle
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


def test_a_cpu_without_compiled_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "why_no_cpu_kernels", lambda: "linear.c: no C compiler: cc: No such file")
    assert (
        computing_environment(cell(), CPU, CONFIG)["cpu_kernels_why_not"] == "linear.c: no C compiler: cc: No such file"
    )
    for other in (cell("train"), cell(engine="transformers")):
        assert "cpu_kernels_why_not" not in computing_environment(other, CPU, CONFIG)
    monkeypatch.setattr(computing, "why_no_cpu_kernels", lambda: None)
    assert "cpu_kernels_why_not" not in computing_environment(cell(), CPU, CONFIG)


def test_a_gpu_is_asked_about_its_passes_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def kernel(config: Any, dtype: str, device: Any, of: str) -> str:
        assert device == GPU
        asked.append(of)
        return "efficient_attention" if of == "decode" else "flash_attention"

    monkeypatch.setattr(computing, "attention_kernel", kernel)
    monkeypatch.setattr(gpu, "_obstacle", lambda device: "Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    said = computing_environment(cell(dtype="bfloat16"), GPU, CONFIG)
    assert asked == ["prefill", "decode"] and said["cuda_graphs"] is True
    assert (said["attention_prefill"], said["attention_decode"]) == ("flash_attention", "efficient_attention")
    assert "flash_attention takes no mask" in said["attention_decode_why"]
    assert {"flash_attention", "math"} <= set(said["attention_allowed"])
    assert (said["gpu_kernels"], said["gpu_kernels_why_not"]) == (False, "Triton is not installed")
    with monkeypatch.context() as patched:
        patched.setattr(gpu, "_obstacle", lambda device: None)
        patched.setattr(gpu, "_attends", lambda *kind: kind == (GPU, torch.bfloat16, CONFIG.head_dim, 2))
        own = computing_environment(cell(dtype="bfloat16"), GPU, CONFIG)
    assert (own["gpu_kernels"], own["gpu_kernels_why_not"], own["attention_decode"]) == (True, None, None)
    assert asked.pop() == "prefill"
    trained = computing_environment(cell("train", dtype="bfloat16"), GPU, CONFIG)
    assert asked[2:] == ["training"] and trained["attention_training"] == "flash_attention"
    assert (trained["cuda_graphs"], trained["cuda_graphs_why"]) == (False, "no decode steps")
    assert trained["attention_prefill"] is None and "attention_prefill_why" not in trained
    peer = computing_environment(cell(engine="transformers", engine_mode="compiled"), GPU, CONFIG)
    assert (peer["compiled"], peer["cuda_graphs"], peer["attention_prefill"]) == (True, False, None)
    assert peer["cuda_graphs_why"] == "transformers decides for itself"


def test_a_gpu_on_which_our_kernels_fail_is_computed_on_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(gpu, "_operators", lambda: SimpleNamespace(rms_norm=compiled))
    monkeypatch.setattr(gpu, "_DEVICES", ["cpu"])
    gpu._obstacle.cache_clear()
    try:
        reason = why_no_gpu_kernels(CPU)
        assert reason == "RuntimeError: Failed to find C compiler. Please specify via CC"
        assert gpu.gpu_operators(torch.ones(1, 4)) is None and not gpu.has_gpu_attention(CPU, torch.float32, 64, 1)
    finally:
        gpu._obstacle.cache_clear()


def test_why_there_are_no_graphs_is_said() -> None:
    assert computing_environment(cell(), CPU, CONFIG)["cuda_graphs_why"] == "the device is cpu"
    assert graph_obstacle("cuda", "none") is None and graph_obstacle("cuda", "nccl") is None
    assert "gloo" in str(graph_obstacle("cuda", "gloo"))


def test_steps_are_recorded_where_a_graph_can_record_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(model, "static_decode", lambda shard, cache, inputs, padding: recorded.append(cache.length))
    monkeypatch.setattr(model, "graph_obstacle", lambda device, transport: graph_obstacle("cuda", transport))
    for transport, graphs in (("none", [0]), ("nccl", [0]), ("gloo", [])):
        group = Communicator((0,), 0)
        group.transport = transport
        shard = tiny_shard(group)
        shard.forward(torch.zeros(1, 1, dtype=torch.int64), shard.new_cache(1, 2))
        assert recorded == graphs and shard.uses_graphs == bool(graphs)
        recorded.clear()


def tiny_shard(group: Communicator) -> Shard:
    tensors = {name: tensor.detach() for name, tensor in Llama(CONFIG).named_parameters()}
    return shard_of(CONFIG, Grid(1, 1, 1, 0), group, tensors)


@pytest.mark.parametrize("of", ("prefill", "decode", "training"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_every_pass_has_a_kernel(dtype: str, of: computing.Pass) -> None:
    assert attention_kernel(CONFIG, dtype, CPU, of) in computing._BACKENDS.values()
