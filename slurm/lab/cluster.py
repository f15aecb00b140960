"""Start a lab, report its status, and stop it.

`up` starts only missing parts, so it also repairs a lab. `down` finds all parts by the lab's name and needs no file.
A kernel lock, which ends with its holder, ensures that only one of them works on a lab at a time.
"""

import fcntl
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import psutil

from configs.common.base import write_atomically
from configs.common.files.reading import read_bytes, read_text
from slurm.lab import daemons, files, members, network, nodes
from slurm.lab.commands import LabError, need_root, output_of, why_no_lab
from slurm.lab.plan import BASE_FOLDER, CONTROLLERS, FREEZER, LabPlan, LabRequest, cgroup_of, lab_file, read_lab_plan

_LOCKS = Path("/run/lock")
_LOCK_LIMIT_SECONDS = 180.0
_DOWN_LIMIT_SECONDS = 30.0
_NEEDED = tuple(
    Path(each) for each in ("/", "/bin", "/dev", "/etc", "/lib", "/mnt", "/proc", "/run", "/sbin", "/usr", "/var")
)
_KEPT = ("log", "shared")  # of a lab that was taken down
_REMOVED = ("db", "nodes", "run", "spool", "state", "etc")  # what else lies there is of no lab; the mark is in `etc`


def up(request: LabRequest) -> list[str]:
    """Start the missing parts of a lab and return their descriptions, empty if nothing was missing.

    Raises LabError if this machine cannot run a lab or a daemon does not start, ValueError if a lab of this name
    exists with other arguments.
    """
    if (why := why_no_lab()) is not None:
        raise LabError(why)
    with _alone(request.name):
        plan = _planned(request)
        done = ["configuration"] if _write_files(plan) else []
        done += ["bridge"] if network.ensure_bridge(plan) else []
        for node in plan.node_names:
            made = [nodes.ensure_node(plan, node), network.ensure_link(plan, node)]
            done += [node] if any(made) else []
        done += ["database"] if daemons.install_database(plan) else []
        return done + _start_daemons(plan)


def down(name: str, folder: Path) -> None:
    """Remove all processes, namespaces, devices, mounts and cgroups of a lab; keep its logs and shared folder.

    Works on partial labs and without the state folder. Raises LabError if something does not end.
    """
    need_root()
    with _alone(name):
        folder = members.folder_of(name) or folder
        plan = _readable_plan(folder)
        _kill_all(name)
        network.remove_devices(name)
        _remove_cgroups(name)
        # The plan is deleted last: once it is gone, nothing is left to take down.
        if plan is None or plan.name == name:
            for each in [folder / made for made in _REMOVED] if _is_of_a_lab(folder) else []:
                if each.is_dir():
                    shutil.rmtree(each)
            lab_file(folder).unlink(missing_ok=True)


def find_lab(name: str, folder: Path | None = None) -> LabPlan:
    """Return the running lab of this name, or the one in this folder. Raises ValueError if there is none."""
    # Only root can see the environment of these processes.
    plan = read_lab_plan(folder or members.folder_of(name) or BASE_FOLDER / name)
    if plan is None or plan.name != name:
        raise ValueError(f"lab {name}: not up. Start it with `rankwise lab up`")
    return plan


@dataclass(frozen=True)
class LabStatus:
    """One line of `lab status`."""

    what: str
    state: str
    works: bool
    detail: str = ""


def status(plan: LabPlan) -> list[LabStatus]:
    """Return the state of all daemons and nodes."""
    found = []
    for daemon in daemons.daemons(plan):
        pid = daemons.pid(plan, daemon)
        if daemon.node is None:
            works = pid is not None and daemon.works()
            state = "up" if works else "not responding" if pid is not None else "not running"
            found.append(LabStatus(daemon.name, state, works, f"pid {pid}" if pid else str(daemon.log)))
            continue
        state = daemons.node_state(plan, daemon.node)
        link = network.link_state(plan, daemon.node)
        cores = ",".join(str(core) for core in plan.cores(daemon.node))
        detail = f"{plan.address(daemon.node)}, core {cores}, link {link}, slurmd " + (
            f"pid {pid}" if pid else "not running"
        )
        works = pid is not None and daemon.works() and link not in ("cut", "missing")
        found.append(LabStatus(daemon.node, state, works, detail))
    return found


