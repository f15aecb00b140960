"""Forecasts against made-up truths, whose laws are known, and against published rows."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from configs.hardware.hardware import Accelerator, Link, Machine
from engine.planner.forecasting.forecast import (
    OFF_THE_LAW,
    PRIORS,
    Forecast,
    ScalingKind,
    WorldSize,
    forecast,
)
from engine.planner.forecasting.traffic import ddp_traffic, joined_alike, latency_and_transfer
from engine.planner.timing.collectives import all_reduce_seconds
from engine.planner.timing.traffic import Transfer

PARAMETERS = 25e6
TRAFFIC = ddp_traffic(PARAMETERS)
PUBLISHED = Path(__file__).parents[3] / "docs" / "measurements" / "published" / "mpt_training_throughput.csv"


def machine(accelerators: int = 8, between: bool = True, kind: str = "cpu") -> Machine:
    accelerator = Accelerator.model_validate(
        {
            "name": "made-up",
            "kind": kind,
            "memory_bytes": 1 << 34,
            "bytes_per_second": 1e10,
            "peak_flops": {"float32": 1e11},
            "source": "made up",
        }
    )
    outside = Link(name="network", latency_seconds=1e-4, bytes_per_second=1e9) if between else None
    return Machine(
        name="made-up",
        accelerator=accelerator,
        accelerators=accelerators,
        inside=Link(name="bus", latency_seconds=2e-5, bytes_per_second=5e9),
        between=outside,
    )


def law(
    kind: ScalingKind,
    here: Machine,
    fixed: float = 0.0,
    neighbours: float = 0.0,
    latency: float = 1.0,
    transfer: float = 1.0,
) -> Callable[[int], float]:
    """Seconds of a step by ranks, of one second of compute on one rank."""

    def seconds(ranks: int) -> float:
        crowded = 1 + neighbours * (min(ranks, here.accelerators) - 1) / (here.accelerators - 1)
        sent = [latency_and_transfer(item, here) for item in TRAFFIC(ranks)]
        work = 1 / ranks if kind == "strong" else 1.0
        return fixed + work * crowded + sum(latency * one + transfer * two for one, two in sent)

    return seconds


def world(ranks: int, seconds: float, measurements: int = 1, noise: np.random.Generator | None = None) -> WorldSize:
    values = [seconds] * measurements if noise is None else seconds * np.exp(0.02 * noise.standard_normal(measurements))
    return WorldSize(ranks, tuple(float(value) for value in values))


def test_points_without_noise_are_met_and_continued() -> None:
    here = machine()
    truth = law("weak", here, neighbours=0.1, latency=1.5, transfer=0.8)
    found = forecast([world(ranks, truth(ranks)) for ranks in (1, 2, 4, 8, 16, 32, 64)], "weak", TRAFFIC, here)
    by_ranks = {point.ranks: point for point in found.points}
    assert list(by_ranks) == [1 << bit for bit in range(13)]
    for ranks in (1, 8, 64):
        assert by_ranks[ranks].seconds == pytest.approx(truth(ranks), rel=0.02)
    assert by_ranks[512].seconds == pytest.approx(truth(512), rel=0.08)
    assert by_ranks[512].seconds_interval[0] < truth(512) < by_ranks[512].seconds_interval[1]
    assert by_ranks[1].efficiency == 1 and by_ranks[1].communication_share == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_intervals_hold_the_truth_as_often_as_they_say(kind: ScalingKind) -> None:
    """A hundred made-up studies, laws drawn from the priors, noise of measurements and of world sizes as supposed."""
    here, random = machine(), np.random.default_rng(7)
    sizes, asked, inside, checked = (1, 2, 4, 8), (64, 512), {64: 0, 512: 0}, 0

    def drawn(name: str) -> float:
        middle, spread = PRIORS[name]
        return float(middle * np.exp(spread * random.standard_normal()))

    studies = 100
    for study in range(studies):
        fixed = drawn("fixed") if kind == "strong" else 0.0
        truth = law(kind, here, fixed, drawn("neighbours"), drawn("latency"), drawn("transfer"))
        off = {ranks: float(np.exp(OFF_THE_LAW * random.standard_normal())) for ranks in (*sizes, *asked)}
        points = [world(ranks, truth(ranks) * off[ranks], 6, random) for ranks in sizes]
        found = forecast(points, kind, TRAFFIC, here, to=512, seed=study, draws=150)
        by_ranks = {point.ranks: point for point in found.points}
        for ranks in asked:
            low, high = by_ranks[ranks].seconds_interval
            inside[ranks] += low <= truth(ranks) * off[ranks] <= high
        assert found.check is not None and found.check.ranks == 8
        checked += found.check.inside
    for held in (*inside.values(), checked):
        assert 0.88 * studies <= held <= studies, (inside, checked)


def test_the_largest_world_size_is_predicted_from_the_smaller_ones_alone() -> None:
    here = machine()
    truth = law("weak", here)
    points = [world(ranks, truth(ranks)) for ranks in (1, 2, 4)]
    fair = forecast(points, "weak", TRAFFIC, here).check
    slow = forecast([*points, world(8, 2 * truth(8))], "weak", TRAFFIC, here).check
    assert fair is not None and fair.ranks == 4 and abs(fair.error) < 0.05 and fair.inside
    assert slow is not None and slow.ranks == 8 and slow.error == pytest.approx(-0.5, abs=0.05) and not slow.inside
    assert forecast(points[:2], "weak", TRAFFIC, here).check is None


def test_the_world_size_of_half_the_efficiency() -> None:
    bus = Link(name="slow bus", latency_seconds=1e-4, bytes_per_second=5e9)
    here = joined_alike(machine(between=False).model_copy(update={"inside": bus}), 4096)
    truth = law("weak", here)
    found = forecast([world(ranks, truth(ranks)) for ranks in (1, 2, 4, 8, 16, 32)], "weak", TRAFFIC, here)
    exact = next(ranks for ranks in range(2, 4096) if truth(1) / truth(ranks) < 0.5)
    assert found.half.ranks is not None and found.half.low is not None
    assert found.half.ranks == pytest.approx(exact, rel=0.35)
    assert found.half.low < exact and (found.half.high is None or exact < found.half.high)
    never = forecast([WorldSize(1, (1.0,)), WorldSize(2, (1.0,))], "weak", lambda ranks: (), None)
    assert never.half.ranks is None and never.half.high is None


def test_work_that_does_not_shrink_ends_strong_scaling() -> None:
    here = machine()
    truth = law("strong", here, fixed=0.1)
    found = forecast([world(ranks, truth(ranks)) for ranks in (1, 2, 4, 8)], "strong", lambda ranks: (), here)
    assert found.terms["fixed"][0] == pytest.approx(0.1, rel=0.6)
    assert found.points[-1].efficiency < 0.01
    assert found.half.ranks is not None and 5 < found.half.ranks < 20


def test_waiting_for_the_slowest_goes_on() -> None:
    """Without communication, what grows is the largest of ever more values."""
    scatter = 0.05
    largest = {1: 0.0, 2: 0.589, 4: 1.049, 8: 1.434}  # Blom's approximation of normal order statistics
    points = [WorldSize(ranks, (1 + scatter * value,), scatter * value) for ranks, value in largest.items()]
    found = forecast(points, "weak", lambda ranks: (), None)
    assert found.terms["scatter"][0] == pytest.approx(scatter, rel=0.25)
    assert found.points[-1].seconds == pytest.approx(1 + scatter * 3.6, rel=0.06)  # 4,096 values reach 3.6 deviations


def test_another_interconnect_takes_its_own_links_and_is_less_certain() -> None:
    here, slow = machine(), machine(accelerators=1)
    truth = law("weak", here)
    points = [world(ranks, truth(ranks)) for ranks in (1, 2, 4, 8)]
    same, other = forecast(points, "weak", TRAFFIC, here), forecast(points, "weak", TRAFFIC, here, over=slow)
    assert other.points[-1].seconds > same.points[-1].seconds
    assert _width(other) > _width(same)
    assert other.check == same.check


def _width(found: Forecast) -> float:
    low, high = found.points[3].seconds_interval
    return high / low


def test_links_that_are_not_known_are_named() -> None:
    points = [WorldSize(1, (1.0,)), WorldSize(2, (1.1,))]
    with pytest.raises(ValueError, match="no link between them is known"):
        forecast(points, "weak", TRAFFIC, None)
    alone = machine(between=False)
    with pytest.raises(ValueError, match=r"machine\.between"):
        forecast(points, "weak", TRAFFIC, machine(), over=alone)
    assert forecast(points, "weak", TRAFFIC, alone).points[-1].ranks == 4096  # all joined like those that were measured
    with pytest.raises(ValueError, match="two world sizes"):
        forecast(points[:1], "weak", TRAFFIC, alone)
    with pytest.raises(ValueError, match="to: 2 ranks"):
        forecast(points, "weak", TRAFFIC, alone, to=2)


def test_gloo_reduces_around_a_ring_and_others_as_they_like() -> None:
    transfer = Transfer("gradients", "all_reduce", 4e6, 3, 64, 1, "last_backward")
    ours, theirs = machine(64), machine(64, kind="cuda")
    latency, moved = latency_and_transfer(transfer, ours)
    assert latency == pytest.approx(3 * 2 * 63 * 2e-5)
    assert moved == pytest.approx(3 * 2 * 63 / 64 * 4e6 / 5e9)
    assert sum(latency_and_transfer(transfer, theirs)) == pytest.approx(3 * all_reduce_seconds(4e6, 64, theirs))


def test_the_traffic_of_ddp() -> None:
    transfers = ddp_traffic(25e6)(8)
    assert sum(transfer.bytes for transfer in transfers) == pytest.approx(100e6)
    assert transfers[0].calls == 4 and not ddp_traffic(25e6)(1) and not ddp_traffic(0)(8)
    assert ddp_traffic(40 * 25 * 2**20 / 4)(8)[0].calls == 40, "bucket_cap_mb counts MiB"


PUBLISHED_CASES = (
    ("mpt-1b", (8, 16), 64),
    ("mpt-1b", (8, 16, 64), 256),
    ("mpt-3b", (32, 64), 256),
    ("mpt-13b", (16, 32), 256),
    ("mpt-30b", (8, 32), 256),
    ("mpt-70b", (32, 64), 256),
)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published rows are not here")
def test_published_rows_at_more_gpus() -> None:
    """Weak scaling of MPT on H100 (MosaicML llm-foundry) from few GPUs; rows differ in batch, sharding, checkpointing.

    "The same rate a GPU as at the most GPUs" errs by 3.7 % in the median here; no worse may the forecast be.
    """
    with PUBLISHED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == "h100_80gb" and row["sequence_length"] == "2048"]
    found = {(model, asked): _published(rows, model, fitted, asked) for model, fitted, asked in PUBLISHED_CASES}
    errors = [abs(error) for error, _, _ in found.values()]
    naive = [abs(error) for _, error, _ in found.values()]
    assert np.median(errors) <= np.median(naive) and max(errors) < 0.1, found
    assert sum(inside for _, _, inside in found.values()) >= 5, found


def _published(
    rows: Sequence[dict[str, str]], model: str, fitted: Sequence[int], asked: int
) -> tuple[float, float, bool]:
    """Errors of the forecast and of the same rate a GPU; whether the interval holds what was measured."""
    mine = {int(row["num_gpus"]): row for row in rows if row["model"] == model}
    seconds = {gpus: 20 * 2048 / float(row["tokens_per_second_per_gpu"]) for gpus, row in mine.items()}
    gathered = 2 * float(mine[asked]["num_parameters"]) / 24

    def traffic(ranks: int) -> Sequence[Transfer]:
        gathers = Transfer("weights", "all_gather", gathered, 48, ranks, 1, "forward")
        return (gathers, Transfer("gradients", "reduce_scatter", gathered, 24, ranks, 1, "backward"))

    links = {
        "inside": Link(name="nvlink", latency_seconds=3e-6, bytes_per_second=360e9),
        "between": Link(name="infiniband", latency_seconds=1e-5, bytes_per_second=50e9),
    }
    node = machine(kind="cuda").model_copy(update=links)
    points = [WorldSize(gpus, (seconds[gpus],)) for gpus in fitted]
    point = next(point for point in forecast(points, "weak", traffic, node).points if point.ranks == asked)
    low, high = point.seconds_interval
    naive = seconds[max(fitted)] / seconds[asked] - 1
    return point.seconds / seconds[asked] - 1, naive, low <= seconds[asked] <= high
