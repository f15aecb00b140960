"""The machine's lock: one holder at a time, whoever it is and however it ends, and a waiting run says who has it."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.common.system import lock_files
from configs.common.system.lock_files import lock_folder, lock_holder
from slurm.launcher.machine_lock import launch_lock, machine_holder
from tests.support.cluster.launches import wait_until
from tests.support.patience import patient

HOLD = """
import os, sys, time
from slurm.launcher.machine_lock import launch_lock
with launch_lock(give_up=lambda: False) as mine:
    print("held", os.getpid(), flush=True)
    sys.stdin.read(1)
"""
NOBODY = 65534

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "locks"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)  # another user passes through
    monkeypatch.setenv("RANKWISE_LOCKS", str(folder))
    return folder


@pytest.fixture
def start(locks: Path) -> Iterator[Start]:
    begun = []

    def starter(*before: str, job: str | None = None) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-c", HOLD, *([job] if job else [])]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"))
        return begun[-1]

    yield starter
    for process in begun:
        process.kill()
        process.communicate()


def test_users_whose_temporary_folders_differ_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /run/lock is root's alone, as on RHEL, each measured beside the other with a TMPDIR of its own."""
    monkeypatch.delenv("RANKWISE_LOCKS", raising=False)
    monkeypatch.setattr(lock_files.tempfile, "gettempdir", lambda: str(tmp_path))
    refused = {"/run/lock"}
    monkeypatch.setattr(lock_files.os, "access", lambda path, _: str(path) not in refused)
    assert lock_folder() == Path("/tmp")
    refused.add("/tmp")
    assert lock_folder() == tmp_path
    refused.add(str(tmp_path))
    with pytest.raises(OSError, match=f"machine lock: /run/lock and /tmp and {tmp_path} not writable"):
        lock_folder()


@pytest.mark.parametrize(("mounted", "expected"), [(False, "/tmp"), (True, "/run/lock")])
def test_root_shares_the_lock_with_users(mounted: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /run/lock is root's alone, as on RHEL, it had a lock there that no user saw. A container's is mounted."""
    stat, is_mount = Path.stat, Path.is_mount

    def stat_of_rhel(path: Path, **named: Any) -> os.stat_result:
        found = list(stat(path, **named))
        return os.stat_result([0o40755, *found[1:]]) if str(path) == "/run/lock" else os.stat_result(found)

    monkeypatch.delenv("RANKWISE_LOCKS", raising=False)
    monkeypatch.setattr(lock_files.os, "access", lambda path, _: True)
    monkeypatch.setattr(Path, "stat", stat_of_rhel)
    monkeypatch.setattr(Path, "is_mount", lambda path: mounted if str(path) == "/run/lock" else is_mount(path))
    assert lock_folder() == Path(expected)


def test_the_lock_is_one_for_all_working_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative RANKWISE_LOCKS made one for each: their runs measured side by side."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RANKWISE_LOCKS", "~")
    assert lock_folder() == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("RANKWISE_LOCKS", "locks")
    with pytest.raises(OSError, match="RANKWISE_LOCKS: got locks, expected an absolute path"):
        lock_folder()


def pid_of_holder(process: subprocess.Popen[str]) -> int:
    """Wait until it holds the lock."""
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "held"
    return int(pid)


def is_free() -> bool:
    """Whether the lock can be had at once."""
    with launch_lock(give_up=lambda: True) as mine:
        return mine


def test_one_holder_at_a_time_and_the_waiting_one_gives_up(start: Start) -> None:
    holder = start()
    pid_of_holder(holder)
    asked = []
    with launch_lock(give_up=lambda: bool(asked) or bool(asked.append(1))) as mine:
        assert not mine
    holder.communicate("x")
    assert is_free()


def test_a_killed_holder_leaves_nothing_behind(start: Start) -> None:
    os.kill(pid_of_holder(start()), signal.SIGKILL)
    wait_until(is_free, "the lock to be free")
    assert machine_holder() == "a process that cannot be seen from here"


def test_the_holder_is_described_by_pid_user_and_study(start: Start) -> None:
    pid = pid_of_holder(start(job="/data/runs/llama-sweep/jobs/0001-timed-1a2b/job.json"))
    user = pwd.getpwuid(os.getuid()).pw_name
    assert lock_holder("turn") == machine_holder() == f"pid {pid} of user {user}, study llama-sweep"
    assert lock_holder("queue") is None


def test_a_lock_of_another_file_system_whose_inode_is_the_same_is_another(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tmpfs numbers its inodes from 1."""
    pid, kernels = pid_of_holder(start()), Path("/proc/locks").read_text()
    inode = (Path(os.environ["RANKWISE_LOCKS"]) / "rankwise-turn.lock").stat().st_ino
    other = f"1: FLOCK  ADVISORY  WRITE 1 fe:fd:{inode} 0 EOF\n"
    monkeypatch.setattr(lock_files, "_LOCKS", tmp_path / "seen")
    (tmp_path / "seen").write_text(other + kernels)
    assert machine_holder().startswith(f"pid {pid} ")
    (tmp_path / "seen").write_text(other)
    assert lock_holder("turn") is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_holder_of_another_user_excludes_too(locks: Path) -> None:
    assert is_free()  # and all is imported that this takes
    told, tell = os.pipe()
    pid = os.fork()  # another user may not be able to start this interpreter, or to read its modules
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with launch_lock(give_up=lambda: False):
                os.write(tell, b"held")
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(tell)
        assert os.read(told, 4) == b"held"
        assert not is_free()
        assert machine_holder().startswith(f"pid {pid} of user {pwd.getpwuid(NOBODY).pw_name}")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
    assert is_free(), "the file is the other user's, the lock can be had"


def test_the_lock_of_a_user_whose_files_are_private_can_be_had_by_all(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        assert is_free()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in locks.iterdir()] == [0o644, 0o644]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_holder_in_another_network_namespace_excludes_too(start: Start) -> None:
    pid = pid_of_holder(start("unshare", "--net"))
    assert not is_free() and f"pid {pid} " in machine_holder()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_holder_in_another_pid_namespace_excludes_too(start: Start) -> None:
    pid_of_holder(start("unshare", "--pid", "--fork", "--mount-proc"))
    assert not is_free() and machine_holder()


def test_whoever_waits_longest_is_next(start: Start) -> None:
    """The one that has just given the machine back stands behind the one that waits."""
    first = start()
    pid_of_holder(first)
    second = start()
    wait_until(lambda: (found := lock_holder("queue")) is not None and f"pid {second.pid} " in found, "the queue")
    first.communicate("x")
    began = time.monotonic()
    third = start()
    assert pid_of_holder(second) == second.pid
    wait_until(lambda: (found := lock_holder("queue")) is not None and f"pid {third.pid} " in found, "the queue")
    assert f"pid {second.pid} " in machine_holder() and time.monotonic() - began < patient(60)
    second.communicate("x")
    assert pid_of_holder(third) == third.pid
