"""The serve workload: start the cell's server, send it requests, keep every one's times.

One process of the launch does this. The server has the cores of all ranks of the layout, and the load generator those
too. A server lives as long as the launch, for all its cells.

`python -m engine.load` sends, and `python -m reports.load.next_rate` decides how a search for the highest rate goes
on: processes of their own, which read and write files of the job folder.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import content_hash, expanded, write_atomically
from configs.common.files.reading import read_model, read_tail
from configs.common.system.ports import free_port
from configs.load.job import Endpoint, LoadJob
from configs.load.samples import CHUNK_COLUMN, FACTS_FILE, JOB_FILE, LAG_COLUMN, SAMPLE_COLUMNS, SAMPLES_FILE, LoadFacts
from configs.load.search import SEARCH_FILE
from configs.plans.job import Measurement
from configs.records.record import Figure
from configs.records.samples import read_samples
from configs.serving.installations import in_use, installation
from configs.serving.settings import ServingSettings
from configs.targets.target import EndpointTarget
from configs.workloads.serve import ServeWorkload
from engine.context import Context, RankResult
from engine.load.__main__ import bearer_token
from engine.planner.families import read_architecture
from engine.planner.serving import AskedSizes, server_sizes
from engine.workloads.servers.commands import SERVED_NAME, ServerCommand, Wanted, command_of
from engine.workloads.servers.probes import Probes
from engine.workloads.servers.process import RunningServer, ServerDiedError
from engine.workloads.servers.watching import Watch

_MAX_TEXT = 1500
_OTHER_ERRORS = "other errors"
_LOOK_SECONDS = 0.5
_GENERATOR_NICE = -10
_GENERATOR_LOG = "generator.log"
_LAST_BYTES = 4000


@dataclass(frozen=True)
class RequestedServer:
    """What requests are sent to. server: None for an endpoint; vocabulary: ids below it are tokens, None: unknown."""

    endpoint: Endpoint
    server: RunningServer | None
    exact: bool
    vocabulary: int | None
    token: str | None
    figures: dict[str, Figure]


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one cell. Raises NotImplementedError for an engine that is not installed, RuntimeError where it fails."""
    work = measurement.cell.workload
    assert isinstance(work, ServeWorkload)
    served = context.kept.get("served")
    cpu_seconds = _children_cpu_seconds(served.server if served else None)
    if served is None:
        served = context.kept["served"] = _served(measurement, context)
    began = time.perf_counter()
    folder = context.paths.folder / f"load-{measurement.name}"
    runs = _Runs(measurement, context, served, folder)
    probes = Probes(runs.job(0), work.judged_requests, served.token, served.exact and work.exact)
    try:
        probes.alone()
    except RuntimeError:
        if served.server is not None:
            served.server.check()  # that it has ended says more
        raise
    with Watch(served.endpoint.url, served.token, served.server) as watch:
        if work.find is None:
            runs.run(0, None, probes)
        else:
            _search(runs, work, context, probes)
    if served.server is not None:
        served.server.check()
    samples = {"pass_seconds": np.array([time.perf_counter() - began]), **runs.columns()}
    shutil.rmtree(folder, ignore_errors=True)  # all of it is in the samples
    figures = {**served.figures, **watch.figures(), **runs.figures()}
    after = _children_cpu_seconds(served.server)
    figures["children_cpu_seconds"] = None if cpu_seconds is None or after is None else after - cpu_seconds
    return RankResult(figures, {**samples, **probes.columns(), **watch.columns()})


