"""`rankwise plan STUDY`: the answer first, the tables, JSON and CSV, other machines, and options that are wrong."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.planner.cells import made_up_calibration, time_planning
from configs.common.printable import duration_text
from configs.hardware.calibration import calibration_path
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError, load_study
from configs.workloads.noop import NoopWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.local import this_fingerprint
from flows.cli.plan.model import run_plan
from flows.cli.plan.planned_study import planned
from flows.cli.plan.request import PlanRequest
from flows.cli.plan.study import answer, as_data, plan_study
from tasks.planning.study_cost import (
    LAUNCH_SECONDS,
    RUN_SECONDS,
    TRANSFORMERS_SECONDS,
    launches_cost,
    measurement_seconds,
    study_cost,
)
from tests.support.run_folders.predicted_plans import measured_run
from tests.support.run_folders.priced_runs import write_run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def calibrated(cache: Path) -> Path:
    path = calibration_path(cache, this_fingerprint())
    path.parent.mkdir(parents=True)
    path.write_text(made_up_calibration().model_dump_json())
    return cache


def write(folder: Path, **changes: Any) -> Path:
    """A sweep of three batch sizes of a small model."""
    data: dict[str, Any] = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0"}],
        "workload": {"kind": "generate", "prompt_tokens": 16, "new_tokens": 4},
        "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2, 4]}}},
        "measuring": {"repeats": 3},
    }
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_first_line_is_the_answer(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_study(write(tmp_path), []) == 0
    lines = said(capsys)
    assert lines[0].startswith("s: 3 cells; llama-1m predicted fastest at 1 rank, float32, batch 4, 4 tokens: ")
    assert "; all fit; measuring takes about " in lines[0] and "in 4 launches." in lines[0]
    assert "measured here" in lines[1]
    table = [line for line in lines if line.startswith("batch_size")]
    assert len(table) == 3 and all("tokens/s" in line and "MiB" in line and "yes" in line for line in table)


def test_of_several_targets_the_answer_names_the_fastest(cache: Path, tmp_path: Path) -> None:
    """`predicted fastest at 1 rank, float32, batch 4`, and that on which of two machines?"""
    rented = {"name": "t4", "kind": "slurm", "machine": "aws/g4dn.xlarge", "gpus_per_node": 1}
    found = planned(load_study(write(tmp_path, targets=[{"name": "here"}, rented])), tmp_path, cache)
    assert "llama-1m predicted fastest at 1 rank, float32, batch 4, 4 tokens on t4: " in answer(found)
    assert {cell["target"] for cell in as_data(found)["cells"].values()} == {"here", "t4"}


def test_what_does_not_fit_is_not_the_fastest(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch beyond the memory was `predicted fastest`, and `nothing fits` ended with 0."""
    over = {"batch_size": [1, 2, 512]}
    changes: dict[str, Any] = {"models": [{"id": "huggyllama/llama-7b"}], "dtype": "bfloat16"}
    study = write(tmp_path, **changes, experiments={"batch": {"kind": "sweep", "over": over}})
    long = ["workload.prompt_tokens=1500"]
    assert plan_study(study, long, machine="l40s", top=2) == 0
    lines = said(capsys)
    assert "predicted fastest at 1 rank, bfloat16, batch 2, " in lines[0] and "; 1 does not fit; " in lines[0]
    assert [line.split("  ")[0] for line in lines if line.startswith("batch_size")] == ["batch_size 2", "batch_size 1"]
    assert plan_study(study, [*long, "dtype=float32"], machine="t4", as_json=True) == 3
    assert "fastest" not in json.loads(capsys.readouterr().out)["answer"]


