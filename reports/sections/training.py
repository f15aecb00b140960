"""The report's parts on training: speed, where a step's time goes, equal learning, memory, network, checkpoints; and
the ways to train side by side.

    parts = training_parts(study, album)          # listed in reports.sections.kinds
"""

from functools import partial

from reports.charts.others import equality_charts, loss_charts, step_charts, strategy_charts
from reports.document.album import Album
from reports.document.methods import QUESTIONS
from reports.document.structure import Section
from reports.experiments.losses import loss_curves, losses_table
from reports.plots.experiments.training import bars_height, draw_equality, draw_losses, draw_step_split, draw_strategies
from reports.plots.style import COLOURS, MOST_BARS, bars_text
from reports.reading.load import StudyResult
from reports.training.cells import (
    checkpoints_table,
    memory_table,
    network_table,
    speed_lines,
    speed_table,
    split_cells,
    split_sentence,
    split_table,
    trained_cells,
)
from reports.training.equality import equality_sentence, equality_table, same_learning
from reports.training.strategies import strategies, strategies_sentence, strategies_table

SPEED = (
    "MFU is model FLOPs of a step (6 a parameter and 12 x layers x heads x head size x sequence length, for each "
    "token: PaLM, arXiv 2204.02311, appendix B) over time x ranks x peak of a rank's device. HFU counts the "
    "matrix products that are executed instead, attention's masked half and recomputation included."
)
MEMORY = "Peak memory in the untimed pass, by rank, beside what the plan said of the fullest."
NETWORK = (
    "Of a step. What a rank hands to collectives is payload; what a node sends counts everything that left it on "
    "interfaces other than loopback."
)
CHECKPOINTS = (
    "Steps stand still while a state is copied (asynchronous) or written (synchronous), and while an earlier one is "
    "still being written; the step's time does not hold it. A run that went on from a checkpoint has the losses of "
    "all its attempts, and the step times of the last one only."
)


STRATEGIES = (
    "Ways to train the same thing on the same ranks. Two of them differ clearly where the intervals of their step "
    "times (of fewer than six repeats the ranges) lie apart; the planner's ranking is right where no such pair was "
    "predicted the other way round. In the figure a diamond stands where the step was predicted."
)


def training_parts(study: StudyResult, album: Album) -> list[Section]:
    """What was learnt and at what speed, then the strategies side by side; each only where there is something."""
    curves = loss_curves(study)
    height = 2.6 + 0.2 * min(len(curves), len(COLOURS))  # the legend has a line for each
    alike = same_learning(study)
    repeated = len(alike) == 1 and 1 + len(alike[0].others) == len(curves)  # the comparison draws the same curves
    plot = None
    if curves and not repeated:
        plot = album.add("training loss", partial(draw_losses, curves=curves), loss_charts(curves), height)
    learnt, compared = trained_sections(study, album), strategy_sections(study, album)
    caption = "Loss of the first repeat of each cell, warm-up steps included."
    caption += _first_curves(len(curves)) if plot else ""
    parts = []
    table = losses_table(study)
    if table is not None:
        parts.append(Section("Training", caption, table, plot, question=QUESTIONS["training"], more=tuple(learnt)))
    if compared:
        question = QUESTIONS["strategies"]
        parts.append(Section("Strategies", question=question, method=STRATEGIES, more=tuple(compared)))
    return parts


def _first_curves(count: int) -> str:
    """Which curves a figure leaves out: it has as many as there are colours."""
    most = len(COLOURS)
    return f" The figure shows the first {most} of {count:,} curves." if count > most else ""


def trained_sections(study: StudyResult, album: Album) -> list[Section]:
    """One section for each that has something to show; none of records of versions that timed whole steps only."""
    cells = trained_cells(study)
    if not split_cells(cells):
        return []
    sections = []
    speed = speed_table(study, cells)
    if speed is not None:
        sections.append(Section("Speed and utilization", SPEED, speed, lines=tuple(speed_lines(study, cells))))
    split = split_table(cells)
    if split is not None:
        known = split_cells(cells)
        drawn = known[:MOST_BARS]
        plot = album.add(
            "training steps", partial(draw_step_split, cells=drawn), step_charts(drawn), bars_height(len(drawn))
        )
        sections.append(Section("Where a step goes", split_sentence(cells) + bars_text(known, "cells"), split, plot))
    sections += _equality(study, album)
    for title, sentence, table in (
        ("Memory by rank", MEMORY, memory_table(study, cells)),
        ("Network", NETWORK, network_table(study, cells)),
        ("Checkpoints", CHECKPOINTS, checkpoints_table(study, cells)),
    ):
        if table is not None:
            sections.append(Section(title, sentence, table))
    return sections


def _equality(study: StudyResult, album: Album) -> list[Section]:
    found = same_learning(study)
    sections = []
    for each in found:
        more = f": {each.reference.result.title}" if len(found) > 1 else ""
        height = 2.8 + 0.2 * min(1 + len(each.others), len(COLOURS))  # the legend has a line for each
        plot = album.add("same learning", partial(draw_equality, found=each), equality_charts(each), height)
        told = equality_sentence(each) + _first_curves(1 + len(each.others))
        sections.append(Section(f"The same learning{more}", told, equality_table(each), plot))
    return sections


def strategy_sections(study: StudyResult, album: Album) -> list[Section]:
    """One section for each piece of work, target and number of ranks that several ways measured."""
    sections = []
    for found in strategies(study):
        plot = None
        if found.ranked:
            draw = partial(draw_strategies, found=found)
            plot = album.add(f"strategies {found.title}", draw, strategy_charts(found), bars_height(len(found.ways)))
        told = strategies_sentence(found) + (bars_text(found.ways, "ways, from the fastest on") if plot else "")
        sections.append(Section(found.title, told, strategies_table(study, found), plot))
    return sections
