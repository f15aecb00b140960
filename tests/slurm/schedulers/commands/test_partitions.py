"""What sinfo says is held against what a study needs; the text is sinfo's own, of a cluster of two kinds of nodes.

That the commands are asked rightly is for the tests on the lab (tests/slurm/lab/test_study.py).
"""

import os
from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.listing import ClusterError, Partition, megabytes, minutes_of, read_partitions
from slurm.schedulers.commands.partitions import (
    Need,
    Partitions,
    cluster_identity,
    lacks,
    partition_nodes,
    read_cluster,
)

SINFO = """\
batch|batch*|c1|64|257000|(null)|1-00:00:00|idle|up|icelake,ib
batch|batch*|c2|64|257000|(null)|1-00:00:00|mixed|up|icelake,ib
batch|batch*|c3|64|257000|(null)|1-00:00:00|down*|up|icelake
batch|batch*|c4|32|128000|(null)|1-00:00:00|drained|up|rome
gpu|gpu|g1|128|1031000|gpu:h100:4(S:0-1),gpu:a100:2,shard:8|2:00:00|allocated|up|(null)
old|old|o1|8|16000|(null)|infinite|idle|down|(null)
"""


def cluster() -> Partitions:
    return Partitions("c", read_partitions(SINFO))


def target(**fields: object) -> SlurmTarget:
    return SlurmTarget.model_validate(fields)


def test_nodes_are_read_with_what_they_have() -> None:
    partitions = cluster().partitions
    assert [(name, len(found.nodes), found.time_limit_minutes) for name, found in partitions.items()] == [
        ("batch", 4, 1440),
        ("gpu", 1, 120),
        ("old", 1, None),
    ]
    node = partitions["gpu"].nodes[0]
    assert [node.gpus_of(kind) for kind in (None, "h100", "A100", "l4")] == [6, 4, 2, 0]
    assert [node.usable for node in partitions["batch"].nodes] == [True, True, False, False]
    assert cluster().default == partitions["batch"]
    empty: Partition = read_partitions("none|none||0|0|(null)|infinite||up|(null)")["none"]
    assert empty.nodes == ()


def test_a_target_that_can_be_served_lacks_nothing() -> None:
    assert lacks(target(), [Need(2, 64), Need(1, 1)], cluster()) == []
    assert lacks(target(partition="gpu", gpus_per_node=6, time_limit_minutes=120), [Need(1, 128)], cluster()) == []
    assert lacks(target(constraint="icelake&ib"), [Need(2, 64)], cluster()) == []


@pytest.mark.parametrize(
    ("fields", "need", "problem"),
    [
        (
            {"partition": "bath"},
            Need(1, 1),
            "partition: unknown partition bath of cluster c\n  use one of: batch, gpu, old",
        ),
        ({"partition": "old"}, Need(1, 1), "partition: old is not up"),
        ({"time_limit_minutes": 1441}, Need(1, 1), "time_limit_minutes: got 1441, but partition batch allows 1440"),
        ({"constraint": "milan"}, Need(1, 1), "constraint: no node of partition batch has the feature milan"),
        (
            {},
            Need(4, 64),
            "partition: batch cannot give 4 nodes with 64 cores each: it has 3 nodes of 64 CPUs, 257000 MB; "
            "1 node of 32 CPUs, 128000 MB",
        ),
        ({}, Need(3, 64), "partition: batch cannot give 3 nodes with 64 cores each now: c3 is down*"),
        (
            {"memory_per_node": "300G"},
            Need(1, 1),
            "partition: batch cannot give 1 node with 1 core and 307200 MB: it has",
        ),
        ({}, Need(1, 1, 300_000), "partition: batch cannot give 1 node with 1 core and 300000 MB: it has"),
        (
            {"partition": "gpu", "gpus_per_node": 8},
            Need(1, 1),
            "partition: gpu cannot give 1 node with 1 core, 8 GPUs per node: it has 1 node of 128 CPUs, 1031000 MB, "
            "6 GPUs",
        ),
    ],
)
def test_what_a_cluster_lacks_is_named(fields: dict[str, object], need: Need, problem: str) -> None:
    found = lacks(target(**fields), [need], cluster())
    assert len(found) == 1 and found[0].startswith(problem), found


