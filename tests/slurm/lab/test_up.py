"""The lab itself, for real: nodes that are apart, links that are slow, memory that ends, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slurm.lab import cluster, daemons, members, network
from slurm.lab.commands import why_no_lab
from slurm.lab.plan import CONTROLLERS, FREEZER, LabRequest, cgroup_of
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import RANKWISE, wait_until

pytestmark = pytest.mark.slurm

_STREAM = """
import os, socket, sys, time
if os.environ["SLURM_NODEID"] == "0":
    listener = socket.create_server(("", 5999))
    connection, _ = listener.accept()
    began, received = None, 0
    while data := connection.recv(1 << 20):
        began = began or time.monotonic()
        received += len(data)
    print(received / (time.monotonic() - began))
else:
    end = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((sys.argv[1], 5999))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 18))
"""
_FILL = (
    "filled = bytearray({megabytes} << 20); filled[::4096] = b'x' * len(filled[::4096]); import time; time.sleep(2.5)"
)


def submit(lab: Lab, *options: str, command: str) -> str:
    return lab.slurm("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").strip()


def rankwise_lab(lab: Lab, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(RANKWISE), "lab", *arguments[:1], "--name", lab.plan.name, *arguments[1:]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600)


def test_a_job_runs_on_nodes_that_are_apart(lab: Lab) -> None:
    told = "hostname; taskset -cp $$; ls -A /dev/shm /run/lock | wc -l; ip -o -4 addr show dev eth0; getent hosts $0"
    first, second = lab.plan.node_names
    answer = lab.slurm("srun", "--nodes=2", "--label", "sh", "-c", told, second)
    for task, node in enumerate(lab.plan.node_names):
        lines = [line.partition(": ")[2] for line in answer.splitlines() if line.startswith(f"{task}: ")]
        assert lines[0] == node
        assert lines[1].endswith(f": {lab.plan.cores(node)[0]}")
        assert f"{lab.plan.address(node)}/24" in lines[3]
        assert lines[4].split() == [lab.plan.address(second), second]
    assert lab.plan.cores(first) != lab.plan.cores(second) or lab.plan.shares_cores
    inside = {node: lab.on_node(node, "readlink", "/proc/self/ns/net").stdout for node in lab.plan.node_names}
    assert len({*inside.values(), os.readlink("/proc/self/ns/net")}) == 3


def test_links_have_the_speed_of_their_partition(lab: Lab) -> None:
    head = lab.plan.address(lab.plan.node_names[0])

    def measured(partition: str) -> float:
        argv = ("srun", f"--partition={partition}", "--nodes=2", sys.executable, "-c", _STREAM, head)
        return float(lab.slurm(*argv))

    slow, unshaped = measured("link-100mbit"), measured("lab")
    # 12.5e6 bytes/s less headers; what stands in buffers when the clock begins adds a little.
    assert slow < 12.7e6
    assert unshaped > 3 * slow
    wait_until(lambda: not lab.queue(), 20)
    assert [network.link_state(lab.plan, node) for node in lab.plan.node_names] == ["unshaped"] * 2


def test_accounts_know_memory_and_time(lab: Lab) -> None:
    job = submit(lab, "--mem=500", command=f'{sys.executable} -c "{_FILL.format(megabytes=90)}"')
    assert lab.wait_until_ended(job) == "COMPLETED"
    asked = ("sacct", "--noheader", "--parsable2", "--units=M", "--format=maxrss,nodelist", "--jobs", f"{job}.batch")
    peak, node = lab.slurm(*asked).strip().split("|")
    assert 90 <= float(peak.rstrip("M")) < 200
    assert node in lab.plan.node_names
    assert lab.on_node(node, "env", f"SLURM_CONF={lab.plan.slurm_conf}", *asked).stdout.strip() == f"{peak}|{node}"


def test_more_memory_than_asked_for_is_out_of_memory(lab: Lab) -> None:
    job = submit(lab, "--mem=100", command=f'{sys.executable} -c "{_FILL.format(megabytes=300)}"')
    # Without cgroups it is slurmd that kills, and all that Slurm says is signal 9.
    assert lab.wait_until_ended(job) == ("OUT_OF_MEMORY" if lab.plan.cgroups else "FAILED")


def test_nothing_of_a_job_survives_it(lab: Lab) -> None:
    if not lab.plan.cgroups:
        pytest.skip("without cgroups Slurm loses sight of a process that left its parent")
    job = submit(lab, command="srun sh -c '(setsid sleep 98765 &) ; sleep 98764'")
    wait_until(lambda: _programs(lab).count("sleep") == 2, 20)
    lab.slurm("scancel", job)
    assert lab.wait_until_ended(job).startswith("CANCELLED")
    assert set(_programs(lab)) == {"slurmd"}


def test_a_higher_partition_preempts(lab: Lab) -> None:
    low = submit(lab, "--nodes=2", command="srun sleep 60")
    wait_until(lambda: lab.slurm("squeue", "-h", "-j", low, "-o", "%T").strip() == "RUNNING", 20)
    high = submit(lab, "--nodes=2", "--partition=high", command="srun true")
    assert lab.wait_until_ended(high) == "COMPLETED"
    assert lab.wait_until_ended(low) == "PREEMPTED"


def test_jobs_outlive_restarts_of_slurmctld_and_slurmd(lab: Lab) -> None:
    node = lab.plan.node_names[0]
    job = submit(lab, f"--nodelist={node}", command="srun sleep 4")
    wait_until(lambda: "sleep" in _programs(lab), 20)
    daemons.restart(lab.plan, daemons.find_daemon(lab.plan, "slurmctld"))
    daemons.stop(lab.plan, daemons.find_daemon(lab.plan, "slurmd", node))
    assert cluster.up(lab.plan.request) == [f"slurmd of {node}"]
    assert lab.wait_until_ended(job) == "COMPLETED"


def test_up_resumes_a_node_that_slurm_took_out_of_service(lab: Lab) -> None:
    node = lab.plan.node_names[1]
    lab.slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=tried")
    assert cluster.up(lab.plan.request) == [f"{node} resumed"]
    assert lab.slurm("srun", f"--nodelist={node}", "hostname").strip() == node


def test_up_again_changes_nothing_and_refuses_other_arguments(lab: Lab) -> None:
    before = {each.pid for each in members.members(lab.plan.name)}
    assert cluster.up(lab.plan.request) == []
    assert {each.pid for each in members.members(lab.plan.name)} == before
    other = rankwise_lab(lab, "up", "--folder", str(lab.plan.folder), "--nodes", "3")
    assert other.returncode == 1
    assert "nodes is 2, asked for 3" in other.stderr and "lab down" in other.stderr
    hiding = [str(RANKWISE), "lab", "up", "--name", "nosuch", "--folder", "/tmp/rankwise-elsewhere", "--hide", "/usr"]
    needed = subprocess.run(hiding, capture_output=True, text=True, timeout=600)
    assert needed.returncode == 1 and needed.stderr == "--hide: /usr is required by the nodes. Leave it out\n"
    elsewhere = rankwise_lab(lab, "up", "--folder", "/tmp/rankwise-elsewhere")
    assert elsewhere.returncode == 1 and f"already up in {lab.plan.folder}" in elsewhere.stderr
    assert not Path("/tmp/rankwise-elsewhere").exists()


def test_a_cut_link_is_seen_and_can_be_restored(lab: Lab) -> None:
    first, second = lab.plan.node_names
    port = daemons.find_daemon(lab.plan, "slurmd", second)
    assert rankwise_lab(lab, "status").returncode == 0
    assert rankwise_lab(lab, "link", second, "cut").returncode == 0
    try:
        status = rankwise_lab(lab, "status")
        assert status.returncode == 1
        assert any(line.startswith(second) and "link cut" in line for line in status.stdout.splitlines())
        assert not _reaches(lab, first, second)
    finally:
        assert rankwise_lab(lab, "link", second, "restore").returncode == 0
    wait_until(lambda: _reaches(lab, first, second), 20)
    daemons.wait_until_it_works(lab.plan, port)
    assert lab.slurm("srun", f"--nodelist={second}", "hostname").strip() == second


def test_exec_runs_on_the_node(lab: Lab) -> None:
    node = lab.plan.node_names[1]
    done = rankwise_lab(lab, "exec", node, "--", "sh", "-c", 'hostname; pwd; echo "$SLURM_CONF"; exit 7')
    assert done.stdout.splitlines() == [node, os.getcwd(), str(lab.plan.slurm_conf)]
    assert done.returncode == 7
    wrong = rankwise_lab(lab, "exec", "nowhere", "--", "true")
    assert wrong.returncode == 1 and "Use one of" in wrong.stderr
    env = rankwise_lab(lab, "env")
    assert env.stdout.strip() == f"export SLURM_CONF={lab.plan.slurm_conf}"


def test_private_disks_show_only_what_is_shipped(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if (why := why_no_lab()) is not None:
        pytest.skip(why)
    secret = tmp_path / "runs" / "secret"
    secret.parent.mkdir()
    secret.write_text("of the head")
    folder = tmp_path_factory.mktemp("p")
    name = f"p{os.getpid() % 10**6}x"
    request = LabRequest(name=name, folder=folder, nodes=1, hidden=(*cluster.default_hidden(), tmp_path))
    try:
        cluster.up(request)
        lab = Lab(cluster.find_lab(name, folder))
        (lab.plan.shared / "shipped").write_text("to all")
        tried = f"ls {secret}; cat {lab.plan.shared}/shipped; cd /; {sys.executable} -P -c 'import pydantic, configs'"
        argv = ["srun", "--chdir=/", "--export=PATH", "sh", "-c", tried]
        environment = os.environ | daemons.client(lab.plan)
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
        assert done.stdout == "to all"
        assert f"cannot access '{secret}'" in done.stderr
        assert "No module named 'configs'" in done.stderr
    finally:
        cluster.down(name, folder)
    assert secret.exists() and (folder / "shared" / "shipped").exists()
    assert _left(name) == []


@pytest.mark.parametrize("seconds", [0.7, 1.6, 3.0, 5.0])
def test_down_leaves_nothing_after_a_crash(seconds: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`up` killed after so many seconds, then `down` killed as well, then `down` without the state folder."""
    if (why := why_no_lab()) is not None:
        pytest.skip(why)
    name = f"c{os.getpid() % 10**6}x"
    folder = tmp_path_factory.mktemp("c")
    arguments = ["--name", name, "--folder", str(folder)]
    _killed_after(seconds, [str(RANKWISE), "lab", "up", *arguments])
    started = members.members(name)
    assert started or seconds < 5  # a busy machine has begun nothing before
    _killed_after(0.45, [str(RANKWISE), "lab", "down", *arguments])
    (folder / "lab.json").unlink(missing_ok=True)
    done = subprocess.run([str(RANKWISE), "lab", "down", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert _left(name) == []
    assert not [each for each in started if _lives(each.pid)]


def test_down_ends_what_slurm_had_suspended(tmp_path: Path) -> None:
    """A job's processes are frozen then: SIGKILL waits for their thaw, and `down` waited for it until it gave up."""
    if not FREEZER.is_dir():
        pytest.skip("this kernel has no freezer of the first version of cgroups")
    name = f"z{os.getpid() % 10**6}x"
    frozen = FREEZER / cgroup_of(name) / "n1" / "job_7"
    frozen.mkdir(parents=True)
    environment = os.environ | members.marks(name, tmp_path, "n1")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], env=environment) as process:
        try:
            (frozen / "cgroup.procs").write_text(str(process.pid))
            (frozen / "freezer.state").write_text("FROZEN")
            wait_until(lambda: (frozen / "freezer.state").read_text() == "FROZEN\n", what="the suspension")
            assert [each.pid for each in members.members(name)] == [process.pid]
            cluster.down(name, tmp_path)
            assert process.wait(timeout=600) == -signal.SIGKILL
            assert _left(name) == []
        finally:
            if frozen.exists():
                (frozen / "freezer.state").write_text("THAWED")
            process.kill()


def _left(name: str) -> list[str]:
    """What of a lab is still there."""
    found = [str(each.pid) for each in members.members(name)] + [str(space) for space in members.namespaces(name)]
    found += network.devices_of(name) + [str(top) for top in CONTROLLERS if (top / cgroup_of(name)).exists()]
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if cgroup_of(name) in line]


def _lives(pid: int) -> bool:
    """Init may take its time to reap what was killed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _killed_after(seconds: float, argv: list[str]) -> None:
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


def _programs(lab: Lab) -> list[str]:
    """Names of what runs on the nodes, Slurm's own helpers of a job left out."""
    found = []
    for pid in members.inhabitants(lab.plan.name):
        try:
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return [each for each in found if each not in ("slurmstepd", "srun", "slurm_script", "sh")]


def _reaches(lab: Lab, first: str, second: str) -> bool:
    address = lab.plan.address(second)
    tried = f"import socket; socket.create_connection(('{address}', 6818), 1.5)"
    return lab.on_node(first, sys.executable, "-c", tried).returncode == 0
