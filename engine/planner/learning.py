"""Learn the planner's error from past records of the same hardware.

    remember(known, path)                              # at the end of a run: <cache>/planner/<fingerprint>.jsonl
    learner = learner_from(read_experiences(path), machines)
    learner(cell, architecture)                        # Learned: seconds x 1.31, from 42 records, within x 1.1

The file stores the cell, the model's config.json and the measurement, not the prediction: errors are computed with the
current planner and calibration. First the mean error of a kind of work (generate, train) is removed, shrunk towards
zero if records are few; the rest is learned by similarity of cells (`engine.planner.fitting.correction`). Only the
newest record of a cell counts.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from configs.common.base import Frozen, content_hash, write_atomically
from configs.common.files.reading import TEXT_BYTES, parse_json, read_bytes, read_tail
from configs.hardware.calibration import Fingerprint
from configs.hardware.hardware import Machine
from configs.spec.cell import Cell
from configs.workloads.prompted import RANDOM_PROMPT_TOKENS
from engine.planner.architecture import Architecture
from engine.planner.cells import Learned, Learner, predict_cell
from engine.planner.families import read_architecture
from engine.planner.fitting.correction import Correction

MOST_RECORDS = 1000
"""Newest records used for the mean error."""
MOST_ALIKE = 60
"""Newest of these used for differences between cells. A matrix of this many rows is inverted a few hundred times, in
milliseconds if the libraries use one thread.
"""
_FOLDS = 16
_MAX_FILE_BYTES = 16 << 20
"""A larger file keeps the newest MOST_RECORDS alone, which are all that is used: each plan and run reads it whole."""
LEARNING_SHRINKAGE = 2.0
"""The mean of n log errors is weighted n / (n + 2), as if two further records had no error."""
_SIGMA_BEFORE = 0.2
_NINE_OF_TEN = 1.645
_LEAST_FACTOR = 1.05
"""Repeats of one cell differ by this factor on a quiet machine; learning cannot reduce it."""

Machines = Callable[[Cell], Machine]


class Experience(Frozen):
    """One measured cell. `prompt_tokens`: mean prompt length, if prompts came from a file."""

    key: str
    cell: Cell
    config: str = Field(description="hash of the model's config.json, kept beside")
    tokens_per_second: PositiveFloat
    prompt_tokens: PositiveInt | None = None
    device: str = Field("cpu", description="as the record names it")
    measured_at: str


class Known(Frozen):
    """Contents of a file of experiences: the newest of each cell, and the models' config.json by hash."""

    experiences: tuple[Experience, ...] = ()
    configs: dict[str, dict[str, Any]] = {}


def experience_path(cache: Path, fingerprint: Fingerprint) -> Path:
    """Return the path of the experiences of such a machine."""
    return cache / "planner" / f"{fingerprint.digest}.jsonl"


