"""What the planner says of a study's cells before they run, in the figures that records are reduced to.

    prediction = predict_cell(cell, architecture, machine)             # configs.prediction.Prediction
    prediction = predict_cell(cell, architecture, machine, prompt_lengths=[31, 40], learned=correction)

Times are those of `configs.rates`: a pass is over when the slowest rank has answered its prompts, a step when the
optimizer has stepped. `peak_memory_bytes` is what the memory pass records of the fullest rank: on a CPU the peak of
the whole process, libraries included (VmHWM); on a GPU what the allocator held at most, its context left out.
What cannot be predicted has a reason. A machine that was calibrated (`Accelerator.operators`) is predicted from its
measured operators, any other from its data sheet's figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from configs.calibration import QUIET_SHARE
from configs.cell import (
    LEVELS,
    Cell,
    CommunicationWorkload,
    EncodeWorkload,
    NoopWorkload,
    PreflightWorkload,
    PromptedWorkload,
    Seq2SeqWorkload,
)
from configs.hardware import Accelerator, Machine
from configs.prediction import Prediction
from configs.training import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.stored import QUANTISED
from engine.planner.results import GenerationTime, Memory
from engine.planner.setup import InferenceSetup, WeightFormat
from engine.planner.timing.cpu import can_measure, measured_generation_time
from engine.planner.timing.inference import generation_time
from engine.planner.trained_cells import DEEPSPEED_BYTES, EAGER_LAYER_SECONDS, training_figures, unpredicted

RANDOM_PROMPT_TOKENS = 32
"""Length of random prompts where the study gives none; as `engine.tokens`, which needs torch."""
DATA_SHEET_FACTOR = 1.6
"""How far predictions from a data sheet are usually off, as a factor: it reaches the shares that published runs do."""
MEASURED_FACTOR, ESTIMATE_FACTOR = 1.4, 3.0
"""The same of operators measured on this machine, and of a CPU that is known by its name or flags alone."""
CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English (OpenAI, "What are tokens and how to count them?", help.openai.com, 2024)."""


@dataclass(frozen=True)
class Learned:
    """What past records say of a prediction: its seconds are to be multiplied by `times`.

    factor: in 9 of 10 cases the truth lies within times or over this of what comes out. records: that taught it.
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
    """Predict one cell. `machine`: as it is while so many ranks compute; its price makes dollars.

    learner: what past records of this hardware say. prompt_lengths: tokens of each prompt, in order, where they come
    from a file and are not cut to `prompt_tokens`. Never raises for a cell that is valid.
    """
    basis, work = basis_of(machine), cell.workload
    try:
        if isinstance(work, NoopWorkload):
            return _noop(cell, work, machine)
        if isinstance(work, CommunicationWorkload | PreflightWorkload):
            return Prediction(basis=basis, reason="single operations are what predictions are made from")
        if architecture is None:
            return Prediction(basis=basis, reason="the model's architecture is not known")
        if isinstance(work, PromptedWorkload):
            found = _prompted(cell, work, architecture, machine, prompt_lengths)
        else:
            found = _train(cell, work, architecture, machine)
    except ValueError as error:  # a link or number format that is not known
        return Prediction(basis=basis, reason=str(error))
    learned = learner(cell, architecture) if learner else None
    whole = "; ".join(filter(None, (basis, found.basis)))
    return priced(corrected(found.model_copy(update={"basis": whole}), learned), cell, machine)


def basis_of(machine: Machine) -> str:
    """Where the figures come from, in a few words; the catalog has each with its source."""
    accelerator = machine.accelerator
    if accelerator.kind == "cpu":
        return accelerator.source.split(";")[0]
    return f"{accelerator.title or accelerator.name}: figures of the catalog"


def corrected(prediction: Prediction, learned: Learned | None) -> Prediction:
    """Times multiplied, rates divided by what was learned; memory stays."""
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
    """With dollars for a million tokens, where the machine's price is known: whole nodes are paid for."""
    rate, hourly = prediction.tokens_per_second, machine.usd_per_hour
    if rate is None or hourly is None:
        return prediction
    nodes = max(cell.nodes, ceil(cell.layout.ranks / machine.accelerators))
    return prediction.model_copy(update={"usd_per_million_tokens": hourly * nodes / 3600 / rate * 1e6})


