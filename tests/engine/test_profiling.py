"""The profile pass: intervals, what is communication and what compute, a real launch, and a GPU's state by NVML."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from configs.common.execution import Layout
from configs.common.intervals import Intervals, difference, intersection, intervals, length, union
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from configs.workloads.train import TrainWorkload
from engine.context import Context, RankResult
from engine.kernels import linear, memory
from engine.models.llama import Llama
from engine.parallel.communicator import CommunicationEvent, Communicator, Communicators
from engine.profiling.collectives import NO_GROUP, RecordedCollective, collectives, columns, group_of
from engine.profiling.communicators import Listening
from engine.profiling.events import ProfilerEvent
from engine.profiling.gpu import GpuSampler
from engine.profiling.record import profiled_measurement
from engine.profiling.split import split_region
from tests.support.nvml import build_driver

CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}

# --- intervals ---------------------------------------------------------------------------------------------


def test_intervals_by_hand() -> None:
    one, other = intervals([(4, 6), (0, 2), (1, 3), (3, 3)]), intervals([(2, 5)])
    assert union(one).tolist() == [[0, 3], [4, 6]]
    assert union(one, other).tolist() == [[0, 6]]
    assert intersection(one, other).tolist() == [[2, 3], [4, 5]]
    assert difference(one, other).tolist() == [[0, 2], [5, 6]]
    assert length(one) == 5
    nothing = intervals()
    assert len(union()) == len(union(nothing)) == len(intersection(one, nothing)) == 0
    assert difference(one, nothing).tolist() == union(one).tolist()
    assert length(difference(nothing, one)) == 0


PAIRS = some.lists(some.tuples(some.integers(0, 30), some.integers(0, 30)).map(sorted), max_size=8)


def moments(parts: Intervals) -> set[int]:
    """The unit steps that whole-numbered intervals cover."""
    return {step for begin, end in parts.tolist() for step in range(int(begin), int(end))}


@given(PAIRS, PAIRS)
def test_intervals_are_sets_of_moments(left: list[list[int]], right: list[list[int]]) -> None:
    one, other = intervals(left), intervals(right)
    for found, expected in (
        (union(one, other), moments(one) | moments(other)),
        (intersection(one, other), moments(one) & moments(other)),
        (difference(one, other), moments(one) - moments(other)),
    ):
        assert moments(found) == expected
        assert length(found) == len(expected)
        assert all(begin < end for begin, end in found.tolist())
        assert all(end < begin for (_, end), (begin, _) in zip(found.tolist(), found.tolist()[1:], strict=False))


# --- the split ---------------------------------------------------------------------------------------------


def operator(began: float, ended: float, name: str = "aten::mm", thread: int = 1, **more: Any) -> ProfilerEvent:
    return ProfilerEvent(name, more.pop("kind", "cpu_op"), thread, began, ended, **more)


def kernel(began: float, ended: float, name: str = "gemm") -> ProfilerEvent:
    return ProfilerEvent(name, "kernel", 7, began, ended)


def shares(
    wall: float, events: list[ProfilerEvent], reported: list[RecordedCollective] | None = None
) -> tuple[float, ...]:
    """Compute, communication, exposed communication, idle."""
    found = split_region(wall, events, collectives(events, reported or []))
    return tuple(
        round(share, 9)
        for share in (
            found.compute_share, found.communication_share, found.exposed_communication_share, found.idle_share,
        )
    )  # fmt: skip


def test_overlapping_work_counts_once() -> None:
    nested = [operator(0, 4), operator(1, 2), operator(3, 5, thread=2)]
    assert shares(10, nested) == (0.5, 0, 0, 0.5)


def test_an_asynchronous_sum_is_in_flight_from_the_call_to_its_end() -> None:
    events = [
        operator(0, 6),
        operator(6, 6.5, "c10d::allreduce_"),
        operator(6.5, 8),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 7, 9, 4096),
        operator(7.5, 8.5, "aten::copy_", thread=2),  # gloo's own copying is no compute
    ]
    # In flight from 6 to 9, 6.5 to 8 of it behind an operator.
    assert shares(10, events) == (0.75, 0.3, 0.15, 0.1)
    (found,) = collectives(events, [])
    assert (found.operation, found.began, found.ended, found.size_bytes) == ("allreduce", 6, 9, 4096)


def test_a_collective_inside_of_an_operator_is_communication() -> None:
    inside = [operator(0, 8, "TensorParallelBackward"), operator(2, 6, "c10d::allgather_")]
    assert shares(8, inside) == (0.5, 0.5, 0.5, 0)
    shared_memory = RecordedCollective("all_reduce", 5, 0, 64, 2, 6, thread=1)
    assert shares(8, inside[:1], [shared_memory]) == (0.5, 0.5, 0.5, 0)


def test_what_our_communicator_reports_is_not_counted_twice() -> None:
    reported = RecordedCollective("all_reduce", 5, 3, 64, 1, 4, thread=1)
    events = [
        operator(1.1, 1.2, "c10d::allreduce_"),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 1.3, 3.9, 64),
        operator(5, 5.1, "c10d::barrier"),
    ]
    found = collectives(events, [reported])
    assert [(item.operation, item.began, item.sequence) for item in found] == [("all_reduce", 1, 3), ("barrier", 5, 0)]


def test_collectives_are_paired_by_name_and_numbered_by_operation() -> None:
    events = [
        operator(0, 1, "c10d::allreduce_"),
        operator(1, 2, "c10d::broadcast_"),
        operator(2, 3, "c10d::allreduce_"),
        ProfilerEvent("gloo:broadcast", "user_annotation", 3, 1.5, 4, 8),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 0.5, 5, 16),
        ProfilerEvent("gloo:all_reduce", "user_annotation", 2, 5, 6, 32),
    ]
    found = collectives(events, [])
    assert [(item.operation, item.sequence, item.began, item.ended, item.size_bytes) for item in found] == [
        ("allreduce", 0, 0, 5, 16), ("broadcast", 0, 1, 4, 8), ("allreduce", 1, 2, 6, 32),
    ]  # fmt: skip
    assert found[0].group == found[2].group == group_of("allreduce") != found[1].group
    made = columns(found)
    assert made["collective_seconds"].tolist() == [5, 3, 4] and made["collective_bytes"].tolist() == [16, 8, 32]
    assert all(column.ndim == 1 for column in made.values())


def gloo(began: float, ended: float, name: str, size: int | None = None) -> ProfilerEvent:
    return ProfilerEvent(f"gloo:{name}", "user_annotation", 2, began, ended, size)


def test_a_functional_collective_is_one() -> None:
    """As torch 2.13 records those of DTensors: three operators on the thread, one execution by gloo."""
    events = [
        operator(0, 2, "_c10d_functional::all_reduce", size_bytes=8),
        operator(0.5, 1.9, "c10d::allreduce_"),
        gloo(1, 4, "all_reduce", 8),
        operator(2, 2.2, "_c10d_functional::_wrap_tensor_autograd", size_bytes=8),
        operator(3, 4, "_c10d_functional::wait_tensor", size_bytes=8),
        operator(6, 7, "_c10d_functional::all_gather_into_tensor", size_bytes=8),
        operator(6.1, 6.9, "c10d::allgather_into_tensor_coalesced_"),
        gloo(6.2, 7.5, "all_gather", 8),
    ]
    found = [(item.operation, item.began, item.ended, item.size_bytes) for item in collectives(events, [])]
    assert found == [("allreduce", 0.5, 4, 8), ("allgather", 6.1, 7.5, 8)]


def test_an_execution_is_of_a_request_before_it() -> None:
    """Of FSDP and the norm of its gradients: gloo sums where parts were asked for. Each lasted until the next one."""
    events = [
        operator(0, 0.2, "c10d::_reduce_scatter_base_", size_bytes=12),
        gloo(0.1, 1, "all_reduce", 8),
        operator(4, 4.2, "c10d::_reduce_scatter_base_", size_bytes=12),
        gloo(4.1, 5, "all_reduce", 8),
        operator(8, 8.2, "c10d::allreduce_"),
        gloo(8.1, 9, "all_reduce", 4),
        operator(10, 10.1, "c10d::monitored_barrier_"),  # has no event of gloo's
        gloo(10.5, 10.6, "broadcast", 4),  # asked for before the region
    ]
    found = [(item.began, item.ended, item.size_bytes) for item in collectives(events, [])]
    assert found == [(0, 1, 8), (4, 5, 8), (8, 9, 4), (10, 10.1, None), (10.5, 10.6, 4)]


def test_waiting_for_what_was_asked_for_is_communication() -> None:
    events = [operator(0, 4), operator(4, 9, "_c10d_functional::wait_tensor")]
    assert shares(10, events) == (0.4, 0.5, 0.5, 0.1)
    assert collectives(events, []) == []


def test_on_a_gpu_kernels_count_and_what_the_cpu_launches_does_not() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)"
    events = [
        operator(0, 9),
        operator(1, 3, "c10d::allreduce_"),
        kernel(2, 5),
        kernel(4, 8, nccl),
        ProfilerEvent("Memcpy DtoH", "gpu_memcpy", 7, 8, 9),
    ]
    assert shares(10, events) == (0.4, 0.4, 0.3, 0.3)
    (found,) = collectives(events, [])
    assert (found.operation, found.size_bytes) == ("allreduce", None)
    (found,) = collectives(events, [RecordedCollective("all_reduce", 5, 2, 64, 1, 1.1, thread=1, on_device=True)])
    assert (found.operation, found.group, found.sequence, found.size_bytes) == ("all_reduce", 5, 2, 64)
    assert (found.began, found.ended) == (4, 8)


def test_nothing_beyond_the_region_counts() -> None:
    assert shares(4, [operator(3, 9)]) == (0.25, 0, 0, 0.75)


# --- a real launch -----------------------------------------------------------------------------------------

RANK_PROGRAM = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from configs.plans.job import Job
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from engine.context import Context, RankResult
from engine.kernels import linear
from engine.training import bounds, steps
from engine.workloads import train as workload
from engine.context import Context
from engine.profiling.record import profiled_measurement

rank, folder, late = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
job = Job.model_validate_json((folder / "job.json").read_bytes())
manifest = ModelManifest.model_validate_json((folder / "manifest.json").read_bytes())
paths = JobPaths(folder)
paths.parts.mkdir(exist_ok=True)
context = Context(job, paths, rank, 2, torch.device("cpu"), manifest, dist.barrier)
plain = steps.one_step
def step(run, number, rate, watch):
    if rank == 1 and number == bounds.PROFILE_WARMUP_STEPS:
        time.sleep(late)
    return plain(run, number, rate, watch)
steps.one_step = step
outcome = profiled_measurement(job.measurements[0], context, workload.run)
np.savez(folder / f"{rank}.npz", **outcome.samples)
(folder / f"{rank}.json").write_text(json.dumps(outcome.figures))
sys.stdout.flush()
os._exit(0)
"""


