"""Slurm's words for a job, and how a job ended by its nodes' ends and the scheduler's word together."""

import pytest

from configs.common.execution import Layout
from configs.common.secrets import excerpt
from configs.plans.job import Job, JobEnd, Measurement
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from slurm.schedulers.commands.states import NEVER_BEGAN, STANDINGS, FinalState, bare, composed, standing

# "JOB STATE CODES" of squeue(1) and sacct(1), Slurm 22.05 to 24.11.
DOCUMENTED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "CONFIGURING",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "RUNNING",
    "RESV_DEL_HOLD",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "REQUEUED",
    "RESIZING",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
    "LAUNCH_FAILED",
    "POWER_UP_NODE",
    "RECONFIG_FAIL",
    "UPDATE_DB",
]


def test_every_state_that_slurm_documents_has_a_meaning() -> None:
    assert set(DOCUMENTED) == set(STANDINGS)


def test_every_end_has_a_status_and_nothing_else_has() -> None:
    assert all(
        (meaning.status is not None) == (meaning.place in ("ended", "requeued")) for meaning in STANDINGS.values()
    )


@pytest.mark.parametrize(
    ("word", "place", "status"),
    [
        ("PENDING", "waiting", None),
        ("CONFIGURING", "waiting", None),
        ("RUNNING", "running", None),
        ("SUSPENDED", "running", None),
        ("COMPLETING", "running", None),
        ("CANCELLED by 1000", "ended", Status.CANCELLED),
        ("CANCELLED+", "ended", Status.CANCELLED),
        ("NODE_FAIL", "ended", Status.NODE_FAILED),
        ("BOOT_FAIL", "ended", Status.NODE_FAILED),
        ("PREEMPTED", "ended", Status.PREEMPTED),
        ("OUT_OF_MEMORY", "ended", Status.OUT_OF_MEMORY),
        ("DEADLINE", "ended", Status.TIMEOUT),
        ("REQUEUED", "requeued", Status.PREEMPTED),
        ("SPECIAL_EXIT", "requeued", Status.PREEMPTED),
        ("A_WORD_OF_TOMORROW", "running", None),
    ],
)
def test_words_as_the_programs_write_them(word: str, place: str, status: Status | None) -> None:
    assert (standing(word).place, standing(word).status) == (place, status)


def job(nodes: int = 2) -> Job:
    cell = Cell(workload=NoopWorkload(), layout=Layout(dp=nodes), nodes=nodes)
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    return Job(
        name="0001-timed-x",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        target=SlurmTarget(nodes=nodes),
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=60,
        inputs="inputs",
        cache="cache",
    )


def end(status: Status, at: int = 0, **more: object) -> JobEnd:
    return JobEnd.model_validate(
        {"status": status, "return_code": 0, "finished_at": f"2026-01-01T00:00:{at:02d}.000000+00:00", **more}
    )


OWN = end(Status.FAILED, kind="ValueError", rank=1, measurement="v", at=5)
DONE = end(Status.COMPLETED)
CUT_OFF = end(Status.CANCELLED, measurement="v")
PEER = end(Status.FAILED, kind="PeerLost", rank=0, at=1)
KILLED = end(Status.FAILED, kind="SIGKILL", rank=0, measurement="v")
LOST_NODE = end(Status.NODE_FAILED, kind="NodeLost", nodes=("n2",))
NODES = ("n1", "n2")


@pytest.mark.parametrize(
    ("ends", "word", "status", "kind", "blamed"),
    [
        # the nodes saw it to its end: what the wrapper or a late failure makes Slurm say counts no more
        ([DONE, DONE], "COMPLETED", Status.COMPLETED, None, ()),
        ([DONE, DONE], "FAILED", Status.COMPLETED, None, ()),
        ([DONE, DONE], "NODE_FAIL", Status.COMPLETED, None, ()),
        # a rank's own failure before what others saw of it, and before any word of Slurm
        ([PEER, OWN], "COMPLETED", Status.FAILED, "ValueError", ()),
        ([PEER, OWN], "CANCELLED by 0", Status.FAILED, "ValueError", ()),
        ([OWN, None], "FAILED", Status.FAILED, "ValueError", ()),
        # of two own failures the first node's, whatever the clock of the other says
        ([OWN, KILLED], "FAILED", Status.FAILED, "ValueError", ()),
        # killed, and Slurm knows why
        ([KILLED, PEER], "OUT_OF_MEMORY", Status.OUT_OF_MEMORY, "OUT_OF_MEMORY", ()),
        ([KILLED, PEER], "COMPLETED", Status.FAILED, "SIGKILL", ()),
        ([OWN, PEER], "OUT_OF_MEMORY", Status.FAILED, "ValueError", ()),
        ([None, None], "OUT_OF_MEMORY", Status.OUT_OF_MEMORY, "OUT_OF_MEMORY", ()),
        # cut off from outside
        ([CUT_OFF, CUT_OFF], "CANCELLED by 0", Status.CANCELLED, "CANCELLED", ()),
        ([CUT_OFF, CUT_OFF], "PREEMPTED", Status.PREEMPTED, "PREEMPTED", ()),
        ([CUT_OFF, CUT_OFF], "REQUEUED", Status.PREEMPTED, "REQUEUED", ()),
        ([None, None], "REQUEUED", Status.PREEMPTED, "REQUEUED", ()),
        ([LOST_NODE, None], "REQUEUED", Status.PREEMPTED, "REQUEUED", ("n2",)),  # requeued since a node failed
        ([DONE, DONE], "REQUEUED", Status.COMPLETED, None, ()),
        ([CUT_OFF, CUT_OFF], "TIMEOUT", Status.TIMEOUT, "TIMEOUT", ()),
        ([CUT_OFF, None], "DEADLINE", Status.TIMEOUT, "DEADLINE", ()),
        ([CUT_OFF, CUT_OFF], "FAILED", Status.CANCELLED, None, ()),
        # a node is gone: the silent one is to blame
        ([CUT_OFF, None], "NODE_FAIL", Status.NODE_FAILED, "NODE_FAIL", ("n2",)),
        ([None, CUT_OFF], "NODE_FAIL", Status.NODE_FAILED, "NODE_FAIL", ("n1",)),
        ([LOST_NODE, None], "NODE_FAIL", Status.NODE_FAILED, "NODE_FAIL", ("n2",)),
        ([LOST_NODE, LOST_NODE], "COMPLETED", Status.NODE_FAILED, "NodeLost", ("n2",)),
        ([LOST_NODE, LOST_NODE], "PREEMPTED", Status.PREEMPTED, "PREEMPTED", ()),
        ([None, None], "BOOT_FAIL", Status.NODE_FAILED, "BOOT_FAIL", NODES),
        # Slurm knows nothing: neither queue nor accounts
        ([DONE, DONE], None, Status.COMPLETED, None, ()),
        ([OWN, None], None, Status.FAILED, "ValueError", ()),
        ([CUT_OFF, None], None, Status.CANCELLED, None, ()),
        ([None, None], None, Status.LOST, NEVER_BEGAN, ()),
        # it ran, but no launcher came up
        ([None, None], "COMPLETED", Status.FAILED, NEVER_BEGAN, ()),
        ([None, None], "FAILED", Status.FAILED, NEVER_BEGAN, ()),
        ([None, None], "CANCELLED by 0", Status.CANCELLED, "CANCELLED", ()),
    ],
)
def test_nodes_ends_and_the_schedulers_word(
    ends: list[JobEnd | None], word: str | None, status: Status, kind: str | None, blamed: tuple[str, ...]
) -> None:
    found = composed(job(), ends, FinalState(word) if word else None, NODES)
    assert (found.status, found.kind, found.nodes) == (status, kind, blamed)


