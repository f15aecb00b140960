"""On how many nodes of its target the ranks of a cell lie.

    cell = placed(cell, target, asked=None)      # ValueError says what would have worked

This machine is one node. A cell on a cluster gets the fewest nodes that hold its ranks in equal numbers, unless the
study says `nodes`. No Slurm is asked here: that a partition has the nodes is for `slurm.partitions` to say.
"""

from configs.cell import Cell, Layout
from configs.drafts import Draft
from configs.target import SlurmTarget, Target


def placed(cell: Cell, target: Target, asked: int | None) -> Cell:
    """The cell on its nodes. asked: the study's `nodes`; none: the fewest.

    Raises ValueError where the target has no such place.
    """
    problem = unplaced(cell.layout.ranks, target, asked)
    if problem is not None:
        raise ValueError(problem)
    nodes = 1 if target.kind == "local" else asked or target.nodes_for(cell.layout.ranks)
    return cell if nodes == cell.nodes else cell.model_copy(update={"nodes": nodes})


def unplaced(ranks: int, target: Target, asked: int | None = None) -> str | None:
    """Why so many ranks have no place on a target; None where they have. Of a local target its nodes only."""
    if target.kind == "local":
        if asked in (None, 1):
            return None
        return f"nodes: target {target.name} is this machine, one node; leave nodes out, or use a target of kind slurm"
    size = f"{_several(target.nodes, 'node')}, {_several(target.ranks_per_node, 'rank')} a node"
    if ranks > target.most_ranks:
        limit = f", max_ranks: {target.max_ranks}" if target.max_ranks else ""
        return f"{_several(ranks, 'rank')}, but target {target.name} holds {target.most_ranks} ({size}{limit})"
    possible = [
        count for count in range(1, target.nodes + 1) if ranks % count == 0 and ranks // count <= target.ranks_per_node
    ]
    if not possible:
        return f"{_several(ranks, 'rank')} cannot lie in equal numbers on the nodes of target {target.name} ({size})"
    if asked is None or asked in possible:
        return None
    works = ", ".join(map(str, possible))
    return (
        f"nodes: {asked} cannot hold {_several(ranks, 'rank')} of target {target.name} ({size})\n  use one of: {works}"
    )


def grown_over_nodes(draft: Draft, times: int, target: Target) -> int:
    """Make a draft so many times as wide: that many times its nodes, each with the layout that one has now.

    Returns the number of nodes. Raises ValueError for a target without further nodes.
    """
    if not isinstance(target, SlurmTarget):
        raise ValueError(f"grow: target {target.name} is this machine, one node\n  use one of: dp, tp, pp")
    base = Layout.model_validate(draft["layout"])
    nodes: int = (draft.get("nodes") or target.nodes_for(base.ranks)) * times
    draft["layout"] = base.model_copy(update={"dp": base.dp * times}).model_dump()
    draft["nodes"] = nodes
    return nodes


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
