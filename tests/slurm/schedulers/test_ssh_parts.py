"""What needs no host: whose turn it is, how a job ended, which files hosts may write, what a launcher is told."""

import asyncio
import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.common.base import utc_now
from configs.plans.job import HostPlacement, Job, JobEnd, Launcher, Measurement, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SshTarget
from configs.workloads.noop import NoopWorkload
from slurm.launcher import processes
from slurm.launcher.job_files import write_end
from slurm.launcher.node import GIVEN, given_node
from slurm.schedulers.refusals import Unavailable
from slurm.schedulers.ssh import adapter, node
from slurm.schedulers.ssh import job as ssh_job
from slurm.schedulers.ssh.ending import EndedFromOutside, concluded
from slurm.schedulers.ssh.job import SshJob
from slurm.schedulers.ssh.node import _is_theirs
from slurm.schedulers.ssh.turns import Turns
from slurm.ssh import node_files, node_program
from slurm.ssh.connection import Facts, HostAway, HostError
from tests.support.flushed import names_of_flushed

PLACED = HostPlacement(hosts=("a",), run="s-0123abcd", folder="f")


def target(*names: str) -> SshTarget:
    return SshTarget.model_validate({"hosts": list(names)})


def job_on(target: SshTarget, nodes: int, exclude: tuple[str, ...] = ()) -> Job:
    cell = Cell(workload=NoopWorkload(), target=target.name, nodes=nodes)
    return Job(
        name="0001-timed-x", study="s", measuring_pass="timed", measuring=Measuring(), target=target,
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), ranks_per_node=1, timeout_seconds=10.0,
        inputs="in", cache="cache", exclude=exclude,
    )  # fmt: skip


class Wants:
    """A job that wants hosts."""

    def __init__(
        self, target: SshTarget, nodes: int, placed: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
    ) -> None:
        self.target, self.job, self._placed = target, job_on(target, nodes, exclude), placed

    def placed(self) -> tuple[str, ...]:
        return self._placed


def names(turns: Turns, wants: Wants) -> list[str]:
    return [host.name for host in turns.held_by(wants)]


def test_hosts_go_to_jobs_in_order_and_a_wide_job_is_not_passed_over() -> None:
    async def scenario() -> list[list[str]]:
        turns, lab = Turns(), target("turn-a", "turn-b")
        one, wide, late = Wants(lab, 1), Wants(lab, 2), Wants(lab, 1)
        await turns.take(one)
        waiting = [asyncio.create_task(turns.take(wants)) for wants in (wide, late)]
        await asyncio.sleep(0.05)
        seen = [names(turns, one), names(turns, wide), names(turns, late)]
        await turns.give_back(one)
        await asyncio.wait_for(waiting[0], 300)
        seen += [names(turns, wide), names(turns, late)]
        await turns.give_back(wide)
        await asyncio.wait_for(waiting[1], 300)
        return [*seen, names(turns, late)]

    assert asyncio.run(scenario()) == [["turn-a"], [], [], ["turn-a", "turn-b"], [], ["turn-a"]]


def test_a_job_has_the_hosts_that_it_had_and_none_that_it_is_kept_from() -> None:
    async def scenario() -> list[list[str]]:
        turns, lab = Turns(), target("had-a", "had-b", "had-c")
        adopted, kept_from = Wants(lab, 1, placed=("had-b",)), Wants(lab, 1, exclude=("had-a",))
        await turns.take(adopted)
        await turns.take(kept_from)
        return [names(turns, adopted), names(turns, kept_from)]

    assert asyncio.run(scenario()) == [["had-b"], ["had-c"]]


def ends(paths: JobPaths, *statuses: Status | None, **more: object) -> None:
    for rank, status in enumerate(statuses):
        if status is not None:
            end = JobEnd(status=status, return_code=0, finished_at=utc_now()).model_copy(update=more)
            write_end(paths, end, rank)


def test_a_job_ends_as_its_hosts_say(tmp_path: Path) -> None:
    paths, job = JobPaths(tmp_path), job_on(target("a", "b"), 2)
    ends(paths, Status.COMPLETED, Status.COMPLETED)
    assert concluded(job, paths, ["a", "b"], []).status is Status.COMPLETED