def profiled_training(
    folder: Path, late_seconds: float
) -> tuple[Measurement, list[dict[str, Any]], list[dict[str, Any]]]:
    """Two ranks train a tiny model, rank 1 comes late to the profiled step: the measurement, figures and columns by
    rank."""
    cell = Cell(
        model="m", workload=TrainWorkload(global_batch_size=4, sequence_length=16, steps=6), layout=Layout(dp=2)
    )
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    job = Job(
        name="job",
        study="s",
        measuring_pass="profile",
        measuring=Measuring(),
        measurements=(measurement,),
        ranks_per_node=2,
        timeout_seconds=60,
        inputs=str(folder),
        cache=str(folder),
    )
    manifest = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=CONFIG)
    folder.mkdir()
    (folder / "job.json").write_text(job.model_dump_json())
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    program = folder / "rank.py"
    program.write_text(RANK_PROGRAM)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(folder), str(late_seconds)], env=environment)
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=600) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    figures = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return measurement, figures, [dict(np.load(folder / f"{rank}.npz")) for rank in (0, 1)]


@pytest.mark.slow
def test_two_ranks_that_train(tmp_path: Path) -> None:
    late = 3.0  # on a busy machine the other rank is late too, by tenths of a second
    measurement, figures, samples = profiled_training(tmp_path / "job", late)
    with torch.device("meta"):
        gradient_bytes = sum(4 * parameter.numel() for parameter in Llama(ModelConfig.parse(CONFIG)).parameters())
    for figure, columns_of_rank in zip(figures, samples, strict=True):
        parts = [figure[f"{name}_share"] for name in ("compute", "exposed_communication", "idle")]
        assert sum(parts) == pytest.approx(1) and all(0 <= part <= 1 for part in parts)
        assert 0 < figure["exposed_communication_share"] <= figure["communication_share"] < 1
        assert figure["compute_share"] > 0
        assert figure["collectives"] == len(columns_of_rank["collective_seconds"]) > 0
        assert figure["communication_bytes"] == gradient_bytes
        assert figure["profile_wall_seconds"] > late
        assert columns_of_rank["collective_seconds"].sum() <= figure["collectives"] * figure["profile_wall_seconds"]
    # The same collectives on both; the early rank was in its first one for as long as the other slept.
    for name in ("collective_operation", "collective_group", "collective_sequence", "collective_bytes"):
        assert samples[0][name].tolist() == samples[1][name].tolist()
    first = [float(part["collective_seconds"][0]) for part in samples]
    assert first[0] - first[1] == pytest.approx(late, rel=0.4)
    assert figures[0]["exposed_communication_share"] * figures[0]["profile_wall_seconds"] > 0.8 * late
    assert figures[1]["idle_share"] * figures[1]["profile_wall_seconds"] > 0.8 * late
    for rank in (0, 1):
        trace = json.loads(
            gzip.decompress((tmp_path / "job/parts" / f"{measurement.name}.trace_rank_{rank}.json.gz").read_bytes())
        )
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"profiled region", "gloo:all_reduce", "aten::mm"} <= names


