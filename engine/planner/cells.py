"""Predict the cells of a study before they run, in the metrics that records are reduced to.

    prediction = predict_cell(cell, architecture, machine)             # configs.plans.prediction.Prediction
    prediction = predict_cell(cell, architecture, machine, learner, prompt_lengths=[31, 40])

Times are those of `configs.records.rates`: a pass ends when the slowest rank has answered its prompts, a step ends
after the optimizer step. `peak_memory_bytes` is what the memory pass records of the fullest rank: on a CPU the peak of
the whole process, libraries included (VmHWM); on a GPU the allocator's peak, without the CUDA context. Cells that
cannot be predicted have a reason. A machine that was calibrated (`Accelerator.operators`) is predicted from its
measured operators, any other from its data sheet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from configs.common.execution import LEVELS
from configs.hardware.calibration import QUIET_SHARE
from configs.hardware.hardware import Accelerator, Machine
from configs.hardware.quantised_products import LEAST_CAPABILITY, why_not_multiplied
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from configs.workloads.descriptor import RateFigure
from configs.workloads.prompted import RANDOM_PROMPT_TOKENS, PromptedWorkload
from engine.planner.architecture import Architecture
from engine.planner.heads import as_computed
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.reference import STREAMED, USED_SHARE, reference_memory
from engine.planner.memory.stored import OWN_INT4_GROUP, stored_as
from engine.planner.results import GenerationTime, Memory
from engine.planner.setup import InferenceSetup, WeightFormat
from engine.planner.splits import why_not_split
from engine.planner.timing.inference import generation_time
from engine.planner.trained_cells import DEEPSPEED_BYTES, EAGER_LAYER_SECONDS, training_figures, unpredicted

DATA_SHEET_FACTOR = 1.6
"""Typical error of predictions from a data sheet, as a factor: the range of efficiencies in published runs."""
MEASURED_FACTOR, ESTIMATE_FACTOR = 1.4, 3.0
"""The same for operators measured on this machine, and for a CPU known only by its name or flags."""
PRODUCT_OPERATORS = {"int8": 16, "int8_dynamic": 10, "int4": 0, "float8": 6}
"""Operators of `engine.kernels.quantized_gpu` besides the product itself, without padding and bias."""
CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English (OpenAI, "What are tokens and how to count them?", help.openai.com, 2024)."""


@dataclass(frozen=True)
class Learned:
    """A correction learned from past records: multiply predicted seconds by `times`.

    factor: in 9 of 10 cases the true value lies within this factor of the result. records: number of records used.
    """

    times: float
    factor: float
    records: int


Learner = Callable[[Cell, Architecture], Learned | None]


def predict_cell(
    cell: Cell,
    architecture: Architecture | None,
    machine: Machine,
    learner: Learner | None = None,
    prompt_lengths: Sequence[int] | None = None,
) -> Prediction:
    """Predict one cell. `machine`: the machine with this many ranks computing; its price determines dollars.

    learner: correction from past records of this hardware. prompt_lengths: tokens of each prompt, in order, if they
    come from a file and are not truncated to `prompt_tokens`. Other engines are not predicted: their overhead
    is not calibrated, and a decode step of transformers may take five times as long as ours. Never raises for a valid
    cell.
    """
    basis, work, known = basis_of(machine), cell.workload, descriptor_of(cell.workload)
    try:
        if known.unpredicted:
            return Prediction(basis=basis, reason=known.unpredicted)
        if not known.needs_model:
            return _as_stated(cell, machine)
        if cell.engine != "rankwise":
            return _of_another_engine(cell, architecture, machine, prompt_lengths)
        if architecture is None:
            return Prediction(basis=basis, reason="the model's architecture is not known")
        if machine.accelerator.lacks(cell.dtype):
            return Prediction(basis=basis, reason=_not_run(cell, machine.accelerator))
        if isinstance(work, PromptedWorkload):
            found = _prompted(cell, work, as_computed(architecture, work), machine, prompt_lengths)
        else:
            found = _trained(cell, architecture, machine)
    except ValueError as error:  # a link or number format that is not known
        return Prediction(basis=basis, reason=str(error))
    learned = learner(cell, architecture) if learner else None
    whole = "; ".join(filter(None, (basis, found.basis)))
    return priced(corrected(found.model_copy(update={"basis": whole}), learned), cell, machine)


