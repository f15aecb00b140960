"""What does not fit, and the smallest change that makes it fit."""

import pytest

from configs.common.execution import Layout
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.catalog import find_model
from engine.planner.families import read_architecture
from engine.planner.memory.shrink import fits, memory_of, smallest_change
from engine.planner.setup import InferenceSetup, TrainingSetup

_GIB = 2**30


def machine(**more: int) -> Machine:
    device = Accelerator(
        name="x", title="", kind="cuda", memory_bytes=80 * _GIB, bytes_per_second=1e12, peak_flops={"bfloat16": 1e14},
        source="test",
    )  # fmt: skip
    return Machine(name="x", accelerator=device, accelerators=8, **more)


def architecture(hidden: int = 2048, layers: int = 16):
    return read_architecture(
        {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 16,
            "intermediate_size": 4 * hidden, "vocab_size": 32000,
        }
    )  # fmt: skip


def training(**more: object) -> TrainingSetup:
    return TrainingSetup(architecture(), machine(), Layout(dp=4, strategy="ddp"), 8, 1024).replace(**more)


def test_what_fits_needs_no_change() -> None:
    enough = memory_of(training()).total
    assert fits(training(), enough)
    assert not fits(training(), enough - 1)
    assert smallest_change(training(), enough) is None


def test_one_change_is_taken_before_two_and_the_cheapest_first() -> None:
    setup = training()
    change = smallest_change(setup, memory_of(setup.replace(micro_batch=4, accumulation=2)).total)
    assert change is not None
    assert change.words == ("accumulating 2 micro-batches of 4",)
    assert change.setup.global_batch == setup.global_batch
    assert change.after_bytes <= change.memory_bytes < change.before_bytes


def test_checkpointing_where_no_smaller_micro_batch_is() -> None:
    setup = training(micro_batch=1, sequence_length=16384)
    limit = memory_of(setup.replace(checkpointing="full")).total
    change = smallest_change(setup, limit)
    assert change is not None
    assert change.words == ("full checkpointing",)
    assert change.sentence == (
        f"full checkpointing brings {memory_of(setup).total / 1e9:.1f} GB to {limit / 1e9:.1f} of {limit / 1e9:.1f}"
    )


