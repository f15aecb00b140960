"""The profile pass of real ranks: what it records of a launch, of communicators and of our kernels."""

import gzip
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

from configs.common.execution import Layout
from configs.families.config import ModelConfig
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
from engine.profiling.collectives import NO_GROUP, RecordedCollective, group_of
from engine.profiling.communicators import Listening
from engine.profiling.record import profiled_measurement
from tests.support.training.checkpointed_runs import CONFIG

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
