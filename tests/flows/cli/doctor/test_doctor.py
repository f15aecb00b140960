"""`rankwise doctor` against this machine, real sockets and small programs put in front of PATH."""

import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.doctor import checks, command
from flows.cli.doctor.checks import DoctorCheck
from flows.cli.doctor.command import _answers, doctor, print_checks
from flows.cli.main import app
from tests.support.patience import patient

SECRETS = {
    "HF_TOKEN": "hf_SECRETVALUE1",
    "AWS_ACCESS_KEY_ID": "AKIASECRETVALUE2",
    "AWS_SECRET_ACCESS_KEY": "SECRETVALUE3",
    "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/SECRETVALUE4.json",
    "AZURE_CLIENT_ID": "SECRETVALUE5",
    "AZURE_CLIENT_SECRET": "SECRETVALUE6",
    "PREFECT_API_URL": "http://user:SECRETVALUE7@127.0.0.1:9/api",
}
RUN = """
import sys
from flows.cli.doctor.command import doctor
code = doctor(sys.argv[1] if len(sys.argv) > 1 else None, True)
print(sorted({"torch", "prefect"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def port() -> int:
    """A port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _only(found: list[DoctorCheck], name: str) -> DoctorCheck:
    (check,) = [check for check in found if check.name == name]
    return check


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_whole_diagnosis(tmp_path: Path, port: int) -> None:
    environment = {**os.environ, **SECRETS, "HOME": str(tmp_path), "RANKWISE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, f"127.0.0.1:{port}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert all(set(check) == {"name", "state", "detail", "remedy"} for check in found)
    assert {check["state"] for check in found} <= {"ok", "warning", "missing", "absent"}
    assert all(check["remedy"] for check in found if check["state"] == "missing")
    assert all(check["remedy"].startswith("not needed") for check in found if check["state"] == "absent")
    names = [check["name"] for check in found]
    assert len(names) == len(set(names))
    assert {"python", "package torch", "package prefect", "packages", "cores", "memory", "run folder"} < set(names)
    assert {
        "cache folder",
        "shared memory",
        "gpu nvidia",
        "gpu amd",
        "gpu intel",
        "torch",
        "slurm sinfo",
        "slurm squeue",
        "slurm sacct",
    } < set(names)
    assert {"C++ compiler", "git", "credentials hub", "prefect api", "master"} < set(names)
    states = {check["name"]: check["state"] for check in found}
    assert states["credentials hub"] == "ok" and states["credentials aws"] == "ok"
    assert states["credentials google"] == "warning" and states["credentials azure"] == "warning"
    assert states["prefect api"] == "missing" and states["master"] == "missing"
    assert done.returncode == 1
    assert "SECRETVALUE" not in done.stdout + done.stderr
    assert done.stderr.strip() == "[]"
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_exit_code_follows_what_every_study_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, code in (
        ([DoctorCheck("gpu", "missing", "none"), DoctorCheck("slurm sinfo", "missing", "none")], 0),
        ([DoctorCheck("torch", "warning", "slow"), DoctorCheck("python", "ok", "3")], 0),
        ([DoctorCheck("package torch", "missing", "none")], 1),
        ([DoctorCheck("run folder", "missing", "read-only")], 1),
        ([DoctorCheck("master", "missing", "refused")], 1),
    ):
        monkeypatch.setattr("flows.cli.doctor.command.diagnose", lambda master, found=found: found)
        assert doctor(None, True) == code


def test_json_says_absent_as_the_text_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        DoctorCheck("rocm", "missing", "no driver", "not needed"),
        DoctorCheck("nsys", "missing", "none", "install"),
    ]
    monkeypatch.setattr("flows.cli.doctor.command.diagnose", lambda master: found)
    assert doctor(None, True) == 0
    assert [check["state"] for check in json.loads(capsys.readouterr().out)] == ["absent", "missing"]


