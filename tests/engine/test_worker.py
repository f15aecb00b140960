"""Ranks for real: parts, faults, memory, full disk. Launches are shared by the tests that look at them."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from configs.common.failure_kinds import PEER_LOST
from configs.plans.job import JobEnd
from configs.plans.paths import JobPaths
from configs.records.record import Status, read_part
from engine.parallel.communicator import connection_failed
from engine.rank.failures import classify
from tests.support.cluster.launches import assert_nothing_left, launch, noop_measurement, part, read_progress, write_job

MIB = 2**20
ENV = {"TORCH_TEST_NOTE": "kept", "RANK_TEST_TOKEN": "hf_do_not_keep_me"}
PAIR = [noop_measurement(f"pair {number}", ranks=2, env=ENV, items=3) for number in range(3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobPaths, JobEnd]:
    """Two ranks that make three measurements."""
    paths = write_job(tmp_path_factory.mktemp("run"), PAIR)
    return paths, launch(paths)


def test_each_rank_leaves_a_part_of_every_measurement(pair: tuple[JobPaths, JobEnd]) -> None:
    paths, end = pair
    assert (end.status, end.return_code) == (Status.COMPLETED, 0)
    assert len(list(paths.parts.iterdir())) == 3 * 2 * 2, "a part and its samples, and no temporary file"
    for measurement in PAIR:
        for rank in (0, 1):
            ours = part(paths, measurement, rank)
            assert (ours.measurement, ours.rank, ours.status, ours.failure) == (
                measurement.name,
                rank,
                Status.COMPLETED,
                None,
            )
            assert ours.figures["items"] == (2, 1)[rank], "three items over two ranks"
            with np.load(paths.samples(measurement.name, rank)) as samples:
                assert samples["pass_seconds"].shape == (1,)
                # A rank may leave the first barrier late, and then waits less: only its own sleep is certain.
                assert (0.010, 0.005)[rank] <= samples["pass_seconds"][0] < 30


def test_figures_and_environment(pair: tuple[JobPaths, JobEnd]) -> None:
    paths, _ = pair
    first, second = part(paths, PAIR[0], 0), part(paths, PAIR[0], 1)
    assert second.environment == {}, "rank 0's stands for all"
    environment = first.environment
    assert environment["backend"] == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")
    # That of the distribution: torch's own has +cu130, too, where the index's build has it in no name.
    assert environment["torch"] == importlib.metadata.version("torch")
    assert environment["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert (environment["threads"], environment["cores_per_rank"]) == (1, 1)
    assert environment["memory_bytes"] == psutil.virtual_memory().total
    variables = environment["variables"]
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["TORCH_TEST_NOTE"] == "kept"
    assert variables["RANK_TEST_TOKEN"] == "(hidden)"
    everything = b"".join(file.read_bytes() for file in paths.folder.rglob("*") if file.is_file() and file != paths.job)
    assert ENV["RANK_TEST_TOKEN"].encode() not in everything
    for figures in (first.figures, second.figures):
        assert figures["threads"] == 1
        assert 0 <= float(figures["cpu_seconds"] or 0) <= float(figures["measurement_seconds"] or 0) + 0.1
        assert 0.005 <= float(figures["measurement_seconds"] or 0) < 10
    assert first.figures["cpu_busy_seconds"] is not None
    assert first.figures["machine_cores"] == environment["cores"]
    assert "cpu_busy_seconds" not in second.figures


def test_ranks_are_pinned_apart_where_cores_suffice(pair: tuple[JobPaths, JobEnd]) -> None:
    paths, _ = pair
    environment = part(paths, PAIR[0], 0).environment
    cores = len(os.sched_getaffinity(0))
    assert environment["cores"] == cores
    assert environment["cores_shared"] is (cores < 2)


def test_progress_is_overwritten_in_place(pair: tuple[JobPaths, JobEnd]) -> None:
    paths, _ = pair
    for rank in (0, 1):
        assert paths.progress(rank).stat().st_size == 4096
        progress = read_progress(paths, rank)
        assert (progress.rank, progress.phase, progress.measurement) == (rank, "finished", None)


def test_one_rank_goes_on_after_a_failure(tmp_path: Path) -> None:
    measurements = [
        noop_measurement("raises", fault="raise"),
        noop_measurement("no memory", fault="out_of_memory"),
        noop_measurement("fault is over", fault="kill", fault_attempts=1, attempt=2),
    ]
    paths = write_job(tmp_path, measurements)
    end = launch(paths)
    assert end.status is Status.COMPLETED
    raised, no_memory, fine = (part(paths, measurement) for measurement in measurements)
    assert raised.failure is not None and no_memory.failure is not None
    assert (raised.status, raised.failure.kind) == (Status.FAILED, "RuntimeError")
    assert raised.failure.message == "the noop workload was told to raise"
    assert raised.failure.log == "jobs/job/rank_0.log"
    assert (no_memory.status, no_memory.failure.kind) == (Status.OUT_OF_MEMORY, "MemoryError")
    assert (fine.status, fine.environment["backend"]) == (Status.COMPLETED, None)
    log = (tmp_path / raised.failure.log).read_text()
    assert "Traceback" in log and "MemoryError" in log
    assert_nothing_left(paths.folder)


@pytest.mark.slow
def test_memory_of_a_cell_does_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    large = noop_measurement("large", ranks=2, allocate_bytes=300 * MIB)
    small = noop_measurement("small", ranks=2, allocate_bytes=40 * MIB)
    after = write_job(tmp_path, [large, small], name="after", memory=True)
    alone = write_job(tmp_path, [small], name="alone", memory=True)
    for paths in (after, alone):
        assert launch(paths).status is Status.COMPLETED
    for rank in (0, 1):
        first, second = part(alone, small, rank).figures, part(after, small, rank).figures
        peaks = [float(figures["peak_memory_bytes"] or 0) for figures in (first, second)]
        assert abs(peaks[0] - peaks[1]) < 2 * MIB
        growth = float(part(after, large, rank).figures["memory_growth_bytes"] or 0)
        assert 300 * MIB <= growth < 310 * MIB
        assert 40 * MIB <= float(second["memory_growth_bytes"] or 0) < 50 * MIB
        assert float(second["baseline_memory_bytes"] or 0) + float(second["memory_growth_bytes"] or 0) == peaks[1]


def test_memory_pass_says_by_which_signal_its_child_ended(tmp_path: Path) -> None:
    measurements = [noop_measurement("fine"), noop_measurement("killed", fault="kill")]
    paths = write_job(tmp_path, measurements, memory=True)
    ended = subprocess.run([sys.executable, "-m", "engine.worker", str(paths.job)], timeout=600)
    assert ended.returncode == 1
    progress = read_progress(paths)
    assert (progress.phase, progress.measurement, progress.kind) == ("failed", measurements[1].name, "SIGKILL")
    assert part(paths, measurements[0]).status is Status.COMPLETED
    assert_nothing_left(paths.folder)


def test_full_disk_keeps_what_is_there_and_is_reported(tmp_path: Path) -> None:
    """A job folder on a tmpfs of 320 KiB, in a mount namespace of its own.

    As root the namespace is made directly; as another user with a user namespace (`unshare -rm`).
    """
    route = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*route, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(route)} mount -t tmpfs is not allowed here, and there is no other route to a full disk")
    measurements = [noop_measurement(str(number), seconds=0) for number in range(100)]
    paths = write_job(tmp_path / "small", measurements)
    script = (
        'cp -r "$1" "$2" && mount -t tmpfs -o size=320k none "$1" && cp -r "$2/." "$1"'
        ' && "$3" -m slurm.launch "$4"; cp -r "$1/." "$2"'
    )
    folders = [str(tmp_path / "small"), str(tmp_path / "copy")]
    command = [*route, "sh", "-c", script, "sh", *folders, sys.executable, str(paths.job)]
    subprocess.run(command, check=True, timeout=600)
    copy = JobPaths(tmp_path / "copy" / "jobs" / "job")
    progress = read_progress(copy)
    assert (progress.phase, progress.kind) == ("failed", "OSError")
    assert "No space left on device" in (progress.message or "")
    assert str(paths.parts) in (progress.message or ""), "it says what could not be written"
    end = JobEnd.model_validate_json(copy.end.read_bytes())
    assert (end.status, end.measurement, end.rank) == (Status.FAILED, progress.measurement, 0)
    assert "No space left on device" in (end.message or "")
    written = [measurement for measurement in measurements if copy.part(measurement.name, 0).exists()]
    assert 5 < len(written) < len(measurements)
    assert [measurement.name for measurement in measurements[: len(written)]] == [
        measurement.name for measurement in written
    ], "no hole"
    assert progress.measurement == measurements[len(written)].name
    for measurement in written:
        assert read_part(copy.part(measurement.name, 0)).status is Status.COMPLETED
        with np.load(copy.samples(measurement.name, 0)) as samples:
            assert samples["pass_seconds"].shape == (1,)
    assert_nothing_left(paths.folder)


NCCL_WITHOUT_MEMORY = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    ("error", "ranks", "expected"),
    [
        (MemoryError(), 1, (Status.OUT_OF_MEMORY, "MemoryError")),
        (torch.OutOfMemoryError("no"), 2, (Status.OUT_OF_MEMORY, "OutOfMemoryError")),
        (NotImplementedError("fp8"), 1, (Status.UNSUPPORTED, "NotImplementedError")),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 2, (Status.FAILED, PEER_LOST)),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 1, (Status.FAILED, "RuntimeError")),
        (RuntimeError("Timed out waiting 1000ms for recv operation"), 2, (Status.TIMEOUT, PEER_LOST)),
        (torch.distributed.DistBackendError("NCCL"), 2, (Status.FAILED, PEER_LOST)),
        (torch.distributed.DistBackendError(NCCL_WITHOUT_MEMORY), 2, (Status.OUT_OF_MEMORY, "DistBackendError")),
        (RuntimeError("CUDA error: out of memory"), 1, (Status.OUT_OF_MEMORY, "RuntimeError")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), 1, (Status.OUT_OF_MEMORY, "RuntimeError")),
        (ValueError("timeout must be positive"), 2, (Status.FAILED, "ValueError")),
    ],
)
def test_classification(error: Exception, ranks: int, expected: tuple[Status, str]) -> None:
    assert classify(error, ranks) == expected


def test_a_communicator_without_memory_names_no_other_rank_as_lost() -> None:
    """A GPU that NCCL's buffers did not fit on was recorded as another rank that had ended."""
    assert connection_failed(torch.distributed.DistBackendError(NCCL_WITHOUT_MEMORY)) is None
    assert connection_failed(torch.distributed.DistBackendError("NCCL communicator was aborted")) is False


def test_torchs_own_allocator_error_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert classify(caught.value, 1) == (Status.OUT_OF_MEMORY, "RuntimeError")


def test_worker_begins_without_heavy_imports() -> None:
    """The bond to the parent is made before anything that takes long."""
    check = "import sys, engine.worker; print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"
