"""Seconds of a training step: against arithmetic by hand, and what must never get faster or slower."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.common.execution import Layout
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Accelerator, Link, Machine
from engine.planner.architecture import Architecture
from engine.planner.catalog import find_model
from engine.planner.choice.launchers import zero_section
from engine.planner.families import read_architecture
from engine.planner.flops import model_flops, training_flops
from engine.planner.memory.stored import activated_width
from engine.planner.setup import TrainingSetup
from engine.planner.timing.compute import block_seconds, offload_seconds, optimizer_seconds
from engine.planner.timing.constants import DeviceConstants, constants_for, prior_for
from engine.planner.timing.fitting import calibrate_constants
from engine.planner.timing.training import step_time, traffic

LINK = Link(name="link", latency_seconds=1e-6, bytes_per_second=1e11)
IDEAL = DeviceConstants(
    matmul=1.0, attention=1.0, memory=1.0, link=1.0, overlap=1.0, contention=0.0, product_depth=0.0, head_depth=0.0
)
BERT = {
    "model_type": "bert", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6,
    "num_heads": 8, "vocab_size": 32128, "feed_forward_proj": "relu",
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3,
    "intermediate_size": 768, "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip


def device(**figures: Any) -> Accelerator:
    """1 TFLOP/s in each format and a memory so fast that only arithmetic counts, unless said otherwise."""
    fixed = {
        "name": "made-up", "kind": "cuda", "memory_bytes": 10**12, "bytes_per_second": 1e30, "link": LINK,
        "peak_flops": {"float32": 1e12, "bfloat16": 1e12, "float8": 2e12}, "source": "test",
    }  # fmt: skip
    return Accelerator.model_validate(fixed | figures)


def setup(config: dict[str, Any] | None = None, gpu: Accelerator | None = None, **fields: Any) -> TrainingSetup:
    """A step on nodes of eight."""
    machine = Machine(name="node", accelerator=gpu or device(), accelerators=8, between=LINK)
    fixed: dict[str, Any] = {"micro_batch": 2, "sequence_length": 256}
    return TrainingSetup(read_architecture(config or LLAMA, "model"), machine, **(fixed | fields))


def seconds(one: TrainingSetup, constants: DeviceConstants = IDEAL) -> float:
    return step_time(one, constants).seconds


def test_without_any_loss_an_encoder_takes_its_flops_over_the_peak() -> None:
    one = setup(BERT, accumulation=3)
    flops = 3 * training_flops(one.architecture, 2, 256, fused=True).total
    time = step_time(one, IDEAL)
    assert time.compute_seconds == pytest.approx(flops / 1e12)
    assert time.communication_seconds == time.exposed_seconds == time.bubble_seconds == 0.0
    assert time.tokens == 3 * 2 * 256
    assert time.model_flops == model_flops(one.architecture, time.tokens, 256)


@pytest.mark.parametrize("config", [LLAMA, BERT, T5, VIT])
def test_every_kind_of_model_takes_its_executed_flops(config: dict[str, Any]) -> None:
    one = setup(config, sequence_length=1024 if config is LLAMA else 197, attention="eager")
    flops = training_flops(one.architecture, 2, one.sequence_length)
    assert step_time(one, IDEAL).compute_seconds == pytest.approx(flops.total / 1e12, rel=1e-6)


def test_fused_attention_leaves_out_what_the_mask_hides_but_for_its_diagonal_tiles() -> None:
    one = setup(sequence_length=4096)
    masked = training_flops(one.architecture, 2, 4096, fused=True, causal=True)
    tiles = masked.attention * 128 / 4097  # half a tile a query more than half of the square
    assert step_time(one, IDEAL).compute_seconds == pytest.approx((masked.total + tiles) / 1e12)


def test_products_of_few_rows_are_bound_by_memory() -> None:
    # One token: each weight is read in 2 bytes for the forward, and twice more for the backward.
    one = setup(gpu=device(bytes_per_second=1e9), micro_batch=1, sequence_length=1)
    read = 2 * sum(weight.size * weight.products for weight in one.architecture.weights if weight.block)
    blocks = block_seconds(one, IDEAL)
    assert 3 * read / 1e9 < blocks.forward + blocks.backward < 1.1 * 3 * read / 1e9


def test_shallow_products_are_slower() -> None:
    half = IDEAL.replace(product_depth=1024.0)
    one = setup(BERT, sequence_length=1024, micro_batch=1)
    # In bfloat16 an inner length of 1024 (rows, feed-forward) halves the rate, one of 256 (hidden) leaves a fifth.
    assert 2 < seconds(one, half) / seconds(one) < 5


def test_kernels_take_their_least_time() -> None:
    slow = device(kernel_seconds=1e-3)
    one = setup(BERT, gpu=slow, micro_batch=1, sequence_length=1)
    # Products of 4 layers (query, key, value, output, up, down) once forward and twice back, and more kernels.
    assert seconds(one) > 4 * 6 * 3 * 1e-3


def test_full_checkpointing_computes_the_blocks_again_and_selective_every_second_product() -> None:
    none, selective, full = (setup(checkpointing=how) for how in ("none", "selective", "full"))
    blocks = block_seconds(none, IDEAL)
    assert seconds(full) - seconds(none) == pytest.approx(blocks.forward)
    assert seconds(none) < seconds(selective) < seconds(full)
    # Of 8 layers: keys of 256, the output of 1024, and the half without an activation of 2816 columns, for 512 tokens.
    assert seconds(selective) - seconds(none) == pytest.approx(2 * 512 * 8 * 1024 * (256 + 1024 + 2816) / 1e12)
    assert seconds(full, IDEAL.replace(recomputed=0.5)) - seconds(none) == pytest.approx(blocks.forward / 2)


def test_float8_speeds_up_blocks_and_not_the_head() -> None:
    bf16, fp8 = setup(), setup(precision="float8_mixed")
    flops = training_flops(bf16.architecture, 2, 256)
    assert step_time(bf16, IDEAL).compute_seconds - step_time(fp8, IDEAL).compute_seconds == pytest.approx(
        flops.blocks / 2e12
    )
    # The casts are work for the memory.
    slow = device(bytes_per_second=1e9)
    assert seconds(setup(gpu=slow, precision="float8_mixed")) > seconds(setup(gpu=slow))


def test_the_optimizer_touches_what_its_rank_owns() -> None:
    gpu = device(bytes_per_second=1e12)
    parameters = setup().architecture.parameters
    assert optimizer_seconds(setup(gpu=gpu), IDEAL) == pytest.approx(40 * parameters / 1e12)
    foreach = setup(gpu=gpu, fused_optimizer=False)
    assert optimizer_seconds(foreach, IDEAL) == pytest.approx(92 * parameters / 1e12)
    assert optimizer_seconds(setup(gpu=gpu, optimizer="sgd"), IDEAL) == pytest.approx(24 * parameters / 1e12)
    ddp, zero = (setup(gpu=gpu, layout=Layout(dp=8, strategy=name)) for name in ("ddp", "zero1"))
    assert optimizer_seconds(ddp, IDEAL) == pytest.approx(8 * optimizer_seconds(zero, IDEAL))
    times = [optimizer_seconds(setup(gpu=gpu, offload=where), IDEAL) for where in ("none", "cpu", "nvme")]
    assert times == sorted(times)
    assert times[1] == pytest.approx(36 * parameters / 25e9)


@pytest.mark.parametrize(
    ("strategy", "bytes_a_parameter", "calls"),
    [
        # 3 micro-batches, 16-bit weights and gradients, 8 blocks and the root.
        ("ddp", 2, None),  # one all-reduce of all gradients
        ("zero1", 2 + 2, 2),  # gradients once, weights once
        ("zero2", 3 * 2 + 2, 3 + 1),  # gradients in each micro-batch
        ("zero3", 3 * (2 + 2 + 2), 3 * 3 * 9),  # weights twice and gradients once in each
    ],
)
def test_bytes_and_calls_of_each_strategy(strategy: Any, bytes_a_parameter: int, calls: int | None) -> None:
    one = setup(layout=Layout(dp=8, strategy=strategy), accumulation=3)
    sent = traffic(one)
    assert sum(transfer.bytes for transfer in sent) == pytest.approx(bytes_a_parameter * one.architecture.parameters)
    if calls is not None:
        assert sum(transfer.calls for transfer in sent) == calls
    kept = traffic(replace(one, reshard=False))
    if strategy in ("fsdp", "zero3"):  # not gathered again for the backward
        assert sum(transfer.bytes for transfer in kept) == pytest.approx(3 * 4 * one.architecture.parameters)


def test_bytes_and_calls_of_tensor_and_pipeline_parallelism() -> None:
    message = 2 * 256 * 1024 * 2  # micro-batch x sequence x hidden x bytes
    (tensor,) = traffic(setup(layout=Layout(tp=4), accumulation=3))
    assert (tensor.collective, tensor.calls, tensor.bytes_per_call) == ("all_reduce", 4 * 8 * 3, message)
    (again,) = traffic(setup(layout=Layout(tp=4), accumulation=3, checkpointing="full"))
    assert again.calls == 6 * 8 * 3
    (pipeline,) = traffic(setup(layout=Layout(pp=2), accumulation=3))
    assert (pipeline.collective, pipeline.calls, pipeline.bytes_per_call) == ("point_to_point", 2 * 3, message)
    (crossed,) = traffic(setup(T5, layout=Layout(tp=2)))
    assert crossed.calls == 2 * (2 * 12 + 6)  # a decoder's block has three outputs
    assert traffic(setup()) == []


def test_communication_hides_behind_compute_and_no_further() -> None:
    one = setup(layout=Layout(dp=8, strategy="fsdp"))
    hidden = step_time(one, IDEAL)
    assert hidden.communication_seconds > 0
    assert hidden.exposed_seconds == pytest.approx(0.0)
    bare = step_time(one, IDEAL.replace(overlap=0.0))
    assert bare.exposed_seconds == pytest.approx(bare.communication_seconds)
    costly = step_time(one, IDEAL.replace(contention=0.5))
    assert costly.exposed_seconds == pytest.approx(0.5 * costly.communication_seconds)
    starved = device(link=LINK.model_copy(update={"bytes_per_second": 1e6}))
    slow = step_time(setup(gpu=starved, layout=Layout(dp=8, strategy="fsdp")), IDEAL)
    assert slow.exposed_seconds == pytest.approx(slow.communication_seconds - slow.compute_seconds)


def test_tensor_parallel_sums_hide_behind_nothing() -> None:
    tensor = step_time(setup(layout=Layout(tp=4)), IDEAL)
    assert tensor.exposed_seconds == tensor.communication_seconds > 0


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_deepspeeds_stages_1_and_2_reduce_whole_gradients_and_hide_nothing(strategy: Any) -> None:
    """A reduce-scatter beside the backward pass was predicted on GPUs; DeepSpeed does so only if `overlap_comm` and
    `use_multi_rank_bucket_allreduce: false` are set, and no file of ours sets them.
    """
    assert set(zero_section(strategy, "none")) == {"stage"}, "DeepSpeed's defaults"
    zero = setup(layout=Layout(dp=8, strategy=strategy), accumulation=3)
    reduced, gathered = traffic(zero)
    assert (reduced.collective, gathered.collective) == ("all_reduce", "all_gather")
    width = 2 * zero.architecture.parameters
    by_hand = width * 7 / 8 / 1e11  # a ring's gather; an all-reduce takes twice that
    times = 3 if strategy == "zero2" else 1
    found = step_time(zero, IDEAL)
    assert found.exposed_seconds == pytest.approx((2 * times + 1) * by_hand, rel=0.01)
    assert found.exposed_seconds == found.communication_seconds


def test_gradients_of_zero1_are_no_part_of_a_pipelines_turns() -> None:
    one = setup(layout=Layout(dp=8, pp=4, strategy="zero1"), accumulation=6)
    sent = {transfer.purpose: transfer.seconds(one.machine) for transfer in traffic(one)}
    time = step_time(one, IDEAL)
    busy = time.compute_seconds + sent["stages' borders"]
    assert time.bubble_seconds == pytest.approx(3 / 6 * busy)


def test_a_pipelines_bubble_is_its_stages_less_one_over_its_micro_batches() -> None:
    time = step_time(setup(layout=Layout(pp=4), accumulation=6), IDEAL)
    busy = time.compute_seconds + time.exposed_seconds
    assert time.bubble_seconds == pytest.approx(3 / 6 * busy)


def test_a_calibrated_cpu_loses_nothing_more_and_hides_nothing() -> None:
    cpu = device(kind="cpu", measured=True, peak_flops={"float32": 1e12})
    constants = constants_for(cpu)
    assert constants == prior_for(cpu)
    assert (constants.matmul, constants.link, constants.overlap) == (1.0, 1.0, 0.0)
    ddp = step_time(setup(gpu=cpu, layout=Layout(dp=2, strategy="ddp"), precision="float32"))
    assert ddp.exposed_seconds == ddp.communication_seconds > 0


def test_tokens_of_a_pair_are_those_of_both_sides() -> None:
    """As records of training count them: `plan` had half of their tokens/s, and twice their price."""
    pair, alone = setup(T5, accumulation=3), setup(accumulation=3)
    assert pair.tokens_per_step == alone.tokens_per_step == 2 * 3 * 256
    assert (step_time(pair, IDEAL).tokens, step_time(alone, IDEAL).tokens) == (2 * 2 * 3 * 256, 2 * 3 * 256)
    priors = calibrate_constants([], [])
    assert priors.tokens_per_second(pair) * priors.step_seconds(pair)[0] == pytest.approx(2 * 2 * 3 * 256)


def test_a_cpu_known_by_name_does_not_reach_its_peaks_either() -> None:
    """Training Llama 3.1 8B was said to be cheapest on CPUs, which were taken to run at all of AMX's peak."""
    named = device(kind="cpu", peak_flops={"float32": 1e12}, bytes_per_second=1e30)
    measured = named.model_copy(update={"measured": True})
    by_name, by_measure = (step_time(setup(gpu=cpu, precision="float32")) for cpu in (named, measured))
    assert by_name.compute_seconds > 1.3 * by_measure.compute_seconds
    assert constants_for(named).memory == DeviceConstants().memory < constants_for(measured).memory
    assert constants_for(named).overlap == 0.0