def queued_jobs(plan: LabPlan) -> int | None:
    """Return the number of jobs in the queue; None if the scheduler does not respond."""
    told = output_of(["squeue", "--noheader", "--array", "--format=%i"], daemons.client(plan))
    return None if told is None else len(told.split())


def default_hidden() -> tuple[Path, ...]:
    """Return folders that a node of a real cluster would not see: this project, run folders, the home folder, /tmp."""
    project = Path(__file__).resolve().parents[2]
    wanted = [project, Path.cwd(), Path.home(), Path("/tmp"), Path("/var/tmp")]
    return tuple(
        sorted({each for each in wanted if each.is_dir() and each not in _NEEDED and "site-packages" not in each.parts})
    )


def _planned(request: LabRequest) -> LabPlan:
    """Return the saved plan, or create and save a new one."""
    other = members.folder_of(request.name)
    if other is not None and other != request.folder:
        raise ValueError(
            f"lab {request.name}: already up in {other}. Stop it first: rankwise lab down --name {request.name}"
        )
    plan = read_lab_plan(request.folder)
    if plan is not None and plan.request == request:
        return plan
    if plan is not None:
        fields = [name for name in LabRequest.model_fields if getattr(plan, name) != getattr(request, name)]
        differences = ", ".join(
            f"{name} is {_words(getattr(plan, name))}, asked for {_words(getattr(request, name))}" for name in fields
        )
        undo = f"rankwise lab down --name {plan.name} --folder {quote(str(plan.folder))}"
        raise ValueError(f"lab {plan.name}: already up with other arguments ({differences}). Stop it first: {undo}")
    for each in request.hidden:
        if not each.is_dir() or each in _NEEDED:
            raise ValueError(
                f"--hide: {each} {'is required by the nodes' if each in _NEEDED else 'does not exist'}. Leave it out"
            )
    now_seconds = time.time()
    request.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    about = request.folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        # Daemons run scripts from there as root.
        raise ValueError(f"--folder: {request.folder} belongs to or is writable by other users. Use another folder")
    if not _is_of_a_lab(request.folder) and (others := [each for each in _REMOVED if (request.folder / each).exists()]):
        # `down` would delete them.
        raise ValueError(f"--folder: {request.folder} has {others[0]}, which is of no lab. Use another folder")
    plan = LabPlan(
        **dict(request),
        subnet=network.free_subnet(request.name),
        host=socket.gethostname().partition(".")[0],
        machine_cores=tuple(sorted(os.sched_getaffinity(0))),
        machine_memory_bytes=psutil.virtual_memory().total,
        # Slurm's largest id is 0x03FF0000; ten seconds each, so that ids do not come again for 15 years.
        first_job_id=1 + int(now_seconds / 10) % 50_000_000,
        cgroups=all((top / "tasks").exists() and os.access(top, os.W_OK) for top in CONTROLLERS),
    )
    write_atomically(lab_file(request.folder), plan.model_dump_json(indent=1))
    return plan


def _words(value: object) -> str:
    return " ".join(str(each) for each in value) or "none" if isinstance(value, tuple) else str(value)


