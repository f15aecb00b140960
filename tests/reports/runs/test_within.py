"""Variants of one run against their baseline: verdicts, exit codes, JUnit; and the report's part on own programs."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as xml

import numpy as np
import pytest

from configs.common.base import WrongArgument
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel, RefusedPoint, read_plan
from configs.spec.study import parse_study
from flows.cli.results.compare import compare_runs
from reports.experiments.own_programs import agreement_table, same_losses
from reports.reading.load import load_run
from reports.render import render_report
from reports.runs.compare_export import junit_xml
from reports.runs.within import compare_within
from tests.support.run_folders.made_studies import write_measurements, write_plan, write_record
from tests.support.run_folders.reports import whole_report

STUDY = {
    "study": "gate",
    "workload": {
        "kind": "script", "command": ["t.py", "{params.x}", "{dp}"], "params": {"x": 0}, "tokens_per_step": 64,
    },
    "measuring": {"repeats": 8, "memory": False},
}  # fmt: skip


def made(folder: Path, experiments: dict[str, object], seconds: dict[int, float], loss: float = 0.0) -> RunPaths:
    """A run whose cells take so many seconds a step by `params.x` or dp, with the noise of a machine that drifts."""
    spec = parse_study({**STUDY, "experiments": experiments})
    run = write_plan(folder, expand(spec, [], {}, lambda _: 0))
    random = np.random.default_rng(5)
    for cell in read_plan(run.plan).cells.values():
        work = cell.workload.model_dump()
        kind = int(work["params"]["x"]) or cell.layout.dp - 1
        noise = np.random.default_rng(kind)
        for repeat in range(8):
            drift = 1 + 0.2 * np.sin(repeat)
            steps = seconds[kind] * drift * (1 + 0.004 * noise.normal(size=20))
            losses = np.linspace(3, 2, 20) * (1 + 0.01 * random.normal()) + loss * kind
            samples = {f"{rank}/step_seconds": steps for rank in range(cell.layout.dp)}
            samples |= {f"{rank}/loss": losses for rank in range(cell.layout.dp)}
            write_record(run, cell, repeat, samples=samples, figures={"steps": 20}, num_columns=len(samples))
    return run


GATE = {"gate": {"kind": "optimization", "variants": {"same": {"params.x": 1}, "slow": {"params.x": 2}}}}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_gate_within_one_run(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, junit = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011}), environment.parent / "gate.xml"
    assert compare_runs(run.folder, None, within="gate", junit_file=junit) == 4
    said = capsys.readouterr().out
    assert "slow" in said and "in the same blocks" in said and "history" not in said
    root = xml.parse(junit).getroot()
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    assert compare_runs(run.folder, None, within="gate", threshold_percent=15) == 0
    with pytest.raises(
        WrongArgument, match="no experiment other of kind optimization or sweep in this run; it has: gate"
    ):
        compare_runs(run.folder, None, within="other")
    assert compare_runs(run.folder, run.folder, within="gate") == 2


def test_what_is_said_of_variants_is_theirs_and_not_their_baselines(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others took the CPU during one variant only, whose repeats alone are noisy; its key is what regressed."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.02})
    keys = {int(cell.workload.model_dump()["params"]["x"]): key for key, cell in read_plan(run.plan).cells.items()}
    for repeat in range(8):
        steps = np.full(20, 0.02 * (1 + 0.2 * (repeat % 2)))
        figures = {"steps": 20, "others_cpu_share": 0.5}
        cell = read_plan(run.plan).cells[keys[2]]
        write_record(run, cell, repeat, samples={"0/step_seconds": steps}, figures=figures, num_columns=1)
    assert compare_runs(run.folder, None, within="gate", json_wanted=True) == 4
    told = json.loads(capsys.readouterr().out)
    assert told["regressions"] == [keys[2]] and [cell["key"] for cell in told["cells"]] == [keys[1], keys[2]]
    junit = environment.parent / "gate.xml"
    assert compare_runs(run.folder, None, within="gate", junit_file=junit) == 4
    assert f"key: {keys[2]}" in junit.read_text() and keys[0] not in junit.read_text()
    said = capsys.readouterr().out
    assert "variants of gate other processes took over 10 %" in said and "t.py, x 2 (50 %)" in said
    assert "baseline of gate other processes took" not in said
    comparison = compare_within(load_run(run), "r", "gate", 0.05)
    assert len(comparison.matched(comparison.first)) == 1 and len(comparison.matched(comparison.second)) == 2


def test_other_processes_do_not_hide_a_slower_script(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the steps last several times as long, in each repeat otherwise: only fast steps can tell."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    random = np.random.default_rng(3)
    for cell in read_plan(run.plan).cells.values():
        kind = int(cell.workload.model_dump()["params"]["x"])
        for repeat in range(8):
            steps = (0.011 if kind == 2 else 0.01) * (1 + 0.01 * random.random(60))
            steps[random.random(60) < 0.5] *= random.uniform(1, 8)
            write_record(run, cell, repeat, samples={"0/step_seconds": steps}, figures={"steps": 60}, num_columns=1)
    assert compare_runs(run.folder, None, within="gate") == 0
    assert "2 cannot be told" in capsys.readouterr().out
    assert compare_runs(run.folder, None, within="gate", undisturbed=True) == 4
    assert "tokens/s undisturbed" in capsys.readouterr().out
    assert compare_runs(run.folder, run.folder, undisturbed=True) == 2


@pytest.mark.parametrize(("variants", "repeats", "needed"), [(1, 8, 9), (20, 7, 10)])
def test_noise_is_told_by_the_repeats_that_would_settle_it(
    environment: Path, capsys: pytest.CaptureFixture[str], variants: int, repeats: int, needed: int
) -> None:
    """One variant: an interval too wide. Twenty: no interval, which 10 pairs would give and 7 do not."""
    steps = {f"v{place}": {"params.x": place} for place in range(1, variants + 1)}
    run = made(environment, {"gate": {"kind": "optimization", "variants": steps}}, dict.fromkeys(range(21), 0.01))
    for cell in read_plan(run.plan).cells.values():
        place = int(cell.workload.model_dump()["params"]["x"])
        for repeat in range(8):
            if repeat >= repeats:
                run.record(cell.key, "timed", repeat, 1).unlink()
                continue
            times = 0.01 * (1 + 0.3 * ((repeat * 7 + place * 3) % 5))
            write_record(run, cell, repeat, samples={"0/step_seconds": np.full(20, times)}, figures={"steps": 20})
    assert compare_runs(run.folder, None, within="gate") == 0
    ending = "would settle it" if variants == 1 else "would give an interval"
    told = re.search(rf"cannot tell; (?:about )?(\d+) repeats {ending}, there are (\d+)", capsys.readouterr().out)
    assert told is not None and int(told[2]) == repeats and int(told[1]) >= needed
    assert variants == 1 or int(told[1]) == needed


def test_an_experiment_without_points_closes_no_gate_and_opens_none(environment: Path) -> None:
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    plan = read_plan(run.plan)
    refused = RefusedPoint(label="same", values={"variant": "same"}, reason="not in this version")
    (gate,) = plan.experiments
    empty = plan.model_copy(update={"experiments": (gate.model_copy(update={"points": (), "refused": (refused,)}),)})
    run.plan.write_text(empty.model_dump_json())
    with pytest.raises(ValueError, match="experiment gate of this run has no point beside its baseline"):
        compare_runs(run.folder, None, within="gate")


def test_variants_on_another_device_than_their_baseline_are_no_traceback(environment: Path) -> None:
    """Each device has a part of the experiment: that of the variants has no baseline."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    for path in run.records.glob("*/*.json"):
        record = json.loads(path.read_text())
        record["figures"]["device"] = "A10G" if record["cell"]["workload"]["params"]["x"] == 0 else "H100"
        path.write_text(json.dumps(record))
    with pytest.raises(WrongArgument, match="it has: gate on A10G, gate on H100"):
        compare_runs(run.folder, None, within="gate")
    for device in ("A10G", "H100"):
        with pytest.raises(ValueError, match="has no point beside its baseline to compare"):
            compare_runs(run.folder, None, within=f"gate on {device}")


def test_variants_measured_in_another_environment_are_not_said_to_share_it(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went on with another version of torch has the variants of it and the baseline of the old one."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    assert compare_runs(run.folder, None, within="gate") == 4
    assert "Both were measured in the same environment." in capsys.readouterr().out
    run.environment("e2").write_text('{"python": "3.11.2", "commit": "abc123", "torch": "2.11"}')
    for path in run.records.glob("*/*.json"):
        record = json.loads(path.read_text())
        record["environment"] = "e1" if record["cell"]["workload"]["params"]["x"] == 0 else "e2"
        path.write_text(json.dumps(record))
    assert compare_runs(run.folder, None, within="gate") == 4
    said = capsys.readouterr().out
    assert "The environments differ in torch.\n" in said and "same environment" not in said


