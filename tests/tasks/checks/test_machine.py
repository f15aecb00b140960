"""What machines have against what a plan needs: this machine's own, and what a study of a cluster asks of none here."""

from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.measuring import LIVE_LIBRARIES
from configs.spec.study import StudyError, parse_study
from configs.spec.target import LocalTarget, SlurmTarget
from slurm.schedulers.partitions import ClusterError, Need
from tasks.checks.machine import _needs, check_clusters, check_environment, check_resources, machine_fingerprint
from tasks.planning.inputs import make_plan, planned_model
from tasks.planning.predictions import with_predictions

LAB = {"kind": "slurm", "name": "lab", "nodes": 2, "ranks_per_node": 64, "cores_per_rank": 2}


def plan_of(*targets: dict[str, Any], **changes: Any) -> Plan:
    data: dict[str, Any] = {
        "study": "s",
        "workload": {"kind": "noop"},
        "targets": list(targets),
        "experiments": {"grid": {"kind": "sweep", "over": {"dp": [1, 128]}}},
    }
    return expand(parse_study(data | changes), [], {}, lambda workload: 1)


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_slurm")
def test_a_study_of_a_cluster_is_checked_where_there_is_none(tmp_path: Path) -> None:
    """More ranks than this machine has cores, a profiler that is not here: the nodes may have both."""
    check_resources(plan_of(LAB, measuring={"profiler": "nsys"}), tmp_path)


@pytest.mark.usefixtures("no_slurm")
def test_to_run_it_the_scheduler_must_answer() -> None:
    with pytest.raises(StudyError, match=r"^targets\[1\]: `scontrol`: not found on PATH\. Submit from"):
        check_clusters(plan_of({"name": "here"}, LAB))
    with pytest.raises(ClusterError):
        machine_fingerprint([SlurmTarget.model_validate(LAB)])
    check_clusters(plan_of({"name": "here"}))


def test_live_streams_name_the_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIVE_LIBRARIES, "wandb", ("wandb", "no-such-library"))
    here, live = {"name": "here"}, {"live": ["tensorboard", "wandb"]}
    one = {"grid": {"kind": "sweep", "over": {"dp": [1]}}}
    with pytest.raises(StudyError, match=r"^measuring.live: wandb requires no-such-library: pip install wandb no-such"):
        check_resources(plan_of(here, measuring=live, experiments=one), tmp_path)
    check_resources(plan_of(here, measuring={"live": ["tensorboard"]}, experiments=one), tmp_path)
    check_resources(plan_of(LAB, measuring=live, experiments=one), tmp_path)


def test_cells_of_this_machine_are_still_held_against_its_cores(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        check_resources(plan_of({"name": "here"}, LAB), tmp_path)
    assert next(problem for problem in caught.value.problems if "128 ranks" in problem).startswith(
        "experiments.grid on here at dp 128: 128 ranks, but target here holds "
    )
    assert not any("target lab" in problem for problem in caught.value.problems)


def test_what_the_cells_of_a_cluster_need(tmp_path: Path) -> None:
    plan = plan_of(LAB)
    target = plan.targets[0]
    assert isinstance(target, SlurmTarget)
    assert _needs(plan, target) == [Need(nodes=1, cores=2), Need(nodes=2, cores=128)]


def test_the_environment_of_a_local_run_is_this_machine(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    facts = check_environment(run, accept=False, targets=[LocalTarget()])
    assert {"host", "cores", "memory_gib", "cpu_model", "python", "torch"} <= facts.keys()
    assert machine_fingerprint([LocalTarget()]) == facts


def study_of_layouts(folder: Path, **target: Any) -> Plan:
    """Planned as a run would be: layouts ranked on the nodes of a cluster."""
    config = ARCHITECTURES["llama-1m"]
    assert config["num_attention_heads"] == 4
    study = parse_study(
        {
            "study": "s",
            "models": [{"id": "synthetic:llama-1m@0"}],
            "workload": {"kind": "generate", "num_prompts": 4, "batch_size": 4, "new_tokens": 4},
            "targets": [LAB | {"ranks_per_node": 2, "cores_per_rank": 1} | target],
            "layouts": "auto",
        }
    )
    cache = folder / "cache"
    models = [planned_model(spec, position, cache, folder) for position, spec in enumerate(study.models)]
    plan = make_plan(study, models, {}, folder, cache)
    return with_predictions(plan, folder, cache)


def test_layouts_are_ranked_on_the_machine_that_a_cluster_names(tmp_path: Path) -> None:
    plan = study_of_layouts(tmp_path, machine="aws/p4d.24xlarge", price_usd_per_hour=30.0)
    (experiment,) = plan.experiments
    assert max(candidate.layout.ranks for candidate in experiment.candidates) == 4
    nodes = {cell.layout.ranks: cell.nodes for cell in plan.cells.values()}
    assert all(count == max(1, ranks // 2) for ranks, count in nodes.items())
    for key, cell in plan.cells.items():
        said = plan.predictions[key]
        assert said.tokens_per_second is not None and said.usd_per_million_tokens is not None
        hourly = said.usd_per_million_tokens * said.tokens_per_second * 3600 / 1e6
        assert hourly == pytest.approx(30.0 * cell.nodes) == pytest.approx(plan.usd_per_hour_of(cell))


def test_without_a_machine_no_layouts_can_be_ranked(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        study_of_layouts(tmp_path)
    assert caught.value.problems == [
        "layouts: auto: target lab: no predictions, because its nodes are unknown. Set `machine` to an instance of the "
        "catalog, such as `aws/p4d.24xlarge`, or set `on_this_machine: true` for a lab, or list the "
        "layouts in a sweep"
    ]


def test_of_a_cluster_nothing_is_predicted_from_this_machine(tmp_path: Path) -> None:
    plan = with_predictions(plan_of(LAB), tmp_path, tmp_path / "cache")
    reasons = {said.reason for said in plan.predictions.values()}
    assert len(reasons) == 1 and str(reasons.pop()).startswith(
        "target lab: no predictions, because its nodes are unknown"
    )
