"""Saturated serving, large-scale training and slow links: errors of left-out rows, measured columns, reasons."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType

import numpy as np
import pytest

from engine.planner.check import pretraining, serving, slow_link
from engine.planner.check.rows import PublishedRow, RowPrediction
from engine.planner.check.table import check_files, read_published_rows
from engine.planner.fitting.few import FewConstants, fit_few

PUBLISHED = Path(__file__).parents[4] / "docs" / "measurements" / "published"
FILES = {
    serving: "serving_max_throughput.csv",
    pretraining: "large_scale_training.csv",
    slow_link: "cpu_tensor_parallel_ethernet.csv",
}


def rows_of(module: ModuleType) -> list[PublishedRow]:
    return read_published_rows(PUBLISHED / FILES[module])[0]


def errors(module: ModuleType, left: Callable[[PublishedRow], Hashable]) -> dict[str, list[float]]:
    """Of each model's rows, predicted from the rows with another key."""
    rows = rows_of(module)
    found: dict[str, list[float]] = {}
    for row in rows:
        [one] = module.predict([row], [other for other in rows if left(other) != left(row)])
        found.setdefault(row["model"], []).append(abs(one.predicted / float(row[module.MEASURED]) - 1))
    return found


def test_serving_of_a_left_out_model() -> None:
    found = [error for some in errors(serving, lambda row: row["model"]).values() for error in some]
    assert median(found) < 0.25 and float(np.percentile(found, 90)) < 0.5 and len(serving.SATURATED.priors) <= 6


@pytest.mark.slow
def test_training_of_a_left_out_row() -> None:
    found = errors(pretraining, id)
    dense = [error for model, some in found.items() if model.startswith("llama") for error in some]
    experts = [error for model, some in found.items() if not model.startswith("llama") for error in some]
    assert max(dense) < 0.15 and median(experts) < 0.25 and max(experts) < 0.6
    assert len(pretraining.PRETRAINING.priors) <= 5


def predicted(row: PublishedRow, fit_rows: Sequence[PublishedRow]) -> RowPrediction:
    return slow_link.predict([row], fit_rows)[0]


def test_slow_links_from_fewer_devices_and_from_other_models() -> None:
    rows = rows_of(slow_link)
    small = [row for row in rows if int(row["num_devices"]) <= 2]
    for row in rows:
        measured, one = float(row["token_milliseconds"]), predicted(row, small)
        assert one.predicted is not None and one.interval is not None
        if row["num_devices"] == "4":
            assert one.predicted == pytest.approx(measured, rel=0.2)
        if row["num_devices"] == "8":
            assert one.interval[0] < measured < one.interval[1]
    for model in ("llama-2-7b", "llama-2-13b"):
        [eight] = [row for row in rows if row["model"] == model and row["num_devices"] == "8"]
        others = [row for row in rows if row is not eight]
        four = predicted(eight | {"num_devices": "4"}, others).predicted or 0.0
        assert (predicted(eight, others).predicted or 0.0) > four
        assert predicted(eight, others).predicted == pytest.approx(float(eight["token_milliseconds"]), rel=0.3)


@pytest.mark.parametrize("module", list(FILES), ids=lambda module: module.__name__.rpartition(".")[2])
def test_measured_columns_are_no_inputs(module: ModuleType, tmp_path: Path) -> None:
    path = PUBLISHED / FILES[module]
    rows, kind, _ = read_published_rows(path)
    scrambled = [row | {name: "7" for name in kind.measured} for row in rows]
    copy = tmp_path / "B.csv"
    copy.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in scrambled)]) + "\n")
    for fit_rows in (None, path):
        plain, odd = check_files(path, fit_rows).result.rows, check_files(copy, fit_rows).result.rows
        assert [row.predicted for row in plain] == [row.predicted for row in odd] and all(row.interval for row in plain)


@pytest.mark.parametrize(
    ("module", "changes", "reason"),
    [
        (serving, {"layout": "pp2"}, "layout: 'pp2' is not known; write tp8, or dep8"),
        (serving, {"layout": "tp3", "model": "llama-3-8b"}, "layout: 3 ranks cannot share 32 heads, 8 of keys"),
        (serving, {"layout": "tp0"}, "layout: 'tp0' is not known"),
        (serving, {"precision": "int3"}, "precision: 'int3' is not known"),
        (serving, {"gpu": "rtx4090"}, "do not fit in the 25 GB of rtx4090"),
        (pretraining, {"precision": "fp2"}, "precision: 'fp2' is not known"),
        (pretraining, {"pp": "7"}, "num_gpus: 8 are not a multiple of tp x pp x cp = 7"),
        (pretraining, {"ep": "8"}, "ep: 8 ranks cannot share 1 experts"),
        (pretraining, {"pp": "64", "num_gpus": "64"}, "pp: 64 stages for 32 layers"),
        (pretraining, {"tp": "3", "num_gpus": "24"}, "tp: 3 ranks cannot share 32 heads, 8 of keys and values"),
        (
            pretraining,
            {"pp": "8", "global_batch_size": "", "gradient_accumulation_steps": ""},
            "global_batch_size: missing or empty; the idle time of 8 stages depends on it",
        ),
        (slow_link, {"device": "abacus"}, "device: 'abacus' is not known; use one of: raspberry-pi-4b"),
        (slow_link, {"link": "string"}, "link: 'string' is not known; write its speed first"),
        (slow_link, {"link": "0gbit-ethernet"}, "link: '0gbit-ethernet' is not known"),
        (slow_link, {"link": "1.2.3gbit"}, "link: '1.2.3gbit' is not known"),
        (slow_link, {"weights": "q1"}, "weights: 'q1' is not known"),
        (slow_link, {"model": "t5-small"}, "is not a decoder"),
        (slow_link, {"num_devices": "1e9"}, "num_devices: got 1e9, expected at most 65,536"),
    ],
)
def test_what_cannot_be_predicted_says_why(module: ModuleType, changes: dict[str, str], reason: str) -> None:
    [one] = module.predict([rows_of(module)[0] | changes], [])
    assert one.predicted is None and reason in one.reason


def test_a_batch_is_needed_where_stages_wait_for_it_only() -> None:
    row = rows_of(pretraining)[0] | {"gradient_accumulation_steps": ""}
    alone, in_stages = row | {"pp": "1"}, row | {"pp": "2", "vp": "1"}
    with_batch, without = (pretraining.predict([alone | {"global_batch_size": size}], [])[0] for size in ("128", ""))
    assert with_batch.predicted == without.predicted
    few, many = (pretraining.predict([in_stages | {"global_batch_size": size}], [])[0] for size in ("8", "1024"))
    assert few.predicted and many.predicted and few.predicted < many.predicted


def test_a_fit_moves_from_its_priors_as_far_as_rows_require() -> None:
    model: FewConstants[float] = FewConstants(
        {"rate": (2.0, 0.5)}, lambda size, constants: size * constants["rate"], lambda _: 0.05
    )
    none, some = fit_few(model, [], []), fit_few(model, [1.0, 2.0, 3.0], [3.0, 6.0, 9.0])
    assert none.constants == {"rate": 2.0} and none.predict(4.0)[2] / none.predict(4.0)[0] > 2
    sure = FewConstants({"rate": (2.0, 0.01)}, model.formula, lambda _: 0.01)
    value, low, high = fit_few(sure, [], []).predict(4.0)
    assert (value / low, high / value) == pytest.approx((1.6, 1.6)), "before any row as wide as from a data sheet"
    value, low, high = some.predict(4.0)
    assert value == pytest.approx(12, rel=0.01) and 10 < low < value < high < 14.5
