"""Which server a load experiment decides for, and its sentence, from runs whose every moment is known."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from configs.common.execution import Layout
from configs.load.objectives import RequestObjectives
from configs.plans.plan import CellPoint, PlannedExperiment
from configs.spec.cell import Cell
from configs.workloads.serve import ServeWorkload
from reports.charts.experiments import load_charts
from reports.experiments.load.choice import ServerChoice, choose_server
from reports.experiments.load.choice_text import next_server_lines, server_body, server_lead
from reports.experiments.load.experiment import LoadAnswers, LoadExperiment, LoadPoint, LoadRepeat
from reports.experiments.load.text import load_lines, load_sentence
from reports.load.metrics import serving_metrics
from reports.load.search import FoundRate
from reports.load.verdict import LoadVerdict, Verdict, judged
from reports.numbers.statistics import Estimate, Ratio
from reports.plots.experiments.load import draw_load
from reports.reading.load import CellResult
from tests.support.run_folders.load_runs import made_run

SECONDS = 40.0
WITHIN = RequestObjectives(ttft_seconds=0.5, share=0.9)
RIGHT, WRONG = LoadAnswers(2, 2, 0), LoadAnswers(2, 1, 0)


def point(
    label: str,
    rates: list[float],
    values: Mapping[str, float | int | str] | None = None,
    *,
    ttft: Any = 0.1,
    open_loop: bool = False,
    objectives: RequestObjectives | None = None,
    limits: list[float] | None = None,
    answers: LoadAnswers = RIGHT,
    usd: float | None = None,
    ranks: int = 1,
    lengths: float = 1.0,
) -> tuple[CellPoint, LoadPoint]:
    """A point; a repeat for each rate of requests a second, answered in `ttft` and 0.1 s more."""
    find = None if limits is None else "max_rate"
    work = ServeWorkload(find=find, objectives=objectives, rate=rates[0] if open_loop else None)
    engine = "vllm" if lengths < 1 else "rankwise"
    cell = Cell(model=f"folder:{label}", workload=work, layout=Layout(tp=ranks), engine=engine)
    repeats = {}
    for repeat, rate in enumerate(rates):
        figures = serving_metrics(made_run(np.arange(0, SECONDS, 1 / rate), ttft), objectives)
        figures = replace(figures, lengths_held=lengths)
        if not open_loop:
            figures = replace(figures, requested_rate=None)
        found = None if limits is None else FoundRate(limits[repeat], 1.0, 9.0, True, "it is settled", ())
        repeats[repeat] = LoadRepeat(
            figures, judged(made_run(np.arange(0, SECONDS, 1 / rate), ttft), figures), found, None, None
        )
    result = CellResult(cell.key, cell, label, "tiny", len(rates), {}, None)
    planned = CellPoint(cell=cell.key, values=dict(values or {}), label=label, baseline=False)
    return planned, LoadPoint(label, result, repeats, answers, usd)


def experiment(*points: tuple[CellPoint, LoadPoint]) -> LoadExperiment:
    planned = PlannedExperiment(name="load", kind="load", model="tiny", points=tuple(one for one, _ in points))
    return LoadExperiment(planned, tuple(one for _, one in points))


def chosen(found: LoadExperiment) -> tuple[ServerChoice, str]:
    choice = choose_server(found)
    assert choice is not None
    return choice, f"{server_lead(found, choice)}: {server_body(found, choice)}."


def layouts(many: dict[str, tuple[list[float], list[float]]], **more: object) -> LoadExperiment:
    """Layouts at 8 and 32 users of one price."""
    return experiment(
        *(
            point(f"tp {tp}, users {users}", rates, {"tp": tp, "workload.users": users}, usd=0.1, **more)  # type: ignore[arg-type]
            for tp, both in many.items()
            for users, rates in zip((8, 32), both, strict=True)
        )
    )


def test_of_one_price_the_one_that_carries_more_at_the_highest_load() -> None:
    found = layouts(
        {"1": ([4.0] * 6, [9.0, 9.1, 9.2, 9.0, 9.1, 9.3]), "2": ([5.0] * 6, [8.0, 8.1, 8.0, 8.0, 8.1, 8.0])}
    )
    choice, text = chosen(found)
    assert choice.figure == "tokens" and choice.chosen.label == "tp 1" and choice.chosen.at == 32
    assert choice.ratio is not None and choice.ratio.value == pytest.approx(1.13, abs=0.02) and choice.ratio.differs
    assert choice.others_win == {8.0: "tp 2"}
    assert text.startswith("Serve tiny with tp 1: ") and "tokens/s" in text and " at 32 users, TTFT P99 100 ms" in text
    assert "times (" in text and "what tp 2 does" in text and "another carries more at 8 users (tp 2)" in text
    assert "per million tokens" in text


def test_what_is_not_told_apart_is_said_to_be_so() -> None:
    noisy = {"1": ([4.0] * 6, [9.0, 7.0, 9.5, 8.0, 9.1, 7.3]), "2": ([4.0] * 6, [8.0, 9.1, 7.0, 9.0, 8.1, 9.0])}
    _, text = chosen(layouts(noisy))
    assert "not told apart from tp " in text


def test_a_dearer_one_is_taken_only_if_it_carries_more_for_its_price() -> None:
    few, most = [10.0] * 6, [18.0] * 6
    found = experiment(
        point("tp 1", few, {"tp": 1}, usd=1.0), point("tp 2", most, {"tp": 2}, usd=2.0, ranks=2)
    )  # fmt: skip
    choice, text = chosen(found)
    assert choice.chosen.label == "tp 1"
    assert "tp 2 carries 1.80 times (1.80 to 1.80, 95 % interval, 6 pairs) as much for 2.00 times the price" in text
    assert "89.9 % as much per dollar" in text
    dear = experiment(point("tp 1", few, {"tp": 1}, usd=1.0), point("tp 2", most, {"tp": 2}, usd=1.5, ranks=2))
    assert chosen(dear)[0].chosen.label == "tp 2"


def test_without_prices_ranks_are_the_size() -> None:
    found = experiment(point("tp 1", [10.0] * 6, {"tp": 1}), point("tp 2", [18.0] * 6, {"tp": 2}, ranks=2))
    choice, text = chosen(found)
    assert choice.chosen.label == "tp 1" and "on 2 ranks instead of 1" in text and "as much per rank" in text


def test_wrong_answers_and_other_lengths_are_no_candidates() -> None:
    found = experiment(
        point("engine a", [9.0] * 3, {"engine": "a"}, usd=0.1),
        point("engine b", [12.0] * 3, {"engine": "b"}, usd=0.1, answers=WRONG),
        point("engine c", [15.0] * 3, {"engine": "c"}, usd=0.1, lengths=0.5),
        point("engine d", [8.0] * 3, {"engine": "d"}, usd=0.1),
    )
    choice, text = chosen(found)
    assert choice.chosen.label == "engine a" and set(choice.left_out) == {"engine b", "engine c"}
    assert "(left out: engine b: wrong answers under load; engine c: answers of other lengths than asked for)" in text


def test_rates_that_all_keep_up_with_are_decided_by_the_sooner_answer() -> None:
    found = experiment(
        point("tp 1", [2.0] * 6, {"tp": 1}, ttft=0.4, open_loop=True, usd=0.1),
        point("tp 2", [2.0] * 6, {"tp": 2}, ttft=0.2, open_loop=True, usd=0.1),
    )
    choice, text = chosen(found)
    assert choice.chosen.label == "tp 2" and choice.by_latency
    assert choice.ratio is not None and choice.ratio.value == pytest.approx(0.5 / 0.3, rel=0.01)
    assert "answering 1.67 times" in text and "as fast as tp 1" in text
    assert choice.repeats_needed is None, "equal tokens leave nothing open"


@pytest.mark.parametrize(("rate", "by_latency"), [(2.0, True), (1.0, False)])
def test_a_trace_that_all_keep_up_with_is_decided_by_the_sooner_answer(rate: float, by_latency: bool) -> None:
    """It was decided by tokens/s, which are those of the trace; where one falls behind, they are the server's."""
    points = []
    for tp, ttft, achieved in ((1, 0.4, rate), (2, 0.2, 2.0)):
        planned, one = point(f"tp {tp}", [2.0] * 6, {"tp": tp}, ttft=ttft, usd=0.1)
        cell = one.result.cell.model_copy(update={"workload": ServeWorkload(trace="trace.jsonl")})
        repeats = {
            repeat: replace(each, figures=replace(each.figures, achieved_rate=achieved))
            for repeat, each in one.repeats.items()
        }
        points.append((planned, replace(one, result=replace(one.result, cell=cell), repeats=repeats)))
    choice, text = chosen(experiment(*points))
    assert choice.by_latency is by_latency
    assert not by_latency or (choice.chosen.label == "tp 2" and "answering 1.67 times" in text)


