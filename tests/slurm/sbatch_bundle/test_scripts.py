"""The texts of manifests: as they were agreed (golden files), clean by shellcheck, and safe for whatever a study says.

`GOLDEN_FILES=write python -m pytest tests/slurm/sbatch_bundle/test_scripts.py` writes the golden files anew.
"""

import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.common.system.ports import free_port
from configs.targets.resources import Container
from configs.targets.target import SlurmTarget
from slurm.sbatch_bundle.scripts import (
    BundleLaunch,
    LargeModel,
    SbatchBundle,
    image_definition,
    multi_node_example,
    readme,
    run_script,
    sbatch_line,
    sbatch_script,
    setup_script,
)

GOLDEN = Path(__file__).parents[2] / "data" / "manifests"
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
PLAIN = SbatchBundle(
    study="noops",
    target=SlurmTarget(name="cluster", partition="batch", nodes=2, ranks_per_node=2),
    steps=[BundleLaunch(1, "0001-timed-1a2b3c4d"), BundleLaunch(2, "0002-timed-5e6f7081")],
    ranks=4,
)
FULL = SbatchBundle(
    study="openllama",
    target=SlurmTarget(
        name="gpus",
        nodes=2,
        gpus_per_node=1,
        cores_per_rank=8,
        memory_per_node="64G",
        time_limit_minutes=240,
        partition="gpu",
        account="def-group",
        qos="normal",
        constraint="[rack1|rack2]&a100",
        exclusive=True,
        extra={"mail-user": "somebody@example.org", "comment": 'two "nodes" for $5', "reboot": False},
        modules=["apptainer/1.3", "cuda 12"],
        setup=["ulimit -l unlimited", "export NCCL_DEBUG=INFO"],
        container=Container(
            image="/shared/images/it's here.sif", binds=["/data sets:/data:ro"], python="/opt/bin/python"
        ),
    ),
    steps=[
        BundleLaunch(2, "0001-timed-1a2b3c4d"),
        BundleLaunch(2, "0002-perf-1a2b3c4d", "perf"),
        BundleLaunch(2, "0003-nsys-1a2b3c4d", "nsys"),
    ],
    ranks=2,
    models=[LargeModel("0123456789abcdef", "open_llama_3b_v2", "/home/me/open llama")],
    profiler="nsys",
)
TEXTS = {
    "noops/submit.sbatch": sbatch_script(PLAIN),
    "noops/run.sh": run_script(PLAIN.target),
    "noops/README.md": readme(PLAIN, Path("noops")),
    "openllama/submit.sbatch": sbatch_script(FULL),
    "openllama/run.sh": run_script(FULL.target),
    "openllama/README.md": readme(FULL, Path("a folder")),
}
ANYTHING = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize("name", TEXTS)
def test_the_scripts_are_as_agreed(name: str) -> None:
    path = GOLDEN / name
    if os.environ.get("GOLDEN_FILES") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXTS[name])
    assert TEXTS[name] == path.read_text()


