"""A study under perf and under nsys, for real: planned, launched on two ranks, merged with their files, reported.

nsys is NVIDIA's and mostly not installed: a stand-in that obeys its documented command line takes its place.
"""

import os
import sys
from pathlib import Path

import pytest
import yaml

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.communication import CommunicationWorkload
from configs.workloads.generate import GenerateWorkload
from engine.profiling.nsys import gpus
from engine.profiling.perf import _Perf, read_counters, read_functions
from flows.cli.doctor.checks import check_profilers
from flows.server.local import lease_server
from reports.reading.load import StudyResult, load_run
from slurm.launcher.profilers import why_not
from tasks.campaign.records import collect_job
from tests.support.cluster.launches import launch, write_job
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import rankwise, rankwise_here

STUDY = {
    "study": "s",
    "models": [{"name": "tiny", "id": "synthetic:llama-1m@7"}],
    "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32},
    "experiments": {"strong": {"kind": "strong", "grow": "tp", "points": [2]}},
    "measuring": {"repeats": 1, "memory": False, "min_seconds": 0.01, "cell_timeout_seconds": 90},
}
NSYS = """#!{python}
import pathlib, subprocess, sys
assert sys.argv[1] == "profile"
program = sys.argv.index({python!r})
options = dict(zip(sys.argv[2:program:2], sys.argv[3:program:2]))
assert set(options) <= {{"--output", "--force-overwrite", "--trace", "--capture-range", "--capture-range-end"}}, options
code = subprocess.run(sys.argv[program:]).returncode
if {writes}:
    pathlib.Path(options["--output"] + ".nsys-rep").write_text(" ".join(sys.argv[program:]))
sys.exit(code)
"""


def measured(tmp_path: Path, profiler: str) -> tuple[RunPaths, StudyResult]:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    with lease_server() as lease:
        lease.wait_until_healthy()
        done = rankwise("run", path, "--set", f"measuring.profiler={profiler}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"1 cell, 1 measurement + 1 for {profiler}, 2 launches" in done.stdout
    run = RunPaths(tmp_path / "runs" / "s")
    return run, load_run(run)


@pytest.mark.nightly
@pytest.mark.skipif(why_not("perf") is not None, reason=f"no perf: {why_not('perf')}")
def test_perf_counts_one_pass_of_each_rank(tmp_path: Path) -> None:
    run, study = measured(tmp_path, "perf")
    ((key, result),) = study.cells.items()
    assert result.perf is not None and result.perf.completed and len(result.completed) == 1
    walls, busy = (result.perf.numbers_by_rank(name) for name in ("perf_wall_seconds", "perf_task_clock_seconds"))
    assert len(walls) == len(busy) == 2
    assert all(0 < seconds < wall + 0.25 for seconds, wall in zip(busy, walls, strict=True)), (
        "starting a rank takes seconds of CPU time: so much more than the pass took means that more than it was counted"
    )
    for rank in range(2):
        text = (run.records / key / f"perf-r0-a1.perf_rank_{rank}.txt").read_text()
        assert f"rank {rank} of 2: one pass after warm-up" in text and "task-clock" in text
        assert (run.records / key / f"perf-r0-a1.perf_rank_{rank}.data").read_bytes().startswith(b"PERFILE2")
    report = whole_report(run)
    assert "## Under a profiler" in report and "/perf-r0-a1.perf" in report
    assert "1 launch under perf" in report and "| perf pass |" in report
    assert not list(run.jobs.glob("*/parts/*")), "everything was merged"


@pytest.mark.slow
@pytest.mark.parametrize("writes", [True, False])
def test_nsys_runs_each_rank_and_its_reports_join_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS.format(python=sys.executable, writes=writes))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    work = CommunicationWorkload(operations=("all_reduce",), sizes_bytes=(1024,))
    measurement = Measurement(cell=Cell(workload=work, layout=Layout(tp=2)), repeat=0, attempt=1)
    paths, run = write_job(tmp_path, [measurement]), RunPaths(tmp_path)
    job = Job.model_validate_json(paths.job.read_bytes())
    paths.job.write_text(job.model_copy(update={"measuring_pass": "nsys"}).model_dump_json())
    assert launch(paths).status is Status.COMPLETED, paths.rank_log(0).read_text()
    (record,) = collect_job(run, job.name).records
    if not writes:
        assert record.status is Status.FAILED
        assert record.failure is not None and "nsys wrote no report of rank 0" in record.failure.message
        return
    assert record.status is Status.COMPLETED
    assert all(seconds and float(seconds) > 0 for seconds in record.rank_figures["nsys_wall_seconds"])
    for rank in range(2):
        file = run.records / measurement.cell.key / f"nsys-r0-a1.nsys_rank_{rank}.nsys-rep"
        assert file.read_text().endswith(f"-m engine.worker {paths.job}")
        text = paths.rank_log(rank).read_text()
        assert text.count("completed in") == 1, "the rank itself made the measurement once"


