"""An experiment on several targets: the winner on each, and from which link on a layout pays."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.preflight import PairFigures, Preflight, TargetPreflight
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.communication import CommunicationWorkload
from reports.answer import answer
from reports.experiments import targets
from reports.experiments.scaling import scaling
from reports.experiments.targets import (
    Side,
    SideBySide,
    TargetPoint,
    side_by_side,
    targets_lines,
    targets_opening,
    targets_sentence,
    targets_table,
)
from reports.numbers.statistics import Estimate
from reports.provenance import environment_sentence
from reports.reading.load import load_run
from reports.render import render_report
from reports.tables import MOST_ROWS
from reports.text import estimate_text
from tests.support.run_folders.made_studies import (
    decoded,
    planned,
    write_failure,
    write_measurements,
    write_plan,
    write_record,
)
from tests.support.run_folders.reports import whole_report

STUDY = """
workload: {kind: generate, new_tokens: 4, num_prompts: 4}
targets:
  - {kind: slurm, name: slow, nodes: 2}
  - {kind: slurm, name: fast, nodes: 2}
experiments:
  generation: {kind: optimization, variants: {tp=2: {tp: 2}, pp=2: {pp: 2}}}
  links: {kind: communication, operations: [point_to_point], sizes_bytes: [1000, 100000, 1000000]}
