"""Memory of training: known answers, and real steps on two ranks in which every byte is counted."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.memory import SHAPES, campaign, cells
from configs.common.execution import Layout, Strategy
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.architecture import Architecture
from engine.planner.catalog import find_model
from engine.planner.families import read_architecture
from engine.planner.memory.activations import parts_of
from engine.planner.memory.framework import Framework
from engine.planner.memory.stage import stage_of
from engine.planner.memory.tape import PASS, Tape
from engine.planner.memory.training import training_memory
from engine.planner.setup import Checkpointing, TrainingSetup

_MIB = 2**20


def machine(kind: str = "cpu", **more: int) -> Machine:
    device = Accelerator.model_validate(
        {
            "name": "x", "title": "", "kind": kind, "memory_bytes": 80 * 2**30, "bytes_per_second": 1e12,
            "peak_flops": {"float32": 1e12}, "source": "test",
        }
    )  # fmt: skip
    return Machine(name="x", accelerator=device, accelerators=8, **more)


def llama(hidden: int = 512, layers: int = 8, vocabulary: int = 1024, **config: object) -> Architecture:
    return read_architecture(
        {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8,
            "intermediate_size": 3 * hidden, "vocab_size": vocabulary, **config,
        }
    )  # fmt: skip


def gpt(hidden: int = 512, layers: int = 4) -> Architecture:
    return read_architecture(
        {
            "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": 8, "n_positions": 1024,
            "vocab_size": 1000,
        }
    )  # fmt: skip


def setup(
    architecture: Architecture | None = None, strategy: Strategy = "none", dp: int = 1, **more: object
) -> TrainingSetup:
    layout = Layout(dp=dp, strategy=strategy)
    return TrainingSetup(architecture or llama(), machine(), layout, 1, 128).replace(**more)


# The tape


def test_a_chain_of_operators_frees_what_it_saved_as_it_goes_back() -> None:
    tape = Tape()
    x = tape.given(10)
    y = tape.apply((x,), 20, saves=(x,), grads=(10,), weights=(5.0,), weight_bytes=7)
    z = tape.apply((y,), 30, saves=(y,), grads=(20,))
    passes = tape.passes(z, gradient=30)
    assert (passes.saved, passes.input_saved) == (30, True)
    assert passes.forward_high == 10 + 20 + 30
    # 30 saved and a gradient of 30; then y's of 20; then x's of 10 and the weight's of 7, all at once.
    assert [(event.high, event.low, event.weights) for event in passes.events] == [(80, 10, (5.0,)), (10, 10, ())]
    assert passes.bare_high == 20 + 30


def test_a_residual_shares_one_gradient_until_somebody_adds_to_it() -> None:
    tape = Tape()
    x = tape.given(8)
    branch = tape.apply((x,), 8, saves=(x,), grads=(8,))
    passes = tape.passes(tape.apply((x, branch), 8, grads=(PASS, PASS)), gradient=8)
    # Saved x, the shared gradient and the branch's own; the sum is made in place.
    assert max(event.high for event in passes.events) == 24
    assert passes.events[-1].low == 8


def test_a_held_value_stays_to_the_end_of_the_backward_pass() -> None:
    tape = Tape()
    x = tape.given(4)
    logits = tape.apply((x,), 16, grads=(4,))
    tape.hold(logits)
    passes = tape.passes(tape.apply((logits,), 1, grads=(16,)), gradient=1)
    assert passes.held == 16
    assert passes.events[-1].low == 16 + 4


# Activations


def test_a_block_of_gpt_keeps_32_bytes_a_token_and_hidden_element() -> None:
    """Korthikanti et al. (arXiv 2205.05198) count 34 with two masks of dropout, of one byte each, that are not here."""
    tokens, hidden, heads = 128, 512, 8
    parts = parts_of(setup(gpt(), precision="bfloat16_mixed"), Framework())
    statistics = tokens * (4 * heads + 2 * 8)  # the softmax's row, and two norms' mean and deviation
    assert parts.block.saved == 32 * tokens * hidden + statistics


def test_eager_attention_keeps_the_probabilities() -> None:
    fused = parts_of(setup(gpt(), precision="float32"), Framework()).block.saved
    eager = parts_of(setup(gpt(), precision="float32", attention="eager"), Framework()).block.saved
    tokens, heads = 128, 8
    # Probabilities instead of the output that fused attention keeps twice over (o_proj's input stays) and its rows.
    assert eager - fused == 4 * (heads * tokens * tokens) - 4 * heads * tokens


@pytest.mark.parametrize(("name", "width"), [("llama-4-scout", 8192 + 8192), ("deepseek-v2-lite", 6 * 1408 + 2 * 1408)])
def test_what_shared_experts_activate_is_kept_too(name: str, width: int) -> None:
    """Llama 4 Scout lacked half of its feed-forwards: 12 of 47 GB of 4,096 tokens."""
    model, tokens = find_model(name), 4096
    attention = tuple(weight for weight in model.weights if "mlp" not in weight.name)
    alone = replace(model, weights=attention, feed_forward=1, experts=1, experts_per_token=1)
    wide, narrow = (
        parts_of(setup(each, sequence_length=tokens, precision="bfloat16_mixed"), Framework()).block.saved
        for each in (model, alone)
    )
    # In 16 bits: gate, the activated gate, its other half and their product.
    assert wide - narrow == pytest.approx(4 * 2 * width * tokens, rel=1e-3)


def test_norms_of_all_heads_together_are_kept_as_those_of_each_head() -> None:
    """OLMo 2 was planned without its norms of queries and keys."""
    plain, heads, whole = (
        parts_of(setup(llama(model_type=kind, num_key_value_heads=8, head_dim=64)), Framework()).block.saved
        for kind in ("llama", "qwen3", "olmo2")
    )
    assert whole - plain > 128 * 2 * 512 * 2
    assert whole - plain == pytest.approx(heads - plain, rel=0.1)


def test_autocast_keeps_a_copy_of_each_weight_and_of_each_product_s_input() -> None:
    plain = parts_of(setup(precision="float32"), Framework())
    cast = parts_of(setup(precision="bfloat16_autocast"), Framework())
    assert cast.cast_copies == 2 * (4 * 512 * 512 + 3 * 512 * 1536)
    assert plain.cast_copies == 0
    assert cast.block.saved > plain.block.saved / 2 + cast.cast_copies


def test_selective_checkpointing_lies_between() -> None:
    sizes = {
        kind: training_memory(setup(strategy="ddp", dp=2, micro_batch=16, checkpointing=kind)).tensors
        for kind in ("none", "selective", "full")
    }
    assert sizes["full"] < sizes["selective"] < sizes["none"]


def test_selective_checkpointing_keeps_products_as_a_family_computes_them() -> None:
    """Counted on transformers' own modules; a token's bytes in 16 bits of a block, 8 heads of 64."""

    def kept(architecture: Architecture) -> float:
        return parts_of(setup(architecture), Framework()).policy_bytes / 128

    attention = 2 * 512 + 4 * 8
    # Query, key and value at once, and the first product of the feed-forward: 3 + 4 times the width.
    assert kept(gpt()) == attention + 2 * 7 * 512
    # Queries, values, the gate and the last product.
    assert kept(llama()) == attention + 2 * (512 + 512 + 1536 + 512)
    # Phi-3: all of attention's, gate and up at once.
    assert kept(llama(model_type="phi3")) == attention + 2 * (3 * 512 + 2 * 1536)


# Strategies


@pytest.mark.parametrize(
    ("strategy", "per_element"),
    [("ddp", 16.0), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8), ("fsdp", 16 / 8)],
)
def test_states_of_large_models_are_those_of_the_zero_paper(strategy: Strategy, per_element: float) -> None:
    """ZeRO (arXiv 1910.02054) with K = 12, at the end of the backward pass: nothing else weighs on a huge model."""
    architecture = llama(hidden=4096, layers=64, vocabulary=512)
    frame = Framework(reduce_bucket_size=2, prefetch_bucket_size=2, max_live_parameters=2, max_reuse_distance=2)
    memory = training_memory(
        setup(architecture, strategy, dp=8, precision="bfloat16_mixed", sequence_length=1).replace(
            machine=machine("cuda"), micro_batch=1
        ),
        frame,
    )
    states = memory.parameters + memory.gradients + memory.optimizer + memory.communication
    # Copies for the step come on top: a flat partition in both widths, or a block or two that are gathered.
    slack = 6 / 8 if strategy.startswith("zero") else 4 * 12 / 64
    assert per_element <= states / architecture.parameters * 1.0001 <= per_element + slack + 0.3


def test_sharding_with_twice_the_ranks_halves_the_states() -> None:
    two, four = (training_memory(setup(llama(2048, 16), "fsdp", dp)) for dp in (2, 4))
    assert four.parameters == pytest.approx(two.parameters / 2, rel=1e-6)
    assert four.optimizer == pytest.approx(two.optimizer / 2, rel=1e-6)


def test_ddp_that_accumulates_holds_gradients_beside_its_buckets() -> None:
    once, thrice = (
        training_memory(setup(strategy="ddp", dp=2, accumulation=count, precision="float32")) for count in (1, 3)
    )
    assert thrice.tensors - once.tensors == pytest.approx(4 * llama().parameters, rel=0.01)


def test_what_is_offloaded_is_counted_where_it_went() -> None:
    here = training_memory(setup(strategy="zero2", dp=2, precision="bfloat16_mixed"))
    host = training_memory(setup(strategy="zero2", dp=2, precision="bfloat16_mixed", offload="cpu"))
    disk = training_memory(setup(strategy="zero3", dp=2, precision="bfloat16_mixed", offload="nvme"))
    assert host.optimizer == disk.optimizer == 0
    assert host.host_bytes >= here.optimizer
    assert disk.storage_bytes == pytest.approx(14 * llama().parameters / 2, rel=1e-6)
    assert here.host_bytes == here.storage_bytes == 0


def test_unfused_adamw_makes_a_tensor_as_large_as_the_weights() -> None:
    tall = setup(llama(1024, 24), sequence_length=2)
    fused, foreach = (training_memory(tall, Framework(fused_optimizer=fused)) for fused in (True, False))
    assert foreach.tensors - fused.tensors == pytest.approx(4 * tall.architecture.parameters, rel=0.05)


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages() -> None:
    base = setup(llama(256, 8, vocabulary=64), micro_batch=4, sequence_length=512)
    piped = [training_memory(base.replace(layout=Layout(pp=4), accumulation=count)).activations for count in (2, 4, 16)]
    one = parts_of(base, Framework()).block.saved * 2
    assert piped[1] - piped[0] == pytest.approx(2 * one, rel=0.02)
    assert piped[2] == piped[1]


def test_a_tied_head_is_on_the_last_stage_too() -> None:
    tied = setup(llama(256, 8, vocabulary=4096, tie_word_embeddings=True)).replace(layout=Layout(pp=2))
    assert stage_of(tied, 0).root == stage_of(tied, 1).root - 256  # the last norm
    assert stage_of(tied.replace(layout=Layout()), 0).elements == tied.architecture.parameters


def test_tensor_parallelism_divides_the_weights() -> None:
    one, four = (training_memory(setup(llama(2048, 8)).replace(layout=Layout(tp=tp))) for tp in (1, 4))
    assert four.parameters == pytest.approx(one.parameters / 4, rel=0.01)


def test_a_partition_s_border_keeps_the_weight_that_it_cuts_whole() -> None:
    stage = stage_of(setup(llama(256, 2, vocabulary=8192, tie_word_embeddings=True), "zero2", 2), 0)
    table = 8192 * 256
    assert stage.elements / 2 < table
    assert stage.touched(2) == stage.elements  # the second rank's: from the table's begin to the end
    assert stage.touched(1) == stage.elements


def test_parts_sum_up_and_cpu_ranks_have_no_framework() -> None:
    memory = training_memory(setup(strategy="fsdp", dp=4))
    assert memory.framework == 0
    assert memory.total == memory.tensors
    gpu = training_memory(setup(strategy="fsdp", dp=4, machine=machine("cuda")))
    assert gpu.total / gpu.tensors > 1 / 0.85


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from(["ddp", "fsdp", "zero1", "zero2", "zero3"]),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["float32", "bfloat16_autocast", "bfloat16_mixed"]),
    batch=st.integers(1, 16),
    accumulation=st.integers(1, 4),
    dp=st.integers(1, 64),
    compiled=st.booleans(),
)
def test_more_work_never_needs_less(
    strategy: Strategy,
    checkpointing: Checkpointing,
    precision: str,
    batch: int,
    accumulation: int,
    dp: int,
    compiled: bool,
) -> None:
    base = setup(
        None, strategy, dp, checkpointing=checkpointing, precision=precision, micro_batch=batch,
        accumulation=accumulation, compiled=compiled,
    )  # fmt: skip
    small = training_memory(base)
    assert all(size >= 0 for size in (small.parameters, small.gradients, small.activations, small.logits))
    assert training_memory(base.replace(micro_batch=batch + 1)).tensors >= small.tensors
    assert training_memory(base.replace(accumulation=accumulation + 1)).tensors >= small.tensors
    assert training_memory(base.replace(sequence_length=256)).tensors >= small.tensors


# Against real steps


@pytest.mark.slow
def test_the_counter_sees_every_byte_on_every_thread() -> None:
    """Known sizes, a kernel's own temporary tensors, and what is released on another thread."""
    code = f"""
import threading, torch
from tests.support.training.memory_cells import Allocations, count_on_every_thread
count_on_every_thread()
with Allocations() as memory:
    kept = torch.empty({_MIB}, dtype=torch.uint8)
    memory.mark("one")
    other = [torch.empty({3 * _MIB}, dtype=torch.uint8)]
    thread = threading.Thread(target=other.clear)
    thread.start(); thread.join()
    memory.mark("two")
    last = torch.empty({2 * _MIB}, dtype=torch.uint8)
    memory.mark("end")
print(memory.peak("one"), memory.peak("two"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )
    marker = 4  # bytes of the last mark's own tensor
    assert done.stdout.split()[-2:] == [str(4 * _MIB), str(3 * _MIB + marker)]


@pytest.mark.nightly
def test_peaks_of_real_steps_are_predicted() -> None:
    """Each strategy on a shape that the formulas were not worked out on; the bars of all 80 cells hold for these."""
    ways = {
        ("llama-f", 1, "ddp"): ("none", 3),
        ("llama-f", 1, "fsdp"): ("full", 1),
        ("llama-f", 1, "zero1"): ("full", 3),
        ("llama-f", 1, "zero2"): ("none", 3),
        ("llama-f", 1, "zero3"): ("none", 1),
        ("gpt-g", 1, "fsdp"): ("full", 3),
        ("llama-h", 2, "zero2"): ("none", 1),
        ("llama-h", 2, "zero3"): ("full", 3),
    }
    heldout = SHAPES["heldout"]
    chosen = [
        cell
        for cell in cells(heldout) + cells(heldout, tp=2)
        if ways.get((cell["shape"], cell["tp"], cell["strategy"])) == (cell["checkpointing"], cell["accumulation"])
    ]
    results = campaign(chosen, others=False)
    assert len(results) == len(ways)
    errors = {tuple(result.cell[name] for name in ("shape", "tp", "strategy")): result.error for result in results}
    assert all(-0.05 <= error <= 0.15 for error in errors.values()), errors
    assert sorted(abs(error) for error in errors.values())[len(errors) // 2] <= 0.05, errors
