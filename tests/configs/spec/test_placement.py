"""A cell lies on the fewest nodes of its target that hold its ranks equally, or on those that the study names."""

from typing import Any

import pytest
import yaml

from configs.common.execution import Layout
from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.cell import Cell
from configs.spec.placement import placed, unplaced
from configs.spec.study import StudyError, parse_study, study_yaml
from configs.targets.resources import ClusterTarget
from configs.targets.target import EndpointTarget, LocalTarget, SlurmTarget
from configs.workloads.noop import NoopWorkload
from configs.workloads.serve import ServeWorkload

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")
LAB = {"kind": "slurm", "name": "lab", "nodes": 4, "ranks_per_node": 2}


def plan_of(experiment: dict[str, Any], targets: list[dict[str, Any]] | None = None, **changes: Any) -> Plan:
    data: dict[str, Any] = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
        "workload": {"kind": "generate", "new_tokens": 4},
        "targets": targets or [LAB],
        "experiments": {"e": experiment},
    }
    return expand(parse_study(data | changes), [MODEL], {}, lambda workload: 5)


def problems_of(experiment: dict[str, Any], targets: list[dict[str, Any]] | None = None, **changes: Any) -> list[str]:
    with pytest.raises(StudyError) as caught:
        plan_of(experiment, targets, **changes)
    return caught.value.problems


def places(plan: Plan) -> list[tuple[str, str, int]]:
    """Label, layout and nodes of each point."""
    return [
        (point.label, str((cell := plan.cells[point.cell]).layout), cell.nodes)
        for experiment in plan.experiments
        for point in experiment.points
    ]


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (3, 3), (4, 2), (6, 3), (8, 4)])
def test_the_fewest_nodes_that_hold_the_ranks_equally(ranks: int, nodes: int) -> None:
    cell = Cell(workload=NoopWorkload(), layout=Layout(dp=ranks), target="lab")
    assert placed(cell, SlurmTarget.model_validate(LAB), None).nodes == nodes


def test_this_machine_is_one_node_and_keys_of_its_cells_stay() -> None:
    cell = Cell(workload=NoopWorkload(), layout=Layout(dp=8))
    assert placed(cell, LocalTarget(), None) is cell
    assert "nodes" not in cell.model_dump(exclude_defaults=True)


def test_strong_scaling_leaves_a_node_when_it_is_full() -> None:
    plan = plan_of({"kind": "strong", "grow": "tp", "to": 8})
    assert places(plan) == [
        ("1 rank", "1 rank", 1),
        ("2 ranks", "tp=2", 1),
        ("4 ranks", "tp=4", 2),
        ("8 ranks", "tp=8", 4),
    ]
    labels = [cell.label for cell in plan.cells.values()]
    assert labels[1].startswith("tp=2, ") and labels[2].startswith("tp=4 on 2 nodes, ")


def test_nodes_can_be_swept_where_the_ranks_fill_them() -> None:
    plan = plan_of({"kind": "sweep", "base": {"tp": 2}, "over": {"nodes": [1, 2]}})
    assert places(plan) == [("nodes 1", "tp=2", 1), ("nodes 2", "tp=2", 2)]
    assert len({cell.pack_key for cell in plan.cells.values()}) == 2


def test_weak_scaling_over_nodes_repeats_the_layout_of_one() -> None:
    plan = plan_of({"kind": "weak", "grow": "nodes", "to": 4, "base": {"tp": 2, "batch_size": 3}})
    assert places(plan) == [("1 node", "tp=2", 1), ("2 nodes", "dp=2 x tp=2", 2), ("4 nodes", "dp=4 x tp=2", 4)]
    assert [cell.workload.num_prompts for cell in plan.cells.values()] == [3, 6, 12]  # type: ignore[union-attr]
    assert [point.values for point in plan.experiments[0].points] == [{"ranks": 2}, {"ranks": 4}, {"ranks": 8}]


def test_strong_scaling_over_nodes_keeps_the_work() -> None:
    plan = plan_of({"kind": "strong", "grow": "nodes", "to": 2, "base": {"dp": 2}})
    assert places(plan) == [("1 node", "dp=2", 1), ("2 nodes", "dp=4", 2)]
    assert [cell.workload.num_prompts for cell in plan.cells.values()] == [4, 4]  # type: ignore[union-attr]
    trained = plan_of({"kind": "strong", "grow": "nodes", "to": 2}, workload={"kind": "train", "global_batch_size": 8})
    assert [(cell.layout.dp, cell.layout.strategy, cell.nodes) for cell in trained.cells.values()] == [
        (1, "none", 1),
        (2, "ddp", 2),
    ]


def test_nodes_of_the_base_are_what_grows() -> None:
    plan = plan_of({"kind": "strong", "grow": "nodes", "to": 2, "base": {"tp": 2, "nodes": 2}})
    assert places(plan) == [("2 nodes", "tp=2", 2), ("4 nodes", "dp=2 x tp=2", 4)]