def test_with_objectives_it_is_the_requests_that_meet_them() -> None:
    found = experiment(
        *(
            point(
                f"tp {tp}, rate {rate}",
                [rate] * 3,
                {"tp": tp, "workload.rate": rate},
                ttft=0.9 if (tp, rate) == (1, 4.0) else 0.1,
                open_loop=True,
                objectives=WITHIN,
                usd=0.1,
            )
            for tp in (1, 2)
            for rate in (2.0, 4.0)
        )
    )
    choice, text = chosen(found)
    assert choice.figure == "goodput" and choice.chosen.label == "tp 2" and choice.chosen.at == 4.0
    assert "meet TTFT up to 0.500 s, 100 % of all, at 4.00 requests/s asked" in text


def test_a_load_at_which_too_few_requests_meet_the_objectives_does_not_count() -> None:
    def of(tp: int, rate: float, slow: float) -> tuple[CellPoint, LoadPoint]:
        """A share of `slow` of the requests is answered too late."""
        count = int(SECONDS * rate)
        late = np.where(np.arange(count) % 10 < 10 * slow, 0.9, 0.1)
        values = {"tp": tp, "workload.rate": rate}
        return point(f"{tp}", [rate] * 3, values, ttft=late, open_loop=True, objectives=WITHIN, usd=0.1)

    choice, text = chosen(experiment(of(1, 2.0, 0.0), of(1, 4.0, 0.3), of(2, 2.0, 0.3), of(2, 4.0, 0.3)))
    assert choice.chosen.label == "tp 1" and choice.chosen.at == 2.0, "4 requests/s have more goodput, 70 % of all"
    assert choice.left_out == {"tp 2": "misses the objectives at every load"} and "100 % of all" in text
    choice, text = chosen(experiment(of(1, 2.0, 0.5), of(1, 4.0, 0.3)))
    assert choice.chosen.at == 4.0 and "70.0 % of all" in text, "where none holds them, how far it is"
    planned, nothing = of(1, 4.0, 1.0)
    assert choose_server(experiment((planned, nothing))) is None


