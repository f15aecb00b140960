"""A Slurm partition as a place for services: files in the folder that its nodes share, a job for each service.

    partition = stage_in_partition(partition, model, say)
    place = SlurmPlace(partition, "deployments/tiny-slurm", expires_at, say)
    start_supervisor(place, folder)           # sbatch; the job becomes the supervisor of the folder
    place.node_of(folder, seconds)            # waits until the job runs; on which node

A job holds its node until the deployment expires or is taken down (scancel). The server listens on its node's loopback
and is reached from here by an SSH tunnel to the node, so tokens do not travel in clear.
"""

import shutil
import time
from math import ceil
from pathlib import Path
from typing import Any

from configs.common.base import Frozen, content_hash
from configs.common.files.reading import read_tail
from configs.common.printable import printable
from configs.plans.plan import PlannedModel
from configs.spec.study import StudyError
from configs.targets.ssh_host import SshHost
from configs.targets.target import SlurmTarget, SshTarget
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import read_cluster
from slurm.schedulers.commands.pending import field_to_correct, is_ordinary
from slurm.schedulers.commands.service import end_service, service_job, slurm_node_address, submit_service
from slurm.schedulers.refusals import Refused, Unavailable
from slurm.staging.packages import run_root, stage_interpreter
from tasks.campaign.launches.staging import stage_target
from tasks.deployment.places import LocalPlace, PlaceError
from tasks.providers.giving_back import Say

_LOOK_SECONDS = 2.0
_MIB = 1 << 20
_LOG_BYTES = 4000


def shared_folder(given: str | None, target: str) -> Path:
    """Return the folder that this machine and all nodes see. Raises ValueError: there is none."""
    if given is None or not Path(given).is_absolute() or not Path(given).is_dir():
        raise ValueError(
            f"--folder: got {given or 'nothing'}, expected the full path of a folder that this machine and all nodes "
            f"of {target} share"
        )
    return Path(given)


class SlurmPartition(Frozen):
    """Where a deployment's servers are jobs. user, key, known_hosts: for SSH to its nodes; none: as ~/.ssh/config has.

    interpreter: the nodes' one with our code; none: it is not staged yet.
    """

    target: SlurmTarget
    interpreter: str | None = None
    user: str | None = None
    key: str | None = None
    known_hosts: str | None = None

    def shared(self) -> Path:
        """Return the folder that all nodes see. Raises ValueError: there is none."""
        return shared_folder(self.target.shared, self.target.name)

    def node(self, name: str) -> tuple[SshTarget, SshHost]:
        """Return a node as a host that is reached by SSH."""
        host = SshHost(host=slurm_node_address(name, self.target), name=name)
        kind = "ssh"
        target = SshTarget.model_validate(
            {"kind": kind, "name": self.target.name, "hosts": [host], "user": self.user, "key": self.key,
             "known_hosts": self.known_hosts}
        )  # fmt: skip
        return target, host


