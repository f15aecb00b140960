"""What --target and --targets name, parsed in one place.

parse_target("local:cpu")            # this machine, on its cores
parse_target("ssh:gpu-a")            # a host of ~/.ssh/config; ssh:gpu-a,... is two targets
parse_target("slurm:gpu")            # jobs in a partition
parse_target("aws:g4dn.xlarge")      # a rented instance, in any spelling of `configs.hardware.node_names`
"""

from typing import Literal

from configs.common.base import Frozen
from configs.hardware.node_names import parse_node_name
from configs.targets.ssh_host import SshHost

TargetKind = Literal["local", "ssh", "slurm", "aws", "gcp", "azure"]


class ParsedTarget(Frozen):
    """text: as written. host: of kind ssh; partition: of Slurm; instance: of a cloud.

    device: cpu where the cores are to compute.
    """

    text: str
    kind: TargetKind
    host: str | None = None
    partition: str | None = None
    instance: str | None = None
    device: Literal["cpu"] | None = None


def parse_target(text: str) -> ParsedTarget:
    """Return what a target names. Raises ValueError with what would work."""
    kind, _, rest = text.strip().partition(":")
    if kind == "local" and rest in ("", "cpu", "gpu"):
        return ParsedTarget(text=text, kind="local", device="cpu" if rest == "cpu" else None)
    if kind == "ssh" and rest:
        return ParsedTarget(text=text, kind="ssh", host=rest)
    if kind == "slurm" and rest:
        return ParsedTarget(text=text, kind="slurm", partition=rest)
    try:
        node = parse_node_name(text)
    except ValueError as error:
        raise ValueError(
            f"--target: {error}. Use local:cpu, ssh:HOST, slurm:PARTITION, aws:INSTANCE, gcp:MACHINE or azure:SIZE"
        ) from error
    return ParsedTarget(text=text, kind=node.provider, instance=node.instance)


def ssh_host(written: str) -> SshHost:
    """Return a host as an option names it: HOST, HOST:PORT, an IPv6 address, or [ADDRESS]:PORT. Raises ValueError."""
    host, _, port = written.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if host and port.isdecimal() and (bracketed or ":" not in host):
        host = host.strip("[]")
        return SshHost(host=host, port=int(port), name=f"{host}-{port}")
    return SshHost(host=written, name=written)
