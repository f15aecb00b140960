"""Known samples give known rates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.common.execution import Layout
from configs.records.rates import MeasurementSamples, by_rank, rates_of, time_per_output_token, wall_seconds
from configs.spec.cell import Cell
from configs.workloads import DESCRIPTORS
from configs.workloads.descriptor import ComparedLatency
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from configs.workloads.script import ScriptWorkload
from configs.workloads.train import TrainWorkload

GENERATE = Cell(model="m", workload=GenerateWorkload(num_prompts=4, new_tokens=5, batch_size=2), layout=Layout(dp=2))
SAMPLES = {
    "0/pass_seconds": np.array([1.0, 2.0]),
    "1/pass_seconds": np.array([1.5, 0.5]),
    "0/ttft_seconds": np.array([0.1, 0.3]),
    "1/ttft_seconds": np.array([0.2, 0.2]),
    "0/request_seconds": np.array([0.5, 0.7]),
    "1/request_seconds": np.array([1.0, 0.6]),
    "0/batch_sequences": np.array([2.0, 2.0]),
    "1/batch_sequences": np.array([2.0, 2.0]),
}


def test_generate_counts_all_ranks_and_the_slowest_rank_ends_a_pass() -> None:
    rates = rates_of(MeasurementSamples(GENERATE, SAMPLES), {})
    assert rates.wall_seconds == 1.5 + 2.0 and rates.passes == 2
    assert rates.tokens_per_second == pytest.approx(2 * 4 * 5 / 3.5)
    assert rates.prompts_per_second == pytest.approx(2 * 4 / 3.5)
    assert rates.throughput == rates.tokens_per_second
    assert rates.ttft_seconds == pytest.approx(0.2)
    # (request - ttft) / 4 by batch: 0.1, 0.1, 0.2, 0.1
    assert rates.time_per_output_token_seconds == pytest.approx(0.1)


def test_sizes_given_for_one_pass_count_for_each() -> None:
    once = SAMPLES | {"0/batch_sequences": np.array([2]), "1/batch_sequences": np.array([2])}
    assert rates_of(MeasurementSamples(GENERATE, once), {}) == rates_of(MeasurementSamples(GENERATE, SAMPLES), {})


def test_one_new_token_has_no_time_per_output_token() -> None:
    assert time_per_output_token(np.array([1.0]), np.array([1.0]), 1) is None
    cell = GENERATE.model_copy(update={"workload": GenerateWorkload(num_prompts=4, new_tokens=1)})
    assert rates_of(MeasurementSamples(cell, SAMPLES), {}).time_per_output_token_seconds is None


def test_train_and_noop() -> None:
    train = Cell(model="m", workload=TrainWorkload(), layout=Layout(dp=2))
    steps = {"0/step_seconds": np.array([0.5, 1.0]), "1/step_seconds": np.array([1.0, 0.5])}
    rates = rates_of(MeasurementSamples(train, steps), {"tokens_per_step": 1024})
    assert rates.tokens_per_second == pytest.approx(1024.0) and rates.step_seconds == 1.0
    assert rates.time_per_output_token_seconds is None
    noop = Cell(workload=NoopWorkload(items=6), layout=Layout(dp=2))
    rates = rates_of(
        MeasurementSamples(noop, {"0/pass_seconds": np.array([2.0]), "1/pass_seconds": np.array([3.0])}), {}
    )
    assert rates.items_per_second == 2.0 == rates.throughput and rates.tokens_per_second is None


def test_no_measured_time_has_no_rate() -> None:
    noop = Cell(workload=NoopWorkload())
    assert rates_of(MeasurementSamples(noop, {"0/pass_seconds": np.array([])}), {}).throughput is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1/pass_seconds": np.array([1.0])}, r"pass_seconds has \[2, 1\] entries by rank"),
        ({"1/ttft_seconds": np.array([1.0])}, "3 ttft_seconds but 4 request_seconds"),
        ({"1/batch_sequences": np.array([1.0, 1.0, 1.0])}, "rank 1 has 2 request_seconds but 3 batch_sequences"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates_of(MeasurementSamples(GENERATE, SAMPLES | change), {})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no rank has a column pass_seconds; available: 0/x"):
        by_rank({"0/x": np.array([1.0])}, "pass_seconds")
    train = Cell(model="m", workload=TrainWorkload())
    with pytest.raises(ValueError, match="tokens_per_step: got None"):
        rates_of(MeasurementSamples(train, {"0/step_seconds": np.array([1.0])}), {})


def test_ranks_are_ordered_as_numbers() -> None:
    samples = {f"{rank}/x": np.array([float(rank)]) for rank in (10, 2, 0)}
    assert [float(array[0]) for array in by_rank(samples, "x")] == [0, 2, 10]
    assert wall_seconds(by_rank(samples, "x"), "x").tolist() == [10.0]


def test_latency_is_what_one_waits_for() -> None:
    assert rates_of(MeasurementSamples(GENERATE, SAMPLES), {}).latency_seconds == pytest.approx(
        0.65
    )  # of 0.5, 0.6, 0.7, 1.0
    train = Cell(model="m", workload=TrainWorkload())
    rates = rates_of(MeasurementSamples(train, {"0/step_seconds": np.array([1.0, 3.0, 2.0])}), {"tokens_per_step": 8})
    assert rates.latency_seconds == 2.0 == rates.step_seconds
    noop = rates_of(MeasurementSamples(Cell(workload=NoopWorkload()), {"0/pass_seconds": np.array([4.0])}), {})
    assert noop.latency_seconds == 4.0


def test_the_parts_of_a_pass_sum_to_its_wall_time() -> None:
    """Ranks of 3.0 and 2.0 s in two passes whose walls are 1.5 and 2.0 s: means over ranks and passes."""
    rates = rates_of(MeasurementSamples(GENERATE, SAMPLES), {})
    assert rates.prefill_seconds == pytest.approx((0.1 + 0.3 + 0.2 + 0.2) / 4)
    assert rates.decode_seconds == pytest.approx((2.8 - 0.8) / 4)
    assert rates.other_seconds == pytest.approx((5.0 - 2.8) / 4)
    assert rates.waiting_seconds == pytest.approx((2 * 3.5 - 5.0) / 4)
    assert rates.busy_seconds is None
    train = Cell(model="m", workload=TrainWorkload(), layout=Layout(dp=2))
    steps = {"0/step_seconds": np.array([0.5, 1.0]), "1/step_seconds": np.array([1.0, 0.5])}
    rates = rates_of(MeasurementSamples(train, steps), {"tokens_per_step": 1024})
    assert rates.busy_seconds == 0.75 and rates.waiting_seconds == 0.25 and rates.prefill_seconds is None


def test_first_passes_are_left_out_of_everything() -> None:
    rest = MeasurementSamples(GENERATE, SAMPLES).without_first(1)
    rates = rates_of(rest, {})
    assert rates.wall_seconds == 2.0 and rates.passes == 1
    assert rates.tokens_per_second == pytest.approx(4 * 5 / 2.0)
    assert rates.ttft_seconds == pytest.approx(0.25)
    assert sorted(rest.latencies()["request"]) == [0.6, 0.7] and rest.latencies()["pass"].tolist() == [2.0]
    once = SAMPLES | {"0/batch_sequences": np.array([2]), "1/batch_sequences": np.array([2])}
    assert rates_of(MeasurementSamples(GENERATE, once).without_first(1), {}) == rates
    whole = MeasurementSamples(GENERATE, SAMPLES)
    assert whole.without_first(0) is whole
    odd = SAMPLES | {"0/ttft_seconds": np.array([0.1, 0.2, 0.3])}
    with pytest.raises(ValueError, match="3 ttft_seconds are not divisible by 2 passes"):
        MeasurementSamples(GENERATE, odd).without_first(1)


def test_a_median_of_what_is_no_number_is_unknown() -> None:
    broken = SAMPLES | {"1/ttft_seconds": np.array([np.nan, 0.2])}
    assert rates_of(MeasurementSamples(GENERATE, broken), {}).ttft_seconds is None
    assert rates_of(MeasurementSamples(GENERATE, SAMPLES), {}).ttft_seconds is not None


def test_a_step_of_training_is_split_into_what_ranks_did_and_waited_for() -> None:
    cell = Cell(model="m", workload=TrainWorkload(), layout=Layout(dp=2))
    parts = {"data": 0.1, "forward": 1.0, "backward": 2.0, "exposed_communication": 0.5, "optimizer": 0.25}
    samples = {f"{rank}/{name}_seconds": np.full(4, seconds) for rank in (0, 1) for name, seconds in parts.items()}
    samples |= {"0/step_seconds": np.full(4, 4.0), "1/step_seconds": np.full(4, 4.5)}
    samples |= {f"{rank}/loss": np.zeros(6) for rank in (0, 1)}
    rates = rates_of(MeasurementSamples(cell, samples), {"tokens_per_step": 9})
    assert rates.tokens_per_second == 9 / 4.5 and rates.busy_seconds is None
    assert (rates.forward_seconds, rates.exposed_communication_seconds) == (1.0, 0.5)
    assert rates.other_seconds == pytest.approx(4.25 - sum(parts.values()))
    assert rates.waiting_seconds == pytest.approx(0.25)
    # On a GPU what waits is not seen, and a record of the first versions has no parts at all.
    unseen = {name: column for name, column in samples.items() if "exposed" not in name}
    assert rates_of(MeasurementSamples(cell, unseen), {"tokens_per_step": 9}).exposed_communication_seconds is None
    plain = {name: column for name, column in samples.items() if name.endswith("step_seconds")}
    assert rates_of(MeasurementSamples(cell, plain), {"tokens_per_step": 9}).busy_seconds == pytest.approx(4.25)


def test_a_latency_with_a_column_of_its_own_is_the_median_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose users wait for something shorter than a pass; of those here each has its own arithmetic."""
    noop = DESCRIPTORS["noop"]
    napping = replace(
        noop,
        columns=("pass_seconds", "nap_seconds"),
        latencies={"pass": "pass_seconds", "nap": "nap_seconds"},
        latency=ComparedLatency("latency_seconds", "ms a nap", waited_for="nap"),
    )
    monkeypatch.setitem(DESCRIPTORS, "noop", napping)
    samples = {
        "0/pass_seconds": np.array([2.0, 2.0]),
        "1/pass_seconds": np.array([1.0, 2.0]),
        "0/nap_seconds": np.array([0.5, 0.7]),
        "1/nap_seconds": np.array([0.6, 0.9]),
    }
    rates = rates_of(MeasurementSamples(Cell(workload=NoopWorkload(items=6), layout=Layout(dp=2)), samples), {})
    assert rates.latency_seconds == pytest.approx(0.65)
    assert rates.items_per_second == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("told", "rate"),
    [
        ({"measure": "hf_trainer"}, 2.0),
        ({"measure": "hf_trainer", "unit": "input token"}, 8192.0),
        ({"measure": "probe", "unit": "step"}, 2.0),
        ({"measure": "probe", "unit": "sample"}, 8192.0),
        ({"measure": "lines", "unit": "step", "lines": {"pattern": "(?P<step_units>.+) steps"}}, 8192.0),
    ],
)
def test_a_script_that_counts_steps_has_no_rate_of_the_tokens_that_its_trainer_counts(
    told: dict[str, Any], rate: float
) -> None:
    work = ScriptWorkload(command=("train.py",), **told)
    samples = {"0/step_seconds": np.array([0.5, 0.5]), "0/step_units": np.array([4096.0, 4096.0])}
    found = rates_of(MeasurementSamples(Cell(model="none", workload=work), samples), {})
    assert found.items_per_second == pytest.approx(rate)