def basis_of(machine: Machine) -> str:
    """Return a short description of where the figures come from; the catalog has the sources."""
    accelerator = machine.accelerator
    if accelerator.kind == "cpu":
        return accelerator.source.split(";")[0]
    return f"{accelerator.title or accelerator.name}: figures of the catalog"


def corrected(prediction: Prediction, learned: Learned | None) -> Prediction:
    """Apply a learned correction: multiply times, divide rates; memory is unchanged."""
    if learned is None or not learned.records:
        return prediction
    times = {"step_seconds", "ttft_seconds", "time_per_output_token_seconds"}
    changed: dict[str, float | int] = {
        "correction": learned.times,
        "learnt_from": learned.records,
        "factor": learned.factor,
    }
    for name in (*times, "tokens_per_second", "embeddings_per_second"):
        value = getattr(prediction, name)
        if value is not None:
            changed[name] = value * learned.times if name in times else value / learned.times
    return prediction.model_copy(update=changed)


def priced(prediction: Prediction, cell: Cell, machine: Machine) -> Prediction:
    """Add dollars per million tokens if the machine's price is known; whole nodes are paid for."""
    rate, hourly = prediction.tokens_per_second, machine.usd_per_hour
    if rate is None or hourly is None:
        return prediction
    nodes = max(cell.nodes, ceil(cell.layout.ranks / machine.accelerators))
    return prediction.model_copy(update={"usd_per_million_tokens": hourly * nodes / 3600 / rate * 1e6})


def prior_factor(cell: Cell, accelerator: Accelerator) -> float:
    """Return the half-width of the interval as a factor when nothing was learned.

    Measured operators on this machine: 1.4 (quiet or busy neighbours alone cause 1.2), more if other processes ran
    during calibration. Data sheet: DATA_SHEET_FACTOR. CPU known by name or flags: 3. More cores a rank than
    were measured: 1.5 times.
    """
    if accelerator.operators:
        factor = _calibration_factor(accelerator.others_cpu_share or 0.0)
    else:
        factor = ESTIMATE_FACTOR if accelerator.kind == "cpu" else DATA_SHEET_FACTOR
    if accelerator.kind == "cpu" and cell.cores_per_rank > 1:
        factor *= 1.5
    return factor


def _calibration_factor(others_cpu_share: float) -> float:
    """Return the factor for measured operators; a noisy calibration is at least as good as an estimate.

    If other processes took a share of the CPU, a rank may have had only the rest, so figures may be 1 / (1 - share)
    times too slow. The effect on the timed operators is not known.
    """
    if others_cpu_share <= QUIET_SHARE:
        return MEASURED_FACTOR
    return min(ESTIMATE_FACTOR, MEASURED_FACTOR / max(1e-9, 1 - others_cpu_share))


def inference_setup(
    cell: Cell, architecture: Architecture, machine: Machine, prompt: int, batch: int
) -> InferenceSetup:
    """Return one batch of a prompt-processing cell; for an encoder-decoder the prompt is the source."""
    work = cell.workload
    assert isinstance(work, PromptedWorkload)
    return InferenceSetup(
        architecture=architecture,
        machine=machine,
        layout=cell.layout,
        batch=batch,
        prompt_tokens=max(1, prompt),
        new_tokens=work.decoded_tokens,
        micro_batch=work.in_micro_batches(cell.layout.pp),
        weights=stored_format(cell),
        compute=cell.dtype,
        quantised_head=True,
        int4_group=OWN_INT4_GROUP,
        int4_zero_points=machine.accelerator.kind != "cpu",
        product_operators=0 if machine.accelerator.kind == "cpu" else _operators_beside_products(cell),
    )


def stored_format(cell: Cell) -> WeightFormat:
    """Return the format in which weights are stored and read. Pruned weights are stored dense, including zeros."""
    return stored_as(cell.compression, cell.dtype)


def _operators_beside_products(cell: Cell) -> int:
    """Return the operators of a GPU around one product of quantised weights."""
    return sum(PRODUCT_OPERATORS.get(one, 0) for one in cell.compression)