@pytest.mark.parametrize("name", [*(name for name in TEXTS if not name.endswith(".md")), "setup_multi_node.sh"])
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    text = TEXTS.get(name) or setup_script()
    done = subprocess.run([SHELLCHECK, "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def bash(
    script: str, *arguments: str, called_from: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run a script as bash reads it from a file; the environment is given whole."""
    return subprocess.run(
        ["bash", "-c", script, "script", *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd=called_from,
        capture_output=True,
    )


def stand_in(folder: Path) -> None:
    """An `apptainer` that says what it was told, one argument after the other."""
    (folder / "apptainer").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (folder / "apptainer").chmod(0o755)


@settings(max_examples=25)
@given(image=ANYTHING.filter(bool), source=ANYTHING, root=ANYTHING.filter(lambda text: not set(text) & set("/\0")))
def test_the_container_is_told_any_value_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, image: str, source: str, root: str
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    stand_in(folder)
    container = Container(image=image, binds=[source], python=image)
    try:
        work = folder / f"p{root}"
        work.mkdir()
    except OSError:
        return  # a name that is too long
    script = run_script(SlurmTarget(container=container))
    variables = {"PIPELINE_ROOT": str(work), "SCRATCH_ROOT": str(folder), "CODE_ROOT": "", "APPTAINER_IMAGE": image}
    done = bash(script, "slurm.launch", "jobs/1/job.json", **{**variables, "PATH": f"{folder}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode().split("\0")[:-1]
    assert said[-5:] == [image, image, "-m", "slurm.launch", "jobs/1/job.json"]
    assert said[-7:-5] == ["--bind", source]
    if set(root) & set(',:"\\\n'):
        doubled = str(work).replace('"', '""')
        assert f'type=bind,"source={doubled}",destination=/tmp/workspace' in said
    else:
        assert f"{work}:/tmp/workspace" in said


@settings(max_examples=40)
@given(name=ANYTHING.filter(bool), image=ANYTHING)
def test_the_job_is_told_any_value_as_it_is(name: str, image: str) -> None:
    """The two values that a user chooses freely, as bash reads them in submit.sbatch."""
    manifest = SbatchBundle(
        study="s",
        target=SlurmTarget(container=Container(image=image)) if image else SlurmTarget(),
        steps=[BundleLaunch(1, "0001-timed-0")],
        ranks=1,
        models=[LargeModel("00", name, "/models")],
    )
    lines = sbatch_script(manifest)
    calls = lines[lines.index("\nmodel 00 ") : lines.index("\nlaunch 1 ")]
    assigned = lines[lines.index("\nimage=") : lines.index("\nprofiler=")]
    done = bash(f"model() {{ printf '%s\\0' \"$2\"; }}{calls}{assigned}\nprintf '%s\\0' \"$image\"")
    assert done.stdout.decode().split("\0")[:-1] == [name, image]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a100&ib", '"a100&ib"'),
        ('two "nodes" for $5', '"two \\"nodes\\" for $5"'),
        ("back\\slash # no comment", '"back\\\\slash # no comment"'),
        (12, "12"),
    ],
)
def test_an_option_is_quoted_for_sbatch(value: str | int, written: str) -> None:
    """That sbatch reads it back as it was meant is tested in the lab (test_lab_manifests)."""
    assert sbatch_line("comment", value, "extra.comment") == f"#SBATCH --comment={written}"


def test_an_option_without_a_value_is_on_or_off() -> None:
    assert sbatch_line("exclusive", True, "exclusive") == "#SBATCH --exclusive"
    assert sbatch_line("exclusive", False, "exclusive") is None


@pytest.mark.parametrize(("option", "value"), [("array", "0-3"), ("nodes", 4), ("output", "x.log"), ("requeue", True)])
def test_an_option_that_the_script_sets_is_refused_by_name(option: str, value: str | int) -> None:
    """Tasks of an array measured the same launches in one folder at a time; another name of the log was passed over."""
    steps = [BundleLaunch(1, "0001-timed-1a2b3c4d")]
    with pytest.raises(ValueError, match=rf"targets.cluster.extra: {option} is set by Rankwise. Leave it out"):
        sbatch_script(SbatchBundle("noops", SlurmTarget(name="cluster", extra={option: value}), steps, ranks=1))
    off = sbatch_script(SbatchBundle("noops", SlurmTarget(name="cluster", extra={option: False}), steps, ranks=1))
    assert off == sbatch_script(SbatchBundle("noops", SlurmTarget(name="cluster"), steps, ranks=1))


def test_the_job_goes_to_the_cluster_that_the_target_names() -> None:
    """It went to whichever was at hand, whose partition of this name may have other nodes."""
    target = SlurmTarget(name="cluster", cluster="b", partition="batch")
    text = sbatch_script(SbatchBundle("noops", target, [BundleLaunch(1, "0001-timed-1a2b3c4d")], ranks=1))
    assert "#SBATCH --clusters=b\n" in text
    assert "--clusters" not in sbatch_script(PLAIN)


def test_what_an_option_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"extra\.comment: 'a\\nb' cannot be written in an #SBATCH line"):
        sbatch_line("comment", "a\nb", "extra.comment")
    with pytest.raises(ValueError, match=r"comment: got .*, expected one line"):
        SlurmTarget(extra={"comment": "a\nb"})


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({"NODE_RANK": "2"}, ["train.py"], "NODE_RANK: got 2, expected 0 to 1"),
        ({"NODE_RANK": "8", "NNODES": "08"}, ["train.py"], "NODE_RANK: got 8, expected 0 to 7"),
        ({"NNODES": "two"}, ["train.py"], "NNODES: got two, expected a whole number"),
        ({"MASTER_PORT": "70000"}, ["train.py"], "MASTER_PORT: got 70000, expected 1 to 65535"),
        ({}, [], "missing script"),
        ({}, ["missing.py"], "missing.py: no such file"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, ["train.py"], "cannot be resolved"),
        ({"MASTER_ADDR": "192.0.2.1"}, ["train.py"], "is not an address of"),
        (
            {"NODE_RANK": "1", "WAIT_SECONDS": "0", "MASTER_PORT": "1"},
            ["train.py"],
            "node 0 does not respond at localhost:1",
        ),
    ],
)
def test_the_setup_script_names_what_is_wrong(
    tmp_path: Path, variables: dict[str, str], arguments: list[str], said: str
) -> None:
    (tmp_path / "train.py").touch()
    script = tmp_path / "setup_multi_node.sh"
    script.write_text(setup_script())
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", script, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (2, 3) and said in done.stderr, done.stderr


def test_the_setup_script_names_one_interface(tmp_path: Path) -> None:
    """NCCL took `eth1` for the beginning of a name, and so eth10 as well, which may be on another network."""
    programs = {
        "ip": "echo '2: eth1    inet 127.0.0.1/8 scope global eth1'",
        "torchrun": 'echo "gloo $GLOO_SOCKET_IFNAME nccl $NCCL_SOCKET_IFNAME"',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "setup_multi_node.sh").write_text(setup_script())
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for own, seen in (({}, "=eth1"), ({"NCCL_SOCKET_IFNAME": "ib"}, "ib")):
        done = subprocess.run(
            ["bash", "setup_multi_node.sh", "train.py"],
            env=environment | own, cwd=tmp_path, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.stdout.endswith(f"gloo eth1 nccl {seen}\n"), done.stdout + done.stderr


def test_a_firewall_that_answers_nothing_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "setup_multi_node.sh").write_text(setup_script())
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # whoever comes after these gets no answer for two minutes
            sockets.enter_context(waiting := socket.socket()).setblocking(False)
            waiting.connect_ex(full.getsockname())
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NODE_RANK": "1"}
        environment |= {"WAIT_SECONDS": "0", "MASTER_PORT": str(full.getsockname()[1])}
        command = ["bash", "setup_multi_node.sh", "train.py"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 3 and "node 0 does not respond" in done.stderr, done.stderr


@pytest.mark.nightly
def test_the_multi_node_example_trains_by_the_setup_script(tmp_path: Path) -> None:
    (tmp_path / "setup_multi_node.sh").write_text(setup_script())
    (tmp_path / "multi_node_example.py").write_text(multi_node_example())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NNODES": "1"}
    environment |= {"MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    done = subprocess.run(
        ["bash", "setup_multi_node.sh", "multi_node_example.py"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Both write to one stream, perhaps on one line.
    assert "process 0 of 2" in done.stdout and "process 1 of 2" in done.stdout
    accuracy = re.search(r"trained on 2 processes: loss .*, accuracy ([0-9.]+)%", done.stdout)
    assert accuracy and float(accuracy[1]) > 95


def test_the_image_has_what_the_ranks_import() -> None:
    text = image_definition()
    for folder in ("configs", "engine", "slurm", "constraints.txt", "prefect.yaml", "hatch_build.py"):
        assert f"    {folder} /opt/rankwise/{folder}\n" in text


def test_what_the_setup_prints_names_no_launch(tmp_path: Path) -> None:
    """submit.sbatch takes what a module prints through run.sh for the next launch, as long as there is one."""
    (tmp_path / "python3").write_text('#!/bin/bash\necho "$3"\n')
    (tmp_path / "python3").chmod(0o755)
    target = SlurmTarget(setup=["echo ready", "printf more >&1"])
    variables = {"PIPELINE_ROOT": str(tmp_path), "CODE_ROOT": "", "APPTAINER_IMAGE": ""}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = bash(run_script(target), "slurm.sbatch_bundle.retry", "0001-timed-0-2", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"0001-timed-0-2\n", b"ready\nmore")


def submitted(
    folder: Path, called_from: Path | None = None, set_before: Mapping[str, str] = MappingProxyType({}), **programs: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run the job of PLAIN with stand-ins for programs; srun's has the path of the job file in $job."""
    programs["srun"] = f'job=${{@: -1}}\necho "$job" >> sruns\n{programs.get("srun", "")}'
    programs.setdefault("sacct", "exit 1")
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    for step in PLAIN.steps:
        (folder / "jobs" / step.job).mkdir(parents=True, exist_ok=True)
    (folder / "run.sh").write_text(run_script(PLAIN.target))
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PIPELINE_ROOT": str(folder)}
    return bash(sbatch_script(PLAIN), called_from=called_from, **{**variables, **set_before})


def test_folders_may_be_named_relative_to_where_sbatch_is_called(tmp_path: Path) -> None:
    """Each node entered PIPELINE_ROOT once more from within it, and looked for the others there."""
    work = tmp_path / "work"
    (work / "my bundle").mkdir(parents=True)
    said = '"$PWD" "$PIPELINE_ROOT" "$SCRATCH_ROOT" "$EXPERIMENT_ROOT" "$CODE_ROOT"'
    done = submitted(
        work / "my bundle",
        srun='while [ "$1" != bash ]; do shift; done; "$@"',
        python3=f'[ "$2" != slurm.launch ] || printf "%s\\0" {said} > told',
        called_from=work,
        set_before={"PIPELINE_ROOT": "my bundle", "EXPERIMENT_ROOT": "results", "CODE_ROOT": "../code"},
    )
    told = (work / "my bundle" / "told").read_text().split("\0")[:-1]
    bundle = f"{work}/my bundle"
    assert told == [bundle, bundle, f"{work}/.", f"{work}/results", f"{work}/../code"], done.stderr
    assert (work / "results" / "outputs" / "job_ids").read_text() == "7\n"


def test_a_job_whose_time_is_over_between_two_launches_has_not_succeeded(tmp_path: Path) -> None:
    ended = """echo '{"status":"completed"}' > "$(dirname "$job")/end_0.json"; kill -USR1 $PPID"""
    done = submitted(tmp_path, srun=ended)
    assert (tmp_path / "sruns").read_text().splitlines() == ["jobs/0001-timed-1a2b3c4d/job.json"]
    assert done.returncode == 3 and b"stopped: TIMEOUT" in done.stderr


def test_a_launch_that_begins_as_the_job_is_stopped_is_ended(tmp_path: Path) -> None:
    done = submitted(tmp_path, date="kill -USR1 $PPID; echo 12:00:00", srun="mkfifo f; read -r -t 4 <> f; touch whole")
    assert done.returncode == 3 and b"stopped: TIMEOUT" in done.stderr
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("began_on", [0, 1])
def test_a_launch_that_began_on_any_node_is_tried_again_in_a_folder_of_its_own(tmp_path: Path, began_on: int) -> None:
    """The end that a node left there would be believed, and not that of the second time."""
    own = tmp_path / "jobs" / "0002-timed-5e6f7081"
    own.mkdir(parents=True)
    (own / f"launcher_{began_on}.json").write_text("{}")
    done = submitted(tmp_path, python3='[ "$4" = missing ] && echo "$3-2" || true')
    assert done.returncode == 3, done.stderr
    started = [f"jobs/{name}/job.json" for name in ("0001-timed-1a2b3c4d", "0002-timed-5e6f7081-2")]
    assert (tmp_path / "sruns").read_text().splitlines() == started


def test_a_second_job_leaves_the_folder_to_the_first(tmp_path: Path) -> None:
    """Both measured the rest, and the same launch where they began at once: ranks of both left its results."""
    with (tmp_path / "submit.lock").open("w") as held:
        held.write("6")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        second = submitted(tmp_path)
        assert second.returncode == 2 and not (tmp_path / "sruns").exists()
        assert f"{tmp_path}: job 6 works in this folder. Submit with --dependency=singleton" in second.stderr.decode()
        unknown = submitted(tmp_path, flock="echo 'flock: 9: Function not implemented' >&2; exit 71")
        assert unknown.returncode == 3 and (tmp_path / "sruns").exists() and b"flock" not in unknown.stderr
    later = submitted(tmp_path, flock='exec /usr/bin/flock "$@"')
    assert later.returncode == 3 and (tmp_path / "submit.lock").read_text() == "7\n"
