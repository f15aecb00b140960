"""The machine that a target names, as the planner takes it for a cell. No Prefect here.

    machine = named_machine(target, known)                # None: the target names none
    machine = for_cell(machine, cell, target, known)      # with the cores of its ranks, and the ranks of a node

What the nodes of a cluster are, only `machine` can say: this machine submits, its own figures say nothing of them.
"""

from configs.cell import Cell
from configs.hardware import Machine
from configs.hardware_catalog import HardwareCatalog
from configs.target import Resources, SlurmTarget


def named_machine(target: Resources, known: HardwareCatalog) -> Machine | None:
    """The instance of the catalog that a target names; None where it names none and is this machine.

    Raises ValueError for an instance that is not known, and for a cluster that names none.
    """
    if target.machine is not None:
        try:
            return known.instance(target.machine)
        except ValueError as error:
            raise ValueError(f"target {target.name}: machine: {error}") from error
    if isinstance(target, SlurmTarget):
        raise ValueError(
            f"target {target.name}: what its nodes are is not known, so nothing is predicted; give the target a "
            "`machine` of the catalog, such as `aws/p4d.24xlarge`"
        )
    return None


def for_cell(machine: Machine, cell: Cell, target: Resources, known: HardwareCatalog) -> Machine:
    """A node as a cell has it: a rank's own cores of a CPU, and on a cluster the network shared by a node's ranks."""
    node = _by_cores(machine, cell.cores_per_rank, known)
    if not isinstance(target, SlurmTarget):
        return node
    nodes = max(cell.nodes, target.nodes_for(cell.layout.ranks))
    ranks = cell.layout.ranks // nodes
    between = machine.between
    if between is not None:
        share = between.bytes_per_second * machine.accelerators / ranks
        between = between.model_copy(update={"bytes_per_second": share})
    return node.model_copy(update={"accelerators": ranks, "between": between})


def _by_cores(machine: Machine, cores_per_rank: int, known: HardwareCatalog) -> Machine:
    """An instance's CPU is one accelerator of all its cores in the catalog; a rank has its own cores only."""
    vcpus = known.instance_row(machine.name).vcpus if machine.accelerator.kind == "cpu" else None
    if vcpus is None or vcpus <= cores_per_rank:
        return machine
    whole, share = machine.accelerator, cores_per_rank / vcpus
    device = whole.model_copy(
        update={
            "memory_bytes": int(whole.memory_bytes * share),
            "bytes_per_second": whole.bytes_per_second * share,
            "peak_flops": {number: rate * share for number, rate in whole.peak_flops.items()},
        }
    )
    return machine.model_copy(update={"accelerator": device, "accelerators": vcpus // cores_per_rank})
