"""The program on a host, started here as a login shell starts it there."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm.ssh import connection, node_program


@pytest.mark.parametrize("module", ["secrets", "types", "platform"])
def test_files_of_the_home_folder_are_not_imported(module: str, tmp_path: Path) -> None:
    """Login shells begin there, and many have a secrets.py: the host was told to lack Python."""
    (tmp_path / f"{module}.py").write_text("raise ImportError('of the user')\n")
    asked = {"id": 1, "op": "sizes", "body_bytes": 0, "paths": [str(tmp_path)]}
    done = subprocess.run(
        ["sh", "-c", connection._START, "sh", sys.executable, connection._BOOT], cwd=tmp_path, capture_output=True,
        text=True, input=f"{connection.program_line().decode()}{json.dumps(asked)}\n", timeout=600,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == {"id": 1, "body_bytes": 0, "sizes": [0]}, done.stderr


def test_an_installation_whose_connection_breaks_leaves_nothing(tmp_path: Path) -> None:
    """Each attempt left its environment on the host; here pip waits for a list of packages that nobody writes."""
    os.mkfifo(tmp_path / "packages")
    asked = {
        "id": 1, "op": "install", "body_bytes": 0, "folder": str(tmp_path / "libraries" / "0123abcd"), "limit": 600,
        "constraints": os.devnull, "requirements": ["-r", str(tmp_path / "packages")],
    }  # fmt: skip
    (tmp_path / "libraries").mkdir()
    command = ["sh", "-c", connection._START, "sh", sys.executable, connection._BOOT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as program:
        assert program.stdin is not None
        program.stdin.write(connection.program_line() + json.dumps(asked).encode() + b"\n")
        program.stdin.flush()
        deadline = time.monotonic() + 300
        while not list((tmp_path / "libraries").glob(".0123abcd.*/bin/python")) and time.monotonic() < deadline:
            time.sleep(0.05)
        [half] = (tmp_path / "libraries").iterdir()
        program.stdin.close()
        assert program.wait(300) == 0
    assert not half.exists() and list((tmp_path / "libraries").iterdir()) == []


def test_a_folder_that_is_named_keeps_no_other_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are listed meanwhile, which takes long on a slow disk."""
    asked, answered = threading.Event(), threading.Event()

    def rename() -> None:
        asked.wait(10)

    def sizes() -> None:
        asked.set()

    class Answers(io.BytesIO):
        def flush(self) -> None:
            if self.getvalue().count(b"\n") == 2:
                answered.set()

    monkeypatch.setattr(node_program, "rename", rename)
    monkeypatch.setattr(node_program, "sizes", sizes)
    requests = [{"id": number, "op": name, "body_bytes": 0} for number, name in enumerate(("rename", "sizes"))]
    answers = Answers()
    node_program.serve(io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in requests)), answers)
    assert answered.wait(60)
    assert [json.loads(line)["id"] for line in answers.getvalue().splitlines()] == [1, 0]


def test_a_file_system_that_fails_for_a_while_ends_no_job(tmp_path: Path) -> None:
    """A stale handle of NFS: the job was called lost, and measured again beside itself. Here a link to itself fails."""
    folder = tmp_path / "job"
    folder.mkdir()

    def standing() -> tuple[bool, bool, bool]:
        told = node_program.look([{"folder": str(folder), "rank": 0, "known": {}}])["jobs"][0]
        return told["there"], told["started"], told["alive"]

    assert standing() == (True, False, False)
    (folder / ".started_0").write_text(f"{os.getpid()} {node_program._start_ticks(os.getpid())}\n")
    assert standing() == (True, True, True)
    folder.rename(tmp_path / "aside")
    folder.symlink_to(folder)
    assert standing() == (True, True, True)
    folder.unlink()
    assert standing() == (False, False, False)
    (tmp_path / "aside").rename(folder)
    (folder / ".started_0").unlink()
    (folder / ".started_0").symlink_to(".started_0")
    assert standing() == (True, True, True)
    (folder / ".started_0").unlink()
    (folder / ".started_0").touch()
    assert standing() == (True, True, False), "it was to be started, and was not"
    (folder / ".started_0").write_text("4194305 1\n")
    assert standing() == (True, True, False)


def test_a_divided_gpu_counts_as_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks were refused: `3 GPUs needed, its driver shows 1`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'END'\n"
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-1e11ac4a-4e3c-5e1f-8a39-9f3e6a4e6d3a)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-7a5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)\n"
        "END\nelse printf 'NVIDIA A100-SXM4-40GB, 570.86.15, 40000\\n%.0s' 0 1; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    name = "NVIDIA A100-SXM4-40GB"
    told = node_program._gpus()
    assert told["names"] == [f"{name} MIG 3g.20gb", f"{name} MIG 1g.5gb", name] and told["driver"] == "570.86.15"
    assert told["free_bytes"] == [20 * 10**9, 5 * 10**9, 40000 << 20]
