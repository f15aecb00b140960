"""With which installations of other projects' servers a plan's cells are measured.

installed_servers(plan, cache)         # {"server vllm": "/opt/vllm/bin/python, vllm 0.32.0"}
"""

from pathlib import Path

from configs.plans.plan import Plan
from configs.serving.installations import DISTRIBUTIONS, installation, installed_version
from configs.spec.engines import OtherServer
from configs.targets.target import LocalTarget
from configs.workloads import descriptor_of


def installed_servers(plan: Plan, cache: Path) -> dict[str, str]:
    """Return, by server, where it is and what lies there; nothing of one that is not installed yet.

    Of targets other than this machine the paths alone: those of a cluster's nodes are not of this machine.
    cache: below it lie the environments that `rankwise engine add` makes.
    """
    local = {target.name for target in plan.targets if isinstance(target, LocalTarget)}
    found = {}
    for name in DISTRIBUTIONS:
        served = [c for c in plan.cells.values() if c.engine == name and descriptor_of(c.workload).starts_server]
        if served:
            found[f"server {name}"] = _told(plan, name, cache, all(cell.target in local for cell in served))
    return {name: told for name, told in found.items() if told}


def _told(plan: Plan, name: OtherServer, cache: Path, here: bool) -> str:
    place = installation(plan.engines, name, cache)
    paths = [path for path in (place.python, place.program, place.model) if path is not None]
    if here and not all(Path(path).exists() for path in paths):
        return ""
    version = installed_version(name, place) if here else ""
    return ", ".join(text for text in (*paths, version) if text)
