"""The command that starts each server: a cell's layout, precision, cache and limits as the server's own options.

    command = command_of(Wanted(...))           # argv, environment, where it says that it is ready

Options follow vLLM 0.32 (docs.vllm.ai/en/latest/cli/serve), transformers 5.23 (`transformers serve --help`), SGLang 0.5
(docs.sglang.ai, server arguments) and llama.cpp's tools/server/README.md. SGLang and vLLM on GPUs are mapped by these
documents and have not been run.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.common.execution import Engine
from configs.plans.model_manifest import ModelManifest
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment
from configs.workloads.serve import ServeWorkload
from engine.planner.accelerators import variables_for

SERVED_NAME = "model"
DEFAULT_LENGTH = 2048
"""Tokens of a sequence where neither the fields nor the model's positions say less."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
"""Keys of a config.json for the most tokens of a sequence: vLLM refuses a longer one than the model's."""
_OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS")
_PREFIXES_OF_THE_LAUNCH = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "RANKWISE_")
_ALONE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Wanted:
    """A server to start. on_gpus: whether its ranks have GPUs. cores: those of all its ranks."""

    cell: Cell
    manifest: ModelManifest
    environment: EngineEnvironment
    port: int
    cores: tuple[int, ...]
    on_gpus: bool

    @property
    def work(self) -> ServeWorkload:
        """The cell's workload."""
        assert isinstance(self.cell.workload, ServeWorkload)
        return self.cell.workload

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that the server has to hold."""
        config = self.manifest.config
        text = config.get("text_config")  # of a model that takes images too
        stated = [part.get(key) for part in (config, text) if isinstance(part, dict) for key in _LIMITS]
        limits = [limit for limit in stated if isinstance(limit, int) and limit > 0]
        return self.work.server_tokens or min([*limits, DEFAULT_LENGTH])


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started. exact: whether it can be made to answer with a given number of tokens."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    name: str = SERVED_NAME
    exact: bool = True
    shown: tuple[str, ...] = ()
    """What a user would type for the same; empty: argv."""
    about: tuple[str, ...] = ()
    """What the cell asks for and the server has no option for."""


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without what torchrun set for it, and with what a server needs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_LAUNCH and not name.startswith(_PREFIXES_OF_THE_LAUNCH)
    }
    return kept | _ALONE | extra


def command_of(wanted: Wanted) -> ServerCommand:
    """Return the command of another project's server. Raises NotImplementedError for what it cannot do."""
    engine = wanted.cell.engine
    if wanted.cell.compression:
        raise NotImplementedError(f"compression: not supported by engine {engine}. Use `engine: rankwise`")
    if wanted.manifest.source == "synthetic" and engine != "llama.cpp":
        raise NotImplementedError(
            f"engine {engine}: reads files, and {wanted.manifest.identity} has none. Use a folder or a hub's model"
        )
    command = _COMMANDS[engine](wanted)
    if wanted.on_gpus:  # llama.cpp and transformers spread a model over all GPUs that they see
        own = variables_for(0, wanted.cell.layout.ranks, by_place=True)
        command = replace(command, environment=own | command.environment)
    return replace(command, about=(*command.about, "batch_invariant")) if wanted.work.batch_invariant else command


def _vllm(wanted: Wanted) -> ServerCommand:
    cell, work = wanted.cell, wanted.work
    python = _python(wanted)
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", wanted.manifest.folder]
    argv += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(wanted.port)]
    argv += ["--dtype", cell.dtype, "--max-model-len", str(wanted.length), "--max-num-seqs", str(work.max_sequences)]
    for option, degree in (("tensor", cell.layout.tp), ("pipeline", cell.layout.pp), ("data", cell.layout.dp)):
        argv += [f"--{option}-parallel-size", str(degree)] if degree > 1 else []
    argv += [] if work.prefix_caching else ["--no-enable-prefix-caching"]
    environment: dict[str, str] = {}
    if wanted.on_gpus:
        size = work.kv_cache_gib
        argv += [] if size is None else ["--kv-cache-memory-bytes", str(int(size * (1 << 30)))]
    else:
        argv += ["--enforce-eager"] if "enforce-eager" not in work.engine_options else []
        parts, gib = _parts(wanted), work.kv_cache_gib or 1.0
        if gib != int(gib):
            raise NotImplementedError(f"engine vllm: kv_cache_gib is a whole number on a CPU, got {gib:g}")
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(int(gib)),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts),
            "OMP_NUM_THREADS": str(len(parts[0])),
        }
        openmp = next(Path(python).absolute().parents[1].rglob("libiomp5.so"), None)
        environment |= {} if openmp is None else {"LD_PRELOAD": str(openmp)}
    return ServerCommand(argv + _own_options(work), environment)


