"""Targets of hosts that are reached by SSH: short and long forms, what is refused, and the way there and back."""

from pathlib import Path

import pytest

from configs.spec.study import StudyError, load_study, study_yaml
from configs.targets.ssh_host import jump_host
from configs.targets.target import SshTarget
from tests.support.run_folders.studies import write_study

LAB = {"kind": "ssh", "name": "lab", "hosts": ["gpu-a", "gpu-b"], "user": "bench"}


def test_names_alone_are_enough() -> None:
    target = SshTarget.model_validate(LAB)
    assert [(host.host, host.name, host.port) for host in target.hosts] == [
        ("gpu-a", "gpu-a", None),
        ("gpu-b", "gpu-b", None),
    ]
    assert (target.nodes, target.ranks_per_node, target.rank_limit, target.adapter) == (2, 1, 2, "ssh")


def test_a_host_may_say_everything_itself() -> None:
    host = {
        "host": "203.0.113.7", "name": "a", "port": 2222, "user": "ubuntu", "key": "~/.ssh/it", "address": "10.0.0.7",
        "host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJNyPzP5VQ3K0g6cKQm0m1u0m1u0m1u0m1u0m1u0m1u0",
    }  # fmt: skip
    target = SshTarget.model_validate({"hosts": [host, "b"], "gpus_per_node": 4})
    assert target.hosts[0].model_dump() == host
    assert target.rank_limit == 8


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_target_survives_its_study_file(tmp_path: Path, nodes: int) -> None:
    study = load_study(write_study(tmp_path, targets=[LAB | {"nodes": nodes}]))
    again = tmp_path / "again.yaml"
    again.write_text(study_yaml(study))
    assert load_study(again).targets == study.targets
    assert study.targets[0].nodes == nodes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hosts": []}, "targets[0].hosts: expected at least 1 entry, got none"),
        ({"hosts": ["a", "a"]}, "targets[0].hosts: a named twice"),
        ({"hosts": ["-oProxyCommand=x"]}, "targets[0].hosts[0].host: got '-oProxyCommand=x', expected the form "),
        ({"hosts": ["a b"]}, "targets[0].hosts[0].host: got 'a b', expected the form [A-Za-z0-9]"),
        ({"hosts": ["gpu-a:2222"]}, "targets[0].hosts[0].host: got 'gpu-a:2222', expected a name or an address alone"),
        ({"jump": "gateway:ssh"}, "targets[0].jump: got 'gateway:ssh', expected one host as in user@host:port"),
        ({"jump": "first,second"}, "targets[0].jump: got 'first,second', expected one host as in user@host:port"),
        ({"jump": "-oProxyCommand=x"}, "targets[0].jump: got '-oProxyCommand=x', expected one host"),
        ({"hosts": [{"host": "a", "prot": 1}]}, "targets[0].hosts[0].prot: unknown key (did you mean port?)"),
        ({"hosts": [{"host": "a", "port": 0}]}, "targets[0].hosts[0].port: input should be greater than or equal to 1"),
        ({"hosts": [{"host": "a", "host_key": "AAAA"}]}, "targets[0].hosts[0].host_key: expected a public key"),
        ({"nodes": 3}, "targets[0].nodes: got 3, but the target has 2 hosts"),
        ({"shared": "work"}, "targets[0].shared: got work, expected an absolute path"),
        ({"folder": "a; rm -rf"}, "targets[0].folder: got 'a; rm -rf', expected the form "),
        ({"user": "a b"}, "targets[0].user: got 'a b', expected the form "),
        ({"gpus_per_node": 2, "device": "cpu"}, "targets[0].device: got cpu, but gpus_per_node is 2"),
        ({"partition": "x"}, "targets[0].partition: supported by targets of kind slurm only"),
        ({"lost_after_seconds": 0}, "targets[0].lost_after_seconds: input should be greater than 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_field(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        load_study(write_study(tmp_path, targets=[LAB | changes]))
    assert any(said.startswith(problem) for said in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("gateway", (None, "gateway", None)),
        ("ops@gateway:2222", ("ops", "gateway", 2222)),
        ("ops@[2001:db8::1]:2222", ("ops", "2001:db8::1", 2222)),
        ("[2001:db8::1]", (None, "2001:db8::1", None)),
        ("ops@2001:db8::1", ("ops", "2001:db8::1", None)),
    ],
    ids=str,
)
def test_a_jump_host_is_read_as_openssh_reads_it(written: str, told: tuple[str | None, str, int | None]) -> None:
    assert SshTarget.model_validate(LAB | {"jump": written}).jump == written
    assert jump_host(written) == told


def test_an_address_of_ipv6_is_no_host_with_a_port() -> None:
    [host] = SshTarget.model_validate({"hosts": ["2001:db8::5"]}).hosts
    assert (host.host, host.port) == ("2001:db8::5", None)
