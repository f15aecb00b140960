"""Check that a study goes on in its run folder with the seed that the folder was measured with.

check_seed(plan, before, run)          # StudyError; before anything is started

The seed is not in the key of a cell. Random prompts and the order of training data are drawn with it: answers to other
prompts would be called wrong, and other batches' losses be laid over each other.
"""

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.cell import Cell
from configs.spec.study import StudyError
from configs.workloads import descriptor_of
from configs.workloads.prompted import PromptedWorkload


def check_seed(plan: Plan, before: Plan | None, run: RunPaths) -> None:
    """Raise StudyError where records of the run folder were drawn with another seed than the plan's.

    before: the plan of an earlier run in this folder.
    """
    if before is None or before.measuring.seed == plan.measuring.seed:
        return
    drawn = (key for key, cell in before.cells.items() if _draws(cell))
    if any(any((run.records / key).glob("*.json")) for key in drawn):
        raise StudyError(
            [
                f"measuring.seed: got {plan.measuring.seed}, but {run.folder} was measured with "
                f"{before.measuring.seed}, which draws random prompts and the order of training data. "
                f"Keep {before.measuring.seed}, or use another folder with --runs"
            ]
        )


def _draws(cell: Cell) -> bool:
    work = cell.workload
    return descriptor_of(work).trains or (isinstance(work, PromptedWorkload) and work.prompts is None)
