"""The search over layouts: what is valid, what is dropped, and that nothing better is missed."""

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as some

from configs.common.execution import Layout
from configs.hardware.catalog import instance
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.choice import search
from engine.planner.choice.search import (
    CHECKPOINTINGS,
    LAUNCHABLE,
    OFFLOADS,
    STRATEGIES,
    SearchLimits,
    divisors,
    evaluate_setup,
    layouts,
    memory_limit,
    ranked,
    usd_per_million_tokens,
    with_memory_limit,
)
from engine.planner.results import StepTime
from engine.planner.setup import InferenceSetup, TrainingSetup, precision_for
from engine.planner.timing.training import step_time

NODE = instance("aws/p4d.24xlarge")  # 8 A100 of 40 GB
OPT = TrainingSetup(find_model("opt-1.3b"), NODE)
LLAMA_70B = find_model("llama-2-70b")


@given(some.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@given(some.sampled_from([1, 2, 4, 6, 8, 12, 16, 64]), some.sampled_from([4, 8, 24, 64, 96]))
def test_every_layout_uses_all_ranks_and_shares_the_batch(ranks: int, global_batch: int) -> None:
    found = list(layouts(OPT, ranks, global_batch))
    assert len(found) == len(set(map(repr, found)))
    for layout in found:
        assert layout.ranks == ranks
        assert global_batch % layout.dp == 0
        assert layout.tp <= NODE.accelerators
        assert OPT.architecture.heads % layout.tp == 0
        assert layout.pp <= OPT.architecture.layers
        assert not (layout.pp > 1 and layout.strategy in ("zero2", "zero3"))


def test_layouts_of_two_ranks() -> None:
    found = {(layout.dp, layout.tp, layout.pp, layout.strategy) for layout in layouts(OPT, 2, 8)}
    sharded = {(2, 1, 1, name) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")}
    # On one replica FSDP and ZeRO are there to offload; ZeRO-2 and 3 not in a pipeline.
    alone = {(1, 2, 1, name) for name in ("none", "fsdp", "zero1", "zero2", "zero3")}
    piped = {(1, 1, 2, name) for name in ("none", "fsdp", "zero1")}
    assert found == sharded | alone | piped


def test_tensor_parallelism_needs_heads_that_it_can_share() -> None:
    assert [tp for tp in range(1, 17) if LLAMA_70B.splits(tp)] == [1, 2, 4, 8, 16]  # 64 heads, 8 key-value heads
    gpt2 = find_model("gpt2")  # 12 heads
    assert [tp for tp in range(1, 13) if gpt2.splits(tp)] == [1, 2, 3, 4, 6, 12]


def test_tensor_parallelism_leaves_the_node_only_where_nothing_else_fits() -> None:
    small = instance("aws/g5.12xlarge")  # 4 A10G of 24 GB
    assert max(layout.tp for layout in layouts(InferenceSetup(LLAMA_70B, small), 16, 1)) == 4
    tight = InferenceSetup(LLAMA_70B, small, prompt_tokens=128, new_tokens=8)
    only_tp = SearchLimits(axes=("tp",))
    with pytest.raises(ValueError, match="no layout of 32 ranks"):
        ranked(OPT.replace(machine=small), 32, 1, SearchLimits(axes=()))
    best = ranked(tight, 16, 1, only_tp)[0]
    assert best.setup.layout == Layout(tp=16)
    assert best.fits


def test_replicas_on_nodes_without_a_known_network_are_found() -> None:
    """The first layout that spanned two nodes refused all of them, `or use at most 8 ranks`."""
    alone = NODE.model_copy(update={"between": None})
    found = ranked(InferenceSetup(LLAMA_70B, alone), 16, 4)
    assert found[0].fits and all(each.setup.layout.dp > 1 for each in found)
    for base, batch in ((InferenceSetup(LLAMA_70B, alone), 1), (OPT.replace(machine=alone), 16)):
        with pytest.raises(ValueError, match="no link between nodes is known"):
            ranked(base, 16, batch)


def test_ranks_without_a_layout_are_told_the_next_number_that_has_one() -> None:
    of_three = InferenceSetup(find_model("gpt2"), instance("aws/p5.48xlarge"))  # 12 heads, 12 layers
    with pytest.raises(ValueError, match=r"use a batch that is a multiple of 13, or 12 ranks$"):
        ranked(of_three, 13, 3)
    assert ranked(of_three, 12, 3)[0].fits


def test_the_next_number_of_ranks_is_found_without_trying_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rankwise plan --max-gpus 65536` tried tens of thousands of numbers for each machine and number of GPUs."""
    for base in (InferenceSetup(find_model("gpt2"), NODE), InferenceSetup(LLAMA_70B, NODE), OPT):
        for ranks, batch, limits in product((5, 7, 13, 62, 97), (1, 3, 8), (SearchLimits(), LAUNCHABLE)):
            tried = range(ranks - 1, 0, -1)
            valid = (n for n in tried if any(layouts(base, n, batch, limits, across_nodes=True)))
            assert search._fewer_ranks(base, ranks, batch, limits) == next(valid, 1), (base, ranks, batch, limits)
    asked: list[int] = []
    monkeypatch.setattr(search, "divisors", lambda number: (asked.append(number), divisors(number))[1])
    with pytest.raises(ValueError, match=r"or 5,120 ranks$"):
        ranked(InferenceSetup(LLAMA_70B, NODE), 65_536, 1)
    assert len(asked) < 200


def test_what_fits_is_in_the_order_of_time_and_the_rest_says_why_not() -> None:
    found = ranked(OPT.replace(architecture=find_model("opt-6.7b")), 8, 32)
    fitting = [candidate for candidate in found if candidate.fits]
    rest = found[len(fitting) :]
    assert fitting
    assert all(not candidate.fits for candidate in rest)
    seconds = [candidate.seconds or 0.0 for candidate in fitting]
    assert seconds == sorted(seconds)
    assert all(candidate.memory.total <= memory_limit(NODE) for candidate in fitting)
    assert all(
        candidate.setup.global_batch == 32 for candidate in fitting if isinstance(candidate.setup, TrainingSetup)
    )
    ddp = next(candidate for candidate in rest if candidate.setup.layout == Layout(dp=8, strategy="ddp"))
    assert ddp.time is None
    assert ddp.why_not is not None
    assert "optimizer states" in ddp.why_not


@pytest.mark.parametrize("limit_gb", [8, 16, 40])
def test_nothing_faster_is_missed(limit_gb: int) -> None:
    """Against every combination there is, none left out for being slower in principle."""
    limit, batch = int(limit_gb * 1e9), 8
    base = OPT.replace(sequence_length=1024)
    every = []
    for strategy, checkpointing, offload, micro in product(STRATEGIES, CHECKPOINTINGS, OFFLOADS, divisors(batch // 4)):
        if strategy == "none" or (offload != "none" and strategy == "ddp"):
            continue
        if offload == "nvme" and strategy != "zero3":
            continue
        setup = base.replace(
            layout=Layout(dp=4, strategy=strategy), micro_batch=micro, accumulation=batch // 4 // micro,
            checkpointing=checkpointing, offload=offload, precision=precision_for(strategy, base.precision),
        )  # fmt: skip
        every.append(evaluate_setup(setup, limit))
    fitting = [candidate.seconds or 0.0 for candidate in every if candidate.fits]
    best = ranked(base, 4, batch, SearchLimits(axes=("dp",), max_memory_bytes=limit))[0]
    assert best.fits == bool(fitting)
    if fitting:
        assert best.seconds == pytest.approx(min(fitting), rel=1e-9)


def test_fsdp_is_timed_as_its_own_file_and_the_engine_reduce_gradients() -> None:
    """In float32: a plan sent them in 16 bits, a study of the same step in 32."""
    found = ranked(OPT, 8, 16, SearchLimits(axes=("dp",), strategies=("fsdp", "zero3"), offloads=("none",)))
    for strategy, sent in (("fsdp", True), ("zero3", False)):
        setup, said = next((one.setup, one.time) for one in found if one.setup.layout.strategy == strategy)
        assert isinstance(setup, TrainingSetup) and isinstance(said, StepTime)
        wide, narrow = (step_time(setup.replace(wide_reduction=each)).communication_seconds for each in (True, False))
        assert said.communication_seconds == (wide if sent else narrow) and wide > 1.2 * narrow


def test_less_memory_is_never_faster() -> None:
    seconds = [ranked(OPT, 8, 16, with_memory_limit(LAUNCHABLE, int(gb * 1e9)))[0].seconds for gb in (40, 24, 16, 12)]
    known = [one for one in seconds if one is not None]
    assert known == sorted(known)


def test_offload_is_held_against_the_host() -> None:
    poor = NODE.model_copy(update={"host_memory_bytes": 2**30})
    found = ranked(
        TrainingSetup(find_model("opt-13b"), poor),
        2,
        2,
        SearchLimits(axes=("dp",), strategies=("fsdp",), offloads=("cpu",)),
    )
    assert not found[0].fits
    assert "a node's memory of 1" in (found[0].why_not or "")


def test_dollars_are_of_whole_nodes_and_unknown_stays_unknown() -> None:
    machine = Machine(name="m", accelerator=NODE.accelerator, accelerators=8, usd_per_hour=36.0)
    assert usd_per_million_tokens(machine, 8, 1000.0) == pytest.approx(10.0)
    assert usd_per_million_tokens(machine, 3, 1000.0) == pytest.approx(10.0)
    assert usd_per_million_tokens(machine, 9, 1000.0) == pytest.approx(20.0)
    assert usd_per_million_tokens(machine.model_copy(update={"usd_per_hour": None}), 8, 1000.0) is None


def test_an_encoder_is_ranked_by_what_it_reads() -> None:
    found = ranked(InferenceSetup(find_model("bert-base-uncased"), NODE, prompt_tokens=128), 4, 8)
    assert found[0].fits
    assert (found[0].tokens_per_second or 0) > 0
    assert found[0].usd_per_million_tokens is not None


def test_16_bit_training_is_what_the_strategy_does() -> None:
    assert precision_for("ddp", "bfloat16_mixed") == "bfloat16_autocast"
    assert precision_for("zero1", "bfloat16_autocast") == "bfloat16_mixed"
    assert precision_for("ddp", "float32") == "float32"


def test_thousands_of_candidates_take_seconds() -> None:
    base = TrainingSetup(find_model("llama-2-7b"), NODE)
    begun = time.process_time()
    found = ranked(base, 256, 2048)
    assert len(found) > 200
    assert time.process_time() - begun < 20


def test_a_setup_that_holds_only_without_accumulation_is_found() -> None:
    """DDP keeps a second copy of the gradients while it accumulates: the whole batch at once may take less."""
    base = TrainingSetup(find_model("llama-2-7b"), instance("aws/p5en.48xlarge"), sequence_length=128)
    whole = ranked(base, 4, 8, SearchLimits(axes=("dp",), strategies=("ddp",)))
    assert [each.setup.accumulation for each in whole if each.fits and isinstance(each.setup, TrainingSetup)] == [1]


def test_offload_needs_a_place_to_go_to() -> None:
    base = TrainingSetup(find_model("llama-2-7b"), instance("aws/p3.16xlarge"), sequence_length=512)
    nvme = base.replace(layout=Layout(dp=8, strategy="zero3"), offload="nvme", precision="float16_mixed")
    assert "no NVMe is known" in str(evaluate_setup(nvme).why_not)
    cpu = base.replace(machine=instance("aws/r7i.48xlarge"), layout=Layout(strategy="fsdp"), offload="cpu")
    assert "a CPU has everything already" in str(evaluate_setup(cpu.replace(precision="float32")).why_not)
