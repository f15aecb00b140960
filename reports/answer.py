"""The opening of a report: what to run, where scaling stops paying, whether the answers are right, what has no figure.

    sentences = answer(study, verdicts, decisions)

At most MAX_SENTENCES. Each has a lead that can stand alone, a body with the numbers behind it, and the heading of the
appendix where its evidence is. They are plain text: the report makes the lead bold, a terminal prints both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from configs.common.printable import shortened
from configs.records.record import Status
from engine.planner.forecasting.forecast import HALF
from reports.correctness.section import JudgedCell
from reports.decisions.decision import Decision, decision_body, decision_lead, efficiency_text, shown_decisions
from reports.decisions.scaling_end import ScalingEnd, scaling_lead
from reports.experiments.compression import compression, compression_sentence
from reports.experiments.engines import WORST_FIRST, engines, engines_sentence
from reports.experiments.kernels import different_kernels, without_kernels
from reports.experiments.load.choice import server_choices
from reports.experiments.load.choice_text import server_body, server_lead
from reports.experiments.load.text import limit_sentences, load_sentence
from reports.experiments.scaling import scaling
from reports.experiments.targets import side_by_side, targets_opening
from reports.planning.forecast import half_text, study_forecast
from reports.profiles.time_split import exposed_clause, time_split
from reports.reading.devices import without_their_gpus
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import NOT_MEASURED
from reports.tables import NOISE_LIMIT, damaged_records, lost_passes, noise_warning, others_shares
from reports.text import first_of, joined, number, plural

MAX_SENTENCES = 6
RECOMMENDATIONS, FAILURES, RESOURCES = "Recommendations", "Failures", "Memory and CPU"
"""Headings of the appendix."""

_MOST_FILES = 3
"""Named in a sentence; the table of failures has all."""


@dataclass(frozen=True)
class Sentence:
    """One statement of the answer, as plain text. evidence: a heading of the appendix."""

    lead: str
    body: str
    evidence: str | None = None

    @property
    def text(self) -> str:
        return f"{self.lead} {self.body}"


def answer(
    study: StudyResult, judged: Sequence[tuple[str, JudgedCell]], decisions: Sequence[Decision] = ()
) -> list[Sentence]:
    """The opening sentences. `judged`: (model, verdict) of every correctness experiment."""
    decided = _decisions(decisions)
    scaled = _scalings(study, shown_decisions(decisions))
    correct = [_correctness(judged)] if judged else []
    lost, busy = _lost(study), _busy(study)
    served, on_cores = _servers(study), _on_cores(study)
    told = [*_damaged(study), *on_cores, *_apart(study), *decided, *served, *busy, *scaled]
    told += [*_experiments(study, judged), *correct]
    told.append(lost)
    # What is left out stands in the section of its experiment too.
    first = [*decided[:1], *served[:1]]
    order = [*_damaged(study), *on_cores, *first, *correct, lost, *busy, *_apart(study)]
    order += [*decided[1:], *served[1:], *scaled]
    kept = [*order, *(one for one in told if one not in order)][:MAX_SENTENCES]
    return [one for one in told if one in kept]


def _busy(study: StudyResult) -> list[Sentence]:
    """That other processes took much of the CPU during most cells: what rests on them says nothing of a quiet machine.

    A cell that had it in a few repeats is named in the appendix alone: its median is of the others.
    """
    usual = [median(shares) for result in study.cells.values() if (shares := others_shares(result))]
    warning = noise_warning(study) if 2 * sum(share > NOISE_LIMIT for share in usual) > len(usual) else None
    if warning is None:
        return []
    return [Sentence("Measured on a busy machine:", f"{warning[0].lower()}{warning[1:]}", RESOURCES)]


def _decisions(decisions: Sequence[Decision]) -> list[Sentence]:
    shown = shown_decisions(decisions)
    found = [Sentence(f"{decision_lead(one)}:", f"{decision_body(one)}.", RECOMMENDATIONS) for one in shown]
    more = len(decisions) - len(shown)
    if more:
        last = found[-1]
        body = f"{last.body[:-1]}; {plural(more, 'more kind')} of work under recommendations."
        found[-1] = Sentence(last.lead, body, RECOMMENDATIONS)
    return found


def _servers(study: StudyResult) -> list[Sentence]:
    """Which server each load experiment decides for, or what the one that it tried carries."""
    told = []
    read = server_choices(study)
    searched_models = {one.model for one, found, _ in read if any(limit_sentences(found))}
    for experiment, found, choice in read:
        if choice is not None:
            if choice.choice is None and choice.figure != "limit" and experiment.model in searched_models:
                continue  # a search says more than one measured rate
            lead, body = server_lead(found, choice), server_body(found, choice)
            told.append(Sentence(f"{lead}:", f"{body}.", study.title(experiment)))
        elif searched := list(limit_sentences(found)):
            told.append(Sentence(f"{experiment.model or 'The server'}:", " ".join(searched), study.title(experiment)))
        elif any(point.repeats for point in found.points) and not any(point.valid for point in found.points):
            lead = f"{experiment.model or 'The server'} under load:"
            told.append(Sentence(lead, load_sentence(found), study.title(experiment)))
    return told


def _scalings(study: StudyResult, decisions: Sequence[Decision]) -> list[Sentence]:
    """A sentence for each decision that has a scaling experiment; the leads of several name what they are of."""
    found = [(one, sentence) for one in decisions for sentence in _scaling(study, one)]
    kinds = {one.members[0].cell.workload.kind for one, _ in found}
    models = {one.model for one, _ in found}
    told = []
    for one, sentence in found:
        names = [one.model] if len(models) > 1 else []
        names += [one.members[0].cell.workload.kind] if len(kinds) > 1 else []
        lead = f"{sentence.lead[:-1]} ({', '.join(names)}):" if names else sentence.lead
        told.append(Sentence(lead, sentence.body, sentence.evidence))
    return told


def _scaling(study: StudyResult, decision: Decision) -> list[Sentence]:
    """Up to how many ranks scaling pays, as measured, and what it loses to communication; then the forecast."""
    kinds = ("strong", "weak")
    of_model = [one for one in study.plan.experiments if one.kind in kinds and one.points]
    for experiment in sorted(of_model, key=lambda one: kinds.index(one.kind)):
        found = scaling(study, experiment)
        # Points of fewer ranks than a baseline that the study chose say nothing of what more ranks bring.
        grown = [(point.ranks, point.efficiency) for point in found.measured if point.ranks > found.baseline.ranks]
        if all(one is not found.baseline.result for one in decision.considered) or not grown:
            continue
        base = found.baseline.ranks
        paid = [
            ranks for ranks, efficiency in grown if efficiency is not None and _pays(ranks / base, efficiency.value)
        ]
        end = ScalingEnd(base, max(paid, default=base), max(ranks for ranks, _ in grown))
        lead, why = scaling_lead(end, decision)
        named = f" in {experiment.name}" if experiment.name != experiment.kind else ""
        text = f"{experiment.kind} scaling of {decision.subject}{named} gives {efficiency_text(grown)}{why}"
        split = time_split(study, experiment)
        if split is not None and (exposed := exposed_clause(split)) is not None:
            text += f"; {exposed}"
        forecast = study_forecast(study, found)
        if forecast is not None and not isinstance(forecast, str):
            half = half_text(forecast)
            text += f"; forecast: {half[:1].lower()}{half[1:].rstrip('.')}"
        return [Sentence(lead, f"{text}.", study.title(experiment))]
    return []


def _pays(growth: float, efficiency: float) -> bool:
    """Whether each rank added to the baseline's does at least half of what one of those does.

    At the knee of speed-up against efficiency the latter is a half or more (D. L. Eager, J. Zahorjan, E. D. Lazowska,
    "Speedup versus efficiency in parallel systems", IEEE Transactions on Computers 38 (1989) 408-423). That alone would
    call it paid when the second of two ranks does nothing at all; of many ranks both say the same.
    """
    return efficiency * growth - 1 >= HALF * (growth - 1)


def _damaged(study: StudyResult) -> list[Sentence]:
    """What the other sentences are missing: records that cannot be read, and those that a run has set aside."""
    found = []
    if study.unreadable:
        shown = [f"{item.path} ({item.reason})" for item in study.unreadable[:_MOST_FILES]]
        if len(study.unreadable) > len(shown):
            shown.append(f"{len(study.unreadable) - len(shown):,} more")
        told = (
            f"{joined(shown)}. {'It is' if len(study.unreadable) == 1 else 'They are'} left out, so figures and "
            "recommendations may be others than with all files. `rankwise run` sets damaged records aside and measures "
            "them again."
        )
        found.append(Sentence(f"{plural(len(study.unreadable), 'file')} of the run cannot be read:", told))
    if study.set_aside:
        shown = [*study.set_aside[:_MOST_FILES]]
        if len(study.set_aside) > len(shown):
            shown.append(f"{len(study.set_aside) - len(shown):,} more")
        count = len(study.set_aside)
        lead = f"{plural(count, 'record')} {'was' if count == 1 else 'were'} unreadable and set aside:"
        found.append(
            Sentence(lead, f"{joined(shown)}. `rankwise run` measures {'it' if count == 1 else 'them'} again.")
        )
    return found


def _on_cores(study: StudyResult) -> list[Sentence]:
    """That what is told of a machine with GPUs was measured on cores."""
    found = without_their_gpus(study)
    if not found:
        return []
    told = [
        f"target {name} names {machine.name}, which has {machine.accelerators} x {machine.accelerator.title}, but the "
        f"ranks of {plural(cells, 'cell')} computed on the CPU"
        for name, (machine, cells) in found.items()
    ]
    body = (
        f"{'; '.join(told)}. Figures are those of its cores, and costs those of the whole instance. Look at the driver "
        "of its nodes, or set `device: cpu` if its cores are to be measured."
    )
    return [Sentence("Measured on CPU cores, not on GPUs:", body)]


def _apart(study: StudyResult) -> list[Sentence]:
    """What the figures of some points cannot be compared with."""
    lines = different_kernels(study)
    kernels = [Sentence("Points of one curve ran on different kernels:", f"{'; '.join(lines)}.")] if lines else []
    if (slow := without_kernels(study)) is not None:
        kernels.append(Sentence("Without compiled kernels:", f"{slow}. They computed with torch's, which are slower."))
    return [*_devices(study), *kernels]


def _devices(study: StudyResult) -> list[Sentence]:
    """That figures of several devices are apart, and why."""
    if len(study.devices) < 2:
        return []
    told = (
        f"{joined(study.devices)}. No curve, ratio, fit or recommendation spans them: the difference between devices "
        "would pass for one between layouts, batches or numbers of ranks."
    )
    if study.other_devices:
        told += (
            " Left out, because the other repeats of the cell ran on another device: "
            f"{first_of(study.other_devices, _MOST_FILES)}."
        )
    return [Sentence(f"Figures of {len(study.devices)} devices are kept apart:", told)]


def _experiments(study: StudyResult, judged: Sequence[tuple[str, JudgedCell]]) -> list[Sentence]:
    """Which engine, which compression, and which point on which target, of the experiments that ask so."""
    found = []
    for experiment in study.plan.experiments:
        model = experiment.model or "the model"
        if experiment.kind == "compression" and experiment.points:
            told = compression_sentence(compression(study, experiment))
            found.append(Sentence(f"Compression of {model}:", told, study.title(experiment)))
        elif experiment.kind in ("sweep", "optimization") and experiment.points:
            sides = engines(study, experiment, list(judged))
            found += (
                []
                if sides is None
                else [Sentence(f"Engine for {model}:", engines_sentence(sides), study.title(experiment))]
            )
    for several in side_by_side(study):
        found.append(Sentence(f"Targets of {several.title}:", targets_opening(several), several.title))
    return found


def _correctness(judged: Sequence[tuple[str, JudgedCell]]) -> Sentence:
    """One sentence over all verdicts, the worst first."""
    by_word = {word: [pair for pair in judged if pair[1].verdict.word == word] for word in WORST_FIRST}
    bodies = []
    for model, item in by_word["defect"]:
        bodies.append(f"{model}, {item.label}, is off by more than noise: {item.verdict.reason}.")
    for model, item in by_word["not judged"]:
        bodies.append(f"{model}, {item.label}, could not be judged: {item.verdict.reason}.")
    right = by_word["agrees"]
    if right:
        bodies.append(f"{_cells(right)} from the reference by the noise of reduction order alone{_tokens(right)}.")
    whose = "The answers that could be judged are" if by_word["not judged"] else "The answers are"
    if by_word["defect"]:
        lead = "Some answers are wrong." if right else f"{whose} wrong."
    else:
        lead = f"{whose} right." if right else "Whether the answers are right is not known."
    missed = dict.fromkeys(part for _, item in right if item.reach is not None for part in item.reach.missed)
    if missed:
        bodies.append(f"Not reached by the comparison: {'; '.join(missed)}.")
    return Sentence(lead, " ".join(bodies), "Correctness")


def _cells(pairs: list[tuple[str, JudgedCell]]) -> str:
    """`tiny, rankwise, 1 rank, float32, differs`, `4 cells of tiny differ`."""
    if len(pairs) == 1:
        return f"{pairs[0][0]}, {pairs[0][1].label}, differs"
    return f"{plural(len(pairs), 'cell')} of {joined(dict.fromkeys(model for model, _ in pairs))} differ"


def _tokens(pairs: list[tuple[str, JudgedCell]]) -> str:
    """Prompts with every token equal, and the largest difference of a logit; of embeddings how far they turn."""
    ladders = [item.verdict.ladder for _, item in pairs if item.verdict.ladder is not None]
    encoded = [item.verdict.encoded for _, item in pairs if item.verdict.encoded is not None]
    if encoded and not ladders:
        worst = number(max(each.cosine_worst for each in encoded), 2)
        count = plural(sum(each.prompts for each in encoded), "embedding")
        largest = number(max(each.state_difference for each in encoded), 2)
        return f" (cosine distance of the worst of {count} {worst}; largest state difference {largest})"
    if not ladders:
        return ""
    equal, prompts = sum(each.prompts_equal or 0 for each in ladders), sum(each.prompts or 0 for each in ladders)
    largest = number(max(each.logit_difference for each in ladders), 2)
    return f" (every token equal on {equal} of {plural(prompts, 'prompt')}; largest logit difference {largest})"


def _lost(study: StudyResult) -> Sentence:
    """How many cells have no figure, and why; else how many repeats were lost on the way."""
    lost = [result for result in study.cells.values() if not result.completed]
    total, damaged = len(study.cells), damaged_records(study)
    refused = sum(len(experiment.refused) for experiment in study.plan.experiments)
    verb = "is" if refused == 1 else "are"
    told = f"; {plural(refused, 'point')} of the grids {verb} unsupported, listed under failures"
    unsupported = told if refused else ""
    unusable = [f"model {model.name}" for model in study.plan.unusable]
    if unusable:
        unsupported += f"; {joined(unusable)} could not be measured at all, listed under failures"
    if not lost:
        ended = [one.record.status for result in study.cells.values() for one in result.measurements.values()]
        spared = [status.value.replace("_", " ") for status in ended if status in NOT_MEASURED]
        failed = sum(status is not Status.COMPLETED for status in ended) - len(spared)
        missing = sum(len(result.missing) for result in study.cells.values())
        if not failed and not spared and not missing:
            done = f"{'The cell' if total == 1 else f'Each of {total:,} cells'} has all planned repeats"
            passes = lost_passes(study)
            lead = "All repeats completed." if passes else "All measurements completed."
            for name, count in passes.items():
                kind, _, state = name.replace("_", " ").partition(" pass ")
                unsupported += f"; {kind} pass: {state} for {plural(count, 'cell')}"
            return Sentence("Models are missing:" if unusable else lead, f"{done}{unsupported}.", FAILURES)
        parts = [f"{plural(failed, 'repeat')} failed"] if failed else []
        verb, why = "was" if len(spared) == 1 else "were", ", ".join(dict.fromkeys(spared))
        parts += [f"{plural(len(spared), 'repeat')} {verb} not measured ({why})"] if spared else []
        unread = sum(name.isdigit() for _, name in damaged)
        parts += [f"{plural(unread, 'repeat')} had no record that can be read"] if unread else []
        parts += [f"{plural(missing - unread, 'repeat')} had no record yet"] if missing > unread else []
        return Sentence("Every cell has a figure,", f"but {joined(parts)}{unsupported}.", FAILURES)
    keys = {key for key, name in damaged if name.isdigit()}
    reasons = [f"{result.title}: {_why(result, result.key in keys)}" for result in lost[:3]]
    more = f"; and {len(lost) - 3:,} more, listed under failures" if len(lost) > 3 else ""
    verb = "has" if len(lost) == 1 else "have"
    return Sentence(
        f"{len(lost):,} of {plural(total, 'cell')} {verb} no figure:",
        f"{'; '.join(reasons)}{more}{unsupported}.",
        FAILURES,
    )


def _why(result: CellResult, damaged: bool) -> str:
    if not result.measurements:
        return "no record that can be read" if damaged else "not measured yet"
    record = result.measurements[max(result.measurements)].record
    state = record.status.value.replace("_", " ")
    return f"{state} ({shortened(record.failure.message, 120).rstrip('.')})" if record.failure else state