def _not_run(cell: Cell, accelerator: Accelerator) -> str:
    """Return why ranks are refused a number format: as `engine.rank.joining` does when they start."""
    return f"{accelerator.title or accelerator.name} has no {cell.dtype}. Use float16 or float32"


def _capability(accelerator: Accelerator) -> tuple[int, int] | None:
    """Return the least compute capability of an NVIDIA GPU that multiplies what the data sheet lists; None: another."""
    if accelerator.kind != "cuda":
        return None
    formats = accelerator.peak_flops
    return (
        (8, 9) if "float8" in formats else (8, 0) if "bfloat16" in formats else (7, 5) if "int8" in formats else (7, 0)
    )


def _why_not_multiplied(cell: Cell, accelerator: Accelerator) -> str | None:
    schemes = [one for one in cell.compression if one in LEAST_CAPABILITY]
    if not schemes:
        return None
    if accelerator.kind == "cpu" and (schemes[0] == "float8" or cell.dtype == "float16"):
        return f"a CPU widens {schemes[0]} weights of {cell.dtype} at each call, which is slow and not predicted"
    return why_not_multiplied(schemes[0], cell.dtype, accelerator.kind, _capability(accelerator))


def _as_stated(cell: Cell, machine: Machine) -> Prediction:
    """Of work whose seconds are in its fields."""
    work, known = cell.workload, descriptor_of(cell.workload)
    seconds, units = work.known_seconds(cell.layout.ranks), work.units_per_pass(cell.layout.dp)
    if seconds is None or units is None:
        return Prediction(reason=f"a {known.kind} does not state how long it takes")
    if not seconds:
        return Prediction(basis="the cell's own seconds", reason=f"a {known.kind} of 0 s takes no time to speak of")
    fits = None
    if machine.host_memory_bytes is not None:
        fits = work.known_bytes * cell.layout.ranks <= machine.host_memory_bytes
    rate: dict[RateFigure, float] = {known.throughput: units / seconds}
    return Prediction(**rate, factor=1.1, fits=fits, basis="the cell's own seconds")


def _unpredicted(cell: Cell, architecture: Architecture, accelerator: Accelerator) -> str | None:
    """Why nothing is said of a cell; None: something is."""
    wanted = descriptor_of(cell.workload).model_form
    if architecture.kind != wanted:
        return f"{cell.workload.kind} is for a model of kind {wanted}, and this is one of kind {architecture.kind}"
    if set(cell.compression) & set(LEVELS):
        return f"what {cell.compression[0]} becomes is known on the machine alone"
    return why_not_split(architecture, cell.layout) or _why_not_multiplied(cell, accelerator)


def _prompted(
    cell: Cell,
    work: PromptedWorkload,
    architecture: Architecture,
    machine: Machine,
    prompt_lengths: Sequence[int] | None,
) -> Prediction:
    dp, notes, new_tokens = cell.layout.dp, [], work.decoded_tokens
    reason = _unpredicted(cell, architecture, machine.accelerator)
    if reason is not None:
        return Prediction(reason=reason)
    prompts = work.num_prompts or work.batch_size * dp
    share = ceil(prompts / dp)
    size = min(work.batch_size, share)
    lengths = list(prompt_lengths or [])
    if work.prompt_tokens is not None or not lengths:
        lengths = [work.prompt_tokens or RANDOM_PROMPT_TOKENS]
        if work.prompts is not None and work.prompt_tokens is None:
            notes.append(f"prompts taken for {RANDOM_PROMPT_TOKENS} tokens each")
    known = work.prompt_tokens is not None or work.prompts is None  # what is estimated must not refuse a cell
    asked = work.positions(max(lengths))
    if known and architecture.position_limit and asked > architecture.position_limit:
        limit = f"{architecture.position_limit} positions"
        return Prediction(reason=f"{max(lengths)} + {new_tokens} tokens are more than the model's {limit}")
    if work.longest_tokens is not None:
        lengths.append(work.longest_tokens)
    full, rest = divmod(share, size)
    # A batch is padded to its longest prompt.
    prompt = round(fmean(_longest(lengths, size)))
    timed = _generation(inference_setup(cell, architecture, machine, prompt, size))
    seconds = full * timed.seconds
    if rest:
        seconds += _generation(inference_setup(cell, architecture, machine, prompt, rest)).seconds
    # Our cache has room for the whole context in every layer; a window limits what is read of it.
    held = replace(architecture, windows=())
    memory = inference_memory(inference_setup(cell, held, machine, max(lengths), size), all_logits=False)
    rates: dict[str, float | None] = {"embeddings_per_second": prompts / seconds}
    if descriptor_of(cell.workload).decodes:
        rates = {
            "tokens_per_second": prompts * new_tokens / seconds,
            "ttft_seconds": timed.prefill_seconds,
            "time_per_output_token_seconds": timed.token_seconds if new_tokens > 1 else None,
        }
    return Prediction(
        **rates,
        factor=prior_factor(cell, machine.accelerator),
        basis="; ".join(notes),
        **_memory(memory, cell, machine),
    )


