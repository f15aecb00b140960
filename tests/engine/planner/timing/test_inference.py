"""Time of prefill and decode: known answers of the roofline, of communication, of experts and formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from configs.common.execution import Layout
from configs.hardware.hardware import Accelerator, Link, Machine
from engine.planner.architecture import Architecture
from engine.planner.catalog import find_model
from engine.planner.memory.stored import slowest_stage
from engine.planner.setup import InferenceSetup
from engine.planner.timing.collectives import all_gather_seconds, all_reduce_seconds
from engine.planner.timing.constants import DeviceConstants, constants_for
from engine.planner.timing.inference import generation_time, small_all_reduce_seconds, touched_experts

NVLINK = Link(name="nvlink", latency_seconds=1e-5, bytes_per_second=3e11)
GPU = Accelerator(
    name="gpu",
    kind="cuda",
    memory_bytes=int(80e9),
    bytes_per_second=2e12,
    peak_flops={"bfloat16": 3e14, "float32": 2e13},
    link=NVLINK,
    kernel_seconds=5e-6,
    source="test",
)
NODE = Machine(
    name="node", accelerator=GPU, accelerators=8, between=Link(name="ib", latency_seconds=1e-5, bytes_per_second=2.5e10)
)
IDEAL = DeviceConstants(matmul=1.0, attention=1.0, memory=1.0, link=1.0, product_depth=0.0)
FREE = NODE.model_copy(update={"accelerator": GPU.model_copy(update={"kernel_seconds": 0.0})})


def setup(model: str = "llama-2-7b", machine: Machine = NODE, **changes: object) -> InferenceSetup:
    return InferenceSetup(find_model(model), machine).replace(**changes)


def multiplied(architecture: Architecture) -> float:
    """Parameters that one token is multiplied with, the head's included and tables left out."""
    weights = (weight for weight in architecture.weights if not weight.per_sequence)
    return sum(weight.size * weight.products * weight.share for weight in weights)


def test_decode_reads_weights_and_cache_once() -> None:
    found = generation_time(setup(machine=FREE, prompt_tokens=900, new_tokens=200), IDEAL)
    weights = 2 * (6_738_415_616 - 32000 * 4096 - 65 * 4096)
    assert found.token_seconds == pytest.approx((weights + 1000 * 2 * 32 * 4096 * 2) / 2e12)
    assert found.seconds == pytest.approx(found.prefill_seconds + 199 * found.token_seconds)
    assert found.tokens_per_second == pytest.approx(200 / found.seconds)


def test_prefill_of_a_long_prompt_is_arithmetic() -> None:
    prompt = 4096
    found = generation_time(setup(machine=FREE, prompt_tokens=prompt), IDEAL)
    blocks = 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096
    products = 2 * blocks * prompt + 32 * 4 * 4096 * prompt**2 / 2
    head = 2 * 32000 * 4096 / 2e12  # its weights are read for the one position that is asked for
    elementwise = 32 * prompt * (8 * 4096 + 3 * 11008) * 2 / 2e12
    assert found.prefill_seconds == pytest.approx(products / 3e14 + head + elementwise)


