"""How large a server can be: its cache leaves what other processes have of a GPU."""

from pathlib import Path

import pytest

from configs.common.execution import Layout
from engine.planner import serving
from engine.planner.accelerators import LocalAccelerator
from engine.planner.families import read_architecture
from engine.planner.serving import AskedSizes, block_bytes, server_sizes

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GIB = 1 << 30
H100 = LocalAccelerator(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)


@pytest.mark.parametrize(("free", "room"), [(None, 80), (80 * GIB, 80), (40 * GIB, 40)])
def test_a_cache_takes_what_is_free_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int | None, room: int
) -> None:
    asked_of: list[int] = []

    def free_of(devices: tuple[LocalAccelerator, ...]) -> int | None:
        asked_of.append(len(devices))
        return free

    monkeypatch.setattr(serving, "local_devices", lambda _: (H100, H100))
    monkeypatch.setattr(serving, "free_memory_bytes", free_of)
    architecture = read_architecture(CONFIG, "llama-7b")
    asked = AskedSizes(max_sequences=64)
    sizes = server_sizes(asked, architecture, "llama-7b", tmp_path)
    cache = sizes.blocks * block_bytes(architecture, Layout(), "bfloat16")
    weights = 13 * GIB
    assert 0.5 * (room * GIB - weights) < cache < 0.9 * room * GIB - weights
    assert asked_of == [1]  # the other GPU is nobody's here


def test_a_cache_that_does_not_fit_beside_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving, "local_devices", lambda _: (H100,))
    monkeypatch.setattr(serving, "free_memory_bytes", lambda _: 10 * GIB)
    architecture = read_architecture(CONFIG, "llama-7b")
    with pytest.raises(ValueError, match=r"--kv-cache-gib 20: 10\.0 GiB are free for each rank"):
        server_sizes(AskedSizes(kv_cache_gib=20), architecture, "llama-7b", tmp_path)
    with pytest.raises(ValueError, match="room for 0 tokens"):
        server_sizes(AskedSizes(), architecture, "llama-7b", tmp_path)