@pytest.mark.parametrize(
    ("ends", "word", "nodes", "suspects"),
    [
        ([None, None], "COMPLETED", NODES, NODES),  # launchers were killed: nobody knows on which of them
        ([None, DONE], "COMPLETED", NODES, ()),  # what was measured is known by its parts
        ([CUT_OFF, None], None, NODES, ()),  # cancelled by somebody
        ([end(Status.FAILED, kind="ImportError"), PEER], "FAILED", NODES, ("n1",)),
        ([OWN, PEER], "FAILED", NODES, ()),  # what a measurement did
        ([None, None], "FAILED", ("n1",), ()),  # nobody knows which node has which rank
        ([CUT_OFF, None], "NODE_FAIL", NODES, ()),  # there is one to blame by name
        ([CUT_OFF, CUT_OFF], "PREEMPTED", NODES, ()),
        ([None, None], "CANCELLED by 0", NODES, ()),
        ([None, None], "REQUEUED", NODES, ()),
        ([DONE, DONE], "COMPLETED", NODES, ()),
    ],
)
def test_where_none_is_to_blame_by_name_those_that_may_be_are_suspects(
    ends: list[JobEnd | None], word: str | None, nodes: tuple[str, ...], suspects: tuple[str, ...]
) -> None:
    found = composed(job(), ends, FinalState(word) if word else None, nodes, began=[True, True])
    assert found.suspects == suspects


def test_a_requeue_says_so() -> None:
    message = composed(job(), [CUT_OFF, CUT_OFF], FinalState("REQUEUED"), NODES).message
    assert message is not None and message.startswith("Slurm requeued the job")


def test_a_job_that_another_cluster_of_a_federation_took_is_not_called_unknown() -> None:
    found = composed(job(), [None, None], FinalState("REVOKED"))
    assert found.status is Status.LOST and found.message is not None
    assert found.message.startswith("Slurm started the job on another cluster, where it is not watched, and it was")
    assert "targets[].cluster" in found.message and found.message.endswith("(REVOKED)")


def test_the_measurement_that_was_cut_off_is_kept() -> None:
    assert composed(job(), [CUT_OFF, None], FinalState("TIMEOUT"), NODES).measurement == "v"
    assert composed(job(), [None, None], FinalState("NODE_FAIL"), NODES, measurement="w").measurement == "w"
    assert composed(job(), [DONE, DONE], FinalState("COMPLETED"), NODES, measurement="w").measurement is None


def test_a_launcher_that_came_up_and_left_no_word_is_lost_not_unstarted() -> None:
    found = composed(job(), [None, None], FinalState("COMPLETED"), NODES, began=[True, False])
    assert (found.status, found.kind) == (Status.LOST, None)


def test_what_never_began_says_what_would_help() -> None:
    message = composed(job(), [None, None], FinalState("FAILED"), NODES).message
    assert message is not None
    assert "n1, n2" in message and "targets[].shared" in message and "slurm_0.log" in message


def test_what_would_help_is_told_of_a_job_of_many_nodes_too() -> None:
    """The message is cut where it is kept: the names of a hundred nodes were all that was left of it."""
    nodes = [f"gpu-node-{number:04}" for number in range(600)]
    message = composed(job(), [None] * 600, FinalState("FAILED"), nodes).message or ""
    assert "gpu-node-0000, " in message and " and 592 more" in message
    assert "targets[].shared" in excerpt(message, 600) and "slurm_0.log" in excerpt(message, 600)


def test_bare_words() -> None:
    assert bare("CANCELLED by 1000") == "CANCELLED"
    assert bare("") == ""