# --- our own communicators and kernels ----------------------------------------------------------------------


class OneOfTwo(Communicator):
    """A communicator of which only the listener is of use: transports have tests of their own."""

    def __init__(self, index: int, size: int = 2, transport: str = "shared memory") -> None:
        self.ranks, self.size, self.index, self.transport = tuple(range(size)), size, index, transport
        self.listener = None

    def tell(self, operation: str, began: float, ended: float, size_bytes: int = 8) -> None:
        assert self.listener is not None
        self.listener(CommunicationEvent(operation, self.ranks, 99, size_bytes, began, ended))


def heard(
    index: int, operations: list[str], size: int = 2, transport: str = "shared memory"
) -> list[RecordedCollective]:
    """What is reported of operations that take a second each; the first began before the region."""
    end = OneOfTwo(index, size, transport)
    alone = Communicator((index,), 0)
    with Listening(Communicators(tensor=end, pipeline=end, data=alone, world=end)) as listening:
        for place, operation in enumerate(operations):
            end.tell(operation, 99.0 + place, 100.0 + place)
    assert end.listener is None
    return listening.collectives(100.0)


def test_both_ends_number_what_they_do_together_alike() -> None:
    mine = heard(0, ["barrier", "all_reduce", "send", "send", "receive", "all_reduce"])
    theirs = heard(1, ["barrier", "all_reduce", "receive", "send", "receive", "all_reduce"])
    assert (mine[0].began, mine[0].ended, mine[0].size_bytes) == (0, 1, 8) and mine[
        0
    ].thread == threading.get_native_id()

    def places(found: list[RecordedCollective], operation: str) -> list[tuple[int, int]]:
        return [(item.group, item.sequence) for item in found if item.operation == operation]

    assert places(mine, "all_reduce") == places(theirs, "all_reduce") == [(group_of(0, 1), 0), (group_of(0, 1), 1)]
    assert places(mine, "send") == places(theirs, "receive") and len(places(mine, "send")) == 2
    assert places(mine, "receive") == places(theirs, "send") != places(mine, "send")[:1]
    assert [item.group for item in heard(0, ["barrier", "send"], size=3)] == [NO_GROUP]
    assert [item.on_device for item in heard(0, ["barrier", "all_reduce"], transport="nccl")] == [True]


