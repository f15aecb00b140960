"""The planner's word on every cell of a plan, kept in the plan so that the report needs only the run folder; and what
a finished run teaches the planner. No Prefect here.

    plan = with_predictions(plan, run.inputs, cache)     # Plan.predictions, before anything runs
    remember_run(run, cache)                             # after the last record

To predict is a courtesy: whatever goes wrong in it becomes a reason in the prediction, never the end of a run.
"""

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, brief, read_json, read_model
from configs.hardware.calibration import QUIET_SHARE, Fingerprint
from configs.hardware.catalog import HardwareCatalog, catalog
from configs.hardware.hardware import Machine
from configs.inputs.prompts import numbered_prompts
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, read_plan
from configs.plans.prediction import Prediction
from configs.plans.preflight import Preflight
from configs.spec.cell import Cell
from configs.targets.resources import ClusterTarget
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.catalog import find_model
from engine.planner.cells import CHARACTERS_PER_TOKEN, Learner, predict_cell
from engine.planner.families import read_architecture
from engine.planner.learning import (
    Experience,
    Known,
    config_hash,
    experience_path,
    learner_from,
    merged,
    read_experiences,
    remember,
)
from engine.planner.local import LocalMachine, computing_ranks, hardware_fingerprint, local_machine, transport_of
from reports.reading.devices import load_comparable
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import OTHERS_SHARE
from tasks.planning.target_machine import for_cell, lab_node, local_node, named_machine, same_nodes

_log = logging.getLogger(__name__)
MachineOf = Callable[[Cell], Machine]


def with_predictions(
    plan: Plan,
    inputs: Path,
    cache: Path,
    before: Mapping[str, Prediction] | None = None,
    preflight: Preflight | None = None,
) -> Plan:
    """The plan with a prediction of every cell on the machine of its target.

    before: predictions of an earlier run in the same folder. They stay: its records must not teach the planner what
    they are held against. preflight: what was found of nodes and links, which no target says.
    """
    kept = {key: said for key, said in (before or {}).items() if key in plan.cells and said.throughput is not None}
    try:
        found = Predictor(plan, inputs, cache, preflight=preflight).predict_all()
    except Exception as error:  # a fault of the planner's own must not stop a run
        _log.warning("no predictions: %s", error)
        found = {key: Prediction(reason=f"the planner failed: {error}") for key in plan.cells}
    return plan.model_copy(update={"predictions": found | kept})


def predicted_before(plan: Plan, before: Plan) -> dict[str, Prediction]:
    """Return what an earlier plan predicted of cells, but for those whose cluster the study describes otherwise now.

    Of a target whose `machine` was corrected they would be held against the nodes that it never had.
    """
    earlier = {target.name: target for target in before.targets}
    now = {target.name: target for target in plan.targets}
    return {
        key: said
        for key, said in before.predictions.items()
        if key in plan.cells and same_nodes(now.get(plan.cells[key].target), earlier.get(plan.cells[key].target))
    }