def test_a_host_whose_launcher_went_without_a_word_is_named(tmp_path: Path) -> None:
    paths, job = JobPaths(tmp_path), job_on(target("a", "b"), 2)
    ends(paths, Status.COMPLETED, None)
    (tmp_path / "start_1.log").write_text("sh: 1: torch: not found\n")
    end = concluded(job, paths, ["a", "b"], [])
    assert (end.status, end.suspects) == (Status.FAILED, ("b",))
    assert end.message is not None and "launcher on b did not start: sh: 1: torch: not found" in end.message


def test_a_loss_comes_before_what_others_saw_of_it(tmp_path: Path) -> None:
    paths, job = JobPaths(tmp_path), job_on(target("a", "b"), 2)
    ends(paths, Status.FAILED, None, kind="PeerLost")
    loss = EndedFromOutside(Status.NODE_FAILED, "host b could not be reached for 9 s", ("b",), "HostUnreachable")
    end = concluded(job, paths, ["a", "b"], [loss])
    assert (end.status, end.nodes, end.message) == (Status.NODE_FAILED, ("b",), loss.message)


def test_an_error_blames_the_host_that_it_names() -> None:
    loss = EndedFromOutside.of_error(HostError(28, "b: No space left on device"), ["a", "b"])
    assert (loss.nodes, loss.message) == (("b",), "host b: No space left on device")


@pytest.mark.parametrize(
    "name",
    ["../end.json", "/etc/passwd", "end.json", "job.json", "accounting.json", "a/../../b",
     "./end.json", ".//job.json", ".end.json.reserved", ".", ""],
)  # fmt: skip
def test_a_host_cannot_write_what_is_ours(name: str) -> None:
    assert not _is_theirs(name)


def test_a_hosts_name_ends_with_its_last_letter() -> None:
    with pytest.raises(ValueError, match="expected letters, digits"):
        SshTarget.model_validate({"hosts": [{"host": "a", "name": "gpu-a\n"}]})


@pytest.mark.parametrize("name", ["end_0.json", "parts/x.rank_0.json", "launcher_1.log"])
def test_a_host_writes_what_its_job_left(name: str) -> None:
    assert _is_theirs(name)


def test_a_launcher_knows_its_place() -> None:
    told = {"rank": 1, "names": ["a", "b"], "addresses": ["10.0.0.1", "10.0.0.2"], "job_id": "x"}
    node = given_node({GIVEN: json.dumps(told)})
    assert node is not None
    assert (node.name, node.head, node.head_address, node.count) == ("b", "a", "10.0.0.1", 2)
    assert given_node({}) is None
    with pytest.raises(ValueError, match="expected a rank"):
        given_node({GIVEN: json.dumps(told | {"rank": 2})})


def test_a_host_finds_every_kind_of_process_that_a_launch_has() -> None:
    assert {*processes._MODULES} <= {*node_program._MODULES}


@pytest.mark.parametrize("began", [True, False])
def test_a_job_that_another_process_began_is_paid_for_from_then_on(tmp_path: Path, began: bool) -> None:
    paths = JobPaths(tmp_path)
    paths.job.write_text(job_on(target("a", "b"), 2).model_dump_json())
    paths.hosts.write_text(HostPlacement(hosts=("a", "b"), run="s-0123abcd", folder="x").model_dump_json())
    paths.submission.write_text(Submission(job_id="j", submitted_at="2026-01-01T10:00:00+00:00").model_dump_json())
    for rank in range(2 * began):
        launcher = Launcher(
            node_rank=rank, pid=1, pid_started=1, host="h", started_at="2026-01-01T10:00:01+00:00",
            lock_acquired_at=f"2026-01-01T10:05:0{rank}+00:00",
        )  # fmt: skip
        paths.node_launcher(rank).write_text(launcher.model_dump_json())
    job = SshJob(tmp_path, Turns())
    assert job.placed() == ("a", "b")
    end = JobEnd(status=Status.COMPLETED, return_code=0, finished_at="2026-01-01T11:05:01+00:00")
    job._account(end, ["a", "b"])
    told = Accounting.model_validate_json(paths.accounting.read_bytes())
    if began:
        assert (told.queued_seconds, told.elapsed_seconds) == (301, 3600)
    else:
        assert told.elapsed_seconds is None and told.queued_seconds is not None and told.queued_seconds < 60


