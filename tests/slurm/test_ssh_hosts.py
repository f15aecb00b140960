"""Real SSH servers on networks of their own: how hosts are reached, refused and checked; what is carried to them."""

import asyncio
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from configs.plans.model_manifest import ModelFile, ModelManifest
from configs.targets.target import SshTarget
from slurm.ssh import connection, staging
from slurm.ssh.connection import Facts, Host, HostAway, HostError, HostRefused, hosts_of
from slurm.ssh.host_checks import HostNeed, lacking
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import stage_hosts
from slurm.ssh.transfer import members_of
from tests.support.cluster.ssh_hosts import SshTestHosts, ssh_hosts
from tests.support.patience import patient
from tests.support.processes import command_line

LIMIT_SECONDS = 300.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts") / "h", 3) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_hosts", {})


def lab(there: SshTestHosts, **changes: Any) -> SshTarget:
    return SshTarget.model_validate(there.target(**changes))


def problems(target: SshTarget, **need: int) -> list[str]:
    return wait_for(lacking(target, HostNeed(**need)), LIMIT_SECONDS)


def facts(host: Host) -> dict[str, Any]:
    return wait_for(host.facts(), LIMIT_SECONDS).data


# Reached and refused


def test_hosts_tell_who_they_are_and_lack_nothing(hosts: SshTestHosts) -> None:
    target = lab(hosts)
    assert [facts(host)["hostname"] for host in hosts_of(target)] == ["gpu-a", "gpu-b", "gpu-c"]
    assert [facts(host)["address"] for host in hosts_of(target)] == [host.address for host in hosts.hosts]
    assert problems(target) == []


