"""What machines have against what a plan needs: this machine's own, and what a study of a cluster asks of none here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.measuring import LIVE_LIBRARIES
from configs.spec.study import StudyError, parse_study
from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import Need
from tasks.checks.environment import machine_fingerprint
from tasks.checks.machine import _needs, check_clusters, check_resources
from tasks.planning.predictions import with_predictions
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan

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
        check_clusters(plan := plan_of({"name": "here"}, LAB), plan.targets)
    with pytest.raises(ClusterError):
        machine_fingerprint([SlurmTarget.model_validate(LAB)])
    check_clusters(plan := plan_of({"name": "here"}), plan.targets)


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


@pytest.mark.usefixtures("eight_gpus")
def test_ranks_of_this_machine_are_counted_by_its_gpus(tmp_path: Path) -> None:
    grid = {"grid": {"kind": "sweep", "over": {"dp": [1, 8, 16]}}}
    with pytest.raises(StudyError) as caught:
        check_resources(plan_of({"name": "here"}, experiments=grid), tmp_path)
    assert caught.value.problems == [
        "experiments.grid at dp 16: 16 ranks, but target here holds 8 (8 x NVIDIA H100 80GB HBM3, one per rank; "
        "`device: cpu` measures on the cores instead)"
    ]
    with pytest.raises(StudyError, match=r"8 ranks, but target here holds 2 \(2 cores, 1 per rank\)"):
        check_resources(plan_of({"name": "here", "device": "cpu"}, experiments=grid), tmp_path)
    wide = {"name": "here", "device": "cpu", "cores_per_rank": 4}
    with pytest.raises(StudyError, match=r"at dp 1: 1 rank, but target here holds 0 \(2 cores, 4 per rank\)"):
        check_resources(plan_of(wide, experiments=grid), tmp_path)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_machine_is_not_asked_for_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """A driver takes up to a second to start, and a study may have ten thousand cells."""
    asked: list[object] = []

    def answering(value: object) -> Callable[..., object]:
        def answer(*_: object) -> object:
            asked.append(value)
            return value

        return answer

    monkeypatch.setattr("engine.planner.local.local_accelerators", answering(()))
    monkeypatch.setattr("engine.planner.local.usable_cores", answering(2))
    monkeypatch.setattr("tasks.checks.machine.host_memory_available", answering(2**40))
    counts = []
    for cells in (2, 50):
        asked.clear()
        grid = {"grid": {"kind": "sweep", "over": {"items": list(range(1, cells + 1))}}}
        check_resources(plan_of({"name": "here", "device": device}, experiments=grid), tmp_path)
        counts.append(len(asked))
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("eight_gpus")
def test_layouts_are_ranked_on_the_gpus_of_this_machine(tmp_path: Path) -> None:
    for target, ranks, kind in (({}, 8, "cuda"), ({"device": "cpu"}, 2, "cpu")):
        data = {"kind": "local", "name": "here"} | target
        plan = local_layouts(tmp_path, data)
        (experiment,) = plan.experiments
        assert max(candidate.layout.ranks for candidate in experiment.candidates) == ranks
        machines = {said.basis for said in plan.predictions.values()}
        assert all(("H100" in str(basis)) == (kind == "cuda") for basis in machines)


@pytest.mark.usefixtures("eight_gpus")
def test_a_build_of_torch_that_cannot_use_the_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.checks.machine.version_of", lambda package: "2.13.0+cpu")
    one = {"grid": {"kind": "sweep", "over": {"dp": [1, 2]}}}
    with pytest.raises(StudyError) as caught:
        check_resources(plan_of({"name": "here"}, experiments=one), tmp_path)
    assert caught.value.problems == [
        "targets[0].device: torch 2.13.0+cpu cannot use 8 x NVIDIA H100 80GB HBM3. Install the build for them "
        "(https://pytorch.org/get-started/locally), or set `device: cpu` to measure on the cores"
    ]
    check_resources(plan_of({"name": "here", "device": "cpu"}, experiments=one), tmp_path)


def local_layouts(folder: Path, target: dict[str, Any]) -> Plan:
    study = parse_study(
        {
            "study": "s",
            "models": [{"id": "synthetic:llama-110m@0"}],
            "workload": {"kind": "generate", "num_prompts": 8, "batch_size": 8, "new_tokens": 4},
            "targets": [target],
            "layouts": "auto",
        }
    )
    cache = folder / "cache"
    models = [planned_model(spec, position, cache, folder) for position, spec in enumerate(study.models)]
    return with_predictions(make_plan(study, models, {}, folder, cache), folder, cache)


def sized(monkeypatch: pytest.MonkeyPatch, parameters: int, target: dict[str, Any], **over: Any) -> Plan:
    """A plan of a model with so many parameters, in float32, on one and two ranks."""
    monkeypatch.setattr("tasks.checks.machine._sizes", lambda plan: {"m": parameters})
    work = {"kind": "generate", "num_prompts": 4, "batch_size": 4, "new_tokens": 4}
    study = parse_study(
        {"study": "s", "models": [{"id": "synthetic:llama-1m@0", "name": "m"}], "workload": work, "targets": [target],
         "experiments": {"grid": {"kind": "sweep", "over": {"tp": [1, 2]} | over}}}
    )  # fmt: skip
    return expand(study, [PlannedModel(name="m", identity="m", manifest="unused")], {}, lambda workload: 1)


@pytest.mark.usefixtures("eight_gpus")
def test_weights_are_held_against_the_memory_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30e9 parameters in float32: 112 GiB are too much for one GPU of 80, whatever the host has, and fit on two."""
    with pytest.raises(StudyError) as caught:
        check_resources(sized(monkeypatch, 30 * 10**9, {"kind": "local", "name": "here"}), tmp_path)
    problem = "model m on 1 rank: the weights require 111.8 GiB, available are 80.0 GiB on 1 x NVIDIA H100 80GB HBM3"
    assert caught.value.problems == [problem]
    compressed = sized(monkeypatch, 30 * 10**9, {"kind": "local", "name": "here"}, compression=[["int8"]])
    check_resources(compressed, tmp_path)  # 28 GiB, and never more: made smaller while they are loaded


