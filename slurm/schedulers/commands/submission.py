"""Submit groups of jobs of one shape with sbatch through submitit, and interpret its errors.

    ids = sbatch([folder, ...], "rw-1a2b3c4d-0001-timed-5e6f7a8b", comment, work)      # Refused, Unavailable

Each node of a job runs one task of srun: submitit's own `python -m submitit.core._submit`, inside the container if
the target names one, which becomes `python -m slurm.launch job.json`. submitit would requeue a job at USR2 and hands
USR2 to what it runs; no such signal is asked for. A requeue is refused: a measurement is not begun twice in one job.
"""

import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission

from configs.common.files.reading import PLAN_BYTES, brief, read_model
from configs.common.live_variables import SOCKET_VARIABLE
from configs.common.printable import some_of
from configs.plans.job import Job
from configs.plans.model_manifest import read_model_manifest
from configs.targets.resources import ClusterTarget
from configs.targets.target import SlurmTarget
from slurm.launcher.containers import interpreter, srun_container, wrapped
from slurm.launcher.exec_launch import exec_launch
from slurm.launcher.peer_monitor import LIMITS, limits_of
from slurm.launcher.setup_lines import prepared
from slurm.launcher.starting import is_private
from slurm.schedulers.commands.pending import is_submission_limit, limited_field, refusal_reason
from slurm.schedulers.refusals import Limited, Refused, Unavailable

AROUND_SECONDS = 120.0
"""What a job may take beside its ranks: the wrapper's imports, the roll call without containers, the way out."""

_SBATCH_LIMIT_SECONDS = 60.0
_OURS = (
    "array",
    "chdir",
    "clusters",
    "comment",
    "error",
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "requeue",
)
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""Beginnings of what Slurm and srun set for a job's processes; mpirun would take another job's for its own."""
TEMPORARY_FOLDERS = ("TMPDIR", "TMP", "TEMP")
"""Sites give each job one of its own, such as /scratch/12345."""
_FROM_USER = {name: f"SBATCH_{name.upper()}" for name in ("account", "partition", "qos", "constraint", "reservation")}

# sbatch's words (slurm_strerror of src/common/slurm_errno.c), or those of a site's plugin, such as `You must specify an
# account`, and the field of the target that they are about.
_REFUSALS = (
    (
        r"invalid partition|partition name|use this partition|no partition|partition not available|"
        r"\ba (?:valid )?partition\b|--partition\b",
        "partition",
    ),
    (r"cluster name|No cluster '|slurmdbd", "cluster"),
    (r"invalid account\b|\b(?:an|no|default|valid) account\b|--account\b", "account"),
    (r"invalid qos|\b(?:a|no|valid) qos\b|--qos\b", "qos"),
    (r"invalid feature|constraint", "constraint"),
    (r"reservation", "reservation"),
    (r"time limit|walltime|--time\b", "time_limit_minutes"),
    (r"memory", "memory_per_node"),
    (r"generic resource|gres|\bTRES\b|gpu", "gpus_per_node"),
    (r"unrecognized option|invalid option", "extra"),
    (r"invalid node name", "exclude"),
    (r"processors|cpu count|node count|node configuration|partition configuration|nodes", "nodes"),
)
# What passes: the controller is away or busy, restarts, or hands over to its backup. It may have taken the job.
_PASSING = (
    r"contact slurm controller|temporarily|timed out|connect|try again|communication|zero bytes|standby|"
    r"message (?:send|receive) failure|rate limit|shutting down|error writing script"
)
# What never passes and quotes a name of the user's, which may hold a word of the above: a partition `standby`.
_QUOTING = r"invalid partition|(?:unrecognized|invalid) option"
_REASON = re.compile(r"Batch job submission failed: ([^;]+)")
_SUBMITTED = re.compile(r"Submitted batch job ([0-9]+)")
# A limit that it does not name (before Slurm 20.11), perhaps of jobs at once; of jobs in the whole cluster; or of the
# tasks of an array (MaxArraySize, max_array_tasks of slurm.conf): smaller ones, and single jobs, are taken.
_SOME_LIMIT = r"submit limit|accounting/qos policy|MaxJobCount|job array"


def parameters(jobs: Sequence[Job], name: str, comment: str, work: Path) -> dict[str, Any]:
    """Options of sbatch as submitit takes them, for jobs of one shape. Raises Refused."""
    job, target = jobs[0], slurm_target(jobs[0])
    cores = job.ranks_per_node * job.cell.cores_per_rank
    # CONT does nothing to whoever runs, and at 0 s before the limit it is not sent either.
    further: dict[str, str | int | bool] = {"no-requeue": True, "signal": "CONT@0", "chdir": str(work)}
    if target.memory_per_node is not None:
        further["mem"] = target.memory_per_node
    if target.reservation is not None:
        further["reservation"] = target.reservation
    if target.gres is not None:
        further["gres"] = target.gres
    if target.cluster is not None:
        further["clusters"] = target.cluster
    check_extra(target)
    for option, value in target.extra.items():
        if value is not False:
            further[option] = value
    if job.exclude and (listed := further.get("nodelist") or further.get("nodefile")):
        nodes = some_of(job.exclude)
        raise Refused(
            f"target.extra of {target.name}: jobs that list their nodes ({listed}) can leave none out ({nodes})"
        )
    if job.exclude and "/" not in (own := str(further.get("exclude") or "/")):  # sbatch takes one list, or a file
        further["exclude"] = f"{own},{','.join(job.exclude)}"
    return {
        "job_name": name,
        "comment": target.comment or comment,
        "wckey": None,
        "time": minutes_of(jobs, target),
        "nodes": job.cell.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cores,
        "gpus_per_node": target.gpus_per_node if target.gres is None else None,
        "partition": target.partition,
        "account": target.account,
        "qos": target.qos,
        "constraint": target.constraint,
        "exclusive": target.exclusive or None,
        "exclude": ",".join(job.exclude) or None,
        "array_parallelism": target.max_running or len(jobs),
        "stderr_to_stdout": True,
        "setup": ["export PYTHONSAFEPATH=1"],  # a folder named like one of ours must not be imported
        # srun does not take the cores from sbatch in Slurm 22.05 to 23.02; nodes look after each other by themselves.
        "srun_args": [f"--cpus-per-task={cores}", "--kill-on-bad-exit=0", "--mpi=none", *target.srun_args],
        "additional_parameters": further,
    }


def minutes_of(jobs: Sequence[Job], target: ClusterTarget) -> int:
    """The time limit to ask for: that of the longest job and what is around it, within the target's."""
    around = AROUND_SECONDS + limits_of(target).call_seconds - LIMITS.call_seconds
    minutes = math.ceil((max(job.timeout_seconds for job in jobs) + around) / 60)
    return minutes if target.time_limit_minutes is None else min(minutes, target.time_limit_minutes)