def test_a_start_up_is_no_speed_of_undisturbed_steps(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A variant that compiles during its first steps was called several times as fast, though each step is slower."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    random = np.random.default_rng(3)
    for cell in read_plan(run.plan).cells.values():
        kind = int(cell.workload.model_dump()["params"]["x"])
        for repeat in range(8):
            steps = (0.011 if kind == 2 else 0.01) * (1 + 0.01 * random.random(60))
            steps[: 4 * kind] *= 20
            write_record(run, cell, repeat, samples={"0/step_seconds": steps}, figures={"steps": 60}, num_columns=1)
    assert compare_runs(run.folder, None, within="gate", undisturbed=True, json_wanted=True) == 4
    same, slow = json.loads(capsys.readouterr().out)["cells"]
    assert same["figures"]["throughput"]["ratio"] == pytest.approx(1, rel=0.01)
    assert slow["figures"]["throughput"]["ratio"] == pytest.approx(1 / 1.1, rel=0.01)
    assert same["unit"] == "tokens/s undisturbed", "no throughput that any other output has"


def test_few_steps_show_no_undisturbed_ones(environment: Path) -> None:
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    cell = next(iter(read_plan(run.plan).cells.values()))
    write_record(run, cell, 0, samples={"0/step_seconds": np.full(5, 0.01)}, figures={"steps": 5}, num_columns=1)
    with pytest.raises(ValueError, match=r"--undisturbed: .*: got 5 steps a repeat, expected at least 20"):
        compare_runs(run.folder, None, within="gate", undisturbed=True)


def test_steps_of_a_coarse_clock_show_no_undisturbed_ones(environment: Path) -> None:
    """Steps of less than a clock's tick last 0 s or a tick: the fastest tenth of them says nothing."""
    run = made(environment, GATE, {0: 0.01, 1: 0.01, 2: 0.011})
    cell = next(iter(read_plan(run.plan).cells.values()))
    steps = np.tile([0.0, 0.0, 1.0], 10)
    write_record(run, cell, 0, samples={"0/step_seconds": steps}, figures={"steps": 30}, num_columns=1)
    with pytest.raises(ValueError, match=r"--undisturbed: .*: the fastest tenth of the steps took 0 s"):
        compare_runs(run.folder, None, within="gate", undisturbed=True)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "agrees"), [(0.0, "yes"), (0.5, "no")])
