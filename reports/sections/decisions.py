"""Decision sections: recommendations, objectives, cost, savings, trade-offs, nodes.

    context |= decision_context(study, album, judged)      # what the document is assembled from

`reports.document.assemble` makes sections of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from configs.common.printable import plural_noun
from reports.charts.others import cost_charts, pareto_charts
from reports.correctness.section import JudgedCell
from reports.decisions.cost import (
    CellCost,
    cell_costs,
    cost_sentences,
    phase_table,
    study_cost_sentence,
    study_cost_table,
    unit_cost_table,
)
from reports.decisions.decision import decide
from reports.decisions.next_measurement import next_lines
from reports.decisions.nodes import (
    node_cells,
    node_latency_table,
    node_memory_table,
    node_table,
    nodes_sentence,
    throughput_table,
)
from reports.decisions.objectives import judge_objectives, objectives_sentences, objectives_summary, objectives_table
from reports.decisions.pareto import Pareto, cost_fronts, pareto_sentence, pareto_table, user_fronts
from reports.decisions.recommendation import open_questions, recommend, recommendation_table
from reports.decisions.savings.estimates import savings
from reports.decisions.savings.saving import savings_table, unknown_savings
from reports.decisions.spending import study_costs
from reports.decisions.wrong_answers import cells_with_wrong_answers
from reports.document.album import Album
from reports.document.structure import Section
from reports.experiments.load.choice import server_choices
from reports.experiments.load.choice_text import next_server_lines
from reports.plots.decisions.cost import cheapest_first, cost_height, draw_costs
from reports.plots.decisions.pareto import draw_pareto, pareto_height
from reports.plots.style import MOST_BARS
from reports.reading.load import StudyResult

MOST_FRONTS = 8
"""Figures of fronts a report holds; each is drawn in a second or so."""


def decision_context(study: StudyResult, album: Album, judged: Sequence[tuple[str, JudgedCell]] = ()) -> dict[str, Any]:
    """Everything that the four parts need. `judged`: (model, verdict) of every correctness experiment."""
    costs, targets = cell_costs(study), study_costs(study)
    judgements = judge_objectives(study)
    wrong = cells_with_wrong_answers(study, judged)
    found, cells = recommend(study, costs, judgements, wrong), node_cells(study)
    decisions = decide(study, costs, judgements, wrong)
    saved = savings(study, costs, targets, judged, wrong)
    measured = any(cell.result.completed for cell in cells)
    # One cell alone trades nothing.
    fronts = [front for front in [*user_fronts(study, wrong), *cost_fronts(costs, wrong)] if len(front.points) > 1]
    return {
        "decisions": decisions,
        "next_lines": [*next_lines(decisions, study.cells.values()), *next_server_lines(server_choices(study))],
        "recommendations": recommendation_table(found),
        "recommendation_lines": open_questions(study, found, judgements, wrong),
        "savings": savings_table(saved) if measured else None,
        "unknown_savings": unknown_savings(saved) if measured else None,
        "purpose": study.plan.purpose,
        "objectives": objectives_table(judgements),
        "objectives_summary": objectives_summary(judgements),
        "objectives_lines": objectives_sentences(judgements, wrong),
        "cost_lines": cost_sentences(study, costs, targets),
        "cost_sentence": study_cost_sentence(targets),
        "cost_table": study_cost_table(targets),
        "cost_phases": phase_table(targets),
        "unit_costs": unit_cost_table(costs),
        "cost_plots": _cost_plots(costs, album),
        "cost_units": {cost.result.cell.workload.kind: plural_noun(cost.result.work_unit) for cost in costs},
        "max_bars": MOST_BARS,
        "fronts": _fronts(fronts, album),
        "fronts_sentence": _fronts_sentence(len(fronts)),
        "nodes": node_table(cells),
        "nodes_sentence": nodes_sentence(cells),
        "node_latency": node_latency_table(cells),
        "node_throughput": throughput_table(cells),
        "node_memory": node_memory_table(cells),
    }


def _cost_plots(costs: Sequence[CellCost], album: Album) -> dict[str, str]:
    """A figure for each kind of workload, by kind: a token that is learnt is not one that is generated."""
    plots: dict[str, str] = {}
    for kind in dict.fromkeys(cost.result.cell.workload.kind for cost in costs):
        bars = [cost for cost in costs if cost.result.cell.workload.kind == kind]
        if len(cheapest_first(bars)) > 1:
            plots[kind] = album.add(
                f"cost {kind}", partial(draw_costs, costs=bars), cost_charts(bars), cost_height(bars)
            )
    return plots


def _fronts_sentence(count: int) -> str:
    """What too many fronts leave out; empty where all are shown."""
    shown = f"The {MOST_FRONTS} trade-offs of the most cells are shown, of {count:,}; `cells.csv` has every cell."
    return shown if count > MOST_FRONTS else ""


def _fronts(several: Sequence[Pareto], album: Album) -> list[Section]:
    """A section for each front, of too many those of the most cells."""
    most = sorted(several, key=lambda front: -len(front.points))[:MOST_FRONTS]
    drawn = [front for front in several if any(front is one for one in most)]
    return [
        Section(
            front.title,
            pareto_sentence(front),
            pareto_table(front),
            album.add(
                f"pareto {front.title}", partial(draw_pareto, pareto=front), pareto_charts(front), pareto_height(front)
            ),
        )
        for front in drawn
    ]
