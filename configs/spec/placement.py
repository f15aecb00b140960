"""Placement of the ranks of a cell on the nodes of its target.

    cell = placed(cell, target, asked=None)      # ValueError with the accepted values

This machine is one node. A cell on a cluster gets the fewest nodes that hold its ranks in equal numbers, unless the
study sets `nodes`. Slurm is not queried here: whether a partition has the nodes is checked by
`slurm.schedulers.commands.partitions`.
"""

from configs.common.execution import Layout
from configs.load.job import Caps
from configs.spec.cell import Cell
from configs.spec.drafts import Draft
from configs.targets.resources import ClusterTarget
from configs.targets.target import EndpointTarget, LocalTarget, Target
from configs.workloads import descriptor_of
from configs.workloads.serve import ServeWorkload


def placed(cell: Cell, target: Target, asked: int | None) -> Cell:
    """Return the cell with its number of nodes. asked: the study's `nodes`; none: the fewest.

    Raises ValueError if the target cannot hold the cell.
    """
    problem = unplaced(cell.layout.ranks, target, asked)
    if problem is not None:
        raise ValueError(problem)
    if (cell.engine == "endpoint") != isinstance(target, EndpointTarget):
        raise ValueError(f"engine: {cell.engine} on target {target.name}. Endpoints are targets of kind endpoint")
    if isinstance(target, EndpointTarget) and cell.layout.ranks > 1:
        raise ValueError(f"layout: {cell.layout}, but target {target.name} is a server that is there already")
    if isinstance(target, EndpointTarget) and isinstance(work := cell.workload, ServeWorkload):
        open_loop = work.find is None and work.users is None and work.trace is None
        above = Caps(max_rate=target.max_rate).problem_of(work.users, work.first_rate if open_loop else None)
        if above is not None:
            raise ValueError(f"workload.{above}")
    nodes = 1 if isinstance(target, LocalTarget) else asked or target.nodes_for(cell.layout.ranks)
    if nodes > 1 and descriptor_of(cell.workload).starts_server:
        what = f"nodes: {asked}" if asked else f"layout: {cell.layout} takes {nodes} nodes of target {target.name}"
        raise ValueError(f"{what}, but the server of a study runs on one. Use fewer ranks, or `rankwise deploy`")
    return cell if nodes == cell.nodes else cell.model_copy(update={"nodes": nodes})


def unplaced(ranks: int, target: Target, asked: int | None = None) -> str | None:
    """Return why the ranks do not fit on a target; None if they fit. Of a local target, checks nodes only."""
    if isinstance(target, LocalTarget):
        if asked in (None, 1):
            return None
        return f"nodes: target {target.name} is this machine, a single node. Leave nodes out or use a slurm target"
    size = f"{_several(target.nodes, 'node')}, {_several(target.ranks_per_node, 'rank')} per node"
    if ranks > target.rank_limit:
        limit = f", max_ranks: {target.max_ranks}" if target.max_ranks else ""
        return f"{_several(ranks, 'rank')}, but target {target.name} holds {target.rank_limit} ({size}{limit})"
    held = range(min(target.ranks_per_node, ranks), 0, -1)
    possible = [ranks // each for each in held if ranks % each == 0 and ranks // each <= target.nodes]
    if not possible:
        return f"{_several(ranks, 'rank')} cannot be divided equally over the nodes of target {target.name} ({size})"
    if asked is None or asked in possible:
        return None
    works = ", ".join(map(str, possible))
    return (
        f"nodes: {asked} cannot hold {_several(ranks, 'rank')} of target {target.name} ({size})\n  use one of: {works}"
    )


def grown_over_nodes(draft: Draft, times: int, target: Target) -> int:
    """Multiply the nodes of a draft, each with the same layout as one has now.

    Returns the number of nodes. Raises ValueError for a target with a single node.
    """
    if not isinstance(target, ClusterTarget):
        raise ValueError(f"grow: target {target.name} is this machine, a single node\n  use one of: dp, tp, pp")
    base = Layout.model_validate(draft["layout"])
    nodes: int = (draft.get("nodes") or target.nodes_for(base.ranks)) * times
    draft["layout"] = base.model_copy(update={"dp": base.dp * times}).model_dump()
    draft["nodes"] = nodes
    return nodes


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