def test_a_missing_profiler_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = rankwise_here("run", path, "--set", "measuring.profiler=nsys", cwd=tmp_path)
    assert done.returncode == 2
    assert "measuring.profiler: nsys: not found on PATH; install Nsight Systems" in (done.stdout + done.stderr)
    assert not (tmp_path / "runs").exists()


def test_perf_that_the_kernel_refuses_is_said_with_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "perf"
    program.write_text("#!/bin/sh\necho 'No permission to enable task-clock event.' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    problem = why_not("perf")
    assert problem and "No permission to enable task-clock event." in problem and "--cap-add PERFMON" in problem
    perf, nsys = check_profilers()
    assert (perf.name, perf.state) == ("perf", "missing") and "--cap-add PERFMON" in str(perf.remedy)
    assert (nsys.state, nsys.detail) == ("missing", "not found on PATH")  # shown as absent, as what is not needed is
    assert str(nsys.remedy).startswith("not needed without measuring.profiler; else install Nsight Systems")
    assert "leave" not in str(perf.remedy) + str(nsys.remedy)


def test_counters_that_the_machine_does_not_give_are_unknown() -> None:
    csv = (
        "# started on Sat Nov 21 2026\n\n"
        "1020.44;msec;task-clock:u;1020438782;100.00;0.992;CPUs utilized\n"
        "593;;context-switches;1020441426;100.00;581.123;/sec\n"
        "<not supported>;;cycles;0;100.00;;\n"
        "<not counted>;;instructions:u;0;0.00;;\n"
    )
    figures = read_counters(csv)
    assert figures["perf_task_clock_seconds"] == pytest.approx(1.02044)
    assert figures["perf_context_switches"] == 593
    assert (
        figures["perf_cycles"] is None and figures["perf_instructions"] is None and figures["perf_page_faults"] is None
    )


def test_counters_of_both_kinds_of_cores_are_added() -> None:
    """Intel's hybrid processors: they were called unknown."""
    csv = (
        "851129;;cpu_atom/cycles/;120;40.00;;\n2788555;;cpu_core/cycles/;180;60.00;;\n"
        "<not counted>;;cpu_atom/instructions/u;0;0.00;;\n2974030;;cpu_core/instructions/u;300;100.00;;\n"
    )
    figures = read_counters(csv)
    assert (figures["perf_cycles"], figures["perf_instructions"]) == (3_639_684, 2_974_030)
    assert figures["perf_page_faults"] is None


def test_a_launch_under_nsys_makes_one_measurement() -> None:
    draft = {"model": "synthetic:llama-1m@0", "target": "local"}
    cells = [Cell(workload=GenerateWorkload(batch_size=size), **draft) for size in (1, 2)]
    measurements = [Measurement(cell=cell, repeat=0, attempt=1) for cell in cells]
    assert len(pack_launches(measurements, "perf", seed=0)) == 1
    assert [len(launch.measurements) for launch in pack_launches(measurements, "nsys", seed=0)] == [1, 1]


PERF = """#!{python}
import os, sys
orders, answers = (int(number) for number in sys.argv[sys.argv.index("--control") + 1][3:].split(","))
print(os.environ.get("LC_ALL"), flush=True)
while os.read(orders, 64):
    os.write(answers, b"ack\\n")
"""


def test_perf_writes_numbers_with_a_point_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "perf").write_text(PERF.format(python=sys.executable))
    (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with _Perf(["stat"]) as program:
        program.say("enable")
        assert program._said() == "C"


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert [gpus(visible, tmp_path) for visible in (None, "1", "", "0,1,2")] == [2, 1, 0, 2]
    assert [gpus(visible, tmp_path) for visible in ("-1", "0,-1,1")] == [0, 1]  # -1 hides what follows


def test_functions_are_read_from_the_report_of_perf() -> None:
    report = (
        "# Samples: 8 of event 'cpu-clock'\n\n"
        "    25.00%;2;linear-1e90c9f4c52d55a7d0eafe1c061753be.so;[.] groups\n"
        "    75.00%;6;[kernel.kallsyms];[k] operator;semicolon\n"
    )
    assert read_functions(report) == [(6, "[kernel.kallsyms]", "operator;semicolon"), (2, "linear", "groups")]
