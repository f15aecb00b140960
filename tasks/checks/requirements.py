"""Check what a plan needs beside cores, memory and disk: known machines, installed engines, positions of the model.

check_requirements(plan, cache)          # StudyError; before anything is started
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from configs.common.files.reading import brief
from configs.common.printable import plural
from configs.hardware.catalog import HardwareCatalog, catalog
from configs.hardware.hardware import Machine
from configs.hardware.prices import TargetPrices
from configs.plans.model_manifest import read_model_manifest
from configs.plans.plan import Plan, PlannedModel
from configs.spec.cell import Cell
from configs.spec.study import StudyError
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.target import LocalTarget
from configs.workloads import descriptor_of
from configs.workloads.prompted import PromptedWorkload
from engine.planner.families import read_architecture

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
    found = [*_unknown_machines(plan, known), *_small_disks(plan), *_missing_libraries(plan)]
    found += _live_without_training(plan)
    return list(dict.fromkeys([*found, *_beyond_context(plan)]))


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


def _live_without_training(plan: Plan) -> Iterator[str]:
    if plan.measuring.live and not any(descriptor_of(cell.workload).trains for cell in plan.cells.values()):
        yield "measuring.live: only training measurements are streamed, and no cell trains. Leave live out"


def _beyond_context(plan: Plan) -> Iterator[str]:
    """Prompts and new tokens that exceed the positions of a model, where its configuration is at hand."""
    models = {model.identity: model for model in plan.models if model.manifest}
    limits: dict[str, int | None] = {}
    for cell in plan.cells.values():
        model = models.get(cell.model or "")
        if model is None or cell.engine != "rankwise" or not isinstance(cell.workload, PromptedWorkload):
            continue
        if model.identity not in limits:
            limits[model.identity] = _max_positions(model)
        limit = limits[model.identity]
        if limit is not None:
            yield from _too_long(cell, cell.workload, model.name, limit)


def _too_long(cell: Cell, workload: PromptedWorkload, name: str, limit: int) -> Iterator[str]:
    prompt = workload.prompt_tokens or 1
    positions = workload.positions(prompt)
    if positions <= limit:
        return
    field = "new_tokens" if workload.decoded_tokens >= prompt else "prompt_tokens"
    yield (
        f"workload.{field}: {prompt} prompt tokens with {workload.decoded_tokens} new ones take {positions} positions, "
        f"but model {brief(name)[1:-1]} has {limit}"
    )


def _max_positions(model: PlannedModel) -> int | None:
    """Positions of a decoder or encoder; None where nothing limits them, or the planner does not know the family."""
    try:
        architecture = read_architecture(read_model_manifest(Path(model.manifest)).config, model.name)
    except (OSError, ValueError):
        return None
    if architecture.kind == "encoder_decoder":
        return None
    return architecture.max_positions or architecture.positions or None
