"""Explain a plan in one sentence: the choice and its alternative, or the smallest change that makes it fit.

explain_choice(chosen, found, max_memory_bytes)      # "FSDP, dp=8 on 8 x h100-80gb, 4 sequences at once: ..."
mended(setup, max_memory_bytes)               # "full checkpointing brings 31.2 GB to 19.8 of 24.0"
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.planner.choice.descriptions import ALONE, GB, rate, short, title
from engine.planner.choice.search import LAUNCHABLE, EvaluatedSetup, memory_limit, ranked, with_memory_limit
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.shrink import smallest_change
from engine.planner.setup import InferenceSetup, TrainingSetup

_NEAR = 0.02
_SMALL = 0.01  # share of the memory
_MOST_GPUS = 64


def explain_choice(chosen: EvaluatedSetup, found: Sequence[EvaluatedSetup], max_memory_bytes: int | None = None) -> str:
    """Return one sentence: the choice, its speed, that it fits, and the alternative."""
    setup = chosen.setup
    assert isinstance(setup, TrainingSetup)
    device, gpus = setup.machine.accelerator, setup.layout.ranks
    alone = f"one {device.name}" if title(setup) == ALONE else f"one {device.name}, {title(setup)}"
    where = f"{title(setup)} on {gpus} x {device.name}" if gpus > 1 else alone
    if not chosen.fits:
        return f"Nothing fits; the leanest, {where}, {chosen.why_not}."
    batch = f"{setup.micro_batch} sequence{'s' if setup.micro_batch > 1 else ''} at once"
    batch += f", accumulated {setup.accumulation} times" if setup.accumulation > 1 else ""
    limit = memory_limit(setup.machine, max_memory_bytes)
    memory = f"{chosen.memory.total / GB:,.1f} of {limit / GB:,.1f} GB"
    speed = f"{short(chosen.seconds or 0.0)} s a step, {rate(chosen.tokens_per_second or 0.0)} tokens/s"
    answer = f"{_capital(where)}, {batch}: the fastest predicted of what fits there"
    return f"{answer} ({speed}; {memory}){_against(chosen, found)}."


def explain_inference(chosen: EvaluatedSetup, max_memory_bytes: int | None = None) -> str:
    """Return one sentence, as `explain_choice`."""
    setup = chosen.setup
    device, gpus = setup.machine.accelerator, setup.layout.ranks
    where = f"{title(setup)} on {gpus} x {device.name}" if gpus > 1 else f"one {device.name}"
    if not chosen.fits:
        return f"Nothing fits; the leanest, {where}, {chosen.why_not}."
    limit = memory_limit(setup.machine, max_memory_bytes)
    memory = f"{chosen.memory.total / GB:,.1f} of {limit / GB:,.1f} GB"
    speed = f"{short(chosen.seconds or 0.0)} s a batch, {rate(chosen.tokens_per_second or 0.0)} tokens/s"
    return f"{_capital(where)}: the fastest predicted of what fits there ({speed}; {memory})."


def window_note(chosen: EvaluatedSetup, max_memory_bytes: int | None = None) -> list[str]:
    """Return a remark if layers with a sliding window are taken to cache less than the context.

    Engines differ: transformers and vLLM keep the window, our caches have a place for each position
    (`engine.inference.cache`, `engine.inference.paged`).
    """
    setup = chosen.setup
    assert isinstance(setup, InferenceSetup)
    whole = inference_memory(setup.replace(architecture=replace(setup.architecture, windows=()))).total
    if whole <= (1 + _SMALL) * chosen.memory.total:
        return []
    limit = memory_limit(setup.machine, max_memory_bytes)
    return [
        "layers with a sliding window keep the window alone in the KV cache; an engine that keeps the whole context, "
        f"as Rankwise's own does, needs {whole / GB:,.1f} GB a device of {limit / GB:,.1f}"
    ]


def _against(chosen: EvaluatedSetup, found: Sequence[EvaluatedSetup]) -> str:
    """Return the alternative: DDP if it does not fit, else the best other strategy; offload only if needed."""
    strategy, offload = chosen.setup.layout.strategy, getattr(chosen.setup, "offload", "none")
    others = {each.setup.layout.strategy: each for each in reversed(found) if each.setup.layout.strategy != strategy}
    plain = others.get("ddp") or others.get("none")
    if plain is not None and not plain.fits:
        return f"; {title(plain.setup)} {plain.why_not}"
    fair = [
        each
        for each in others.values()
        if each.fits and (offload != "none" or getattr(each.setup, "offload", "none") == "none")
    ]
    if not fair or chosen.seconds is None:
        return ""
    other = min(fair, key=lambda each: each.seconds or 0.0)
    slower = (other.seconds or 0.0) / chosen.seconds - 1
    if slower < _NEAR:
        return f"; {title(other.setup)} is within {_NEAR:.0%}, which predictions cannot tell apart"
    if slower >= 1:
        return f"; the next, {title(other.setup)}, takes {short(1 + slower)} times as long"
    return f"; the next, {title(other.setup)}, is {slower:.0%} slower"


def mended(setup: TrainingSetup | InferenceSetup, max_memory_bytes: int | None) -> str:
    """Describe the smallest change that makes it fit, or that none is known.

    Training: on as many GPUs; else on more with as many sequences each; else on more with the same step. Generation:
    more GPUs come before anything that users would notice.
    """
    limit, ranks = memory_limit(setup.machine, max_memory_bytes), setup.layout.ranks
    most = max(_MOST_GPUS, 2 * ranks) if setup.machine.between is not None else setup.machine.accelerators
    if isinstance(setup, TrainingSetup):
        change = smallest_change(setup, limit)
        larger = None if change is not None else _on_more(setup, max_memory_bytes, most)
        if larger is not None:
            return larger
        change = change or smallest_change(setup, limit, most)
    else:
        change = smallest_change(setup, limit, most)
    if change is not None:
        return change.sentence
    there = f" on up to {most} {setup.machine.accelerator.name}" if most > ranks else ""
    return f"nothing that is known makes it fit{there}; take a device with more memory or a smaller model"


def _on_more(setup: TrainingSetup, max_memory_bytes: int | None, most: int) -> str | None:
    ranks, each = setup.layout.ranks, setup.global_batch // setup.layout.ranks or 1
    more = 2 * ranks
    while more <= most:
        best = ranked(setup, more, more * each, with_memory_limit(LAUNCHABLE, max_memory_bytes))[0]
        if best.fits:
            what = "ranks" if setup.machine.accelerator.kind == "cpu" else "GPUs"
            return f"{more} {what} with as many sequences each hold it: {title(best.setup)}"
        more *= 2
    return None


def _capital(text: str) -> str:
    """A layout such as `tp=2` is written as it is in a study."""
    return text if "=" in text.split()[0] else text[0].upper() + text[1:]
