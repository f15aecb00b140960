"""Render the files of an sbatch bundle (submit.sbatch, run.sh and README.md) from the templates in this folder.

    text = sbatch_script(SbatchBundle("strong", target, [BundleLaunch(1, "0001-timed-1a2b3c4d")], ranks=2))

All values of a study (spaces, quotes, dollar signs, newlines) are quoted for the shell, or for sbatch's parser of
#SBATCH lines. Newlines cannot be represented in #SBATCH lines and are refused.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.common.printable import plural
from configs.spec.measuring import Profiler
from configs.targets.target import SlurmTarget
from slurm.launcher.setup_lines import setup_lines
from slurm.schedulers.commands.accounting import SACCT_ARGUMENTS

SETUP_SCRIPT = "setup_multi_node.sh"
MULTI_NODE_EXAMPLE = "multi_node_example.py.in"
DEFINITION = "rankwise.def"

_HERE = Path(__file__).parent
_OURS = ("array", "nodes", "ntasks", "ntasks-per-node", "output", "requeue")
"""Options that the script rests on, or sets after those of the target."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:,+%@=^-]+")


@dataclass(frozen=True)
class BundleLaunch:
    """One launch of the job: number of nodes, job folder, and the profiler it requires, if any."""

    nodes: int
    job: str
    profiler: Profiler | None = None


@dataclass(frozen=True)
class LargeModel:
    """Weights excluded from the bundle: `digest` of the folder below models/, and the name on the cluster."""

    digest: str
    name: str
    folder: str


@dataclass(frozen=True)
class SbatchBundle:
    """Inputs of the scripts of a study."""

    study: str
    target: SlurmTarget
    steps: Sequence[BundleLaunch]
    ranks: int
    """Number of ranks of the largest launch."""
    models: Sequence[LargeModel] = ()
    profiler: Profiler | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the allocation, that is, of the largest launch."""
        return max(step.nodes for step in self.steps)

    @property
    def launches(self) -> str:
        """`12 launches on 1 to 2 nodes`."""
        count = sum(step.profiler is None for step in self.steps)
        fewest = min(step.nodes for step in self.steps)
        span = str(self.nodes) if fewest == self.nodes else f"{fewest} to {self.nodes}"
        return f"{plural(count, 'launch')} on {span} node{'s' if self.nodes > 1 else ''}"


def sbatch_script(manifest: SbatchBundle) -> str:
    """Return submit.sbatch. Raises ValueError naming the target's field that an #SBATCH line cannot represent."""
    lines = [f"model {model.digest} {shlex.quote(model.name)}" for model in manifest.models]
    lines += [""] if lines else []
    for step in manifest.steps:
        call = "launch" if step.profiler is None else f"profiled {step.profiler}"
        lines.append(f"{call} {step.nodes} {step.job}")
    target = manifest.target
    if target.container is not None and target.container.runtime != "apptainer":
        raise ValueError(f"targets.{target.name}.container.runtime: a bundle supports apptainer only")
    for option in _OURS:
        if target.extra.get(option, False) is not False:
            raise ValueError(f"targets.{target.name}.extra: {option} is set by Rankwise. Leave it out")
    return _filled(
        "submit.sbatch.in",
        study=manifest.study,
        launches=manifest.launches,
        options="\n".join(_options(manifest)),
        image=shlex.quote(target.container.image) if target.container else "",
        profiler=manifest.profiler or "",
        cpus=str(_cpus(target)),
        srun="".join(f" {shlex.quote(option)}" for option in target.srun_args),
        ranks=str(manifest.ranks),
        sacct=" ".join(SACCT_ARGUMENTS),
        steps="\n".join(lines),
    )


def run_script(target: SlurmTarget) -> str:
    """Return run.sh, the script of each node."""
    lines = setup_lines(target)
    profile = (
        ["# shellcheck disable=SC1091", lines.pop(0)] if target.modules else []
    )  # as in `slurm.launcher.setup_lines`
    container = target.container
    binds = [f"container+=(--bind {shlex.quote(given)})" for given in (container.binds if container else [])]
    return _filled(
        "run.sh.in",
        profile="\n".join(profile),
        setup="\n".join(lines),
        python=shlex.quote(target.python or "python3"),
        nv=" --nv" if target.gpus_per_node else "",
        binds="\n".join(binds),
        image_python=shlex.quote(container.python if container else "python3"),
    )


