"""Lock files of this machine: kernel locks (flock(2)) that all users share, and who holds one.

A lock ends with the process that took it; nothing can leave one behind. Imports the standard library only.
"""

import errno
import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from configs.common.system.proc import command_line

_LOCKS = Path("/proc/locks")
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Lustre that is mounted without `flock`; NFS whose server's lock daemon does not run."""


class NoLocks(ValueError):
    """A file system has no locks."""


@contextmanager
def locks_needed(place: Path, remedy: str) -> Iterator[None]:
    """Raise NoLocks naming a place, where its file system has no locks for the block's flock(2).

    remedy: how another folder is chosen, such as `use a folder of another one with --runs`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise NoLocks(
            f"{place}: this file system has no locks ({error.strerror}). Have it mounted with them (Lustre: the "
            f"option flock), or {remedy}"
        ) from error


@contextmanager
def turn_to_change(path: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a file, by a lock file beside it.

    Where there are no locks, or none can be made there, all go on at once.
    """
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(path.with_suffix(".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lock_folder() -> Path:
    """Return the folder of this machine's locks. Raises OSError where there is no place for them.

    RANKWISE_LOCKS names it; a machine that is split for good (by cpusets, say) has one for each part.
    """
    if named := os.environ.get("RANKWISE_LOCKS"):
        folders = [Path(os.path.expanduser(named))]
        if not folders[0].is_absolute():
            raise OSError(f"RANKWISE_LOCKS: got {named}, expected an absolute path: locks are shared by all folders")
    else:
        # TMPDIR comes last: each user may have another, and locks there would keep nobody off.
        folders = list(dict.fromkeys([Path("/run/lock"), Path("/tmp"), Path(tempfile.gettempdir())]))
    usable = [folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)]
    if not usable:
        raise OSError(
            f"machine lock: {' and '.join(map(str, folders))} not writable. Set RANKWISE_LOCKS to a writable folder"
        )
    return next(filter(_is_shared, usable), usable[0])


def _is_shared(folder: Path) -> bool:
    """Whether locks in a folder keep everybody off: all may write in it, or it was mounted for that in a container.

    Where /run/lock is root's alone, root would have a lock there that other users never see.
    """
    return bool(folder.stat().st_mode & stat.S_IWOTH) or folder.is_mount()


def open_lock_file(name: str) -> int:
    """Open `rankwise-<name>.lock` for reading, which is enough for a lock: the file may be another user's."""
    path = lock_folder() / f"rankwise-{name}.lock"
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o644)
    with suppress(PermissionError):  # another user was faster
        os.fchmod(descriptor, 0o644)  # whatever the umask is: all users open it
    return descriptor


def lock_holder(name: str) -> str | None:
    """Describe who holds a lock: pid, user and, of a launch, the study. None: nobody, or nobody in sight.

    /proc/locks (proc(5)) leaves out processes of other pid namespaces.
    """
    try:
        device, inode = _place(lock_folder() / f"rankwise-{name}.lock")
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK ADVISORY WRITE <pid> <major:minor:inode> <start> <end>
        fields = line.split()
        if fields[1] == "FLOCK":
            on, _, number = fields[5].rpartition(":")
            if number == inode and device in (on, None):
                return _described(int(fields[4]))
    return None


def _place(path: Path) -> tuple[str | None, str]:
    """A file's device and inode as /proc/locks writes them; None: no mount of this process tells the device.

    It is the file system's, which stat(2) does not give of all (btrfs). Those in memory number their inodes alike.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        inode = str(os.fstat(descriptor).st_ino)
        told = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    finally:
        os.close(descriptor)
    mount = next((line.split()[1] for line in told if line.startswith("mnt_id:")), None)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, _, minor = device.partition(":")
            return f"{int(major):02x}:{int(minor):02x}", inode
    return None, inode


def _described(pid: int) -> str | None:
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        arguments = [os.fsdecode(argument) for argument in command_line(pid).split(b"\0")]
    except OSError:  # it has just ended
        return None
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    # A launch's argument is <runs>/<study>/jobs/<job>/job.json.
    jobs = [Path(argument) for argument in arguments if argument.endswith("/job.json")]
    study = f", study {jobs[0].parents[2].name}" if jobs and len(jobs[0].parents) > 2 else ""
    return f"pid {pid} of user {name}{study}"
