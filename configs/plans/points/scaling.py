"""The points of strong and weak scaling: one for each degree of the axis that grows."""

from pydantic import ValidationError

from configs.common.execution import Layout
from configs.plans.plan import CellPoint
from configs.plans.points.builder import PointBuilder, whole
from configs.spec.drafts import Draft, copied
from configs.spec.experiments import StrongScaling, WeakScaling
from configs.spec.placement import grown_over_nodes
from configs.workloads import STUDIED


def scaling_points(
    builder: PointBuilder, where: str, experiment: StrongScaling | WeakScaling, draft: Draft
) -> list[CellPoint]:
    """One point for each degree, the first the baseline; weak scaling grows the work with it."""
    if not builder.settled(where, draft):
        return []
    points = []
    degrees = experiment.degrees
    for position, degree in enumerate(degrees):
        cell_draft = copied(draft)
        label = _grown(builder, where, experiment.grow, degree, cell_draft)
        if label is None:
            return []
        work = cell_draft["workload"]
        known = STUDIED[work["kind"]]
        replicas = 1 if experiment.grow == "dp" else Layout.model_validate(draft["layout"]).dp
        full = whole(work.get("batch_size")) * replicas
        builder.set_prompts(cell_draft, full, full if experiment.kind == "weak" else full * max(degrees))
        if experiment.kind == "weak" and known.grows is not None:
            default = known.model.model_fields[known.grows].default
            value = work.get(known.grows) or default
            work[known.grows] = value * degree if isinstance(value, int) else value
        ranks = Layout.model_validate(cell_draft["layout"]).ranks
        point = builder.point(f"{where} at {label}", cell_draft, {"ranks": ranks}, label, baseline=position == 0)
        points.extend(point)
    if experiment.kind == "strong":
        _check_equal_work(builder, where, points)
    return points


def _check_equal_work(builder: PointBuilder, where: str, points: list[CellPoint]) -> None:
    """Note a problem where the points of strong scaling do not do the same work, as far as their fields say."""
    works = {point.label: builder.cells[point.cell].workload for point in points}
    stated = {
        label: work.work_of_step(builder.cells[point.cell].layout)
        for point, (label, work) in zip(points, works.items(), strict=True)
    }
    known = {label: item for label, item in stated.items() if item is not None}
    if not known:
        return
    field = next(iter(known.values()))[0]
    units = {label: item[1] for label, item in known.items()}
    if None in units.values():
        builder.note_problem(
            f"{where}: {field}: required by strong scaling, whose points do equal work. Set it, or use weak"
        )
    elif len(set(units.values())) > 1:
        found = ", ".join(f"{count:,} at {label}" for label, count in units.items())
        builder.note_problem(
            f"{where}: {field}: got {found}, expected the same at every point of strong scaling. "
            "Divide the micro-batch by {dp}, or use weak"
        )


def _grown(builder: PointBuilder, where: str, grow: str, degree: int, draft: Draft) -> str | None:
    """Grow a draft along an axis; returns what it is called then, None and a problem noted where it cannot."""
    if grow == "nodes":
        try:
            count = grown_over_nodes(draft, degree, builder.target(draft["target"]))
        except ValidationError as error:
            builder.note_invalid(where, error, draft)
            return None
        except ValueError as error:
            builder.note_problem(f"{where}.{error}")
            return None
    else:
        draft["layout"][grow] = degree
        count = Layout.model_validate(draft["layout"]).ranks
    return f"{count} {'node' if grow == 'nodes' else 'rank'}{'s' if count > 1 else ''}"