def test_a_calibration_that_cannot_lock_the_machine_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback."""
    monkeypatch.setenv("RANKWISE_LOCKS", "/dev/null")
    done = CliRunner().invoke(app, ["doctor", "--calibrate"])
    assert (done.exit_code, done.stderr) == (
        1, "machine lock: /dev/null not writable. Set RANKWISE_LOCKS to a writable folder\n"
    )  # fmt: skip


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks(
        [DoctorCheck("gpu topology", "ok", "a\nb"), DoctorCheck("master", "missing", "[::1]:5 [red]x[/red]", "open it")]
    )
    assert capsys.readouterr().out.splitlines() == [
        "ok      gpu topology: a",
        "    b",
        "missing master: [::1]:5 [red]x[/red]",
        "        remedy: open it",
    ]


def table_on_a_terminal(check: str, columns: int) -> str:
    code = f"from flows.cli.doctor.command import DoctorCheck, print_checks\nprint_checks([DoctorCheck({check})])"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True, timeout=600)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    return shown


def test_table_on_a_terminal() -> None:
    shown = table_on_a_terminal("'master', 'missing', '[::1]:5 [red]x[/red]', 'open it'", 100)
    assert "┃" in shown and "[::1]:5 [red]x[/red]" in shown and "open it" in shown


def test_a_narrow_terminal_cuts_no_command() -> None:
    shown = table_on_a_terminal("'socket buffers', 'warning', 'small', 'sysctl -w net.core.rmem_max=134217728'", 50)
    remedy = "".join(line.split("│")[-2].strip() for line in shown.splitlines() if line.count("│") == 5)
    assert remedy.replace(" ", "") == "sysctl-wnet.core.rmem_max=134217728", shown


def test_a_check_that_hangs_or_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_runnable", lambda: 0)
    ended = threading.Event()

    def fail() -> list[DoctorCheck]:
        raise RuntimeError("broken")

    def hang() -> list[DoctorCheck]:
        ended.wait(300)
        waited_for.append("slow")
        return []

    waited_for: list[str] = []
    found = _answers({"slow": hang, "bad": fail, "good": lambda: [DoctorCheck("good", "ok", "yes")]}, 2.0)
    assert not waited_for
    ended.set()
    assert [(check.name, check.state) for check in found] == [("slow", "missing"), ("bad", "warning"), ("good", "ok")]
    assert "no response within 2 s" in found[0].detail and "RuntimeError: broken" in found[1].detail


def test_a_check_that_a_busy_machine_delays_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy processes the imports were not checked within 30 s, and a network mount was blamed."""
    monkeypatch.setattr(command, "_runnable", lambda: 9999)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)
    ended = threading.Event()
    (check,) = _answers({"imports": lambda: [DoctorCheck("imports", "ok", str(ended.wait(300)))]}, 0.1)
    ended.set()
    assert (
        check.state == "warning" and check.remedy is not None and "9999 processes want 1 core: run it" in check.remedy
    )


# The master


def test_master_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (check,) = checks.check_master(f"localhost:{port}")
    assert check.state == "ok" and "accepts connections" in check.detail and "from 127.0.0.1" in check.detail


def test_master_that_refuses(port: int) -> None:
    (check,) = checks.check_master(f"127.0.0.1:{port}")
    assert check.state == "missing" and "refused" in check.detail
    assert check.remedy is not None and "start the master" in check.remedy


def test_master_that_nobody_knows() -> None:
    # `.invalid` is reserved for this: RFC 2606.
    (check,) = checks.check_master("nothing.invalid:29500")
    assert check.state == "missing" and "unknown host name" in check.detail
    assert check.remedy is not None and "/etc/hosts" in check.remedy


def test_master_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CONNECT_SECONDS", 0.3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        # A full queue: Linux then leaves further connections unanswered, like a firewall that drops.
        filling = [socket.socket() for _ in range(3)]
        for one in filling:
            one.setblocking(False)
            one.connect_ex(address)
        (check,) = checks.check_master(f"127.0.0.1:{address[1]}")
        for one in filling:
            one.close()
    assert check.state == "missing" and "no response within 0.3 s" in check.detail
    assert check.remedy is not None and "firewall" in check.remedy


def test_master_without_a_route() -> None:
    # The kernel refuses a broadcast address to TCP before anything is sent.
    (check,) = checks.check_master("255.255.255.255:29500")
    assert check.state == "missing" and "no route" in check.detail and check.remedy is not None


@pytest.mark.parametrize("written", ["host", "host:", ":1", "host:x", "host:0", "host:70000", "", "host:²"])
def test_master_that_is_no_address(written: str) -> None:
    (check,) = checks.check_master(written)
    assert check.state == "missing" and check.remedy == "write it as HOST:PORT"