class Predictor:
    """Predictions for the cells of one plan; what cells share is found once.

    machine_of: where the cells would run; if not given, this machine for local targets, and for a cluster's the one
    that it names. known: further experiences, beside the cache's.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Path,
        cache: Path,
        machine_of: MachineOf | None = None,
        known: Iterable[Known] = (),
        preflight: Preflight | None = None,
    ) -> None:
        self.plan = plan
        self._inputs = inputs
        self._cache = cache
        self._here = machine_of is None
        self._machine_of = machine_of or self._machine_of_target
        self._targets = {target.name: target for target in plan.targets}
        self._known = tuple(known)
        self._tested = {found.target: found for found in (preflight.targets if preflight else ())}
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._lengths: dict[tuple[str, str | None, int | None], list[int]] = {}

    @cached_property
    def local(self) -> LocalMachine:
        """This machine."""
        return local_machine(self._cache)

    @cached_property
    def learner(self) -> Learner | None:
        """What is known from runs of this hardware; nothing where the cells would run elsewhere."""
        if not self._here:
            return None
        path = experience_path(self._cache, self.local.fingerprint)
        return learner_from(merged([read_experiences(path), *self._known]), self.machine)

    @cached_property
    def architectures(self) -> dict[str, Architecture | str]:
        """Model identity -> its architecture, or why it is not known."""
        return {model.identity: _architecture(model, self._cache) for model in self.plan.models}

    def predict_all(self) -> dict[str, Prediction]:
        """Key of a cell -> what the planner says."""
        return {key: self.predict(cell) for key, cell in self.plan.cells.items()}

    def predict(self, cell: Cell) -> Prediction:
        """One cell. Never raises for what a study can say."""
        if cell.workload.model_beside is not None:
            return self._beside(cell, cell.workload.model_beside)
        architecture = self.architectures.get(cell.model or "")
        if isinstance(architecture, str):
            return Prediction(reason=architecture)
        try:
            machine = self.machine(cell)
            if architecture is None:  # noop: nothing to learn, nothing to read
                return predict_cell(cell, None, machine)
            learner = None if isinstance(self._targets.get(cell.target), ClusterTarget) else self.learner
            return predict_cell(cell, architecture, machine, learner, self.prompt_lengths(cell))
        except (ValueError, OSError) as error:
            return Prediction(reason=str(error))

    def _beside(self, cell: Cell, name: str) -> Prediction:
        """A program of the user's as if our engine trained the model that it names: what the hardware allows."""
        work = cell.workload.training_beside(cell.layout)
        identity = next((model.identity for model in self.plan.models if model.name == name), None)
        if identity is None:
            return Prediction(reason=f"workload.model: {name} is not among the study's models")
        if work is None:
            return Prediction(reason="workload.micro_batch_size and sequence_length: required for a prediction")
        try:
            trained = cell.model_copy(update={"model": identity, "workload": TrainWorkload(**work)})
            return self.predict(Cell.model_validate(trained.model_dump()))
        except ValueError as error:
            return Prediction(reason=f"not predicted: {brief(str(error))}")

    def machine(self, cell: Cell) -> Machine:
        """Where a cell runs, while it runs, at the price of its target."""
        ranks = (cell.layout.ranks, computing_ranks(cell), transport_of(cell))
        place = (cell.target, cell.nodes, cell.cores_per_rank, *ranks)
        if place not in self._machines:
            machine = self._machine_of(cell)
            prices = self.plan.prices.get(cell.target)
            if prices is not None and prices.price is not None:
                machine = machine.model_copy(update={"usd_per_hour": prices.price.usd_per_hour})
            self._machines[place] = machine
        return self._machines[place]

    def prompt_lengths(self, cell: Cell) -> list[int] | None:
        """Tokens of each prompt of a file, by the rule of thumb of characters; None where lengths are given."""
        chosen, size = cell.workload.prompt_source, cell.workload.size_of_pass(cell.layout.dp)
        if chosen is None or size is None or size[1] is not None:
            return None
        if chosen not in self._lengths:
            prompts, variant, limit = chosen
            read = numbered_prompts(self._inputs / f"{prompts}.jsonl", variant, limit)
            self._lengths[chosen] = [
                len(prompt.tokens) if prompt.tokens else max(1, round(len(prompt.text) / CHARACTERS_PER_TOKEN))
                for prompt in read
            ]
        return self._lengths[chosen]

    def _machine_of_target(self, cell: Cell) -> Machine:
        """Raises ValueError for a cluster whose nodes are not known."""
        target = self._targets.get(cell.target)
        if not isinstance(target, ClusterTarget):
            return local_node(target, cell, self.local)
        if target.on_this_machine and target.machine is None:
            return lab_node(target, cell, self.local, self._tested.get(target.name))
        machine = named_machine(target, self._catalog)
        assert machine is not None, "a cluster that names none is refused"
        return for_cell(machine, cell, target, self._catalog)

    @cached_property
    def _catalog(self) -> HardwareCatalog:
        return catalog(self._cache)