"""
SECONDS = {("slow", 1, 1): 1.0, ("slow", 2, 1): 1.6, ("slow", 1, 2): 0.8}
SECONDS |= {("fast", 1, 1): 1.0, ("fast", 2, 1): 0.5, ("fast", 1, 2): 0.7}
RATES = {"slow": 12e6, "fast": 120e6}


def write_study(folder: Path, text: str = STUDY) -> tuple[RunPaths, Plan]:
    """Every cell takes the seconds of its target and layout; links have a latency of 100 us."""
    plan = planned(text)
    run = write_plan(folder, plan)
    for cell in plan.cells.values():
        if isinstance(cell.workload, CommunicationWorkload):
            sizes = cell.workload.sizes_bytes
            seconds = [1e-4 + size / RATES[cell.target] for size in sizes]
            operation = [4] * len(sizes)  # the place of point_to_point among the operations
            samples = {
                f"{rank}/{name}": values
                for rank in range(2)
                for name, values in (
                    ("operation", operation),
                    ("size_bytes", sizes),
                    ("call_seconds", seconds),
                    ("pass_seconds", [1.0]),
                )
            }
            write_record(run, cell, 0, samples=samples)
        else:
            write_measurements(run, cell, SECONDS[cell.target, cell.layout.tp, cell.layout.pp])
    return run, plan


def found_in(run: RunPaths) -> SideBySide:
    (found,) = side_by_side(load_run(run))
    return found


def test_the_winner_of_each_target_with_its_link(tmp_path: Path) -> None:
    run, _ = write_study(tmp_path)
    found = found_in(run)
    assert found.title == "generation: tiny"
    assert [side.name for side in found.sides] == ["slow (12.0 MB/s, 100 us)", "fast (120 MB/s, 100 us)"]
    text = targets_sentence(found)
    assert "On slow (12.0 MB/s, 100 us) pp=2 on 2 nodes is fastest: " in text
    assert ", 1.25 times (1.25 to 1.25, 95 % interval, 10 pairs, corrected for 2 comparisons) that of 1 rank." in text
    assert "On fast (120 MB/s, 100 us) tp=2 on 2 nodes is fastest: " in text
    assert "that of pp=2 on 2 nodes." in text


def test_the_opening_has_one_sentence_without_the_figures_of_the_section(tmp_path: Path) -> None:
    """Of all targets together: who wins, by how much, and where it is not known."""
    run, _ = write_study(tmp_path)
    sure = "95 % interval, 10 pairs, corrected for 2 comparisons"
    assert targets_opening(found_in(run)) == (
        f"pp=2 on 2 nodes is fastest on slow with 1.25 times (1.25 to 1.25, {sure}) the throughput of 1 rank; "
        f"tp=2 on 2 nodes is fastest on fast with 1.40 times (1.40 to 1.40, {sure}) the throughput of pp=2 on 2 nodes."
    )


def test_a_winner_of_several_targets_is_named_once_and_equals_are_no_winners(tmp_path: Path) -> None:
    seconds = {("slow", 1, 1): 1.0, ("slow", 2, 1): 2.0, ("slow", 1, 2): 3.0}
    plan = planned(STUDY)
    run = write_plan(tmp_path, plan)
    for cell in plan.cells.values():
        if cell.workload.kind == "generate":
            write_measurements(run, cell, seconds["slow", cell.layout.tp, cell.layout.pp])
    sure = "(2.00 to 2.00, 95 % interval, 10 pairs, corrected for 2 comparisons)"
    assert targets_opening(found_in(run)) == (
        f"1 rank is fastest on slow with 2.00 times {sure} the throughput of tp=2 on 2 nodes and "
        f"on fast with 2.00 times {sure} the throughput of tp=2 on 2 nodes."
    )
    equal = write_plan(tmp_path / "equal", plan)
    for cell in plan.cells.values():
        if cell.workload.kind == "generate" and (cell.target, cell.layout.pp) != ("fast", 2):
            write_measurements(equal, cell, 1.0)
    text = targets_opening(found_in(equal))
    assert text.count("are not told apart on") == 2 and "fastest" not in text


def test_of_a_single_point_the_targets_are_told_side_by_side(tmp_path: Path) -> None:
    """It was "1 rank is fastest on slow and on fast", and which target is faster stood nowhere."""
    run, _ = write_study(tmp_path)
    whole = found_in(run)
    found = replace(whole, sides=tuple(replace(side, points=side.points[1:2]) for side in whole.sides))
    slow, fast = (estimate_text(side.points[0].throughput, whole.unit) for side in found.sides)
    assert targets_opening(found) == f"{whole.labels[1]}: {slow} on slow and {fast} on fast." and slow != fast
    assert targets_sentence(found).startswith(f"On slow (12.0 MB/s, 100 us) {whole.labels[1]} has {slow}. On fast ")
    without = replace(found.sides[1].points[0], result=replace(found.sides[1].points[0].result, measurements={}))
    found = replace(found, sides=(found.sides[0], replace(found.sides[1], points=(without,))))
    assert targets_opening(found) == f"{whole.labels[1]}: {slow} on slow and nothing has a figure on fast."


def test_from_which_link_on_a_layout_pays(tmp_path: Path) -> None:
    run, _ = write_study(tmp_path)
    assert targets_lines(found_in(run)) == [
        "tp=2 on 2 nodes needs at least the link of fast (120 MB/s, 100 us) to beat 1 rank: slower on slow.",
        "pp=2 on 2 nodes is faster than 1 rank on every target.",
    ]


def test_sides_stand_in_the_order_of_their_links(tmp_path: Path) -> None:
    slow, fast = (f"  - {{kind: slurm, name: {name}, nodes: 2}}\n" for name in ("slow", "fast"))
    run, plan = write_study(tmp_path, STUDY.replace(slow + fast, fast + slow))
    assert [target.name for target in plan.targets] == ["fast", "slow"]
    assert [side.target for side in found_in(run).sides] == ["slow", "fast"]


def test_every_target_and_point_has_a_row(tmp_path: Path) -> None:
    run, _ = write_study(tmp_path)
    table = targets_table(found_in(run))
    assert [row[0] for row in table.rows] == ["slow"] * 3 + ["fast"] * 3
    assert table.rows[1][2:6] == (
        "tp=2 on 2 nodes",
        "9.91 (9.86 to 9.97)",
        "0.625 (0.625 to 0.625)",
        "108 (107 to 108)",
    )
    assert table.rows[0][4] == "1"


def test_what_has_no_figure_is_said_and_drawn(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path, plan)
    for cell in plan.cells.values():
        if cell.layout.tp == 2 and cell.target == "slow":
            write_failure(run, cell, Status.TIMEOUT, "too slow")
        elif cell.workload.kind == "generate":
            write_measurements(run, cell, SECONDS[cell.target, cell.layout.tp, cell.layout.pp])
    found = found_in(run)
    assert targets_lines(found)[0] == "tp=2 on 2 nodes is faster than 1 rank on fast; without a figure on slow."
    assert targets_table(found).rows[1][-1] == "timeout"
    summary = render_report(run)
    text = whole_report(run)
    assert "## Targets side by side" in text and (run.plots / "targets-generation-tiny.png").is_file()
    assert any(
        sentence.startswith("Targets of generation: tiny: pp=2 on 2 nodes is fastest on slow with")
        for sentence in summary.sentences
    )


def write_blocks(run: RunPaths, cell: Cell, seconds: dict[int, float]) -> None:
    """Completed repeats by their block."""
    figures = {"num_prompts": 4, "prompt_tokens": 40, "measurement_seconds": 2.0}
    for repeat, taken in seconds.items():
        write_record(run, cell, repeat, samples=decoded(cell, taken), figures=figures)


def write_ragged(folder: Path) -> RunPaths:
    """tp=2 loses the one block that it shares with pp=2, which the median hides; the baseline shares none."""
    plan = planned(STUDY)
    run = write_plan(folder, plan)
    for cell in plan.cells.values():
        if cell.workload.kind == "generate":
            if cell.layout.tp == 2:
                write_blocks(run, cell, {0: 0.5, 1: 0.5, 2: 1.1})
            elif cell.layout.pp == 2:
                write_blocks(run, cell, {2: 1.0, 3: 1.0} if cell.target == "slow" else {3: 1.0, 4: 1.0})
            else:
                write_blocks(run, cell, {5: 2.0})
    return run


def test_the_best_median_is_no_winner_where_it_loses_in_the_common_blocks_or_there_is_none(tmp_path: Path) -> None:
    found = found_in(write_ragged(tmp_path))
    assert targets_opening(found) == (
        "tp=2 on 2 nodes and pp=2 on 2 nodes are not told apart on slow; "
        "no block has both tp=2 on 2 nodes and pp=2 on 2 nodes on fast."
    )
    assert targets_sentence(found).startswith("On slow tp=2 on 2 nodes (32.0 tokens/s (14.5 to 32.0,")


def test_a_point_with_a_figure_is_not_said_to_have_none(tmp_path: Path) -> None:
    assert targets_lines(found_in(write_ragged(tmp_path))) == [
        "tp=2 on 2 nodes and pp=2 on 2 nodes are faster than 1 rank on none of the targets: "
        "without a common block on slow and fast."
    ]


@pytest.mark.parametrize("lost", ["failed", "not planned"])
def test_a_link_is_needed_only_where_a_slower_one_was_measured(tmp_path: Path, lost: str) -> None:
    run, plan = write_study(tmp_path)
    found = found_in(run)
    missed = next(cell for cell in plan.cells.values() if cell.layout.tp == 2 and cell.target == "slow")
    for record in (run.records / missed.key).iterdir():
        record.unlink()
    if lost == "not planned":
        slow, fast = found_in(run).sides
        kept = tuple(point for point in slow.points if point.label != "tp=2 on 2 nodes")
        found = replace(found, sides=(replace(slow, points=kept), fast))
    else:
        write_failure(run, missed, Status.TIMEOUT, "too slow")
        found = found_in(run)
    assert found.by_link
    why = "without a figure" if lost == "failed" else "not planned"
    assert f"tp=2 on 2 nodes is faster than 1 rank on fast; {why} on slow." in targets_lines(found)


def test_targets_with_different_baselines_have_nothing_in_common_to_beat(tmp_path: Path) -> None:
    run, _ = write_study(tmp_path)
    found = found_in(run)
    slow, fast = found.sides
    moved = tuple(replace(point, baseline=point.label == "tp=2 on 2 nodes") for point in fast.points)
    assert targets_lines(replace(found, sides=(slow, replace(fast, points=moved)))) == []


def test_the_test_of_the_nodes_tells_the_link_where_no_experiment_does(tmp_path: Path) -> None:
    text = STUDY.replace(
        "  links: {kind: communication, operations: [point_to_point], sizes_bytes: [1000, 100000, 1000000]}\n", ""
    )
    run, _ = write_study(tmp_path, text)
    pair = PairFigures(nodes=("a", "b"), latency_seconds=5e-5, bytes_per_second=9e7)
    tested = TargetPreflight(target="fast", settings="", at="2026-01-01", ranks_per_node=1, pairs=(pair,))
    run.preflight.write_text(Preflight(targets=(tested,)).model_dump_json())
    assert [side.name for side in found_in(run).sides] == ["slow", "fast (90.0 MB/s, 50.0 us)"]


@pytest.mark.parametrize("grow", ["nodes", "dp"])
def test_more_ranks_on_more_nodes_are_no_change_of_anything_else(tmp_path: Path, grow: str) -> None:
    """Which of a cluster's nodes a job got, and how many, follows from the ranks: laws are fitted to such points."""
    text = f"""
workload: {{kind: generate, new_tokens: 4}}
targets: [{{kind: slurm, name: lab, nodes: 4}}]
experiments: {{scaling: {{kind: weak, grow: {grow}, to: 4}}}}
"""
    plan = planned(text)
    run = write_plan(tmp_path, plan)
    for cell in plan.cells.values():
        name = f"lab{cell.nodes}"
        run.environment(name).write_text(json.dumps({"hostname": name, "variables": {"GLOO_SOCKET_IFNAME": name}}))
        write_measurements(run, cell, 1.0, environment=name)
    study = load_run(run)
    points = scaling(study, plan.experiments[0]).points
    assert [(point.ranks, point.result.cell.nodes, point.changed) for point in points] == [
        (1, 1, ()),
        (2, 2, ()),
        (4, 4, ()),
    ]
    assert environment_sentence(study) == (
        "The records come from 3 environments, which differ only in what the study itself sets."
    )


