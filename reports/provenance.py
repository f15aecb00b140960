"""Provenance of the figures: models, environments, measuring rules, and the records of each cell.

Each function takes the study as read and gives a `Table`, sentences, or None where there is nothing to show.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from configs.common.files.reading import MIB
from configs.plans.plan import Plan
from configs.spec.cell import Cell
from configs.targets.target import LocalTarget
from configs.workloads import descriptor_of
from reports.numbers.statistics import LEAST_REPEATS, estimate
from reports.numbers.steady import LEAST_PASSES
from reports.reading.load import StudyResult
from reports.reading.names import flat_environment, model_title
from reports.reading.read import Reading
from reports.tables import MOST_ROWS, first_rows, max_over_ranks
from reports.text import UNKNOWN, Table, code, count, escaped, estimate_cell, fact_text, joined, number, plural


def environment_table(study: StudyResult) -> Table | None:
    """What is the same in every environment of the records."""
    known = [flat_environment(data) for data in study.environments.values() if data is not None]
    if not known:
        return None
    rows = [(name, value) for name, value in known[0].items() if all(flat.get(name) == value for flat in known)]
    return Table(("what", "value"), tuple((code(name), fact_text(value)) for name, value in rows), text_columns=2)


def environment_differences(study: StudyResult) -> Table | None:
    """What differs between the environments of the records; None where nothing does."""
    names, known = _differing(study)
    if not names:
        return None
    rows = tuple((code(name), *(fact_text(flat.get(name, UNKNOWN)) for flat in known.values())) for name in names)
    return Table(("what", *(code(digest) for digest in known)), rows, text_columns=len(known) + 1)


def environment_sentence(study: StudyResult) -> str | None:
    """Whether environments differ only as the study itself makes them differ, or by the machine's state."""
    names, known = _differing(study)
    if not names:
        return None
    own = facts_set_by(study.plan, study.plan.cells.values())
    told = {name: {flat[name] for flat in known.values() if name in flat} for name in names}
    foreign = [
        name
        for name in names
        if name not in own and name not in KERNEL_FACTS and not (name.startswith(_OF_ENGINES) and len(told[name]) == 1)
    ]
    if not foreign:
        chosen = any(name in KERNEL_FACTS for name in names)
        kernels = " and in the kernels that were chosen for a cell" if chosen else ""
        what = f"which differ only in what the study itself sets{kernels}"
        return f"The records come from {len(known)} environments, {what}."
    return (
        f"The records come from {len(known)} environments that differ in {joined(foreign)}: "
        "compare figures of different environments with care."
    )


SET_BY_THE_STUDY = (
    "backend",
    "tensor_transport",
    "pipeline_transport",
    "cores_per_rank",
    "cuda_graphs_why",
    "threads",
    "variables.MALLOC_MMAP_THRESHOLD_",
    "variables.GLOO_SOCKET_IFNAME",
    "variables.NCCL_SOCKET_IFNAME",
    "variables.TORCH_FR_BUFFER_SIZE",
)
"""Follow from the number of ranks and nodes, the target, and the pass that looks for peak memory."""
_OF_ENGINES = ("servers.", "libraries.", "variables.PYTORCH_NVML_BASED_CUDA_CHECK")
"""Beginnings of facts that only cells of some engines have. DeepSpeed sets the variable where it is imported."""
KERNEL_FACTS = {
    "attention_prefill": "attention of prompts",
    "attention_decode": "attention of decode steps",
    "attention_training": "attention in training",
    "cuda_graphs": "decode steps",
}
"""Facts of the environment that say which kernels were chosen for a cell, in words."""


def facts_set_by(plan: Plan, cells: Iterable[Cell]) -> set[str]:
    """Facts of the environment that the study itself sets; on clusters also which of its nodes a job gets."""
    found, clusters = list(cells), {target.name for target in plan.targets if not isinstance(target, LocalTarget)}
    names = {f"variables.{name}" for cell in found for name in cell.env} | set(SET_BY_THE_STUDY)
    names.add("servers.endpoint")  # targets are different servers
    return names | ({"hostname"} if all(cell.target in clusters for cell in found) else set())


def _differing(study: StudyResult) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Names whose value is not the same in every environment, and the environments by hash."""
    known = {digest: flat_environment(data) for digest, data in study.environments.items() if data is not None}
    names = sorted({name for flat in known.values() for name in flat})
    return [name for name in names if len({flat.get(name) for flat in known.values()}) > 1], known


def provenance_table(study: StudyResult) -> Table:
    """Where each figure comes from: the cell's key, its repeats and the folder of its records."""
    rows = []
    for key, result in list(study.cells.items())[:MOST_ROWS]:
        measurements = list(result.measurements.values())
        digests = sorted(
            {measurement.record.environment for measurement in measurements if measurement.record.environment}
        )
        rows.append(
            (
                code(key),
                escaped(result.model),
                escaped(result.name),
                f"{len(result.completed)} of {result.planned}",
                code(f"records/{key}/") if measurements or result.memory else UNKNOWN,
                joined(code(digest) for digest in digests) or UNKNOWN,
            )
        )
    table = Table(("key", "model", "cell", "repeats", "records", "environment"), tuple(rows), text_columns=6)
    return first_rows(table, len(study.cells))


