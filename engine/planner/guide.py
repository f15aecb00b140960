"""Hardware guide by model size: the requested figures beside the computed ones.

    rows = guide_rows(accelerator("a100-80gb"))      # one for each of 7B, 13B, 30B and 65B
    header, cells = guide_table(rows)
    for row in rows: print(row.size, *row.sentences)

The requested figures are for inference: GPUs, memory of each, and the expected speed-up over one. Here they come from
`memory.inference` and `timing.inference` for LLaMA in bfloat16: one request of 1,024 tokens and 1,024 new ones, tensor
parallelism within a node and pipeline stages over nodes. Speed-up is relative to one GPU, as if the model fitted there.
"""

from dataclasses import dataclass
from math import gcd

from configs.common.execution import Layout
from configs.hardware.catalog import instances
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.catalog import find_model
from engine.planner.memory.inference import inference_memory, largest_batch
from engine.planner.results import GenerationTime
from engine.planner.setup import InferenceSetup
from engine.planner.timing.inference import generation_time

GUIDE_ACCELERATORS = ("a100-80gb", "a10g")
PROMPT_TOKENS = NEW_TOKENS = 1024
_MANY = 32  # sequences of the batch beside the single request
_GPUS = (1, 2, 4, 8, 16, 32, 64)
_GB = 1e9


@dataclass(frozen=True)
class Promise:
    """A row of the requested table. Memory in GB of each GPU; speed-up over one GPU."""

    size: str
    model: str
    gpus: int
    memory_gb: tuple[float, float]
    speedup: tuple[float, float]


PROMISES = (
    Promise("7B", "llama-7b", 4, (8, 12), (3.8, 4.2)),
    Promise("13B", "llama-13b", 4, (16, 20), (3.8, 4.2)),
    Promise("30B", "llama-30b", 8, (20, 24), (3.5, 4.0)),
    Promise("65B", "llama-65b", 16, (24, 28), (3.2, 3.8)),
)


@dataclass(frozen=True)
class GuideRow:
    """Requirements of a size. Figures at the promised number of GPUs are None if no link joins that many."""

    promise: Promise
    gpus: int | None  # fewest GPUs that hold it
    memory_gb: float | None  # memory of each of those
    promised_gpus_memory_gb: float
    speedup: float | None  # one request, on the promised GPUs
    batch_speedup: float | None  # a batch of 32
    sentences: tuple[str, ...]

    @property
    def size(self) -> str:
        """Size label, as `7B`."""
        return self.promise.size


def guide_rows(accelerator: Accelerator, machine: Machine | None = None) -> list[GuideRow]:
    """Return a row for each promised size. `machine`: supplies the links; by default one of the catalog's."""
    where = machine or machine_with(accelerator)
    return [_row(promise, where) for promise in PROMISES]


def machine_with(accelerator: Accelerator) -> Machine:
    """Return the catalog's largest instance of an accelerator with a network; else a node of 8 of them."""
    found = [machine for machine in instances().values() if machine.accelerator.name == accelerator.name]
    found.sort(key=lambda machine: (machine.between is not None, machine.accelerators), reverse=True)
    return found[0] if found else Machine(name=accelerator.name, accelerator=accelerator, accelerators=8)


