"""How trials of nodes go on until enough is known: against a cluster that is a table of nodes."""

from collections.abc import Sequence
from itertools import combinations

from configs.plans.preflight import NodeFigures, PairFigures, TargetPreflight
from configs.targets.target import SlurmTarget
from tasks.checks.node_checks import NodeCheck, checked


class Cluster:
    """Gives the first nodes that are not left out; the trial's end follows from what ails them."""

    def __init__(self, count: int, **ailing: str) -> None:
        self.nodes = [f"n{place}" for place in range(count)]
        self.ailing = ailing
        self.asked: list[tuple[int, list[str]]] = []

    def usable(self) -> list[str]:
        return self.nodes

    def test(self, count: int, without: Sequence[str]) -> NodeCheck:
        self.asked.append((count, list(without)))
        given = [name for name in self.nodes if name not in without][:count]
        assert len(given) == count, "more nodes were asked for than there are"
        for name in given:
            if self.ailing.get(name) == "deaf":
                return NodeCheck(broken={name: "did not call"}, failure="a node did not call")
            if self.ailing.get(name) == "raises":
                return NodeCheck(suspects={name: "CUDA error"}, failure="CUDA error")
            if self.ailing.get(name) == "everybody raises":
                return NodeCheck(suspects={given[0]: "no module"}, failure="no module named torch")
        nodes = [
            NodeFigures(node=name, gemm_flops_per_second=1e9 if self.ailing.get(name) == "slow" else 1e11)
            for name in given
        ]
        pairs = [PairFigures(nodes=pair, latency_seconds=1e-4, bytes_per_second=1e9) for pair in combinations(given, 2)]
        return NodeCheck(nodes, pairs)


def found(cluster: Cluster, nodes: int = 2) -> TargetPreflight:
    return checked(SlurmTarget(nodes=nodes, retries=2), cluster.usable, cluster.test)


def test_sound_nodes_are_tested_once() -> None:
    cluster = Cluster(4)
    result = found(cluster)
    assert cluster.asked == [(2, [])] and not result.excluded and len(result.nodes) == 2


def test_another_node_is_tested_in_the_place_of_a_slow_one() -> None:
    cluster = Cluster(3, n1="slow")
    result = found(cluster)
    assert cluster.asked == [(2, []), (2, ["n1"])]
    assert result.excluded == ("n1",) and {node.node for node in result.nodes} == {"n0", "n1", "n2"}
    assert len(result.pairs) == 2


def test_a_slow_one_of_two_is_named_and_there_is_nothing_else_to_test() -> None:
    cluster = Cluster(2, n0="slow")
    assert found(cluster).excluded == ("n0",) and len(cluster.asked) == 1


def test_a_node_that_keeps_a_job_from_starting_is_left_out_and_the_others_are_tested() -> None:
    cluster = Cluster(2, n1="deaf")
    result = found(cluster)
    assert cluster.asked == [(2, []), (1, ["n1"])]
    assert result.excluded == ("n1",)
    assert {node.node: node.verdict for node in result.nodes} == {"n0": "good", "n1": "broken"}
    assert "did not call" in str(result.nodes[1].reason)


def test_a_rank_that_fails_condemns_its_node_only_if_it_works_without() -> None:
    assert found(Cluster(3, n0="raises")).excluded == ("n0",)
    everywhere = found(Cluster(3, **dict.fromkeys(("n0", "n1", "n2"), "everybody raises")))
    assert not everywhere.excluded and not everywhere.nodes
    assert "not because of a single node: no module" in everywhere.notes[0]


def test_trials_are_bounded() -> None:
    cluster = Cluster(9, **dict.fromkeys((f"n{place}" for place in range(8)), "deaf"))
    assert len(found(cluster).excluded) == 3 and len(cluster.asked) == 3


def test_a_job_that_fails_without_blame_excludes_nobody() -> None:
    result = checked(
        SlurmTarget(nodes=2), lambda: ["a", "b"], lambda *_: NodeCheck(failure="sbatch: no such partition")
    )
    assert not result.nodes and result.notes == ("preflight checks failed: sbatch: no such partition",)


def test_where_all_nodes_are_broken_it_says_so() -> None:
    result = found(Cluster(2, n0="deaf", n1="deaf"))
    assert result.excluded == ("n0", "n1") and "no other node left" in result.notes[0]
