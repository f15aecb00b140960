"""Figures of different devices: on no curve together, in no ratio, fit or recommendation, and the report says why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.plans.paths import RunPaths
from configs.targets.target import SlurmTarget
from reports.answer import answer
from reports.decisions.recommendation import recommend
from reports.experiments.comparison import optimization, optimization_sentence, optimization_table
from reports.experiments.compression import compression, compression_sentence, compression_table
from reports.experiments.scaling import scaling
from reports.experiments.targets import side_by_side
from reports.reading.devices import load_comparable
from reports.reading.load import StudyResult
from reports.reading.run_figures import run_figures
from reports.render import render_report
from reports.runs.compare import compare
from reports.runs.compare_text import difference_sentence
from reports.tables import failures_table, status_counts
from tests.support.run_folders.made_studies import (
    decoded,
    planned,
    run_in_environments,
    write_measurements,
    write_plan,
    write_record,
)
from tests.support.run_folders.reports import whole_report

A10G, H100 = "NVIDIA A10G", "NVIDIA H100 80GB HBM3"
STRONG = """
workload: {kind: generate, prompts: null, num_prompts: 8, prompt_tokens: 10, batch_size: 1, new_tokens: 8}
experiments: {strong: {kind: strong, grow: dp, to: 4}}
"""
TARGETS = STRONG + "targets: [{name: a}, {name: b}]\n"


def read(folder: Path, text: str, *names: str) -> StudyResult:
    run, _ = run_in_environments(folder, text, [{"device": name} for name in names])
    return load_comparable(run)


def test_a_study_of_one_device_is_as_it_was(tmp_path: Path) -> None:
    study = read(tmp_path, STRONG, A10G, A10G, A10G)
    assert study.devices == () and [each.name for each in study.plan.experiments] == ["strong"]
    assert {result.model for result in study.cells.values()} == {"tiny"}


def test_a_curve_has_points_of_one_device(tmp_path: Path) -> None:
    """1 and 2 ranks on A10Gs, 4 on H100s: no speed-up, efficiency or law over both."""
    study = read(tmp_path, STRONG, A10G, A10G, H100)
    first, second = study.plan.experiments
    assert (first.name, second.name) == (f"strong on {A10G}", f"strong on {H100}")
    assert [point.ranks for point in scaling(study, first).points] == [1, 2]
    alone = scaling(study, second)
    assert [point.ranks for point in alone.points] == [4] and alone.points[0].baseline
    assert len(alone.laws.points) == 1, "nothing to fit"


def test_recommendations_stay_within_a_device(tmp_path: Path) -> None:
    study = read(tmp_path, STRONG, A10G, A10G, H100)
    found = {item.model: (item.best.cell.layout.ranks, item.ratio) for item in recommend(study, ())}
    assert found.keys() == {f"tiny on {A10G}", f"tiny on {H100}"}
    assert found[f"tiny on {A10G}"][0] == 2 and found[f"tiny on {H100}"] == (4, None)


def test_targets_of_different_devices_are_not_side_by_side(tmp_path: Path) -> None:
    same = read(tmp_path / "same", TARGETS, *([A10G] * 6))
    assert [side.target for found in side_by_side(same) for side in found.sides] == ["a", "b"]
    other = read(tmp_path / "other", TARGETS, A10G, A10G, A10G, "cpu", "cpu", "cpu")
    assert {result.cell.target for result in other.cells.values() if result.device == "cpu"} == {"b"}
    assert side_by_side(other) == []


def test_a_variant_is_no_baseline_on_a_device_that_the_baseline_did_not_run_on(tmp_path: Path) -> None:
    """The first variant there was called the baseline, and the gains of the others were over it."""
    variants = "{b2: {workload.batch_size: 2}, b4: {workload.batch_size: 4}}"
    text = STRONG.replace(
        "strong: {kind: strong, grow: dp, to: 4}", f"gain: {{kind: optimization, variants: {variants}}}"
    )
    study = read(tmp_path, text, A10G, H100, H100)
    base, gains = optimization(study, study.plan.experiments[1])
    assert base is None and [(gain.variant, gain.throughput) for gain in gains] == [("b2", None), ("b4", None)]
    told = "The baseline was not measured on this device, so no gain is given."
    assert optimization_sentence(base, gains) == told
    table = optimization_table(base, gains)
    assert [row[0] for row in table.rows] == ["b2", "b4"] and not any("gain" in name for name in table.columns)
    render_report(RunPaths(tmp_path))
    assert told in whole_report(RunPaths(tmp_path))


def test_a_compression_has_rows_on_a_device_that_the_uncompressed_model_did_not_run_on(tmp_path: Path) -> None:
    """A report of such a run ended in a KeyError, as one whose timed cell and answers were of two devices."""
    text = STRONG.replace("strong: {kind: strong, grow: dp, to: 4}", "small: {kind: compression, passes: [int8]}")
    for name, devices in (("base", (A10G, A10G, H100, H100)), ("answers", (A10G, H100, H100, A10G))):
        study = read(tmp_path / name, text, *devices)
        first, second = (compression(study, each) for each in study.plan.experiments)
        assert [row.label for row in first.rows] == ["uncompressed, float32"] and first.base.base
        assert [row.label for row in second.rows] == ["int8, float32"] and not second.base.base
        assert all(row.answers is not None for row in (*first.rows, *second.rows)), "compared across devices"
        told = "The uncompressed model was not measured on this device, so nothing is compared."
        assert compression_sentence(second) == told and second.base.throughput is None
        assert not any("times" in column for column in compression_table(second).columns)
        render_report(RunPaths(tmp_path / name))
        assert told in whole_report(RunPaths(tmp_path / name))


def test_repeats_of_a_cell_on_another_device_are_left_out(tmp_path: Path) -> None:
    run, plan = run_in_environments(tmp_path, STRONG, [{"device": A10G}] * 3)
    cell = next(iter(plan.cells.values()))
    run.environment("cpu").write_text('{"device": "cpu"}')
    write_measurements(run, cell, 9.0, environment="cpu", repeats=2)  # repeats 0 and 1 again, nine times slower
    study = load_comparable(run)
    assert sorted(study.cells[cell.key].completed) == [2, 3, 4, 5]
    assert study.cells[cell.key].pooled == {}
    assert study.other_devices == ("2 repeats of tiny, 1 rank, float32, batch 1, 8 tokens on cpu",)
    many = replace(study, other_devices=tuple(f"2 repeats of cell {number} on cpu" for number in range(1000)))
    told = next(sentence.body for sentence in answer(many, [], []) if "kept apart" in sentence.lead)
    assert told.endswith(
        "2 repeats of cell 0 on cpu, 2 repeats of cell 1 on cpu, 2 repeats of cell 2 on cpu and 997 more."
    )


def test_what_was_measured_on_another_device_is_not_missing(tmp_path: Path) -> None:
    """It was said to have left no record, and `rankwise report` and `run` ended with exit code 3, run after run."""
    run, plan = run_in_environments(tmp_path, STRONG, [{"device": A10G}] * 3)
    cell = next(iter(plan.cells.values()))
    run.environment("cpu").write_text('{"device": "cpu"}')
    write_measurements(run, cell, 9.0, environment="cpu", repeats=2)
    figures: dict[str, Any] = {"peak_memory_bytes": 100 * 2**20}
    write_record(run, cell, 0, measuring_pass="memory", figures=figures, environment="cpu")
    study = load_comparable(run)
    assert study.cells[cell.key].elsewhere == {0, 1, "memory"} and study.cells[cell.key].missing == []
    repeats = sum(plan.repeats.values())
    others = {name: count for name, count in status_counts(study).items() if name != "completed"}
    assert status_counts(study)["completed"] == repeats and others.keys() <= {"memory pass missing"}
    assert others.get("memory pass missing", 0) == len(plan.cells) - 1
    table = failures_table(study)
    assert table is not None and not any(row[1] == study.cells[cell.key].name for row in table.rows)
    assert not any("no record" in sentence.text for sentence in answer(study, ()))


def test_ranks_on_different_gpus_are_a_device_of_their_own(tmp_path: Path) -> None:
    plan = planned(STRONG, repeats=1)
    run = write_plan(tmp_path, plan)
    run.environment("e1").write_text(json.dumps({"device": A10G}))  # rank 0's
    for cell in plan.cells.values():
        by_rank: dict[str, list[Any]] = {"device": [A10G, H100]} if cell.layout.ranks == 2 else {}
        figures = {"num_prompts": 8, "prompt_tokens": 80, "measurement_seconds": 2.0}
        write_record(run, cell, 0, samples=decoded(cell, 1.0), figures=figures, rank_figures=by_rank)
    assert load_comparable(run).devices == (A10G, f"{A10G} and {H100}")


def test_two_runs_whose_ranks_alone_name_their_gpus_are_in_no_ratio(tmp_path: Path) -> None:
    """The environment of a script has no device: each rank's record has its GPU's name."""
    runs = []
    for name, seconds in ((A10G, 1.0), (H100, 0.3), (H100, 0.3)):
        plan = planned(STRONG, repeats=6)
        run = write_plan(tmp_path / f"run-{len(runs)}", plan)
        for cell in plan.cells.values():
            write_measurements(run, cell, seconds / cell.layout.ranks, repeats=6, device=name)
        runs.append(run_figures(load_comparable(run), run.folder.name))
    apart, same = compare(runs[0], runs[1]), compare(runs[1], runs[2])
    assert all(
        cell.why == f"measured on {A10G} in the first, on {H100} in the second: no ratio" for cell in apart.cells
    )
    assert [item.what for item in apart.differences] == ["device"] and apart.comparisons == 0
    assert all(cell.change("throughput") for cell in same.cells) and same.differences == ()


def test_settings_of_a_cluster_that_differ_are_told(tmp_path: Path) -> None:
    """Runs under other modules or launchers were said to be of the same environment and rules."""
    runs = []
    for name, fields in (("a", {}), ("b", {"launcher": "deepspeed"})):
        target = SlurmTarget.model_validate({"name": "gpu", "partition": "gpu", **fields})
        plan = planned(STRONG, repeats=6).model_copy(update={"targets": (target,)})
        run = write_plan(tmp_path / name, plan)
        for cell in plan.cells.values():
            write_measurements(run, cell, 1.0, repeats=6)
        runs.append(run_figures(load_comparable(run), name))
    assert compare(runs[0], runs[0]).rules == ()
    told = difference_sentence(compare(*runs))
    assert "measured by different rules: targets.gpu." in told


@pytest.mark.slow
def test_the_report_says_why_they_are_apart(tmp_path: Path) -> None:
    run, _ = run_in_environments(tmp_path, STRONG, [{"device": A10G}, {"device": A10G}, {"device": H100}])
    summary = render_report(run)
    assert any(
        text.startswith("Figures of 2 devices are kept apart: NVIDIA A10G and NVIDIA H100")
        for text in summary.sentences
    )
    report = whole_report(run)
    assert f"strong on {A10G}: tiny" in report and f"strong on {H100}: tiny" in report


def test_figures_of_the_cores_of_a_machine_with_gpus_are_not_taken_for_its_gpus(tmp_path: Path) -> None:
    """As where the driver of a node had failed: only the environment of the records said so."""
    machine = "targets: [{name: t4, machine: aws/g4dn.xlarge/us-east-1}]\n"
    told = "target t4 names aws/g4dn.xlarge, which has 1 x NVIDIA T4, but the ranks of 3 cells computed on the CPU"
    cases = {
        "cores": (STRONG + machine, "cpu"),
        "gpus": (STRONG + machine, "Tesla T4"),
        "asked": (STRONG + machine.replace("t4,", "t4, device: cpu,"), "cpu"),
        "of cores": (STRONG + machine.replace("g4dn.xlarge", "c7i.xlarge"), "cpu"),
        "unnamed": (STRONG, "cpu"),
    }
    for name, (text, device) in cases.items():
        study = read(tmp_path / name, text, device, device, device)
        leads = [sentence.text for sentence in answer(study, [])]
        assert any(told in each for each in leads) == (name == "cores"), name