def _trained(cell: Cell, architecture: Architecture, machine: Machine) -> Prediction:
    reason = unpredicted(cell, architecture)
    if reason is not None:
        return Prediction(reason=reason)
    figures, memory = training_figures(cell, architecture, machine)
    return Prediction(
        **figures,
        factor=prior_factor(cell, machine.accelerator),
        **_memory(memory, cell, machine),
    )


def _generation(setup: InferenceSetup) -> GenerationTime:
    time = generation_time(setup)
    if setup.machine.accelerator.kind == "cpu":
        return time
    # Of a prefill alone: decode steps are recorded (`engine.inference.graphs`), so that nothing waits for Python.
    least = setup.architecture.layers * EAGER_LAYER_SECONDS
    return replace(time, prefill_seconds=max(time.prefill_seconds, least))


def _memory(memory: Memory, cell: Cell, machine: Machine) -> dict[str, int | bool]:
    """Return the recorded peak of the fullest rank, and whether all ranks of a node fit."""
    accelerator = machine.accelerator
    if accelerator.kind != "cpu":
        return {"peak_memory_bytes": max(1, memory.tensors), "fits": memory.total <= accelerator.memory_bytes}
    trains = descriptor_of(cell.workload).trains
    own = accelerator.training_framework_bytes if trains else accelerator.framework_bytes
    # What is offloaded to the host is in the same memory here.
    peak = memory.host_bytes + (memory.total if own is None else memory.tensors + own)
    peak += DEEPSPEED_BYTES if cell.layout.strategy.startswith("zero") else 0
    ranks = min(cell.layout.ranks, machine.accelerators)
    whole = machine.host_memory_bytes or accelerator.memory_bytes
    return {"peak_memory_bytes": peak, "fits": peak * ranks <= whole}


def _of_another_engine(
    cell: Cell, architecture: Architecture | None, machine: Machine, prompt_lengths: Sequence[int] | None
) -> Prediction:
    """Return why there is no prediction; for a reference with its noise also the memory that it needs."""
    reason = f"engine {cell.engine}: not predicted, only Rankwise's own engine is modelled"
    work = cell.workload
    if architecture is None or not isinstance(work, PromptedWorkload) or not work.noise_dtypes:
        return Prediction(reason=reason)
    longest = max([*(prompt_lengths or [work.prompt_tokens or RANDOM_PROMPT_TOKENS]), work.longest_tokens or 0])
    taken = _reference_memory(work, architecture, machine, work.positions(longest))
    return Prediction(reason=reason, basis="" if taken["fits"] else STREAMED, **taken)


def _reference_memory(
    work: PromptedWorkload, architecture: Architecture, machine: Machine, positions: int
) -> dict[str, int | bool]:
    """Return the need of a reference with its noise, and whether the weights stay in memory."""
    twin = any(dtype != "float32" for dtype in work.noise_dtypes)
    need = reference_memory(
        architecture.parameters, architecture.vocabulary, architecture.hidden, architecture.layers, positions, twin
    )
    whole = machine.accelerator.memory_bytes
    if machine.accelerator.kind == "cpu":
        whole = machine.host_memory_bytes or whole
    return {"peak_memory_bytes": need.total, "fits": need.total <= USED_SHARE * whole}


def _longest(lengths: Sequence[int], size: int) -> list[int]:
    """Return the longest prompt of each batch, in the order of the file."""
    return [max(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def interval(value: float, factor: float | None) -> tuple[float, float] | None:
    """Return the low and high end of a figure; None if no error is known."""
    return None if factor is None else (value / factor, value * factor)
