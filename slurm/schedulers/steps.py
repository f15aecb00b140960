"""Jobs as steps of the allocation that the user holds, as an adapter (`slurm.schedulers.adapter`).

    submit_many(folders)      # one srun each; those that do not fit beside the others wait for them
    poll(folder)              # from srun's process, the nodes' files and, at the end, Slurm's word

srun lives as long as its step, in a session of its own: a run that is killed leaves it, and the next one finds it by
`srun.json`. `submission.json` names the allocation, `submitting.json` the step's name. Steps get cores that no other
step has (`--exact`). The allocation itself is never ended. When it ends, its steps end with it, and how Slurm calls its
end is how the job's is called.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import read_model
from configs.common.printable import some_of
from configs.common.system.proc import is_alive, start_ticks
from configs.plans.job import JobEnd, Launcher, SrunProcess, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from slurm.launcher import processes
from slurm.launcher.job_files import measurement_under_way, reserve_end, write_end, write_unlaunched_end
from slurm.schedulers.commands.accounting import SACCT_STEP_ARGUMENTS, read_step
from slurm.schedulers.commands.allocation import Allocation, current_allocation, read_allocation
from slurm.schedulers.commands.calls import run_slurm
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.states import FinalState, composed, standing
from slurm.schedulers.commands.step_command import last_words, step_command, step_environment, waiting_reason
from slurm.schedulers.commands.submission import slurm_target
from slurm.schedulers.job_files import job_in, name_of_submission, node_end, node_launcher
from slurm.schedulers.queue import AGREEING_LOOKS
from slurm.schedulers.refusals import REFUSED, JobState, Refused
from slurm.schedulers.waiting import note_waiting, overdue

_CALL_SECONDS = 10.0
_CANCEL_SECONDS = 7.5
_CANCEL_LOOK_SECONDS = 0.2
_UNKNOWN_SECONDS = 3.0
_NEXT_WORD_SECONDS = 60.0
"""After srun's end so long for Slurm to say whether, and how, the allocation ended."""

_processes: dict[Path, "subprocess.Popen[bytes]"] = {}  # those that this process started: it must reap them
_gone: dict[Path, float] = {}  # job folder -> since when its srun is gone
_running: set[Path] = set()
_missed: dict[Path, int] = {}  # job folder -> looks in a row that did not show a step of another host


def submit(folder: Path) -> None:
    """Start one step."""
    submit_many([folder])


def submit_many(folders: Sequence[Path]) -> None:
    """Start a step for each job. Raises Refused where there is no allocation, and OSError where srun cannot start."""
    try:
        held = current_allocation()
    except ClusterError as error:
        raise Refused(f"target.{error}", Status.CANCELLED) from error
    for folder in folders:
        _start(JobPaths(folder), held)


def _start(paths: JobPaths, held: Allocation) -> None:
    job = job_in(paths.folder)
    name = name_of_submission(paths.folder, slurm_target(job).job_name)
    command = step_command(job, paths.folder.resolve(), name, held.job_id)
    reserve_end(paths)
    write_atomically(paths.submitting, Submitting(name=name).model_dump_json())
    with paths.srun_log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=step_environment(slurm_target(job), dict(os.environ)),
        )
    _processes[paths.folder] = process
    started = SrunProcess(pid=process.pid, pid_started=start_ticks(process.pid), host=socket.gethostname())
    try:
        write_atomically(paths.submission, Submission(job_id=held.job_id, submitted_at=utc_now()).model_dump_json())
        write_atomically(paths.srun, started.model_dump_json())  # the last: who finds it relies on the others
    except BaseException:
        paths.srun.unlink(missing_ok=True)
        _end_unknown(paths)
        raise


