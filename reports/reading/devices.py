"""Keep figures of different devices apart: an A10G's points are on no curve of an H100's, and in no ratio with them.

    study = load_comparable(run)            # as load_run, where all figures are of one device

Of a study of several devices each experiment becomes one for each device, and each cell's model is named with its
device, by which tables, fits and recommendations group. A cell whose repeats ran on several devices keeps those of one.
Answers are compared across devices: correctness experiments stay whole.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from configs.hardware.catalog import catalog
from configs.hardware.hardware import Machine
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedExperiment
from reports.reading.load import CellResult, StudyResult, load_run
from reports.reading.read import Reading
from reports.text import joined, plural

_WHOLE = ("correctness",)
"""Kinds of experiments that compare answers, not speed."""


def device_of(reading: Reading, environments: Mapping[str, dict[str, Any] | None]) -> str | None:
    """What a record's ranks computed on: the name of a GPU, several names where they differ, or cpu; None: unknown."""
    names = {name for name in reading.by_rank("device") if isinstance(name, str)}
    if not names:
        known = (environments.get(reading.record.environment or "") or {}).get("device")
        names = {known} if isinstance(known, str) else set()
    return joined(sorted(names)) or None


def without_their_gpus(study: StudyResult) -> dict[str, tuple[Machine, int]]:
    """Return targets whose `machine` has GPUs by the catalog, and whose ranks computed on the CPU though none was asked
    to (`device: cpu`): with the machine, and how many cells. As where its driver failed, or the nodes are others.
    """
    found: dict[str, tuple[Machine, int]] = {}
    for target in study.plan.targets:
        if target.catalog_name is None or target.device == "cpu":
            continue
        try:
            machine = catalog().listed_instance(target.catalog_name)
        except ValueError:
            continue
        mine = [result for result in study.cells.values() if result.cell.target == target.name]
        cells = sum(
            any(device_of(reading, study.environments) == "cpu" for reading in result.completed.values())
            for result in mine
        )
        if cells and machine.accelerator.kind in ("cuda", "rocm"):
            found[target.name] = (machine, cells)
    return found


def load_comparable(run: RunPaths) -> StudyResult:
    """Read a run folder for comparisons. Raises as `load_run`."""
    return apart_by_device(load_run(run))


def apart_by_device(study: StudyResult) -> StudyResult:
    """The study with a name for each device in it, and no comparison over several."""
    found = {
        key: Counter(device_of(measurement, study.environments) for measurement in result.completed.values())
        for key, result in study.cells.items()
    }
    total = sum(found.values(), Counter[str | None]())
    if len(total.keys() - {None}) < 2:
        return study
    notes = []
    cells, devices = {}, {}
    for key, result in study.cells.items():
        device = _chosen(found[key], total)
        devices[key] = device
        cells[key] = _of_device(study, result, device)
        left_out = len(result.completed) - len(cells[key].completed)
        if left_out:
            others = joined(sorted(str(name) for name in found[key] if name not in (device, None)))
            notes.append(f"{plural(left_out, 'repeat')} of {result.title} on {others}")
    experiments = tuple(part for each in study.plan.experiments for part in _parts(each, devices))
    return replace(
        study,
        plan=study.plan.model_copy(update={"experiments": experiments}),
        cells=cells,
        devices=tuple(sorted(name for name in total if name is not None)),
        other_devices=tuple(notes),
    )


def _chosen(repeats: Counter[str | None], total: Counter[str | None]) -> str | None:
    """The device of most of a cell's repeats; of as many, that of most of the study's."""
    known = [name for name in repeats if name is not None]
    return max(known, key=lambda name: (repeats[name], total[name], name)) if known else None


def _of_device(study: StudyResult, result: CellResult, device: str | None) -> CellResult:
    """The cell with what was measured on one device; samples of several devices have no common percentiles."""
    if device is None:
        return result

    def kept(reading: Reading | None) -> bool:
        return reading is not None and device_of(reading, study.environments) in (device, None)

    measurements = {
        repeat: reading for repeat, reading in result.measurements.items() if not reading.completed or kept(reading)
    }
    whole = len(measurements) == len(result.measurements)
    passes = {name for name, one in result.passes.items() if one is not None and one.completed and not kept(one)}
    return replace(
        result,
        model=f"{result.model} on {device}",
        device=device,
        elsewhere=frozenset({*(result.measurements.keys() - measurements.keys()), *passes}),
        measurements=measurements,
        pooled=result.pooled if whole else {},
        memory=result.memory if kept(result.memory) else None,
        profile=result.profile if kept(result.profile) else None,
        perf=result.perf if kept(result.perf) else None,
        nsys=result.nsys if kept(result.nsys) else None,
    )


def _of_timed(experiment: PlannedExperiment, devices: Mapping[str, str | None]) -> dict[str, str | None]:
    """Cells that keep answers beside timed ones of the same compression, with the device of these: answers are compared
    across devices."""
    if experiment.kind != "compression":
        return {}
    work = {point.cell: (point.values["compression"], point.values["dtype"]) for point in experiment.points}
    timed = {work[one.cell]: devices[one.cell] for one in experiment.points if not one.values["answers"]}
    return {one.cell: timed[work[one.cell]] for one in experiment.points if one.values["answers"]}


def _parts(experiment: PlannedExperiment, devices: Mapping[str, str | None]) -> Iterable[PlannedExperiment]:
    """An experiment for each device of its points; points without a figure stay with the first."""
    devices = {**devices, **_of_timed(experiment, devices)}
    names = list(dict.fromkeys(name for point in experiment.points if (name := devices[point.cell]) is not None))
    if len(names) < 2 or experiment.kind in _WHOLE:
        return [experiment]
    parts = []
    for name in names:
        own = (name, None) if name == names[0] else (name,)
        points = tuple(point for point in experiment.points if devices[point.cell] in own)
        cells = {point.cell for point in points}
        update = {
            "name": f"{experiment.name} on {name}",
            "points": points,
            "candidates": tuple(each for each in experiment.candidates if each.cell is None or each.cell in cells),
            "refused": experiment.refused if name == names[0] else (),
        }
        parts.append(experiment.model_copy(update=update))
    return parts
