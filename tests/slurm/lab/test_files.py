"""What a lab would be: names, addresses, cores and files, and the words for what cannot be. Nothing is started."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm.lab import cluster, files, members, network
from slurm.lab.plan import LabPlan, bits_per_second, lab_file, requested


def plan(**changes: object) -> LabPlan:
    fields: dict[str, object] = {"folder": Path("/srv/lab"), "bandwidths": ("100mbit", "2.5gbit"), "subnet": 7}
    fields |= {"host": "head", "machine_cores": (0, 1, 2, 3), "machine_memory_bytes": 16 << 30, "first_job_id": 5}
    return LabPlan.model_validate(fields | {"cgroups": True} | changes)


def test_nodes_have_names_addresses_and_cores_of_their_own() -> None:
    lab = plan(nodes=2, cores_per_node=2)
    assert lab.node_names == ("lab1", "lab2")
    assert [lab.address(node) for node in lab.node_names] == ["10.213.7.1", "10.213.7.2"]
    assert [lab.cores(node) for node in lab.node_names] == [(0, 1), (2, 3)]
    assert not lab.shares_cores
    crowded = plan(nodes=3, cores_per_node=2)
    assert crowded.shares_cores and crowded.cores("lab3") == (0, 1)
    assert lab.memory_per_node_megabytes == 6144
    with pytest.raises(ValueError, match=r"has no node 'lab3'\. Use one of: lab1, lab2"):
        lab.number("lab3")


@pytest.mark.parametrize(("text", "rate"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_bandwidths_are_rates(text: str, rate: float) -> None:
    assert bits_per_second(text) == rate


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bandwidths": ("fast",)}, "bandwidths: got 'fast', expected none or a rate such as 100mbit"),
        ({"bandwidths": ("0mbit",)}, "bandwidths: got '0mbit', expected none or a rate"),
        ({"name": "lab1"}, "name: got 'lab1', expected 1 to 9 lower-case letters"),
        ({"name": "muchtoolong"}, "name: got 'muchtoolong', expected 1 to 9 lower-case letters"),
        ({"folder": Path("lab")}, "folder: got lab, expected an absolute path"),
        ({"folder": Path("/" + 80 * "x")}, "is longer than 71 characters, the limit for its sockets"),
        ({"folder": Path("/srv/my lab")}, "folder: got /srv/my lab, expected only letters, digits"),
        ({"nodes": 0}, "nodes: "),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        requested(**{"folder": Path("/srv/lab")} | changes)
    assert words in str(caught.value) and "pydantic" not in str(caught.value)


def test_every_bandwidth_is_a_partition_that_its_prolog_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "program", lambda name: f"/sbin/{name}")
    lab = plan()
    conf = files.slurm_conf(lab)
    for partition in ("lab", "high", "link-100mbit", "link-2.5gbit"):
        assert f"PartitionName={partition} Nodes=lab1,lab2 " in conf
    assert conf.count("OverSubscribe=EXCLUSIVE") == 2 and conf.count("Default=YES") == 1
    assert "rate 100mbit burst 12500 " in files.prolog(lab)
    assert "link-100mbit|link-2.5gbit)" in files.epilog(lab)
    assert "tc" not in files.epilog(plan(bandwidths=("none",)))


@pytest.mark.parametrize("cgroups", [True, False])
def test_memory_is_limited_with_and_without_cgroups(cgroups: bool) -> None:
    lab = plan(cgroups=cgroups)
    assert ("OverMemoryKill" in files.slurm_conf(lab)) is not cgroups
    assert ("ConstrainRAMSpace=yes" in files.cgroup_conf(lab)) is cgroups
    assert ("/sys/fs/cgroup" in files.node_script(lab, "lab1")) is cgroups


def test_scripts_are_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "program", lambda name: f"/sbin/{name}")
    lab = plan(hidden=(Path("/tmp"), Path("/home/with space"), Path("/tmp/deeper")))
    for number, text in enumerate((files.prolog(lab), files.epilog(lab), files.node_script(lab, "lab2"))):
        script = tmp_path / f"{number}.sh"
        script.write_text(text)
        assert subprocess.run(["sh", "-n", str(script)], capture_output=True).returncode == 0, text
    hidden = [line for line in files.node_script(lab, "lab2").splitlines() if line.endswith(("/tmp", "space'"))]
    assert [line.partition("tmpfs tmpfs ")[2] or line.rpartition("tmpfs ")[2] for line in hidden] == [
        "'/home/with space'",
        "/tmp",
    ]


def test_without_root_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cluster, "_alone", lambda name: pytest.fail(f"lab {name} would be touched"))
    with pytest.raises(OSError, match=r"^a lab requires root .*Use sudo$"):
        cluster.up(requested(folder=Path("/srv/never-made")))
    with pytest.raises(OSError, match="requires root"):
        cluster.down("lab", Path("/srv/never-made"))
    assert not Path("/srv/never-made").exists()


def test_a_lab_that_is_not_there_is_not_found() -> None:
    assert members.folder_of("nosuch") is None
    with pytest.raises(ValueError, match=r"lab nosuch: not up. Start it with `rankwise lab up`"):
        cluster.find_lab("nosuch")


def test_down_deletes_what_up_made_and_nothing_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in ("need_root", "_kill_all", "_remove_cgroups"):
        monkeypatch.setattr(cluster, name, lambda *_: None)
    monkeypatch.setattr(cluster, "_LOCKS", tmp_path / "locks")
    monkeypatch.setattr(network, "remove_devices", lambda name: None)
    monkeypatch.setattr(files, "program", lambda name: f"/sbin/{name}")
    folder = tmp_path_factory.mktemp("d")
    (folder / "results").mkdir()
    (folder / "notes.txt").write_text("mine")
    lab = plan(name="nosuch", folder=folder)
    lab_file(folder).write_text(lab.model_dump_json())
    cluster._write_files(lab)
    (lab.shared / "shipped").write_text("to all")
    cluster.down("nosuch", folder)
    assert sorted(each.name for each in folder.iterdir()) == ["log", "notes.txt", "results", "shared"]
    assert (lab.shared / "shipped").exists()
    # Another Slurm's configuration makes no lab of a folder, a lab's own without its plan does.
    for text, left in (("ClusterName=other\n", True), (files.slurm_conf(lab), False)):
        (folder / "etc").mkdir()
        lab.slurm_conf.write_text(text)
        cluster.down("nosuch", folder)
        assert lab.slurm_conf.exists() is left
        shutil.rmtree(folder / "etc", ignore_errors=True)


@pytest.mark.parametrize("name", ["db", "etc", "state"])
def test_up_takes_no_folder_whose_content_down_would_delete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    monkeypatch.setattr(cluster, "why_no_lab", lambda: None)
    monkeypatch.setattr(cluster, "_LOCKS", tmp_path / "locks")
    monkeypatch.setattr(cluster, "_write_files", lambda plan: pytest.fail("a lab would be started"))
    folder = tmp_path_factory.mktemp("u")
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"--folder: {folder} has {name}, which is of no lab. Use another folder"):
        cluster.up(requested(name="nosuch", folder=folder))
    assert [each.name for each in folder.iterdir()] == [name]
