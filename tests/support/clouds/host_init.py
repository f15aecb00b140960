"""Process 1 of a rented machine of the tests: applies user data as cloud-init does, then runs sshd until power-off.

A script is run as Google's agent does: sshd is up before it, with a host key of its own.

    python host_init.py FOLDER        # FOLDER holds user_data and faults.json; run in new namespaces

Only what our user data uses is understood: an unknown key of the cloud-config ends the machine with an error.
SIGTERM is power-off.

A machine that stands for an instance with GPUs has an `nvidia-smi` which lists as many by the name of a stand-in: there
is no other way to have a node without them taken for one. faults.json may say `gpus: 0`, as where the driver fails.
"""

import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_KNOWN = {"ssh_deletekeys", "ssh_keys", "ssh_authorized_keys", "ssh_pwauth", "write_files", "runcmd"}
_USER = "ubuntu"
_NVIDIA_SMI = """#!/bin/sh
# A stand-in of the tests: this machine has no GPU, and its ranks compute on its cores.
index=0
while [ $index -lt %d ]; do
    case "$*" in
    -L) echo "GPU $index: stand-in without a GPU (UUID: GPU-0000000$index)" ;;
    *name,driver_version,memory.free*) echo "stand-in without a GPU, 0, [N/A]" ;;
    *) echo "the stand-in for nvidia-smi does not know: $*" >&2; exit 2 ;;
    esac
    index=$((index + 1))
done
"""


def main(folder: Path) -> None:
    """Set up the machine's own folders, wait for the network, boot."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    faults = json.loads((folder / "faults.json").read_text())
    _make_own_folders(folder)
    _make_gpus(faults.get("gpus", 0))
    print("up", flush=True)
    sys.stdin.readline()
    time.sleep(faults.get("boot_seconds", 0))
    if faults.get("powers_off"):
        os._exit(0)
    text = (folder / "user_data").read_text()
    if faults.get("user_data_fails"):
        Path("/run/systemd/system").mkdir(parents=True)  # claims systemd, which is not there
    script = text.startswith("#!")
    if script:
        _new_host_key()
    commands = [["sh", str(folder / "user_data")]] if script else _apply(text)
    if faults.get("wrong_host_key"):
        _new_host_key()
        commands = []
    if not faults.get("unreachable"):
        time.sleep(faults.get("ssh_late_seconds", 0))
        config = "UsePAM no\nStrictModes no\nPasswordAuthentication no\nHostKey /etc/ssh/ssh_host_ed25519_key\n"
        config += "AuthorizedKeysFile /home/ubuntu/.ssh/authorized_keys\n"
        if variables := faults.get("environment"):
            config += f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
        Path("/etc/ssh/sshd_config").write_text(config)
        subprocess.Popen(["/usr/sbin/sshd", "-D", "-e"], stderr=(folder / "sshd.log").open("w"))
        while script and not Path("/run/sshd.pid").exists():
            time.sleep(0.02)
    with (folder / "user_data.log").open("w") as log:
        for command in commands:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def _new_host_key() -> None:
    """Make a host key that nobody planted."""
    path = Path("/etc/ssh/ssh_host_ed25519_key")
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _make_own_folders(folder: Path) -> None:
    """Hide the outer machine's folders that a boot writes to."""
    for path in ("/etc/ssh", "/var/lib", "/opt", "/home", "/run", "/etc/systemd", "/usr/local/sbin"):
        if Path(path).is_dir():
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    Path("/run/sshd").mkdir(mode=0o755)
    Path("/run/lock").mkdir()  # one launch at a time on each machine, not on all of them
    Path("/run/lock").chmod(0o1777)  # of all users, as on the images
    power_off = Path("/usr/local/sbin/shutdown")
    power_off.write_text("#!/bin/sh\nkill -TERM 1\n")
    power_off.chmod(0o755)
    users = "".join(f"{':'.join(map(str, entry))}\n" for entry in pwd.getpwall() if entry.pw_name != _USER)
    if "sshd:" not in users:
        users += "sshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n"
    # Of user id 0, because there is no sudo here; the images of the clouds have one.
    (folder / "passwd").write_text(users + f"{_USER}:*:0:0::/home/{_USER}:/bin/sh\n")
    subprocess.run(["mount", "--bind", str(folder / "passwd"), "/etc/passwd"], check=True)


def _make_gpus(count: int) -> None:
    """Let the machine say that it has GPUs; 0: there is no such program, as without a driver."""
    if count:
        program = Path("/usr/local/sbin/nvidia-smi")
        program.write_text(_NVIDIA_SMI % count)
        program.chmod(0o755)


def _authorize(keys: str) -> None:
    place = Path(f"/home/{_USER}/.ssh")
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / "authorized_keys").open("a") as file:
        file.write(keys.rstrip("\n") + "\n")


def _apply(text: str) -> list[list[str]]:
    """Plant keys and files; returns the commands that are left to run."""
    assert text.startswith("#cloud-config\n"), text[:40]
    config: dict[str, Any] = json.loads(text.partition("\n")[2])
    assert config.keys() <= _KNOWN, config.keys() - _KNOWN
    for name, suffix in (("ed25519_private", ""), ("ed25519_public", ".pub")):
        path = Path(f"/etc/ssh/ssh_host_ed25519_key{suffix}")
        path.write_text(config["ssh_keys"][name])
        path.chmod(0o600)
    for key in config["ssh_authorized_keys"]:
        _authorize(key)
    for file in config["write_files"]:
        path = Path(file["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["content"])
        path.chmod(int(file["permissions"], 8))
    return [command if isinstance(command, list) else shlex.split(command) for command in config["runcmd"]]


main(Path(sys.argv[1]))
