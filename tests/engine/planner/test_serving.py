"""How large a server can be: its cache leaves what other processes have of a GPU."""

from pathlib import Path
from typing import Any

import pytest

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.serving.settings import BLOCK_POSITIONS
from engine.models.stages import stage_layers
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


def test_compressed_weights_leave_room_for_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server in int8 was refused on a GPU that its weights leave half of: they were counted in 16 bits."""
    monkeypatch.setattr(serving, "local_devices", lambda _: (H100,))
    monkeypatch.setattr(serving, "free_memory_bytes", lambda _: 14 * GIB)
    architecture = read_architecture(CONFIG, "llama-7b")
    with pytest.raises(ValueError, match="room for 0 tokens"):
        server_sizes(AskedSizes(), architecture, "llama-7b", tmp_path)
    one = block_bytes(architecture, Layout(), "bfloat16")
    caches = [
        one * server_sizes(AskedSizes(compression=passes), architecture, "llama-7b", tmp_path).blocks
        for passes in (("prune_50", "int8"), ("int4",))
    ]
    assert caches[0] == pytest.approx((0.9 * 14 - 7) * GIB, rel=0.1)
    assert caches[1] - caches[0] == pytest.approx(32 * (4 * 4096**2 + 3 * 4096 * 11008) * 3 / 8, rel=0.05)
    with pytest.raises(ValueError, match="room for 0 tokens"):  # what a level becomes is known on the machine alone
        server_sizes(AskedSizes(compression=("aggressive",)), architecture, "llama-7b", tmp_path)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3080", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "AMD GPU"])
def test_a_gpu_that_the_catalog_does_not_have_can_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """How fast it is does not matter for the size of a cache; it was refused as an unknown accelerator."""
    kind: Any = "rocm" if name.startswith("AMD") else "cuda"
    device = LocalAccelerator(name=name, kind=kind, memory_bytes=20 * GIB)
    monkeypatch.setattr(serving, "local_devices", lambda _: (device,))
    monkeypatch.setattr(serving, "free_memory_bytes", lambda _: None)
    architecture = read_architecture(CONFIG, "llama-7b")
    sizes = server_sizes(AskedSizes(), architecture, "llama-7b", tmp_path)
    known = LocalAccelerator(name=H100.name, memory_bytes=20 * GIB)
    monkeypatch.setattr(serving, "local_devices", lambda _: (known,))
    assert sizes == server_sizes(AskedSizes(), architecture, "llama-7b", tmp_path)
    unknown = LocalAccelerator(name=name, kind=kind)
    monkeypatch.setattr(serving, "local_devices", lambda _: (unknown,))
    with pytest.raises(ValueError, match="unknown accelerator"):
        server_sizes(AskedSizes(), architecture, "llama-7b", tmp_path)


@pytest.mark.parametrize("name", ["llama-200m", "llama-40m", "gpt2-124m"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_block_is_that_of_the_stage_with_the_most_layers(name: str, pp: int) -> None:
    """Tables take the place of layers in the first and the last stage: llama-200m has 3, 6 and 3 on three."""
    most = max(len(layers) for layers in stage_layers(ModelConfig.parse(dict(ARCHITECTURES[name])), pp))
    architecture = read_architecture(ARCHITECTURES[name], name)
    a_layer = 2 * architecture.kv_heads * architecture.head_dim * 2
    assert block_bytes(architecture, Layout(pp=pp), "bfloat16") == BLOCK_POSITIONS * a_layer * most


def test_the_cache_of_no_stage_exceeds_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving, "local_devices", lambda _: (H100,) * 3)
    monkeypatch.setattr(serving, "free_memory_bytes", lambda _: 80 * GIB)
    architecture = read_architecture(ARCHITECTURES["llama-200m"], "llama-200m")
    asked = AskedSizes(layout=Layout(pp=3), kv_cache_gib=1.0)
    held = server_sizes(asked, architecture, "llama-200m", tmp_path).blocks * BLOCK_POSITIONS * 6 * 2 * 4 * 64 * 2
    assert 0.99 * GIB < held <= GIB