def test_tiles_of_a_cpu_reach_less_of_their_peak_than_its_vectors() -> None:
    """The peak of AMX is 16 times that of float32, and what a Sapphire Rapids was measured to reach a seventh of it."""
    cpu = device(kind="cpu", peak_flops={"float32": 1e12, "bfloat16": 16e12}, bytes_per_second=1e30)
    by_float32, by_bfloat16 = (
        step_time(setup(gpu=cpu, precision=precision)).compute_seconds for precision in ("float32", "bfloat16_autocast")
    )
    assert 2.5 < by_float32 / by_bfloat16 < 6
    vectors = cpu.model_copy(update={"peak_flops": {"float32": 1e12, "bfloat16": 2e12}})
    assert step_time(setup(gpu=vectors, precision="bfloat16_autocast")).compute_seconds < 0.7 * by_float32
    measured = cpu.model_copy(update={"measured": True})
    assert step_time(setup(gpu=measured, precision="bfloat16_autocast")).compute_seconds < 0.3 * by_bfloat16


def test_unknown_links_are_named() -> None:
    one = setup(layout=Layout(dp=16, strategy="ddp"))
    alone = replace(one, machine=one.machine.model_copy(update={"between": None}))
    with pytest.raises(ValueError, match=r"machine\.between: 16 ranks need 2 nodes"):
        step_time(alone)