def test_without_a_default_partition_one_must_be_named() -> None:
    bare = Partitions("c", {"gpu": cluster().partitions["gpu"]})
    assert lacks(target(), [], bare) == ["partition: not set, and cluster c has no default partition. Use one of: gpu"]


def test_a_users_variables_of_sbatch_choose_where_the_target_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for sbatch: jobs for `gpu` were held against the nodes of `batch`, whose name their figures had."""
    gpus = target(gpus_per_node=4, ranks_per_node=4)
    assert lacks(gpus, [Need(1, 8)], cluster())[0].startswith("partition: batch cannot give 1 node")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert lacks(gpus, [Need(1, 8)], cluster()) == []
    assert cluster_identity(target(), cluster()) == cluster_identity(target(partition="gpu"), cluster())
    assert cluster_identity(target(partition="old"), cluster()).startswith("cluster c, partition old,")
    bare = Partitions("c", {"gpu": cluster().partitions["gpu"]})
    assert lacks(target(), [], bare) == []
    monkeypatch.setenv("SBATCH_PARTITION", "gone")
    problem = "partition: unknown partition gone (of SBATCH_PARTITION) of cluster c\n  use one of: gpu"
    assert lacks(target(), [], bare) == [problem]
    monkeypatch.setenv("SBATCH_PARTITION", "batch")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "rome")
    assert cluster_identity(target(), cluster()) == "cluster c, partition batch, nodes of 32 CPUs, 125 GiB"
    monkeypatch.setenv("SBATCH_CONSTRAINT", "milan")
    assert lacks(target(), [], cluster()) == ["constraint: no node of partition batch has the feature milan"]


def test_further_options_of_sbatch_choose_as_the_fields_of_their_names_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch was given them, and figures had the name and the nodes of the default partition."""
    monkeypatch.setenv("SBATCH_PARTITION", "old")
    by_field, by_extra = target(partition="gpu"), target(extra={"partition": "gpu"})
    assert cluster_identity(by_extra, cluster()) == cluster_identity(by_field, cluster())
    assert by_extra.where == by_field.where == "partition gpu"
    gpus = {"gpus_per_node": 4, "ranks_per_node": 4}
    assert lacks(target(extra={"partition": "gpu"}, **gpus), [Need(1, 8)], cluster()) == []
    assert lacks(target(extra={"partition": "gone"}), [], cluster()) == [
        "partition: unknown partition gone of cluster c\n  use one of: batch, gpu, old"
    ]
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SINFO}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert partition_nodes(target(partition="batch", extra={"constraint": "rome"})) == ()
    assert partition_nodes(target(partition="batch", extra={"constraint": "ib"})) == ("c1", "c2")


def test_figures_are_comparable_on_nodes_of_one_kind() -> None:
    assert (
        cluster_identity(target(partition="gpu"), cluster())
        == "cluster c, partition gpu, nodes of 128 CPUs, 1007 GiB, 6 GPUs"
    )
    assert (
        cluster_identity(target(constraint="rome"), cluster())
        == "cluster c, partition batch, nodes of 32 CPUs, 125 GiB"
    )


@pytest.mark.parametrize(
    ("text", "minutes"), [("30:00", 30), ("2:30:00", 150), ("1-00:00:00", 1440), ("infinite", None), ("n/a", None)]
)
def test_time_limits(text: str, minutes: int | None) -> None:
    assert minutes_of(text) == minutes


@pytest.mark.parametrize(("text", "size"), [("16G", 16384), ("500", 500), ("1T", 1048576), ("2048K", 2)])
def test_memory_as_sbatch_takes_it(text: str, size: int) -> None:
    assert megabytes(text) == size