@pytest.mark.parametrize("upgraded", [False, True])
def test_libraries_of_one_engine_alone_are_no_change_but_two_versions_are(tmp_path: Path, upgraded: bool) -> None:
    text = """
workload: {kind: generate, new_tokens: 4}
experiments: {engines: {kind: sweep, over: {engine: [rankwise, transformers], batch_size: [1, 2]}}}
"""
    plan = planned(text)
    run = write_plan(tmp_path, plan)
    for place, version in enumerate(("5.23.0", "5.24.0" if upgraded else "5.23.0")):
        facts = {"torch": "2.13.0", "libraries": {"transformers": version}}
        run.environment(f"peer{place}").write_text(json.dumps(facts))
    run.environment("own").write_text(json.dumps({"torch": "2.13.0"}))
    peers = iter(("peer0", "peer1"))
    for cell in plan.cells.values():
        name = "own" if cell.engine == "rankwise" else next(peers)
        write_measurements(run, cell, 1.0, environment=name)
    said = environment_sentence(load_run(run))
    assert said is not None and ("differ in libraries.transformers" in said) is upgraded


@pytest.mark.parametrize("kind", ["weak", "one target"])
def test_what_cannot_be_compared_is_left_out(tmp_path: Path, kind: str) -> None:
    text = (
        STUDY
        if kind == "one target"
        else STUDY.replace(
            "kind: optimization, variants: {tp=2: {tp: 2}, pp=2: {pp: 2}}", "kind: weak, grow: tp, to: 2"
        )
    )
    text = text.replace("  - {kind: slurm, name: fast, nodes: 2}\n", "") if kind == "one target" else text
    run, _ = write_study(tmp_path, text)
    assert side_by_side(load_run(run)) == []
    assert not any(sentence.lead.startswith("Targets") for sentence in answer(load_run(run), []))