def test_a_load_at_which_the_queue_grew_meets_no_objectives_and_is_not_kept_up_with() -> None:
    """All requests were in time because the run ended in time."""

    def of(tp: int, rate: float, grows: bool, objectives: RequestObjectives | None) -> tuple[CellPoint, LoadPoint]:
        ttft = np.linspace(0.1, 0.45, int(SECONDS * rate)) if grows else 0.1
        values = {"tp": tp, "workload.rate": rate}
        return point(f"{tp}", [rate] * 3, values, ttft=ttft, open_loop=True, objectives=objectives, usd=0.1)

    choice, _ = chosen(experiment(of(1, 2.0, False, WITHIN), of(1, 8.0, True, WITHIN), of(2, 8.0, True, WITHIN)))
    assert choice.chosen.label == "tp 1" and choice.chosen.at == 2.0
    assert choice.left_out == {"tp 2": "not steady where it meets the objectives"}
    for grows in (False, True):
        choice, _ = chosen(experiment(of(1, 8.0, False, None), of(2, 8.0, grows, None)))
        assert choice.by_latency is not grows


def test_of_searches_the_highest_rate_wins_and_one_alone_is_told() -> None:
    slow = point("tp 1", [2.0] * 3, {"tp": 1}, objectives=WITHIN, limits=[2.0, 2.1, 2.2], usd=0.1)
    fast = point("tp 2", [2.0] * 3, {"tp": 2}, objectives=WITHIN, limits=[4.0, 4.1, 4.2], usd=0.1)
    choice, text = chosen(experiment(slow, fast))
    assert choice.figure == "limit" and choice.chosen.label == "tp 2"
    assert "4.10 requests/s" in text and "within TTFT up to 0.500 s for 90 % of the requests" in text.replace(
        "90.0", "90"
    )
    alone = point("max_rate", [2.0] * 3, {}, objectives=WITHIN, limits=[2.0, 2.1, 2.2])
    choice, text = chosen(experiment(alone))
    assert choice.choice is None and text.startswith("tiny serves: 2.10 requests/s")


