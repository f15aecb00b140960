"""The points whose answers are compared: of correctness, and of compression passes beside those of their speed."""

import itertools
from collections.abc import Mapping

from configs.plans.plan import CellPoint
from configs.plans.points.answered import answering_drafts, kept_answers, used_workloads
from configs.plans.points.builder import PointBuilder
from configs.spec.drafts import Draft, copied
from configs.spec.experiments import CompressionPasses, Correctness
from configs.workloads import STUDIED, kinds_with
from configs.workloads.prompted import PromptedWorkload


def correctness_points(
    builder: PointBuilder, where: str, experiment: Correctness, draft: Draft, references: Mapping[str, PromptedWorkload]
) -> list[CellPoint]:
    """The reference and the candidates. references: path of a saved reference as written -> what it answered."""
    known = STUDIED[draft["workload"]["kind"]]
    if known.answers is None:
        answering = " or ".join(kinds_with("answers"))
        builder.note_problem(f"{where}: correctness requires a workload of kind {answering}")
        return []
    if not builder.settled(where, draft):
        return []
    used = used_workloads(builder.cells.values(), draft)
    saved = references.get(experiment.reference or "")
    try:
        drafts = answering_drafts(experiment, draft, builder.prompts_in_file(draft), used, saved)
    except ValueError as error:
        builder.note_problem(f"{where}.reference: {experiment.reference}: {error}")
        return []
    several = len(experiment.engines) > 1 or bool(draft.get("compression"))
    points: list[CellPoint] = []
    for each in drafts:
        refusable = several and not each.baseline
        points += builder.point(f"{where} {each.label}", each.draft, each.values, each.label, each.baseline, refusable)
    return points


def compression_points(
    builder: PointBuilder, where: str, experiment: CompressionPasses, draft: Draft
) -> list[CellPoint]:
    """For the uncompressed model and each pass, in each precision: a cell for its speed, one for its answers."""
    if not builder.override(draft, experiment.baseline, f"{where}.baseline"):
        return []
    known = STUDIED[draft["workload"]["kind"]]
    if not known.compressible or known.answers is None:
        compressible = " or ".join(kind for kind in kinds_with("compressible") if STUDIED[kind].answers)
        builder.note_problem(f"{where}: compression requires a workload of kind {compressible}")
        return []
    if not builder.settled(where, draft):
        return []
    points: list[CellPoint] = []
    dtypes = experiment.dtypes or [draft["dtype"]]
    for dtype, one in itertools.product(dict.fromkeys(dtypes), ["none", *experiment.passes]):
        label = f"{'uncompressed' if one == 'none' else one}, {dtype}"
        found: list[CellPoint] = []
        for answers in (False, True):
            cell_draft = copied(draft) | {"dtype": dtype, "compression": one}
            if answers:
                work = cell_draft["workload"]
                work |= kept_answers(work, experiment.prompts, builder.prompts_in_file(cell_draft))
            values = {"compression": one, "dtype": dtype, "answers": answers}
            base = dtype == dtypes[0] and one == "none"
            named = f"{label}, answers" if answers else label
            found += builder.point(f"{where} {named}", cell_draft, values, named, base, one != "none")
            if not found:
                break  # what is refused once needs no second word
        points += found
    return points