def check_path(path: Path) -> None:
    """Raise Refused for patterns in names of output files, and escapes in what sbatch reads from a script."""
    if {"%", "\\", "\n"} & {*str(path)}:
        raise Refused(f"path {str(path)!r}: Slurm does not support %, backslashes or newlines. Use another folder")


def check_extra(target: SlurmTarget) -> None:
    """Raise Refused for an additional option that Rankwise sets itself."""
    for option in target.extra:
        if option in _OURS:
            raise Refused(f"target.extra: {option} is set by Rankwise. Leave it out")


def sbatch(folders: Sequence[Path], name: str, comment: str, work: Path) -> list[str]:
    """Submit the jobs of these folders, an array where there are several. Returns their ids, in order.

    work: folder for submitit's files, which the nodes see. Raises Refused, Unavailable and OSError.
    """
    for path in (work, *folders):
        check_path(path)
    jobs = [read_model(folder / "job.json", Job, PLAN_BYTES) for folder in folders]
    target = slurm_target(jobs[0])
    python = interpreter(target)
    command = prepared(wrapped([python], target, folders_needed(jobs, folders, target)), target)
    logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it tells what is raised as well
    work.mkdir(parents=True, exist_ok=True)
    try:
        executor = _Executor(folder=work, max_num_timeout=0, python=shlex.join(command))
    except RuntimeError as error:
        raise Refused("target.kind: got slurm, but sbatch is not on PATH") from error
    executor.target = target
    asked = parameters(jobs, name, comment, work)
    try:
        asked["srun_args"] += srun_container([*folders_needed(jobs, folders, target), str(work)], target)
    except ValueError as error:
        raise Refused(str(error)) from error
    executor.update_parameters(**asked)
    launchers = [[python, "-m", "slurm.launch", str(folder / "job.json")] for folder in folders]
    if len(launchers) == 1:
        return [executor.submit(exec_launch, launchers[0]).job_id]
    with executor.batch():
        submitted = [executor.submit(exec_launch, launcher) for launcher in launchers]
    return [job.job_id for job in submitted]


def slurm_target(job: Job) -> SlurmTarget:
    """The job's target, of whose kind the adapter was chosen."""
    assert isinstance(job.target, SlurmTarget), f"{job.name} is of target kind {job.target.kind}"
    return job.target


def folders_needed(jobs: Sequence[Job], folders: Sequence[Path], target: ClusterTarget) -> list[str]:
    """Folders that a container must show: what the jobs read and write, the folder of the run first."""
    needed = [str(folders[0].parents[1])]
    for job, folder in zip(jobs, folders, strict=True):
        located = job.located(folder)
        needed += [str(folder), located.inputs, located.cache]
        if located.manifest is not None:
            needed += [str(Path(located.manifest).parent), read_model_manifest(Path(located.manifest)).folder]
    needed += [target.shared] if target.shared is not None else []
    return [folder for folder in dict.fromkeys(needed) if folder]