def test_a_clock_that_is_set_while_a_job_runs_changes_no_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours were paid for that no host had worked."""
    paths, now = JobPaths(tmp_path), time.time()
    paths.job.write_text(job_on(target("a"), 1).model_dump_json())
    job = SshJob(tmp_path, Turns())
    job._began = job._since
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    job._account(JobEnd(status=Status.COMPLETED, return_code=0, finished_at=utc_now()), ["a"])
    told = Accounting.model_validate_json(paths.accounting.read_bytes())
    assert told.queued_seconds == 0 and told.elapsed_seconds is not None and told.elapsed_seconds < 60


def test_a_job_that_waits_too_long_for_a_host_that_is_away_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise Unavailable("a: not reached")

    JobPaths(tmp_path).submission.write_text(Submission(job_id="j", submitted_at=utc_now()).model_dump_json())
    end = JobEnd(status=Status.CANCELLED, return_code=None, finished_at=utc_now())
    job = SimpleNamespace(state="waiting", note="", target=target("a"))
    monkeypatch.setattr(adapter, "_followed", lambda folder: job)
    monkeypatch.setattr(adapter, "overdue", lambda *_, **__: end)
    monkeypatch.setattr(adapter, "_cancel", away)
    assert adapter.poll(tmp_path) == "waiting"


class HostInMemory:
    """A host that takes a job, and whose launchers end at once and say nothing."""

    away_seconds = 0.0

    def __init__(self, name: str) -> None:
        self.name, self.started = name, False
        self.to_end: dict[tuple[str, int], None] = {}

    async def facts(self) -> Facts:
        told = {"folder": "/work", "boot": "0", "place": self.name, "address": None, "hostname": self.name}
        return Facts(told, 0.0)

    async def ask(self, operation: str, body: bytes = b"", **_: object) -> tuple[dict[str, Any], bytes]:
        self.started |= operation == "start_job"
        job = {"there": True, "started": self.started, "alive": False, "files": []}
        return {"jobs": [job], "left": [], "sizes": []}, b""


def job_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[SshJob, list[HostInMemory]]:
    """A job that was placed on hosts in memory."""
    paths = JobPaths(tmp_path / "jobs" / "0001")
    paths.folder.mkdir(parents=True)
    paths.job.write_text(job_on(target(*names), len(names)).model_dump_json())
    paths.hosts.write_text(HostPlacement(hosts=names, run="s-0123abcd", folder="x").model_dump_json())
    hosts = {name: HostInMemory(name) for name in names}
    monkeypatch.setattr(ssh_job, "host_of", lambda target, host: hosts[host.name])
    monkeypatch.setattr(node, "interpreter_name", lambda target: "python")
    return SshJob(paths.folder, Turns()), list(hosts.values())


def test_a_run_folder_that_was_moved_finds_its_jobs_on_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were looked for in a folder of the new path, called lost, and measured a second time beside themselves."""
    job, _ = job_in_memory(tmp_path / "runs" / "s", monkeypatch, "a")
    job.paths.hosts.unlink()
    monkeypatch.setattr(job._turns, "held_by", lambda _: job.target.hosts)
    job._place()
    [before] = job.nodes
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = SshJob(tmp_path / "elsewhere" / "s" / "jobs" / "0001", Turns())
    assert moved.placed() == ("a",)
    [after] = moved.nodes
    places = [asyncio.run(each._place())[0] for each in (after, before)]
    assert places[0] == places[1] and places[0].startswith("/work/runs/s-")


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_job_whose_first_launcher_does_not_start_ends_though_others_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Hosts are started in the order of their places, which is not that of node ranks."""
    job, hosts = job_in_memory(tmp_path, monkeypatch, *order)
    log = job.paths.folder / f"start_{order.index('a')}.log"
    log.write_text("bash: module: command not found\n")

    async def follow() -> None:
        job._turns = Turns()
        await asyncio.wait_for(job._through(), 300)

    asyncio.run(follow())
    end = JobEnd.model_validate_json(job.paths.end.read_bytes())
    assert {host.name for host in hosts if host.started} == {"a"}
    assert (job.state, end.status, end.suspects) == ("ended", Status.FAILED, ("a",))
    assert end.message == f"the launcher on a did not start: bash: module: command not found; see {log.name}"


@pytest.mark.parametrize("why", [errno.ENOENT, errno.EIO])
def test_a_file_that_is_gone_when_it_is_fetched_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    """`exits.tmp` had that name when the host listed it, and has another one now; a broken disk is told."""

    class Hasty(HostInMemory):
        files: tuple[Any, ...] = (["exits.tmp", 2, 1, None], ["end_0.json", 2, 1, 2])

        async def ask(self, operation: str, body: bytes = b"", **asked: Any) -> tuple[dict[str, Any], bytes]:
            if operation == "get":
                raise HostError(why, f"{self.name}: {asked['path']}")
            said, _ = await super().ask(operation, body, **asked)
            if operation != "look":
                return said, b""
            said["jobs"][0] |= {"alive": True, "started": True, "files": self.files}
            return said, b"{}"

    job, _ = job_in_memory(tmp_path, monkeypatch, "a")
    monkeypatch.setattr(ssh_job, "host_of", lambda target, host: Hasty(host.name))
    [one] = job._nodes(HostPlacement(hosts=("a",), run="s-0123abcd", folder="x"))
    if why == errno.ENOENT:
        asyncio.run(one.look())
        assert (job.paths.folder / "end_0.json").read_text() == "{}"
        assert not (job.paths.folder / "exits.tmp").exists()
    else:
        with pytest.raises(HostError):
            asyncio.run(one.look())


def test_files_that_are_too_many_for_one_answer_are_brought_by_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a long job that another process finds, when it has ended."""

    class Full(HostInMemory):
        answers = 0

        async def ask(self, operation: str, body: bytes = b"", **asked: Any) -> tuple[dict[str, Any], bytes]:
            if operation != "look":
                return await super().ask(operation, body, **asked)
            self.answers += 1
            said = node_program.look([asked["jobs"][0] | {"folder": str(tmp_path / "there")}])
            assert len(said["jobs"][0]["files"]) <= 10
            return said, said.pop("body")

    monkeypatch.setattr(node_program, "_LISTED_FILES", 10)
    (tmp_path / "there" / "parts").mkdir(parents=True)
    names = [f"parts/{number}.rank_0.json" for number in range(25)]
    for name in (".started_0", *names):
        (tmp_path / "there" / name).write_text("{}")
    job, _ = job_in_memory(tmp_path, monkeypatch, "a")
    host = Full("a")
    monkeypatch.setattr(ssh_job, "host_of", lambda target, named: host)
    [one] = job._nodes(HostPlacement(hosts=("a",), run="s-0123abcd", folder="x"))
    asyncio.run(one.look())
    assert one.over and host.answers == 4
    assert all((job.paths.folder / name).read_text() == "{}" for name in names)


