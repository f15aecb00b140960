"""Which measuring passes beside the timed repeats a plan asks for, by cell."""

from configs.plans.plan import Plan
from configs.records.record import MeasuringPass
from configs.spec.cell import Cell
from configs.workloads import descriptor_of


def passes_of(plan: Plan, key: str) -> tuple[MeasuringPass, ...]:
    """The passes that measure a cell once each: memory, profile, and that of an outside profiler."""
    cell, measuring = plan.cells[key], plan.measuring
    found: list[MeasuringPass] = []
    if measuring.memory and not cell.workload.keeps_answers and not descriptor_of(cell.workload).starts_server:
        found.append("memory")
    if is_profiled(cell):
        found += ["profile"] if measuring.profile else []
        found += [measuring.profiler] if measuring.profiler else []
    return tuple(found)


def is_profiled(cell: Cell) -> bool:
    """Whether a profiling pass measures the cell: its workload marks what is to be recorded, and is no comparison."""
    return descriptor_of(cell.workload).marks_work and not cell.workload.keeps_answers
