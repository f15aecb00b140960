"""The graph of a run as Prefect's API tells it.

graph, ended = stage_graph(client, run)
"""

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

Graph = dict[str, set[str]]
"""The stages that each stage waited for, by their names."""


def stage_graph(client: SyncPrefectClient, run: UUID) -> tuple[Graph, bool]:
    """What is recorded of a flow run's graph, and whether all of its stages have ended.

    The server records stages later than they run, also after the run's own end, and their names with their ends: until
    then a stage may have the name that Prefect gave it.
    """
    answer = client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": run})
    nodes = dict(answer.json()["nodes"])
    graph = {
        node["label"]: {nodes[parent["id"]]["label"] for parent in node["parents"] if parent["id"] in nodes}
        for node in nodes.values()
    }
    return graph, all(node["state_type"] == "COMPLETED" for node in nodes.values())