def test_a_job_whose_last_look_meets_a_full_disk_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = job_in_memory(tmp_path, monkeypatch, "a", "b")

    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def end() -> None:
        job.nodes = job._nodes(HostPlacement(hosts=("a", "b"), run="s-0123abcd", folder="x"))
        for one in job.nodes:
            monkeypatch.setattr(one, "look", full)
        await job._end([EndedFromOutside(Status.LOST, "b: gone", ("b",))])

    asyncio.run(end())
    assert JobEnd.model_validate_json(job.paths.end.read_bytes()).status is Status.LOST


def test_parts_are_on_disk_before_the_hosts_copy_is_removed(tmp_path: Path) -> None:
    """After a crash of this machine there was neither the one nor the other."""
    on = SimpleNamespace(name="a")
    made = node.NodeJob(JobPaths(tmp_path), job_on(target("a"), 1), target("a"), on, PLACED, 0)  # type: ignore[arg-type]
    files = [[name, 3, 1, 3] for name in ("parts/m.rank_0.json", "rank_0.log")]
    with names_of_flushed() as flushed:
        assert asyncio.run(made._bring("/there", files, b"abcdef", ended=True)) == 2
    assert flushed == {tmp_path / "parts" / "m.rank_0.json"}
    assert (tmp_path / "rank_0.log").read_bytes() == b"def"


