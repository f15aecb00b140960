"""Training in the report, from made-up records: utilization, the step's parts, equal learning, ways side by side."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.objectives import Objectives
from reports.decisions.objectives import judge_objectives
from reports.export import cells_csv
from reports.plots.experiments.time_split import draw_time_split
from reports.plots.style import drawn
from reports.profiles.time_split import time_split, time_split_sentence, time_split_table
from reports.reading.devices import load_comparable
from reports.reading.load import load_run
from reports.render import render_report
from reports.text import Table
from reports.training.cells import (
    checkpoints_table,
    exposed_share,
    memory_table,
    network_table,
    speed_lines,
    speed_table,
    split_sentence,
    split_table,
    trained_cells,
    utilization_estimate,
)
from reports.training.equality import JUDGED_STEPS, TOLERANCES, equality_sentence, equality_table, same_learning
from reports.training.strategies import ranking, strategies, strategies_sentence, strategies_table, way_name
from tests.support.run_folders.made_studies import planned, write_plan, write_record
from tests.support.run_folders.reports import whole_report

TOKENS = 8 * 16
STUDY = """
targets:
  - {kind: slurm, name: slow, nodes: 2}
  - {kind: slurm, name: fast, nodes: 2}
workload: {kind: train, global_batch_size: 8, sequence_length: 16, steps: 5}
measuring: {repeats: 6}
experiments:
  ways:
    kind: optimization
    baseline: {dp: 2}
    variants:
      fsdp: {strategy: fsdp}
      zero2 in parts: {strategy: zero2, micro_batch_size: 2}
      half: {dtype: bfloat16}
  one: {kind: sweep, over: {dp: [1]}}
"""


def step_samples(cell: Cell, seconds: float, losses: Any, exposed: float | None, norms: Any = None) -> dict[str, Any]:
    """Four measured steps: 10 % data, 20 % forward, 40 % backward, the rest but what is exposed the optimizer's."""
    samples: dict[str, Any] = {}
    for rank in range(cell.layout.ranks):
        shares = {"data": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.3 - (exposed or 0.0)}
        shares |= {} if exposed is None else {"exposed_communication": exposed}
        samples |= {f"{rank}/{name}_seconds": [seconds * share] * 4 for name, share in shares.items()}
        samples[f"{rank}/step_seconds"] = [seconds] * 4
        samples[f"{rank}/loss"] = losses
        samples[f"{rank}/gradient_norm"] = np.asarray(losses) / 2 if norms is None else norms
        samples[f"{rank}/checkpoint_seconds"] = [0.0, seconds, 0.0, 0.0]
    return samples


def write_training(
    run: RunPaths,
    cell: Cell,
    seconds: float,
    losses: Any = (4.0, 3.5, 3.0, 2.8, 2.7),
    exposed: float | None = 0.1,
    repeats: int = 6,
    peaks_mib: tuple[float, ...] = (),
    norms: Any = None,
    **figures: Any,
) -> None:
    """Completed repeats, each a little slower than the one before."""
    known = {"tokens_per_step": TOKENS, "steps": 5, "model_flops_per_step": 1e9, "hardware_flops_per_step": 1.25e9}
    for repeat in range(repeats):
        waited = exposed if cell.layout.ranks > 1 else 0.0
        samples = step_samples(cell, seconds * (1 + 0.002 * repeat), losses, waited, norms)
        hosts = [f"n{rank}" for rank in range(cell.layout.ranks)]
        write_record(run, cell, repeat, samples=samples, figures=known | figures, hosts=hosts)
    if peaks_mib:
        peaks = [int(peak * 2**20) for peak in peaks_mib]
        given: dict[str, Any] = {"figures": {"peak_memory_bytes": peaks[0]}}
        write_record(run, cell, 0, measuring_pass="memory", rank_figures={"peak_memory_bytes": peaks}, **given)


def by_way(plan: Plan, target: str) -> dict[str, Cell]:
    """Cells of two ranks on a target, by way and precision."""
    cells = [cell for cell in plan.cells.values() if cell.target == target and cell.layout.dp == 2]
    return {way_name(cell) + (" half" if cell.dtype != "float32" else ""): cell for cell in cells}


