"""Load experiments as tables and sentences: labels of any text, intervals, medians of searches."""

from dataclasses import replace

import numpy as np

from configs.load.objectives import RequestObjectives
from configs.plans.plan import CellPoint, PlannedExperiment
from configs.spec.cell import Cell
from configs.workloads.serve import ServeWorkload
from reports.document.inline import section_html
from reports.document.structure import as_markdown
from reports.experiments.load.experiment import LoadExperiment, LoadPoint, LoadRepeat
from reports.experiments.load.text import (
    latencies_table,
    limits_table,
    load_lines,
    load_sentence,
    load_table,
    servers_table,
)
from reports.load.metrics import serving_metrics
from reports.load.search import FoundRate
from reports.load.verdict import LoadVerdict, Verdict, judged
from reports.reading.load import CellResult
from tests.support.run_folders.load_runs import made_run


def experiment_of(label: str, ttft: list[float], limits: list[float] | None = None) -> LoadExperiment:
    """One point; a repeat for each TTFT, and of a search for each limit."""
    objectives = RequestObjectives(ttft_seconds=1.0)
    find = None if limits is None else "max_rate"
    cell = Cell(model="folder:abc", workload=ServeWorkload(find=find, objectives=objectives))
    repeats = {}
    for repeat, seconds in enumerate(ttft):
        run = made_run(np.arange(0, 40, 0.1), seconds)
        figures = serving_metrics(run, objectives)
        found = None if limits is None else FoundRate(limits[repeat], 1.0, 9.0, True, "it is settled", ())
        repeats[repeat] = LoadRepeat(figures, judged(run, figures), found, None, None)
    result = CellResult(cell.key, cell, label, "tiny", len(ttft), {}, None)
    planned = CellPoint(cell=cell.key, values={}, label=label, baseline=True)
    experiment = PlannedExperiment(name="load", kind="load", model="tiny", points=(planned,))
    return LoadExperiment(experiment, (LoadPoint(label, result, repeats, None, None),))


def test_a_label_with_marks_of_markdown_stays_in_its_cell() -> None:
    found = experiment_of("trace a|b_*.jsonl", [0.1])
    for table in (load_table(found), latencies_table(found)):
        assert table.rows[0][0] == r"trace a\|b\_\*.jsonl"


def test_an_interval_is_in_parentheses_as_everywhere() -> None:
    row = latencies_table(experiment_of("rate 1", [0.100 + 0.001 * repeat for repeat in range(8)])).rows[0]
    assert row[1] == "104 (101 to 106)" and "[" not in "".join(row)


def test_of_an_even_number_of_searches_the_middle_is_between_two() -> None:
    text = load_sentence(experiment_of("max_rate", [0.1, 0.1], [2.0, 6.0]))
    assert text.startswith("4.00 requests/s (1.00 to 9.00, 2 searches) is the highest rate with TTFT up to 1.00 s")


def test_searches_that_end_differently_are_all_told() -> None:
    """A search in which the lowest rate failed was left out beside one that passed, or had the other's reason."""
    found = experiment_of("max_rate", [0.1, 0.1], [2.0, 6.0])
    (point,) = found.points
    slow = replace(
        point.repeats[1], search=FoundRate(None, None, 0.5, False, "no rate down to 0.5 requests/s passes", ())
    )
    text = load_sentence(replace(found, points=(replace(point, repeats={0: point.repeats[0], 1: slow}),)))
    assert text.startswith("2.00 requests/s (1.00 to 9.00, 1 search) is the highest rate")
    assert "1 of 2 searches has no estimate (no rate down to 0.5 requests/s passes)." in text
    fast = replace(point.repeats[0], search=FoundRate(None, 64.0, None, False, "no rate up to 64 requests/s fails", ()))
    text = load_sentence(replace(found, points=(replace(point, repeats={0: slow, 1: fast}),)))
    assert text.startswith(
        "At least 64.0 requests/s meet TTFT up to 1.00 s (no rate up to 64 requests/s fails). Another"
    )
    assert "Another search: 0.500 requests/s are too many" in text and "(no rate down to 0.5 requests/s passes)" in text