def _children_cpu_seconds(server: RunningServer | None) -> float | None:
    """CPU seconds so far of the server and of load generators that have ended: nobody else's; None: unknown."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = 0.0 if server is None else server.cpu_seconds()
    return None if living is None else usage.ru_utime + usage.ru_stime + living


def _served(measurement: Measurement, context: Context) -> RequestedServer:
    """Start the server, or name the endpoint."""
    target, cell = context.job.target, measurement.cell
    if isinstance(target, EndpointTarget):
        endpoint = Endpoint(url=target.url, model=target.model, token_variable=target.token_variable)
        return RequestedServer(
            endpoint, None, True, None, bearer_token(target.token_variable), {"server_url": endpoint.url}
        )
    assert context.manifest is not None, "a served model has a manifest"
    cores = tuple(sorted(os.sched_getaffinity(0)))
    installed = installation(context.job.engines, cell.engine, Path(context.job.cache))
    wanted = Wanted(
        cell=cell,
        manifest=context.manifest,
        environment=context.closing.enter_context(in_use(installed)),
        port=free_port(),
        cores=cores[: cell.layout.ranks * cell.cores_per_rank],
        on_gpus=context.device.type == "cuda",
    )
    command = _own_command(wanted, context) if cell.engine == "rankwise" else command_of(wanted)
    url = f"http://127.0.0.1:{wanted.port}"
    server = RunningServer(command, url, context.paths.folder / "server.log")
    context.closing.callback(server.stop)
    ready_seconds = server.wait_until_ready(wanted.work.ready_seconds)
    vocabulary = context.manifest.config.get("vocab_size")
    shown, run = " ".join(command.shown or command.argv), context.paths.folder.parent.parent
    figures: dict[str, Figure] = {
        "server_command": shown_command(shown, run)[:_MAX_TEXT],
        "server_environment": shown_command(
            " ".join(f"{name}={value}" for name, value in command.environment.items()), run
        )[:400],
        "server_unmapped": ", ".join(command.about),
        "server_ready_seconds": ready_seconds,
    }
    known = vocabulary if isinstance(vocabulary, int) else None
    return RequestedServer(Endpoint(url=url, model=command.name), server, command.exact, known, None, figures)


def shown_command(text: str, run: Path) -> str:
    """Return a command without the folders of this machine's user. run: the run's folder, which may lie in them."""
    for folder, shown in ((run, "<run>"), (expanded("~"), "~")):
        if folder != Path("/"):  # the home of a user without an entry in a container
            text = re.sub(rf"{re.escape(str(folder))}(?![^/\s:,=])", shown, text)
    return text


_FIELDS = {
    "--max-length": "workload.max_length",
    "--max-step-tokens": "workload.engine_options.max_step_tokens",
    "--max-sequences": "workload.max_sequences",
    "--kv-cache-gib": "workload.kv_cache_gib",
    "--tp, --pp": "layout.tp, layout.pp",
    "--device cpu": "`device: cpu` of the target",
}
"""Options of `rankwise serve` -> how a study says the same."""


def in_fields(told: str) -> str:
    """A refusal of `server_sizes` as a study has its fields."""
    return re.sub("|".join(map(re.escape, _FIELDS)), lambda option: _FIELDS[option[0]], told)


def _own_command(wanted: Wanted, context: Context) -> ServerCommand:
    """Return the command of our own server, with its settings in a folder of the launch's own."""
    cell, work, manifest = wanted.cell, wanted.work, wanted.manifest
    architecture = read_architecture(manifest.config, manifest.identity)
    asked = AskedSizes(
        layout=cell.layout,
        dtype=cell.dtype,
        compression=cell.compression,
        device=None if wanted.on_gpus else "cpu",
        cores_per_rank=cell.cores_per_rank,
        max_length=work.server_tokens,
        max_sequences=work.max_sequences,
        kv_cache_gib=work.kv_cache_gib,
    )
    extra = {"max_step_tokens"}
    unknown = sorted(set(work.engine_options) - extra)
    if unknown:
        raise ValueError(f"workload.engine_options: {unknown[0]} is no option of rankwise. Use {', '.join(extra)}")
    step = work.engine_options.get("max_step_tokens")
    if step is not None:
        asked = AskedSizes(**{**vars(asked), "max_step_tokens": int(step)})
    try:
        sizes = server_sizes(asked, architecture, manifest.identity, Path(context.job.cache))
    except ValueError as error:
        raise ValueError(in_fields(str(error))) from error
    # With the logs of its ranks, which are named where they fail. Nothing removes a temporary folder of a launch that
    # is killed.
    folder = context.paths.folder.absolute() / "server"
    folder.mkdir(exist_ok=True)
    assert context.job.manifest is not None
    settings = ServingSettings(
        name=SERVED_NAME,
        manifest=context.job.manifest,
        folder=str(folder),
        port=wanted.port,
        layout=cell.layout,
        dtype=cell.dtype,
        compression=cell.compression,
        device=None if wanted.on_gpus else "cpu",
        max_sequences=work.max_sequences,
        prefix_caching=work.prefix_caching,
        batch_invariant=work.batch_invariant,
        group_timeout_seconds=context.job.measuring.group_timeout_seconds,
        **vars(sizes),
    )
    path = folder / "settings.json"
    write_atomically(path, settings.model_dump_json())
    command = [sys.executable, "-m", "engine.serving.http.main", str(path), str(os.getpid())]
    return ServerCommand(command, ready_path="/readyz", shown=as_typed(settings, manifest.identity, work.kv_cache_gib))


