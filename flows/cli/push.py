"""`rankwise push`: bring code, libraries and models to a cluster's shared folder before a study needs them."""

from pathlib import Path

from configs.study import StudyError, load_study, suggestion
from configs.target import SlurmTarget


def push(name: str, path: Path, assignments: list[str]) -> int:
    """Stage what the study needs on its target of this name. Returns the exit code; raises StudyError."""
    from flows.folders import cache_folder
    from tasks.inputs import planned_model
    from tasks.staging import stage_target

    study = load_study(path, assignments)
    names = [target.name for target in study.targets]
    if name not in names:
        raise StudyError([f"targets: none is called {name!r}{suggestion(name, names)}; there are {', '.join(names)}"])
    position = names.index(name)
    target, where = study.targets[position], f"targets[{position}]"
    if not isinstance(target, SlurmTarget):
        raise StudyError([f"{where}.kind: {name} is this machine; only to a target of kind slurm something is pushed"])
    if target.shared is None:
        raise StudyError(
            [f"{where}.shared: not given: nodes then see all that is here. Give a folder that all nodes see"]
        )
    models = [
        planned_model(spec, index, cache_folder(), path.parent.absolute()) for index, spec in enumerate(study.models)
    ]
    made: list[str] = []

    def notice(line: str) -> None:
        made.append(line)
        print(line, flush=True)

    stage_target(target, where, models, notice, thorough=True)
    if not made:
        print(f"{target.shared}: all is there already: code, libraries, {len(models)} models, checked by hash")
    return 0
