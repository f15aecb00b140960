"""Variants of one run against their baseline: verdicts, exit codes, JUnit; and the report's part on own programs."""

from pathlib import Path
from xml.etree import ElementTree as xml

import numpy as np
import pytest

from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import read_plan
from configs.spec.study import parse_study
from flows.cli.results.compare import compare_runs
from reports.experiments.own_programs import agreement_table, same_losses
from reports.reading.load import load_run
from reports.render import render_report
from tests.support.made_studies import write_plan, write_record
from tests.support.reports import whole_report

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
    with pytest.raises(ValueError, match="no experiment other of kind optimization or sweep in this run; it has: gate"):
        compare_runs(run.folder, None, within="other")
    assert compare_runs(run.folder, run.folder, within="gate") == 2


@pytest.mark.parametrize(("loss", "agrees"), [(0.0, "yes"), (0.5, "no")])
def test_loss_curves_are_judged_by_the_noise_of_repeats(environment: Path, loss: float, agrees: str) -> None:
    strong = {"strong": {"kind": "strong", "grow": "dp", "to": 2}}
    run = made(environment, strong, {0: 0.01, 1: 0.006}, loss)
    found = same_losses(load_run(run))
    assert len(found) == 1 and agreement_table(found[0]).rows[0][-1] == agrees
    render_report(run)
    text = whole_report(run)
    assert "Your own program" in text and "Loss curves" in text
