"""Check what a plan needs beside cores, memory and disk: known machines, installed engines, positions of the model.

check_requirements(plan, cache)          # StudyError; before anything is started
"""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from configs.common.files.reading import brief
from configs.common.printable import plural
from configs.families.positions import trained_positions
from configs.hardware.catalog import HardwareCatalog, catalog
from configs.hardware.hardware import Machine
from configs.hardware.prices import TargetPrices
from configs.plans.job import Measurement
from configs.plans.model_manifest import read_model_manifest
from configs.plans.packing import Launch, pack_launches
from configs.plans.passes import is_profiled
from configs.plans.plan import Plan, PlannedModel
from configs.spec.measuring import Measuring
from configs.spec.objectives import has_figure
from configs.spec.study import StudyError
from configs.targets.rented import MAX_LEASE_HOURS, RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.target import LocalTarget
from configs.workloads import STUDIED, descriptor_of, kinds_with
from engine.planner.families import read_architecture
from tasks.providers.clouds import longest_lease_seconds

_RUN_ON = ("cuda", "rocm", "cpu")
_DEEPSPEED = ("deepspeed",)
_MORE_LIBRARIES = {"onnxruntime": ("onnx", "onnxscript")}
"""Of an engine, beside the library of its own name."""


def check_requirements(plan: Plan, cache: Path) -> None:
    """Raise StudyError naming everything that a plan lacks, and what sbatch would refuse where there is one to ask."""
    problems = requirement_problems(plan, catalog(cache))
    if problems:
        raise StudyError(problems)


def requirement_problems(plan: Plan, known: HardwareCatalog) -> list[str]:
    """Return what a plan lacks, each as `field: what is wrong`."""
    found = [*_unknown_machines(plan, known), *_small_disks(plan), *_short_leases(plan), *_missing_libraries(plan)]
    found += [*_rules_of_nothing(plan), *_objectives_of_nothing(plan)]
    return list(dict.fromkeys([*found, *_cold_without_files(plan), *_beyond_context(plan)]))


def _unknown_machines(plan: Plan, known: HardwareCatalog) -> Iterator[str]:
    for place, target in enumerate(plan.targets):
        priced = plan.prices.get(target.name, TargetPrices()).price is not None
        name = target.catalog_name
        if name is None:
            continue
        try:
            machine = known.instance(name)
        except ValueError as error:
            if not priced:
                yield f"targets[{place}].machine: {error}"
            continue
        if machine.accelerator.kind not in _RUN_ON:
            yield (
                f"targets[{place}].machine: {name} has {machine.accelerator.title}, which no engine here runs on. "
                "`rankwise plan --accelerator` predicts it; choose an instance with GPUs or none to measure"
            )
            continue
        asked = target.gpus_per_node if isinstance(target, ClusterTarget) else None
        if asked is not None and (machine.accelerator.kind == "cpu" or asked > machine.accelerators):
            held = 0 if machine.accelerator.kind == "cpu" else machine.accelerators
            yield f"targets[{place}].gpus_per_node: got {asked}, but {name} has {held}. Correct one of them"
        if isinstance(target, RentedTarget):
            yield from _refused_there(plan, place, target, machine, known.instance_row(name).vcpus)


