"""The opening sentences: who wins, by how much, whether the answers are right, what is lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.plans.plan import Plan
from configs.records.rates import Rates
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from reports.answer import MAX_SENTENCES, Sentence, _pays, answer
from reports.correctness.judge import CorrectnessVerdict, CorrectnessWord
from reports.correctness.ladder import Ladder
from reports.correctness.section import JudgedCell
from reports.decisions.cost import cell_costs
from reports.decisions.decision import decide
from reports.decisions.wrong_answers import cells_with_wrong_answers
from reports.reading.load import CellResult, StudyResult, load_run
from reports.reading.read import Reading, Unreadable
from tests.support.run_folders.priced_runs import cell, make_plan, strong, write_measurements, write_record, write_run


def result(label: str, ranks: int, items: int, speeds: list[float], status: Status = Status.COMPLETED) -> CellResult:
    """A noop cell with a measurement for each speed; without speeds, one measurement that failed (or none:
    `missing`)."""
    cell = Cell(workload=NoopWorkload(items=items), layout=Layout(dp=ranks))
    measurements = {}
    for repeat, speed in enumerate(speeds or ([0.0] if status is not Status.COMPLETED else [])):
        failure = None if speeds else Failure(message="no memory left.")
        record = Record(
            key=cell.key, cell=cell, repeat=repeat, attempt=1, status=status, job="j", position=0,
            started_at=None, finished_at=None, failure=failure,
        )  # fmt: skip
        measurements[repeat] = Reading(record, "p", True, Rates(1.0, 1, items_per_second=speed) if speeds else None)
    return CellResult(cell.key, cell, label, "no model", max(len(speeds), 1), measurements, None)


def study_of(*results: CellResult) -> StudyResult:
    cells = {item.key: item for item in results}
    plan = Plan(
        study="s", models=(), targets=(), measuring=Measuring(memory=False), pack=True, experiments=(),
        cells={key: item.cell for key, item in cells.items()}, repeats={},
    )  # fmt: skip
    return StudyResult(Path(), plan, cells, (), {})


def judged(word: CorrectnessWord, label: str) -> tuple[str, JudgedCell]:
    ladder = Ladder(
        rows=9, logit_difference=2e-6, logit_relative=1e-6, kl_mean=0.0, kl_p99=0.0, top1=1.0, prompts=20,
        prompts_equal=19, perplexity_reference=10.0, perplexity_difference=0.05, perplexity_error=0.01,
    )  # fmt: skip
    verdict = CorrectnessVerdict(word, "logits are off", ladder=None if word == "not judged" else ladder)
    return "tiny", JudgedCell(label, result(label, 1, 1, [1.0]), verdict)


def opening(study: StudyResult, judged: Sequence[tuple[str, JudgedCell]] = ()) -> list[Sentence]:
    return answer(study, judged, decide(study, cell_costs(study), wrong=cells_with_wrong_answers(study, judged)))


def test_the_decision_comes_first_and_nothing_lost_last() -> None:
    study = study_of(result("one", 1, 4, [10.0]), result("two", 2, 4, [18.0, 20.0]), result("other", 1, 3, [19.0]))
    best, rest = opening(study)
    assert best.text == (
        "Run other: 19.0 items/s (1 repeat); two does 0.947 times (1 pair) as much on 2 ranks instead of 1, 47.4 % as "
        "much per rank."
    )
    assert best.evidence == "Recommendations"
    assert rest.text == "All measurements completed. Each of 3 cells has all planned repeats."


def test_a_decision_that_was_measured_on_a_busy_machine_says_so() -> None:
    """Beside two busy processes a study said `Scaling does not pay`, and only the appendix that they took the CPU."""

    def beside(shares: list[float], one: CellResult) -> CellResult:
        noisy = {
            repeat: replace(
                reading, record=reading.record.model_copy(update={"figures": {"others_cpu_share": shares[repeat]}})
            )
            for repeat, reading in one.measurements.items()
        }
        return replace(one, measurements=noisy)

    one, two = result("one", 1, 4, [10.0, 10.0, 10.0]), result("two", 2, 4, [9.0, 9.0, 9.0])
    decision, warning, *_ = opening(study_of(beside([0.9, 0.8, 0.02], one), beside([0.7, 0.8, 0.9], two)))
    assert decision.lead.startswith("Run one") and warning.lead == "Measured on a busy machine:"
    assert "during 2 cells; most during one (90.0 %)" in warning.body and warning.evidence == "Memory and CPU"
    quiet = opening(study_of(beside([0.9, 0.02, 0.02], one), beside([0.7, 0.01, 0.02], two)))
    assert not any("busy" in told.lead for told in quiet)


def test_a_missing_pass_is_said() -> None:
    study = study_of(result("one", 1, 4, [10.0]))
    planned = study.plan.model_copy(update={"measuring": Measuring()})
    assert opening(replace(study, plan=planned))[-1].text == (
        "All repeats completed. The cell has all planned repeats; memory pass: missing for 1 cell."
    )


def test_no_more_than_six_sentences_the_weightiest_ones() -> None:
    cells = [result(f"c{items}", 1, items, [10.0]) for items in range(1, 9)]
    study = replace(study_of(*cells), set_aside=("set_aside/a.json",), devices=("A", "B"))
    unread = Unreadable("records/x.json", "not JSON")
    told = opening(replace(study, unreadable=(unread,)), [judged("agrees", "a")])
    assert len(told) <= MAX_SENTENCES
    assert any("cannot be read" in one.lead for one in told) and told[-1].lead == "All measurements completed."
    assert any(one.lead.startswith("Run ") for one in told) and any("answers are right" in one.lead for one in told)


def test_cells_without_a_figure_are_counted_with_the_reason() -> None:
    lost = [result(f"c{items}", 1, items, [], Status.OUT_OF_MEMORY) for items in (1, 2, 3)]
    sentence = answer(study_of(*lost, result("never", 1, 4, [])), [])[-1]
    assert sentence.lead == "4 of 4 cells have no figure:"
    assert sentence.body.startswith("c1: out of memory (no memory left); c2")
    assert sentence.body.endswith("and 1 more, listed under failures.")
    assert (
        answer(study_of(result("never", 1, 4, [])), [])[-1].text
        == "1 of 1 cell has no figure: never: not measured yet."
    )


def test_wrong_answers_come_first() -> None:
    study = study_of(result("one", 1, 4, [10.0]))
    wrong = opening(study, [judged("agrees", "a"), judged("defect", "b")])[1]
    assert wrong.lead == "Some answers are wrong."
    assert wrong.body == (
        "tiny, b, is off by more than noise: logits are off. "
        "tiny, a, differs from the reference by the noise of reduction order alone "
        "(every token equal on 19 of 20 prompts; largest logit difference 2.0e-6)."
    )
    assert opening(study, [judged("defect", "b")])[1].lead == "The answers are wrong."
    unknown = opening(study, [judged("defect", "b"), judged("not judged", "c")])[1]
    assert unknown.lead == "The answers that could be judged are wrong."


def test_right_and_unknown_answers() -> None:
    study = study_of(result("one", 1, 4, [10.0]))
    agrees = opening(study, [judged("agrees", "a"), judged("not judged", "b")])[1]
    assert agrees.lead == "The answers that could be judged are right."
    assert "tiny, b, could not be judged: logits are off." in agrees.body
    assert opening(study, [judged("not judged", "b")])[1].lead == "Whether the answers are right is not known."
    both = opening(study, [judged("agrees", "a"), judged("agrees", "b")])[1]
    assert both.text.startswith("The answers are right. 2 cells of tiny differ from the reference by")
    assert "every token equal on 38 of 40 prompts" in both.text


@pytest.mark.parametrize(
    ("growth", "efficiency", "pays"),
    [
        (2, 0.52, False),  # the second rank does next to nothing
        (2, 0.74, False),
        (2, 0.75, True),
        (4, 0.62, False),
        (4, 0.63, True),
        (64, 0.50, False),
        (64, 0.51, True),  # with many ranks it is an efficiency of a half
    ],
)
def test_scaling_pays_where_an_added_rank_does_half_of_the_first(growth: float, efficiency: float, pays: bool) -> None:
    assert _pays(growth, efficiency) is pays


@pytest.mark.parametrize(("order", "told"), [((4, 1, 2), False), ((2, 1, 4), True)])
def test_fewer_ranks_than_the_baseline_say_nothing_of_more(tmp_path: Path, order: tuple[int, ...], told: bool) -> None:
    cells = {ranks: cell(dp=ranks) for ranks in (1, 2, 4)}
    plan = make_plan([*cells.values()], experiments=[strong([cells[ranks] for ranks in order])])
    run = write_run(tmp_path, plan)
    for ranks, item in cells.items():
        write_measurements(run, item, [100.0 * ranks**0.8 * (1 + 0.001 * repeat) for repeat in range(10)])
    text = " ".join(sentence.text for sentence in opening(load_run(run)))
    assert ("strong scaling of tiny gives 87.1 % (87.1 to 87.1) of linear at 4 ranks" in text) is told
    assert ("scaling" in text) is told and "at 1 rank" not in text


@pytest.mark.parametrize(("repeats", "bounds"), [(5, "[87.1 to 87.1]"), (6, "(87.1 to 87.1)")])
def test_a_range_of_too_few_repeats_is_not_told_as_an_interval(tmp_path: Path, repeats: int, bounds: str) -> None:
    cells = [cell(dp=ranks) for ranks in (1, 2)]
    run = write_run(tmp_path, make_plan(cells, repeats, experiments=[strong(cells)]))
    for item in cells:
        rates = [100.0 * item.layout.ranks**0.8 * (1 + 0.001 * repeat) for repeat in range(repeats)]
        write_measurements(run, item, rates)
    told = {sentence.evidence: sentence.text for sentence in opening(load_run(run))}
    assert f"gives 87.1 % {bounds} of linear at 2 ranks" in told["strong: tiny"]
    assert f"87.1 % {bounds} as much per rank" in told["Recommendations"]


def test_repeats_that_were_cancelled_or_not_paid_for_did_not_fail(tmp_path: Path) -> None:
    """A run that was cancelled, or whose budget ended, opened with repeats that failed."""
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one], repeats=6))
    write_measurements(run, one, [10.0, 11.0])
    for repeat, status in enumerate((Status.CANCELLED, Status.OVER_BUDGET, Status.CANCELLED, Status.TIMEOUT), 2):
        write_record(run, one, repeat, status=status, failure=Failure(message="why"))
    told = answer(load_run(run), [])[-1]
    assert told.text == (
        "Every cell has a figure, but 1 repeat failed and 3 repeats were not measured (cancelled, over budget)."
    )