setups = st.builds(
    lambda config, dp, tp, pp, strategy, batch, length, turns, how, attention, precision: setup(
        config,
        gpu=accelerator("a100-80gb"),
        layout=Layout(dp=dp, tp=tp, pp=pp, strategy=strategy),
        micro_batch=batch,
        sequence_length=length,
        accumulation=turns,
        checkpointing=how,
        attention=attention,
        precision=precision,
    ),
    st.sampled_from([LLAMA, BERT, T5, VIT]),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["ddp", "fsdp", "zero1", "zero2", "zero3"]),
    st.integers(1, 16),
    st.sampled_from([1, 128, 2048]),
    st.integers(1, 8),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["fused", "eager"]),
    st.sampled_from(["float32", "bfloat16_autocast", "bfloat16_mixed", "float16_mixed"]),
)


@settings(max_examples=60)
@given(one=setups, faster=st.floats(1, 10))
def test_better_hardware_is_never_slower(one: TrainingSetup, faster: float) -> None:
    time = step_time(one)
    assert time.seconds > 0
    assert 0 <= time.exposed_seconds <= time.communication_seconds * (1 + 1e-9)
    machine = one.machine
    quick = {
        "memory": {"bytes_per_second": machine.accelerator.bytes_per_second * faster},
        "arithmetic": {"peak_flops": {name: rate * faster for name, rate in machine.accelerator.peak_flops.items()}},
        "link": {"link": LINK.model_copy(update={"bytes_per_second": 1e11 * faster})},
    }
    slow = machine.accelerator.model_copy(update={"link": LINK})
    before = step_time(replace(one, machine=machine.model_copy(update={"accelerator": slow}))).seconds
    for better in quick.values():
        other = slow.model_copy(update=better)
        after = step_time(replace(one, machine=machine.model_copy(update={"accelerator": other}))).seconds
        assert after <= before * (1 + 1e-9)