def guide_table(rows: list[GuideRow]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells: promised beside predicted figures."""
    header = [
        "size", "GPUs promised", "GPUs needed", "GB each promised", "GB each on those", "GB each on the needed",
        "speed-up promised", "one request", f"batch of {_MANY}",
    ]  # fmt: skip
    return header, [_cells(row) for row in rows]


def _cells(row: GuideRow) -> list[str]:
    promise = row.promise
    return [
        row.size,
        str(promise.gpus),
        _text(row.gpus, "d"),
        f"{promise.memory_gb[0]:g}-{promise.memory_gb[1]:g}",
        _text(row.promised_gpus_memory_gb, ".1f"),
        _text(row.memory_gb, ".1f"),
        f"{promise.speedup[0]:.1f}-{promise.speedup[1]:.1f}x",
        _text(row.speedup, ".1f", "x"),
        _text(row.batch_speedup, ".1f", "x"),
    ]


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _row(promise: Promise, machine: Machine) -> GuideRow:
    setup = InferenceSetup(find_model(promise.model), machine, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
    gpus, there = _fewest(setup), _on(setup, promise.gpus)
    one, many = _speedup(setup, there), _speedup(setup.replace(batch=_MANY), there.replace(batch=_MANY))
    memory = inference_memory(there).total / _GB
    return GuideRow(
        promise=promise,
        gpus=gpus,
        memory_gb=inference_memory(_on(setup, gpus)).total / _GB if gpus else None,
        promised_gpus_memory_gb=memory,
        speedup=one,
        batch_speedup=many,
        sentences=(*_about_memory(promise, there, gpus, memory), *_about_speed(promise, there, one, many)),
    )


def _on(setup: InferenceSetup, gpus: int) -> InferenceSetup:
    """Return the layout: tensor parallelism within a node, of a degree that divides the heads; then pipeline stages."""
    tp = gcd(setup.architecture.heads, gpus, setup.machine.accelerators)
    return setup.replace(layout=Layout(tp=tp, pp=gpus // tp))


def _fewest(setup: InferenceSetup) -> int | None:
    """Return the fewest GPUs, a power of two, that hold one request."""
    for gpus in _GPUS:
        if inference_memory(_on(setup, gpus)).total <= setup.machine.accelerator.memory_bytes:
            return gpus
    return None


def _time(setup: InferenceSetup) -> GenerationTime | None:
    try:
        return generation_time(setup)
    except ValueError:  # no link for this many GPUs
        return None


def _speedup(one: InferenceSetup, several: InferenceSetup) -> float | None:
    base, other = _time(one), _time(several)
    return other.tokens_per_second / base.tokens_per_second if base and other else None


def _about_memory(promise: Promise, there: InferenceSetup, gpus: int | None, memory: float) -> list[str]:
    said = []
    capacity = there.machine.accelerator.memory_bytes
    if gpus and gpus < promise.gpus:
        said.append(f"{gpus} {'GPU holds' if gpus == 1 else 'GPUs hold'} it where {promise.gpus} are promised.")
    elif gpus is None or gpus > promise.gpus:
        said.append(f"{promise.gpus} GPUs do not hold it: it takes {gpus or f'more than {_GPUS[-1]}'}.")
    low, high = promise.memory_gb
    batch = largest_batch(there, min(high * _GB, capacity))
    if memory < low and batch:
        said.append(
            f"One request takes {memory:.1f} GB of each of {promise.gpus} GPUs; {high:g} GB hold a batch of {batch}."
        )
    elif memory > high:
        said.append(f"Even one request takes {memory:.1f} GB of each of {promise.gpus} GPUs.")
    return said


def _about_speed(promise: Promise, there: InferenceSetup, one: float | None, many: float | None) -> list[str]:
    slow, fast = promise.speedup
    gpus, said = promise.gpus, []
    if fast > gpus:
        said.append(
            f"Over {gpus} times on {gpus} GPUs is more than linear: only a batch that one cannot hold gives it."
        )
    time = _time(there)
    if one is None or many is None or time is None:
        return [*said, f"No link between {there.machine.name} nodes is known, so {gpus} GPUs have no predicted speed."]
    if one < slow or one > fast:
        verdict = "less" if one < slow else "more"
        said.append(f"One request gains {one:.1f} times, {verdict} than promised: {_parts(there, time)}.")
    if fast / gpus <= 0.5:
        low, high = slow / gpus * 100, fast / gpus * 100
        said.append(f"The promised {slow:g} to {fast:g} times on {gpus} GPUs are {low:.0f} to {high:.0f} % efficiency.")
    return said


def _parts(setup: InferenceSetup, time: GenerationTime) -> str:
    """Describe the parts of a token's time."""
    layout, bandwidth = setup.layout, setup.machine.accelerator.bytes_per_second
    reading = layout.pp * inference_memory(setup).parameters / bandwidth / time.token_seconds
    summing = time.token_communication_seconds / time.token_seconds
    text = (
        f"of a token's {time.token_seconds * 1e3:.1f} ms reading the weights at full bandwidth would take "
        f"{reading * 100:.0f} %, communication takes {summing * 100:.0f} %, and kernels have least times that do not "
        "shrink"
    )
    if layout.pp > 1:
        text += f"; {layout} leaves {layout.pp - 1} of {layout.pp} stages idle while one works"
    return text