class SlurmPlace:
    """One deployment in a partition. Files are written here: the nodes share the folder."""

    def __init__(self, partition: SlurmPartition, folder: str, expires_at: float, say: Say) -> None:
        shared = partition.shared()
        self._files = LocalPlace(shared / folder, shared)
        self._target, self._expires_at, self._say = partition.target, expires_at, say
        self.name, self.root = self._target.name, self._files.root
        self.python = partition.interpreter or "python3"
        self.models = str(shared / "rankwise" / "models")
        self.clock_seconds = 0.0
        self._looked: dict[str, tuple[float, bool]] = {}

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Start, look at and end jobs by Slurm; everything else is done to the shared folder. Raises PlaceError."""
        try:
            if operation == "start_job":
                self._start(arguments["folder"], arguments["argv"])
                return {}, b""
            if operation == "look":
                return {"jobs": [{"alive": self._is_alive(job["folder"])} for job in arguments["jobs"]]}, b""
            if operation == "end_job":
                if not end_service(_job_name(arguments["folder"]), self._target):
                    raise PlaceError(
                        None, f"{self.name}: the job of {arguments['folder']} is still there after scancel"
                    )
                return {"left": []}, b""
        except (Refused, Unavailable) as error:
            raise PlaceError(None, f"{self.name}: {error}") from error
        return self._files.ask(operation, body, **arguments)

    def _start(self, folder: str, argv: list[str]) -> None:
        minutes = max(1, ceil((self._expires_at - time.time()) / 60) + 1)
        submit_service(self._target, _job_name(folder), argv, Path(folder), minutes)

    def _is_alive(self, folder: str) -> bool:
        """Whether a job is in the queue; the controller is asked every two seconds at most."""
        at, alive = self._looked.get(folder, (-_LOOK_SECONDS, False))
        if time.monotonic() - at >= _LOOK_SECONDS:
            alive = service_job(_job_name(folder), self._target) is not None
            self._looked[folder] = time.monotonic(), alive
        return alive

    def node_of(self, folder: str, seconds: float) -> str:
        """Wait until the job of a service runs; returns its node. Raises PlaceError."""
        deadline, told = time.monotonic() + seconds, ""
        while True:
            try:
                job = service_job(_job_name(folder), self._target)
            except Unavailable:
                job = None
                if time.monotonic() > deadline:
                    raise PlaceError(None, f"{self.name}: squeue does not answer") from None
                time.sleep(_LOOK_SECONDS)
                continue
            if job is None:
                raise PlaceError(None, f"{self.name}: the job has ended: {_tail(folder) or 'no message'}")
            if job.state == "RUNNING" and job.node:
                return job.node
            if (field := field_to_correct(job.reason)) is not None:
                what = "Use fewer --hours" if field == "time_limit_minutes" else "See `rankwise list-nodes`"
                raise PlaceError(None, f"{self.name}: the job would wait for ever: {job.reason}. {what}")
            if time.monotonic() > deadline:
                raise PlaceError(None, f"{self.name}: the job waits after {seconds:.0f} s: {job.reason or job.state}")
            if not is_ordinary(job.reason) and job.reason != told:
                told = job.reason
                self._say(f"{self.name}: the job waits: {told}")
            time.sleep(_LOOK_SECONDS)

    def cores(self) -> int:
        """Return the cores of the partition's smallest node."""
        return min(cpus for cpus, _ in self._nodes())

    def memory_bytes(self) -> int:
        """Return the memory of the partition's smallest node. Raises PlaceError where the cluster names none."""
        known = [memory for _, memory in self._nodes() if memory is not None]
        if not known:
            raise PlaceError(
                None, f"--target: {self.name}: the memory of its nodes is unknown: slurm.conf sets no RealMemory"
            )
        return min(known) * _MIB

    def gpu_memory_bytes(self, first: int = 0, count: int | None = None) -> None:
        """Return None: a job gets no GPU."""

    def gpu_count(self) -> int:
        """Return 0: a job gets no GPU."""
        return 0

    def gpu_variables(self, first: int, count: int) -> dict[str, str]:
        """Return none: a job gets no GPU."""
        return {}

    def _nodes(self) -> list[tuple[int, int | None]]:
        """Cores and MiB, None where unknown, of each node that takes jobs. Raises PlaceError."""
        try:
            cluster = read_cluster(self._target.cluster)
        except ClusterError as error:
            raise PlaceError(None, f"{self.name}: {error}") from error
        found = cluster.partition_of(self._target)
        if cluster.private or (found is not None and found.hidden_nodes is not None):
            raise PlaceError(
                None,
                f"--target: {self.name}: the site hides its nodes from users (PrivateData=nodes), "
                "so that nobody can tell what a server would have there",
            )
        nodes = [] if found is None else [(node.cpus, node.memory_mb) for node in found.nodes if node.usable]
        if not nodes:
            known = ", ".join(sorted(cluster.partitions)) or "none"
            raise PlaceError(
                None, f"--target: {self.name}: no such partition, or none of its nodes is up. Known: {known}"
            )
        return nodes


def stage_in_partition(partition: SlurmPartition, model: PlannedModel, say: Say) -> SlurmPartition:
    """Bring code and a model to the shared folder; returns the partition with its interpreter. Raises PlaceError."""
    shared = partition.shared()
    try:
        stage_target(partition.target, "--folder", [model], say)
        program = stage_interpreter(shared, partition.target.python, say)
    except (StudyError, OSError) as error:
        raise PlaceError(None, str(error)) from error
    return partition.model_copy(update={"interpreter": str(program)})


def forget_measuring(partition: SlurmPartition, folder: Path) -> None:
    """Remove what measuring levels left in the shared folder. folder: of the run, on this machine."""
    shutil.rmtree(run_root(partition.shared(), folder.absolute()), ignore_errors=True)


def _job_name(folder: str) -> str:
    """The name of a service's job: the folder says which it is."""
    return f"rw-serve-{content_hash(folder, 12)}"


def _tail(folder: str) -> str:
    try:
        lines = read_tail(Path(folder) / "job.log", _LOG_BYTES).strip().splitlines()
    except OSError:
        return ""
    return printable(" ".join(lines[-2:]), 300)