def test_kernels_and_communicators_are_in_the_split_and_in_the_trace(tmp_path: Path) -> None:
    layer = linear.pack_linear(torch.randn(64, 64))
    paths = JobPaths(tmp_path)
    paths.parts.mkdir()
    end = OneOfTwo(0)

    def workload(measurement: Measurement, context: Context) -> RankResult:
        with context.profiled():
            for _ in range(20):
                layer(torch.ones(1, 64))
            memory.aligned_bytes(64)  # a public function of a module of kernels
            began = time.perf_counter()
            time.sleep(0.05)
            end.tell("all_reduce", began, time.perf_counter(), 4096)
        with context.profiled():  # only the first counts
            time.sleep(0.05)
        return RankResult({"passes": 1}, {"pass_seconds": np.ones(1)})

    measurement = Measurement(cell=Cell(workload=NoopWorkload()), repeat=0, attempt=1)
    job = Job(
        name="j",
        study="s",
        measuring_pass="profile",
        measuring=Measuring(),
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=9,
        inputs="",
        cache="",
    )
    alone = Communicator((0,), 0)
    communicators = Communicators(tensor=end, pipeline=alone, data=alone, world=end)
    context = Context(job, paths, 0, 1, torch.device("cpu"), None, lambda: None, communicators)
    outcome = profiled_measurement(measurement, context, workload)
    figures = outcome.figures
    assert figures["passes"] == 1 and "pass_seconds" not in outcome.samples
    assert figures["collectives"] == 1 and figures["communication_bytes"] == 4096
    wall, share = figures["profile_wall_seconds"], figures["communication_share"]
    assert isinstance(wall, float) and isinstance(share, float)
    assert 0.05 <= wall * share < wall < 5
    trace = json.loads(gzip.decompress(paths.trace(measurement.name, 0).read_bytes()))["traceEvents"]
    kernels = [event for event in trace if event["name"].startswith("rankwise::")]
    (told,) = (event for event in trace if event.get("cat") == "communicator")
    (region,) = (event for event in trace if event["name"] == "profiled region")
    assert len(kernels) == 21 and len({event["name"] for event in kernels}) == 2 and told["args"]["bytes"] == 4096
    # On one clock: after the kernels, within the region.
    assert max(event["ts"] for event in kernels) < told["ts"]
    assert region["ts"] < told["ts"] and told["ts"] + told["dur"] < region["ts"] + region["dur"]
    assert told["dur"] == pytest.approx(5e4, rel=0.5)
    for plain in (type(layer).__call__, memory.aligned_bytes):
        assert not hasattr(plain, "__wrapped__")  # as it was before