def test_without_slurm_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"`scontrol`: not found on PATH\. Submit from a machine of the cluster"):
        read_cluster()
    assert partition_nodes(target()) == ()
    (tmp_path / "scontrol").touch(mode=0o600)
    with pytest.raises(ClusterError, match=r"`scontrol`: Permission denied\. Submit from a machine of the cluster"):
        read_cluster()


def test_a_scheduler_that_is_away_is_said_with_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setenv("SLURM_CONF", "/etc/lab.conf")
    with pytest.raises(ClusterError, match=r"no response \(SLURM_CONF=/etc/lab.conf\): slurm_load_ctl_conf"):
        read_cluster()


_DENIED = "echo 'slurm_load_node: Access/permission denied' >&2; exit 1"
_SHOWN = (
    "PartitionName=lab AllowGroups=ALL Default=YES MaxTime=1-00:00:00 Nodes=c[1-2] State=UP TotalCPUs=8 TotalNodes=2\n"
    "PartitionName=old AllowGroups=ALL Default=NO MaxTime=UNLIMITED Nodes=(null) State=DOWN TotalCPUs=0 TotalNodes=0"
)


def private_site(folder: Path, monkeypatch: pytest.MonkeyPatch, partitions: str) -> None:
    """Slurm's programs as a user without privileges finds them where PrivateData hides the nodes."""
    programs = {
        "sinfo": _DENIED,
        "scontrol": f"""case "$*" in *config*) echo 'ClusterName = c' ;; *) {partitions} ;; esac""",
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_nodes_that_the_site_hides_are_left_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_site(tmp_path, monkeypatch, f"echo '{_SHOWN}'")
    found = read_cluster()
    assert lacks(target(time_limit_minutes=60, gpus_per_node=4, constraint="a100"), [Need(2, 500)], found) == []
    assert lacks(target(time_limit_minutes=1441), [Need(3, 1), Need(1, 1)], found) == [
        "time_limit_minutes: got 1441, but partition lab allows 1440",
        "partition: lab cannot give 3 nodes: it has 2 nodes",
    ]
    assert lacks(target(partition="old"), [], found) == ["partition: old is not up and starts no jobs"]
    assert lacks(target(partition="none"), [], found)[0].startswith("partition: unknown partition none of cluster c")
    assert cluster_identity(target(), found) == "cluster c, partition lab, nodes of unknown"
    assert partition_nodes(target()) == ()


def test_partitions_that_the_site_hides_are_left_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_site(tmp_path, monkeypatch, _DENIED)
    found = read_cluster()
    assert lacks(target(partition="gpu", time_limit_minutes=60), [Need(2, 500)], found) == []
    assert cluster_identity(target(partition="gpu"), found) == "cluster c, partition gpu"
    assert cluster_identity(target(), found) == "cluster c, partition by default"


def test_a_hidden_partition_takes_jobs_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sinfo shows one with Hidden=YES only where it is asked for all; sbatch takes jobs for it."""
    secret = "secret|secret|s1|64|257000|(null)|infinite|idle|up|(null)"
    program = tmp_path / "sinfo"
    program.write_text(f'#!/bin/sh\ncase " $* " in *" --all "*) echo "{secret}" ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert partition_nodes(target(partition="secret")) == ("s1",)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("m1", "m2", "m3", "m4")),
        ({"gpus_per_node": 4}, ("m2", "m3")),
        ({"gpus_per_node": 4, "gres": "gpu:a100:4"}, ("m3",)),
        ({"memory_per_node": "300G"}, ("m3", "m4")),
        ({"constraint": "ib"}, ("m1", "m2", "m4")),
        ({"constraint": "ib&rome"}, ("m2", "m4")),
        ({"constraint": "milan|icelake"}, ("m1", "m3")),
        ({"constraint": "[milan|rome]"}, ()),  # all nodes of one kind: which, only Slurm knows
        ({"constraint": "rome*2"}, ()),
    ],
)
def test_nodes_that_the_targets_jobs_cannot_get_take_no_others_place(
    fields: dict[str, object], names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two nodes with GPUs one was left out for the partition's others without, and the next launch never started."""
    lines = (
        "m1|64|257000|(null)|icelake,ib",
        "m2|64|257000|gpu:h100:4(S:0-1)|rome,ib",
        "m3|64|515000|gpu:a100:8|milan",
        "m4|64|515000|(null)|rome,ib",
    )
    rows = (line.split("|") for line in lines)
    told = (f"mix|mix*|{n}|{cpus}|{mb}|{gres}|infinite|idle|up|{features}\n" for n, cpus, mb, gres, features in rows)
    (tmp_path / "says").write_text("".join(told))
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/says\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert partition_nodes(target(**fields)) == names


def test_nodes_of_a_reservation_are_those_that_its_jobs_can_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition has others: a job that was kept from one of two reserved nodes and needed two never started."""
    for name, said in (
        ("sinfo", SINFO),
        ("scontrol", "ReservationName=bench StartTime=1 Nodes=c[1,3-4] NodeCnt=3 PartitionName=batch Nodes2=x\n"),
    ):
        program, text = tmp_path / name, tmp_path / f"{name}.says"
        text.write_text(said)
        program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncat {text}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert partition_nodes(target()) == ("c1", "c2")
    assert partition_nodes(target(reservation="bench")) == ("c1",)
    assert "--oneliner show reservation bench" in (tmp_path / "calls").read_text()
    monkeypatch.setenv("SBATCH_RESERVATION", "bench")
    assert partition_nodes(target()) == ("c1",)
    monkeypatch.delenv("SBATCH_RESERVATION")
    assert partition_nodes(target(extra={"exclude": "c[2-9]"})) == ("c1",)
    assert partition_nodes(target(extra={"exclude": "./bad_nodes"})) == (), "its names are not known"
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert partition_nodes(target(reservation="gone")) == ()


@pytest.mark.parametrize("option", ["nodelist", "nodefile"])
def test_jobs_that_list_their_nodes_avoid_none(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry was kept from one of them for the sake of the partition's others, and sbatch refused the contradiction:
    `Invalid node name specified`, which made failures of measurements that the cluster had lost."""
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SINFO}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert partition_nodes(target()) == ("c1", "c2")
    assert partition_nodes(target(extra={option: "c[1,3]"})) == ()


