"""The part of the report that holds predictions against measurements.

context |= planning_context(study, album)       # what the document is assembled from
"""

from functools import partial
from typing import Any

from reports.charts.others import prediction_charts
from reports.document.album import Album
from reports.planning.accuracy import error_groups, judge
from reports.planning.text import cell_table, error_table, prediction_lines, prediction_sentence
from reports.plots.planning.prediction import draw_predictions, prediction_height
from reports.reading.load import StudyResult


def planning_context(study: StudyResult, album: Album) -> dict[str, Any]:
    """Everything that the part of the template needs."""
    judged = judge(study)
    plot = None
    if judged:
        draw = partial(draw_predictions, judged=judged)
        plot = album.add("prediction against measurement", draw, prediction_charts(judged), prediction_height(judged))
    return {
        "prediction_plot": plot,
        "prediction_sentence": prediction_sentence(study, judged),
        "prediction_lines": prediction_lines(study, judged),
        "prediction_errors": error_table(error_groups(study, judged)) if judged else None,
        "prediction_cells": cell_table(study, judged) if study.plan.predictions else None,
    }