def test_measured_rates_lose_nothing_and_operators_have_a_least_time() -> None:
    cpu = Accelerator(
        name="cores", kind="cpu", memory_bytes=int(8e9), bytes_per_second=2e10, peak_flops={"float32": 1e11},
        kernel_seconds=1e-5, measured=True, source="test",
        link=Link(name="gloo", latency_seconds=1e-3, bytes_per_second=1e9),
    )  # fmt: skip
    machine = Machine(name="here", accelerator=cpu, accelerators=2)
    one = setup("synthetic:llama-110m@0", machine, weights="float32", compute="float32", prompt_tokens=32, new_tokens=8)
    architecture = one.architecture
    reading = 4 * (multiplied(architecture) + architecture.cache_elements(36)) / 2e10
    assert generation_time(one).token_seconds == pytest.approx(reading + (10 * 42 + 20) * 1e-5)
    two = generation_time(one.replace(layout=Layout(tp=2)))
    # 21 sums, each there and back over a link of a millisecond; and the logits gathered.
    assert 43e-3 < two.token_communication_seconds < 44e-3
    assert two.token_seconds > generation_time(one).token_seconds


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-4-scout", "mixtral-8x7b", "llama-3-70b"])
def test_a_block_has_two_sums_with_shared_experts_too(model: str) -> None:
    one = setup(model, layout=Layout(tp=4) if model == "llama-4-scout" else Layout(tp=8))
    architecture, tp = one.architecture, one.layout.tp
    found = generation_time(one, IDEAL).token_communication_seconds
    message = small_all_reduce_seconds(2 * architecture.hidden, tp, NODE)
    logits = all_gather_seconds(2 * architecture.vocabulary, tp, NODE)
    assert found == pytest.approx((2 * architecture.layers + 1) * message + logits)


def test_one_shot_sums_beat_rings_where_messages_are_small() -> None:
    assert small_all_reduce_seconds(8192, 1, NODE) == 0
    shot = small_all_reduce_seconds(8192, 8, NODE)
    assert shot == pytest.approx(5e-6 + 2e-6 + 7 * 8192 / 3e11) and shot < all_reduce_seconds(8192, 8, NODE)
    large = 256 * 2**20
    assert small_all_reduce_seconds(large, 8, NODE) == all_reduce_seconds(large, 8, NODE)
    assert small_all_reduce_seconds(8192, 16, NODE) == all_reduce_seconds(8192, 16, NODE), "not across nodes"
    pcie = NODE.model_copy(update={"inside": Link(name="pcie", latency_seconds=2e-5, bytes_per_second=3e10)})
    assert small_all_reduce_seconds(8192, 8, pcie) == all_reduce_seconds(8192, 8, pcie), "not over PCIe"


def test_sums_of_a_token() -> None:
    found = generation_time(setup(layout=Layout(tp=4), sharded_vocabulary=False))
    link = constants_for(GPU).link
    assert found.token_communication_seconds == pytest.approx(64 * small_all_reduce_seconds(8192, 4, NODE, link))
    mixtral = generation_time(setup("mixtral-8x7b", layout=Layout(tp=4), sharded_vocabulary=False))
    assert mixtral.token_communication_seconds == pytest.approx(found.token_communication_seconds), "experts sum once"


def test_experts_that_a_batch_touches() -> None:
    assert touched_experts(0.25, 1) == 0.25
    assert touched_experts(0.25, 2) == pytest.approx(1 - 0.75**2)
    assert touched_experts(0.25, 1000) == pytest.approx(1)
    assert touched_experts(1.0, 1) == 1
    one, many = (generation_time(setup("mixtral-8x7b", FREE, batch=b, prompt_tokens=1), IDEAL) for b in (1, 64))
    architecture = find_model("mixtral-8x7b")
    assert one.token_seconds == pytest.approx(2 * (multiplied(architecture) + architecture.cache_elements(65)) / 2e12)
    assert 3 < many.token_seconds / one.token_seconds < 4, "all of 46.7 billion weights, not 12.9, and a larger cache"


def test_narrow_weights_pay_but_less_than_their_bytes() -> None:
    plain, int8, int4 = (generation_time(setup(weights=form)).token_seconds for form in ("bfloat16", "int8", "int4"))
    assert 1 < plain / int8 < 2 and 1 < int8 / int4 < 2
    # A batch that computes longer than it reads gains nothing.
    wide = [
        generation_time(setup(weights=form, prompt_tokens=1, batch=2048)).token_seconds for form in ("bfloat16", "int8")
    ]
    assert wide[0] == pytest.approx(wide[1], rel=0.01)


