"""Tables of the whole study: resources, training, failures, environment, how it was measured, provenance.

Each function takes the study as read and gives a `Table`, or None where there is nothing to show.
"""

import numpy as np

from configs.cell import GenerateWorkload
from configs.rates import Floats, by_rank
from configs.record import Status
from reports.load import MISSING, CellResult, Reading, StudyResult, flat_environment, model_title, read_samples
from reports.statistics import estimate
from reports.text import (
    MIB,
    UNKNOWN,
    Table,
    code,
    count,
    escaped,
    estimate_cell,
    joined,
    mebibytes,
    number,
    percent,
    plural,
    shortened,
)

NOISE_LIMIT = 0.10
"""Share of the machine's CPU taken by others from which a cell's figures are called into question."""


def resources_table(study: StudyResult) -> Table | None:
    """Memory of the untimed pass, CPU use, loading time: one row for each cell that has any of it."""
    rows = [_resources(result) for result in study.cells.values() if result.completed or result.memory]
    rows = [row for row in rows if any(value != UNKNOWN for value in row[2:])]
    if not rows:
        return None
    columns = (
        "model",
        "cell",
        "peak memory, MiB, largest rank",
        "peak, all ranks",
        "growth over imports, all ranks",
        "peak while loading, largest rank",
        "weights, MiB a rank",
        "own cores in use",
        "CPU taken by others, most",
        "preprocessing, ms",
        "threads a rank",
    )
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns()


def _resources(result: CellResult) -> tuple[str, ...]:
    visits = list(result.completed.values())
    peaks = result.peak_by_rank()
    growth = result.memory.numbers_by_rank("memory_growth_bytes") if result.memory and peaks else []
    loading = result.memory.numbers_by_rank("load_peak_memory_bytes") if result.memory and peaks else []
    weights, preprocessing = _slowest(visits, "weights_bytes"), _slowest(visits, "preprocess_seconds")
    return (
        escaped(result.model),
        escaped(result.name),
        mebibytes(max(peaks) if peaks else None),
        mebibytes(result.peak_bytes),
        mebibytes(sum(growth) if growth else None),
        mebibytes(max(loading) if loading else None),
        mebibytes(weights),
        percent(cpu_use(result)),
        percent(others_share(result)),
        number(None if preprocessing is None else preprocessing * 1000),
        count(_slowest(visits, "threads")),
    )


def _slowest(visits: list[Reading], figure: str) -> float | None:
    """Median over repeats of a figure's largest value over ranks."""
    value = estimate(max(values) for visit in visits if (values := visit.numbers_by_rank(figure)))
    return value.median if value else None


def cpu_use(result: CellResult) -> float | None:
    """CPU seconds of all ranks over the seconds that their cores had, median over repeats."""
    shares = []
    for visit in result.completed.values():
        busy, seconds = visit.numbers_by_rank("cpu_seconds"), visit.numbers_by_rank("visit_seconds")
        cores = result.cell.layout.ranks * result.cell.cores_per_rank
        if busy and seconds and max(seconds) > 0:
            shares.append(sum(busy) / (max(seconds) * cores))
    value = estimate(shares)
    return value.median if value else None


def others_share(result: CellResult) -> float | None:
    """The largest share, over repeats, of the machine's CPU that other processes took during the cell."""
    shares = [visit.figure("others_cpu_share") for visit in result.completed.values()]
    return max((share for share in shares if share is not None), default=None)


def noise_warning(study: StudyResult) -> str | None:
    """A line naming the cells during which others took much of the machine."""
    noisy = [(share, result) for result in study.cells.values() if (share := others_share(result)) is not None]
    noisy = [(share, result) for share, result in noisy if share > NOISE_LIMIT]
    if not noisy:
        return None
    worst_share, worst = max(noisy, key=lambda pair: pair[0])
    return (
        f"Other processes took more than {percent(NOISE_LIMIT, 2)} of the machine's CPU during "
        f"{plural(len(noisy), 'cell')}; most during {worst.title} ({percent(worst_share)}). "
        "Their figures are of a machine that was busy with something else: measure them again on a quiet one."
    )


def training_table(study: StudyResult) -> Table | None:
    """What was learnt: the first and last loss, and the perplexity on held-out text. Of the first repeat."""
    rows = []
    for result in study.cells.values():
        if result.cell.workload.kind == "train" and result.completed:
            visit = result.completed[min(result.completed)]
            losses = loss_curve(study, visit)
            rows.append(
                (
                    escaped(result.model),
                    escaped(result.name),
                    f"{len(losses):,}" if losses is not None else UNKNOWN,
                    number(float(losses[0])) if losses is not None else UNKNOWN,
                    number(float(losses[-1])) if losses is not None else UNKNOWN,
                    number(visit.figure("heldout_loss")),
                    number(visit.figure("heldout_perplexity"), 4),
                    count(visit.figure("heldout_tokens")),
                )
            )
    columns = (
        "model",
        "cell",
        "steps",
        "first loss, nats",
        "last loss, nats",
        "held-out loss, nats",
        "held-out perplexity",
        "held-out tokens",
    )
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns() if rows else None