RENTED = {"kind": "aws", "regions": ["us-east-1"]}


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"gpus_per_node": 2, "gres": "gpu:a10g:2"}, "1 x NVIDIA A10G"),
        ({"gpus_per_node": 2, "machine": "aws/g5.12xlarge"}, "1 x NVIDIA A10G"),
        ({"gpus_per_node": 2}, None),
        ({}, None),
        (RENTED | {"instance": "g5.xlarge"}, "1 x NVIDIA A10G"),  # as many GPUs as it has
        (RENTED | {"instance": "c7i.4xlarge"}, "1 x 8 cores of Intel Xeon"),
        (RENTED | {"instance": "c7i.8xlarge"}, None),
        (RENTED | {"instance": "g5.xlarge", "device": "cpu"}, None),
    ],
)
def test_weights_are_held_against_the_devices_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], held: str | None
) -> None:
    plan = sized(monkeypatch, 10 * 10**9, {"kind": "slurm", "name": "c", "ranks_per_node": 2} | given)
    if held is None:
        return check_resources(plan, tmp_path)
    with pytest.raises(StudyError) as caught:
        check_resources(plan, tmp_path)
    (problem, *others) = caught.value.problems
    assert len(others) == ("cores" in held), "two ranks of a node have its memory together, two GPUs each their own"
    assert "model m on 1 rank: the weights require 37.3 GiB, available are " in problem
    assert problem.endswith(" of target c") and held.removeprefix("1 x NVIDIA ") in problem


def test_a_node_of_a_cluster_has_a_rank_for_each_gpu(tmp_path: Path) -> None:
    """Unless it says how many; on two cores the layouts go up to the GPUs of all nodes."""
    given = {"kind": "slurm", "name": "c", "nodes": 2, "gpus_per_node": 8, "machine": "aws/p4d.24xlarge"}
    (experiment,) = local_layouts(tmp_path, given).experiments
    assert max(candidate.layout.ranks for candidate in experiment.candidates) == 16
    assert SlurmTarget.model_validate(given | {"ranks_per_node": 2}).rank_limit == 4
    assert SlurmTarget(nodes=2).rank_limit == 2
    with pytest.raises(ValueError, match="device: got cpu, but gpus_per_node is 8"):
        SlurmTarget.model_validate(given | {"device": "cpu"})


def test_the_catalog_does_not_predict_the_cpus_of_a_machine_with_gpus(tmp_path: Path) -> None:
    given = {"kind": "slurm", "name": "c", "device": "cpu", "ranks_per_node": 2, "machine": "aws/p4d.24xlarge"}
    with pytest.raises(StudyError, match="no predictions for `device: cpu`, because the catalog has the GPUs"):
        local_layouts(tmp_path, given)


def trained(monkeypatch: pytest.MonkeyPatch, parameters: int, strategy: str, **work: Any) -> Plan:
    """A plan that trains a model with so many parameters on eight replicas."""
    monkeypatch.setattr("tasks.checks.machine._sizes", lambda plan: {"m": parameters})
    study = parse_study(
        {"study": "s", "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
         "workload": {"kind": "train", "global_batch_size": 8, "steps": 10} | work,
         "targets": [{"kind": "local", "name": "here"}],
         "experiments": {"grid": {"kind": "sweep", "over": {"dp": [8], "layout.strategy": [strategy]}}}}
    )  # fmt: skip
    return expand(study, [PlannedModel(name="m", identity="m", manifest="unused")], {}, lambda workload: 1)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("strategy", "billions", "needed", "work"),
    [
        ("ddp", 13, "1549.7", {}),
        ("ddp", 13, "774.9", {"optimizer": "sgd"}),
        ("zero1", 30, "1229.3", {}),  # each replica has the weights
        ("zero2", 13, None, {}),
        ("fsdp", 30, None, {}),
        ("zero3", 30, None, {}),
        ("fsdp", 60, "894.1", {}),
        ("fsdp", 60, None, {"offload": "cpu"}),
    ],
)
def test_what_a_strategy_shards_is_counted_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    billions: int,
    needed: str | None,
    work: dict[str, Any],
) -> None:
    """16 bytes a parameter, of which 640 GiB hold 43e9: they were counted for each replica."""
    plan = trained(monkeypatch, billions * 10**9, strategy, **work)
    if needed is None:
        return check_resources(plan, tmp_path)
    with pytest.raises(StudyError, match=f"the weights require {needed} GiB, available are 640.0 GiB"):
        check_resources(plan, tmp_path)


def test_a_container_holds_the_ranks_of_its_cpu_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in the quota of one measured how long each waits for the other's turn."""
    for module in ("configs.common.system.cores", "tasks.checks.machine"):
        monkeypatch.setattr(f"{module}.quota_cores", lambda: 1.5)
    grid = {"grid": {"kind": "sweep", "over": {"dp": [1, 2]}}}
    said = r"dp 2: 2 ranks, but target local holds 1 \(1 core, 1 per rank; the container's CPU quota is 1.5\)"
    with pytest.raises(StudyError, match=said):
        check_resources(plan_of({"name": "local"}, experiments=grid), tmp_path)