def test_without_a_calibration_it_says_how_to_get_one(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_study(write(tmp_path), [])
    text = capsys.readouterr().out
    assert "rough estimate" in text and "rankwise doctor --calibrate" in text
    noop = write(tmp_path, workload={"kind": "noop", "seconds": 0.1}, models=[],
                 experiments={"a": {"kind": "sweep", "over": {"items": [1, 2]}}})  # fmt: skip
    plan_study(noop, [])
    text = capsys.readouterr().out
    assert "items/s" in text and "calibrate" not in text


def test_many_cells_are_cut_to_the_fastest_and_all_are_in_the_csv(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = {"batch_size": list(range(1, 31))}
    study = write(tmp_path, experiments={"batch": {"kind": "sweep", "over": over}})
    plan_study(study, [], top=5, output=tmp_path / "cells.csv")
    lines = said(capsys)
    assert "batch: llama-1m: 5 predicted fastest of 30" in lines
    assert sum(line.startswith("batch_size") for line in lines) == 5
    assert lines[-1] == f"30 cells written to {tmp_path / 'cells.csv'}"
    rows = list(csv.DictReader((tmp_path / "cells.csv").read_text().splitlines()))
    assert len(rows) == 30 and rows[0]["label"] == "batch_size 1"
    low, value, high = (float(rows[3][name]) for name in ("throughput_low", "tokens_per_second", "throughput_high"))
    assert low < value < high


def test_the_time_of_a_training_step_is_not_called_ttft(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = {"kind": "train", "global_batch_size": 8, "sequence_length": 32}
    plan_study(write(tmp_path, workload=work, experiments={"s": {"kind": "strong", "grow": "dp", "to": 1}}), [])
    [header] = [line for line in said(capsys) if "low to high" in line]
    assert "step" in header and "TTFT" not in header


def test_a_name_is_no_formula_in_the_csv(calibrated: Path, tmp_path: Path) -> None:
    study = write(tmp_path, experiments={"=1+1": {"kind": "sweep", "over": {"batch_size": [1]}}})
    plan_study(study, [], output=tmp_path / "cells.csv")
    (row,) = csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())
    assert row["experiment"] == "'=1+1"


def test_json_has_every_cell(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_study(write(tmp_path), [], as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["launches"] == 4 and data["measurements"] == 12 and data["usd"] is None
    assert {cell["label"] for cell in data["cells"].values()} == {
        f"1 rank, float32, batch {n}, 4 tokens" for n in (1, 2, 4)
    }
    assert data["experiments"][0]["points"][0]["cell"] in data["cells"]


def test_another_machine_may_have_more_ranks_and_has_its_price(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write(tmp_path, experiments={"strong": {"kind": "strong", "grow": "dp", "to": 16}})
    plan_study(study, [], machine="aws/p5.48xlarge")
    text = capsys.readouterr().out
    assert "16 ranks" in text and "H100" in text and "$" in text.splitlines()[0]
    named = write(tmp_path, targets=[{"machine": "aws/c7i.4xlarge/us-east-1"}])
    plan_study(named, [])
    assert "estimate, not measured" in capsys.readouterr().out


def test_a_price_of_the_users_catalog_is_that_of_a_targets_machine(cache: Path, tmp_path: Path) -> None:
    """Also where the shipped catalog has one; what the study itself says comes first."""
    own = tmp_path / "own.yaml"
    spot = "{machine: aws/c7i.4xlarge, market: spot, usd_per_hour: 1}"
    own.write_text(f"prices: [{spot}, {{machine: aws/c7i.4xlarge, usd_per_hour: 40, source: contract 12}}]")
    for target, usd in (({}, 40.0), ({"price_usd_per_hour": 2.5}, 2.5)):
        named = load_study(write(tmp_path, targets=[{"machine": "aws/c7i.4xlarge/us-east-1", **target}]))
        price = planned(named, tmp_path, cache, own=own).plan.prices["local"].price
        assert price is not None and price.usd_per_hour == usd


def test_an_accelerator_alone_has_no_price(cache: Path, tmp_path: Path) -> None:
    found = planned(load_study(write(tmp_path)), tmp_path, cache, machine="t4")
    assert all(each.usd_per_million_tokens is None for each in found.plan.predictions.values())
    assert found.cost.usd is None


def test_a_slower_past_is_learnt_from_a_folder(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = planned(load_study(write(tmp_path)), tmp_path, calibrated)
    key = next(iter(before.plan.cells))
    rate = before.said(key).tokens_per_second
    assert rate is not None
    one = before.plan.model_copy(
        update={"cells": {key: before.plan.cells[key]}, "repeats": {key: 3}, "experiments": ()}
    )
    measured_run(tmp_path / "runs" / "old", one, rate / 1.5)
    write_run(tmp_path / "runs" / "empty", one)
    assert plan_study(write(tmp_path), [], learn_from=str(tmp_path / "runs" / "*")) == 0
    line = next(line for line in said(capsys) if "corrected" in line)
    assert "time x 1." in line and "from 1 record of this machine" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "h100-80gbx"}, "--accelerator: .*h100-80gbx"),
        ({"machine": "aws/nothing"}, "--accelerator: .*aws/nothing"),
        ({"learn_from": "/nowhere/*"}, "--learn-from /nowhere/.*: no run folder"),
    ],
)
def test_wrong_options_are_named(cache: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_study(write(tmp_path), [], **options)


def test_a_wrong_study_names_its_fields(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="models"):
        plan_study(write(tmp_path, models=[]), [])


def test_a_model_of_a_hub_needs_no_network_and_no_revision(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_study(write(tmp_path, models=[{"id": "meta-llama/Llama-2-7b-hf"}]), [])
    assert "batch_size 4      1  " in (text := capsys.readouterr().out) and "without a prediction" not in text
    plan_study(write(tmp_path, models=[{"id": "nobody/knows-this"}]), [])
    first = said(capsys)[0]
    assert "3 without a prediction; how long measuring takes is unknown; starting its 4 launches alone takes" in first
    assert "measuring takes about" not in first  # it named 20 s for a study of hours, "excluding" all of its cells


def test_measurements_are_as_long_as_the_rules_ask() -> None:
    rules = Measuring(warmup=1, min_passes=2, min_seconds=1.0)
    assert measurement_seconds(Cell(workload=NoopWorkload(seconds=0.5, items=3)), Prediction(), rules) == 1.5
    train = Cell(model="m", workload=TrainWorkload())
    assert measurement_seconds(train, Prediction(step_seconds=0.3), rules) == pytest.approx(0.3 * (1 + 4))
    fixed = Cell(model="m", workload=TrainWorkload(steps=7))
    assert measurement_seconds(fixed, Prediction(step_seconds=0.3), rules) == pytest.approx(2.1)
    assert measurement_seconds(train, Prediction(), rules) is None
    work = {"kind": "generate", "new_tokens": 10, "batch_size": 2, "num_prompts": 4}
    slow = Cell.model_validate({"model": "m", "workload": work})
    assert measurement_seconds(slow, Prediction(tokens_per_second=40.0), rules) == pytest.approx(3.0)


def test_a_study_costs_its_launches_too(calibrated: Path, tmp_path: Path) -> None:
    study = load_study(write(tmp_path), ["targets=[{price_usd_per_hour: 3.6}]"])
    found = planned(study, tmp_path, calibrated)
    assert found.cost.seconds > found.cost.launches * LAUNCH_SECONDS
    assert found.cost.usd == pytest.approx(found.cost.seconds * 0.001)
    alone = found.plan.model_copy(update={"pack": False})
    assert study_cost(alone).launches == 3 * 3 + 3


@pytest.mark.parametrize(
    ("changes", "launches", "measurements"),
    [
        # No memory pass of a server; each measurement under nsys starts a process of its own.
        ({"workload": {"kind": "serve", "rate": 1.0, "duration_seconds": 5}, "over": {"rate": [1.0, 2.0]}}, 3, 6),
        ({"measuring": {"repeats": 3, "profiler": "nsys", "profile": True}}, 3 + 1 + 1 + 3, 9 + 3 + 3 + 3),
    ],
)
def test_a_study_is_said_to_take_the_launches_that_a_run_makes(
    cache: Path, tmp_path: Path, changes: dict[str, Any], launches: int, measurements: int
) -> None:
    from flows.cli.run import _launches

    over = changes.pop("over", None)
    changes |= {"experiments": {"s": {"kind": "load", "over": over}}} if over else {}
    found = planned(load_study(write(tmp_path, **{"measuring": {"repeats": 3}, **changes})), tmp_path, cache)
    assert (found.cost.launches, found.cost.measurements) == (launches, measurements)
    assert len(_launches(found.plan)) == launches
    summed = launches_cost(found.plan, _launches(found.plan))
    assert (summed.launches, summed.measurements) == (launches, measurements)
    assert summed.seconds == pytest.approx(found.cost.seconds - RUN_SECONDS)


def test_launches_that_are_left_cost_less_than_all(calibrated: Path, tmp_path: Path) -> None:
    from flows.cli.run import _launches

    study = load_study(write(tmp_path), ["targets=[{price_usd_per_hour: 3.6}]"])
    plan = planned(study, tmp_path, calibrated).plan
    all_of_them, one = launches_cost(plan, _launches(plan)), launches_cost(plan, _launches(plan)[:1])
    assert one.launches == 1 and one.measurements == 3 and one.seconds < all_of_them.seconds / 3
    assert one.usd == pytest.approx(one.seconds * 0.001) and one.node_seconds == one.seconds
    assert launches_cost(plan.model_copy(update={"predictions": {}}), _launches(plan)).nothing_known


def test_cells_without_a_prediction_may_have_a_known_duration(cache: Path, tmp_path: Path) -> None:
    """Load on a server is not predicted, and lasts as long as the study says."""
    work = {"kind": "serve", "rate": 1.0, "duration_seconds": 5}
    load = {"kind": "load", "objectives": {"ttft_seconds": 1.0}}
    searched = load | {"find": "max_rate"}
    found = planned(load_study(write(tmp_path, workload=work, experiments={"s": load, "m": searched})), tmp_path, cache)
    told = answer(found)
    assert "; 2 without a prediction; " in told and told.endswith(", excluding 1 cell of unknown duration.")


def test_transformers_is_imported_once_in_a_launch_of_several_cells(calibrated: Path, tmp_path: Path) -> None:
    plan = planned(load_study(write(tmp_path)), tmp_path, calibrated).plan
    cells = {key: cell.model_copy(update={"engine": "transformers"}) for key, cell in plan.cells.items()}
    ours, theirs = study_cost(plan), study_cost(plan.model_copy(update={"cells": cells}))
    assert len(cells) == 3 and ours.launches == theirs.launches == 3 + 1
    assert theirs.seconds - ours.seconds == pytest.approx(3 * TRANSFORMERS_SECONDS)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (116, "116 s"), (120, "2 min"), (5400, "90 min"), (8640, "2.4 h"), (1e6, "12 days")],
)
def test_durations_are_in_the_unit_that_a_person_would_choose(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_it_starts_without_torch_or_prefect(calibrated: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flows.cli.plan.study import plan_study; "
        f"plan_study(Path({str(write(tmp_path))!r}), []); "
        "print('loaded', *sorted({'torch', 'prefect', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded"


@pytest.mark.slow
def test_the_benchmark_times_a_small_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_planning(cells=500, times=1, limit_seconds=3600) == 0
    lines = said(capsys)
    assert len(lines) == 2 and all("rankwise plan, 500 cells" in line for line in lines)
    assert time_planning(cells=50, times=1, limit_seconds=0) == 1


def test_layouts_are_ranked_on_the_machine_that_is_named(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, workload={"kind": "train", "global_batch_size": 8}, layouts="auto", experiments={})
    own = tmp_path / "own.yaml"
    own.write_text(
        "source: us\nas_of: 2026-11-01\ninstances:\n  lab/rack-7: {accelerator: h100-80gb, accelerators: 4, vcpus: 64, "
        "host_memory_bytes: 1e12}\nprices:\n  - {machine: 'lab/*', usd_per_hour: 9.5}\n"
    )
    assert plan_study(path, [], as_json=True, machine="lab/rack-7", own=own) == 0
    found = json.loads(capsys.readouterr().out)
    candidates = found["experiments"][0]["candidates"]
    assert candidates and all("H100" in each["basis"] for each in candidates if each["tokens_per_second"])
    measured = [each for each in candidates if each["cell"]]
    assert all(each["cell"] or each["not_measured"] for each in candidates)
    first = measured[0]
    assert found["cells"][first["cell"]]["tokens_per_second"] == pytest.approx(first["tokens_per_second"])
    assert found["cells"][first["cell"]]["usd_per_million_tokens"] is not None
    assert any(each["label"].startswith("dp=4 ") for each in candidates)  # those of the rack, not of this machine
    plan_study(path, [], machine="lab/rack-7", own=own)
    lines = said(capsys)
    assert any(line.startswith(f"ranking of {len(candidates)} layouts") for line in lines)
    assert any("  no: " in line for line in lines) == any(not each["cell"] for each in candidates)


def test_runs_that_teach_nothing_say_so(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path, experiments={"batch": {"kind": "sweep", "over": {"batch_size": [1]}}})
    plan = planned(load_study(one, []), tmp_path, calibrated).plan
    measured_run(tmp_path / "runs" / "a", plan, 100.0, cpu_model="another")
    pattern = str(tmp_path / "runs" / "*")
    plan_study(write(tmp_path), [], learn_from=pattern)
    assert "no correction: 0 of 1 cell usable (other hardware" in capsys.readouterr().out
    plan_study(write(tmp_path), [], learn_from=pattern, machine="h100-80gb")
    assert "runs of this machine do not apply to another machine" in capsys.readouterr().out


def test_a_models_plan_is_corrected_by_runs_on_its_accelerator(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = {"one": {"kind": "sweep", "over": {"dtype": ["bfloat16"]}}}
    study = write(tmp_path, experiments=experiments)
    expected = planned(load_study(study), tmp_path, calibrated, machine="h100-80gb")
    (key,) = expected.plan.cells
    rate = expected.said(key).tokens_per_second
    assert rate is not None
    measured_run(
        tmp_path / "runs" / "old", expected.plan, rate / 3, device="NVIDIA H100 80GB HBM3", torch="2.9.0+cu128"
    )
    pattern = str(tmp_path / "runs" / "*")
    request = PlanRequest(
        model="synthetic:llama-1m@0", mode="inference", gpus=1, batch_size=4, sequence_length=16, new_tokens=4,
        as_json=True,
    )  # fmt: skip

    def answer(**changes: Any) -> dict[str, Any]:
        assert run_plan(replace(request, **changes)) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
        return found

    plain = answer(accelerator="h100-80gb")
    corrected = answer(accelerator="h100-80gb", learn_from=pattern)
    times = corrected["batch_seconds"] / plain["batch_seconds"]
    assert 1.2 < times < 3.0, "one record of three times as long"
    assert corrected["correction"] == f"time x {times:.2f}, from 1 record of h100-80gb" and "correction" not in plain
    assert corrected["tokens_per_second"] == pytest.approx(plain["tokens_per_second"] / times)
    assert corrected["usd_per_million_tokens"] == pytest.approx(plain["usd_per_million_tokens"] * times)
    assert corrected["predicted_time"]["low"] < corrected["batch_seconds"] < corrected["predicted_time"]["high"]
    other = answer(accelerator="a100-80gb", learn_from=pattern)
    assert other["correction"].startswith("no correction: 0 cells of these runs are of a100-80gb")
    cpu = answer(hardware=("cpu",), learn_from=pattern)
    assert cpu["correction"].startswith("no correction: runs do not apply to")


def test_one_cell_that_does_not_fit_is_told_in_the_singular(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = write(tmp_path, experiments={"a": {"kind": "sweep", "over": {"batch_size": [10_000_000]}}})
    plan_study(large, [])
    first = said(capsys)[0]
    assert first.startswith("s: 1 cell; ") and "1 does not fit" in first
