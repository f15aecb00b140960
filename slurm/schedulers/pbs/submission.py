"""Submit jobs with qsub, and interpret its refusals.

    qsub(folder, name="rw-1a2b3c4d-0001-timed-5e6f7a8b", environment=os.environ)     # the id; Refused, Unavailable

PBS starts the job's script on the first node; pbsdsh starts it again, once for each chunk, and that is once on each
node (`place=scatter`). There it becomes `python -m slurm.launch job.json`. Only the first node has PBS_NODEFILE, so the
script hands the nodes' names on. Nothing of the submitter's environment goes along; the target's `modules` and `setup`
make the environment on the nodes. No job is rerunnable: a measurement is not begun twice in one job.
"""

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import some_of
from configs.plans.job import Job
from configs.targets.target import PbsTarget
from slurm.launcher.containers import interpreter, wrapped
from slurm.launcher.node import PBS_NODES
from slurm.launcher.setup_lines import prepared
from slurm.schedulers.commands.calls import called
from slurm.schedulers.commands.submission import folders_needed, minutes_of
from slurm.schedulers.refusals import Limited, Refused, Unavailable

SCRIPT = "pbs.sh"
_QSUB_LIMIT_SECONDS = 60.0
_OTHERS_SECONDS = 20
"""So long after the first node's end the others' are waited for: they end within seconds of each other."""

# qsub's words (pbs_err_to_txt of src/lib/Liblog/pbs_messages.c) and the field of the target that they are about.
_REFUSALS = (
    (r"unknown queue|queue (is )?not enabled|access to queue|queue type|route", "queue"),
    (r"-N value", "job_name"),
    (r"account", "account"),
    (r"project", "project"),
    (r"walltime", "time_limit_minutes"),
    (r"\bmem\b", "memory_per_node"),
    (r"ngpus", "gpus_per_node"),
    (r"ncpus", "cores_per_rank"),
    (r"nodect|nodes", "nodes"),
    (r"\bplace\b", "place"),
    (r"unknown resource:|chunk|select", "chunk"),
    (r"unknown resource|Resource_List", "resources"),
    (r"attribute|-W", "attributes"),
)
# The server was not connected to. Looked for first: the sentence names the server, whose name may be like a field.
_NOT_REACHED = r"cannot connect to server|connection refused"
_PASSING = r"connect|communication|timed? ?out|try again|temporarily|end of file|no server|down|premature|busy"
_ID = re.compile(r"^\s*([0-9]+\.\S+)\s*$", re.MULTILINE)
_LIMITED = r"would exceed|maximum number of jobs|queued jobs|max_queued"


def qsub(folder: Path, name: str, environment: Mapping[str, str]) -> str:
    """Submit the job of a folder, given as the nodes see it. Raises Refused, Unavailable and OSError."""
    job = read_model(folder / "job.json", Job, PLAN_BYTES)
    target = pbs_target(job)
    if job.exclude:
        nodes = some_of(job.exclude)
        raise Refused(f"target.kind of {target.name}: PBS cannot leave nodes out ({nodes}). Set them offline")
    program = shutil.which("qsub", path=environment.get("PATH"))
    if program is None:
        raise Refused("target.kind: got pbs, but qsub is not on PATH")
    script = folder / SCRIPT
    script.write_text(job_script(job, folder, Path(program).with_name("pbsdsh")))
    environment = {**environment, **({"PBS_SERVER": target.server} if target.server else {})}
    done = called([program, *options(job, name), str(script)], environment, _QSUB_LIMIT_SECONDS)
    if done is None:
        raise Unavailable(f"qsub: no answer within {_QSUB_LIMIT_SECONDS:g} s")
    if done.returncode != 0 or not done.stdout.split():
        raise qsub_refusal(done.stderr or done.stdout, target)
    ids = _ID.findall(done.stdout)  # a site's wrapper may write more
    return str(ids[-1]) if ids else done.stdout.split()[-1]


def pbs_target(job: Job) -> PbsTarget:
    """The job's target, of whose kind the queue was chosen."""
    assert isinstance(job.target, PbsTarget), f"{job.name} is of target kind {job.target.kind}"
    return job.target


def options(job: Job, name: str) -> list[str]:
    """Options of qsub for a job."""
    target = pbs_target(job)
    minutes = minutes_of([job], target)
    chosen = ["-N", name, "-r", "n", "-m", "n", "-j", "oe", "-o", "/dev/null", "-S", "/bin/bash"]
    chosen += asked_of(target, job.cell.nodes, job.ranks_per_node * job.cell.cores_per_rank)
    return [*chosen, "-l", f"walltime={minutes // 60:02d}:{minutes % 60:02d}:00"]