def test_config_agent_of_keys_known_hosts_and_jump_hosts_of_the_user_are_honoured(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aliases alone: port, user, key, known hosts and a jump host are in ~/.ssh/config."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    lines = [f"Host *\n  User root\n  IdentityFile {hosts.base}/key\n  UserKnownHostsFile {hosts.known_hosts}\n"]
    lines += [f"Host {host.name}\n  HostName {host.address}\n  Port {host.port}\n" for host in hosts.hosts]
    lines += [f"Host far\n  HostName {hosts['b'].address}\n  Port {hosts['b'].port}\n  ProxyJump gpu-a\n"]
    (tmp_path / ".ssh" / "config").write_text("".join(lines))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    given = {"kind": "ssh", "folder": str(hosts.base / "node")}
    direct, far = hosts_of(SshTarget.model_validate(given | {"hosts": ["gpu-c", "far"]}))
    assert facts(direct)["hostname"] == "gpu-c"
    assert facts(far)["hostname"] == "gpu-b"


def test_no_variable_of_this_machine_reaches_a_host(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that ~/.ssh/config sends, and that the server accepts."""
    canary = os.urandom(8).hex()
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text("Host *\n  SendEnv HF_TOKEN\n  ForwardAgent yes\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", canary)
    for host in hosts_of(lab(hosts)):
        facts(host)
    agents = [process for process in hosts["a"].processes() if "python" in command_line(process)]
    assert agents
    for process in agents:
        assert canary not in str(process.environ()) and "SSH_AUTH_SOCK" not in process.environ()


def test_a_jump_host_of_the_target_is_gone_through(hosts: SshTestHosts) -> None:
    """The connection ends with the jump host's server."""
    jump = f"root@{hosts['a'].address}:{hosts['a'].port}"
    far = hosts_of(lab(hosts, jump=jump))[1]
    assert facts(far)["hostname"] == "gpu-b"
    hosts["a"].kill_sshd()
    try:
        with pytest.raises(HostAway):
            wait_for(far.ask("sizes", paths=[]), LIMIT_SECONDS)
    finally:
        hosts["a"].start_sshd()


@pytest.mark.parametrize("by_config", [False, True])
def test_many_hosts_behind_one_jump_host_are_reached(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_config: bool
) -> None:
    """A server drops those who are ten or more at once before they have logged in, by default some, here all."""
    monkeypatch.setattr(connection, "_gates", {})
    jump = f"root@{hosts['a'].address}:{hosts['a'].port}"
    far = {"host": hosts["b"].address, "port": hosts["b"].port}
    target = lab(hosts, hosts=[far | {"name": f"far-{number}"} for number in range(13)])
    if by_config:
        (tmp_path / ".ssh").mkdir(mode=0o700)
        lines = f"Host *\n  IdentityFile {hosts.base}/key\n  UserKnownHostsFile {hosts.known_hosts}\n"
        (tmp_path / ".ssh" / "config").write_text(f"{lines}Host {hosts['b'].address}\n  ProxyJump {jump}\n")
        monkeypatch.setenv("HOME", str(tmp_path))
    else:
        target = target.model_copy(update={"jump": jump})

    async def all_of_them() -> list[Facts]:
        return await asyncio.gather(*(host.facts() for host in hosts_of(target)))

    hosts["a"].max_startups = "10:100:10"
    hosts["a"].kill_sshd()
    hosts["a"].start_sshd()
    try:
        assert {told.data["hostname"] for told in wait_for(all_of_them(), LIMIT_SECONDS)} == {"gpu-b"}
    finally:
        hosts["a"].max_startups = "100"
        hosts["a"].kill_sshd()
        hosts["a"].start_sshd()


def test_a_jump_host_that_refuses_or_is_away_is_named_itself(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Its unknown key was told as a wrong key of the host behind it."""
    address, port = hosts["a"].address, hosts["a"].port
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    far = {"host": hosts["b"].address, "port": hosts["b"].port, "name": "gpu-b", "host_key": hosts["b"].host_key}
    for jump, known_hosts, told in (
        (f"{address}:{port}", str(empty), f"gpu-b: jump host {address}: host key not accepted"),
        (
            f"nobody-here@{address}:{port}",
            str(hosts.known_hosts),
            f"gpu-b: jump host {address}: no key is accepted for",
        ),
        (f"{address}:9", str(hosts.known_hosts), f"gpu-b: not reached: jump host {address}: "),
    ):
        (said,) = problems(lab(hosts, hosts=[far], jump=jump, known_hosts=known_hosts))
        assert said.startswith(f"hosts: {told}"), said


def test_an_unknown_a_changed_and_a_given_host_key(hosts: SshTestHosts, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    for known in (empty, tmp_path / "missing"):
        (said, *_) = problems(lab(hosts, known_hosts=str(known)))
        assert said.startswith("hosts: gpu-a: "), said
    own = {"host": hosts["a"].address, "port": hosts["a"].port, "name": "gpu-a"}
    right = lab(hosts, known_hosts=str(empty), hosts=[own | {"host_key": hosts["a"].host_key}])
    wrong = lab(hosts, hosts=[own | {"host_key": hosts["b"].host_key}])
    assert problems(right) == []
    assert problems(wrong)[0].startswith("hosts: gpu-a: its host key is not the one that `host_key` names")


def test_a_key_that_is_not_accepted_is_told_with_its_remedy(hosts: SshTestHosts, tmp_path: Path) -> None:
    shutil.copy(hosts["c"].folder / "host_key", tmp_path / "key")
    (said, *_) = problems(lab(hosts, key=str(tmp_path / "key")))
    assert said.startswith("hosts: gpu-a: no key is accepted for user root") and "`key`" in said


def test_a_host_that_refuses_the_next_connection_is_away(hosts: SshTestHosts) -> None:
    """As with an agent that is locked meanwhile: its jobs go on, and were given up at once."""
    host = hosts_of(lab(hosts))[0]
    facts(host)
    key = hosts.base / "key.pub"
    plain = key.read_text()
    key.write_text("")
    try:
        hosts["a"].kill_sshd()
        hosts["a"].start_sshd()
        with pytest.raises(HostAway):
            wait_for(host.ask("sizes", paths=[]), LIMIT_SECONDS)
        assert comes_to(host, "no key is accepted for user root").count("gpu-a: ") == 1
    finally:
        key.write_text(plain)
    deadline = time.monotonic() + patient(20)
    while host.away_seconds > 0:
        with suppress(HostAway):
            wait_for(host.ask("sizes", paths=[]), LIMIT_SECONDS)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def comes_to(host: Host, wanted: str) -> str:
    """What is told of a host that is away, when it has these words."""
    deadline = time.monotonic() + patient(20)
    while True:
        with pytest.raises(HostAway) as caught:
            wait_for(host.ask("sizes", paths=[]), LIMIT_SECONDS)
        if wanted in caught.value.strerror:
            return str(caught.value.strerror)
        assert time.monotonic() < deadline, caught.value
        time.sleep(0.1)


def test_a_broken_connection_is_made_again_and_a_dead_one_is_told(hosts: SshTestHosts) -> None:
    host = hosts_of(lab(hosts))[1]
    facts(host)
    hosts["b"].kill_sshd()
    with pytest.raises(HostAway, match=r"gpu-b: not reached"):
        wait_for(host.ask("sizes", paths=[]), LIMIT_SECONDS)
    assert host.away_seconds > 0
    hosts["b"].start_sshd()
    deadline = time.monotonic() + patient(20)
    while True:
        try:
            wait_for(host.ask("sizes", paths=[]), LIMIT_SECONDS)
            break
        except HostAway:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert host.away_seconds == 0


# Checked


def test_python_disk_clock_driver_cores_and_libraries_are_checked(
    hosts: SshTestHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not start" in problems(lab(hosts, python="/nowhere/bin/python3"))[0]
    assert "GiB are needed. Make room" in problems(lab(hosts), model_bytes=1 << 50)[0]
    assert "1,024 cores needed" in problems(lab(hosts), cores=1024)[0]
    assert "of memory are needed" in problems(lab(hosts), memory_bytes=1 << 50)[0]
    assert "nvidia-smi is not installed" in problems(lab(hosts, gpus_per_node=1))[0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    (said, *_) = problems(lab(hosts))
    assert said.startswith("hosts: gpu-a: its clock is 86,400 s ahead of this machine's. Set it"), said


def test_a_folder_that_cannot_be_made_is_told_with_its_remedy(hosts: SshTestHosts) -> None:
    """It was told to be a host that is down."""
    (hosts["a"].disk / "file").write_text("")
    (said,) = problems(lab(hosts, folder=f"{hosts.base}/node/file/below", hosts=hosts.target()["hosts"][:1]))
    assert "Not a directory" in said and said.endswith("Set `folder` to one that can be made and read there"), said


def test_a_login_without_a_shell_says_so(hosts: SshTestHosts) -> None:
    """Its words come on standard output, and were not told; what a login script says before is not the reason."""
    key = hosts.base / "key.pub"
    plain = key.read_text()
    key.write_text(f'command="echo Welcome; echo This account is currently not available.; exit 1" {plain}')
    try:
        (said,) = problems(lab(hosts, hosts=hosts.target()["hosts"][:1]))
    finally:
        key.write_text(plain)
    assert "python does not start: This account is currently not available. Install" in said, said


def test_an_environment_is_named_by_its_folder_from_home_too(hosts: SshTestHosts) -> None:
    home = pwd.getpwuid(0).pw_dir
    (hosts["a"].disk / "python-bench").symlink_to(sys.prefix)
    for named in (f"{hosts.base}/node/python-bench", f"~/{os.path.relpath(sys.prefix, home)}"):
        assert problems(lab(hosts, python=named, hosts=hosts.target()["hosts"][:1])) == []


def test_hosts_of_one_job_that_would_meet_by_ipv6_are_told(hosts: SshTestHosts) -> None:
    """Their job failed after minutes: a node did not register."""
    one = hosts.target()["hosts"][0]
    target = lab(hosts, hosts=[one | {"address": "2001:db8::7"}])
    (said,) = problems(target, nodes=2)
    assert said.startswith("hosts: gpu-a: the other hosts of a job would reach it by 2001:db8::7, and need IPv4"), said
    assert problems(target) == [] == problems(lab(hosts, hosts=[one]), nodes=2)


def test_room_for_libraries_is_asked_for_until_those_of_this_version_are_there(hosts: SshTestHosts) -> None:
    """Those of another version, or what a failed installation left, were taken for them."""
    left = hosts["a"].disk / "rankwise" / "libraries" / "of-before"
    left.mkdir(parents=True)
    target = lab(hosts, python=None, hosts=hosts.target()["hosts"][:1])
    told = wait_for(hosts_of(target)[0].facts(), LIMIT_SECONDS)
    room = told.data["free_bytes"] - (4 << 30)  # not for the libraries besides
    assert "GiB are needed. Make room" in problems(target, model_bytes=room)[0]
    (hosts["a"].disk / "rankwise" / staging.libraries_name(told)).mkdir()
    assert problems(target, model_bytes=room) == []
    shutil.rmtree(left.parent)


def test_an_old_python_is_told_by_its_version(hosts: SshTestHosts) -> None:
    old = hosts["a"].disk / "python3"
    old.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8, 1); $1"\n')
    old.chmod(0o755)
    hosts_given = hosts.target()["hosts"][:1]
    (said,) = problems(lab(hosts, python=f"{hosts.base}/node/python3", hosts=hosts_given))
    assert "is Python 3.8, expected 3.11 or newer" in said


def test_a_python_without_the_libraries_is_told(hosts: SshTestHosts) -> None:
    bare = hosts["a"].disk / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    bare.rename(bare.with_name("python-bare"))
    bare.with_name("python-bare").chmod(0o755)
    (said,) = problems(lab(hosts, python=f"{hosts.base}/node/python-bare", hosts=hosts.target()["hosts"][:1]))
    assert "lacks" in said and "torch" in said and "Install them there" in said


def test_one_machine_under_two_names_is_refused(hosts: SshTestHosts) -> None:
    one, two, _ = hosts.target()["hosts"]
    (said,) = problems(lab(hosts, hosts=[one, two, one | {"name": "again"}]))
    assert said.startswith("hosts: gpu-a, again are one and the same machine")


# Carried


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's manifest; 24 MiB of weights."""
    content = os.urandom(24 << 20)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    files = {
        path.name: ModelFile(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_bytes=path.stat().st_size)
        for path in folder.iterdir()
    }
    manifest = ModelManifest(
        identity=f"folder:{os.urandom(4).hex()}", source="folder", folder=str(folder), files=files, config={}
    )
    path = tmp_path / f"m{os.urandom(4).hex()}" / "manifest.json"
    path.parent.mkdir()
    path.write_text(manifest.model_dump_json())
    return path


def carried(target: SshTarget, manifest: Path, thorough: bool = False) -> list[str]:
    said: list[str] = []
    wait_for(stage_hosts(target, [manifest], said.append, thorough), LIMIT_SECONDS)
    return said


def weights(hosts: SshTestHosts, manifest: Path) -> list[bytes]:
    name = f"rankwise/models/{manifest.parent.name}/files/model.safetensors"
    return [(host.disk / name).read_bytes() for host in hosts.hosts if (host.disk / name).exists()]


@pytest.mark.slow
def test_each_byte_of_a_model_leaves_this_machine_once(hosts: SshTestHosts, model: Path) -> None:
    """To three hosts: two get it from the one before. What is there is not brought again; what is damaged is."""
    target = lab(hosts)
    wait_for(stage_hosts(target, [], lambda _: None), LIMIT_SECONDS)  # the code
    before = hosts.sent_bytes()
    said = carried(target, model)
    (line,) = said
    assert line.endswith(": 24.0 MiB to gpu-a, and from there to gpu-b, gpu-c")
    original = (model.parent.parent / "model" / "model.safetensors").read_bytes()
    assert weights(hosts, model) == [original] * 3
    assert 1.0 <= (hosts.sent_bytes() - before) / len(original) < 1.15
    assert carried(target, model) == []
    damaged = hosts["b"].disk / "rankwise" / "models" / model.parent.name / "files" / "model.safetensors"
    damaged.write_bytes(original[:-1] + b"x")
    assert carried(target, model) == []
    assert carried(target, model, thorough=True)[0].endswith("to gpu-b")
    assert weights(hosts, model) == [original] * 3


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_one_before_gets_it_from_here(hosts: SshTestHosts, model: Path) -> None:
    given = hosts.target()["hosts"]
    given[0]["address"] = "10.255.255.1"  # nobody's
    carried(lab(hosts, hosts=given), model)
    original = (model.parent.parent / "model" / "model.safetensors").read_bytes()
    assert weights(hosts, model) == [original] * 3


def test_a_file_that_changed_is_not_given_to_anybody(hosts: SshTestHosts, model: Path) -> None:
    file = model.parent.parent / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="content changed since the study began"):
        carried(lab(hosts), model)
    assert weights(hosts, model) == []
    assert not list((hosts["a"].disk / "rankwise" / "models").glob(".*"))


TINY_WHEEL = "tinything-1.0-py3-none-any.whl"


def tiny_wheel(folder: Path) -> None:
    """A library of one line, as pip takes it."""
    with zipfile.ZipFile(folder / TINY_WHEEL, "w") as archive:
        archive.writestr("tinything.py", "VALUE = 42\n")
        archive.writestr("tinything-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tinything-1.0.dist-info/WHEEL", about)
        archive.writestr("tinything-1.0.dist-info/RECORD", "")


def test_libraries_are_installed_by_the_hosts_own_pip(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one of our own, from a file: no network is needed. pip's words are told where it fails."""
    tiny_wheel(hosts["a"].disk)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("")
    python = sys._base_executable  # type: ignore[attr-defined]
    monkeypatch.setattr(connection, "DEFAULT_PYTHON", python)
    target = lab(hosts, python=None, hosts=hosts.target()["hosts"][:1])

    def require(name: str) -> None:
        wanted = f"tinything @ file://{hosts.base}/node/{name}"
        monkeypatch.setattr(staging, "node_requirements", lambda: (constraints, [wanted]))

    require("missing-1.0-py3-none-any.whl")
    with pytest.raises(HostError, match=r"gpu-a: .*pip --python .* install .*exit code"):
        wait_for(stage_hosts(target, [], lambda _: None), LIMIT_SECONDS)
    require(TINY_WHEEL)
    wait_for(stage_hosts(target, [], lambda _: None), LIMIT_SECONDS)
    program = f"{hosts.base}/node/{staging.interpreter_name(target)}"
    code = "import tinything, slurm.ssh.node_files as ours; print(tinything.VALUE, ours.__file__)"
    done = subprocess.run(hosts["a"].inside(program, "-c", code), capture_output=True, text=True, timeout=600, cwd="/")
    assert done.stdout.startswith("42 ") and "/node/rankwise/code/" in done.stdout, done.stderr


def own_wheel(hosts: SshTestHosts, names: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small library, for the pip of the named hosts alone: the others do not see its file."""
    for name in names:
        tiny_wheel(hosts[name].disk)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"# {folder.name}\n")  # of this test: what others have installed is another
    wanted = f"tinything @ file://{hosts.base}/node/{TINY_WHEEL}"
    monkeypatch.setattr(staging, "node_requirements", lambda: (constraints, [wanted]))
    monkeypatch.setattr(connection, "DEFAULT_PYTHON", sys._base_executable)  # type: ignore[attr-defined]


def values_of_tinything(hosts: SshTestHosts, target: SshTarget) -> list[str]:
    """What the interpreter of each host finds; empty: nothing."""
    program = f"{hosts.base}/node/{staging.interpreter_name(target)}"
    code = "import tinything; print(tinything.VALUE)"
    return [
        subprocess.run(host.inside(program, "-c", code), capture_output=True, text=True, timeout=600, cwd="/").stdout
        for host in hosts.hosts
    ]


def test_libraries_are_handed_on_to_hosts_that_are_alike(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pip for three hosts: the others could not install at all. Nothing else is left."""
    own_wheel(hosts, "a", tmp_path, monkeypatch)
    target, said = lab(hosts, python=None), list[str]()
    wait_for(stage_hosts(target, [], said.append), LIMIT_SECONDS)
    assert "libraries: installing on gpu-a (once, takes minutes), and from there to gpu-b, gpu-c" in said
    assert values_of_tinything(hosts, target) == ["42\n"] * 3
    for host in hosts.hosts:
        libraries = [each for each in (host.disk / "rankwise" / "libraries").iterdir() if each.is_dir()]
        assert libraries and not any(each.name.startswith(".") for each in libraries)
        assert not list((host.disk / "rankwise").rglob("packed.tar"))
    shutil.rmtree(hosts["b"].disk / "rankwise" / "libraries")
    shutil.rmtree(hosts["b"].disk / "rankwise" / "envs")
    said.clear()
    wait_for(stage_hosts(target, [], said.append), LIMIT_SECONDS)
    assert values_of_tinything(hosts, target) == ["42\n"] * 3
    assert said == ["libraries: from gpu-a to gpu-b"]


def test_hosts_of_other_platforms_install_by_themselves(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_wheel(hosts, "abc", tmp_path, monkeypatch)
    target, said = lab(hosts, python=None), list[str]()
    members = wait_for(members_of(target), LIMIT_SECONDS)
    members[1].facts.data["platform"] = ["aarch64", "glibc", "2.36"]
    wait_for(staging._stage_libraries(members, said.append), LIMIT_SECONDS)
    assert sorted(said) == [
        "libraries: installing on gpu-a (once, takes minutes), and from there to gpu-c",
        "libraries: installing on gpu-b (once, takes minutes)",
    ]


@pytest.mark.slow
def test_libraries_that_cannot_be_handed_on_are_installed_by_each_host(
    hosts: SshTestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_wheel(hosts, "abc", tmp_path, monkeypatch)
    given = hosts.target()["hosts"]
    given[0]["address"] = "10.255.255.1"  # nobody's
    target, said = lab(hosts, python=None, hosts=given), list[str]()
    wait_for(stage_hosts(target, [], said.append), LIMIT_SECONDS)
    (line,) = (each for each in said if "cannot be handed on" in each)
    assert line.endswith("; installing on gpu-b, gpu-c")
    assert values_of_tinything(hosts, target) == ["42\n"] * 3


def test_a_refused_host_says_so_as_such(hosts: SshTestHosts, tmp_path: Path) -> None:
    host = hosts_of(lab(hosts, known_hosts=str(tmp_path / "none")))[0]
    with pytest.raises(HostRefused):
        wait_for(host.facts(), LIMIT_SECONDS)