def poll(folder: Path) -> JobState:
    """Where the job stands. One whose srun is gone is given an `end.json`."""
    paths = JobPaths(folder)
    if paths.end.exists():
        return "ended"
    if not paths.srun.exists():
        _end_unknown(paths)
        write_unlaunched_end(paths, Status.LOST, "the step was never started")
        return "ended"
    if not _srun_lives(paths):
        _running.discard(folder)
        return "ended" if _finish(paths) else "running"
    if paths.node_launcher(0).exists():
        _running.add(folder)
        return "running"
    reason = waiting_reason(paths)
    note_waiting(paths, "PENDING", reason)
    end = overdue(folder, slurm_target(job_in(folder)), reason, others_run=bool(_running))
    if end is None:
        return "waiting"
    _end_step(paths)
    write_end(paths, end)
    return "ended"


def await_end(folder: Path, seconds: float) -> None:
    """Sleep, or until srun has ended where this process started it."""
    process = _processes.get(folder)
    if process is None:
        time.sleep(seconds)
    else:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def note(folder: Path) -> str:
    """One line on a step that has not ended: its allocation, and why it waits or its nodes."""
    paths = JobPaths(folder)
    try:
        job_id = read_model(paths.submission, Submission).job_id
    except FileNotFoundError:
        return ""
    launchers = [node_launcher(paths, rank) for rank in range(job_in(folder).cell.nodes)]
    hosts = some_of([launcher.host for launcher in launchers if launcher])
    if hosts:
        return f"step of allocation {job_id} on {hosts}"
    reason = waiting_reason(paths)
    return f"step of allocation {job_id} pending" + (f": {reason}" if reason else "")


def cancel(folder: Path) -> None:
    """End one step."""
    cancel_many([folder])


def cancel_many(folders: Sequence[Path]) -> None:
    """End steps, and return when none is left, within 8 s. The allocation stays."""
    left = [JobPaths(folder) for folder in folders if _may_run(JobPaths(folder))]
    deadline = time.monotonic() + _CANCEL_SECONDS
    for paths in left:
        _end_step(paths)
    while left and time.monotonic() < deadline:
        left = [paths for paths in left if _srun_lives(paths)]
        for paths in left:
            _end_step(paths, again=True)
        time.sleep(_CANCEL_LOOK_SECONDS if left else 0)
    for paths in left:
        _signal(paths, signal.SIGKILL)
    for folder in folders:
        paths = JobPaths(folder)
        if paths.end.exists() or not paths.job.exists():
            continue
        if not paths.srun.exists():
            _end_unknown(paths)
        if not paths.srun.exists() or paths in left:
            write_unlaunched_end(paths, Status.CANCELLED, "cancelled on request")
        else:
            _finish(paths, cancelled=True)


def _end_unknown(paths: JobPaths) -> None:
    """End an srun that was started and not written down: nothing would find it, and its step would be measured."""
    if paths.submitting.exists():
        processes.end_tree(lambda: processes.of_job(paths.folder.resolve()), _UNKNOWN_SECONDS, 2 * _UNKNOWN_SECONDS)


def _may_run(paths: JobPaths) -> bool:
    return paths.srun.exists() and not paths.end.exists() and _srun_lives(paths)


def _srun_lives(paths: JobPaths) -> bool:
    """Whether the job's srun, and so its step, is there. Of a run on another host: what Slurm says of the step."""
    process = _processes.get(paths.folder)
    if process is not None:
        return process.poll() is None
    started = read_model(paths.srun, SrunProcess)
    if started.host == socket.gethostname():
        return is_alive(started.pid, started.pid_started)
    step, answered = _step_of(paths)
    if step is None and answered:
        _missed[paths.folder] = _missed.get(paths.folder, 0) + 1
    elif answered:
        _missed.pop(paths.folder, None)
    return _missed.get(paths.folder, 0) < AGREEING_LOOKS


def _end_step(paths: JobPaths, again: bool = False) -> None:
    """Have Slurm end a step that has begun, by SIGTERM; end the srun of one that waits. `again`: unless it was told."""
    step, _ = _step_of(paths)
    if step is not None:
        if not again or not paths.node_launcher(0).exists():
            run_slurm(["scancel", step], os.environ, _CALL_SECONDS)
    elif not paths.node_launcher(0).exists():
        _signal(paths, signal.SIGTERM)


