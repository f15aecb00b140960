"""Benchmark decoding of a model of a given shape on this machine, on one rank and on several.

    config = BenchmarkConfig(model_size="200M", batch_size=1, seq_len=64, num_layers=12, num_attention_heads=16,
                             hidden_size=1024, intermediate_size=2816, world_size=2)
    results = DistributedInferenceBenchmark(config).run_comprehensive_benchmark()
    results.latency_p50, results.throughput, results.speedup_factor

It writes job files and starts `engine.worker` under torchrun, as a study does, with random weights; launches of one and
of several ranks alternate. A study (`rankwise run`) adds intervals, correctness, memory, predictions and a report.
"""

import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.common.base import plain_integer, write_atomically
from configs.common.execution import Dtype, Layout
from configs.common.files.reading import MIB, read_model, read_tail
from configs.common.printable import plural
from configs.common.system.cores import usable_cores
from configs.common.system.memory import host_memory_available
from configs.common.torchrun_options import without_torchrun_options
from configs.families.config import ModelConfig
from configs.plans.job import Job, Measurement, Progress
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.rates import MeasurementSamples, rates_of
from configs.records.record import RankPart, Status, read_part
from configs.records.samples import read_archive
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.models.sharding import check_degrees

_LOOPBACK = "127.0.0.1"
# torchrun is tied to this process: it must not outlive it.
_START = (
    "import sys; from engine.agents.torchrun_agent import main; "
    "from engine.rank.processes import die_with_parent, leave; "
    "die_with_parent(int(sys.argv[1])); leave(main(sys.argv[2:]))"
)


@dataclass
class BenchmarkConfig:
    """A model's shape and the work: `batch_size` prompts of `seq_len` tokens at once, `new_tokens` after each.

    model_size: a name for the report. num_key_value_heads: None for as many as attention heads. Each launch measures
    for `min_seconds`; there are `repeats` launches of one rank and as many of `world_size`.
    """

    model_size: str = "custom"
    batch_size: int = 1
    seq_len: int = 128
    num_layers: int = 12
    num_attention_heads: int = 16
    hidden_size: int = 1024
    intermediate_size: int = 2816
    world_size: int = 2
    num_key_value_heads: int | None = None
    vocab_size: int = 32000
    new_tokens: int = 32
    dtype: Dtype = "bfloat16"
    min_seconds: float = 1.0
    repeats: int = 3
    timeout_seconds: float = 1800.0

    def model(self) -> dict[str, Any]:
        """Return a config.json of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "max_position_embeddings": self.seq_len + self.new_tokens,
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True)
class BenchmarkResults:
    """Results of `world_size` ranks, all launches together. Latencies are milliseconds, throughputs tokens a second.

    latency_*: of a request, from its start to its last token. token_latency_*: between two tokens. ttft_p50: to the
    first token. speedup_factor: throughput over that of one rank, medians of the launches. p99 uses a hundredth of
    `requests`: below some hundreds it is close to the maximum.
    """

    model_size: str
    world_size: int
    latency_p50: float
    latency_p99: float
    token_latency_p50: float
    token_latency_p99: float
    ttft_p50: float
    throughput: float
    single_rank_throughput: float
    speedup_factor: float
    requests: int
    environment: dict[str, Any]


@dataclass(frozen=True)
class _Launch:
    samples: MeasurementSamples
    throughput: float
    environment: dict[str, Any]


class DistributedInferenceBenchmark:
    """Run the benchmark. Raises ValueError for a configuration that cannot be measured on this machine."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config = replace(config, **{name: plain_integer(value) for name, value in vars(config).items()})
        _check(self.config)

    def run_comprehensive_benchmark(self) -> BenchmarkResults:
        """Measure all launches. Raises RuntimeError, with the rank's output, if a launch fails."""
        config = self.config
        launches: dict[int, list[_Launch]] = {ranks: [] for ranks in sorted({1, config.world_size})}
        with tempfile.TemporaryDirectory(prefix="rankwise-benchmark-") as folder:
            for repeat in range(config.repeats):
                for ranks, done in launches.items():
                    done.append(_launch(config, ranks, repeat, Path(folder)))
        throughputs = {ranks: float(np.median([one.throughput for one in done])) for ranks, done in launches.items()}
        measured = launches[config.world_size]
        latencies = [launch.samples.latencies() for launch in measured]
        request, token, ttft = (
            1000 * np.concatenate([one[kind] for one in latencies if kind in one] or [np.array([np.nan])])
            for kind in ("request", "token", "ttft")
        )
        return BenchmarkResults(
            model_size=config.model_size,
            world_size=config.world_size,
            latency_p50=float(np.percentile(request, 50)),
            latency_p99=float(np.percentile(request, 99)),
            token_latency_p50=float(np.percentile(token, 50)),
            token_latency_p99=float(np.percentile(token, 99)),
            ttft_p50=float(np.percentile(ttft, 50)),
            throughput=throughputs[config.world_size],
            single_rank_throughput=throughputs[1],
            speedup_factor=throughputs[config.world_size] / throughputs[1],
            requests=len(request),
            environment=measured[-1].environment,
        )