def test_without_a_result_nothing_is_chosen() -> None:
    planned, empty = point("tp 1", [1.0], {"tp": 1})
    assert choose_server(experiment((planned, replace(empty, repeats={})))) is None
    assert choose_server(experiment()) is None


def test_repeats_that_would_settle_it_are_asked_for_while_it_is_open() -> None:
    def of(first: list[float], second: list[float]) -> ServerChoice:
        return chosen(experiment(point("tp 1", first, {"tp": 1}, usd=0.1), point("tp 2", second, {"tp": 2}, usd=0.1)))[
            0
        ]

    assert of([9.0] * 3, [5.0] * 3).repeats_needed == 6, "three repeats have no interval"
    assert of([9.0] * 6, [5.0] * 6).repeats_needed is None
    noise = [9.0, 8.0, 9.5, 8.5, 9.0, 8.0]
    assert of(noise, noise[::-1]).repeats_needed == 24, "the interval holds 1: half of it takes four times as many"
    alone = chosen(experiment(point("tp 1", [9.0] * 3, {"tp": 1})))[0]
    assert alone.repeats_needed is None and next_server_lines([]) == []
    found = experiment(point("tp 1", [9.0] * 3, {"tp": 1}, usd=0.1), point("tp 2", [5.0] * 3, {"tp": 2}, usd=0.1))
    (line,) = next_server_lines([(found.experiment, found, choose_server(found))])
    assert line == (
        "Whether tp 1 is surely ahead of tp 2 in load: 6 repeats instead of 3 for an interval "
        "(--set measuring.repeats=6)."
    )


def test_intervals_are_widened_where_one_looked_before_stopping() -> None:
    """With a target interval a cell's intervals must be asked for at 96 % to cover 95."""

    def of(confidence: float) -> ServerChoice:
        made = []
        for tp, rates in ((1, [2.0, 2.1, 2.2, 2.4, 2.5, 2.7, 2.9, 3.0]), (2, [2.3, 2.2, 2.6, 2.5, 2.9, 3.1, 3.2, 3.6])):
            planned, found = point(f"tp {tp}", rates, {"tp": tp, "workload.users": 8}, usd=0.1)
            made.append((planned, replace(found, result=replace(found.result, confidence=confidence))))
        choice = choose_server(experiment(*made))
        assert choice is not None
        return choice

    plain, looked = of(0.95), of(0.96)
    pairs: list[tuple[Estimate | Ratio | None, Estimate | Ratio | None]] = [
        (plain.chosen.point.value("tokens"), looked.chosen.point.value("tokens")),
        (plain.chosen.value, looked.chosen.value),
        (plain.ratio, looked.ratio),
    ]
    for narrow, wide in pairs:
        assert narrow is not None and narrow.interval is not None and wide is not None and wide.interval is not None
        assert wide.interval[0] < narrow.interval[0] and narrow.interval[1] < wide.interval[1]


@pytest.mark.parametrize(("users", "logarithmic"), [((1, 10, 100), True), ((8, 16, 24, 32), False), ((1, 100), False)])
def test_loads_over_decades_are_drawn_on_a_logarithmic_axis(users: tuple[int, ...], logarithmic: bool) -> None:
    """1 and 10 of 1 to 100 lay on each other; even steps stay even."""
    found = experiment(*(point(f"users {many}", [4.0], {"workload.users": many}) for many in users))
    figure = Figure()
    draw_load(figure, found)
    assert {axes.get_xscale() for axes in figure.axes} == {"log" if logarithmic else "linear"}
    assert {chart.log_x for chart in load_charts(found)} == {logarithmic}


def test_loads_without_a_result_are_drawn_as_crosses() -> None:
    """A curve went straight on over a load whose server failed, and ended before those that it did not bear."""
    points = [point(f"users {many}", [4.0], {"workload.users": many}) for many in (1, 8, 16, 24)]
    (gone, missing), (last, bound) = points[1], points[3]
    judgement = LoadVerdict(Verdict.CLIENT_BOUND, "late", ())
    void = {at: replace(one, judgement=judgement) for at, one in bound.repeats.items()}
    found = experiment(points[0], (gone, replace(missing, repeats={})), points[2], (last, replace(bound, repeats=void)))
    lost = [(8.0, "missing"), (24.0, "client-bound")]
    assert [chart.lost for chart in load_charts(found)] == [tuple(lost)] * 2
    figure = Figure()
    draw_load(figure, found)
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["missing", "client-bound"]
        assert axes.get_xlim()[1] > 24


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("new_tokens", 16, 64), ("speed", 1, 2), ("objectives.ttft_seconds", 0.5, 5.0), ("arrivals", "poisson", "gamma")],
)
def test_what_is_asked_is_no_server_to_choose(name: str, first: object, second: object) -> None:
    """The report said to serve with new_tokens 64, as longer answers give more tokens a second."""
    found = experiment(
        point("a", [4.0] * 6, {f"workload.{name}": first, "tp": 1}),
        point("b", [8.0] * 6, {f"workload.{name}": second, "tp": 1}),
    )
    assert choose_server(found) is None
    assert load_sentence(found) == "Most tokens: 87.8 (87.8 to 87.8) tokens/s at b."
    assert load_lines(found)[0] == f"Points differ in what is asked ({name}), so none is chosen as a server."