def as_typed(settings: ServingSettings, model: str, kv_cache_gib: float | None) -> tuple[str, ...]:
    """Return the command line of `rankwise serve` that starts a server with these settings, on any machine."""
    layout = settings.layout
    degrees = (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp))
    typed = ["rankwise", "serve", "--model", model, "--dtype", settings.dtype]
    typed += [word for axis, degree in degrees if degree > 1 for word in (f"--{axis}", str(degree))]
    typed += ["--compression", "+".join(settings.compression)] if settings.compression else []
    for name in ("cores_per_rank", "max_length", "max_sequences", "max_step_tokens", "group_timeout_seconds"):
        typed += [f"--{name.replace('_', '-')}", str(getattr(settings, name)).removesuffix(".0")]
    typed += [] if kv_cache_gib is None else ["--kv-cache-gib", str(kv_cache_gib)]
    typed += [] if settings.device is None else ["--device", settings.device]
    typed += [] if settings.prefix_caching else ["--no-prefix-caching"]
    return (*typed, *(["--batch-invariant"] if settings.batch_invariant else []))


def errors_text(errors: dict[str, int]) -> str | None:
    """Messages and counts as JSON of a record's size: the rarest messages are counted as other errors."""
    kept = dict(sorted(errors.items(), key=lambda one: -one[1]))
    while len(text := json.dumps(kept)) > _MAX_TEXT:
        others = kept.pop(_OTHER_ERRORS, 0)
        others += kept.popitem()[1]
        kept = {**kept, _OTHER_ERRORS: others}
    return text if errors else None


def _search(runs: "_Runs", work: ServeWorkload, context: Context, probes: Probes) -> None:
    """Run at one rate after another until the search has ended."""
    target = context.job.target
    request = work.search(target.max_rate if isinstance(target, EndpointTarget) else None)
    runs.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(runs.folder / SEARCH_FILE, request.model_dump_json())
    while (rate := _next_rate(runs.folder)) is not None:
        runs.run(len(runs.facts) + 1, rate, probes)


def _next_rate(folder: Path) -> float | None:
    """Ask for the rate of the next run; None where the search has ended."""
    command = [sys.executable, "-m", "reports.load.next_rate", str(folder)]
    told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if told.returncode != 0:
        last = told.stderr.strip().splitlines()[-1:] or [f"exit code {told.returncode}"]
        raise RuntimeError(f"search: {last[0]}")
    rate: float | None = json.loads(told.stdout)["rate"]
    return rate


