"""The roll call of a job's nodes and what they tell each other after it, over real connections on the loopback."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from configs.common.failure_kinds import OTHER_NODE, PEER_LOST
from configs.records.record import Status
from slurm.launcher import node_registration
from slurm.launcher.end_cause import JobVerdict, NotStartedError
from slurm.launcher.node import JobNode, addresses_of
from slurm.launcher.node_registration import Rendezvous, call_roll, roll_call_port
from slurm.launcher.peer_monitor import PeerMonitor, PeerTimeLimits
from tests.support.patience import patient

QUICK = PeerTimeLimits(call_seconds=1.5, beat_seconds=0.05, lost_seconds=0.6, confer_seconds=2.0)
PATIENT = PeerTimeLimits(call_seconds=20.0, beat_seconds=0.05, lost_seconds=10.0, confer_seconds=10.0)
NAMES = ("localhost", "two", "three")
COMPLETED = JobVerdict(status=Status.COMPLETED)
KILLED = JobVerdict(
    status=Status.FAILED, kind="SIGKILL", rank=1, message="rank 1 was killed by SIGKILL", measurement="v"
)
_jobs = itertools.count(1)


@pytest.fixture
def job_id() -> str:
    """A job of which no other test knows, whose port is free."""
    while True:
        job = f"{time.time_ns()}-{next(_jobs)}"
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("", roll_call_port(JobNode(0, NAMES, job))))
            except OSError:
                continue
            return job


def node(rank: int, job_id: str, names: tuple[str, ...] = NAMES[:2]) -> JobNode:
    return JobNode(rank, names, job_id)


def call(
    at: JobNode, limits: PeerTimeLimits = PATIENT, digest: str = "d", give_up: Callable[[], bool] = lambda: False
) -> tuple[Rendezvous, PeerMonitor]:
    return call_roll(at, f"job-{digest}", digest, give_up, limits)


def together(*nodes: JobNode, limits: PeerTimeLimits = PATIENT) -> list[Future[tuple[Rendezvous, PeerMonitor]]]:
    """All nodes call at once, each from a thread, as they do from hosts of their own."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [pool.submit(call, each, limits) for each in nodes]


def refusal(future: Future[tuple[Rendezvous, PeerMonitor]]) -> JobVerdict:
    error = future.exception()
    assert isinstance(error, NotStartedError), error
    return error.verdict


def on_each(*calls: Callable[[], JobVerdict]) -> list[JobVerdict]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(each) for each in calls]]


def never() -> bool:
    return False


def test_all_nodes_learn_where_the_ranks_meet(job_id: str) -> None:
    calls = together(*(node(rank, job_id, NAMES) for rank in (2, 0, 1)))
    meetings = {each.result()[0] for each in calls}
    assert len(meetings) == 1
    meeting = meetings.pop()
    assert (meeting.head_address, meeting.own_address, meeting.interface) == ("127.0.0.1", "127.0.0.1", "lo")
    assert meeting.port != roll_call_port(node(0, job_id))
    teams = [each.result()[1] for each in calls]
    assert (
        on_each(*(lambda peer_monitor=peer_monitor: peer_monitor.confer(COMPLETED, never) for peer_monitor in teams))
        == [COMPLETED] * 3
    )


def test_nodes_that_reach_the_head_by_different_addresses_meet_at_one(job_id: str) -> None:
    """The ranks' store listens on the address of the node that called first: the other's ranks waited there in vain."""
    here = JobNode(0, NAMES, job_id)
    others = [JobNode(rank, NAMES, job_id, addresses=(f"127.0.0.{rank}", "", "")) for rank in (1, 2)]
    calls = together(here, *others)
    meetings = [each.result()[0] for each in calls]
    assert len({(meeting.head_address, meeting.port) for meeting in meetings}) == 1, meetings
    teams = [each.result()[1] for each in calls]
    assert on_each(*(lambda team=team: team.confer(COMPLETED, never) for team in teams)) == [COMPLETED] * 3