def made(folder: Path) -> RunPaths:
    """Two targets. On the slow one zero2 is predicted faster than fsdp and measured slower; on the fast one all is
    right, but fsdp and ddp are equal within noise."""
    plan = planned(STUDY, repeats=6)
    said: dict[str, Prediction] = {}
    for target, predicted in (("slow", (0.09, 0.2, 0.1)), ("fast", (0.05, 0.06, 0.08))):
        for name, seconds in zip(("ddp", "fsdp", "zero2, in 2 micro-batches"), predicted, strict=True):
            said[by_way(plan, target)[name].key] = Prediction(
                step_seconds=seconds, tokens_per_second=TOKENS / seconds, peak_memory_bytes=90 * 2**20,
                exposed_communication_seconds=seconds / 4, network_bytes_per_step=3e6, peak_flops=2e10,
                peak_source="a data sheet",
            )  # fmt: skip
    plan = plan.model_copy(update={"predictions": said})
    run = write_plan(folder, plan)
    curve = np.array([4.0, 3.5, 3.0, 2.8, 2.7])
    for target, measured in (("slow", (0.1, 0.15, 0.3)), ("fast", (0.05, 0.0501, 0.1))):
        ways = by_way(plan, target)
        for name, seconds in zip(("ddp", "fsdp", "zero2, in 2 micro-batches"), measured, strict=True):
            write_training(
                run, ways[name], seconds, curve * (1 + (1e-6 if name == "ddp" else -2e-6)), peaks_mib=(100, 80),
                communication_bytes_per_step=2_000_000, network_sent_bytes=16_000_000, checkpoint_bytes=5 * 2**20,
                checkpoint_seconds=0.2, checkpoints_written=3, tokens_per_second_with_checkpoints=1000.0,
            )  # fmt: skip
        stray = curve * np.array([1, 1, 1.05, 1, 1]) if target == "slow" else curve * 1.003
        write_training(run, ways["ddp half"], 0.2, stray, exposed=None)
        (alone,) = (cell for cell in plan.cells.values() if cell.target == target and cell.layout.dp == 1)
        write_training(run, alone, 0.16, curve)
    return run