# Programs


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    _program(tmp_path / "bin", "sinfo", "echo debug*; echo long")
    (check,) = checks.check_slurm_tool("sinfo", ("--noheader",))
    assert check == DoctorCheck("slurm sinfo", "ok", "responds (2 lines)")
    _program(tmp_path / "bin", "sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    (check,) = checks.check_slurm_tool("sacct", ())
    assert check.state == "warning" and "Connection refused" in check.detail
    assert check.remedy is not None and "slurmdbd" in check.remedy
    (check,) = checks.check_slurm_tool("squeue-that-is-not-there", ())
    assert check.state == "missing"


def test_command_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_COMMAND_SECONDS", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    _program(tmp_path / "bin", "squeue", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    (check,) = checks.check_slurm_tool("squeue", ())
    assert check.state == "warning" and check.detail == "no response within 0.5 s"
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + patient(5)
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin", "g++", "echo 'g++ 99.1'; echo 'Copyright'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    found = checks.check_tools()
    assert _only(found, "C++ compiler") == DoctorCheck("C++ compiler", "ok", "g++ 99.1")
    assert _only(found, "git") == DoctorCheck("git", "missing", "not on PATH", "apt-get install git")


# Packages, room, credentials, Prefect


def test_packages_against_the_tested_versions(tmp_path: Path) -> None:
    from importlib.metadata import version

    constraints = tmp_path / "the constraints.txt"
    constraints.write_text(f"# tested\nTorch=={version('torch').split('+')[0]}\nhuggingface_hub==1.0.0 # old\n\n")
    found = checks.check_packages(constraints)
    assert _only(found, "package torch").state == "ok"
    check = _only(found, "package huggingface-hub")
    assert check.state == "warning" and check.detail == f"{version('huggingface_hub')}, tested with 1.0.0"
    assert check.remedy is not None and f"--constraint '{constraints}' 'huggingface" in check.remedy
    assert all(check.state == "ok" for check in checks.check_packages(tmp_path / "none.txt"))


def test_packages_against_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = ["prefect<1", "a-package-nobody-wrote>=1", "pytest<1; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    found = checks.check_packages(tmp_path / "none.txt")
    assert [(check.name, check.state) for check in found] == [
        ("package prefect", "missing"),
        ("package a-package-nobody-wrote", "missing"),
        ("packages", "ok"),
    ]
    assert found[0].detail.endswith("needed is <1") and found[1].detail == "not installed"


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = checks.check_folders(tmp_path / "file" / "runs", tmp_path / "not" / "yet")
    check = _only(found, "run folder")
    assert check.state == "missing" and "is not writable" in check.detail
    assert "GiB free" in _only(found, "cache folder").detail
    assert not (tmp_path / "not").exists()
    check = _only(checks.check_folders(tmp_path, tmp_path / "file" / "cache"), "cache folder")
    assert check.state == "missing" and (check.remedy or "").startswith("set RANKWISE_CACHE to another")


def test_credentials_in_another_users_home_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of all four failed there."""
    for name in (*SECRETS, "AWS_SHARED_CREDENTIALS_FILE", "AZURE_TENANT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    stat = os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert [check.state for check in checks.check_credentials()] == ["missing"] * 4


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "AZURE_TENANT_ID", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [check.state for check in checks.check_credentials()] == ["missing"] * 4
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_secret_access_key = SECRETVALUE\n")
    (tmp_path / "key.json").write_text('{"private_key": "SECRETVALUE"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    for name in ("HF_TOKEN", "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET"):
        monkeypatch.setenv(name, "SECRETVALUE")
    found = checks.check_credentials()
    assert [check.state for check in found] == ["ok"] * 4 and "SECRETVALUE" not in str(found)
    monkeypatch.delenv("AZURE_TENANT_ID")
    check = _only(checks.check_credentials(), "credentials azure")
    assert check.state == "warning" and check.detail == "AZURE_TENANT_ID not set"


class _Api(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/base/api/health" else 404)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("status", "state", "user"),
    [(200, "ok", ""), (401, "ok", ""), (503, "warning", ""), (200, "ok", "ada:SECRET@")],
)
def test_prefect_api(status: int, state: str, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKWISE_LOCAL_API", raising=False)
    with HTTPServer(("127.0.0.1", 0), type("Api", (_Api,), {"status": status})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://{user}127.0.0.1:{server.server_port}/base/api")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # for the internet, not for this machine
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        (check,) = checks.check_prefect_api()
        server.shutdown()
        thread.join()
    assert check.state == state and f":{server.server_port}/base/api" in check.detail


@pytest.mark.parametrize("url", ["http://ada:SECRET@127.0.0.1/base/api", "http://ada:SECRET@host.invalid:42000x/api"])
def test_prefect_api_whose_password_is_nobodys_business(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a port urllib took the password for one, and `doctor` printed its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKWISE_LOCAL_API", raising=False)
    monkeypatch.setattr(checks, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setenv("PREFECT_API_URL", url)
    (check,) = _answers({"prefect api": checks.check_prefect_api}, patient(30))
    assert check.name == "prefect api" and check.remedy and "SECRET" not in f"{check}"


def test_prefect_api_of_another_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(server: socket.socket) -> None:
        with server.accept()[0] as taken:
            taken.recv(4096)
            taken.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKWISE_LOCAL_API", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{other.getsockname()[1]}/api")
        thread = threading.Thread(target=speak, args=(other,))
        thread.start()
        (check,) = checks.check_prefect_api()
        thread.join()
    assert check.state == "missing" and "does not respond" in check.detail


def test_prefect_api_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("RANKWISE_LOCAL_API", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    (check,) = checks.check_prefect_api()
    assert check.state == "missing" and "refused" in check.detail
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    (check,) = checks.check_prefect_api()
    assert check.state == "missing" and check.remedy is not None and "http://" in check.remedy
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    (check,) = checks.check_prefect_api()
    assert check.state == "ok" and "none configured" in check.detail


def test_prefect_api_that_is_slow_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine takes connections, and answers in seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKWISE_LOCAL_API", raising=False)
    monkeypatch.setattr(checks, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        (check,) = checks.check_prefect_api()
    assert check.state == "warning" and check.detail.endswith("did not answer within 0.2 s")
