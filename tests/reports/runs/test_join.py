"""Several runs in one report: which folders, what the nodes are called, whose figure is best."""

from pathlib import Path

import pytest

from configs.hardware.prices import Price, TargetPrices
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.study import parse_study
from configs.targets.target import LocalTarget
from reports.reading.load import load_run
from reports.render import render_report
from reports.runs.join import (
    common_table,
    cost_table,
    find_runs,
    joined_report,
    nodes_environment_table,
    nodes_of,
    spending_table,
)
from reports.runs.join_best import Contender, best_sentences
from tests.support.run_folders import made_studies, priced_runs
from tests.support.run_folders.report_runs import (
    MODEL,
    cell_on,
    generate,
    node_run,
    plan_of,
    write_measurements,
    write_plan,
    write_record,
)


def test_nodes_side_by_side(tmp_path: Path) -> None:
    runs = [node_run(tmp_path / "one", "gpu-a", 1.0, 2.0, commit="def"), node_run(tmp_path / "two", "gpu-b", 2.0, 0.5)]
    text = joined_report([load_run(run) for run in runs], others=["runs/notes"])
    assert text.startswith(
        "# 2 nodes side by side: nodes\n\n> Highest throughput (tiny, generate, float32): gpu-a with"
    )
    assert "2.00 times (" in text.splitlines()[2] and "the best of gpu-b" in text.splitlines()[2]
    # 40 tokens/s for 2 USD an hour are 13.9 USD a million; 20 tokens/s for 0.50 are 6.94.
    assert "> Lowest cost (tiny, generate, float32): gpu-b with" in text and "6.94 USD per million tokens" in text
    assert "| gpu-b | tiny | 1 rank, float32, batch 4, 5 tokens | 0.5000 | 6.94" in text
    assert "The environments differ in hostname and commit" in text and "| `hostname` | gpu-a | gpu-b |" in text
    assert "| node | run | target | measured, UTC | commit |" in text
    assert "| gpu-a | `one` | gpu-a | 2026-01-01 00:00 | def |" in text
    assert "| gpu-a | 2 | 2 | 100 % |" in text and "| gpu-b | 2 | 0 | 50.0 % |" in text
    for heading in ("## Latency", "## Throughput", "## Memory", "## Cost"):
        assert heading in text
    assert "| node | batch 4 | batch 8 |" in text and "| gpu-b | 200 | 200 |" in text
    assert "Named by the pattern, but no runs: runs/notes." in text


def test_the_same_target_of_two_runs_is_two_nodes(tmp_path: Path) -> None:
    runs = [
        node_run(tmp_path / day / "nodes", "local", slowness) for day, slowness in (("monday", 1.0), ("friday", 1.2))
    ]
    nodes = nodes_of([load_run(run) for run in runs])
    assert [node.name for node in nodes] == ["local (monday/nodes)", "local (friday/nodes)"]
    assert nodes_environment_table(nodes) is None
    table = common_table(nodes)
    assert table is not None and [row[0] for row in table.rows] == ["local (monday/nodes)", "local (friday/nodes)"]
    text = joined_report([load_run(run) for run in runs])
    assert "All nodes were measured in the same environment." in text
    assert "Cost: what an hour of any node costs is unknown, so that is not compared." in text
    assert "so there are no dollars" in text


def test_runs_without_a_cell_in_common(tmp_path: Path) -> None:
    runs = [node_run(tmp_path / "one", "a", 1.0, cells=(4,)), node_run(tmp_path / "two", "b", 1.0, cells=(8,))]
    studies = [load_run(run) for run in runs]
    assert common_table(nodes_of(studies)) is None
    assert "No cell has a figure on every node" in joined_report(studies)


def test_a_model_of_the_same_name_and_other_content_is_another(tmp_path: Path) -> None:
    run, other = node_run(tmp_path / "one", "a", 1.0), node_run(tmp_path / "two", "b", 1.0)
    changed = other.plan.read_text().replace(MODEL.identity, "folder:other")
    cells = [cell_on("b", size) for size in (4, 8)]
    moved = [cell.model_copy(update={"model": "folder:other"}) for cell in cells]
    for before, after in zip(cells, moved, strict=True):
        changed = changed.replace(before.key, after.key)
    other.plan.write_text(changed)
    names = {item.result.model for node in nodes_of([load_run(run), load_run(other)]) for item in node.cells}
    assert len(names) == 2 and all(name.startswith("tiny ") for name in names)