def readme(manifest: SbatchBundle, folder: Path) -> str:
    """Return README.md, the instructions for the folder."""
    image = manifest.target.container.image if manifest.target.container else ""
    copies = "".join(
        f"\n       rsync -a {shlex.quote(model.folder)}/ CLUSTER:$SCRATCH_ROOT/models/{shlex.quote(model.name)}/"
        for model in manifest.models
    )
    models = f"\n   The weights are too large for this folder. Copy them beside it once, for all users:\n{copies}\n"
    return _filled(
        "README.md.in",
        study=manifest.study,
        launches=manifest.launches,
        folder=shlex.quote(str(folder)),
        models=models if copies else "",
        python=manifest.target.python or "python3",
        sacct=" ".join(SACCT_ARGUMENTS),
        image=f"`{image}`" if image else "no container",
        profiler=f"`{manifest.profiler}`" if manifest.profiler else "none",
    )


def setup_script() -> str:
    """Return a script that starts one node of a multi-node PyTorch job without a scheduler."""
    return (_HERE / SETUP_SCRIPT).read_text()


def multi_node_example() -> str:
    """Return a training script for `setup_script`, a template for the user's own."""
    return (_HERE / MULTI_NODE_EXAMPLE).read_text()


def image_definition() -> str:
    """Return the Apptainer definition file of an image with Rankwise."""
    return (_HERE / DEFINITION).read_text()


def sbatch_line(name: str, value: str | int | bool, field: str) -> str | None:
    """Return an option as an #SBATCH line; None for False.

    sbatch splits such a line at spaces, removes quotes and takes a character after a backslash literally. Raises
    ValueError for a value with a newline, which such a line cannot represent.
    """
    if value is False:
        return None
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if "\n" in text or "\0" in text:
        raise ValueError(f"{field}: {text!r} cannot be written in an #SBATCH line. Remove the newline")
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{name}={text}"


def _options(manifest: SbatchBundle) -> list[str]:
    target = manifest.target
    asked: list[tuple[str, str | int | bool | None, str]] = [
        ("job-name", target.job_name or manifest.study, "job_name"),
        ("comment", target.comment, "comment"),
        ("nodes", manifest.nodes, "nodes"),
        ("ntasks-per-node", 1, "nodes"),
        ("cpus-per-task", _cpus(target), "cores_per_rank"),
        ("gpus-per-node", None if target.gres else target.gpus_per_node, "gpus_per_node"),
        ("gres", target.gres, "gres"),
        ("mem", target.memory_per_node, "memory_per_node"),
        ("time", target.time_limit_minutes, "time_limit_minutes"),
        ("clusters", target.cluster, "cluster"),
        ("partition", target.partition, "partition"),
        ("account", target.account, "account"),
        ("qos", target.qos, "qos"),
        ("constraint", target.constraint, "constraint"),
        ("reservation", target.reservation, "reservation"),
        ("exclusive", target.exclusive, "exclusive"),
        *((name, value, f"extra.{name}") for name, value in target.extra.items()),
    ]
    lines = [
        sbatch_line(name, value, f"targets.{target.name}.{field}") for name, value, field in asked if value is not None
    ]
    return [line for line in lines if line is not None]


def _cpus(target: SlurmTarget) -> int:
    return target.ranks_per_node * target.cores_per_rank


def _filled(template: str, **values: str) -> str:
    """Return a template with `@name@` replaced by values (not recursively); lines left empty are removed."""
    text = (_HERE / template).read_text()
    for name in [name for name, value in values.items() if not value]:
        text = text.replace(f"@{name}@\n", "") if f"\n@{name}@\n" in text else text
    return re.sub("@(" + "|".join(values) + ")@", lambda match: values[match.group(1)], text)