def test_loss_curves_are_judged_by_the_noise_of_repeats(environment: Path, loss: float, agrees: str) -> None:
    strong = {"strong": {"kind": "strong", "grow": "dp", "to": 2}}
    run = made(environment, strong, {0: 0.01, 1: 0.006}, loss)
    found = same_losses(load_run(run))
    assert len(found) == 1 and agreement_table(found[0]).rows[0][-1] == agrees
    render_report(run)
    text = whole_report(run)
    assert "Your own program" in text and "Loss curves" in text


def test_variants_of_several_models_are_named_with_their_model(tmp_path: Path) -> None:
    """Both models' variants were called `half`, in the table and as cases of JUnit, which tell nothing apart then."""
    models = [PlannedModel(name=name, identity=f"folder:{name}", manifest="") for name in ("small", "large")]
    spec = parse_study(
        {
            "study": "two",
            "models": [{"id": "./small"}, {"id": "./large"}],
            "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 3, "num_prompts": 4, "batch_size": 4},
            "measuring": {"repeats": 8},
            "experiments": {"gate": {"kind": "optimization", "variants": {"half": {"dtype": "bfloat16"}}}},
        }
    )
    run = write_plan(tmp_path / "run", expand(spec, models, {}, lambda _: 0))
    for cell in read_plan(run.plan).cells.values():
        write_measurements(
            run, cell, 2.0 if cell.dtype == "bfloat16" and cell.model == "folder:large" else 1.0, repeats=8
        )
    comparison = compare_within(load_run(run), "run", "gate", 0.05)
    assert [(cell.first.title, str(cell.verdict)) for cell in comparison.cells] == [
        ("small, half", "same"),
        ("large, half", "worse"),
    ]
    cases = xml.fromstring(junit_xml(comparison).partition("\n")[2]).iter("testcase")
    assert [case.get("name") for case in cases] == ["small, half", "large, half"]
