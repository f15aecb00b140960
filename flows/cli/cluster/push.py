"""`rankwise push`: stage code, libraries and models in a cluster's shared folder, or on SSH hosts, before a run."""

from pathlib import Path

from configs.common.printable import plural
from configs.spec.study import StudyError, load_study, suggestion
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.target import SshTarget


def push(name: str, path: Path, assignments: list[str]) -> int:
    """Stage the dependencies of a study on the named target. Returns the exit code; raises StudyError."""
    from flows.folders import cache_folder
    from tasks.campaign.launches.staging import stage_target
    from tasks.planning.study_models import planned_model, resolved_note

    study = load_study(path, assignments)
    names = [target.name for target in study.targets]
    if name not in names:
        raise StudyError([f"targets: no target {name!r}{suggestion(name, names)}"])
    position = names.index(name)
    target, where = study.targets[position], f"targets[{position}]"
    if not isinstance(target, ClusterTarget):
        raise StudyError([f"{where}.kind: {name} is this machine, expected a target of a cluster or of hosts"])
    if isinstance(target, RentedTarget):
        raise StudyError(
            [f"{where}.kind: {name} has no nodes before the run, which rents them and carries everything there itself"]
        )
    if target.shared is None and not isinstance(target, SshTarget):
        raise StudyError(
            [f"{where}.shared: not set, so nodes are assumed to see this file system. Set a folder shared by all nodes"]
        )
    models = [
        planned_model(spec, index, cache_folder(), path.parent.absolute()) for index, spec in enumerate(study.models)
    ]
    for note in filter(None, map(resolved_note, study.models, models)):
        print(f"note: {note}")
    made: list[str] = []

    def notice(line: str) -> None:
        made.append(line)
        print(line, flush=True)

    stage_target(target, where, models, notice, thorough=True)
    if not made:
        there = target.shared or "all hosts"
        print(f"{there}: up to date: code, libraries, {plural(len(models), 'model')} (verified by hash)")
    return 0