def _write_files(plan: LabPlan) -> bool:
    """Write missing or differing files. Returns whether anything was written."""
    folder = plan.folder
    for each in (*_KEPT, *_REMOVED):
        (folder / each).mkdir(exist_ok=True)
    (folder / "db").chmod(0o700)
    (folder / "shared").chmod(0o1777)  # jobs of any user write here
    wanted: dict[Path, tuple[str | bytes, int]] = {
        folder / "etc" / "slurm.conf": (files.slurm_conf(plan), 0o644),
        folder / "etc" / "slurmdbd.conf": (files.slurmdbd_conf(plan), 0o600),
        folder / "etc" / "cgroup.conf": (files.cgroup_conf(plan), 0o644),
        folder / "etc" / "prolog.sh": (files.prolog(plan), 0o755),
        folder / "etc" / "epilog.sh": (files.epilog(plan), 0o755),
    }
    key = folder / "etc" / "munge.key"
    if not key.exists():
        wanted[key] = (secrets.token_bytes(1024), 0o400)
    for node in plan.node_names:
        own = folder / "nodes" / node
        own.mkdir(parents=True, exist_ok=True)
        wanted |= {
            own / "hosts": (files.hosts(plan), 0o644),
            own / "resolv.conf": ("", 0o644),
            own / "nsswitch.conf": (files.NSSWITCH, 0o644),
            own / "node.sh": (files.node_script(plan, node), 0o755),
        }
    written = False
    for path, (content, mode) in wanted.items():
        data = content.encode() if isinstance(content, str) else content
        # A file that is bound over one of a node's must keep its inode.
        if not path.exists() or read_bytes(path) != data:
            write_atomically(path, data, mode)  # a key must not be another's to read, not even for an instant
            written = True
        path.chmod(mode)
    return written


def _start_daemons(plan: LabPlan) -> list[str]:
    """Start daemons in order of dependency, the nodes concurrently. Returns the started ones."""
    wanted = daemons.daemons(plan)
    missing = [daemon for daemon in wanted if daemons.pid(plan, daemon) is None]
    for daemon in wanted:
        if daemon.node is None:
            daemons.start_daemon(plan, daemon)
            daemons.wait_until_it_works(plan, daemon)
    on_nodes = [daemon for daemon in wanted if daemon.node is not None]
    for daemon in on_nodes:
        daemons.start_daemon(plan, daemon)
    resumed = [f"{node} resumed" for node in plan.node_names if daemons.resume(plan, node)]
    for daemon in on_nodes:
        daemons.wait_until_it_works(plan, daemon)
    return [daemon.name for daemon in missing] + resumed


def _kill_all(name: str) -> None:
    """Kill all processes with the lab's mark or on a node until none is left."""
    deadline = time.monotonic() + _DOWN_LIMIT_SECONDS
    spaces: dict[str, str] = {}
    while True:
        # A namespace that was seen once is looked into until the end: who marked it may be gone already.
        spaces |= members.namespaces(name)
        left = {each.pid for each in members.members(name)} | set(members.in_namespaces(spaces))
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"lab {name}: processes {sorted(left)} do not end")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _thaw(name)
        time.sleep(0.05)


def _thaw(name: str) -> None:
    """Let go what Slurm suspended: a frozen process gets no signal before its thaw, not even SIGKILL (cgroups(7))."""
    for folder, _, _ in os.walk(FREEZER / cgroup_of(name)):
        # The cgroup may have gone meanwhile; what is still frozen is seen by the next look at the processes.
        with suppress(OSError):
            (Path(folder) / "freezer.state").write_text("THAWED")


def _remove_cgroups(name: str) -> None:
    """Empty cgroups are removed from below; the kernel needs a moment after the last process."""
    deadline = time.monotonic() + 5.0
    for top in [each / cgroup_of(name) for each in CONTROLLERS]:
        while top.is_dir():
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)
            if time.monotonic() > deadline:
                raise LabError(f"{top}: cannot be removed")
            time.sleep(0.02)


def _readable_plan(folder: Path) -> LabPlan | None:
    try:
        return read_lab_plan(folder)
    except ValueError:
        return None


def _is_of_a_lab(folder: Path) -> bool:
    """Return whether a folder was created by `up`; in no other folder is anything ever deleted."""
    if lab_file(folder).exists():
        return True
    with suppress(OSError, ValueError):
        return f"{folder}/run/" in read_text(folder / "etc" / "slurm.conf")
    return False


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold the lock of this lab. Raises LabError if another process holds it for minutes."""
    _LOCKS.mkdir(parents=True, exist_ok=True)
    with (_LOCKS / f"rankwise-lab-{name}.lock").open("a") as file:
        deadline = time.monotonic() + _LOCK_LIMIT_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(f"lab {name}: locked by another `rankwise lab` for minutes") from None
                time.sleep(0.1)
        yield
