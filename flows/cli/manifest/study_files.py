"""The files that a study names, as its Job in Kubernetes finds them: in one ConfigMap, beside the study file.

for file in study_files(study, Path("study.yaml")):
    file.key, file.path, file.source       # key in the ConfigMap, place beside study.yaml, file of this machine
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from configs.common.printable import printable
from configs.spec.study import StudyError, StudySpec
from tasks.models.dataset import HUB_PREFIX
from tasks.models.sources import hub_repository
from tasks.planning.inputs import LEARNT, named_inputs

MAX_BYTES = 1 << 20
"""Of a ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/"""
STUDY = "study.yaml"
_MOST_KEY = 253
_ELSEWHERE = ("slurm", "pbs", "ssh", "aws", "gcp", "azure")
"""Kinds of targets that need a scheduler's commands or an SSH client, which the image lacks."""


@dataclass(frozen=True)
class MountedFile:
    """A file of this machine, its key in the ConfigMap, and its place beside the study file."""

    key: str
    path: str
    source: Path


def study_files(study: StudySpec, study_file: Path) -> list[MountedFile]:
    """Return the study file and what it names, in its order. Raises StudyError naming all that a pod cannot have."""
    problems = [
        f"targets[{place}]: {target.name}: a Job measures on its own node, and its image reaches no target of kind "
        f"{target.kind}. Leave it out"
        for place, target in enumerate(study.targets)
        if target.kind in _ELSEWHERE
    ]
    problems += [
        f"models[{place}].id: {printable(model.id, 200)} is a folder of this machine, which the Job's image lacks. "
        "Name a model of a hub, or a synthetic one"
        for place, model in enumerate(study.models)
        if not model.id.startswith("synthetic:") and hub_repository(model.id, model.revision, study_file.parent) is None
    ]
    found = {STUDY: study_file}
    for dotted, field, written in named_inputs(study):
        if field in LEARNT and (written == "stdlib" or written.startswith(HUB_PREFIX)):
            continue
        place, source = PurePosixPath(written), study_file.parent / written
        if place.is_absolute() or ".." in place.parts:
            problems.append(
                f"{dotted}: {printable(written, 200)} lies outside the folder of the study file, and a Job finds files "
                "beside it alone. Move the file there"
            )
        elif not (source.is_dir() or source.is_file()):
            problems.append(f"{dotted}: no such file: {printable(str(source), 400)}")
        else:
            named = dict(_files(study_file.parent, place))
            if not named.pop(STUDY, study_file).samefile(study_file):  # its place in the pod is the study's own
                problems.append(f"{dotted}: {STUDY} is the study's own name in a Job. Give the other file another name")
            found |= named
    size = sum(path.stat().st_size for path in found.values() if path.is_file())
    if size > MAX_BYTES:
        problems.append(
            f"{study_file}: with the files that it names {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}. "
            "Use smaller files, or data of a hub"
        )
    if problems:
        raise StudyError(problems)
    return [MountedFile(_key(number, path), path, source) for number, (path, source) in enumerate(found.items())]


def _files(base: Path, place: PurePosixPath) -> Iterator[tuple[str, Path]]:
    """A file, or all below a folder, by their places."""
    source = base / place
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                yield path.relative_to(base).as_posix(), path
    else:
        yield place.as_posix(), source


def _key(number: int, path: str) -> str:
    """Letters, digits, `-`, `_` and `.` alone: the place itself where it is of these, else numbered."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", path)
    return path if plain == path and len(path) <= _MOST_KEY else f"{number}-{plain}"[:_MOST_KEY]