def _sglang(wanted: Wanted) -> ServerCommand:
    cell, work = wanted.cell, wanted.work
    argv = [_python(wanted), "-m", "sglang.launch_server", "--model-path", wanted.manifest.folder]
    argv += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(wanted.port)]
    argv += ["--dtype", cell.dtype, "--context-length", str(wanted.length)]
    argv += ["--max-running-requests", str(work.max_sequences), "--enable-metrics"]
    for option, degree in (("tp", cell.layout.tp), ("pp", cell.layout.pp), ("dp", cell.layout.dp)):
        argv += [f"--{option}-size", str(degree)] if degree > 1 else []
    argv += [] if work.prefix_caching else ["--disable-radix-cache"]
    environment: dict[str, str] = {}
    if not wanted.on_gpus:
        argv += ["--device", "cpu"]
        environment = {"SGLANG_USE_CPU_ENGINE": "1"}  # its documentation requires it beside the option
        if cell.layout.ranks == cell.layout.tp:  # it has cores for each rank of tensor parallelism
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in _parts(wanted))
    about = () if work.kv_cache_gib is None else ("kv_cache_gib",)
    return ServerCommand(argv + _own_options(work), environment, about=about)


def _transformers(wanted: Wanted) -> ServerCommand:
    work, program = wanted.work, Path(_python(wanted)).absolute().parent / "transformers"
    argv = [str(program), "serve", "--host", "127.0.0.1", "--port", str(wanted.port), "--continuous-batching"]
    argv += ["--attn-implementation", "sdpa", "--dtype", wanted.cell.dtype]
    argv += [] if wanted.on_gpus else ["--device", "cpu"]
    argv += [*_own_options(work), wanted.manifest.folder]
    unmapped = {"kv_cache_gib": work.kv_cache_gib is not None, "prefix_caching": not work.prefix_caching}
    about = ("max_sequences", "max_length", *(name for name, asked in unmapped.items() if asked))
    threads = {} if wanted.on_gpus else {"OMP_NUM_THREADS": str(len(wanted.cores))}
    return ServerCommand(argv, threads, name=wanted.manifest.folder, exact=False, about=about)


def _llama_cpp(wanted: Wanted) -> ServerCommand:
    work, given = wanted.work, wanted.environment
    if given.program is None or given.model is None:
        raise NotImplementedError(
            "engine llama.cpp: not installed. Set engines.llama.cpp: {program: PATH of llama-server, model: FILE.gguf}"
        )
    argv = [given.program, "--model", given.model, "--alias", SERVED_NAME, "--host", "127.0.0.1"]
    argv += ["--port", str(wanted.port), "--parallel", str(work.max_sequences), "--metrics"]
    argv += ["--ctx-size", str(wanted.length * work.max_sequences)]
    argv += ["--threads", str(len(wanted.cores)), "--threads-batch", str(len(wanted.cores))]
    argv += [] if work.prefix_caching else ["--no-cache-prompt"]
    about = ("dtype", *(("kv_cache_gib",) if work.kv_cache_gib is not None else ()))  # the file has a precision
    return ServerCommand(argv + _own_options(work), about=about)


_COMMANDS: dict[Engine, Callable[[Wanted], ServerCommand]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "transformers": _transformers,
    "llama.cpp": _llama_cpp,
}


def _parts(wanted: Wanted) -> list[tuple[int, ...]]:
    """Return the cores of each rank."""
    ranks = wanted.cell.layout.ranks
    share = len(wanted.cores) // ranks
    return [wanted.cores[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _python(wanted: Wanted) -> str:
    """Return the interpreter of the engine's environment. Raises NotImplementedError where there is none."""
    engine, python = wanted.cell.engine, wanted.environment.python
    if python is None or not Path(python).exists():
        where = "not installed" if python is None else f"no interpreter {python}"
        add = f"Run `rankwise engine add {engine}`, or set" if engine in ("vllm", "transformers") else "Set"
        raise NotImplementedError(f"engine {engine}: {where}. {add} engines.{engine}.python")
    return python


def _own_options(work: ServeWorkload) -> list[str]:
    """Return the options that the study passes through: true is an option without a value, false its `--no-` form."""
    argv: list[str] = []
    for name, value in work.engine_options.items():
        option: Any = name.replace("_", "-").lstrip("-")
        if isinstance(value, bool):
            argv.append(f"--{option}" if value else f"--no-{option}")
        else:
            argv += [f"--{option}", str(value)]
    return argv