def test_the_type_of_gpu_that_a_target_names_is_what_nodes_must_have() -> None:
    """The node has four h100 and two a100: six GPUs, but not six of a type."""
    for gres, problem in (
        ("gpu:h100:4", None),
        ("gpu:6", None),
        ("gpu:a100:4", "partition: gpu cannot give 1 node with 4 cores, 4 a100 GPUs per node: it has 1 node of "),
    ):
        count = int(gres.rpartition(":")[2])
        target = SlurmTarget(partition="gpu", gres=gres, gpus_per_node=count, ranks_per_node=4)
        found = lacks(target, [Need(nodes=1, cores=4)], cluster())
        assert [each[: len(problem or "")] for each in found] == ([problem] if problem else [])


def test_nodes_whose_memory_is_not_configured_are_not_called_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without RealMemory in slurm.conf sinfo prints its default, 1 MB: every study of a model on CPUs was refused."""
    lines = "".join(f"batch|batch*|c{number}|64|1|(null)|infinite|idle|up|(null)\n" for number in (1, 2))
    unset = Partitions("c", read_partitions(lines))
    assert lacks(target(), [Need(2, 64, 16_000)], unset) == []
    assert cluster_identity(target(), unset) == "cluster c, partition batch, nodes of 64 CPUs, memory unknown"
    (problem,) = lacks(target(), [Need(2, 65)], unset)
    assert problem.endswith("it has 2 nodes of 64 CPUs, memory unknown")
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert partition_nodes(target(memory_per_node="16G")) == ("c1", "c2")
