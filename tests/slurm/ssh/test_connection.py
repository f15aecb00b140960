"""Whose host keys are trusted, by real connections to a server in this process. With OpenSSH: tests/slurm."""

import asyncio
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from slurm.ssh import connection
from slurm.ssh.connection import Address, HostRefused

ANYBODY = Address(
    host="127.0.0.1", name="gpu-a", port=None, user="bench", key=None, host_key=None, jump=None, known_hosts=None,
    folder=".rankwise", python="python3",
)  # fmt: skip


class NoLogin(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("config", "files", "accepted"),
    [
        ("", {}, False),
        ("", {".ssh/known_hosts": True}, True),
        ("", {"machine": True}, True),  # as clusters have them, where `ssh` asks no question
        ("", {".ssh/known_hosts": False, "machine": True}, True),
        ("", {".ssh/known_hosts": True, "machine": None}, True),  # with a line that asyncssh cannot read
        ("UserKnownHostsFile none", {}, False),  # any key was taken
        ("UserKnownHostsFile none", {".ssh/known_hosts": True}, False),
        ("UserKnownHostsFile none", {"machine": True}, True),
        ("UserKnownHostsFile ~/own ~/missing", {"own": True}, True),  # the second one was not found
        ("UserKnownHostsFile ~/own", {"own": False, ".ssh/known_hosts": True}, False),
        ("UserKnownHostsFile /dev/null", {".ssh/known_hosts": True}, False),
    ],
)
def test_host_keys_are_known_as_ssh_knows_them(
    config: str, files: dict[str, bool | None], accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """files: whether each has the host's key, another host's alone (False) or is damaged (None)."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(connection, "_KNOWN_HOSTS_OF_MACHINE", (str(tmp_path / "machine"), str(tmp_path / "no")))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host *\n  {config}\n" if config else "")

    async def connected() -> None:
        server = await asyncssh.listen("127.0.0.1", 0, server_host_keys=[key], server_factory=NoLogin)
        port = server.get_port()
        public = key.export_public_key().decode().strip()
        lines = {True: f"[127.0.0.1]:{port} {public}\n", False: f"elsewhere {public}\n", None: "@@ damaged\n"}
        for name, known in files.items():
            (tmp_path / name).write_text(lines[known])
        try:
            (await connection._connection(replace(ANYBODY, port=port))).abort()
        finally:
            server.close()
            await server.wait_closed()

    if accepted:
        asyncio.run(connected())
    else:
        with pytest.raises(HostRefused, match="gpu-a: host key not accepted"):
            asyncio.run(connected())
