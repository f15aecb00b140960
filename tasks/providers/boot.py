"""What a rented node runs when it starts: its SSH host key, the key that may log in, and the dead man's switch.

    make_keys(folder)                             # id_ed25519, host_ed25519 in the run's folder
    user_data(folder, lives_seconds=3600)         # cloud-config
    startup_script(config, "ubuntu")              # the same as a script

The host key is made here and planted, so that the first connection is verified and not taken on trust. All nodes of a
run share it, because one create call gives all of them the same user data. No credential of a cloud is in it.

The switch counts seconds of uptime, because a node's clock may be wrong, and survives a reboot.
"""

import json
import shlex
import subprocess
from pathlib import Path

from configs.common.files.reading import read_text
from configs.common.printable import printable

STATE = "/var/lib/rankwise"
_PROGRAMS = "/opt/rankwise"
_DEADMAN = f"""#!/bin/sh
# Powers this machine off when its lease has run out. Counts uptime: the clock may be wrong.
file={STATE}/remaining_seconds
left=$(cat "$file")
last=$(cut -d. -f1 /proc/uptime)
while :; do
    sleep 2
    if [ -f "$file.extended" ]; then
        mv "$file.extended" "$file"
        left=$(cat "$file")
    fi
    now=$(cut -d. -f1 /proc/uptime)
    left=$((left - now + last))
    last=$now
    # On a full disk the count goes on in memory.
    {{ echo "$left" >"$file.new" && mv "$file.new" "$file"; }} 2>/dev/null
    [ "$left" -gt 0 ] || shutdown -h now || poweroff -f
done
"""
_UNIT = f"""[Unit]
Description=Power off when the lease has run out

[Service]
ExecStart=/bin/sh {_PROGRAMS}/deadman.sh
Restart=always

[Install]
WantedBy=multi-user.target
"""
_START = f"""#!/bin/sh
# Starts the dead man's switch, and says that the node is ready.
set -e
trap '[ $? -eq 0 ] || echo "start.sh failed" >{STATE}/failed' EXIT
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl enable --now rankwise-deadman.service
else
    setsid sh {_PROGRAMS}/deadman.sh </dev/null >/dev/null 2>&1 &
fi
echo ready >{STATE}/ready
"""
_CLOUD_CONFIG = "#cloud-config\n"
_SCRIPT_BEGIN = f"""#!/bin/sh
# At a second boot the lease must not begin anew; systemd starts the switch.
[ ! -e {STATE}/ready ] || exit 0
set -e
mkdir -p {STATE}
trap '[ $? -eq 0 ] || echo "startup script failed" >{STATE}/failed' EXIT"""
_SCRIPT_LOGIN = """id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
if [ "$(id -u "$user")" != 0 ]; then
    echo "$user ALL=(ALL) NOPASSWD:ALL" >/etc/sudoers.d/90-rankwise
    chmod 0440 /etc/sudoers.d/90-rankwise
fi
home=$(getent passwd "$user" | cut -d: -f6)
mkdir -p "$home/.ssh"
printf '%s\\n' "$authorized" >>"$home/.ssh/authorized_keys"
chown -R "$user:" "$home/.ssh"
chmod 0700 "$home/.ssh"
chmod 0600 "$home/.ssh/authorized_keys"
mkdir -p /etc/ssh/sshd_config.d
printf 'PasswordAuthentication no\\nHostKey /etc/ssh/ssh_host_ed25519_key\\n' >/etc/ssh/sshd_config.d/10-rankwise.conf
systemctl restart ssh 2>/dev/null || systemctl restart sshd 2>/dev/null || kill -HUP "$(cat /run/sshd.pid)"
"""


def make_keys(folder: Path) -> None:
    """Make the pair that logs in and the hosts' pair, unless they are there. Raises ValueError: ssh-keygen failed."""
    for name in ("id_ed25519", "host_ed25519"):
        path = folder / name
        if path.exists():
            continue
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"rankwise-{folder.name}", "-f", str(path)]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
            )
        except FileNotFoundError:
            raise ValueError("ssh-keygen: not found. Install the OpenSSH client: apt-get install openssh-client") from (
                None
            )
        except subprocess.CalledProcessError as error:  # such as for a user whom no file of a container names
            said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            raise ValueError(f"ssh-keygen: {printable(said, 200)}. Nothing was rented") from None


def remove_keys(folder: Path) -> None:
    """Delete both private keys of a run whose nodes are gone."""
    for name in ("id_ed25519", "host_ed25519"):
        (folder / name).unlink(missing_ok=True)


def user_data(folder: Path, lives_seconds: int) -> str:
    """Return the cloud-config of the nodes of a run."""
    host_key, host_public = read_text(folder / "host_ed25519"), read_text(folder / "host_ed25519.pub")
    public = read_text(folder / "id_ed25519.pub").strip()
    files = {
        f"{_PROGRAMS}/deadman.sh": _DEADMAN,
        f"{_PROGRAMS}/start.sh": _START,
        "/etc/systemd/system/rankwise-deadman.service": _UNIT,
        f"{STATE}/remaining_seconds": f"{lives_seconds}\n",
    }
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": host_key, "ed25519_public": host_public},
        "ssh_authorized_keys": [public],
        "ssh_pwauth": False,
        "write_files": [
            {"path": path, "content": content, "permissions": "0755" if path.endswith(".sh") else "0644"}
            for path, content in files.items()
        ],
        "runcmd": [["sh", f"{_PROGRAMS}/start.sh"]],
    }
    # JSON is YAML: https://yaml.org/spec/1.2.2/#12-yaml-history
    return _CLOUD_CONFIG + json.dumps(config, indent=1) + "\n"


def startup_script(config: str, user: str) -> str:
    """Return the same as a script for images without cloud-init. It runs at each boot and does its work once.

    The user is made where the image has none, and may use sudo without a password.
    """
    wanted = json.loads(config.removeprefix(_CLOUD_CONFIG))
    keys = {"": wanted["ssh_keys"]["ed25519_private"], ".pub": wanted["ssh_keys"]["ed25519_public"]}
    lines = [f"user={shlex.quote(user)}", f"authorized={shlex.quote(chr(10).join(wanted['ssh_authorized_keys']))}"]
    lines += ["rm -f /etc/ssh/ssh_host_*"]
    lines += [_file(f"/etc/ssh/ssh_host_ed25519_key{end}", text, "0600") for end, text in keys.items()]
    lines += [_file(file["path"], file["content"], file["permissions"]) for file in wanted["write_files"]]
    commands = [shlex.join(command) for command in wanted["runcmd"]]
    return "\n".join([_SCRIPT_BEGIN, *lines, _SCRIPT_LOGIN, *commands, ""])


def _file(path: str, content: str, permissions: str) -> str:
    """Return the lines that write a file."""
    folder, quoted = shlex.quote(str(Path(path).parent)), shlex.quote(path)
    text = shlex.quote(content)
    return f"mkdir -p {folder}\n(umask 077; printf %s {text} >{quoted})\nchmod {permissions} {quoted}"
