"""What past records of the same hardware teach the planner about its own error.

    remember(experiences, path)                        # at the end of a run: <cache>/planner/<fingerprint>.jsonl
    learner = learner_from(read_experiences(path), machine)
    learner(cell, architecture)                        # Learned: seconds x 1.31, from 42 records, within x 1.1

What is kept is the cell, the model's config.json and what was measured, not what was predicted: the error is that of
today's planner with today's calibration, whatever was said then. First the mean error of a kind of work (generate,
train) is taken out, shrunk towards none while records are few; what is left is learnt by likeness of cells
(`engine.planner.correction`). Only the newest record of a cell counts.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from configs.base import Frozen, content_hash
from configs.calibration import Fingerprint
from configs.cell import Cell, PromptedWorkload
from configs.hardware import Machine
from configs.training import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.cells import RANDOM_PROMPT_TOKENS, Learned, Learner, new_tokens_of, predict_cell
from engine.planner.correction import Correction
from engine.planner.families import read_architecture

MOST_RECORDS = 1000
"""The newest ones teach the mean error."""
MOST_ALIKE = 60
"""And of these the newest how cells differ: a matrix of so many rows is inverted a few hundred times, in milliseconds
as long as the libraries do it on one thread."""
_FOLDS = 16
_SHRINKAGE = 2.0
"""The mean of n log errors counts n / (n + 2): as if two records had said that the planner is right."""
_SIGMA_BEFORE = 0.2
_NINE_OF_TEN = 1.645
_LEAST_FACTOR = 1.05
"""Repeats of one cell differ by so much on a quiet machine; nothing learnt makes that smaller."""

Machines = Callable[[Cell], Machine]


class Experience(Frozen):
    """One measured cell. `prompt_tokens`: mean length of its prompts, where they came from a file."""

    key: str
    cell: Cell
    config: str = Field(description="hash of the model's config.json, kept beside")
    tokens_per_second: PositiveFloat
    prompt_tokens: PositiveInt | None = None
    device: str = Field("cpu", description="as the record names it")
    measured_at: str


class Known(Frozen):
    """What a file of experiences holds: the newest of each cell, and the models' config.json by hash."""

    experiences: tuple[Experience, ...] = ()
    configs: dict[str, dict[str, Any]] = {}


def experience_path(cache: Path, fingerprint: Fingerprint) -> Path:
    """Where the experiences of such a machine lie."""
    return cache / "planner" / f"{fingerprint.digest}.jsonl"


def remember(known: Known, path: Path) -> int:
    """Append what is new to the file. Returns how many cells were added; a file that is not ours is left as it is."""
    before = read_experiences(path)
    have = {(experience.key, experience.measured_at) for experience in before.experiences}
    new = [experience for experience in known.experiences if (experience.key, experience.measured_at) not in have]
    configs = {digest: config for digest, config in known.configs.items() if digest not in before.configs}
    if not new:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"config": digest, "json": config}) for digest, config in configs.items()]
    lines += [experience.model_dump_json() for experience in new]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return len(new)


def read_experiences(path: Path) -> Known:
    """The newest experience of each cell; lines that cannot be read (a crash cut one short) are passed over."""
    experiences: dict[str, Experience] = {}
    configs: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return Known()
    for line in lines:
        try:
            data = json.loads(line)
            if isinstance(data, dict) and "json" in data:
                configs[str(data["config"])] = dict(data["json"])
            else:
                experience = Experience.model_validate(data)
                experiences[experience.key] = experience
        except (ValueError, TypeError, ValidationError):
            continue
    return Known(experiences=tuple(experiences.values()), configs=configs)


def together(known: Iterable[Known]) -> Known:
    """Several sources as one: of each cell the newest experience."""
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
    """Names a config.json."""
    return content_hash(dict(config))


def learner_from(known: Known, machines: Machines) -> Learner | None:
    """What the experiences teach about predictions for these machines; None where there are none to learn from."""
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
        # Positive where the work took longer than predicted.
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
    """The mean error of one kind of work, and how cells differ from it."""

    def __init__(self, rows: Sequence[tuple[list[float], float]]) -> None:
        self.records = len(rows)
        self.mean = sum(error for _, error in rows) / (len(rows) + _SHRINKAGE)
        newest = rows[-MOST_ALIKE:]
        points, errors = np.array([point for point, _ in newest]), np.array([error for _, error in newest])
        folds = [place % _FOLDS for place in range(len(newest))]
        self.rest = Correction.learn(points, errors - self.mean, folds, sigma=_SIGMA_BEFORE)

    def learned(self, point: Sequence[float]) -> Learned:
        times, sigma = self.rest.at(point)
        # What two unseen records may still shift the mean by.
        sigma = math.hypot(sigma, _SIGMA_BEFORE / math.sqrt(self.records + _SHRINKAGE))
        factor = max(_LEAST_FACTOR, math.exp(_NINE_OF_TEN * sigma))
        return Learned(times=math.exp(self.mean) * times, factor=factor, records=self.records)


def features(cell: Cell, architecture: Architecture) -> list[float]:
    """Where a cell stands among others: sizes as log2 (halved where they matter less), choices 0 or 1 far apart."""
    work = cell.workload
    shape: tuple[float, ...] = (0.0, 0.0, 0.0)
    if isinstance(work, PromptedWorkload):
        shape = (work.batch_size, work.prompt_tokens or RANDOM_PROMPT_TOKENS, max(1, new_tokens_of(work)))
    elif isinstance(work, TrainWorkload):
        shape = (max(1, work.global_batch_size // cell.layout.dp), work.sequence_length, 1)
    return [
        *(0.5 * math.log2(max(1.0, size)) for size in shape),
        0.5 * math.log2(architecture.parameters),
        math.log2(cell.layout.ranks),
        math.log2(cell.cores_per_rank),
        3.0 * (cell.dtype != "float32"),
        3.0 * bool(cell.compression),
        6.0 * (cell.engine != "rankwise"),
    ]


def _architectures(configs: Mapping[str, dict[str, Any]]) -> dict[str, Architecture]:
    found = {}
    for digest, config in configs.items():
        try:
            found[digest] = read_architecture(config, digest)
        except (ValueError, KeyError, TypeError):
            continue  # of a family that this planner does not know (any more)
    return found
