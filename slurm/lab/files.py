"""The configuration files of a lab, as text: Slurm's, those that a node sees in /etc, and what shapes its link.

Each setting that is not Slurm's default has its reason beside it; the names are those of slurm.conf(5) and
slurmdbd.conf(5) of Slurm 22.05.
"""

import shlex
import sys
from pathlib import Path

from slurm.lab.commands import program
from slurm.lab.plan import CONTROLLERS, DEFAULT_PARTITION, PREEMPTING_PARTITION, SLURMD_PORT, LabPlan, bits_per_second

_BURST_SECONDS = 0.001  # what a shaped link may send at once, as time at its rate
_LEAST_BURST_BYTES = 3200  # two Ethernet frames
_LATENCY = "50ms"  # what waits longer in a shaped link's queue is dropped, and TCP slows down


def slurm_conf(plan: LabPlan) -> str:
    """Short time limits, so that faults show within seconds; no requeue, since a repeat must be a fresh job."""
    lines = [*_daemon_settings(plan), *_job_settings(plan), *_accounting_settings(plan)]
    for node in plan.node_names:
        lines.append(
            f"NodeName={node} NodeAddr={plan.address(node)} CPUs={plan.cores_per_node}"
            f" RealMemory={plan.memory_per_node_megabytes} Feature=lab,node{plan.number(node)} State=UNKNOWN"
        )
    nodes = f"Nodes={','.join(plan.node_names)} MaxTime=INFINITE State=UP"
    for partition, bandwidth in plan.partitions.items():
        kind = ["PriorityTier=1"]
        if partition == DEFAULT_PARTITION:
            kind = ["Default=YES", *kind]
        elif partition == PREEMPTING_PARTITION:
            kind = ["PriorityTier=10", "PreemptMode=OFF"]
        elif bandwidth is not None:
            kind.append("OverSubscribe=EXCLUSIVE")  # a link has one speed at a time
        lines.append(f"PartitionName={partition} {nodes} {' '.join(kind)}")
    return "\n".join(lines) + "\n"


def _daemon_settings(plan: LabPlan) -> list[str]:
    run = plan.folder / "run"
    return [
        f"ClusterName={plan.name}",
        f"SlurmctldHost={plan.host}({plan.head_address})",
        f"SlurmctldPort={plan.slurmctld_port}",
        f"SlurmdPort={SLURMD_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={plan.munge_socket}",
        f"StateSaveLocation={plan.folder}/state",
        f"SlurmdSpoolDir={plan.folder}/spool/%n",
        f"SlurmctldPidFile={run}/slurmctld.pid",
        f"SlurmdPidFile={run}/slurmd-%n.pid",
        f"SlurmctldLogFile={plan.logs}/slurmctld.log",
        f"SlurmdLogFile={plan.logs}/slurmd-%n.log",
        "MailProg=/bin/true",
        "ReturnToService=2",  # a node that answers again works again
        "SlurmdTimeout=10",
        "SlurmctldTimeout=10",
        "BatchStartTimeout=20",
        "MessageTimeout=10",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
    ]


def _job_settings(plan: LabPlan) -> list[str]:
    etc = plan.slurm_conf.parent
    return [
        "MpiDefault=none",
        # Without cgroups a process that left its parent survives its job, and holds it in the queue by its output.
        f"ProctrackType={'proctrack/cgroup' if plan.cgroups else 'proctrack/linuxproc'}",
        f"TaskPlugin={'task/cgroup' if plan.cgroups else 'task/none'}",
        "SlurmdParameters=config_overrides",  # a node has the cores that are written below, not the machine's
        "PropagatePrioProcess=1",  # jobs have the priority of who submitted them, not slurmd's low one
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        # Else a job that asks for no memory has a node's whole, and no other job fits beside it.
        f"DefMemPerCPU={plan.memory_per_node_megabytes // plan.cores_per_node}",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=3",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=CANCEL",
        f"FirstJobId={plan.first_job_id}",  # ids of one lab are not those of the one before
        "MaxArraySize=10001",
        "JobRequeue=0",
        "KillWait=3",
        "UnkillableStepTimeout=30",
        "PrologFlags=Alloc",  # links are shaped on all nodes before the first process of a job
        f"Prolog={etc}/prolog.sh",
        f"Epilog={etc}/epilog.sh",
    ]


def _accounting_settings(plan: LabPlan) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={plan.head_address}",  # nodes ask for accounts too
        f"AccountingStoragePort={plan.slurmdbd_port}",
        f"AccountingStoragePass={plan.munge_socket}",
        *(["AccountingStorageEnforce=qos,limits"] if plan.enforce_limits else []),
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
        # Where the kernel cannot limit memory, slurmd looks every second.
        *([] if plan.cgroups else ["JobAcctGatherParams=OverMemoryKill"]),
    ]