def test_the_knee_and_the_most_tokens_name_those_that_are_as_good() -> None:
    rates = {2.0: [2.0] * 6, 4.0: [4.0] * 6, 8.0: [4.1, 3.9] * 3}
    made = (point(f"rate {at:g}", values, {"rate": at, "new_tokens": 16 + at}) for at, values in rates.items())
    text = load_sentence(experiment(*made))
    assert ", not told apart from rate " in text.partition("Most tokens: ")[2]
    points = [point(f"rate {at:g}", values, {"rate": at}, open_loop=True) for at, values in rates.items()]
    knee = experiment(*points).knees()[""]
    assert {knee.at, *knee.tied} == {4.0, 8.0}
    text = load_sentence(experiment(*points))
    assert re.search(r"knee .* is at [48]\.00 requests/s, .*, not told apart from [48]\.00 requests/s\.", text)


def test_settings_of_a_server_are_a_choice() -> None:
    values = [{"max_sequences": 8, "new_tokens": 16}, {"max_sequences": 32, "new_tokens": 16}]
    found = experiment(*(point(str(at), [4.0 + at] * 6, one) for at, one in enumerate(values)))
    choice = choose_server(found)
    assert found.asked == [] and choice is not None and choice.choice is not None


def test_a_server_whose_search_found_no_bound_is_not_said_to_have_no_result() -> None:
    """It passed at the highest rate that the search may try: the better one was left out as without a result."""
    planned, best = point("tp 2", [4.0] * 3, {"tp": 2}, limits=[9.0] * 3, objectives=WITHIN)
    open_end = FoundRate(None, 10.0, None, False, "no rate up to 10 requests/s fails", ())
    repeats = {repeat: replace(one, search=open_end) for repeat, one in best.repeats.items()}
    one = point("tp 1", [4.0] * 3, {"tp": 1}, limits=[6.0] * 3, objectives=WITHIN)
    choice, text = chosen(experiment(one, (planned, replace(best, repeats=repeats))))
    assert choice.left_out == {"tp 2": "at least 10.0 requests/s, no rate up to 10 requests/s fails"}
    assert "left out: tp 2: at least 10.0 requests/s" in text


def test_a_server_of_which_no_request_meets_the_objectives_has_a_result() -> None:
    found = experiment(
        point("tp 1", [4.0] * 3, {"tp": 1}, ttft=0.9, open_loop=True, objectives=WITHIN),
        point("tp 2", [4.0] * 3, {"tp": 2}, ttft=0.1, open_loop=True, objectives=WITHIN),
    )
    assert chosen(found)[0].left_out == {"tp 1": "no request meets the objectives"}


def test_a_rate_that_yaml_takes_for_text_is_on_the_curve() -> None:
    """`over: {rate: [5e-1, 1, 2]}`: the first was in the table alone, on no curve and of no choice."""
    found = experiment(*(point(f"rate {at}", [2.0] * 3, {"workload.rate": at}, open_loop=True) for at in ("5e-1", 1)))
    assert [at for at, _ in found.series()[""]] == [0.5, 1.0]


def test_series_of_many_servers_are_told_apart() -> None:
    """The eighth had colour, marker and line of the first in the panel of latencies."""
    found = experiment(
        *(point(f"{server}, {at}", [2.0], {"s": server, "workload.users": at}) for server in range(9) for at in (1, 8))
    )
    figure = Figure()
    draw_load(figure, found)
    handles, _ = figure.axes[1].get_legend_handles_labels()
    lines = [handle.lines[0] for handle in handles]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(lines) == 18
