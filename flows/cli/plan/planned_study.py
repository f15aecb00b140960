"""A study with a prediction of every cell, on this machine or on the machines that its targets name.

    study = planned(load_study(path, []), path.parent, cache_folder())

Predictions use this machine's calibration for a local target, and the catalog for a target with a `machine`.
Nothing is started, the network is not used, and torch is not imported.
"""

import glob
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.common.printable import plural
from configs.hardware.catalog import HardwareCatalog, catalog
from configs.hardware.hardware import Accelerator, Machine
from configs.hardware.prices import Price, TargetPrices
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.plans.prediction import Prediction
from configs.spec.study import StudySpec
from configs.targets.target import LocalTarget
from engine.planner.learning import Known
from engine.planner.local import LocalMachine, local_devices, local_machine
from reports.reading.load import StudyResult, load_run
from tasks.models.model_cache import manifest_path
from tasks.models.sources import hub_repository
from tasks.planning.inputs import copy_inputs
from tasks.planning.predictions import MachineOf, Predictor, experiences_of, on_hardware
from tasks.planning.study_cost import StudyCost, study_cost
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan, prices_of
from tasks.planning.target_machine import for_cell, local_node, named_machine, on_unknown_cpus


@dataclass(frozen=True)
class PlannedStudy:
    """A study with its predictions and their inputs."""

    plan: Plan
    basis: tuple[str, ...]
    advice: str | None
    cost: StudyCost
    learnt: str | None = None

    def said(self, key: str) -> Prediction:
        """Return the prediction of one cell."""
        return self.plan.predictions[key]


def planned(
    study: StudySpec,
    base: Path,
    cache: Path,
    learn_from: str | None = None,
    machine: str | None = None,
    own: Path | None = None,
) -> PlannedStudy:
    """Expand and predict a study offline, on machines that may have more ranks than this one."""
    models = [_known_model(study, position, cache, base) for position in range(len(study.models))]
    here = local_machine(cache)
    with tempfile.TemporaryDirectory() as folder:
        scratch = RunPaths(Path(folder))
        inputs = copy_inputs(study, scratch, base, kept=False)
        hardware = catalog(cache, own)
        machines, elsewhere = _machines(study, here, hardware, machine)
        plan = make_plan(study, models, inputs, scratch.inputs, cache, machine_of=elsewhere)
        prices = prices_of(study, inputs, scratch.inputs, [offer for _, offer in hardware.offers()])
        unpriced = {target: each for target, each in machines.items() if machine or not prices[target].price}
        plan = plan.model_copy(update={"prices": prices | _prices(unpriced)})
        known = [] if learn_from is None else _learned(learn_from, here)
        predictor = Predictor(plan, scratch.inputs, cache, elsewhere, [one for one, _ in known])
        predictions = predictor.predict_all()
    plan = plan.model_copy(update={"predictions": predictions})
    basis = tuple(dict.fromkeys(said.basis for said in predictions.values() if said.basis))
    on_cores = [target for target in study.targets if isinstance(target, LocalTarget) and not local_devices(target)]
    local_targets = {target.name for target in on_cores} - set(machines)
    local = any(cell.model and cell.target in local_targets for cell in plan.cells.values())
    learnt = None if learn_from is None else _learnt(known, predictions, elsewhere is not None)
    return PlannedStudy(plan, basis, here.advice if local else None, study_cost(plan), learnt)


def _known_model(study: StudySpec, position: int, cache: Path, base: Path) -> PlannedModel:
    """Resolve models as in `flows.precheck`, but without a revision for hub models, which are looked up by name."""
    spec = study.models[position]
    repository = hub_repository(spec.id, spec.revision, base)
    if repository is None:
        return planned_model(spec, position, cache, base)
    identity = f"{repository}@{spec.revision}" if spec.revision else repository
    manifest = manifest_path(identity, cache)
    return PlannedModel(name=spec.name, identity=identity, manifest=str(manifest) if manifest.is_file() else "")


def _learned(pattern: str, here: LocalMachine) -> list[tuple[Known, int]]:
    """Return each run's corrections and its number of cells with a model. Raises ValueError without a run folder."""
    return [
        (
            experiences_of(run, on_hardware(here.fingerprint)),
            sum(1 for cell in run.plan.cells.values() if cell.model),
        )
        for run in runs_matching(pattern)
    ]


def runs_matching(pattern: str) -> list[StudyResult]:
    """Read the run folders of a pattern. Raises ValueError if there is none."""
    folders = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / "plan.json").is_file()]
    if not folders:
        raise ValueError(f"--learn-from {pattern}: no run folder (with a plan.json) matches. Quote the pattern")
    return [load_run(RunPaths(folder)) for folder in folders]


def _learnt(known: Sequence[tuple[Known, int]], said: dict[str, Prediction], elsewhere: bool) -> str | None:
    """Return why the named runs give no correction; None if they give one."""
    if any(each.correction is not None for each in said.values()):
        return None
    taught, cells = sum(len(one.experiences) for one, _ in known), sum(count for _, count in known)
    if elsewhere:
        return (
            f"no correction: 0 of {plural(cells, 'cell')} usable (runs of this machine do not apply to another machine)"
        )
    if not taught:
        return (
            f"no correction: 0 of {plural(cells, 'cell')} usable (other hardware, machine under load, or not completed)"
        )
    return f"no correction: {taught} of {plural(cells, 'cell')} usable, but of other models or workloads"


def _prices(machines: dict[str, Machine]) -> dict[str, TargetPrices]:
    """Return prices of the machines that the user named instead of the targets' own."""
    return {
        target: TargetPrices(
            price=Price(usd_per_hour=machine.usd_per_hour, source=f"catalog, {machine.name}")
            if machine.usd_per_hour
            else None
        )
        for target, machine in machines.items()
    }


def _machines(
    study: StudySpec, here: LocalMachine, known: HardwareCatalog, named: str | None
) -> tuple[dict[str, Machine], MachineOf | None]:
    """Return the machines of remote targets and where each cell would run; None if all cells run on this machine."""
    machines: dict[str, Machine] = {}
    targets = {target.name: target for target in study.targets}
    for target in study.targets:
        name = named or target.machine
        if name is not None:
            try:
                machine = _machine_called(name, known)
            except ValueError as error:
                where = "--accelerator" if named else f"targets: {target.name}: machine"
                raise ValueError(f"{where}: {error}") from error
            if named or not on_unknown_cpus(target, machine):
                machines[target.name] = machine
    if not machines:
        return {}, None

    def machine_of(cell: Any) -> Machine:
        target = targets[cell.target]
        machine = machines.get(target.name) or named_machine(target, known)
        if machine is None:
            return local_node(target, cell, here)
        return for_cell(machine, cell, target, known)

    return machines, machine_of


def _machine_called(name: str, known: HardwareCatalog) -> Machine:
    """Return an instance (`provider/instance`), else a node of eight accelerators of this kind."""
    if "/" in name:
        return known.instance(name)
    device: Accelerator = known.accelerator(name)
    return Machine(name=device.name, accelerator=device, accelerators=8, inside=device.link)