class _Runs:
    """Runs of the load generator against one server. Their samples stay in the folder until all runs are over."""

    def __init__(self, measurement: Measurement, context: Context, served: RequestedServer, folder: Path) -> None:
        self.folder = folder
        self.facts: list[LoadFacts] = []
        self._measurement, self._context, self._served = measurement, context, served
        self._folders: list[Path] = []
        self._num_samples = 0
        self._rates: list[float] = []

    def job(self, number: int, rate: float | None = None) -> LoadJob:
        """Return the job of a run. The requests of two cells, repeats or runs differ: a cache may know none."""
        work, target = self._measurement.cell.workload, self._context.job.target
        assert isinstance(work, ServeWorkload)
        caps: tuple[float | None, int | None] = (None, None)
        if isinstance(target, EndpointTarget):
            caps = (target.max_rate, target.max_tokens)
        seed = int(content_hash([self._measurement.cell.key, self._measurement.repeat, number], digits=8), 16)
        made = work.requests(self._served.endpoint, self._served.vocabulary, self._inputs(), *caps, seed, rate)
        if self._served.exact:
            return made
        return made.model_copy(update={"contents": made.contents.model_copy(update={"exact": False})})

    def run(self, number: int, rate: float | None, probes: Probes) -> None:
        """Send the requests of one run, and the probes again among them. Raises RuntimeError where the server dies."""
        job, folder = self.job(number, rate), self.folder / f"run-{number:03d}"
        spent = {"spent_tokens": probes.asked_tokens, "spent_samples": self._num_samples}
        job = job.model_copy(update={"caps": job.caps.model_copy(update=spent)})
        folder.mkdir(parents=True)
        write_atomically(folder / JOB_FILE, job.model_dump_json())
        stop = threading.Event()
        again = threading.Thread(target=probes.again, args=(job.duration_seconds, stop), daemon=True)
        again.start()
        try:
            self._generate(folder)
        finally:
            stop.set()
            again.join()
        self.facts.append(read_model(folder / FACTS_FILE, LoadFacts))
        self._folders.append(folder)
        self._num_samples += (folder / SAMPLES_FILE).stat().st_size // 8
        self._rates.append(np.nan if job.requested_rate is None else job.requested_rate)

    def columns(self) -> dict[str, np.ndarray]:
        """All samples, run after run, and what tells the runs apart. One run at a time is read beside them."""
        whole = {name: bytearray() for name in SAMPLE_COLUMNS}
        lag_samples = []
        for folder in self._folders:
            read = read_samples(folder / SAMPLES_FILE, SAMPLE_COLUMNS)
            lag_samples.append(len(read[f"0/{LAG_COLUMN}"]))
            for name, values in whole.items():
                values += np.asarray(read[f"0/{name}"], dtype=np.float64).tobytes()
        joined = {name: np.frombuffer(values) if values else np.empty(0) for name, values in whole.items()}
        own: dict[str, Any] = {
            "run_rate": self._rates,
            "run_issuing_seconds": [one.issuing_seconds for one in self.facts],
            "run_wall_seconds": [one.wall_seconds for one in self.facts],
            "run_requests": [one.requests for one in self.facts],
            "run_lag_samples": lag_samples,
        }
        assert CHUNK_COLUMN in joined
        return joined | {name: np.array(values, dtype=np.float64) for name, values in own.items()}

    def figures(self) -> dict[str, Figure]:
        """Of all runs together."""
        errors: dict[str, int] = {}
        for one in self.facts:
            for message, count in one.errors.items():
                errors[message] = errors.get(message, 0) + count
        return {
            "runs": len(self.facts),
            "requests": sum(one.requests for one in self.facts),
            "generator_cpu_share": max(one.cpu_share for one in self.facts),
            "capped": next((one.capped for one in self.facts if one.capped), None),
            "errors": errors_text(errors),
        }

    def _generate(self, folder: Path) -> None:
        command = [sys.executable, "-m", "engine.load", str(folder / JOB_FILE), str(folder), str(os.getpid())]
        log = folder / _GENERATOR_LOG  # nobody reads a pipe while it runs, which holds 64 KiB
        with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
            with suppress(OSError):  # as root: a generator that shares the server's cores is woken in time
                os.setpriority(os.PRIO_PROCESS, process.pid, _GENERATOR_NICE)
            try:
                while process.poll() is None:
                    time.sleep(_LOOK_SECONDS)
                    if self._served.server is not None:
                        self._served.server.check()
            except ServerDiedError:
                process.terminate()
                raise
        if process.returncode != 0:
            lines = read_tail(log, _LAST_BYTES).strip().splitlines()
            raise RuntimeError(f"load generator: {(lines or ['it died'])[-1]}")

    def _inputs(self) -> str:
        """Return the folder of the input files; they are named by hash, with the suffix of JSON lines."""
        return str(self._context.inputs)