def loss_curve(study: StudyResult, visit: Reading) -> Floats | None:
    """Loss by step, the mean over ranks; None where the visit kept none."""
    samples = read_samples((study.folder / visit.path).with_suffix(".npz"), ("loss",))
    if not samples:
        return None
    losses: Floats = np.mean([np.asarray(array, dtype=np.float64) for array in by_rank(samples, "loss")], axis=0)
    return losses if len(losses) else None


def failures_table(study: StudyResult) -> Table | None:
    """Every repeat without a figure: how it ended, why, and where to read more."""
    rows = [row for result in study.cells.values() for row in _failures(result)]
    columns = ("model", "cell", "repeat", "state", "attempts", "why", "log", "record")
    return Table(columns, tuple(rows), text_columns=len(columns)) if rows else None


def _failures(result: CellResult) -> list[tuple[str, ...]]:
    failed = [(str(repeat), visit) for repeat, visit in result.visits.items() if not visit.completed]
    if result.memory is not None and not result.memory.completed:
        failed.append(("memory pass", result.memory))
    rows: list[tuple[str, ...]] = []
    for repeat, visit in failed:
        failure = visit.record.failure
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                repeat,
                visit.record.status.value,
                str(visit.record.attempt),
                escaped(shortened(failure.message, 300)) if failure else UNKNOWN,
                code(failure.log) if failure and failure.log else UNKNOWN,
                code(visit.path),
            )
        )
    missing = [str(repeat) for repeat in range(result.planned) if repeat not in result.visits]
    if missing:
        why = "no attempt has left a record"
        name = (escaped(result.model), escaped(result.name))
        rows.append((*name, joined(missing), MISSING, "0", why, UNKNOWN, UNKNOWN))
    return rows


def environment_table(study: StudyResult) -> Table | None:
    """What is the same in every environment of the records."""
    known = [flat_environment(data) for data in study.environments.values() if data is not None]
    if not known:
        return None
    rows = [(name, value) for name, value in known[0].items() if all(flat.get(name) == value for flat in known)]
    return Table(("what", "value"), tuple((code(name), escaped(value)) for name, value in rows), text_columns=2)


def environment_differences(study: StudyResult) -> Table | None:
    """What differs between the environments of the records; None where nothing does."""
    names, known = _differing(study)
    if not names:
        return None
    rows = tuple((code(name), *(escaped(flat.get(name, UNKNOWN)) for flat in known.values())) for name in names)
    return Table(("what", *(code(digest) for digest in known)), rows, text_columns=len(known) + 1)


def environment_sentence(study: StudyResult) -> str | None:
    """Whether environments differ only as the study itself makes them differ, or by the machine's state."""
    names, known = _differing(study)
    if not names:
        return None
    own = {f"variables.{name}" for cell in study.plan.cells.values() for name in cell.env} | set(SET_BY_THE_STUDY)
    foreign = [name for name in names if name not in own]
    if not foreign:
        return f"The records come from {len(known)} environments, which differ only in what the study itself sets."
    return (
        f"The records come from {len(known)} environments that differ in {joined(foreign)}: "
        "figures measured in different ones are not of the same machine state; mind that where they are compared."
    )


SET_BY_THE_STUDY = ("backend", "cores_per_rank", "threads", "variables.MALLOC_MMAP_THRESHOLD_")
"""Follow from the number of ranks, the target, and the pass that looks for peak memory."""


def _differing(study: StudyResult) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Names whose value is not the same in every environment, and the environments by hash."""
    known = {digest: flat_environment(data) for digest, data in study.environments.items() if data is not None}
    names = sorted({name for flat in known.values() for name in flat})
    return [name for name in names if len({flat.get(name) for flat in known.values()}) > 1], known


def provenance_table(study: StudyResult) -> Table:
    """Where each figure comes from: the cell's key, its repeats and the folder of its records."""
    rows = []
    for key, result in study.cells.items():
        visits = list(result.visits.values())
        digests = sorted({visit.record.environment for visit in visits if visit.record.environment})
        rows.append(
            (
                code(key),
                escaped(result.model),
                escaped(result.name),
                f"{len(result.completed)} of {result.planned}",
                code(f"records/{key}/") if visits or result.memory else UNKNOWN,
                joined(code(digest) for digest in digests) or UNKNOWN,
            )
        )
    return Table(("key", "model", "cell", "repeats", "records", "environment"), tuple(rows), text_columns=6)