def test_failures_stay_in_the_tables(tmp_path: Path) -> None:
    run = node_run(tmp_path / "one", "a", 1.0)
    other = write_plan(tmp_path / "two", plan_of([cell_on("b", 4)], [], repeats=10))
    write_record(other, cell_on("b", 4), status=Status.OUT_OF_MEMORY)
    text = joined_report([load_run(run), load_run(other)])
    assert "| b | out of memory |" in text and "no other node has a figure" in text


def test_nodes_that_cannot_be_told_apart(tmp_path: Path) -> None:
    studies = [load_run(node_run(tmp_path / name, name, 1.0)) for name in ("a", "b")]
    contenders = [Contender(study.plan.study, result) for study in studies for result in study.cells.values()]
    named = [Contender(f"n{place}", item.result) for place, item in enumerate(contenders)]
    sentences = best_sentences(named)
    assert all("so the two cannot be told apart" in sentence for sentence in sentences[:2])


def test_which_folders_a_pattern_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        node_run(tmp_path / name, "local", 1.0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("x")
    found = find_runs([str(tmp_path / "*")])
    assert [folder.name for folder in found.folders] == ["one", "two"] and found.others == (str(tmp_path / "notes"),)
    assert find_runs([str(tmp_path / "*" / "plan.json")]).folders == found.folders
    with pytest.raises(ValueError, match=r"matches nothing"):
        find_runs([str(tmp_path / "nothing*")])
    with pytest.raises(ValueError, match=r"names no run; a run folder has a plan\.json"):
        find_runs([str(tmp_path / "notes*")])
    assert [folder.name for folder in find_runs([str(tmp_path / "one*")]).folders] == ["one"]
    with pytest.raises(ValueError, match=r"tow: matches nothing"):
        find_runs([str(tmp_path / "one"), str(tmp_path / "tow")])
    (tmp_path / "two").rename(tmp_path / "two[1]")  # as a shell writes the name, which is a pattern too
    named = find_runs([str(tmp_path / "one"), str(tmp_path / "two[1]")]).folders
    assert [folder.name for folder in named] == ["one", "two[1]"]
    (tmp_path / "two[1]").rename(tmp_path / "two")
    (tmp_path / "benchmark_results_a.json").write_text('{"run": "two"}')
    (tmp_path / "benchmark_results_b.json").write_text('{"run": "one"}')
    expanded = [str(tmp_path / f"benchmark_results_{letter}.json") for letter in "ab"]  # as a shell does
    assert {folder.name for folder in find_runs(expanded).folders} == {"one", "two"}
    (tmp_path / "benchmark_results_a.json").write_text('{"run": "../two"}')
    with pytest.raises(ValueError, match=r"run: got '../two', expected the name of a folder"):
        find_runs(expanded)


def test_cells_that_did_no_work_win_nothing(tmp_path: Path) -> None:
    """A script may tell of 0 units in each of its steps."""
    spec = {
        "study": "idle",
        "workload": {"kind": "script", "command": ["t.py", "{params.x}"], "params": {"x": 0}},
        "experiments": {"sweep": {"kind": "sweep", "over": {"workload.params.x": [0, 5]}}},
        "measuring": {"repeats": 6, "memory": False},
    }
    runs = []
    for name in ("one", "two"):
        plan = expand(parse_study(spec), [], {}, lambda _: 0)
        runs.append(made_studies.write_plan(tmp_path / name, plan))
        for cell in plan.cells.values():
            units = [float(cell.workload.model_dump()["params"]["x"])] * 20
            for repeat in range(6):
                samples = {"0/step_seconds": [0.01] * 20, "0/step_units": units}
                made_studies.write_record(runs[-1], cell, repeat, samples, figures={"steps": 20}, num_columns=2)
    text = joined_report([load_run(run) for run in runs])
    assert text.count("> Highest throughput (script, float32)") == 1 and text.count("> Lowest latency") == 2
    render_report(runs[0])
    assert "at params.x 0 it is 0." in runs[0].report.read_text()


def test_nodes_without_a_known_environment_are_not_called_alike(tmp_path: Path) -> None:
    """Runs whose environment was lost were said to be measured in the same environment as the others."""
    folders = [tmp_path / day / "nodes" for day in ("monday", "tuesday", "friday")]
    studies = [load_run(node_run(folder, "local", 1.0)) for folder in folders]
    (folders[2] / "environments" / "e1.json").unlink()
    known, lost = studies[:2], load_run(RunPaths(folders[2]))
    text = joined_report([*known, lost])
    assert "The environment of local (friday/nodes) is not known. The others were measured in the same" in text
    text = joined_report([known[0], lost])
    assert "All nodes" not in text and "The others" not in text


def test_costs_of_different_work_are_in_rows_of_their_own(tmp_path: Path) -> None:
    """One node's cheapest token was of short prompts, the other's of long ones, as if they were to be compared."""
    studies = []
    for node, slowness in (("gpu-a", 1.0), ("gpu-b", 2.0)):
        work = [generate(prompt_tokens=size).model_copy(update={"target": node}) for size in (8, 512)]
        price = TargetPrices(price=Price(usd_per_hour=2.0, source="the study file"))
        run = write_plan(tmp_path / node, plan_of(work, []).model_copy(update={"prices": {node: price}}))
        for cell, seconds in zip(work, (1.0, 4.0) if node == "gpu-a" else (4.0, 1.0), strict=True):
            write_measurements(run, cell, [slowness * seconds] * 3)
        studies.append(load_run(run))
    table = cost_table(nodes_of(studies))
    assert table is not None
    assert [(row[0], row[1], row[4].partition(" ")[0]) for row in table.rows] == [
        ("gpu-a", "tiny, generate, prompt tokens 8, new tokens 5", "13.9"),
        ("gpu-a", "tiny, generate, prompt tokens 512, new tokens 5", "55.6"),
        ("gpu-b", "tiny, generate, prompt tokens 8, new tokens 5", "111"),
        ("gpu-b", "tiny, generate, prompt tokens 512, new tokens 5", "27.8"),
    ]


def test_the_runs_of_a_joined_report_say_what_they_cost(tmp_path: Path) -> None:
    """Total cost, duration and price of an hour of each provider: the price of a token says nothing of the bill."""
    runs = []
    for name, machine, price in (("aws", "aws/g4dn.xlarge/us-east-1", 0.526), ("own", None, None)):
        one = priced_runs.cell(target=name)
        targets = (LocalTarget(name=name, machine=machine),)
        plan = priced_runs.make_plan([one], repeats=1, prices={name: price} if price else {}, targets=targets)
        runs.append(priced_runs.write_run(tmp_path / name, plan))
        priced_runs.write_measurements(runs[-1], one, [100.0])
        priced_runs.write_launch(runs[-1], "job-timed-0", one, 0, 0, 1800)
    studies = [load_run(run) for run in runs]
    table = spending_table(nodes_of(studies))
    assert table is not None and table.columns[:5] == (
        "run", "provider", "target", "total cost, USD", "duration, hours",
    )  # fmt: skip
    assert [row[:6] for row in table.rows] == [
        ("`aws`", "AWS", "aws", "0.263", "0.500", "0.5260"),
        ("`own`", "–", "own", "–", "0.500", "–"),
    ]
    assert table.rows[1][6] == "price unknown"
    text = joined_report(studies)
    assert "What the runs cost: " in text and "| `aws` | AWS | aws | 0.263 | 0.500 | 0.5260 | on demand | 1 |" in text


def test_a_training_that_diverged_makes_no_node_the_best(tmp_path: Path) -> None:
    """Twice as fast with losses that are not finite, it was the node for throughput, latency and cost."""
    studies = []
    for target, seconds, last in (("a", 0.2, 2.5), ("b", 0.1, float("nan"))):
        plan = made_studies.planned(
            "workload: {kind: train, global_batch_size: 8, sequence_length: 16, steps: 4}\n"
            f"targets: [{{kind: local, name: {target}, price_usd_per_hour: 1}}]\n"
            "experiments: {one: {kind: sweep, over: {dp: [1]}}}\n"
        )
        run = made_studies.write_plan(tmp_path / target, plan)
        (cell,) = plan.cells.values()
        for repeat in range(10):
            samples = {"0/step_seconds": [seconds * (1 + 0.001 * repeat)] * 4, "0/loss": [4.0, 3.0, 2.8, last]}
            made_studies.write_record(run, cell, repeat, samples=samples, figures={"tokens_per_step": 128})
        studies.append(load_run(run))
    nodes = nodes_of(studies)
    assert [len(node.right) for node in nodes] == [1, 0]
    text = joined_report(studies)
    assert "> Highest throughput (tiny, train, float32): a with" in text and "no other node has a figure" in text
    assert "Left out, as their answers are wrong or their losses not finite: b with" in text
    costs = cost_table(nodes)
    assert costs is None or {row[0] for row in costs.rows} <= {"a"}