@settings(max_examples=60)
@given(one=setups)
def test_checkpointing_accumulation_and_more_ranks_never_gain_speed_a_rank(one: TrainingSetup) -> None:
    # Between nodes a message takes no less than within one; of one token, it is nothing but latency.
    farther = LINK.model_copy(update={"latency_seconds": 1e-5})
    one = replace(one, machine=one.machine.model_copy(update={"between": farther}))
    time = step_time(one)
    if one.checkpointing != "full":
        assert time.seconds <= step_time(one.replace(checkpointing="full")).seconds
    assert time.seconds < step_time(one.replace(accumulation=one.accumulation + 1)).seconds
    # Weak scaling: sharded optimizer states get smaller with more ranks, all else only grows.
    wider = step_time(one.replace(layout=one.layout.model_copy(update={"dp": 2 * one.layout.dp})))
    assert time.seconds - time.optimizer_seconds <= (wider.seconds - wider.optimizer_seconds) * (1 + 1e-9)


def test_the_roofline_of_a_known_case_is_plausible() -> None:
    """A llama of 0.13 billion on one A100: published runs of this size reach 40 to 60 % MFU."""
    one = setup(gpu=accelerator("a100-80gb"), micro_batch=16, sequence_length=2048)
    time = step_time(one)
    assert 0.35 < time.model_flops / time.seconds / 312e12 < 0.65


