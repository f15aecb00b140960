"""The plan of a study whose models are resolved and whose inputs are copied. No Prefect here.

    plan = make_plan(study, models, inputs, run.inputs, cache)

Used before anything is started (`flows.precheck`) and again by the stages of a run.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.hardware.price_file import read_price_file
from configs.hardware.prices import Offer, TargetPrices, listed_offers, target_prices
from configs.inputs.prompts import numbered_prompts, read_prompts
from configs.plans.expand import expand
from configs.plans.model_manifest import read_model_manifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel, check_plan_size, read_plan
from configs.spec.experiments import Correctness
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import LocalTarget
from configs.workloads.prompted import PromptedWorkload
from tasks.models.judgement import unusable_in
from tasks.models.saved_reference import misfits, read_saved_reference, reference_in
from tasks.planning.script_inputs import unexpressed

if TYPE_CHECKING:
    from tasks.planning.predictions import MachineOf


class UnusableModelsError(StudyError):
    """Our engine cannot measure some models of a plan under the workloads that the study gives them."""

    def __init__(self, models: list[UnusableModel]) -> None:
        super().__init__([model.reason for model in models])
        self.models = models


def make_plan(
    study: StudySpec,
    models: list[PlannedModel],
    inputs: dict[str, str],
    folder: Path,
    cache: Path | None = None,
    before: Plan | None = None,
    machine_of: "MachineOf | None" = None,
) -> Plan:
    """Expand a study whose inputs lie in `folder`; find the prices of its targets and what scaling is forecast over.

    cache: where the planner finds what it knows of this machine; without it no layouts are ranked. before: the plan of
    an earlier run in the same folder, whose ranking of layouts stays, and the prices of targets that are gone.
    machine_of: where cells would run, if not here.
    """

    @functools.cache  # each cell of a sweep asks for it, and a file may have a hundred megabytes
    def selected(prompts: str, variant: str | None, limit: int | None) -> int:
        return len(read_prompts(folder / f"{prompts}.jsonl", variant, limit))

    def count_prompts(workload: PromptedWorkload) -> int:
        return selected(str(workload.prompts), workload.variant, workload.limit)

    from tasks.planning.layouts import layout_choice, with_forecast  # the planner takes time to import

    choice = layout_choice(study, models, folder, cache, before, machine_of) if cache is not None else None
    named = [each.reference for each in study.experiments.values() if isinstance(each, Correctness) and each.reference]
    references = {written: read_saved_reference(reference_in(folder, inputs[written])).workload for written in named}
    plan = expand(study, models, inputs, count_prompts, choice, references)
    if problems := misfits(plan, folder) + unexpressed(plan.cells.values()):
        raise StudyError(problems)
    _need_tokenizers(plan, folder)
    if unusable := unusable_in(plan):
        raise UnusableModelsError([_placed(study, model) for model in unusable])
    if cache is not None:
        plan = with_forecast(plan, study, folder, cache)
    listed = None if cache is None else listed_offers(cache)
    plan = plan.model_copy(update={"prices": prices_of(study, inputs, folder, listed, before)})
    check_plan_size(plan)
    return plan


def prices_of(
    study: StudySpec,
    inputs: dict[str, str],
    folder: Path,
    listed: Sequence[Offer] | None,
    before: Plan | None = None,
) -> dict[str, TargetPrices]:
    """Return the prices of a study's targets: its own, those of its price file, those listed (None: as shipped).

    before: the plan of an earlier run in the same folder. Targets that it had and the study has no more keep their
    price, unless the price file names them.
    """
    own = read_price_file(folder / f"{inputs[study.prices]}.yaml", study.prices) if study.prices else ()
    found = {} if before is None else dict(before.prices)
    for name in found:
        stated = target_prices(LocalTarget(name=name), own, ())
        found[name] = stated if stated.price is not None else found[name]
    return found | {target.name: target_prices(target, own, listed) for target in study.targets}


def make_sound_plan(
    study: StudySpec,
    models: list[PlannedModel],
    unusable: tuple[UnusableModel, ...],
    inputs: dict[str, str],
    folder: Path,
    cache: Path | None,
    before: Plan | None,
) -> Plan:
    """As `make_plan`, without the models that our engine cannot measure; the plan names them, and those of `unusable`.

    Raises StudyError where no model is left.
    """
    try:
        plan = make_plan(study, models, inputs, folder, cache, before)
    except UnusableModelsError as error:
        found = {model.name for model in error.models}
        sound = [model for model in models if model.name not in found]
        if not sound:
            raise
        plan = make_plan(study, sound, inputs, folder, cache, before)
        unusable = (*unusable, *error.models)
    return plan.model_copy(update={"unusable": unusable})


def _placed(study: StudySpec, model: UnusableModel) -> UnusableModel:
    position = [spec.name for spec in study.models].index(model.name)
    return model.model_copy(update={"reason": f"models[{position}].id: {model.name}: {model.reason}"})


def earlier_plan(run: RunPaths) -> Plan | None:
    """The plan of an earlier run in this folder; None where there is none, or none that can be read."""
    try:
        return read_plan(run.plan)
    except (OSError, ValueError):
        return None


def _need_tokenizers(plan: Plan, folder: Path) -> None:
    """Raises StudyError for models that shall read texts, and bring nothing to read them by."""
    lacking = {model.identity for model in plan.models if _lacks_tokenizer(model)}
    texts = functools.cache(functools.partial(_are_texts, folder))
    for cell in plan.cells.values():
        if cell.workload.lacks_tokenizer and cell.model in lacking:
            raise StudyError(
                [f"workload.tokenizer: {cell.model} has no tokenizer.json. Set one, or leave data out to train on "
                 "random tokens"]
            )  # fmt: skip
        if not isinstance(cell.workload, PromptedWorkload) or cell.model not in lacking:
            continue
        if texts(cell.workload.prompts, cell.workload.variant, cell.workload.limit):
            raise StudyError(
                [f"workload.prompts: {cell.model} has no tokenizer.json. Leave prompts out to run random tokens, or "
                 "give `tokens` instead of `prompt` on each line"]
            )  # fmt: skip


def _lacks_tokenizer(model: PlannedModel) -> bool:
    """Whether a model is known to bring no tokenizer.json: one that is not fetched yet may have one."""
    if model.synthetic:
        return True
    path = Path(model.manifest)
    return path.is_file() and not (Path(read_model_manifest(path).folder) / "tokenizer.json").is_file()


def _are_texts(folder: Path, prompts: str | None, variant: str | None, limit: int | None) -> bool:
    """Whether no line of a file of prompts gives token ids."""
    if prompts is None:
        return False
    return all(prompt.tokens is None for prompt in numbered_prompts(folder / f"{prompts}.jsonl", variant, limit))
