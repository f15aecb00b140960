"""The candidates of an experiment of layouts, and a point for each that is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.common.execution import Layout
from configs.plans.plan import CellPoint, ConsideredLayout
from configs.plans.points.builder import PointBuilder, whole
from configs.plans.points.refusals import unmeasurable_reason, why_none
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.drafts import Draft, copied, field_path
from configs.spec.experiments import Layouts
from configs.spec.placement import unplaced
from configs.targets.target import Target
from configs.workloads import STUDIED


@dataclass(frozen=True)
class LayoutChoice:
    """How an experiment of layouts gets its candidates; this folder knows no planner.

    ranks: how many a target holds. ranked: every layout of a one-rank cell on up to so many ranks, with its
    prediction, the best first.
    """

    ranks: Callable[[Target], int]
    ranked: Callable[[Cell, int], Sequence[tuple[Layout, Prediction]]]


def layout_points(
    builder: PointBuilder, choice: LayoutChoice | None, where: str, experiment: Layouts, draft: Draft, target: Target
) -> tuple[list[CellPoint], list[ConsideredLayout]]:
    """The candidates in the order of the prediction; a point for each of the first that can be measured."""
    work = draft["workload"]
    known = STUDIED[work["kind"]]
    if not known.needs_model or known.unpredicted:
        builder.note_problem(
            f"{where}: layouts requires predictions, which a {work['kind']} workload does not have. "
            f"Use {known.shown_by or 'strong'}"
        )
        return [], []
    if not builder.settled(where, draft):
        return [], []
    assert choice is not None, "a study of layouts needs the planner"
    ranks = experiment.ranks or choice.ranks(target)
    full = whole(draft["workload"].get("batch_size"))
    builder.set_prompts(draft, full, full * ranks)
    chosen = [name for name in experiment.base if (field_path(draft, name) or ("",))[0] in ("layout", "nodes")]
    for name in chosen:
        builder.note_problem(f"{where}.base.{name}: determined by the ranked layouts. Leave {name} out")
    if chosen:
        return [], []
    draft["layout"] = Layout().model_dump()
    base = builder.cell(where, draft)
    if base is None:
        return [], []
    points: list[CellPoint] = []
    candidates = []
    for layout, prediction in choice.ranked(base, ranks):
        label = str(layout) if layout.strategy == "none" else f"{layout} ({layout.strategy})"
        key, reason = None, unmeasurable_reason(draft, layout, prediction) or unplaced(layout.ranks, target)
        if reason is None and len(points) == experiment.best:
            reason = f"not among the {experiment.best} best predicted"
        if reason is None:
            drawn = copied(draft) | {"layout": layout.model_dump()}
            found = builder.point(f"{where} at {label}", drawn, {"layout": label}, label, baseline=not points)
            key = found[0].cell if found else None
            points += found
        candidates.append(ConsideredLayout(label=label, layout=layout, prediction=prediction, cell=key, reason=reason))
    if not points:
        builder.note_problem(f"{where}: {why_none(candidates, ranks)}")
    return points, candidates