def slurmdbd_conf(plan: LabPlan) -> str:
    """The database is reached through its socket, whose path slurmdbd finds in MYSQL_UNIX_PORT."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={plan.munge_socket}",
            f"DbdHost={plan.host}",
            f"DbdAddr={plan.head_address}",
            f"DbdPort={plan.slurmdbd_port}",
            "SlurmUser=root",
            f"LogFile={plan.logs}/slurmdbd.log",
            f"PidFile={plan.folder}/run/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct_db",
            "DebugLevel=info",
            "",
        ]
    )


def cgroup_conf(plan: LabPlan) -> str:
    """Memory is limited by the kernel where it has the controller; cores by slurmd's own, see `daemons`."""
    lines = ["CgroupPlugin=cgroup/v1"]
    if plan.cgroups:
        lines += [f"CgroupMountpoint={CONTROLLERS[0].parent}", "ConstrainRAMSpace=yes"]
    return "\n".join(lines) + "\n"


def hosts(plan: LabPlan) -> str:
    """All names that a node knows; it has no name server, so an unknown name costs no time."""
    known = {"127.0.0.1": "localhost", plan.head_address: plan.host}
    known |= {plan.address(node): node for node in plan.node_names}
    return "".join(f"{address}\t{name}\n" for address, name in known.items())


def prolog(plan: LabPlan) -> str:
    """Run by slurmd in a node's namespaces before a job's first process there; shapes what the node sends.

    tbf, since every kernel has it (tc-tbf(8)). Both ends of a transfer are shaped where they send, so that a link
    has its speed in both directions at once, as a full-duplex one does.
    """
    cases = []
    for partition, bandwidth in plan.partitions.items():
        if bandwidth is not None:
            burst_bytes = max(_LEAST_BURST_BYTES, int(bits_per_second(bandwidth) / 8 * _BURST_SECONDS))
            shape = f"qdisc replace dev eth0 root tbf rate {bandwidth} burst {burst_bytes} latency {_LATENCY}"
            cases.append(f"    {partition}) {program('tc')} {shape} ;;")
    return "\n".join(["#!/bin/sh", 'case "$SLURM_JOB_PARTITION" in', *cases, "    *) exit 0 ;;", "esac", ""])


def epilog(plan: LabPlan) -> str:
    """Run by slurmd after a job's last process on the node; the link is unshaped again."""
    shaped = "|".join(partition for partition, bandwidth in plan.partitions.items() if bandwidth is not None)
    case = [f"    {shaped}) {program('tc')} qdisc del dev eth0 root || true ;;"] if shaped else []
    return "\n".join(["#!/bin/sh", 'case "$SLURM_JOB_PARTITION" in', *case, "    *) exit 0 ;;", "esac", ""])


def node_script(plan: LabPlan, node: str) -> str:
    """Run in new network, UTS and mount namespaces: makes them a node, then holds them as a process `sleep`."""
    own = plan.folder / "nodes" / node
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"hostname {node}",
        "for each in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 >$each || true; done",
        "ip link set lo up",
        "mkdir -p /dev/shm /run/lock",
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        "mount -t tmpfs -o mode=1777 tmpfs /run/lock",
    ]
    for name in ("hosts", "resolv.conf", "nsswitch.conf"):
        lines.append(f"[ ! -e /etc/{name} ] || mount --bind {own}/{name} /etc/{name}")
    # So what slurmd makes in them lies where `down` finds it, and is a cluster's own that is on this machine.
    lines += [f"mount --bind {cgroup} {top}" for cgroup, top in plan.node_cgroups(node).items()]
    lines += _hiding(plan)
    return "\n".join([*lines, "exec sleep infinity", ""])


def _hiding(plan: LabPlan) -> list[str]:
    """Empty folders over what is hidden; the lab's own folder and the Python that runs this stay where they are."""
    if not plan.hidden:
        return []
    hidden = [each for each in sorted(plan.hidden) if not any(other in each.parents for other in plan.hidden)]
    wanted = [plan.folder, Path(sys.prefix), Path(sys.base_prefix)]
    kept = [each for each in dict.fromkeys(wanted) if any(each.is_relative_to(other) for other in hidden)]
    kept = [each for each in kept if not any(other in each.parents for other in kept)]
    lines = ["mount -t tmpfs tmpfs /mnt"]
    for number, each in enumerate(kept):
        lines.append(f"mkdir /mnt/{number} && mount --rbind {shlex.quote(str(each))} /mnt/{number}")
    lines += [f"mount -t tmpfs -o mode=1777 tmpfs {shlex.quote(str(each))}" for each in hidden]
    for number, each in enumerate(kept):
        place = shlex.quote(str(each))
        lines.append(f"mkdir -p {place} && mount --rbind /mnt/{number} {place}")
    return [*lines, "umount --lazy /mnt"]


NSSWITCH = (
    "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\nservices: files\nprotocols: files\n"
)
