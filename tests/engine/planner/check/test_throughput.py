"""Published training throughput: how near the planner comes to rows that it has not seen, and what it may not read."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks.planner import bench as bench_planner
from benchmarks.planner.throughput import FILE, Growth, constant_mfu, errors_of, growths, left_out, model_of
from configs.hardware.catalog import accelerator
from engine.planner.check.rows import PublishedRow
from engine.planner.check.throughput import calibrated_on, predict, setup_of
from engine.planner.timing.constants import LEARNT, constants_for, prior_for
from engine.planner.timing.fitting import CalibratedConstants, calibrate_constants

PUBLISHED = Path(__file__).parents[4] / "docs" / "measurements" / "published"
MEASURED = ("tokens_per_second", "tokens_per_second_per_gpu", "mfu_percent", "hfu_percent")

EXAMPLE: PublishedRow = {
    "model": "mpt-7b", "sequence_length": "2048", "num_gpus": "16", "gpu": "h100_80gb", "micro_batch_size": "8",
    "gradient_accumulation_steps": "2", "precision": "amp_bf16", "sharding": "FULL_SHARD",
    "activation_checkpointing": "true",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[PublishedRow]:
    with (PUBLISHED / FILE).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(rows: list[PublishedRow]) -> CalibratedConstants:
    return calibrated_on(rows)


@pytest.fixture(scope="module")
def grown(rows: list[PublishedRow]) -> list[Growth]:
    return growths(rows)


def one(row: PublishedRow, fit: Sequence[PublishedRow] = ()) -> float:
    """The prediction of one row."""
    (prediction,) = predict([row], fit)
    assert prediction.predicted is not None, prediction.reason
    return prediction.predicted


@pytest.mark.slow
def test_a_model_left_out_is_predicted_within_the_bars(rows: list[PublishedRow]) -> None:
    errors, simple = errors_of(rows, left_out(rows, model_of)), errors_of(rows, constant_mfu(rows, model_of))
    assert len(errors.values) == len(simple.values) == len(rows) == 81
    assert errors.median <= 0.045 and errors.p90 <= 0.12
    # What a constant MFU gets, about 6 and 19 %.
    assert simple.median == pytest.approx(0.06, abs=0.005)
    assert simple.p90 == pytest.approx(0.19, abs=0.01)
    # As of 2026-11: 1.3 and 3.8 %. A change that loses half of that should be noticed.
    assert errors.median <= 0.02 and errors.p90 <= 0.06


@pytest.mark.slow
def test_the_next_doubling_is_foretold_better_than_by_the_same_tokens_per_gpu(grown: list[Growth]) -> None:
    doublings = [growth for growth in grown if growth.times == 2]
    assert len(doublings) == 5 and len(grown) == 19
    for some in (doublings, grown):
        larger = [growth.larger for growth in some]
        planner = errors_of(larger, [growth.predicted for growth in some])
        simple = errors_of(larger, [growth.same_per_gpu for growth in some])
        assert planner.median < simple.median / 2
        assert planner.mean < simple.mean / 2


@pytest.mark.slow
def test_sequence_lengths_that_no_row_has_are_predicted(rows: list[PublishedRow]) -> None:
    errors = errors_of(rows, left_out(rows, lambda row: row["sequence_length"]))
    assert errors.median <= 0.02 and errors.p90 <= 0.06


@pytest.mark.slow
def test_no_measured_column_of_the_rows_is_read(rows: list[PublishedRow]) -> None:
    fit, asked = rows[::2], rows[1::2]
    expected = predict(asked, fit)
    without = [{name: text for name, text in row.items() if name not in MEASURED} for row in asked]
    scrambled = [row | dict.fromkeys(MEASURED, "nonsense") for row in asked]
    assert predict(without, fit) == predict(scrambled, fit) == expected
    assert all(prediction.predicted for prediction in expected)


def test_of_the_fit_only_tokens_per_second_is_read(rows: list[PublishedRow]) -> None:
    fit = [row | dict.fromkeys(MEASURED[1:], "nonsense") for row in rows[:20]]
    assert predict([EXAMPLE], fit) == predict([EXAMPLE], rows[:20])


def test_without_anything_to_learn_from_the_priors_are_used(rows: list[PublishedRow]) -> None:
    priors = [prediction.predicted for prediction in predict(rows, [])]
    assert errors_of(rows, priors).median < 0.35
    # Nothing of the published rows may have come in by way of the constants of planning.
    assert one(EXAMPLE) == pytest.approx(calibrate_constants([], []).tokens_per_second(setup_of(EXAMPLE)), rel=1e-12)
    assert prior_for(accelerator("h100-80gb")) != constants_for(accelerator("h100-80gb"))


def test_what_planning_has_learnt_is_what_the_published_rows_teach(whole: CalibratedConstants) -> None:
    for name, times in LEARNT.items():
        assert whole.fitted.shared[name] == pytest.approx(times, rel=0.02), name


def test_fitted_constants_are_physical(whole: CalibratedConstants) -> None:
    for name, matmul in (("a100-80gb", (0.65, 0.9)), ("h100-80gb", (0.5, 0.75))):
        constants = whole.fitted.constants(accelerator(name))
        assert matmul[0] < constants.matmul < matmul[1]
        assert 0.1 < constants.attention < 0.6
        assert 0 < constants.contention < 1
        assert 0.4 < constants.recomputed <= 1
    # A device that no row has: its own priors, and what all devices share.
    other = whole.fitted.constants(accelerator("l4"))
    assert other.matmul == pytest.approx(prior_for(accelerator("l4")).matmul * whole.fitted.shared["matmul"])


def test_one_absurd_row_does_not_spoil_the_rest(rows: list[PublishedRow], whole: CalibratedConstants) -> None:
    absurd = [rows[0] | {"tokens_per_second": "1000"}, *rows[1:]]
    asked = rows[40:60]
    before = [whole.tokens_per_second(setup_of(row)) for row in asked]
    for value, prediction in zip(before, predict(asked, absurd), strict=True):
        assert prediction.predicted == pytest.approx(value, rel=0.03)


def test_left_out_models_lie_within_the_stated_interval(rows: list[PublishedRow]) -> None:
    inside = []
    for model in ("mpt-3b", "mpt-13b", "mpt-70b"):
        calibrated = calibrated_on([row for row in rows if row["model"] != model])
        for row in rows:
            if row["model"] == model:
                setup = setup_of(row)
                seconds, sigma = calibrated.step_seconds(setup)
                ratio = setup.tokens_per_step / seconds / float(row["tokens_per_second"])
                inside.append(abs(ratio - 1) < 1.645 * sigma)
    assert mean(inside) > 0.75


def test_columns_may_be_absent() -> None:
    bare = {name: EXAMPLE[name] for name in ("model", "sequence_length", "num_gpus", "gpu", "micro_batch_size")}
    setup = setup_of(bare)
    assert (setup.accumulation, setup.precision, setup.checkpointing) == (1, "bfloat16_mixed", "none")
    assert (setup.layout.strategy, setup.reshard) == ("fsdp", True)
    assert setup_of(bare | {"global_batch_size": "512"}).accumulation == 4
    assert setup_of(bare | {"num_gpus": "1"}).layout.strategy == "none"


def test_what_a_row_says_changes_the_prediction_as_it_should() -> None:
    tokens = one(EXAMPLE)
    assert one(EXAMPLE | {"activation_checkpointing": "false"}) > tokens
    assert one(EXAMPLE | {"gpu": "a100_80gb"}) < tokens
    assert one(EXAMPLE | {"sharding": "SHARD_GRAD_OP"}) > tokens
    assert one(EXAMPLE | {"precision": "amp_fp8"}) > 1.1 * tokens
    assert one(EXAMPLE | {"precision": "fp32"}) < tokens / 4
    assert 1.9 * tokens < one(EXAMPLE | {"num_gpus": "32"}) < 2.001 * tokens  # each rank updates fewer parameters
    assert one(EXAMPLE | {"micro_batch_size": "1"}) < tokens


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "gpt-99"}, "gpt-99"),
        ({"model": ""}, "model: missing or empty"),
        ({"gpu": "tpu_v9"}, "tpu-v9"),
        ({"gpu": "t4", "num_gpus": "16"}, "machine.between: 16 ranks need 2 nodes"),
        ({"gpu": "a100_80gb", "precision": "amp_fp6"}, "precision: 'amp_fp6' is not known; use one of: amp_bf16"),
        ({"sharding": "HYBRID_SHARD"}, "sharding: 'HYBRID_SHARD' is not known"),
        ({"activation_checkpointing": "maybe"}, "activation_checkpointing: 'maybe'"),
        ({"num_gpus": "many"}, "num_gpus: 'many' is not a whole number"),
        ({"num_gpus": "100000"}, "num_gpus: got 100000, expected at most 65,536"),
        ({"micro_batch_size": "0"}, "micro_batch_size: '0' is not a whole number of at least 1"),
        ({"micro_batch_size": "nan"}, "micro_batch_size: 'nan'"),
    ],
)
def test_a_row_that_is_not_understood_has_a_reason(change: PublishedRow, reason: str) -> None:
    (prediction,) = predict([EXAMPLE | change], [])
    assert prediction.predicted is None
    assert reason in (prediction.reason or "")


def test_a_row_to_learn_from_needs_a_figure(rows: list[PublishedRow]) -> None:
    for text in ("fast", "-5", "0", "nan", "inf"):
        taught = predict([EXAMPLE], [rows[0], rows[1] | {"tokens_per_second": text}])
        assert taught == predict([EXAMPLE], rows[:1])
    # Rows without one, or of what is not known, teach nothing.
    useless = [rows[0] | {"tokens_per_second": ""}, rows[1] | {"model": "gpt-99"}]
    assert predict([EXAMPLE], useless) == predict([EXAMPLE], [])


@pytest.mark.nightly
def test_the_benchmark_prints_its_tables_and_refuses_a_folder_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[PublishedRow]
) -> None:
    some = [row for row in rows if row["model"] in ("mpt-1b", "mpt-3b") and row["gpu"] == "h100_80gb"]
    with (tmp_path / FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(some)
    assert bench_planner.main(["throughput", "--published", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "one model, planner",
        "one model, constant MFU",
        "next doubling, planner",
        "mpt-3b 32 to 64 GPUs",
        "(in sample)",
    ):
        assert text in printed
    assert bench_planner.main(["throughput", "--published", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_baseline_reads_no_row_of_its_own_group(rows: list[PublishedRow]) -> None:
    changed = [row | ({"tokens_per_second": "1"} if row["model"] == "mpt-7b" else {}) for row in rows]
    pairs = zip(rows, constant_mfu(rows, model_of), constant_mfu(changed, model_of), strict=True)
    assert all(before == after for row, before, after in pairs if row["model"] == "mpt-7b")
    assert median(value for value in constant_mfu(rows, model_of) if value) > 0