def test_architectures_of_experts_compute_only_those_that_are_chosen() -> None:
    dense = setup()
    architecture = dense.architecture
    shared: Architecture = replace(
        architecture,
        weights=tuple(
            replace(weight, copies=weight.copies * 8, share=0.25) if weight.name.startswith("mlp") else weight
            for weight in architecture.weights
        ),
        experts=8,
        experts_per_token=2,
    )
    sparse = replace(dense, architecture=shared)
    mlp = sum(weight.size * weight.products for weight in architecture.weights if weight.name.startswith("mlp"))
    assert step_time(sparse, IDEAL).compute_seconds - step_time(dense, IDEAL).compute_seconds == pytest.approx(
        6 * mlp * 512 / 1e12
    )


def test_experts_are_as_wide_as_the_config_says_of_them_and_not_as_a_dense_layer() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "vocab_size": 1000,
    }  # fmt: skip
    slow = device(bytes_per_second=1e9)
    # Every layer has experts, so that the width of a dense one is nobody's.
    narrow, wide = (seconds(setup(config | {"intermediate_size": width}, slow)) for width in (1024, 8192))
    assert narrow == wide


def test_shared_experts_are_activated_beside_the_routed_ones() -> None:
    assert activated_width(find_model("llama-4-scout")) == 8192 + 8192
    assert activated_width(find_model("deepseek-v2-lite")) == (6 + 2) * 1408
    assert activated_width(find_model("deepseek-v3")) == 18432 == 8 * 2048 + 2048
    assert activated_width(find_model("mixtral-8x7b")) == 2 * 14336
    assert activated_width(find_model("llama-2-7b")) == 11008


def test_hybrid_shards_are_those_of_a_node() -> None:
    """Two nodes of eight: a rank owns an eighth, as much as where one node shards alone, and not a sixteenth."""
    one, two = (
        setup(gpu=device(bytes_per_second=1e12), layout=Layout(dp=dp, strategy="fsdp"), sharding="hybrid")
        for dp in (8, 16)
    )
    for offload in ("none", "cpu"):
        alone, replicated = (each.replace(offload=offload) for each in (one, two))
        assert optimizer_seconds(replicated, IDEAL) == pytest.approx(optimizer_seconds(alone, IDEAL))
        assert offload_seconds(replicated, IDEAL) == offload_seconds(alone, IDEAL)
    full = two.replace(sharding="full")
    assert optimizer_seconds(two, IDEAL) == pytest.approx(2 * optimizer_seconds(full, IDEAL))


def test_offloaded_weights_travel_in_every_micro_batch() -> None:
    """FSDP2: float32 shards up for forward and backward, gradients down: 12 bytes a parameter and micro-batch."""
    one = setup(layout=Layout(strategy="fsdp"), offload="cpu", accumulation=4)
    carried = 12 * one.architecture.parameters * 4 / IDEAL.host_bytes_per_second
    assert step_time(one, IDEAL).communication_seconds == pytest.approx(carried)
    zero = one.replace(layout=Layout(strategy="zero3"))
    assert step_time(zero, IDEAL).communication_seconds == pytest.approx(carried / 2)
    assert step_time(one.replace(layout=Layout(strategy="zero1")), IDEAL).communication_seconds == 0