def test_a_workload_without_a_region_is_not_supported(tmp_path: Path) -> None:
    measurement = Measurement(cell=Cell(workload=NoopWorkload()), repeat=0, attempt=1)
    job = Job(
        name="j",
        study="s",
        measuring_pass="profile",
        measuring=Measuring(),
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=9,
        inputs="",
        cache="",
    )
    context = Context(job, JobPaths(tmp_path), 0, 1, torch.device("cpu"), None, lambda: None)
    with pytest.raises(NotImplementedError, match="marks nothing to record"):
        profiled_measurement(measurement, context, lambda measurement, context: RankResult())


# --- the state of a GPU -------------------------------------------------------------------------------------

SAMPLE_PROGRAM = """
import json, sys, time
from engine.profiling import gpu

gpu.SAMPLE_SECONDS = 0.005
with gpu.GpuSampler(int(sys.argv[1]), sys.argv[2] or None) as sampler:
    time.sleep(float(sys.argv[3]))
print(json.dumps(sampler.figures()))
"""
SLOWED = {
    "STUB_SM_MHZ": "210,1980,1980,1200", "STUB_MEMORY_MHZ": "2619", "STUB_WATTS": "100,700,700,400",
    "STUB_CELSIUS": "40,88,71", "STUB_REASONS": "0x1,0x4,0x24,0x0", "STUB_BUSY": "0,100,100,100,0",
    "STUB_ENERGY_MJ": "2500",
}  # fmt: skip
needs_pynvml = pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library that has one GPU, of which the environment says how it is."""
    return build_driver(tmp_path_factory.mktemp("driver"))


def sampled(folder: Path, stub: dict[str, str], index: int = 0, uuid: str = "", seconds: float = 0.3) -> dict[str, Any]:
    """Figures of a fresh process, in which pynvml finds the stub as the system's driver."""
    command = [sys.executable, "-c", SAMPLE_PROGRAM, str(index), uuid, str(seconds)]
    environment = os.environ | stub | {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@needs_pynvml
def test_a_gpu_is_sampled_while_it_works(driver: Path) -> None:
    figures = sampled(driver, SLOWED, uuid="GPU-stub")
    samples = figures.pop("gpu_samples")
    assert samples >= 5
    assert figures.pop("gpu_busy_share") == pytest.approx(3 / samples)
    # Of the three samples that are at work; the temperature of all.
    assert figures == {
        "gpu_sm_clock_mhz": 1980, "gpu_memory_clock_mhz": 2619, "gpu_power_watts": 600,
        "gpu_temperature_celsius": 88, "gpu_energy_joules": 2.5, "throttled": True,
        "gpu_throttle_reasons": "software power cap, software thermal slowdown",
    }  # fmt: skip


@needs_pynvml
@pytest.mark.parametrize(
    ("reasons", "throttled", "names"),
    [
        ("0x0", False, ""),
        ("0x2", False, "application clocks"),
        ("0x8", True, "hardware slowdown"),
        ("0x40", True, "hardware thermal slowdown"),
        ("0x80", True, "hardware power brake"),
        ("0x1000", False, "0x1000"),
    ],
)
def test_throttling_has_its_reasons(driver: Path, reasons: str, throttled: bool, names: str) -> None:
    figures = sampled(driver, {"STUB_REASONS": reasons, "STUB_OLD": "1"}, uuid="GPU-stub", seconds=0)
    assert (figures["throttled"], figures["gpu_throttle_reasons"]) == (throttled, names)


@pytest.mark.slow
@needs_pynvml
def test_what_a_gpu_does_not_say_is_unknown(driver: Path) -> None:
    figures = sampled(driver, {}, uuid="GPU-stub", seconds=0)
    assert figures.pop("gpu_samples") >= 1
    assert figures and set(figures.values()) == {None}
    for stub, index, uuid in (({"STUB_INIT": "9"}, 0, ""), ({}, 1, ""), ({}, 0, "GPU-other")):
        figures = sampled(driver, SLOWED | stub, index, uuid, seconds=0)
        assert figures.pop("gpu_samples") == 0 and set(figures.values()) == {None}


POWER_PROGRAM = """
import sys
from engine.profiling.gpu import PowerMeter
meter = PowerMeter([None if uuid == "-" else uuid for uuid in sys.argv[1:]])
print(meter.watts())
"""


@needs_pynvml
@pytest.mark.parametrize(
    ("uuids", "watts"),
    [
        (("GPU-stub", "GPU-stub1"), "750.0"),
        (("GPU-stub", "GPU-stub"), "300.0"),
        (("GPU-stub", "GPU-other"), "None"),
        (("GPU-stub", "-"), "None"),
        ((), "None"),
    ],
)
def test_the_power_of_a_node_is_that_of_all_its_gpus(driver: Path, uuids: tuple[str, ...], watts: str) -> None:
    """The second one draws 450 W; a GPU is counted once, and one that says nothing leaves the sum unknown."""
    command = [sys.executable, "-c", POWER_PROGRAM, *uuids]
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_GPUS": "2", "STUB_WATTS": "300,450"}
    done = subprocess.run(command, env=os.environ | stub, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == watts


def test_without_a_driver_there_are_no_figures() -> None:
    with GpuSampler(0) as sampler:
        pass
    figures = sampler.figures()
    assert figures.pop("gpu_samples") == 0 and set(figures.values()) == {None}