def column(table: Table | None, title: str, place: int = 0) -> list[str]:
    """A column by its title; `place` chooses among those of the same title."""
    assert table is not None
    at = [index for index, name in enumerate(table.columns) if name == title][place]
    return [row[at] for row in table.rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return made(tmp_path_factory.mktemp("training") / "run")


def test_utilization_is_flops_over_time_ranks_and_peak(run: RunPaths) -> None:
    study = load_run(run)
    cells = by_way(study.plan, "slow")
    ddp, half = (study.cells[cells[name].key] for name in ("ddp", "ddp half"))
    mfu, hfu = (utilization_estimate(study.plan, ddp, kind) for kind in ("MFU", "HFU"))
    # 1e9 FLOPs in 0.1 s on two ranks of 2e10 FLOP/s: a quarter; repeats get slower by up to 1 %.
    assert mfu is not None and mfu.high == pytest.approx(0.25) and mfu.low == pytest.approx(0.25 / 1.01)
    assert hfu is not None and hfu.high == pytest.approx(0.25 * 1.25)
    assert utilization_estimate(study.plan, half, "MFU") is None, "its plan knows no peak"
    table = speed_table(study, trained_cells(study))
    assert "–" in column(table, "MFU, %") and column(table, "tokens/s a rank")[0].startswith("637")
    lines = speed_lines(study, trained_cells(study))
    assert lines[0] == "Peak of 6 cells: 20.0 GFLOP/s a rank in float32 (a data sheet)."
    assert lines[1].startswith("No MFU and HFU for 4 cells")


def test_tokens_with_checkpoints_are_of_the_slowest_rank_s_steps(run: RunPaths) -> None:
    """Rank 0's own times gave a rate above that without checkpoints: they lack its waiting for slower ranks."""
    study = load_run(run)
    cells = trained_cells(study)
    table = speed_table(study, cells)
    for cell, plain, slower in zip(
        cells, column(table, "tokens/s"), column(table, "tokens/s, checkpoints included"), strict=True
    ):
        if slower != "–":
            # A step's time for a checkpoint in four steps.
            assert float(slower.split()[0].replace(",", "")) == pytest.approx(
                0.8 * float(plain.split()[0].replace(",", "")), rel=0.005
            ), cell.name


def test_a_slow_start_up_makes_no_checkpoint_cheaper(tmp_path: Path) -> None:
    """Tokens/s are of the steady steps: so is the share of checkpoints, which slow steps before them hid."""
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    cell = next(iter(plan.cells.values()))
    steps, checkpoints = np.full(40, 0.1), np.zeros(40)
    steps[:8], checkpoints[1::4] = 5.0, 0.1
    samples: dict[str, Any] = {}
    for rank in range(cell.layout.ranks):
        samples |= {f"{rank}/step_seconds": steps, f"{rank}/checkpoint_seconds": checkpoints}
        samples[f"{rank}/loss"] = np.linspace(4, 3, 40)
    known = {"tokens_per_step": TOKENS, "steps": 40, "model_flops_per_step": 1e9, "checkpoint_bytes": 1}
    for repeat in range(6):
        write_record(run, cell, repeat, samples=samples, figures=known)
    study = load_run(run)
    cells = [result for result in trained_cells(study) if result.key == cell.key]
    table = speed_table(study, cells)
    plain, slower = (column(table, name)[0] for name in ("tokens/s", "tokens/s, checkpoints included"))
    assert float(plain.split()[0].replace(",", "")) == pytest.approx(TOKENS / 0.1, rel=0.005)
    assert float(slower.split()[0].replace(",", "")) == pytest.approx(TOKENS / 0.125, rel=0.005)


def test_the_parts_sum_to_the_step(run: RunPaths) -> None:
    study = load_run(run)
    cells = trained_cells(study)
    table = split_table(cells)
    ddp = study.cells[by_way(study.plan, "slow")["ddp"].key]
    row = next(row for row in table.rows if row[1] == ddp.name.replace("_", "\\_")) if table else ()
    assert [value.partition(" ")[0] for value in row[2:]][:6] == ["100", "10.1", "20.1", "40.2", "10.1", "20.1"]
    assert exposed_share(ddp) == pytest.approx(0.1)
    assert exposed_share(study.cells[by_way(study.plan, "slow")["ddp half"].key]) is None
    assert "10.0 % of a step" in split_sentence(cells)


def test_exposed_communication_is_one_figure_wherever_it_stands(tmp_path: Path) -> None:
    """The median over repeats, as objectives are judged by; cells.csv and the strategies had the mean instead."""
    plan = planned(STUDY, repeats=6)
    plan = plan.model_copy(update={"objectives": Objectives(exposed_communication_share=0.15)})
    run = write_plan(tmp_path / "run", plan)
    cell, other = (by_way(plan, "slow")[name] for name in ("ddp", "fsdp"))
    figures = {"tokens_per_step": TOKENS, "steps": 5}
    for way in (cell, other):
        for repeat, share in enumerate((0.1, 0.1, 0.1, 0.1, 0.1, 0.25)):
            samples = step_samples(way, 0.1, (4.0, 3.5, 3.0, 2.8, 2.7), share)
            write_record(run, way, repeat, samples=samples, figures=figures)
    study = load_run(run)
    (judged,) = (one for one in judge_objectives(study) if one.result and one.result.key == cell.key)
    (line,) = (line for line in csv.DictReader(io.StringIO(cells_csv(study))) if line["key"] == cell.key)
    (compared,) = (one for one in strategies(study) if one.target == "slow" and "float32" in one.title)
    assert judged.value == pytest.approx(0.1)
    assert float(line["exposed_communication_share"]) == pytest.approx(0.1)
    assert column(strategies_table(study, compared), "exposed communication")[0] == "10.0 %"
    assert exposed_share(study.cells[cell.key]) == pytest.approx(0.125), "of a mean step, beside its other parts"


def test_what_is_beside_the_step(run: RunPaths) -> None:
    study = load_run(run)
    cells = trained_cells(study)
    assert column(memory_table(study, cells), "measured, MiB, fullest rank")[0] == "100"
    assert column(memory_table(study, cells), "emptiest rank")[0] == "80.0"
    assert column(memory_table(study, cells), "predicted over measured")[0] == "-10 %"
    network = network_table(study, cells)
    # 16 MB in four measured steps; 3 MB a step were predicted.
    assert column(network, "sent by a node, MB")[0] == "4.00"
    assert column(network, "handed to collectives, MB a rank")[0] == "2.00"
    assert column(network, "predicted over measured")[0] == "-25 %"
    saved = checkpoints_table(study, cells)
    assert column(saved, "checkpoints")[0] == "3" and column(saved, "MiB")[0] == "5.00"
    assert column(saved, "share of the time")[0] == "20.0 %", "one step's time after four steps"
    assert saved is not None and "torn" not in saved.columns


def test_ways_to_compute_the_same_are_held_against_the_plainest(run: RunPaths) -> None:
    study = load_run(run)
    (found,) = same_learning(study)
    assert found.reference.result.cell.layout.ranks == 1 and len(found.others) == 9
    ways = {(item.curve.result.cell.target, item.curve.result.cell.dtype): item for item in found.others}
    assert not ways["slow", "bfloat16"].within and ways["fast", "bfloat16"].within
    assert ways["slow", "bfloat16"].loss == pytest.approx(0.05)
    assert ways["slow", "float32"].within and ways["slow", "float32"].loss < 3e-6
    assert "8 of 9 other cells match it" in equality_sentence(
        found
    ) and "Not explained by rounding: " in equality_sentence(found)
    assert column(equality_table(found), "follows").count("no") == 1


def test_only_the_first_steps_are_judged(tmp_path: Path) -> None:
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    ways = by_way(plan, "fast")
    curve = np.linspace(4, 2, 3 * JUDGED_STEPS)
    late = curve.copy()
    late[2 * JUDGED_STEPS] *= 1 + 100 * TOLERANCES["float32"][0]
    write_training(run, ways["ddp"], 0.1, curve)
    write_training(run, ways["fsdp"], 0.1, late[:-1])
    (found,) = same_learning(load_run(run))
    (item,) = found.others
    assert item.within and item.loss_first == 0 and item.loss == pytest.approx(100 * TOLERANCES["float32"][0])
    assert item.steps == 3 * JUDGED_STEPS - 1


@pytest.mark.parametrize(("broken", "verb"), [(("fsdp",), "has"), (("ddp", "fsdp"), "have")])
@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_no_small_difference(
    tmp_path: Path, broken: tuple[str, ...], verb: str, loss: float
) -> None:
    """A maximum takes no notice of NaN: curves that broke were said to lie 1e-7 from the reference."""
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    ways = by_way(plan, "fast")
    curve = np.linspace(4, 2, 3 * JUDGED_STEPS)
    (alone,) = (cell for cell in plan.cells.values() if cell.target == "fast" and cell.layout.dp == 1)
    write_training(run, alone, 0.1, curve)
    for name in ("ddp", "fsdp", "zero2, in 2 micro-batches"):
        losses = curve * (1 + 1e-7)
        losses[20:] = loss if name in broken else losses[20:]
        write_training(run, ways[name], 0.1, losses)
    (found,) = same_learning(load_run(run))
    text = equality_sentence(found)
    assert f"{verb} a loss that is not finite." in text and "is 1.0e-7 (" in text
    keys = {ways[name].key for name in broken}
    names = [item.curve.result.name for item in found.others if item.curve.result.key in keys]
    assert len(names) == len(broken) and all(name in text.rpartition("; ")[2] for name in names)


def test_the_plainest_itself_may_have_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    ways = by_way(plan, "fast")
    for name in ("ddp", "fsdp"):
        write_training(run, ways[name], 0.1, [4.0, 3.0, np.inf])
    (found,) = same_learning(load_run(run))
    assert "the largest" not in equality_sentence(found) and "have a loss that is not finite." in equality_sentence(
        found
    )


HALF = STUDY.replace("\nworkload:", "\ndtype: float16\nworkload:").replace("bfloat16", "float32")
SKIPPING = np.array([np.inf, 2.0, 1.5, 1.2, 1.1])


def test_a_step_that_both_skip_is_no_difference(tmp_path: Path) -> None:
    plan = planned(HALF, repeats=6)
    run, curve = write_plan(tmp_path / "run", plan), np.array([4.0, 4.0, 3.5, 3.0, 2.8])
    cells = [cell for cell in plan.cells.values() if cell.target == "fast" and cell.dtype == "float16"]
    for cell in cells:
        write_training(run, cell, 0.1, curve, norms=SKIPPING * (1 if cell.layout.dp == 1 else 1.01))
    (found,) = same_learning(load_run(run))
    assert len(found.others) == len(cells) - 1 and all(item.within and item.steps == 5 for item in found.others)
    assert found.others[0].norm == pytest.approx(0.01)
    assert "Not explained" not in equality_sentence(found) and "skipped" not in equality_sentence(found)


def test_curves_are_compared_up_to_a_step_that_one_of_them_skips(tmp_path: Path) -> None:
    plan = planned(HALF, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    ways = {way_name(cell) + cell.dtype: cell for cell in plan.cells.values() if cell.target == "fast"}
    write_training(run, ways["ddpfloat32"], 0.1, [4.0, 3.5, 3.0, 2.8, 2.7])
    write_training(run, ways["fsdpfloat16"], 0.1, [4.0, 4.0, 3.5, 3.0, 2.8], norms=SKIPPING)
    (found,) = same_learning(load_run(run))
    (item,) = found.others
    assert item.within and item.lags and item.steps == 1
    text, name = equality_sentence(found), item.curve.result.name
    assert text.endswith(f" Compared up to the first step that only one of the two skipped in float16: {name}.")
    assert column(equality_table(found), "follows") == ["yes"]


def test_models_with_batch_norms_learn_the_same_of_equal_micro_batches_alone(tmp_path: Path) -> None:
    """They normalise by it: other micro-batches were said to be a difference that rounding does not explain."""
    plan = planned(STUDY, repeats=6)
    run, curve = write_plan(tmp_path / "run", plan), np.linspace(4, 2, 5)
    ways = by_way(plan, "fast")
    for name, losses in (("ddp", curve), ("fsdp", curve), ("zero2, in 2 micro-batches", 1.1 * curve)):
        write_training(run, ways[name], 0.1, losses, batch_norms=3)
    (found,) = same_learning(load_run(run))
    assert [item.within for item in found.others] == [True] and "Not explained" not in equality_sentence(found)


def test_a_ranking_is_wrong_where_a_clear_pair_is(run: RunPaths) -> None:
    study = load_run(run)
    slow, fast = strategies(study)
    assert (slow.target, fast.target) == ("slow", "fast") and len(slow.ways) == 3, "bfloat16 is no way of its own"
    wrong = ranking(slow)
    assert wrong.pairs == wrong.clear == 3 and [(a.name, b.name) for a, b in wrong.wrong] == [
        ("fsdp", "zero2, in 2 micro-batches")
    ]
    assert "wrong in 1: fsdp is faster than zero2, in 2 micro-batches." in strategies_sentence(slow)
    right = ranking(fast)
    assert (right.pairs, right.clear, right.wrong) == (3, 2, ()), "ddp and fsdp do not differ clearly"
    assert "2 differ clearly, and the planner's ranking of them is right." in strategies_sentence(fast)
    table = strategies_table(study, slow)
    assert column(table, "place measured") == ["1", "2", "3"] and column(table, "place predicted") == ["1", "3", "2"]
    assert column(table, "predicted") == ["90.0", "200", "100"] and column(table, "predicted", 1)[0] == "25.0 %"
    assert column(table, "peak memory, MiB, fullest rank") == ["100"] * 3


def test_images_have_no_length_of_sequences(tmp_path: Path) -> None:
    titles = []
    images = STUDY.replace("train,", "train, task: image_classification,").replace("sequence_length: 16, ", "")
    for name, study in (("texts", STUDY), ("images", images)):
        plan = planned(study, repeats=1)
        run, ways = write_plan(tmp_path / name, plan), by_way(plan, "fast")
        write_training(run, ways["ddp"], 0.1, repeats=1)
        titles.append(strategies(load_run(run))[-1].title)
    assert titles[0].endswith("float32, batch 8 x 16") and titles[1].endswith("float32, batch 8")


def test_one_repeat_tells_no_ways_apart(tmp_path: Path) -> None:
    plan = planned(STUDY, repeats=1)
    ways = by_way(plan, "fast")
    said = {ways[name].key: Prediction(step_seconds=1.0) for name in ("ddp", "fsdp")}
    run = write_plan(tmp_path / "run", plan.model_copy(update={"predictions": said}))
    write_training(run, ways["ddp"], 0.1, repeats=1)
    write_training(run, ways["fsdp"], 0.9, repeats=1)
    found = next(each for each in strategies(load_run(run)) if each.target == "fast")
    assert ranking(found).pairs == 1 and ranking(found).clear == 0
    text = strategies_sentence(found)
    assert "s a step (1 repeat), not told apart from fsdp. " in text and "No pair of ways differs clearly" in text
    assert column(strategies_table(load_run(run), found), "state").count("missing") == 1


def test_ways_on_different_devices_are_not_ranked(tmp_path: Path) -> None:
    """A target of mixed nodes ran ddp on one kind of GPU and zero2 on another; what has no figure is still shown."""
    plan = planned(STUDY, repeats=6)
    ways = by_way(plan, "fast")
    run = write_plan(tmp_path / "run", plan)
    write_training(run, ways["ddp"], 0.01, device="H100")
    write_training(run, ways["zero2, in 2 micro-batches"], 0.2, device="A10G")
    (found,) = (each for each in strategies(load_comparable(run)) if each.target == "fast")
    assert [way.name for way in found.ways] == ["ddp", "fsdp"] and [way.name for way in found.ranked] == ["ddp"]
    write_training(run, ways["fsdp"], 0.1, device="A10G")
    (found,) = (each for each in strategies(load_comparable(run)) if each.target == "fast")
    assert "tiny on A10G" in found.title and [way.name for way in found.ranked] == ["fsdp", "zero2, in 2 micro-batches"]
    assert strategies_sentence(found).startswith("Fastest is fsdp")


def test_the_report_has_it_all(run: RunPaths) -> None:
    render_report(run)
    text = whole_report(run)
    for heading in (
        "## Training", "### Speed and utilization", "### Where a step goes", "### The same learning",
        "### Memory by rank", "### Network", "### Checkpoints", "## Strategies",
    ):  # fmt: skip
        assert f"\n{heading}\n" in text, heading
    assert (run.plots / "training-steps.png").exists() and len(list(run.plots.glob("strategies-*.svg"))) == 2
    lines = {line["key"]: line for line in csv.DictReader(run.cells_csv.read_text().splitlines())}
    ways = by_way(load_run(run).plan, "slow")
    assert float(lines[ways["ddp"].key]["model_flops_utilization"]) == pytest.approx(0.25, rel=0.01)
    assert float(lines[ways["ddp"].key]["exposed_communication_share"]) == pytest.approx(0.1)
    assert lines[ways["ddp half"].key]["hardware_flops_utilization"] == "", "unknown is empty"


def test_an_objective_takes_what_the_steps_timed(run: RunPaths) -> None:
    study = load_run(run)
    bounds = study.plan.objectives.model_copy(update={"exposed_communication_share": 0.08})
    judged = judge_objectives(replace(study, plan=study.plan.model_copy(update={"objectives": bounds})))
    found = {item.result.key: item for item in judged if item.result is not None}
    ways = by_way(study.plan, "slow")
    missed, unknown = found[ways["fsdp"].key], found[ways["ddp half"].key]
    assert missed.word == "missed" and missed.value == pytest.approx(0.1) and missed.interval is not None
    assert unknown.word == "undecided" and "no profile pass" in unknown.reason
    assert len(found) == 8, "one rank waits for nobody"


def test_scaling_shows_the_parts_of_a_step_by_ranks(tmp_path: Path) -> None:
    text = STUDY.partition("experiments:")[0] + "experiments: {strong: {kind: strong, grow: dp, to: 2}}"
    plan = planned(text, repeats=2)
    run = write_plan(tmp_path / "run", plan)
    for cell in plan.cells.values():
        write_training(run, cell, 0.2 / cell.layout.dp, repeats=2)
    study = load_run(run)
    found = time_split(study, plan.experiments[0])
    assert found is not None and found.unit == "step"
    assert found.names[:5] == ["data", "forward", "backward", "exposed communication", "optimizer"]
    table = time_split_table(found)
    assert column(table, "communication") == ["none: one rank", "timed: see exposed communication"]
    assert column(table, "exposed communication, ms (share)")[1].endswith("(10 %)")
    assert "unknown" not in time_split_sentence(found)
    assert drawn(lambda figure: draw_time_split(figure, found))["png"]


def test_records_of_earlier_versions_have_no_more_than_they_had(tmp_path: Path) -> None:
    plan = planned(STUDY, repeats=1)
    run = write_plan(tmp_path / "run", plan)
    for cell in plan.cells.values():
        ranks = range(cell.layout.ranks)
        samples = {f"{rank}/{name}": [1.0, 0.5] for rank in ranks for name in ("step_seconds", "loss", "gradient_norm")}
        write_record(run, cell, 0, samples=samples, figures={"tokens_per_step": TOKENS})
    render_report(run)
    text = whole_report(run)
    assert "## Training" in text and "### " not in text.split("## Training")[1].split("\n## ")[0]
    assert "| model | cell | steps | first loss, nats | last loss, nats |" in text


def test_a_cell_whose_loss_is_not_finite_is_never_recommended(tmp_path: Path) -> None:
    """The fastest way to train was recommended although it learnt nothing."""
    text = STUDY.replace("  - {kind: slurm, name: slow, nodes: 2}\n", "")
    plan = planned(text, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    for cell in plan.cells.values():
        broken = cell.layout.strategy == "fsdp"
        write_training(run, cell, 0.01 if broken else 0.1, [4.0, 3.5, np.nan if broken else 3.0, 2.8, 2.7])
    summary = render_report(run)
    assert "fsdp" not in summary.sentences[0].partition(":")[0]
    assert "(left out: 1 cell with wrong answers or a loss that is not finite)" in summary.sentences[0]
    assert "Not recommended because of wrong answers or a loss that is not finite: 1 cell." in whole_report(run)


def test_what_the_figure_of_losses_leaves_out_is_told(tmp_path: Path) -> None:
    """It has seven colours; of nine learning rates the two best were left out without a word."""
    rates = "[1.0e-5, 3.0e-5, 1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3, 1.0e-2, 3.0e-2, 0.1]"
    study = "workload: {kind: train, global_batch_size: 8, sequence_length: 16, steps: 5}\n"
    study += f"experiments: {{rates: {{kind: sweep, over: {{learning_rate: {rates}}}}}}}"
    plan = planned(study, repeats=1)
    for count in (7, 9):
        run = write_plan(tmp_path / str(count), plan)
        for cell in list(plan.cells.values())[:count]:
            write_training(run, cell, 0.1, repeats=1)
        render_report(run)
        text = whole_report(run)
        assert ("The figure shows the first 7 of 9 curves." in text) == (count == 9)
        assert ("The figure shows 6 of 9 points, evenly chosen." in text) == (count == 9)
        assert ("The figure shows 6 of 7 points, evenly chosen." in text) == (count == 7)


def test_what_figures_of_bars_leave_out_is_told(tmp_path: Path) -> None:
    """Of thirty ways to train, the figures had 24 bars, those without a result not among them, without a word."""
    over = "{layout.strategy: [ddp, fsdp, zero1, zero2, zero3], micro_batch_size: [1, 2, 4, 8, 16, 32]}"
    study = "workload: {kind: train, global_batch_size: 64, sequence_length: 16, steps: 5}\nlayout: {dp: 2}\n"
    study += f"experiments: {{ways: {{kind: sweep, over: {over}}}}}"
    plan = planned(study, repeats=1)
    cells = list(plan.cells.values())
    run = write_plan(tmp_path / "run", plan)
    for place, cell in enumerate(cells):
        write_training(run, cell, 0.1 + place / 1000, repeats=1)
    render_report(run)
    text = whole_report(run)
    assert f"The figure shows the first 24 of {len(cells)} cells." in text
    assert f"The figure shows the first 24 of {len(cells)} ways, from the fastest on." in text
