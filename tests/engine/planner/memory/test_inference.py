"""Memory of inference: parameters and caches exactly, activations against the engine's own allocations."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from configs.common.execution import Layout, StageBalance
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.hardware import Accelerator, Machine
from engine.models.llama import Llama
from engine.models.stages import stage_layers as engine_stage_layers
from engine.models.weights import DTYPES
from engine.planner.catalog import find_model, known_models
from engine.planner.families import read_architecture
from engine.planner.memory.inference import inference_memory, largest_batch
from engine.planner.memory.stored import stored_stage_layers
from engine.planner.setup import InferenceSetup, WeightFormat
from tests.support.training.memory_cells import Allocations

GPU = Accelerator(
    name="gpu",
    kind="cuda",
    memory_bytes=int(80e9),
    bytes_per_second=2e12,
    peak_flops={"bfloat16": 3e14, "float32": 2e13},
    source="test",
)
NODE = Machine(name="node", accelerator=GPU, accelerators=8)


def setup(model: str = "llama-2-7b", **changes: object) -> InferenceSetup:
    return InferenceSetup(find_model(model), NODE).replace(**changes)


@pytest.mark.parametrize(("form", "element"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_parameters_are_exact(form: WeightFormat, element: int) -> None:
    assert inference_memory(setup(weights=form)).parameters == 6_738_415_616 * element


def test_quantised_matrices_have_scales_and_tables_have_none() -> None:
    # Of a block: 4 squares of 4096, and 3 x 4096 x 11008; outputs 5 x 4096 (down's too) and 2 x 11008.
    matrices, outputs = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32 * (5 * 4096 + 2 * 11008)
    others = 2 * (2 * 32000 * 4096 + 65 * 4096)
    assert inference_memory(setup(weights="int8")).parameters == matrices + 2 * outputs + others
    assert inference_memory(setup(weights="int4")).parameters == matrices // 2 + 4 * matrices // 128 + others
    assert inference_memory(setup(weights="int4", int4_group=32)).parameters == matrices * 5 // 8 + others
    head = 32000 * 4096
    found = inference_memory(setup(weights="int8", quantised_head=True)).parameters
    assert found == matrices + 2 * outputs + others - 2 * head + head + 2 * 32000


def test_tensor_parallel_ranks_share_matrices_and_hold_norms() -> None:
    whole = find_model("llama-2-70b")
    norms = 161 * 8192
    for tp in (2, 8):
        found = inference_memory(setup("llama-2-70b", layout=Layout(tp=tp))).parameters
        assert found == 2 * ((whole.parameters - norms) // tp + norms)
    # 8 key and value heads on 16 ranks: each holds a whole one.
    keys = 2 * 80 * 8192 * 1024
    found = inference_memory(setup("llama-2-70b", layout=Layout(tp=16))).parameters
    assert found == 2 * ((whole.parameters - norms - keys) // 16 + keys // 8 + norms)
    replicated = inference_memory(setup(layout=Layout(tp=4), sharded_vocabulary=False)).parameters
    assert replicated - inference_memory(setup(layout=Layout(tp=4))).parameters == 2 * 2 * 32000 * 4096 * 3 // 4


def test_cache_by_heads_windows_formats_and_ranks() -> None:
    def cache(model: str, **changes: object) -> int:
        return inference_memory(setup(model, prompt_tokens=900, new_tokens=100, batch=3, **changes)).kv_cache

    assert cache("llama-2-7b") == 3 * 1000 * 2 * 32 * 4096 * 2
    assert cache("llama-2-70b") == 3 * 1000 * 2 * 80 * 8 * 128 * 2
    assert cache("llama-2-70b", layout=Layout(tp=8)) == cache("llama-2-70b", layout=Layout(tp=16)) == 3 * 1000 * 40960
    assert cache("llama-2-7b", cache="float8") == cache("llama-2-7b") // 2
    # One scale of two bytes for each of 64 heads' 128 elements.
    assert cache("llama-2-7b", cache="int8") == cache("llama-2-7b") // 2 * (1 + 2 / 128)
    assert cache("deepseek-v2-lite", layout=Layout(tp=4)) == 3 * 1000 * 27 * 576 * 2, "latent caches are not shared out"
    long = setup("gemma-2-2b", prompt_tokens=8000, new_tokens=192)
    assert inference_memory(long).kv_cache == 13 * (8192 + 4096) * 2 * 4 * 256 * 2, "every other layer slides"


def test_a_tied_head_is_packed_on_a_cpu() -> None:
    cpu = NODE.model_copy(update={"accelerator": GPU.model_copy(update={"kind": "cpu"})})
    for name, rows, width in (("gpt2", 50257, 768), ("llama-2-7b", 0, 0)):
        on_gpu, on_cpu = (inference_memory(setup(name, machine=machine)).parameters for machine in (NODE, cpu))
        assert on_cpu - on_gpu == 2 * rows * width


def test_a_tied_head_in_fewer_bits_is_a_copy_on_a_gpu_too() -> None:
    """The head's weights in int8 came from nowhere: 0.8 GB were missing of Gemma 7B."""
    model = find_model("gemma-7b")
    assert model.tied
    plain, quantised = (setup("gemma-7b", weights="int8", quantised_head=head) for head in (False, True))
    copy = inference_memory(quantised).parameters - inference_memory(plain).parameters
    assert copy == model.vocabulary * (model.hidden + 2), "and a 16-bit scale for each word"