@pytest.mark.parametrize("values", [("1", "1"), ("1", "0")])
def test_what_the_import_of_deepspeed_sets_is_no_other_environment(tmp_path: Path, values: tuple[str, str]) -> None:
    """Each report with DeepSpeed in it said to compare its environments with care, because of this variable."""
    text = """
workload: {kind: generate, new_tokens: 4}
layout: {tp: 2}
experiments: {engines: {kind: sweep, over: {engine: [rankwise, deepspeed], batch_size: [1, 2]}}}
"""
    plan = planned(text)
    run = write_plan(tmp_path, plan)
    imported = iter(enumerate(values))
    for cell in plan.cells.values():
        name, variables = "own", {"OMP_NUM_THREADS": "1"}
        if cell.engine == "deepspeed":
            place, value = next(imported)
            name, variables = f"peer{place}", variables | {"PYTORCH_NVML_BASED_CUDA_CHECK": value}
        run.environment(name).write_text(json.dumps({"torch": "2.13.0", "variables": variables}))
        write_measurements(run, cell, 1.0, environment=name)
    told = str(environment_sentence(load_run(run)))
    assert ("which differ only in what the study itself sets" in told) is (values[0] == values[1]), told


def test_a_grid_of_hundreds_of_points_is_told_in_short() -> None:
    """Its table had a row for each, its sentence all their names, and each point was named by looking at all others."""
    looked: list[int] = []

    class Placed:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def place(self) -> str:
            looked.append(self.number)
            return "1 rank"

    count, fast = 500, Estimate(2.0, 2.0, 2.0, 1)
    results: Any = [
        SimpleNamespace(
            cell=Placed(number), kind=SimpleNamespace(latency=None), estimate=lambda _: fast, status="completed"
        )
        for number in range(count)
    ]
    points: Any = [SimpleNamespace(label="baseline" if not n else f"batch {n}") for n in range(count)]
    names = targets._names(points, results)
    assert names[:2] == ["baseline (1 rank)", "batch 1"] and len(looked) == count
    sides = [
        Side(
            name,
            None,
            tuple(TargetPoint(*each, each[0] == names[0], None) for each in zip(names, results, strict=True)),
        )
        for name in ("slow", "fast")
    ]
    found = SideBySide("sizes", "tokens/s", tuple(sides))
    table = targets_table(found)
    assert len(table.rows) == MOST_ROWS + 1 and table.rows[-1][0].startswith("… and 800 more")
    told = "batch 1, batch 2, batch 3, batch 4, batch 5, batch 6, batch 7, batch 8 and 491 more "
    assert [line.startswith(told) for line in targets_lines(found)] == [True]