class _Executor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit has no types for us
    """submitit's, but sbatch gets an environment of our making, and its refusals are told apart."""

    target: SlurmTarget

    @classmethod
    def affinity(cls) -> int:
        """Whether jobs can be submitted here. submitit asks for srun, which only nodes call and some sites hide."""
        return -1 if shutil.which("sbatch") is None else 2

    def _submit_command(self, command: str) -> Any:
        script = self.folder / f".submission_{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command, script.stem))
        try:
            job_id = _job_id(_run_sbatch(script, self.target))
        except BaseException:
            script.unlink()
            raise
        job = self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))
        job.paths.move_temporary_file(script, "submission_file")
        return job

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> Any:
        """As submitit's own, which makes an array by a plain SlurmExecutor that lacks the above."""
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        pickles = []
        for delayed in delayed_submissions:
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            pickles.append(self.folder / f"{uuid.uuid4().hex}.pkl")
            delayed.dump(pickles[-1])
        self.parameters["map_count"] = len(pickles)
        whole = self._submit_command(self._submitit_command_str)
        tasks = list(range(whole.num_tasks))
        jobs = [self.job_class(self.folder, f"{whole.job_id}_{index}", tasks) for index in range(len(pickles))]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs


def _run_sbatch(script: Path, target: SlurmTarget) -> str:
    """What sbatch says to a script. Raises Refused and Unavailable."""
    try:
        done = subprocess.run(
            ["sbatch", str(script)],
            capture_output=True,
            text=True,
            errors="replace",  # a site's plugins may write in another encoding, after the job was taken
            timeout=_SBATCH_LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env=submission_environment(target, dict(os.environ)),
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"sbatch: time-out after {_SBATCH_LIMIT_SECONDS:g} s") from error
    if done.returncode != 0:
        raise sbatch_refusal(done.stderr or done.stdout, target)
    return done.stdout


def _job_id(said: str) -> str:
    """The id of the job that sbatch has submitted; a site's wrapper may write about other jobs before it.

    Raises Unavailable where there is none: the job was taken, and is found by its name.
    """
    submitted = _SUBMITTED.findall(said)
    if not submitted:
        raise Unavailable(f"sbatch: no job id in its answer {brief(said)}")
    return str(submitted[-1])


def submission_environment(target: SlurmTarget, own: dict[str, str]) -> dict[str, str]:
    """The environment that sbatch takes to the nodes: without secrets, and without what would overrule the target.

    Variables of sbatch come before the script's options, and those of a job, in which this process may run, would
    contradict the new job's.
    """
    if job_id := own.get("SLURM_JOB_ID"):
        own = {name: value for name, value in own.items() if not _is_of_job(name, value, job_id)}
    kept = {
        variable
        for field, variable in _FROM_USER.items()
        if getattr(target, field) is None and not target.extra.get(field)
    }
    return {
        name: value
        for name, value in own.items()
        if not is_private(name, value)
        and name != SOCKET_VARIABLE  # of this machine
        and name != "SLURM_CLUSTERS"  # sbatch would send the job where it is not looked for
        and (not name.startswith("SBATCH_") or name in kept)
    }


def _is_of_job(name: str, value: str, job_id: str) -> bool:
    """Whether a variable says something of the job that this process runs in; its folder goes when it ends."""
    temporary = name in TEMPORARY_FOLDERS and re.search(rf"(?<!\d){re.escape(job_id)}(?!\d)", value)
    return bool(temporary) or (name.startswith(_OF_A_JOB) and name != "SLURM_CONF")


def sbatch_refusal(words: str, target: SlurmTarget, about: str | None = None) -> Refused | Limited | Unavailable:
    """sbatch's words as an error: the field of the target that they are about, and its value.

    about: the field, where it is known from elsewhere.
    """
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in words.splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line)) or "sbatch failed without a message"
    limit = refusal_reason(words)
    if limit is not None and not is_submission_limit(limit):
        name = limited_field(limit)
        return Refused(f"target.{name}{_given(target, name)} of {target.name}: sbatch: {text}")
    if limit is not None or re.search(_SOME_LIMIT, text, re.IGNORECASE):
        return Limited(f"sbatch: {text}")
    if _is_passing(text):
        away = Unavailable(f"sbatch: {text}")
        away.may_have_taken = "connect failure" not in text
        return away
    matching = (name for pattern, name in _REFUSALS if re.search(pattern, text, re.IGNORECASE))
    field = about or next(matching, None)
    if field is None:
        return Refused(f"target {target.name}: sbatch: {text}")
    return Refused(f"target.{field}{_given(target, field)} of {target.name}: sbatch: {text}")


def _is_passing(text: str) -> bool:
    """Whether the refusal will pass by itself. Before its reason sbatch prints what a site's plugin tells the user."""
    if re.search(_QUOTING, text, re.IGNORECASE):
        return False
    reason = _REASON.findall(text)
    return re.search(_PASSING, reason[-1] if reason else text, re.IGNORECASE) is not None or "temporarily" in text


def _given(target: SlurmTarget, name: str) -> str:
    value = getattr(target, name, None)
    return f" {value!r}" if value is not None else ""