def test_words_of_a_server_are_shown_as_they_are() -> None:
    """`90 % of` in a message was read as the share that notes begin with, and its marks as those of the report."""
    found = experiment_of("rate 1", [0.1])
    (point,) = found.points
    notes = ["4 of all 9 requests failed (44.4 %): HTTP 503: 90 % of <b>*all*</b> slots (4)"]
    notes += [f"{share} % of the answers have fewer chunks than tokens" for share in ("1.5", "2.1e-6", "12")]
    one = replace(point.repeats[0], judgement=LoadVerdict(Verdict.VALID, "", tuple(notes)))
    lines = load_lines(replace(found, points=(replace(point, repeats={0: one}),)))
    assert "2.1e-6 to 12 % of the answers have fewer chunks than tokens." in lines
    (shown,) = (line for line in lines if line.startswith("4 of all 9"))
    assert shown == "4 of all 9 requests failed (44.4 %): HTTP 503: 90 % of <b>*all*</b> slots (4)."
    told = r"4 of all 9 requests failed (44.4 %): HTTP 503: 90 % of &lt;b&gt;\*all\*&lt;/b&gt; slots (4)."
    assert as_markdown(shown) == told and section_html(shown).endswith("&lt;b&gt;*all*&lt;/b&gt; slots (4).")


def test_notes_that_differ_in_a_count_leave_room_for_the_others() -> None:
    """Each count of requests was a line of its own, and of more than six lines the rest was missing."""
    found = experiment_of("rate 1", [0.1])
    (point,) = found.points
    notes = [f"steady state unknown: {count} requests are too few to tell" for count in ("16", "1,024", "88", "64")]
    notes += [f"{failed} of all 400 requests failed ({failed / 4} %): HTTP 503 ({failed})" for failed in range(1, 9)]
    notes += ["the server sends no usage: tokens are counted by chunks"]
    one = replace(point.repeats[0], judgement=LoadVerdict(Verdict.VALID, "", tuple(notes)))
    lines = load_lines(replace(found, points=(replace(point, repeats={0: one}),)))
    assert "Steady state unknown: 16 to 1,024 requests are too few to tell." in lines
    assert "The server sends no usage: tokens are counted by chunks." in lines
    assert sum("failed" in line for line in lines) == 4 and lines[-1] == "4 more notes are left out."


def test_of_many_reasons_it_says_how_many_more_there_are() -> None:
    found = refused("HTTP 503: busy")
    (point,) = found.points
    busy = [LoadVerdict(Verdict.NO_ANSWERS, f"HTTP 503: {count} waiting", ()) for count in range(5)]
    repeats = {repeat: replace(point.repeats[0], judgement=one) for repeat, one in enumerate(busy)}
    text = load_sentence(replace(found, points=(replace(point, repeats=repeats),)))
    assert text.endswith("no answers: HTTP 503: 2 waiting; 2 more).")


def refused(message: str) -> LoadExperiment:
    """A point whose server answered nothing, with its own words for it."""
    found = experiment_of("rate 1", [0.1])
    (point,) = found.points
    one = replace(point.repeats[0], judgement=LoadVerdict(Verdict.NO_ANSWERS, message, ()))
    return replace(found, points=(replace(point, repeats={0: one}),))


def test_without_a_result_the_sentence_says_why_and_marks_are_escaped_once() -> None:
    """The opening said that all measurements completed, and the list had `model\\_not\\_found`."""
    found = refused("HTTP 404: model_not_found")
    assert load_sentence(found) == "No point has a result (no answers: HTTP 404: model_not_found)."
    (void,) = (line for line in load_lines(found) if line.startswith("Void"))
    assert void == "Void: rate 1 (no answers: HTTP 404: model_not_found)."


def test_tables_without_a_row_are_none() -> None:
    found = refused("HTTP 503: busy")
    assert servers_table(found) is None and limits_table(found) is None