def remember(known: Known, path: Path) -> int:
    """Append new cells to the file. Returns how many were added; a file of another format is left unchanged."""
    before = read_experiences(path)
    have = {(experience.key, experience.measured_at) for experience in before.experiences}
    new = [experience for experience in known.experiences if (experience.key, experience.measured_at) not in have]
    configs = {digest: config for digest, config in known.configs.items() if digest not in before.configs}
    if not new:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    if size > _MAX_FILE_BYTES and (before.experiences or size > TEXT_BYTES):
        write_atomically(path, _lines(_newest(merged([before, known]))))
        return len(new)
    # What a crash or a full disk has cut costs no line but its own.
    cut = path.exists() and read_tail(path, 1) not in ("", "\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + _lines(Known(experiences=tuple(new), configs=configs)))
    return len(new)


def _lines(known: Known) -> str:
    """The lines of a file: each configuration before the experiences."""
    lines = [json.dumps({"config": digest, "json": config}) for digest, config in known.configs.items()]
    lines += [experience.model_dump_json() for experience in known.experiences]
    return "".join(f"{line}\n" for line in lines)


def _newest(known: Known) -> Known:
    """The newest MOST_RECORDS, and the configurations that they name."""
    kept = sorted(known.experiences, key=lambda each: each.measured_at)[-MOST_RECORDS:]
    named = {each.config for each in kept}
    configs = {digest: config for digest, config in known.configs.items() if digest in named}
    return Known(experiences=tuple(kept), configs=configs)


def read_experiences(path: Path) -> Known:
    """Return the newest experience of each cell; unreadable lines (truncated by a crash) are skipped."""
    experiences: dict[str, Experience] = {}
    configs: dict[str, dict[str, Any]] = {}
    try:
        lines = read_bytes(path, TEXT_BYTES).splitlines()
    except (OSError, ValueError):
        return Known()
    for line in lines:
        try:
            data = parse_json(line, str(path))
            if isinstance(data, dict) and "json" in data:
                configs[str(data["config"])] = dict(data["json"])
            else:
                experience = Experience.model_validate(data)
                experiences[experience.key] = experience
        except (ValueError, TypeError, ValidationError):
            continue
    return Known(experiences=tuple(experiences.values()), configs=configs)


def merged(known: Iterable[Known]) -> Known:
    """Merge several sources; the newest experience of each cell is kept."""
    newest: dict[str, Experience] = {}
    configs: dict[str, dict[str, Any]] = {}
    for source in known:
        configs |= source.configs
        for experience in source.experiences:
            other = newest.get(experience.key)
            if other is None or other.measured_at <= experience.measured_at:
                newest[experience.key] = experience
    return Known(experiences=tuple(newest.values()), configs=configs)


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the hash that identifies a config.json."""
    return content_hash(dict(config))


def learner_from(known: Known, machines: Machines) -> Learner | None:
    """Return the learned corrections for these machines; None without experiences."""
    architectures = _architectures(known.configs)
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for experience in sorted(known.experiences, key=lambda each: each.measured_at)[-MOST_RECORDS:]:
        cell, architecture = experience.cell, architectures.get(experience.config)
        if architecture is None:
            continue
        machine = machines(cell)
        if (experience.device == "cpu") != (machine.accelerator.kind == "cpu"):
            continue
        lengths = [experience.prompt_tokens] if experience.prompt_tokens else None
        said = predict_cell(cell, architecture, machine, prompt_lengths=lengths)
        if said.tokens_per_second is None:
            continue
        # Positive if the work took longer than predicted.
        error = math.log(said.tokens_per_second / experience.tokens_per_second)
        rows.setdefault(cell.workload.kind, []).append((features(cell, architecture), error))
    if not rows:
        return None
    taught = {kind: _Taught(found) for kind, found in rows.items()}

    def learner(cell: Cell, architecture: Architecture) -> Learned | None:
        kind = taught.get(cell.workload.kind)
        return kind.learned(features(cell, architecture)) if kind else None

    return learner


class _Taught:
    """The mean error of one kind of work, and the differences of cells from it."""

    def __init__(self, rows: Sequence[tuple[list[float], float]]) -> None:
        self.records = len(rows)
        self.mean = sum(error for _, error in rows) / (len(rows) + LEARNING_SHRINKAGE)
        newest = rows[-MOST_ALIKE:]
        points, errors = np.array([point for point, _ in newest]), np.array([error for _, error in newest])
        folds = [place % _FOLDS for place in range(len(newest))]
        self.rest = Correction.learn(points, errors - self.mean, folds, sigma=_SIGMA_BEFORE)

    def learned(self, point: Sequence[float]) -> Learned:
        times, sigma = self.rest.at(point)
        # Remaining uncertainty of the mean, as if two records were unseen.
        sigma = math.hypot(sigma, _SIGMA_BEFORE / math.sqrt(self.records + LEARNING_SHRINKAGE))
        factor = max(_LEAST_FACTOR, math.exp(_NINE_OF_TEN * sigma))
        return Learned(times=math.exp(self.mean) * times, factor=factor, records=self.records)


def factor_once_measured() -> float:
    """Return the factor that is left where the cell itself was measured once and nothing else was."""
    return _Taught([([0.0], 0.0)]).learned([0.0]).factor


def features(cell: Cell, architecture: Architecture) -> list[float]:
    """Return a cell's features: sizes as log2 (halved if they matter less), choices 0 or 1 far apart."""
    work = cell.workload
    sequences, read, written = work.size_of_pass(cell.layout.dp) or (0, 0, 0)
    shape = (sequences, RANDOM_PROMPT_TOKENS if read is None else read, written)
    return [
        *(0.5 * math.log2(max(1.0, size)) for size in shape),
        0.5 * math.log2(architecture.parameters),
        math.log2(cell.layout.ranks),
        math.log2(cell.cores_per_rank),
        3.0 * (cell.dtype != "float32"),
        3.0 * bool(cell.compression),
    ]


def _architectures(configs: Mapping[str, dict[str, Any]]) -> dict[str, Architecture]:
    found = {}
    for digest, config in configs.items():
        try:
            found[digest] = read_architecture(config, digest)
        except (ValueError, KeyError, TypeError):
            continue  # of a family that this planner does not know
    return found