def _architecture(model: PlannedModel, cache: Path) -> Architecture | str:
    """From the manifest's config.json; of a model that is not fetched yet, from the catalog."""
    try:
        if model.manifest:
            config = read_model(Path(model.manifest), ModelManifest, PLAN_BYTES).config
            return read_architecture(config, model.name)
        return find_model(model.identity.split("@")[0], cache)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{model.name}: {str(error).partition('; use one of: ')[0]}"  # other families are no remedy here


def remember_run(run: RunPaths, cache: Path) -> int:
    """Keep what a run measured here for later predictions. Returns how many cells were added; never raises."""
    try:
        plan = read_plan(run.plan)
        if all(cell.model is None for cell in plan.cells.values()):
            return 0  # noop workloads teach nothing of a model
        here = local_machine(cache).fingerprint
        return remember(experiences_of(load_comparable(run), on_hardware(here)), experience_path(cache, here))
    except Exception as error:  # the run has its report; what it would have taught is lost
        _log.warning("%s: not used for corrections: %s", run.folder, error)
        return 0


def on_hardware(fingerprint: Fingerprint) -> Callable[[dict[str, object]], bool]:
    """Whether a record's environment is such hardware."""
    return lambda environment: hardware_fingerprint(environment) == fingerprint


def experiences_of(study: StudyResult, on_such: Callable[[dict[str, object]], bool]) -> Known:
    """The cells of a run that were completed on such hardware, by local targets: a cluster's links are not known here.

    A repeat teaches only where others took little of the CPU: else it would teach how busy the machine was.
    """
    alike = {
        digest for digest, environment in study.environments.items() if environment is not None and on_such(environment)
    }
    devices = {digest: str((study.environments[digest] or {}).get("device", "cpu")) for digest in alike}
    configs = {model.identity: _config(model) for model in study.plan.models}
    clusters = {target.name for target in study.plan.targets if isinstance(target, ClusterTarget)}
    found, used = [], {}
    for result in study.cells.values():
        if result.cell.target in clusters:
            continue
        config = configs.get(result.cell.model or "")
        quiet = {
            repeat: measurement
            for repeat, measurement in result.completed.items()
            if measurement.record.environment in alike and (measurement.figure(OTHERS_SHARE) or 0.0) <= QUIET_SHARE
        }
        rates = [value for repeat, value in result.values("tokens_per_second").items() if repeat in quiet]
        if config is None or not rates:
            continue
        newest = max(quiet.values(), key=lambda measurement: measurement.record.finished_at or "")
        digest = config_hash(config)
        used[digest] = config
        found.append(
            Experience(
                key=result.key,
                cell=result.cell,
                config=digest,
                tokens_per_second=statistics.median(rates),
                prompt_tokens=_prompt_tokens(result),
                device=devices[str(newest.record.environment)],
                measured_at=newest.record.finished_at or "",
            )
        )
    return Known(experiences=tuple(found), configs=used)


def _prompt_tokens(result: CellResult) -> int | None:
    """Mean length of the prompts as the ranks counted it; None where the cell gives it, or for other work."""
    if result.cell.workload.prompt_source is None:
        return None
    measurement = next(iter(result.completed.values()))
    tokens, prompts = measurement.figure("prompt_tokens"), measurement.figure("num_prompts")
    return max(1, round(tokens / prompts)) if tokens and prompts else None


def _config(model: PlannedModel) -> dict[str, object] | None:
    """The model's config.json; None where its manifest is gone."""
    try:
        return dict(read_json(Path(model.manifest), PLAN_BYTES)["config"]) if model.manifest else None
    except (OSError, ValueError, KeyError):
        return None