def _check(config: BenchmarkConfig) -> None:
    for name, smallest in _SMALLEST.items():
        count = getattr(config, name)
        if not isinstance(count, int) or count < smallest:
            raise ValueError(f"{name}: expected a whole number from {smallest}, got {count!r}")
    if not 0 <= config.min_seconds < math.inf:
        raise ValueError(f"min_seconds: expected seconds from 0, got {config.min_seconds!r}")
    if not 0 < config.timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds: expected seconds above 0, got {config.timeout_seconds!r}")
    if config.dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype: {config.dtype!r} is not one of {', '.join(_ITEM_BYTES)}")
    model = ModelConfig.parse(config.model())
    check_degrees(model, config.world_size, pp=1)
    accelerators, cores = torch.cuda.device_count(), usable_cores()
    if accelerators and config.world_size > accelerators:
        raise ValueError(
            f"world_size: {config.world_size} ranks need an accelerator each, and this machine has {accelerators}; "
            f"use at most {accelerators}, or CUDA_VISIBLE_DEVICES= for the CPU"
        )
    if not accelerators and config.world_size > cores:
        raise ValueError(
            f"world_size: {config.world_size} ranks outnumber the {cores} cores that this process may use: they would "
            f"wait for each other's turn, which measures no scaling; use at most {cores}"
        )
    if not accelerators:
        parameters = sum(int(np.prod(shape)) for shape in model.tensor_shapes().values())
        wanted, free = parameters * _ITEM_BYTES[config.dtype], host_memory_available()
        if wanted > free:
            raise ValueError(
                f"num_layers, hidden_size: the weights take {wanted / 1e9:.1f} GB in {config.dtype}, and "
                f"{free / 1e9:.1f} GB of memory are free; use a smaller shape or a shorter dtype"
            )


_SMALLEST = {"world_size": 1, "batch_size": 1, "seq_len": 1, "repeats": 1, "new_tokens": 2}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _launch(config: BenchmarkConfig, ranks: int, repeat: int, folder: Path) -> _Launch:
    manifest = ModelManifest(
        identity="synthetic:benchmark@0", source="synthetic", folder="", files={}, config=config.model()
    )
    cell = Cell(
        model=manifest.identity,
        workload=GenerateWorkload(
            num_prompts=config.batch_size,
            prompt_tokens=config.seq_len,
            new_tokens=config.new_tokens,
            batch_size=config.batch_size,
        ),
        layout=Layout(tp=ranks),
        dtype=config.dtype,
    )
    measurement = Measurement(cell=cell, repeat=repeat, attempt=1)
    paths = JobPaths(folder / f"{ranks}-ranks-{repeat}")
    paths.parts.mkdir(parents=True)
    write_atomically(paths.folder / "manifest.json", manifest.model_dump_json())
    job = Job(
        name=paths.folder.name,
        study="benchmark",
        measuring_pass="timed",
        measuring=Measuring(min_seconds=config.min_seconds),
        measurements=(measurement,),
        ranks_per_node=ranks,
        timeout_seconds=config.timeout_seconds,
        manifest=str(paths.folder / "manifest.json"),
        inputs=str(folder / "inputs"),
        cache=str(folder / "cache"),
    )
    write_atomically(paths.job, job.model_dump_json())
    _run(job, paths)
    return _read(measurement, paths, ranks)


def _run(job: Job, paths: JobPaths) -> None:
    """Start the ranks and wait for them; their results are in the job folder."""
    exits = paths.folder / "exits.json"
    command = [sys.executable, "-c", _START, str(os.getpid()), str(exits), "--standalone"]
    command += ["--nproc-per-node", str(job.ranks_per_node), "--local-addr", _LOOPBACK, "--max-restarts", "0"]
    command += ["--log-dir", str(paths.folder / "torchrun"), "-m", "engine.worker", str(paths.job)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.cell.cores_per_rank))
    environment = {"GLOO_SOCKET_IFNAME": "lo", **without_torchrun_options(os.environ), **threads}
    environment |= {"PYTHONSAFEPATH": "1", "RANKWISE_LAUNCHER_PID": str(os.getpid())}
    with (paths.folder / "launcher.log").open("wb") as log:
        try:
            subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=job.timeout_seconds, check=False, cwd="/"
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"not ready within {job.timeout_seconds:g} s: {plural(job.ranks_per_node, 'rank')}; allow more "
                "with timeout_seconds, or use a smaller shape"
            ) from None


def _read(measurement: Measurement, paths: JobPaths, ranks: int) -> _Launch:
    parts: list[RankPart] = []
    samples: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        try:
            part = read_part(paths.part(measurement.name, rank))
        except FileNotFoundError:
            raise RuntimeError(f"rank {rank} of {ranks} left no result: {_last_words(paths, rank)}") from None
        if part.status is not Status.COMPLETED:
            said = part.failure.message if part.failure else "no reason is known"
            raise RuntimeError(f"rank {rank} of {ranks}: {part.status}: {said}")
        parts.append(part)
        if paths.samples(measurement.name, rank).is_file():
            columns = read_archive(paths.samples(measurement.name, rank))
            samples |= {f"{rank}/{name}": column for name, column in columns.items()}
    read = MeasurementSamples(measurement.cell, samples)
    throughput = rates_of(read, parts[0].figures).throughput
    assert throughput is not None, "a generate workload has a rate"
    return _Launch(read, throughput, parts[0].environment)


def _last_words(paths: JobPaths, rank: int) -> str:
    try:
        progress = read_model(paths.progress(rank), Progress)
    except (OSError, ValueError):
        lines = read_tail(paths.folder / "launcher.log", MIB).splitlines()
        return lines[-1] if lines else "it was never started"
    return progress.message or f"it ended in phase {progress.phase}"