def asked_of(target: PbsTarget, nodes: int, cores: int) -> list[str]:
    """Options of qsub that a target sets for so many nodes, but for the time.

    mpiprocs: how often PBS_NODEFILE and pbsdsh have each node; a site's default_chunk.mpiprocs would make that several.
    """
    chunk: dict[str, str | int | None] = {
        "ncpus": cores,
        "mpiprocs": 1,
        "ngpus": target.gpus_per_node,
        "mem": target.memory_per_node,
        **target.chunk,
    }
    select = "".join(f":{resource}={value}" for resource, value in chunk.items() if value is not None)
    asked = ["-l", f"select={nodes}{select}", "-l", f"place={target.place}"]
    for option, value in (("-q", target.queue), ("-A", target.account), ("-P", target.project)):
        asked += [option, value] if value is not None else []
    for resource, amount in target.resources.items():
        asked += ["-l", f"{resource}={amount}"]
    for attribute, amount in target.attributes.items():
        asked += ["-W", f"{attribute}={amount}"]
    return asked


def job_script(job: Job, folder: Path, pbsdsh: Path) -> str:
    """The script of a job: without arguments as PBS starts it, with the nodes' names as pbsdsh does on each node.

    pbsdsh: where this machine has it; else it is where the node's pbs.conf says. It passes SIGTERM on to its tasks and
    waits for them, so its caller must outlive the signal. It also waits for tasks whose node is gone, which PBS never
    says are over: not for long after this node's own launcher has ended.
    """
    target = pbs_target(job)
    launch = [interpreter(target), "-m", "slurm.launch", str(folder / "job.json")]
    command = prepared(wrapped(launch, target, folders_needed([job], [folder], target)), target)
    here = shlex.quote(str(folder))
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {here} || exit 3",
            "if [ $# -eq 0 ]; then",
            "    exec >> slurm_0.log 2>&1 < /dev/null",
            f"    pbsdsh={shlex.quote(str(pbsdsh))}",
            '    [ -x "$pbsdsh" ] || pbsdsh=$(. "${PBS_CONF_FILE:-/etc/pbs.conf}" && echo "$PBS_EXEC/bin/pbsdsh")',
            "    nodes=$(paste -sd, \"$PBS_NODEFILE\")",
            "    trap : TERM",
            f'    "$pbsdsh" -- /bin/bash {here}/{SCRIPT} "$nodes" &',
            f"    tasks=$! left={_OTHERS_SECONDS}",
            "    while kill -0 $tasks 2> /dev/null; do",
            "        sleep 1 & wait -n",
            '        [ ! -e end_0.json ] || [ $((left -= 1)) -gt 0 ] || kill -9 $tasks 2> /dev/null',
            "    done",
            "    exit 0",
            "fi",
            "exec >> \"slurm_$PBS_NODENUM.log\" 2>&1 < /dev/null",
            f"export {PBS_NODES}=\"$1\" PYTHONSAFEPATH=1",
            f"exec {shlex.join(command)}",
            "",
        ]
    )  # fmt: skip


def qsub_refusal(words: str, target: PbsTarget) -> Refused | Limited | Unavailable:
    """qsub's words as an error: the field of the target that they are about, and its value."""
    lines = [line.removeprefix("qsub: ").strip() for line in words.splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line)) or "qsub failed without a message"
    if re.search(_NOT_REACHED, text, re.IGNORECASE):
        away = Unavailable(f"qsub: {text}")
        away.may_have_taken = False
        return away
    if re.search(_LIMITED, text, re.IGNORECASE):
        return Limited(f"qsub: {text}")
    name = next((field for pattern, field in _REFUSALS if re.search(pattern, text, re.IGNORECASE)), None)
    if name is None and re.search(_PASSING, text, re.IGNORECASE):
        return Unavailable(f"qsub: {text}")
    if name is None:
        return Refused(f"target {target.name}: qsub: {text}")
    value = getattr(target, name)
    given = f" {value!r}" if value not in (None, {}) else ""
    return Refused(f"target.{name}{given} of {target.name}: qsub: {text}")


def field_refused(reason: str) -> str:
    """The target's field that a job can never run for, by the scheduler's comment."""
    return next((name for pattern, name in _REFUSALS if re.search(pattern, reason, re.IGNORECASE)), "nodes")