def _refused_there(plan: Plan, place: int, target: RentedTarget, machine: Machine, vcpus: int) -> Iterator[str]:
    """Of a rented target that has too few cores, or whose ranks would refuse to start.

    Which GPUs it computes on a program of the user's decides by itself.
    """
    cells = [cell for cell in plan.cells.values() if cell.target == target.name]
    dtypes = {cell.dtype for cell in cells}
    cores = max((cell.layout.ranks // cell.nodes * cell.cores_per_rank for cell in cells), default=0)
    if cores > vcpus:
        yield (
            f"targets[{place}].instance: {plural(cores, 'core')} needed, {target.instance} has {vcpus}. Lower "
            "ranks_per_node or cores_per_rank, or use another instance"
        )
    if target.device == "cpu" or any(descriptor_of(cell.workload).own_program for cell in cells):
        return
    ranks = max((cell.layout.ranks // cell.nodes for cell in cells), default=0)
    if machine.accelerator.kind != "cpu" and ranks > machine.accelerators:
        yield (
            f"targets[{place}].ranks_per_node: {ranks} ranks of a cell are on one node, but {target.instance} has "
            f"{plural(machine.accelerators, 'GPU')}, one for each rank. Use at most {machine.accelerators}, or set "
            "`device: cpu` to measure on the cores"
        )
    if dtypes and all(map(machine.accelerator.lacks, dtypes)):
        yield (
            f"targets[{place}].instance: {target.instance} has {machine.accelerator.title}, which does not multiply "
            f"{', '.join(sorted(dtypes))}. Use float16 or float32, or another instance"
        )


def _small_disks(plan: Plan) -> Iterator[str]:
    """Of rented nodes, on whose root disk image and libraries need room beside all models of the target."""
    for place, target in enumerate(plan.targets):
        if isinstance(target, RentedTarget):
            named = {cell.model for cell in plan.cells.values() if cell.target == target.name}
            size = sum(_bytes_of(model) for model in plan.models if model.identity in named)
            if size > target.disk_gb << 30:
                yield (
                    f"targets[{place}].disk_gb: got {target.disk_gb}, but the models have {size / 2**30:.0f} GiB. Set "
                    "as much and room for the image and its libraries"
                )


def _short_leases(plan: Plan) -> Iterator[str]:
    """Of rented nodes, which a cloud ends before one launch can have measured all its cells."""
    for place, target in enumerate(plan.targets):
        if not isinstance(target, RentedTarget):
            continue
        limit = _lives(target, target.lease_hours)
        measurements = [
            Measurement(cell=cell, repeat=0, attempt=1)
            for cell in plan.cells.values()
            if cell.target == target.name and plan.repeats[cell.key]
        ]
        launches = pack_launches(measurements, "timed", plan.measuring.seed, plan.pack)
        each = ((_least_seconds(plan, launch), len(launch.measurements)) for launch in launches)
        seconds, cells = max(each, default=(0.0, 0))
        if seconds <= limit:
            continue
        hours = (each for each in range(1, MAX_LEASE_HOURS + 1) if _lives(target, each) >= seconds)
        needed = next(hours, None)
        longer = f"At most {MAX_LEASE_HOURS} is allowed" if needed is None else f"Set it to {needed} or more"
        split = ", or `pack: false` for a launch of each cell" if cells > 1 else ""
        yield (
            f"targets[{place}].lease_hours: got {target.lease_hours:g}, with which {target.kind} ends its nodes after "
            f"{limit / 3600:.3g} h however long the run goes on, but one launch measures {plural(cells, 'cell')} for "
            f"at least {seconds / 3600:.3g} h. {longer}{split}, or measure for less time"
        )


def _lives(target: RentedTarget, hours: float) -> float:
    """Seconds for which nodes of a lease of so many hours live at most."""
    seconds = longest_lease_seconds(target.kind, hours)
    return math.inf if seconds is None else seconds


def _least_seconds(plan: Plan, launch: Launch) -> float:
    """Seconds that the cells of a launch are measured for at least, by their fields and the measuring rules."""
    total = 0.0
    for measurement in launch.measurements:
        work, rules = measurement.cell.workload, plan.measuring
        known = (work.known_seconds(measurement.cell.layout.ranks) or 0.0) * (work.passes or rules.min_passes)
        total += known if work.passes else max(known, rules.min_seconds)
    return total


def _bytes_of(model: PlannedModel) -> int:
    """Size of a model's files; 0 where they are not known, or are made on the node."""
    try:
        files = read_model_manifest(Path(model.manifest)).files if model.manifest else {}
    except (OSError, ValueError):
        return 0
    return sum(file.size_bytes for file in files.values())


def _missing_libraries(plan: Plan) -> Iterator[str]:
    """Of local targets; a cluster's nodes have an environment of their own."""
    local = {target.name for target in plan.targets if isinstance(target, LocalTarget)}
    for cell in plan.cells.values():
        if cell.target not in local:
            continue
        strategy = cell.layout.strategy
        wanted: tuple[str, ...] = ()
        where = f"engine: {cell.engine}"
        if cell.engine != "rankwise" and not descriptor_of(cell.workload).starts_server:  # which has its own
            wanted = (cell.engine, *_MORE_LIBRARIES.get(cell.engine, ()))
        if strategy.startswith("zero"):
            wanted, where = _DEEPSPEED, f"layout.strategy: {strategy}"
        missing = [name for name in wanted if find_spec(name) is None]
        if missing:
            yield f"{where} requires {', '.join(missing)}, not installed here: pip install {' '.join(missing)}"


def _rules_of_nothing(plan: Plan) -> Iterator[str]:
    """Measuring rules that no cell heeds: the run would be as without them, and nobody told."""
    rules, kinds = plan.measuring, [descriptor_of(cell.workload) for cell in plan.cells.values()]
    if rules.live and not any(known.trains for known in kinds):
        yield "measuring.live: only training measurements are streamed, and no cell trains. Leave live out"
    if rules.prometheus_port != Measuring().prometheus_port and "prometheus" not in rules.live:
        yield "measuring.prometheus_port: has no effect without `live: [prometheus]`. Leave it out, or set that"
    if plan.unusable:
        return  # whose cells may heed them
    if not any(is_profiled(cell) for cell in plan.cells.values()):
        marked = ", ".join(kinds_with("marks_work"))
        for name in ("profile", "profiler"):
            if getattr(rules, name):
                yield f"measuring.{name}: only workloads of kind {marked} are profiled. Leave {name} out"
    if rules.target_interval is not None and not any(known.compared for known in kinds):
        yield (
            "measuring.target_interval: no cell has a throughput whose interval could reach it. Leave it out, and set "
            "repeats"
        )


def _objectives_of_nothing(plan: Plan) -> Iterator[str]:
    """Objectives whose figure no cell has: the report would have no row of them."""
    given = plan.objectives.model_dump(exclude_none=True)
    compared = [cell.workload for cell in plan.cells.values() if not cell.workload.keeps_answers]
    scaled = any(each.kind in ("strong", "weak") and len(each.points) > 1 for each in plan.experiments)
    if plan.unusable:
        return  # whose cells may have the figure
    for field in given:
        if field != "speedup" and not any(has_figure(field, descriptor_of(work)) for work in compared):
            have = ", ".join(kind for kind, known in STUDIED.items() if has_figure(field, known))
            kinds = ", ".join(dict.fromkeys(work.kind for work in compared))
            served = any(descriptor_of(work).starts_server for work in compared)
            beside = ". Bounds on the requests of a server are `workload.objectives`" if served else ""
            yield (
                f"objectives.{field}: no cell of the study ({kinds or 'none is timed'}) has this figure, only those of "
                f"{have}. Leave it out{beside}"
            )
    if "speedup" in given and not scaled:
        yield "objectives.speedup: no experiment is of kind strong or weak with several points. Leave it out"


def _cold_without_files(plan: Plan) -> Iterator[str]:
    """Our engine makes a synthetic model in memory: a cold load of one would be the same as any other."""
    synthetic = {model.identity: model.name for model in plan.models if model.synthetic}
    for cell in plan.cells.values():
        if cell.page_cache == "cold" and cell.engine == "rankwise" and cell.model in synthetic:
            yield (
                f"page_cache: cold has no effect on model {brief(synthetic[cell.model])[1:-1]}, which is synthetic: "
                "engine rankwise reads it from no file. Leave it out, or use a model in files"
            )


def _beyond_context(plan: Plan) -> Iterator[str]:
    """Sequences that exceed the positions of a model, where its configuration is at hand."""
    models = {model.identity: model for model in plan.models if model.manifest}
    limits: dict[str, _Limits] = {}
    for cell in plan.cells.values():
        model, longest = models.get(cell.model or ""), cell.workload.longest_sequence
        if model is None or cell.engine != "rankwise" or longest is None:
            continue
        if model.identity not in limits:
            limits[model.identity] = _limits(model)
        known = limits[model.identity]
        limit = known.trained if descriptor_of(cell.workload).trains else known.inferred
        field, positions, told = longest
        if limit is not None and positions > limit:
            yield f"workload.{field}: {told}, but model {brief(model.name)[1:-1]} has {limit}"


class _Limits(NamedTuple):
    """Positions of a sequence of a model by what is done with it; None: unlimited, or unknown."""

    inferred: int | None = None
    trained: int | None = None


def _limits(model: PlannedModel) -> _Limits:
    """Read the limits of a model; that of inference where the planner knows the family and there is one stack."""
    try:
        config = read_model_manifest(Path(model.manifest)).config
        trained = trained_positions(config)
    except (OSError, ValueError):
        return _Limits()
    try:
        architecture = read_architecture(config, model.name)
    except ValueError:
        return _Limits(trained=trained)
    if architecture.kind == "encoder_decoder":
        return _Limits(trained=trained)
    return _Limits(architecture.position_limit or architecture.positions or None, trained)