def test_the_reference_of_correctness_is_one_rank_on_one_node() -> None:
    plan = plan_of({"kind": "correctness", "base": {"nodes": 2}, "layouts": [{"tp": 2}, {"pp": 2}]})
    assert [(cell.engine, cell.nodes) for cell in plan.cells.values()] == [
        ("transformers", 1),
        ("rankwise", 2),
        ("rankwise", 2),
    ]


@pytest.mark.parametrize(
    ("experiment", "changes", "problem"),
    [
        (
            {"kind": "strong", "grow": "dp", "to": 16},
            {},
            "experiments.e at 16 ranks: 16 ranks, but target lab holds 8 (4 nodes, 2 ranks per node)",
        ),
        (
            {"kind": "strong", "grow": "dp", "to": 8},
            {"targets": [LAB | {"max_ranks": 4}]},
            "experiments.e at 8 ranks: 8 ranks, but target lab holds 4 (4 nodes, 2 ranks per node, max_ranks: 4)",
        ),
        (
            {"kind": "strong", "grow": "dp", "points": [5]},
            {},
            "experiments.e at 5 ranks: 5 ranks cannot be divided equally over the nodes of target lab "
            "(4 nodes, 2 ranks per node)",
        ),
        (
            {"kind": "sweep", "base": {"tp": 4}, "over": {"nodes": [1]}},
            {},
            "experiments.e at nodes 1: nodes: 1 cannot hold 4 ranks of target lab (4 nodes, 2 ranks per node)\n"
            "  use one of: 2, 4",
        ),
        (
            {"kind": "sweep", "base": {"tp": 2}, "over": {"nodes": [8]}},
            {},
            "experiments.e at nodes 8: nodes: 8 cannot hold 2 ranks of target lab (4 nodes, 2 ranks per node)\n"
            "  use one of: 1, 2",
        ),
        (
            {"kind": "sweep", "base": {"tp": 2}, "over": {"nodes": [0]}},
            {},
            "experiments.e at nodes 0: nodes: input should be greater than 0, got 0",
        ),
        (
            {"kind": "sweep", "base": {"tp": 2}, "over": {"nodes": [2]}},
            {"targets": [{}]},
            "experiments.e at nodes 2: nodes: target local is this machine, a single node. Leave nodes out or use "
            "a slurm target",
        ),
        (
            {"kind": "weak", "grow": "nodes", "to": 2},
            {"targets": [{"name": "here"}, LAB]},
            "experiments.e.grow: target here is this machine, a single node\n  use one of: dp, tp, pp",
        ),
        (
            {"kind": "sweep", "over": {"node": [1]}},
            {},
            "experiments.e.over.node: unknown field of a cell (did you mean nodes?)",
        ),
    ],
)
def test_what_has_no_place_is_named(experiment: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    assert any(found.startswith(problem) for found in problems_of(experiment, **changes)), problems_of(
        experiment, **changes
    )


def test_a_layout_of_a_ranking_may_have_no_place() -> None:
    odd = SlurmTarget(name="odd", nodes=2, ranks_per_node=2, max_ranks=3)
    assert (
        unplaced(3, odd) == "3 ranks cannot be divided equally over the nodes of target odd (2 nodes, 2 ranks per node)"
    )
    assert unplaced(2, odd) is None


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ([{"kind": "slrum"}], "targets[0]: kind: unknown value 'slrum'\n  use one of: local, slurm"),
        ([{"kind": "slurm", "partitoin": "x"}], "targets[0].partitoin: unknown key (did you mean partition?)"),
        ([{"partition": "x"}], "targets[0].partition: supported by targets of kind slurm only. Set `kind: slurm`"),
        ([{"kind": "pbs", "qos": "x"}], "targets[0].qos: supported by targets of kind slurm only. Set `kind: slurm`"),
        ([{"kind": "slurm", "queue": "x"}], "targets[0].queue: supported by targets of kind pbs only. Set `kind: pbs`"),
        (
            [{"nodes": 2}],
            "targets[0].nodes: supported by targets of kind slurm or pbs or ssh or aws or gcp or azure only. "
            "Set `kind: slurm`",
        ),
        ([{"kind": "pbs", "chunk": {"ncpus": 4}}], "targets[0].chunk: 'ncpus': expected the name of a resource"),
        ([{"kind": "pbs", "place": "pack"}], "targets[0].place: unknown value 'pack'"),
        ([{"kind": "slurm", "nodes": 0}], "targets[0].nodes: input should be greater than 0, got 0"),
        (
            [{"kind": "slurm", "ranks_per_node": 4, "gpus_per_node": 2}],
            "targets[0].ranks_per_node: got 4, more than gpus_per_node (2). Use at most 2",
        ),
        ([LAB, {"kind": "slurm", "shared": "work"}], "targets[1].shared: got work, expected an absolute path"),
        (
            [{"kind": "slurm", "memory_per_node": "16 gigs"}],
            "targets[0].memory_per_node: got '16 gigs', expected the form [0-9]+[KMGT]? (value of --mem: 16G)",
        ),
        ([{"kind": "slurm", "partition": "a,b"}], "targets[0].partition: got a,b, expected one partition. Write a"),
        (
            [{"kind": "slurm", "extra": {"--licenses": "x"}}],
            "targets[0].extra: '--licenses' is not a long option of sbatch",
        ),
        (
            [{"kind": "slurm", "container": {"imge": "a.sif"}}],
            "targets[0].container.imge: unknown key (did you mean image?)",
        ),
        ([{"kind": "slurm", "container": {}}], "targets[0].container.image: is missing"),
        ([LAB, LAB], "targets[1].name: duplicate name lab. Give each target a unique `name`"),
        (["lab"], "targets[0]: "),
    ],
)
def test_what_is_wrong_with_a_target_is_named(targets: list[Any], problem: str) -> None:
    found = problems_of({"kind": "sweep", "over": {"batch_size": [1]}}, targets)
    assert any(line.startswith(problem) for line in found), found