def test_micro_batches_are_prefilled_one_at_a_time() -> None:
    whole, pieces = (inference_memory(setup(batch=8, micro_batch=size)) for size in (None, 2))
    assert pieces.activations == whole.activations // 4 and pieces.logits == whole.logits // 4
    assert pieces.kv_cache == whole.kv_cache and pieces.parameters == whole.parameters


def test_other_kinds_of_model() -> None:
    bert = inference_memory(setup("bert-base-uncased", batch=4, prompt_tokens=128))
    assert bert.kv_cache == 0 and bert.logits == 4 * 128 * 30522 * 2
    t5 = inference_memory(setup("t5-small", batch=2, prompt_tokens=100, new_tokens=20))
    assert t5.kv_cache == 2 * 6 * (20 + 100) * 2 * 512 * 2, "the decoder's own and its source's"
    image = inference_memory(setup("vit-base-patch16-224", prompt_tokens=197))
    assert image.kv_cache == 0 and image.parameters == 2 * find_model("vit-base-patch16-224").parameters


@pytest.mark.parametrize("name", ["llama-200m", "llama-3-8b", "gemma-7b", "gpt2-medium", "opt-6.7b"])
@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
@pytest.mark.parametrize("balance", ["memory", "speed"])
def test_stages_are_those_of_the_engine(balance: StageBalance, weights: WeightFormat, name: str) -> None:
    """The engine counts elements, of words' tables and blocks alone. The planner had 13 layers of int4's first of two
    stages of Llama 3 8B, where the engine has 16.
    """
    shape = ARCHITECTURES.get(name) or next(row.config for row in known_models() if row.name == name)
    config, architecture = ModelConfig.parse(shape), read_architecture(shape)
    for pp in (2, 3, 5):
        layout = Layout(pp=pp, stage_balance=balance)
        split = stored_stage_layers(setup(architecture=architecture, layout=layout, weights=weights))
        assert split == engine_stage_layers(config, pp, balance)


@pytest.mark.parametrize("balance", ["memory", "speed"])
def test_a_stage_of_an_encoder_decoder_has_layers_of_both_as_in_the_engine(balance: StageBalance) -> None:
    shape = ARCHITECTURES["t5-61m"]
    config, architecture = ModelConfig.parse(shape), read_architecture(shape)
    for pp in (2, 3, 6):
        layout = Layout(pp=pp, stage_balance=balance)
        split = stored_stage_layers(setup(architecture=architecture, layout=layout))
        stacks = (engine_stage_layers(config, pp, balance, stack) for stack in ("encoder", "decoder"))
        assert split == [[*own, *(6 + layer for layer in other)] for own, other in zip(*stacks, strict=True)]
    halves = inference_memory(setup(architecture=architecture, layout=Layout(pp=6)))
    assert halves.kv_cache == inference_memory(setup(architecture=architecture)).kv_cache // 6
    with pytest.raises(ValueError, match="7 stages for 6 layers"):
        inference_memory(setup(architecture=architecture, layout=Layout(pp=7)))


def test_pipeline_stages_and_the_fullest_of_them() -> None:
    assert [len(layers) for layers in stored_stage_layers(setup(layout=Layout(pp=3)))] == [11, 11, 10]
    two = inference_memory(setup(layout=Layout(pp=2)))
    block = (6_738_415_616 - 2 * 32000 * 4096 - 4096) // 32
    assert two.parameters == 2 * (16 * block + 32000 * 4096 + 4096), "the last has head and norm"
    assert two.kv_cache == inference_memory(setup()).kv_cache // 2
    tied = find_model("gpt2")
    assert inference_memory(setup("gpt2", layout=Layout(pp=12))).parameters > 2 * 50257 * 768, "a tied head's table too"
    assert inference_memory(setup("gpt2")).parameters == 2 * tied.parameters
    with pytest.raises(ValueError, match="33 stages"):
        inference_memory(setup(layout=Layout(pp=33)))