def models_table(study: StudyResult) -> Table | None:
    """The models by resolved identity, with the figures that records give of them."""
    rows = []
    for model in study.plan.models:
        cells = [result for result in study.cells.values() if result.cell.model == model.identity]
        visits = [visit for result in cells for visit in result.completed.values()]
        hashes = sorted({str(value) for visit in visits if (value := visit.record.figures.get("weights_hash"))})
        rows.append(
            (
                escaped(model.name),
                code(model.identity),
                "random" if model.synthetic else "real",
                count(_slowest(visits, "model_parameters")),
                joined(code(item) for item in hashes) or UNKNOWN,
            )
        )
    columns = ("model", "identity", "weights", "parameters", "hash of the weights")
    return Table(columns, tuple(rows), text_columns=5) if rows else None


def loading_table(study: StudyResult) -> Table | None:
    """Seconds until the weights were in memory, by what fixes them; only a launch's first visit tells."""
    groups: dict[tuple[str, ...], list[tuple[float, float | None]]] = {}
    for reading in study.readings:
        seconds, size = reading.numbers_by_rank("load_seconds"), reading.numbers_by_rank("load_bytes")
        if reading.used and reading.completed and seconds:
            cell = reading.record.cell
            group = (model_title(study.plan, cell.model), str(cell.layout), cell.dtype, cell.engine)
            groups.setdefault(group, []).append((max(seconds), sum(size) if size else None))
    rows: list[tuple[str, ...]] = []
    for fixed, loads in groups.items():
        rates = [size / seconds for seconds, size in loads if size is not None and seconds > 0]
        rate = estimate_cell(estimate(rates), 1 / MIB)
        rows.append((*map(escaped, fixed), str(len(loads)), estimate_cell(estimate(load[0] for load in loads)), rate))
    columns = ("model", "layout", "dtype", "engine", "launches", "slowest rank, s, median (interval)", "MiB/s, all ranks")
    return Table(columns, tuple(rows), text_columns=4).without_empty_columns() if rows else None


def measuring_lines(study: StudyResult) -> list[str]:
    """How it was measured, in sentences, from the plan's rules and the records."""
    rules, used = study.plan.measuring, [reading for reading in study.readings if reading.used]
    timed = {reading.record.job for reading in used if reading.record.measuring_pass == "timed"}
    memory = {reading.record.job for reading in used if reading.record.measuring_pass == "memory"}
    lines = [
        f"{plural(len(study.plan.cells), 'cell')}, {plural(sum(study.plan.repeats.values()), 'visit')} planned; "
        f"the records come from {_launches(len(timed))}"
        + (f" and {_launches(len(memory))} that looked for peak memory only." if memory else "."),
        "Two repeats of a cell are never in the same launch, so each is a start of the engine of its own. "
        + (
            f"Cells that share weights and processes share a launch, in an order drawn with seed {rules.seed}."
            if study.plan.pack
            else "Each cell had a launch of its own (`pack: false`)."
        ),
        f"A visit warms up with {_passes(rules.warmup)}, then measures at least {_passes(rules.least_passes)} "
        f"and at least {number(rules.least_seconds)} s. A pass is over when its slowest rank is.",
        "A cell's figure is the median over its repeats, given with its range (least to greatest). "
        "A range is not an interval of confidence; this version prints none.",
    ]
    if any(isinstance(cell.workload, GenerateWorkload) for cell in study.plan.cells.values()):
        lines.append(
            "Time per output token is (end-to-end − time to first token) / (new tokens − 1) of a batch; "
            "a visit gives the median over its batches."
        )
    times = [time for reading in used for time in (reading.record.started_at, reading.record.finished_at) if time]
    if times:
        lines.append(f"Measured between {min(times)} and {max(times)}.")
    return lines


def _launches(count: int) -> str:
    return f"{count:,} launch{'' if count == 1 else 'es'}"


def _passes(count: int) -> str:
    return f"{count:,} pass{'' if count == 1 else 'es'}"


def status_counts(study: StudyResult) -> dict[str, int]:
    """How many planned repeats ended in each way; `missing` are those without a record."""
    counts: dict[str, int] = {}
    for result in study.cells.values():
        for visit in result.visits.values():
            name = visit.record.status.value
            counts[name] = counts.get(name, 0) + 1
        missing = result.planned - len(result.visits)
        if missing:
            counts[MISSING] = counts.get(MISSING, 0) + missing
    order = [*(status.value for status in Status), MISSING]
    return {name: counts[name] for name in order if name in counts}


def leftover_sentence(study: StudyResult) -> str | None:
    """Records that lie in the folder and are no part of this plan; earlier attempts are not meant."""
    others = [reading for reading in study.readings if not _planned(study, reading)]
    if not others:
        return None
    keys = {reading.record.key for reading in others}
    return (
        f"{plural(len(others), 'record')} of {plural(len(keys), 'cell')} in this folder "
        "are no part of this plan and are left out."
    )


def _planned(study: StudyResult, reading: Reading) -> bool:
    return reading.record.repeat < study.plan.repeats.get(reading.record.key, 0)