@pytest.mark.parametrize(("given", "ranks"), [({}, 4), ({"ranks_per_node": 1}, 1), ({"ranks_per_node": 2}, 2)])
@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_ranks_beside_gpus_are_read_as_they_were_written(kind: str, given: dict[str, int], ranks: int) -> None:
    target = {"kind": kind, "name": "a", "nodes": 2, "gpus_per_node": 4, **given}
    workload = {"kind": "noop", "seconds": 1}
    experiments = {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}
    study = parse_study({"study": "s", "workload": workload, "targets": [target], "experiments": experiments})
    again = parse_study(yaml.safe_load(study_yaml(study)))
    for each in (study.targets[0], again.targets[0]):
        assert isinstance(each, ClusterTarget) and each.ranks_per_node == ranks


@pytest.mark.parametrize("gpus", ["4", 4.0, "0x4", "-4", 0, 10**9], ids=str)
def test_each_gpu_has_a_rank_however_its_number_is_written(gpus: Any) -> None:
    """`gpus_per_node: "4"` was taken as 4 GPUs, with one rank for all of them."""
    study = {"study": "s", "workload": {"kind": "noop"}, "targets": [{"kind": "slurm", "gpus_per_node": gpus}]}
    given = study | {"experiments": {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}}
    if gpus in ("4", 4.0):
        target = parse_study(given).targets[0]
        assert isinstance(target, ClusterTarget) and (target.gpus_per_node, target.ranks_per_node) == (4, 4)
        return
    with pytest.raises(StudyError) as caught:
        parse_study(given)
    assert len(caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ({"users": 8}, "workload.users: their rate is the server's speed, and max_rate caps it at 5"),
        ({"rate": 6}, "workload.rate: 6 requests/s, above the cap of 5"),
        ({"rate": 5, "turns": 3}, None),
        ({"rate": 6, "find": "max_rate", "objectives": {"ttft_seconds": 1}}, None),  # it begins at the cap
    ],
)
def test_traffic_above_the_cap_of_an_endpoint_is_refused_before_the_run(work: dict[str, Any], told: str | None) -> None:
    cell = Cell(engine="endpoint", workload=ServeWorkload.model_validate(work), target="endpoint")
    target = EndpointTarget(url="http://h", model="m", max_rate=5)
    if told is None:
        assert placed(cell, target, None) == cell
    else:
        with pytest.raises(ValueError) as caught:
            placed(cell, target, None)
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ({"tp": 4}, "layout: tp=4 takes 2 nodes of target lab, but the server of a study runs on one"),
        ({"dp": 4, "engine": "vllm"}, "layout: dp=4 takes 2 nodes of target lab, but the server of a study runs on"),
        ({"tp": 2, "nodes": 2}, "nodes: 2, but the server of a study runs on one"),
        ({"tp": 2}, None),
    ],
)
def test_a_server_of_a_study_is_on_one_node(base: dict[str, Any], told: str | None) -> None:
    """Each node started a whole server with all ranks of the layout, and the first one's figures were reported."""
    load, work = {"kind": "load", "users": 2, "base": base}, {"kind": "serve", "new_tokens": 4}
    if told is None:
        assert [nodes for *_, nodes in places(plan_of(load, workload=work))] == [1]
    else:
        (problem,) = problems_of(load, workload=work)
        assert told in problem


@pytest.mark.parametrize("given", ["2", 2.0, 2])
def test_a_number_of_nodes_counts_however_it_is_written(given: Any) -> None:
    base = {"nodes": given, "dp": 2, "num_prompts": 8}
    assert [nodes for *_, nodes in places(plan_of({"kind": "strong", "grow": "nodes", "to": 2, "base": base}))] == [
        2,
        4,
    ]
    assert [nodes for *_, nodes in places(plan_of({"kind": "sweep", "base": base, "over": {"batch_size": [1]}}))] == [2]


@pytest.mark.parametrize("given", ["x", [1], 0, -1])
def test_a_wrong_number_of_nodes_is_named(given: Any) -> None:
    [problem] = problems_of({"kind": "weak", "grow": "nodes", "to": 2, "base": {"nodes": given}})
    said = "expected a number, got a list" if given == [1] else "input should be "
    assert problem.startswith(f"experiments.e: nodes: {said}"), problem
