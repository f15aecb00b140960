"""What a block keeps for the backward pass in float8, against torchao's own modules, counted by saved-tensor hooks.

Weights are left out, as in the planner; a compiled block is what Inductor's partition of the joint graph keeps.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.hardware.hardware import Accelerator, Machine
from engine.models.llama import Llama
from engine.planner.families import read_architecture
from engine.planner.memory.activations import parts_of
from engine.planner.memory.framework import Framework
from engine.planner.setup import Precision, TrainingSetup

BATCH, LENGTH = 2, 64
GPU = Accelerator(
    name="gpu", kind="cuda", memory_bytes=80 * 2**30, bytes_per_second=1.0, peak_flops={"bfloat16": 1.0}, source="-"
)


def config(hidden: int, inner: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 256,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 10000.0,
    }  # fmt: skip


def model_of(said: dict[str, Any], float8: bool) -> Llama:
    torch.manual_seed(0)
    model = Llama(ModelConfig.parse(said)).to(torch.bfloat16)
    if float8:
        ao = pytest.importorskip("torchao.float8")

        def is_block(_: nn.Module, name: str) -> bool:
            return "layers" in name

        recipe = ao.Float8LinearConfig(emulate=True)
        ao.convert_to_float8_training(model, config=recipe, module_filter_fn=is_block)
    return model


def kept_bytes(model: Llama, compiled: Callable[[Any], Any] | None) -> int:
    """Bytes of all storages that one block's graph holds, its weights left out."""
    block = model.model.layers[0]
    hidden = torch.randn(BATCH, LENGTH, model.config.hidden, dtype=torch.bfloat16, requires_grad=True)
    rotary = tuple(torch.randn(1, 1, LENGTH, 16) for _ in range(2))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weights |= {table.untyped_storage().data_ptr() for table in rotary}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    forward = compiled(block.forward) if compiled else block.forward
    # The block's input is another block's output: an operator makes it, as in the model.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward(hidden * 1.0, rotary, None)
    out.float().sum().backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def predicted_bytes(said: dict[str, Any], precision: Precision, compiled: bool) -> float:
    setup = TrainingSetup(
        architecture=read_architecture(said, "tiny"), machine=Machine(name="gpu", accelerator=GPU),
        layout=Layout(dp=1, tp=1, pp=1, strategy="none"), micro_batch=BATCH, sequence_length=LENGTH, accumulation=1,
        precision=precision, checkpointing="none", compiled=compiled,
    )  # fmt: skip
    return parts_of(setup, Framework()).block.saved


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("float8", [False, True])
def test_an_eager_block_keeps_the_same_in_float8_as_in_bfloat16(float8: bool) -> None:
    said = config(128, 352)
    counted = kept_bytes(model_of(said, float8), None)
    assert predicted_bytes(said, "float8_mixed" if float8 else "bfloat16_mixed", False) == counted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly
@pytest.mark.parametrize("float8", [False, True])
def test_a_compiled_block_keeps_what_inductor_keeps(float8: bool) -> None:
    torch._dynamo.reset()
    said = config(160, 352)
    counted = kept_bytes(model_of(said, float8), torch.compile)
    assert predicted_bytes(said, "float8_mixed" if float8 else "bfloat16_mixed", True) == pytest.approx(
        counted, rel=0.05
    )


def test_compiled_float8_keeps_less_and_checkpointed_blocks_stay_as_they_were() -> None:
    said = config(128, 352)
    plain, float8 = (predicted_bytes(said, precision, True) for precision in ("bfloat16_mixed", "float8_mixed"))
    # Two norms' outputs and SwiGLU's product, in 16 bits.
    assert plain - float8 == BATCH * LENGTH * 2 * (2 * 128 + 352)
    assert predicted_bytes(said, "float8_mixed", False) == predicted_bytes(said, "bfloat16_mixed", False)