def test_logits_of_the_last_position_or_of_all() -> None:
    one, all_of_them = inference_memory(setup(batch=2)), inference_memory(setup(batch=2), all_logits=True)
    assert one.logits == 2 * 32000 * 2 and all_of_them.logits == 512 * one.logits
    assert inference_memory(setup(batch=2, layout=Layout(tp=2))).logits == one.logits * 3 // 2, "shards are gathered"


def test_no_batch_of_what_does_not_fit() -> None:
    assert largest_batch(setup("llama-2-70b"), 80e9) is None


@given(some.sampled_from(["llama-2-7b", "gpt2", "mixtral-8x7b", "t5-small", "bert-base-uncased"]), some.floats(1, 200))
def test_the_largest_batch_fits_and_one_more_does_not(model: str, gigabytes: float) -> None:
    one = setup(model)
    batch = largest_batch(one, gigabytes * 1e9)
    if batch is None:
        assert inference_memory(one).total > gigabytes * 1e9
    else:
        assert inference_memory(one.replace(batch=batch)).total <= gigabytes * 1e9
        assert inference_memory(one.replace(batch=batch + 1)).total > gigabytes * 1e9


def test_a_calibrated_process_brings_its_own_size() -> None:
    cpu = GPU.model_copy(update={"kind": "cpu"})
    plain = inference_memory(setup(machine=NODE.model_copy(update={"accelerator": cpu})))
    known = cpu.model_copy(update={"framework_bytes": 123_456_789})
    found = inference_memory(setup(machine=NODE.model_copy(update={"accelerator": known})))
    assert plain.framework == 195 * 2**20 and found.framework == 123_456_789
    assert found.tensors == plain.tensors == found.total - found.framework


@pytest.mark.parametrize(
    ("name", "dtype", "batch", "prompt"),
    [("llama-1m", "float32", 4, 64), ("llama-4m", "bfloat16", 8, 64), ("llama-13m", "bfloat16", 1, 32),
     ("llama-13m", "float32", 2, 128)],
)  # fmt: skip
def test_allocations_of_our_engine(name: str, dtype: WeightFormat, batch: int, prompt: int) -> None:
    """Everything that torch's allocator gave out, of a prefill without a cache that makes the last logits."""
    config, kind = ModelConfig.parse(ARCHITECTURES[name]), DTYPES[dtype]
    tokens = torch.zeros((batch, prompt), dtype=torch.int64)
    with Allocations() as memory, torch.inference_mode():
        with torch.device("meta"):
            model = Llama(config).to(kind)
        for weight in model.parameters():
            torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.zeros_like(weight, device="cpu")))
        model.model.layers[-1].register_forward_hook(lambda _module, _inputs, hidden: hidden[:, -1:])
        gc.collect()
        memory.mark("work")
        model(tokens)
    # mkldnn widens where the processor has no such products; where it refuses bfloat16, torch's own do not.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    widens = not native and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    rates = {"float32": 1e11, "bfloat16": 0.5e11 if widens else 2e11}
    here = NODE.model_copy(update={"accelerator": GPU.model_copy(update={"kind": "cpu", "peak_flops": rates})})
    there, predicted = (
        inference_memory(
            InferenceSetup(
                find_model(f"synthetic:{name}@0"), machine, Layout(), batch, prompt, 1, dtype,
                "float32" if dtype == "float32" else "bfloat16",
            ),
        )
        for machine in (NODE, here)
    )  # fmt: skip
    # The head is the table here; the engine's inference packs it, so that on CPUs it is predicted as a copy.
    tensors = predicted.tensors - predicted.parameters + there.parameters - predicted.kv_cache
    measured = memory.peak("work")
    assert measured * 0.97 <= tensors <= measured * 1.05


def test_a_cpu_without_16_bit_products_makes_them_in_float32_first() -> None:
    def cpu(rate: float) -> Machine:
        rates = {"float32": 1e11, "bfloat16": rate}
        return NODE.model_copy(update={"accelerator": GPU.model_copy(update={"kind": "cpu", "peak_flops": rates})})

    fast, slow = (inference_memory(setup(batch=2, machine=cpu(rate))) for rate in (2e11, 0.5e11))
    assert slow.activations - fast.activations == 2 * 512 * 2 * 11008
    assert not cpu(0.5e11).accelerator.widens("float32") and not GPU.widens("bfloat16")