def models_table(study: StudyResult) -> Table | None:
    """The models by resolved identity, with the figures that records give of them."""
    measurements: dict[str | None, list[Reading]] = {}
    for result in study.cells.values():
        measurements.setdefault(result.cell.model, []).extend(result.completed.values())
    rows = []
    for model in study.plan.models:
        mine = measurements.get(model.identity, [])
        hashes = sorted(
            {str(value) for measurement in mine if (value := measurement.record.figures.get("weights_hash"))}
        )
        rows.append(
            (
                escaped(model.name),
                code(model.identity),
                "random" if model.synthetic else "real",
                count(max_over_ranks(mine, "model_parameters")),
                joined(code(item) for item in hashes) or UNKNOWN,
            )
        )
    columns = ("model", "identity", "weights", "parameters", "hash of the weights")
    return Table(columns, tuple(rows), text_columns=5) if rows else None


def models_sentence(study: StudyResult) -> str:
    """Why a model has several hashes of its weights; empty where none has."""
    found: dict[str | None, set[object]] = {}
    for result in study.cells.values():
        hashes = (reading.record.figures.get("weights_hash") for reading in result.completed.values())
        found.setdefault(result.cell.model, set()).update(value for value in hashes if value)
    if all(len(hashes) < 2 for hashes in found.values()):
        return ""
    return (
        "A hash is over the weights that the first rank holds, in the cell's precision. Other precisions, and other "
        "parts of a model that is split by tp or pp, have other hashes of the same weights."
    )


def loading_table(study: StudyResult) -> Table | None:
    """Seconds until the weights were in memory, by what fixes them; only a launch's first measurement tells.

    Another target, other passes over the weights and another state of the page cache are rows of their own.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float | None]]] = {}
    for reading in study.readings:
        seconds = reading.numbers_by_rank("load_seconds") if reading.used and reading.completed else []
        if seconds:
            size = reading.numbers_by_rank("load_bytes")
            groups.setdefault(_loaded(study.plan, reading.record.cell), []).append(
                (max(seconds), sum(size) if size else None)
            )
    fixed_columns = ("model", "target", "layout", "dtype", "engine", "compression", "page cache")
    kept = [
        place
        for place, name in enumerate(fixed_columns)
        if name not in _WHERE_SEVERAL or len({fixed[place] for fixed in groups}) > 1
    ]
    rows: list[tuple[str, ...]] = []
    for fixed, loads in groups.items():
        rates = [size / seconds for seconds, size in loads if size is not None and seconds > 0]
        rate = estimate_cell(estimate(rates), 1 / MIB)
        shown = (escaped(fixed[place]) for place in kept)
        rows.append((*shown, str(len(loads)), estimate_cell(estimate(load[0] for load in loads)), rate))
    columns = (
        *(fixed_columns[place] for place in kept),
        "launches",
        "slowest rank, s, median (interval)",
        "MiB/s, all ranks",
    )
    return Table(columns, tuple(rows), text_columns=len(kept)).without_empty_columns() if rows else None


_WHERE_SEVERAL = ("target", "compression", "page cache")
"""Columns that a table of loading has where they differ."""


def _loaded(plan: Plan, cell: Cell) -> tuple[str, ...]:
    """What fixes how long a launch loads its model, as the table of loading names it."""
    engine = cell.engine if cell.engine_mode == "eager" else f"{cell.engine} {cell.engine_mode}"
    compression = "+".join(cell.compression) or UNKNOWN
    model = model_title(plan, cell.model)
    return model, cell.target, cell.place, cell.dtype, engine, compression, cell.page_cache or UNKNOWN


def measuring_lines(study: StudyResult) -> list[str]:
    """How it was measured, in sentences, from the plan's rules and the records."""
    rules, used = study.plan.measuring, [reading for reading in study.readings if reading.used]
    timed = {reading.record.job for reading in used if reading.record.measuring_pass == "timed"}
    whats = {"memory": "that looked for peak memory only", "profile": "that recorded a profile only"}
    whats |= {name: f"under {name}" for name in ("perf", "nsys")}
    jobs = {name: {read.record.job for read in used if read.record.measuring_pass == name} for name in whats}
    untimed = [f"{plural(len(jobs[name]), 'launch')} {what}" for name, what in whats.items() if jobs[name]]
    lines = [
        f"{plural(len(study.plan.cells), 'cell')}, {plural(sum(study.plan.repeats.values()), 'measurement')} planned; "
        f"the records come from {plural(len(timed), 'launch')}" + "".join(f" and {text}" for text in untimed) + ".",
        "Each repeat of a cell runs in another launch, in which the engine starts anew. "
        + (
            f"Cells that share weights and processes share a launch, in an order drawn with seed {rules.seed}."
            if study.plan.pack
            else "Each cell had a launch of its own (`pack: false`)."
        ),
        f"A measurement warms up with {plural(rules.warmup, 'pass')}, then measures at least "
        f"{plural(rules.min_passes, 'pass')} and at least {number(rules.min_seconds)} s. A pass is over when "
        "its slowest rank is.",
        f"Rates of a measurement with {LEAST_PASSES} passes or more are those of its steady part.",
        "A cell's figure is the median over its repeats, with its distribution-free 95 % interval in parentheses; of "
        f"fewer than {LEAST_REPEATS} repeats the range (least to greatest) is given, in brackets.",
    ]
    if any(descriptor_of(cell.workload).decodes for cell in study.plan.cells.values()):
        lines.append(
            "Time per output token is (end-to-end − time to first token) / (new tokens − 1) of a batch; "
            "a measurement gives the median over its batches."
        )
    times = [time for reading in used for time in (reading.record.started_at, reading.record.finished_at) if time]
    if times:
        first, last = (datetime.fromisoformat(choose(times)).astimezone(UTC) for choose in (min, max))
        until = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
        lines.append(f"Measured from {first:%Y-%m-%d %H:%M} to {until} UTC.")
    return lines
