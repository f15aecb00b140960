"""Slurm's lists of hosts, and this node's place by the variables of srun."""

import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.common.failure_kinds import OTHER_NODE, PEER_LOST
from slurm.launcher.end_cause import JobVerdict, NotStartedError, Status, first_cause
from slurm.launcher.node import JobNode, host_names, interface_of, link_is_up, listening_addresses, node_of, under_slurm

VARIABLES = {
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "lab[1-3]",
}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("lab1", ["lab1"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("b,a", ["b", "a"]),
        ("rack[1-2]-n[8-9]", ["rack1-n8", "rack1-n9", "rack2-n8", "rack2-n9"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-11].cluster", ["n9.cluster", "n10.cluster", "n11.cluster"]),
        ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_host_names(expression: str, names: list[str]) -> None:
    assert list(host_names(expression)) == names


@pytest.mark.parametrize("expression", ["", "n[1", "n]", "n[a-b]", "n[1-]", ",n1", "n[[1]]", "n1,"])
def test_what_is_no_list_of_hosts(expression: str) -> None:
    with pytest.raises(ValueError, match="host list: got"):
        host_names(expression)


@pytest.mark.parametrize(
    "expression",
    ["n[0-99999999]", "n[0-999][0-999]", "[41-0,7]<[41-02,1-33333333302,7]", "n[²]", "n[1_0-2_0]", "n[1-" + "9" * 5000],
    ids=range(6),
)
def test_a_host_list_beyond_any_cluster_is_refused_before_it_is_expanded(expression: str) -> None:
    with pytest.raises(ValueError, match="host list: got") as caught:
        host_names(expression)
    assert len(str(caught.value)) < 200


def test_a_host_list_of_a_large_cluster_is_read() -> None:
    assert len(host_names(",".join(f"r{rack}n[001-100]" for rack in range(100)))) == 10_000


@given(st.lists(st.from_regex(r"[a-z]{1,5}[0-9]{0,4}", fullmatch=True), min_size=1, max_size=8))
def test_plain_names_stay_as_they_are(names: list[str]) -> None:
    assert list(host_names(",".join(names))) == names


def test_the_steps_nodes_come_before_the_jobs() -> None:
    assert under_slurm(VARIABLES)
    assert not under_slurm({"SLURM_JOB_ID": "77"})
    # As in a step that srun made with --jobid alone (22.05).
    step = {"SLURM_JOB_ID": "77", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
    assert under_slurm(step | {"SLURM_JOB_NODELIST": "n1"}) and node_of(step).names == ("n1",)
    assert node_of(VARIABLES) == JobNode(1, ("lab1", "lab2", "lab3"), "77")
    step = VARIABLES | {"SLURM_STEP_NODELIST": "lab3", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "4"}
    assert node_of(step | {"SLURM_NODEID": "0"}) == JobNode(0, ("lab3",), "77", "4")
    with pytest.raises(ValueError, match="SLURM_NODEID: got 1 of 1 nodes, but the node list is lab3"):
        node_of(step)


def test_a_node_that_claims_anothers_place() -> None:
    with pytest.raises(NotStartedError, match="lab3: registered as node 1, which is lab2, expected node 2") as caught:
        node_of(VARIABLES | {"SLURMD_NODENAME": "lab3"})
    assert (caught.value.verdict.kind, caught.value.verdict.nodes) == ("DuplicateNodeRank", ("lab3",))
    assert node_of(VARIABLES | {"SLURMD_NODENAME": "lab2"}).name == "lab2"


def test_interface_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    assert link_is_up("lo")
    assert link_is_up("no-such-interface")


def verdict(status: Status, kind: str | None = None, **fields: object) -> JobVerdict:
    return JobVerdict.model_validate({"status": status, "kind": kind, **fields})


KILLED = verdict(Status.FAILED, "SIGKILL", rank=1, measurement="a")
LOST = verdict(Status.NODE_FAILED, "NodeLost", nodes=("lab2",))
CANCELLED = verdict(Status.CANCELLED)
DIED = verdict(Status.FAILED, "ProcessDied")
PEER = verdict(Status.FAILED, PEER_LOST, rank=0, measurement="a")
OTHER = verdict(Status.FAILED, OTHER_NODE, measurement="b")
COMPLETED = verdict(Status.COMPLETED)


@pytest.mark.parametrize(
    "weaker_last",
    [
        [KILLED, PEER],
        [LOST, OTHER],
        [LOST, KILLED],  # among equals the first
        [KILLED, LOST],
        [CANCELLED, DIED, PEER, OTHER, COMPLETED],
        [DIED, PEER],
        [PEER, OTHER],
    ],
)
def test_first_cause(weaker_last: list[JobVerdict]) -> None:
    assert first_cause(weaker_last).kind == weaker_last[0].kind
    if weaker_last[0] not in (KILLED, LOST):
        assert first_cause(weaker_last[::-1]).kind == weaker_last[0].kind


def test_first_cause_takes_the_measurement_from_whoever_knows_it_and_names_the_silent_rank() -> None:
    assert first_cause([LOST, OTHER]).measurement == "b"
    silent = OTHER.model_copy(update={"silent_ranks": (1,)})
    assert first_cause([PEER, silent]).rank == 1
    assert first_cause([PEER, silent.model_copy(update={"silent_ranks": (1, 2)})]).rank == 0


def test_the_head_listens_where_other_nodes_reach_it_and_not_on_public_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(*addresses: str) -> dict[str, list[SimpleNamespace]]:
        return {f"eth{n}": [SimpleNamespace(family=socket.AF_INET, address=each)] for n, each in enumerate(addresses)}

    interfaces = own("127.0.0.1", "10.0.0.5", "192.168.7.5", "8.8.8.8")
    monkeypatch.setattr("slurm.launcher.node.psutil.net_if_addrs", lambda: interfaces)
    names = {"head": ["10.0.0.5"], "public": ["8.8.8.8"], "debian": ["127.0.1.1"], "other": ["10.0.0.9"]}
    names["both"] = ["10.0.0.5", "8.8.8.8"]
    monkeypatch.setattr("slurm.launcher.node.addresses_of", lambda host: tuple(names[host]))
    private = ("10.0.0.5", "127.0.0.1", "192.168.7.5")
    assert listening_addresses("head") == private
    assert listening_addresses("public") == tuple(sorted((*private, "8.8.8.8")))
    assert listening_addresses("both") == listening_addresses("public"), "the others may choose either"
    assert listening_addresses("debian") == listening_addresses("other") == ("",), "the name says nothing"