def test_stages_work_at_once_on_micro_batches() -> None:
    base = setup(batch=64, layout=Layout(pp=2, stage_balance="speed"))
    whole, pieces = generation_time(base), generation_time(base.replace(micro_batch=32))
    half = generation_time(base.replace(batch=32))
    busiest = slowest_stage(base)
    assert 0.5 <= busiest < 0.53
    computing = half.token_seconds - half.token_message_seconds
    assert 0 < half.token_message_seconds == half.token_communication_seconds
    assert pieces.token_seconds == pytest.approx(max(half.token_seconds, 2 * busiest * computing)), "messages hide"
    assert pieces.prefill_seconds == pytest.approx((1 + busiest) * half.prefill_seconds), "the first goes through both"
    assert pieces.prefill_seconds < 0.8 * whole.prefill_seconds and pieces.sequences == 64
    alone = setup(batch=64, micro_batch=16)
    quarter = generation_time(setup(batch=16))
    assert generation_time(alone).seconds == pytest.approx(4 * quarter.seconds), "one stage: one after another"
    one = setup(batch=1, layout=Layout(pp=2))
    assert generation_time(one.replace(micro_batch=1)) == generation_time(one)


def test_stages_work_one_after_another() -> None:
    one, two = (generation_time(setup(layout=Layout(pp=pp))) for pp in (1, 2))
    assert two.token_seconds > one.token_seconds
    assert two.token_communication_seconds == pytest.approx(2e-5, rel=0.1), "to the next stage, and back"
    with pytest.raises(ValueError, match=r"llama-2-7b has 32 layers|33 stages"):
        generation_time(setup(layout=Layout(pp=33)))
    alone = NODE.model_copy(update={"between": None})
    with pytest.raises(ValueError, match=r"machine\.between"):
        generation_time(setup(machine=alone, layout=Layout(tp=16)))


def test_encoders_have_a_prefill_only() -> None:
    found = generation_time(setup("bert-base-uncased", batch=8, prompt_tokens=128, layout=Layout(dp=2)))
    assert found.token_seconds == 0 and found.new_tokens == 0 and found.tokens_per_second == 0
    assert found.prompt_tokens_per_second == pytest.approx(2 * 8 * 128 / found.prefill_seconds)


def test_an_encoder_decoder_reads_its_source_once() -> None:
    """The encoder's weights count in the prefill only, the source's keys and values at every token."""
    short, long = (generation_time(setup("t5-3b", FREE, prompt_tokens=n, new_tokens=16), IDEAL) for n in (16, 1600))
    cross = 24 * (1600 - 16) * 2 * 32 * 128 * 2
    assert long.token_seconds - short.token_seconds == pytest.approx(cross / 2e12)
    main = sum(w.size * w.products for w in find_model("t5-3b").weights if w.products and w.stream == "main")
    own = 24 * 8 * 2 * 32 * 128 * 2
    assert short.token_seconds == pytest.approx((2 * main + own + 24 * 16 * 2 * 32 * 128 * 2) / 2e12)


@given(
    some.sampled_from(["llama-2-7b", "mistral-7b", "mixtral-8x7b", "gpt2", "t5-base"]),
    some.integers(1, 64),
    some.integers(1, 4000),
    some.sampled_from([1, 2, 4]),
)
def test_more_work_takes_longer_and_more_sequences_give_more(model: str, batch: int, prompt: int, tp: int) -> None:
    small = setup(model, batch=batch, prompt_tokens=prompt, layout=Layout(tp=tp))
    one, longer = generation_time(small), generation_time(small.replace(prompt_tokens=prompt + 100))
    assert longer.prefill_seconds >= one.prefill_seconds > 0 and longer.token_seconds >= one.token_seconds > 0
    double = generation_time(small.replace(batch=2 * batch))
    assert one.token_seconds <= double.token_seconds <= 2.001 * one.token_seconds + 1e-4
    replicas = generation_time(small.replace(layout=Layout(tp=tp, dp=3)))
    assert replicas.tokens_per_second == pytest.approx(3 * one.tokens_per_second)
