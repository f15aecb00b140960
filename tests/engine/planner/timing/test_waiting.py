"""Training on CPUs over gloo: what each strategy sends, counted on a link; and what of it a step waits for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.cells import made_up_calibration
from configs.common.execution import Layout, Strategy
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.hardware import Link, Machine
from engine.planner.families import read_architecture
from engine.planner.setup import TrainingSetup
from engine.planner.timing.cpu import measured_step_time
from engine.planner.timing.traffic import ddp_buckets, reversed_weights, step_network_bytes, traffic
from engine.planner.timing.waiting import waits_of

MODEL = read_architecture(ARCHITECTURES["llama-13m"], "llama-13m")
TABLES = MODEL.vocabulary * MODEL.hidden  # the head is the embedding
NEAR = Link(name="one machine", latency_seconds=1e-4, bytes_per_second=1e9)
SLOW = Link(name="1 Gbit/s", latency_seconds=1e-4, bytes_per_second=119e6)


def nodes(link: Link | None = SLOW, ranks_a_node: int = 1) -> Machine:
    here = made_up_calibration().to_machine(2)
    return here.model_copy(update={"accelerators": ranks_a_node, "inside": NEAR, "between": link})


def setup(strategy: Strategy, dp: int = 2, machine: Machine | None = None, **fields: Any) -> TrainingSetup:
    ours: dict[str, Any] = {
        "precision": "float32",
        "deferred": strategy == "fsdp",
        "wide_reduction": strategy == "fsdp",
    }
    fixed = ours | {"micro_batch": 4, "sequence_length": 128}
    layout = Layout(dp=dp, strategy=strategy)
    return TrainingSetup(MODEL, machine or nodes(), layout, **(fixed | fields))


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        # Of two ranks each sends the whole tensor of an all-reduce, and of torch's reduce-scatter; half of a gather.
        ("ddp", 1.0),
        ("zero1", 1.0 + 0.5),
        ("zero2", 1.0 + 0.5),
        ("zero3", 1.0 + 0.5),  # weights so few are kept until they are used again
    ],
)
def test_what_a_node_of_two_sends(strategy: Strategy, times: float) -> None:
    assert step_network_bytes(setup(strategy)) == pytest.approx(4 * MODEL.parameters * times, rel=0.01)


def test_fsdp_gathers_blocks_twice_and_the_root_once() -> None:
    sent = step_network_bytes(setup("fsdp"))
    blocks = MODEL.parameters - TABLES
    assert sent == pytest.approx(4 * (1.5 * MODEL.parameters + 0.5 * blocks), rel=0.01)
    kept = step_network_bytes(setup("fsdp", reshard=False))
    assert kept == pytest.approx(4 * 1.5 * MODEL.parameters, rel=0.01)


def test_accumulated_micro_batches_are_reduced_once_but_by_stages_two_and_three() -> None:
    one, four = ({name: step_network_bytes(setup(name, accumulation=count)) for name in NAMES} for count in (1, 4))
    assert all(one[name] is not None for name in NAMES)
    whole = 4 * MODEL.parameters
    assert four["ddp"] == one["ddp"] and four["zero1"] == one["zero1"]
    assert four["zero2"] == pytest.approx((one["zero2"] or 0) + 3 * whole)
    # FSDP2 gathers in each micro-batch, and reduces in the last.
    assert four["fsdp"] == pytest.approx(4 * ((one["fsdp"] or 0) - whole) + whole)


NAMES: tuple[Strategy, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def test_one_node_sends_nothing_to_others() -> None:
    assert step_network_bytes(setup("ddp", machine=nodes(None, ranks_a_node=2))) is None


def test_hybrid_sharding_sends_shards_between_nodes() -> None:
    machine = nodes(ranks_a_node=2)
    found = traffic(setup("fsdp", dp=4, machine=machine, sharding="hybrid"))
    inside = [transfer for transfer in found if transfer.ranks == 2 and transfer.stride == 1]
    between = [transfer for transfer in found if transfer.stride == 2]
    assert {transfer.collective for transfer in inside} == {"all_gather", "reduce_scatter"}
    assert {transfer.collective for transfer in between} == {"all_reduce"}
    assert sum(transfer.bytes for transfer in between) == pytest.approx(4 * MODEL.parameters / 2)
    # Each of a node's two shards is summed with the other node's: all of the gradients leave the node once.
    assert step_network_bytes(setup("fsdp", dp=4, machine=machine, sharding="hybrid")) == pytest.approx(
        4 * MODEL.parameters
    )


def test_buckets_hold_every_gradient_in_the_order_of_the_backward_pass() -> None:
    one = setup("ddp")
    weights, buckets = reversed_weights(one), ddp_buckets(one)
    assert sum(buckets) == pytest.approx(MODEL.parameters) == pytest.approx(sum(size for _, size in weights))
    shares = [share for share, _ in weights]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert buckets[0] * 4 >= 2**20 and all(bucket * 4 >= 25 * 2**20 for bucket in buckets[1:-1])


def test_nothing_hides_on_one_machine_and_a_wire_does_behind_the_backward_pass() -> None:
    alone = waits_of(setup("ddp", machine=nodes(None, ranks_a_node=2)), backward_seconds=10.0)
    # All of what hides was taken from the core that computes.
    assert alone.exposed + alone.stolen == pytest.approx(alone.transfers)
    wire = waits_of(setup("ddp"), backward_seconds=10.0)
    assert wire.transfers > 3 * alone.transfers
    assert wire.exposed < wire.transfers and 0 < wire.stolen < wire.transfers - wire.exposed
    # The embedding's gradient is the last: its bucket has nothing left to hide behind.
    last = 4 * ddp_buckets(setup("ddp"))[-1] / SLOW.bytes_per_second
    assert wire.exposed == pytest.approx(last, rel=0.01)


@pytest.mark.parametrize("strategy", [name for name in NAMES if name != "ddp"])
def test_what_the_computing_thread_calls_is_waited_for(strategy: Strategy) -> None:
    waits = waits_of(setup(strategy), backward_seconds=10.0)
    assert waits.exposed == waits.transfers > 0 and waits.stolen == 0


@given(st.sampled_from(NAMES), st.floats(1.1, 100), st.floats(0, 20))
def test_a_faster_link_never_waits_longer(strategy: Strategy, faster: float, backward: float) -> None:
    fast = SLOW.model_copy(update={"bytes_per_second": min(1e9, SLOW.bytes_per_second * faster)})
    slow, quick = (waits_of(setup(strategy, machine=nodes(link)), backward) for link in (SLOW, fast))
    assert quick.exposed <= slow.exposed + 1e-9
    assert 0 <= slow.exposed <= slow.transfers + 1e-9


def test_sharded_strategies_update_their_part_and_checkpointing_computes_again() -> None:
    whole, part = (measured_step_time(setup(name)) for name in ("ddp", "zero1"))
    assert part.optimizer_seconds == pytest.approx(whole.optimizer_seconds / 2)
    kinds = ("none", "selective", "full")
    none, selective, full = (measured_step_time(setup("fsdp", checkpointing=kind)).compute_seconds for kind in kinds)
    assert none < selective < full < 4 / 3 * none