def test_a_head_is_called_by_each_of_its_addresses(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them led nowhere, as one of a network for management does, and was called alone for 30 s."""
    listening = addresses_of("localhost")
    monkeypatch.setattr(node_registration, "addresses_of", lambda _: ("240.0.0.1", *listening))
    calls = together(node(0, job_id), node(1, job_id))
    assert calls[1].result()[0].head_address == "127.0.0.1"
    for each in calls:
        each.result()[1].confer(KILLED, lambda: True)


def test_one_node_needs_nobody(job_id: str) -> None:
    meeting, peer_monitor = call(JobNode(0, ("lab1",), job_id))
    assert meeting.interface == "lo"
    assert peer_monitor.exchange(True).finished and not peer_monitor.exchange(False).finished
    assert peer_monitor.confer(KILLED, never) == KILLED


def test_missing_nodes_are_named(job_id: str) -> None:
    names = ("localhost", "two", "three", "four")
    head, second = together(JobNode(0, names, job_id), JobNode(1, names, job_id), limits=QUICK)
    verdict = refusal(head)
    assert (verdict.kind, verdict.nodes, verdict.status) == ("NodeMissing", ("three", "four"), Status.NODE_FAILED)
    assert verdict.message == ("node 2 (three), node 3 (four) did not register with head node localhost within 1.5 s")
    assert refusal(second) == verdict, "who did call is told why"


def test_of_many_missing_nodes_the_first_are_told_and_all_are_kept(job_id: str) -> None:
    """Only the beginning of a message is kept: it named nodes, and said nothing of them."""
    names = ("localhost", *(f"gpu-node-{number:04}" for number in range(1, 200)))
    verdict = refusal(together(JobNode(0, names, job_id), limits=QUICK)[0])
    assert verdict.nodes == names[1:]
    message = verdict.as_end(None).message or ""
    assert message.startswith("node 1 (gpu-node-0001), node 2 (gpu-node-0002), ")
    assert message.endswith(" and 191 more did not register with head node localhost within 1.5 s")


def test_a_rank_that_comes_twice_is_refused_everywhere(job_id: str) -> None:
    first, imposter = node(1, job_id, NAMES), JobNode(1, ("localhost", "three", "two"), job_id)
    calls = together(node(0, job_id, NAMES), first, imposter)
    for each in calls:
        verdict = refusal(each)
        assert (verdict.kind, verdict.nodes) == ("DuplicateNodeRank", ("three",))
        assert "both registered as node 1" in (verdict.message or "")


def test_an_unreachable_head_is_named(job_id: str) -> None:
    (alone,) = together(node(1, job_id), limits=QUICK)
    verdict = refusal(alone)
    assert verdict.kind == "HeadUnreachable"
    assert verdict.nodes == ("localhost",)
    assert "two could not reach head node localhost" in (verdict.message or "")
    assert "Connection refused" in (verdict.message or "")


def test_another_jobs_head_is_told_apart(job_id: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        head = pool.submit(call, node(0, job_id), QUICK)
        foreign = pool.submit(call, node(1, job_id), QUICK, "other")
    verdict = refusal(foreign)
    assert verdict.kind == "ForeignJob"
    assert "belongs to another job, job-d, expected job-other" in (verdict.message or "")
    assert refusal(head).kind == "NodeMissing", "the stranger does not count"


def test_a_taken_port_is_named(job_id: str) -> None:
    with (
        socket.create_server(("", roll_call_port(node(0, job_id)))),
        pytest.raises(NotStartedError, match="localhost: cannot listen on port") as caught,
    ):
        call(node(0, job_id))
    assert caught.value.verdict.kind == "PortTaken"


def test_something_else_at_the_port_is_no_head(job_id: str) -> None:
    with socket.create_server(("", roll_call_port(node(0, job_id)))) as listener:
        stop = threading.Event()
        thread = threading.Thread(target=_greet_everybody, args=(listener, stop))
        thread.start()
        (alone,) = together(node(1, job_id), limits=QUICK)
        stop.set()
        thread.join()
    assert "another program listens there" in (refusal(alone).message or "")


def _greet_everybody(listener: socket.socket, stop: threading.Event) -> None:
    listener.settimeout(0.1)
    while not stop.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.sendall(b"220 mail.example.org ESMTP\r\n")
        connection.close()


def test_strangers_disturb_nobody(job_id: str) -> None:
    port = roll_call_port(node(0, job_id))
    with ThreadPoolExecutor(2) as pool:
        head = pool.submit(call, node(0, job_id))
        strangers = []
        deep = b"[" * 50_000 + b"\n"  # more than a parser goes down
        said = (b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.0\r\n\r\n", b"[1]\nnull\n", b'{"node_rank": "x"}\n', deep)
        for words in said:
            stranger = _connect(port)
            stranger.sendall(words)
            strangers.append(stranger)
        strangers[0].close()
        member = pool.submit(call, node(1, job_id))
        teams = [head.result()[1], member.result()[1]]
    assert (
        on_each(*(lambda peer_monitor=peer_monitor: peer_monitor.confer(COMPLETED, never) for peer_monitor in teams))
        == [COMPLETED] * 2
    )
    for stranger in strangers:
        stranger.close()


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + patient(10)
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_roll_call_can_be_given_up(job_id: str) -> None:
    for rank in (0, 1):
        with pytest.raises(NotStartedError) as caught:
            call(node(rank, job_id), give_up=lambda: True)
        assert caught.value.verdict.status is Status.CANCELLED


def team_of(job_id: str, limits: PeerTimeLimits = PATIENT, names: tuple[str, ...] = NAMES[:2]) -> list[PeerMonitor]:
    return [
        each.result()[1]
        for each in together(*(JobNode(rank, names, job_id) for rank in range(len(names))), limits=limits)
    ]


def exchange_until(
    teams: list[PeerMonitor], wanted: Callable[[], bool], finished: tuple[bool, ...] = (False, False)
) -> None:
    deadline = time.monotonic() + patient(10)
    while not wanted():
        assert time.monotonic() < deadline
        for peer_monitor, done in zip(teams, finished, strict=True):
            peer_monitor.exchange(done)
        time.sleep(0.01)


def test_everybody_learns_that_all_have_finished(job_id: str) -> None:
    head, member = team_of(job_id)
    exchange_until([head, member], lambda: True)
    assert not head.exchange(True).finished
    assert not member.exchange(False).finished
    exchange_until(
        [head, member], lambda: member.exchange(True).finished and head.exchange(True).finished, (True, True)
    )
    assert on_each(lambda: head.confer(COMPLETED, never), lambda: member.confer(COMPLETED, never)) == [COMPLETED] * 2


def test_when_one_node_ends_the_others_are_told_and_all_agree(job_id: str) -> None:
    head, member, third = team_of(job_id, names=NAMES)
    saw_loss = JobVerdict(status=Status.FAILED, kind=PEER_LOST, rank=0, measurement="v")
    ended = JobVerdict(status=Status.FAILED, kind=OTHER_NODE)

    def ends_when_told(peer_monitor: PeerMonitor) -> JobVerdict:
        exchange_until([peer_monitor], lambda: peer_monitor.exchange(False).stop, (False,))
        return peer_monitor.confer(ended, never)

    # The head's ranks only saw a peer go; they end before it is known why.
    agreed = on_each(
        lambda: head.confer(saw_loss, never), lambda: ends_when_told(third), lambda: member.confer(KILLED, never)
    )
    assert agreed == [KILLED] * 3


def test_a_node_whose_launcher_is_gone_is_lost(job_id: str) -> None:
    head, member = team_of(job_id)
    member._line._connection.close()  # as the kernel does for a process that was killed
    exchange_until([head], lambda: head.exchange(False).stop, (False,))
    verdict = head.confer(JobVerdict(status=Status.FAILED, kind=OTHER_NODE, measurement="v"), never)
    assert (verdict.kind, verdict.status, verdict.nodes) == ("NodeLost", Status.NODE_FAILED, ("two",))
    assert (verdict.measurement, verdict.message) == ("v", "node 1 (two) was lost: its launcher closed the connection")


def test_silence_is_noticed_on_both_sides(job_id: str) -> None:
    head, member = team_of(job_id, QUICK)
    exchange_until([head], lambda: head.exchange(False).stop, (False,))
    verdict = head.confer(JobVerdict(status=Status.FAILED, kind=OTHER_NODE), lambda: True)
    assert verdict.nodes == ("two",)
    assert "no heartbeat for 0.6 s" in (verdict.message or "")
    member.confer(COMPLETED, lambda: True)

    head, member = team_of(job_id, QUICK)
    exchange_until([member], lambda: member.exchange(False).stop, (False,))
    verdict = member.confer(JobVerdict(status=Status.FAILED, kind=OTHER_NODE), never)
    assert (verdict.kind, verdict.nodes) == ("HeadLost", ("localhost",))
    head.confer(COMPLETED, lambda: True)


def test_a_launcher_that_was_stopped_for_a_while_forgives_the_silence(job_id: str) -> None:
    head, member = team_of(job_id, QUICK)
    head.exchange(False)
    time.sleep(1.0)  # both, as when Slurm suspends a job
    assert not head.exchange(False).stop
    assert not member.exchange(False).stop
    on_each(lambda: head.confer(COMPLETED, never), lambda: member.confer(COMPLETED, never))


def test_a_cancelled_node_does_not_wait_for_the_others(job_id: str) -> None:
    head, member = team_of(job_id)
    cancelled = JobVerdict(status=Status.CANCELLED)
    assert member.confer(cancelled, lambda: True) == cancelled
    exchange_until([head], lambda: head.exchange(False).stop, (False,))
    ended = head.confer(JobVerdict(status=Status.FAILED, kind=PEER_LOST), never)
    assert ended.status is Status.CANCELLED


def test_messages_are_lines_of_json(job_id: str) -> None:
    port = roll_call_port(node(0, job_id))
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(call, node(0, job_id))
        with _connect(port) as caller:
            hello = json.dumps({"digest": "d", "node_rank": 1, "host": "two"}).encode() + b"\n"
            for byte in hello:
                caller.sendall(bytes([byte]))
            lines = caller.makefile("rb")
            assert json.loads(lines.readline()) == {"welcome": "job-d"}
            assert json.loads(lines.readline()) == {"go": head.result()[0].port}
            head.result()[1].confer(COMPLETED, lambda: True)