@pytest.mark.parametrize("left", [[], [17]])
def test_a_job_that_ended_and_has_much_to_bring_is_not_said_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int]
) -> None:
    """What it measured is not given up: the next run, which finds no end, brings it."""

    class Slow:
        name = "a"

        async def ask(self, operation: str, **_: object) -> tuple[dict[str, Any], bytes]:
            if operation == "end_job":
                return {"left": left}, b""
            await asyncio.sleep(60)
            return {}, b""

    monkeypatch.setattr(ssh_job, "_CANCEL_SECONDS", 0.05)
    paths = JobPaths(tmp_path)
    paths.job.write_text(job_on(target("a"), 1).model_dump_json())
    cancelled = SshJob(tmp_path, Turns())
    made = node.NodeJob(paths, cancelled.job, cancelled.target, Slow(), PLACED, 0)  # type: ignore[arg-type]
    made._folder = "/there"
    cancelled.nodes = [made]
    monkeypatch.setattr(made, "_place", lambda: placed("/there"))
    with pytest.raises(HostAway) as caught:
        asyncio.run(cancelled.cancel())
    said = str(caught.value.strerror)
    assert ("may still run there" in said) is bool(left) and ("has ended" in said) is not bool(left)
    assert ("a: no word within 0.05 s that the job is over" in said) is bool(left)  # it was reached
    assert not paths.end.exists()


async def placed(folder: str) -> tuple[str, None]:
    return folder, None


def test_what_is_left_of_a_job_is_killed_however_long_a_look_at_the_processes_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []

    def slowly_found(_: str) -> list[int]:
        time.sleep(0.05)  # longer than the limit, as on a login node with thousands of processes
        return [] if killed else [17]

    monkeypatch.setattr(node_program, "_KILL_SECONDS", 0.01)
    monkeypatch.setattr(node_program, "_launcher", lambda *_: None)
    monkeypatch.setattr(node_program, "_processes", slowly_found)
    monkeypatch.setattr("os.kill", lambda pid, _: killed.append(pid))
    assert node_program.end_job("/there", 0) == {"left": []} and killed == [17]


def test_inputs_of_any_size_are_carried_to_hosts_that_may_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's inputs may have 16 GiB: of more than 2 the job failed, and up to that they were read into memory."""

    class Here:
        name, largest = "a", 0

        async def ask(self, operation: str, body: bytes = b"", **given: Any) -> tuple[dict[str, Any], bytes]:
            self.largest = max(self.largest, len(body))
            await asyncio.sleep(0)  # the other's turn
            more = {"body": body} if operation == "put" else {}
            given.pop("limit_seconds", None)
            return getattr(node_files, operation)(**given, **more) or {}, b""

    monkeypatch.setattr(node, "SAMPLES_BYTES", 99, raising=False)
    run, root = tmp_path / "runs" / "s", tmp_path / "host"
    paths = JobPaths(run / "jobs" / "0001-timed-x")
    (run / "inputs").mkdir(parents=True)
    content = bytes(range(256)) * 10_000
    (run / "inputs" / "ab.tar").write_bytes(content)
    (run / "inputs" / ".x4j5").write_text("left by a run that was killed")
    paths.folder.mkdir(parents=True)
    job = job_on(target("a", "b"), 2)
    paths.job.write_text(job.model_dump_json())
    placement = HostPlacement(hosts=("a", "b"), run="s-0123abcd", folder="0001-timed-x.1234")
    hosts = [Here(), Here()]
    made = [node.NodeJob(paths, job, job.target, host, placement, rank) for rank, host in enumerate(hosts)]  # type: ignore[arg-type]
    for one in made:
        monkeypatch.setattr(one, "_place", lambda: placed(f"{root}/jobs/0001"))

    async def carried() -> None:
        await asyncio.gather(*(one.carry() for one in made))

    asyncio.run(carried())
    assert [path.name for path in (root / "inputs").iterdir()] == ["ab.tar"]
    assert (root / "inputs" / "ab.tar").read_bytes() == content
    assert max(host.largest for host in hosts) <= 1 << 20


def test_a_job_that_failed_is_ended_on_all_hosts_at_once() -> None:
    """One after the other, each for seconds: on many hosts the last ones computed on for minutes, and were paid for."""
    under_way, most = 0, 0

    class Slow:
        async def end(self) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.01)
            under_way -= 1
            if self is nodes[0]:
                raise HostAway(None, "a: not reached")

        async def look(self) -> None:
            looked.append(self)

    nodes, looked = [Slow() for _ in range(20)], list[Slow]()
    asyncio.run(ssh_job._end_on(nodes))  # type: ignore[arg-type]
    assert most == 20 and len(looked) == 19