def test_states_alone_too_large_are_sharded_and_then_spread() -> None:
    setup = training(micro_batch=1, sequence_length=64)
    change = smallest_change(setup, memory_of(setup).total // 2)
    assert change is not None
    assert change.words == ("FSDP",)
    spread = training(micro_batch=2, sequence_length=64, layout=Layout(dp=4, strategy="fsdp"), checkpointing="full")
    more = smallest_change(spread, 0.75 * memory_of(spread).total, max_ranks=8)
    assert more is not None
    assert more.setup.layout.ranks == 8
    without = smallest_change(spread, 0.75 * memory_of(spread).total)
    assert without is None or without.setup.layout.ranks == 4


def test_offload_is_the_last_resort_and_minds_the_host() -> None:
    setup = training(micro_batch=1, sequence_length=64, layout=Layout(dp=2, strategy="zero3"), checkpointing="full")
    limit = memory_of(setup.replace(offload="cpu")).total
    change = smallest_change(setup, limit)
    assert change is not None
    assert change.words == ("offload to the CPU",)
    assert smallest_change(setup.replace(machine=machine(host_memory_bytes=_GIB)), limit) is None


def test_nothing_helps_a_device_without_memory() -> None:
    assert smallest_change(training(), 1000, max_ranks=64) is None


@pytest.mark.parametrize(
    ("share", "ranks", "words"),
    [
        (0.6, 8, "tensor parallelism over 2 ranks"),
        (0.6, None, "weights in int8"),
    ],
)
def test_inference_takes_ranks_before_it_gives_up_anything(share: float, ranks: int | None, words: str) -> None:
    setup = InferenceSetup(architecture(4096, 32), machine(), batch=1, prompt_tokens=64, new_tokens=64)
    change = smallest_change(setup, share * memory_of(setup).total, ranks)
    assert change is not None
    assert change.words == (words,)


def test_ranks_and_bits_together_come_before_what_the_user_asked_for() -> None:
    setup = InferenceSetup(architecture(4096, 32), machine(), batch=64, prompt_tokens=2048, new_tokens=64)
    both = setup.replace(layout=Layout(tp=2), weights="int8")
    change = smallest_change(setup, memory_of(both).total, 2)
    assert change is not None and change.words == ("tensor parallelism over 2 ranks", "weights in int8")
    assert change.named == "tensor parallelism over 2 ranks and weights in int8"
    assert f"{change.named} bring " in change.sentence


def test_heads_that_no_number_divides_are_split_in_layers() -> None:
    """falcon-7b has 71 query heads."""
    setup = InferenceSetup(find_model("falcon-7b"), machine(), batch=1, prompt_tokens=64, new_tokens=64)
    limit = 0.4 * memory_of(setup).total
    change = smallest_change(setup, limit, 8)
    assert change is not None and change.words == ("pipeline parallelism over 4 ranks",)
    assert change.setup.layout == Layout(pp=4) and fits(change.setup, limit)
    assert smallest_change(setup, limit, 2).setup.layout.ranks <= 2  # type: ignore[union-attr]


def test_ranks_in_all_are_named_where_a_layout_has_several_degrees() -> None:
    setup = InferenceSetup(architecture(4096, 32), machine(), Layout(tp=2, pp=2), prompt_tokens=64, new_tokens=64)
    change = smallest_change(setup, 0.7 * memory_of(setup).total, 64)
    assert change is not None and change.words == ("tensor parallelism over 4 ranks (8 in all)",)


@pytest.mark.parametrize(
    ("layout", "words", "split"),
    [
        # Of 8 ranks in a node: 32 were named, with tensor parallelism over 16 of them.
        (Layout(tp=4, pp=2), "pipeline parallelism over 5 ranks (20 in all)", Layout(tp=4, pp=5)),
        (Layout(tp=4), "tensor and pipeline parallelism over 8 x 3 ranks", Layout(tp=8, pp=3)),
    ],
)
def test_tensor_parallelism_stays_in_a_node_while_stages_suffice(layout: Layout, words: str, split: Layout) -> None:
    node = machine().model_copy(update={"accelerators": 8})
    setup = InferenceSetup(architecture(4096, 60), node, layout, prompt_tokens=64, new_tokens=64)
    limit = memory_of(setup.replace(layout=split)).total
    change = smallest_change(setup, limit, 64)
    assert change is not None and change.words == (words,)
    assert change.setup.layout == split and fits(change.setup, limit)


def test_tensor_parallelism_in_a_larger_node_goes_further() -> None:
    node = machine().model_copy(update={"accelerators": 64})
    setup = InferenceSetup(architecture(4096, 60), node, Layout(tp=4, pp=2), prompt_tokens=64, new_tokens=64)
    change = smallest_change(setup, memory_of(setup.replace(layout=Layout(tp=4, pp=5))).total, 64)
    assert change is not None and change.words == ("tensor parallelism over 16 ranks (32 in all)",)


def test_a_large_cache_is_made_smaller() -> None:
    setup = InferenceSetup(architecture(), machine(), batch=64, prompt_tokens=8192, new_tokens=64)
    change = smallest_change(setup, memory_of(setup.replace(batch=32)).total)
    assert change is not None
    assert change.words[0].startswith(("prompts of", "a batch of"))


def test_tensor_parallelism_is_named_where_it_splits_the_model_equally() -> None:
    """phi-4 has 40 heads and 10 key-value heads: 4 ranks divide the former only."""
    model = find_model("phi-4")
    assert [tp for tp in range(1, 11) if model.splits(tp)] == [1, 2, 5, 10]
    for setup in (InferenceSetup(model, machine(), weights="bfloat16"), TrainingSetup(model, machine(), Layout())):
        for limit in (0.7, 0.4, 0.3, 0.2, 0.15):
            change = smallest_change(setup, limit * memory_of(setup).total, 8)
            assert change is None or model.splits(change.setup.layout.tp), change.sentence


def test_nothing_is_offloaded_from_a_cpu() -> None:
    node = machine()
    cpu = node.accelerator.model_copy(update={"kind": "cpu", "peak_flops": {"float32": 1e12}})
    setup = training(machine=node.model_copy(update={"accelerator": cpu}), precision="float32")
    for share in (0.9, 0.5, 0.2, 0.1, 0.01):
        change = smallest_change(setup, share * memory_of(setup).total)
        assert change is None or change.setup.offload == "none", change.sentence


@pytest.mark.parametrize("strategy", ["none", "ddp", "zero1"])
def test_a_pipeline_is_offered_no_strategy_that_reduces_each_micro_batch(strategy: str) -> None:
    layout = Layout.model_validate({"dp": 1 if strategy == "none" else 2, "pp": 2, "strategy": strategy})
    setup = training(layout=layout, machine=machine(storage_bytes=10**13))
    found = [smallest_change(setup, share * memory_of(setup).total, 8) for share in (0.9, 0.6, 0.4, 0.3, 0.2, 0.15)]
    assert any(found)
    for change in found:
        assert change is None or change.setup.layout.strategy not in ("zero2", "zero3"), change.sentence


def test_a_strategy_that_shards_is_counted_with_its_own_precision() -> None:
    setup = training(precision="bfloat16_autocast", micro_batch=1, sequence_length=64)
    sharded = setup.replace(layout=Layout(dp=4, strategy="fsdp"), precision="bfloat16_mixed")
    change = smallest_change(setup, memory_of(sharded).total)
    assert change is not None and change.words == ("FSDP",) and change.setup == sharded