def _signal(paths: JobPaths, number: signal.Signals) -> None:
    started = read_model(paths.srun, SrunProcess)
    if started.host == socket.gethostname() and is_alive(started.pid, started.pid_started):
        with suppress(ProcessLookupError):
            os.kill(started.pid, number)


def _step_of(paths: JobPaths) -> tuple[str | None, bool]:
    """`123.4`, the step of the job's name that Slurm has now, None without one; and whether Slurm answered."""
    held, name = read_model(paths.submission, Submission).job_id, read_model(paths.submitting, Submitting).name
    command = ["squeue", "--all", "--steps", "--noheader", f"--jobs={held}", "--format=%i|%j"]
    answer = run_slurm(command, os.environ, _CALL_SECONDS)
    lines = [line.strip().split("|") for line in answer.text.splitlines()]
    return next((line[0] for line in lines if len(line) == 2 and line[1] == name), None), not answer.failed


def _finish(paths: JobPaths, cancelled: bool = False) -> bool:
    """Write `end.json` for a step whose srun is gone; False while Slurm may yet say how the allocation ended."""
    job, held_id = job_in(paths.folder), read_model(paths.submission, Submission).job_id
    ends = [node_end(paths, rank) for rank in range(job.cell.nodes)]
    launchers = [node_launcher(paths, rank) for rank in range(job.cell.nodes)]
    held, answer = read_allocation(held_id)
    waited = time.monotonic() - _gone.setdefault(paths.folder, time.monotonic())
    told = (held is not None and not held.ending) or answer.unknown_job
    if not told and not cancelled and waited < _NEXT_WORD_SECONDS:
        return False
    word = FinalState(held.state, reason=held.reason) if held is not None and held.ended else None
    accounting = _accounting(held_id, launchers)
    if word is None and accounting is not None and standing(accounting.state).specific:
        word = FinalState(accounting.state)
    nodes = tuple(launcher.host for launcher in launchers if launcher)
    began = [launcher is not None for launcher in launchers]
    if not any(began) and not cancelled:
        end = _never_began(paths, held_id, word)
    else:
        end = composed(job, ends, word, nodes, began, measurement_under_way(paths))
        # Slurm has no word for a step that was ended before it began.
        if end.status is Status.CANCELLED or (cancelled and end.status is Status.LOST):
            ended = held is not None and held.ended
            message = f"allocation {held_id} ended ({word.state})" if ended and word else "cancelled on request"
            end = end.model_copy(update={"status": Status.CANCELLED, "kind": None, "message": message})
    kept = accounting or Accounting(job_id=held_id, state=word.state if word else "", nodes=nodes)
    with suppress(OSError):
        write_atomically(paths.accounting, kept.model_copy(update={"nodes": nodes or kept.nodes}).model_dump_json())
    write_end(paths, end)
    return True


def _accounting(held_id: str, launchers: Sequence[Launcher | None]) -> Accounting | None:
    """What sacct says of the step; None without accounts, or where the step never began."""
    step = next((launcher.step_id for launcher in launchers if launcher and launcher.step_id), None)
    if step is None:
        return None
    answer = run_slurm(["sacct", *SACCT_STEP_ARGUMENTS, f"--jobs={held_id}"], os.environ, _CALL_SECONDS)
    with suppress(ValueError):
        account = read_step(answer.text, f"{held_id}.{step}")
        return account.accounting if account else None
    return None


def _never_began(paths: JobPaths, held_id: str, word: FinalState | None) -> JobEnd:
    """The end of a step that no launcher of came up: the allocation ended first, else srun refused it.

    In the first case nothing is known against its measurements: a later run makes them.
    """
    if word is not None:
        message = f"allocation {held_id} ended ({word.state}) before the step began"
        return JobEnd(status=Status.CANCELLED, return_code=None, message=message, finished_at=utc_now())
    words = last_words(paths) or "no message"
    return JobEnd(
        status=Status.FAILED,
        return_code=None,
        kind=REFUSED,
        message=f"target {slurm_target(job_in(paths.folder)).name}: allocation {held_id}: srun: {words}",
        finished_at=utc_now(),
    )
