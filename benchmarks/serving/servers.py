"""The servers that are compared: started side by side, all but the one that is measured stopped in their tracks.

    with running(variants(2, ["vllm"]), files, program, folder) as servers:
        with servers["vllm tp=2"].awake():
            ...

A server of another project that waits takes no core: SIGSTOP holds all its processes, so that one slice can follow
another on every server within seconds, and noise of the machine meets all alike. Ours sleeps where it has no work, and
is not held: its ranks would take each other for lost.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.serving.model import ModelFiles
from configs.common.execution import Engine, Layout
from configs.common.system.ports import free_port
from configs.plans.model_manifest import ModelManifest
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment
from configs.workloads.serve import ServeWorkload
from engine.workloads.servers.commands import ServerCommand, Wanted, command_of
from engine.workloads.servers.process import RunningServer, fetched
from flows.folders import cache_folder

START_SECONDS = 400.0
MAX_LENGTH, MAX_SEQUENCES = 2048, 32
TRANSFORMERS_OPTIONS: dict[str, str | int | float | bool] = {"cb-num-blocks": 256, "cb-max-batch-tokens": 512}
"""Its defaults take three quarters of the memory for its cache."""


@dataclass(frozen=True)
class Variant:
    """A server as it is started. ranks: of its layout; threads: cores that it computes on in all.

    options: further ones of `rankwise serve`.
    """

    name: str
    engine: Engine
    ranks: int
    threads: int
    options: tuple[str, ...] = ()


def variants(cores: int, engines: Sequence[str]) -> list[Variant]:
    """Every way in which each server can use so many cores: the best of them counts."""
    found = [Variant("rankwise", "rankwise", cores, cores)]
    if "vllm" in engines:
        found.append(Variant(f"vllm tp={cores}", "vllm", cores, cores))
        found += [Variant("vllm one rank", "vllm", 1, cores)] if cores > 1 else []
    if "transformers" in engines:
        found.append(Variant("transformers", "transformers", 1, cores))
    if "llama.cpp" in engines:
        found.append(Variant("llama.cpp", "llama.cpp", 1, cores))
    return found


class MeasuredServer:
    """A server that takes requests, and can be held."""

    def __init__(self, variant: Variant, command: ServerCommand, url: str, log: Path) -> None:
        self.variant, self.url, self.model, self.name = variant, url, command.name, variant.name
        self.exact = command.exact
        self.server = RunningServer(command, url, log)

    @contextmanager
    def awake(self) -> Iterator["MeasuredServer"]:
        """Let its processes run for a while."""
        self._signal(signal.SIGCONT)
        try:
            time.sleep(0.3)
            yield self
        finally:
            self.hold()

    def hold(self) -> None:
        """Stop it in its tracks, if it is another project's."""
        if self.variant.engine != "rankwise":
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        self.server.stop()

    def metric(self, name: str) -> float:
        """Return a Prometheus metric of the server, summed over its labels."""
        from engine.workloads.servers.watching import read_metrics

        return read_metrics(fetched(f"{self.url}/metrics") or b"")[name]

    def processes(self) -> list[psutil.Process]:
        """Its processes, the first one first."""
        first = psutil.Process(self.server.pid)
        return [first, *first.children(recursive=True)]

    def _signal(self, number: int) -> None:
        with suppress(psutil.Error):
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def environment_of(engine: str, program: Path | None, gguf: Path | None) -> EngineEnvironment:
    """Where an engine is: `rankwise engine add`'s environment, or llama-server and its model."""
    if engine == "llama.cpp":
        return EngineEnvironment(program=str(program), model=str(gguf))
    return EngineEnvironment(python=str(cache_folder() / "engines" / engine / "bin" / "python"))


def installed(program: Path | None) -> list[str]:
    """Engines that are there."""
    found = [name for name in ("vllm", "transformers") if Path(environment_of(name, None, None).python or "").exists()]
    return [*found, *(["llama.cpp"] if program is not None else [])]


def start(variant: Variant, files: ModelFiles, program: Path | None, folder: Path) -> MeasuredServer:
    """Start a server; it is ready later."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{variant.name.replace(' ', '-')}-{variant.threads}.log"
    if variant.engine == "rankwise":
        command = _own(variant, files, port)
    else:
        command = _other(variant, files, program, port)
    return MeasuredServer(variant, command, url, log)


def _own(variant: Variant, files: ModelFiles, port: int) -> ServerCommand:
    rankwise = str(Path(sys.executable).with_name("rankwise"))
    argv = [rankwise, "serve", "--model", str(files.folder), "--tp", str(variant.ranks), "--port", str(port)]
    argv += ["--cores-per-rank", str(variant.threads // variant.ranks), "--name", "model", "--device", "cpu"]
    argv += ["--max-length", str(MAX_LENGTH), "--max-sequences", str(MAX_SEQUENCES), *variant.options]
    return ServerCommand(argv, ready_path="/readyz", name="model")


def _other(variant: Variant, files: ModelFiles, program: Path | None, port: int) -> ServerCommand:
    options = TRANSFORMERS_OPTIONS if variant.engine == "transformers" else {}
    work = ServeWorkload(max_length=MAX_LENGTH, max_sequences=MAX_SEQUENCES, kv_cache_gib=2, engine_options=options)
    cell = Cell(
        model="folder",
        workload=work,
        layout=Layout(tp=variant.ranks),
        dtype="bfloat16",
        engine=variant.engine,
        cores_per_rank=variant.threads // variant.ranks,
    )
    import json

    manifest = ModelManifest(
        identity="folder",
        source="folder",
        folder=str(files.folder),
        files={},
        config=json.loads((files.folder / "config.json").read_text()),
    )
    cores = tuple(sorted(os.sched_getaffinity(0)))[: variant.threads]
    return command_of(
        Wanted(cell, manifest, environment_of(variant.engine, program, files.gguf), port, cores, on_gpus=False)
    )


@contextmanager
def running(
    wanted: Sequence[Variant], files: ModelFiles, program: Path | None, folder: Path
) -> Iterator[dict[str, MeasuredServer]]:
    """Start all, one after another, and hold each once it is ready."""
    found: dict[str, MeasuredServer] = {}
    with ExitStack() as ending:
        for variant in wanted:
            server = start(variant, files, program, folder)
            ending.callback(server.end)
            seconds = server.server.wait_until_ready(START_SECONDS)
            print(f"  {variant.name}: ready after {seconds:.0f} s", file=sys.stderr, flush=True)
            server.hold()
            found[variant.name] = server
        yield found