def prior_factor(cell: Cell, accelerator: Accelerator) -> float:
    """The interval's half-width as a factor where nothing was learnt: how far such figures are usually off.

    Measured operators on this machine: 1.4 (quiet to busy neighbours alone make 1.2), more if others were at work
    meanwhile; a data sheet: DATA_SHEET_FACTOR; an estimate of a CPU from its name or flags: 3. Other engines have
    overheads of their own that nobody measured: twice that. More cores a rank than were measured with: 1.5 times.
    """
    if accelerator.operators:
        factor = _calibration_factor(accelerator.others_cpu_share or 0.0)
    else:
        factor = ESTIMATE_FACTOR if accelerator.kind == "cpu" else DATA_SHEET_FACTOR
    if cell.engine != "rankwise":
        factor *= 2
    if accelerator.kind == "cpu" and cell.cores_per_rank > 1:
        factor *= 1.5
    return factor


def _calibration_factor(others_cpu_share: float) -> float:
    """Of measured operators; a noisy calibration is worth no less than an estimate from the CPU's name.

    Where others took a share of the CPU, a rank had as little as the rest of it, so that figures may be 1 / (1 - share)
    times too slow; how much of that fell on the timed operators is not known.
    """
    if others_cpu_share <= QUIET_SHARE:
        return MEASURED_FACTOR
    return min(ESTIMATE_FACTOR, MEASURED_FACTOR / max(1e-9, 1 - others_cpu_share))


def inference_setup(
    cell: Cell, architecture: Architecture, machine: Machine, prompt: int, batch: int
) -> InferenceSetup:
    """One batch of a cell that works through prompts; of an encoder-decoder the prompt is the source."""
    work = cell.workload
    assert isinstance(work, PromptedWorkload)
    return InferenceSetup(
        architecture=architecture,
        machine=machine,
        layout=cell.layout,
        batch=batch,
        prompt_tokens=max(1, prompt),
        new_tokens=new_tokens_of(work),
        micro_batch=work.in_micro_batches(cell.layout.pp),
        weights=stored_format(cell),
        compute=cell.dtype,
    )


def new_tokens_of(work: PromptedWorkload) -> int:
    """Tokens that are decoded for each prompt; 0 of an encoder."""
    return int(getattr(work, "new_tokens", 0))


def stored_format(cell: Cell) -> WeightFormat:
    """What the weights are kept and read in. Pruned weights stay where they were, zeros among them."""
    for one in cell.compression:
        if one in ("int8", "int8_dynamic"):
            return "int8"
        if one == "int4":
            return "int4"
    return cell.dtype


def _noop(cell: Cell, work: NoopWorkload, machine: Machine) -> Prediction:
    """It sleeps as told; the slowest rank has the most items."""
    seconds = work.seconds * ceil(work.items / cell.layout.ranks)
    if not seconds:
        return Prediction(basis="the cell's own seconds", reason="a noop of 0 s takes no time to speak of")
    fits = None
    if machine.host_memory_bytes is not None:
        fits = work.allocate_bytes * cell.layout.ranks <= machine.host_memory_bytes
    return Prediction(items_per_second=work.items / seconds, factor=1.1, fits=fits, basis="the cell's own seconds")


KINDS = {"generate": "decoder", "seq2seq": "encoder_decoder", "encode": "encoder"}


