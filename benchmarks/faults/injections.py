"""What is done to a study on a lab: the faults of `benchmarks.faults.bench`. Each returns when its fault is over."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from benchmarks.faults.scenario import Scenario
from slurm.lab import daemons, members, network
from slurm.lab.plan import LabPlan

_CUT_SECONDS = 3.0
_AWAY_SECONDS = 5.0
_OTHERS = 4


def kill_rank(scene: Scenario) -> None:
    """SIGKILL to the rank on the second node."""
    progress = scene.progress(scene.victim())[1]
    assert progress is not None
    os.kill(progress.pid, signal.SIGKILL)


def kill_slurmd(scene: Scenario) -> None:
    """Kill the daemon of the second node; start it again when the job's end is known."""
    victim, lab = scene.victim(), scene.lab
    slurmd = daemons.slurmd(lab, lab.node_names[1])
    daemons.stop(lab, slurmd)
    try:
        scene.await_end_of(victim)
    finally:
        daemons.start_daemon(lab, slurmd)
        daemons.wait_until_it_works(lab, slurmd)


def kill_node(scene: Scenario) -> None:
    """Kill all that lives on the second node, as a loss of power does; it boots when the job's end is known."""
    victim, lab = scene.victim(), scene.lab
    node = lab.node_names[1]
    daemons.stop(lab, daemons.slurmd(lab, node))
    for pid in members.inhabitants(lab.name, node):
        os.kill(pid, signal.SIGKILL)
    try:
        scene.await_end_of(victim)
    finally:
        daemons.start_daemon(lab, daemons.slurmd(lab, node))
        daemons.wait_until_it_works(lab, daemons.slurmd(lab, node))


def kill_launcher(scene: Scenario) -> None:
    """SIGKILL to our launcher on the first node: nobody is left there who could say how the job ended."""
    paths = scene.victim()
    for pid in members.inhabitants(scene.lab.name, scene.lab.node_names[0]):
        command = psutil.Process(pid).cmdline()
        if "slurm.launch" in command and any(str(paths.folder.resolve()) in word for word in command):
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("no launcher was found on the first node")


def cut_link(scene: Scenario) -> None:
    """Pull the second node's plug, and put it in again when the job's end is known."""
    victim = scene.victim()
    with _cut(scene.lab):
        scene.await_end_of(victim)


def cut_link_shortly(scene: Scenario) -> None:
    """Pull it for so short a time that nobody needs to mind."""
    scene.victim()
    with _cut(scene.lab):
        time.sleep(_CUT_SECONDS)


@contextmanager
def _cut(lab: LabPlan) -> Iterator[None]:
    node = lab.node_names[1]
    network.cut_link(lab, node)
    try:
        yield
    finally:
        network.restore_link(lab, node)


def restart_slurmctld(scene: Scenario) -> None:
    """Kill the scheduler while jobs run, and start it again after some seconds."""
    scene.victim()
    _away(scene, "slurmctld")


def stop_slurmdbd(scene: Scenario) -> None:
    """No accounts are kept from the victim's measurement on until the study has ended."""
    scene.victim()
    database = daemons.find_daemon(scene.lab, "slurmdbd")
    daemons.stop(scene.lab, database)
    try:
        scene.await_flow()
    finally:
        daemons.start_daemon(scene.lab, database)
        daemons.wait_until_it_works(scene.lab, database)


def _away(scene: Scenario, program: str) -> None:
    daemon = daemons.find_daemon(scene.lab, program)
    daemons.stop(scene.lab, daemon)
    time.sleep(_AWAY_SECONDS)
    daemons.start_daemon(scene.lab, daemon)
    daemons.wait_until_it_works(scene.lab, daemon)


def scancel(scene: Scenario) -> None:
    """Somebody ends the job by hand."""
    scene.slurm("scancel", scene.job_id(scene.victim()))


def nothing(_: Scenario) -> None:
    """The victim brings the fault about by itself."""


def fill_disk(scene: Scenario) -> None:
    """Fill the run folder's disk until the study has ended; then make room and go on with it."""
    scene.victim()
    filler = scene.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for piece in (1 << 20, 4096, 1):
                _write_until_full(file.fileno(), piece)
        scene.await_flow()
    finally:
        filler.unlink()
    scene.start()


def _write_until_full(descriptor: int, piece: int) -> None:
    try:
        while True:
            os.write(descriptor, b"x" * piece)
    except OSError:
        return


def preempt(scene: Scenario) -> None:
    """A job of a partition with a higher priority needs the second node for some seconds."""
    scene.victim()
    node = scene.lab.node_names[1]
    asked = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--job-name=urgent"]
    scene.slurm("sbatch", *asked, "--wrap=sleep 3")


def kill_flow(scene: Scenario) -> None:
    """Kill the submitting process while its jobs run and wait, and go on with the study."""
    scene.victim()
    scene.kill_flow()
    scene.start()


def requeue(scene: Scenario) -> None:
    """An administrator puts the running job back into the queue, although it was submitted with --no-requeue."""
    job_id = scene.job_id(scene.victim())
    scene.slurm("scontrol", "update", f"jobid={job_id}", "requeue=1")
    scene.slurm("scontrol", "requeue", job_id)


def hold(scene: Scenario) -> None:
    """Hold the victim while it waits; release it when all others are measured."""
    _hold(scene)
    scene.await_true(lambda: len(list(scene.run.records.glob("*/*.json"))) >= _OTHERS, "the other cells", 120.0)
    scene.slurm("scontrol", "release", scene.job_id(scene.victims()[0]))


def hold_for_ever(scene: Scenario) -> None:
    """Hold it and never release it."""
    _hold(scene)


def _hold(scene: Scenario) -> None:
    """The nodes are another job's until the victim is held."""
    blocker = scene.slurm("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 200")
    try:
        scene.slurm("scontrol", "hold", scene.job_id(scene.submitted_victim()))
        scene.await_true(lambda: "JobHeldAdmin" in scene.printed(), "a line on the held job", 60.0)
    finally:
        scene.slurm("scancel", blocker.strip())


def lose_start(scene: Scenario) -> None:
    """SIGKILL to our launcher on the second node while its ranks start."""
    paths, node = scene.submitted_victim(), scene.lab.node_names[1]
    scene.await_true(lambda: all(paths.node_launcher(rank).exists() for rank in (0, 1)), "both launchers", 120.0)
    for pid in members.inhabitants(scene.lab.name, node):
        command = psutil.Process(pid).cmdline()
        if "slurm.launch" in command and any(str(paths.folder.resolve()) in word for word in command):
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("no launcher was found on the second node")
