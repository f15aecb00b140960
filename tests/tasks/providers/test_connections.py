"""Nodes are reached by ssh: its arguments and its answers."""

import subprocess
from pathlib import Path

import pytest

from tasks.providers import connections
from tasks.providers.connections import ssh_argv


def test_an_answer_in_another_encoding_is_shown(tmp_path: Path) -> None:
    done = connections._run(["printf", r"caf\351"])
    assert done is not None and done.stdout == "caf�"


@pytest.mark.parametrize("name", ["my data", "100%", "50 %done", "a"])
def test_keys_are_found_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """OpenSSH splits an option at blanks and replaces what follows a %: no node of such a data folder was reached."""
    folder = tmp_path / name
    folder.mkdir()
    _, *argv = ssh_argv(folder, "ubuntu", "198.51.100.7")
    done = subprocess.run(["ssh", "-G", *argv], capture_output=True, text=True)
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert found["userknownhostsfile"] == f"{folder}/known_hosts"
    assert found["identityfile"].replace("%%", "%") == f"{folder}/id_ed25519"  # replaced when it is opened