def _unpredicted(cell: Cell, work: PromptedWorkload, architecture: Architecture) -> str | None:
    """Why nothing is said of a cell; None: something is."""
    wanted = KINDS[cell.workload.kind]
    if architecture.kind != wanted:
        return f"{cell.workload.kind} is for a model of kind {wanted}, and this is one of kind {architecture.kind}"
    if set(cell.compression) & set(LEVELS):
        return f"what {cell.compression[0]} becomes is known on the machine alone"
    return None


def _prompted(
    cell: Cell,
    work: PromptedWorkload,
    architecture: Architecture,
    machine: Machine,
    prompt_lengths: Sequence[int] | None,
) -> Prediction:
    dp, notes, new_tokens = cell.layout.dp, [], new_tokens_of(work)
    reason = _unpredicted(cell, work, architecture)
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
    asked = max(new_tokens, max(lengths)) if isinstance(work, Seq2SeqWorkload) else max(lengths) + new_tokens
    if known and architecture.max_positions and asked > architecture.max_positions:
        limit = f"{architecture.max_positions} positions"
        return Prediction(reason=f"{max(lengths)} + {new_tokens} tokens are more than the model's {limit}")
    full, rest = divmod(share, size)
    # A batch is filled up to its longest prompt.
    prompt = round(fmean(_longest(lengths, size)))
    timed = _generation(inference_setup(cell, architecture, machine, prompt, size))
    seconds = full * timed.seconds
    if rest:
        seconds += _generation(inference_setup(cell, architecture, machine, prompt, rest)).seconds
    widest = inference_setup(cell, architecture, machine, max(lengths), size)
    memory = inference_memory(widest, all_logits=False)
    if cell.engine != "rankwise":
        notes.append(f"{cell.engine} taken for as fast as our engine")
    rates: dict[str, float | None] = {"embeddings_per_second": prompts / seconds}
    if not isinstance(work, EncodeWorkload):
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


def _train(cell: Cell, work: TrainWorkload, architecture: Architecture, machine: Machine) -> Prediction:
    reason = unpredicted(work, architecture)
    if reason is not None:
        return Prediction(reason=reason)
    figures, memory = training_figures(cell, architecture, machine)
    return Prediction(
        **figures,
        factor=prior_factor(cell, machine.accelerator),
        **_memory(memory, cell, machine),
    )


def _generation(setup: InferenceSetup) -> GenerationTime:
    if setup.weights not in QUANTISED and can_measure(setup.architecture, setup.machine.accelerator):
        return measured_generation_time(setup)
    time = generation_time(setup)
    if setup.machine.accelerator.kind == "cpu":
        return time
    least = setup.architecture.layers * EAGER_LAYER_SECONDS
    return replace(time, prefill_seconds=max(time.prefill_seconds, least), token_seconds=max(time.token_seconds, least))


def _memory(memory: Memory, cell: Cell, machine: Machine) -> dict[str, int | bool]:
    """Peak of the fullest rank as recorded, and whether all ranks of a node fit."""
    accelerator = machine.accelerator
    if accelerator.kind != "cpu":
        return {"peak_memory_bytes": max(1, memory.tensors), "fits": memory.total <= accelerator.memory_bytes}
    training = isinstance(cell.workload, TrainWorkload)
    own = accelerator.training_framework_bytes if training else accelerator.framework_bytes
    # What is offloaded to the host is in the same memory here.
    peak = memory.host_bytes + (memory.total if own is None else memory.tensors + own)
    peak += DEEPSPEED_BYTES if cell.layout.strategy.startswith("zero") else 0
    ranks = min(cell.layout.ranks, machine.accelerators)
    whole = machine.host_memory_bytes or accelerator.memory_bytes
    return {"peak_memory_bytes": peak, "fits": peak * ranks <= whole}


def _longest(lengths: Sequence[int], size: int) -> list[int]:
    """The longest prompt of each batch, the file's prompts in order."""
    return [max(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def interval(value: float, factor: float | None) -> tuple[float, float] | None:
    """Low and high of a figure; None where nothing is said of its error."""
    return None if factor is None else (value / factor, value * factor)
