"""The lab's network: a bridge, one link for each node, and what can be done to a link."""

import json
import zlib
from typing import Any

from slurm.lab import members
from slurm.lab.commands import obey, output_of
from slurm.lab.nodes import inside
from slurm.lab.plan import LabPlan, bridge_of, link_prefix

NODE_DEVICE = "eth0"
_MOST_SUBNETS = 254


def free_subnet(name: str) -> int:
    """Third number of the lab's addresses 10.213.N.0/24: from the name, or the next that this machine does not use."""
    used = {line.split()[3] for line in obey(["ip", "-o", "-4", "addr", "show"]).splitlines()}
    used |= {
        line.split()[0] for line in obey(["ip", "-4", "route", "show", "table", "all"]).splitlines() if line.split()
    }
    first = zlib.crc32(name.encode()) % _MOST_SUBNETS
    for offset in range(_MOST_SUBNETS):
        number = 1 + (first + offset) % _MOST_SUBNETS
        if not any(each.startswith(f"10.213.{number}.") for each in used):
            return number
    raise ValueError("network: no free subnet 10.213.N.0/24 on this machine")


def ensure_bridge(plan: LabPlan) -> bool:
    """Make what is missing of the bridge. Returns whether anything was."""
    if plan.head_address in (output_of(["ip", "-o", "-4", "addr", "show", "dev", plan.bridge, "up"]) or ""):
        return False
    if plan.bridge not in _devices():
        obey(["ip", "link", "add", "name", plan.bridge, "type", "bridge"])
    obey(["ip", "addr", "replace", f"{plan.head_address}/24", "dev", plan.bridge])
    obey(["ip", "link", "set", "dev", plan.bridge, "up"])
    return True


def ensure_link(plan: LabPlan, node: str) -> bool:
    """Connect a node to the bridge, where it is not. Returns whether it was not."""
    own = output_of([*inside(plan.name, node), "ip", "-o", "-4", "addr", "show", "dev", NODE_DEVICE]) or ""
    if plan.address(node) in own and _is_cut(plan, node) is not None:
        return False
    link, pid = plan.link(node), members.holder(plan.name, node)
    output_of([*inside(plan.name, node), "ip", "link", "del", "dev", NODE_DEVICE])
    output_of(["ip", "link", "del", "dev", link])
    obey(["ip", "link", "add", link, "type", "veth", "peer", "name", NODE_DEVICE, "netns", str(pid)])
    within = ["ip", "link", "set", "dev", NODE_DEVICE]
    obey([*inside(plan.name, node), *within, "alias", members.alias(plan.name, node)])
    obey([*inside(plan.name, node), *within, "up"])
    obey(["ip", "link", "set", "dev", link, "master", plan.bridge, "up"])
    # The address comes last: it tells that the link is complete.
    obey([*inside(plan.name, node), "ip", "addr", "replace", f"{plan.address(node)}/24", "dev", NODE_DEVICE])
    return True


def cut_link(plan: LabPlan, node: str) -> None:
    """Pull the node's plug: nothing goes in or out until `restore_link`."""
    obey(["ip", "link", "set", "dev", plan.link(node), "down"])


def restore_link(plan: LabPlan, node: str) -> None:
    """Put the plug in again."""
    obey(["ip", "link", "set", "dev", plan.link(node), "up"])


def link_state(plan: LabPlan, node: str) -> str:
    """`cut`, the bandwidth to which it is shaped now (`100Mbit`), `unshaped`, or `missing`."""
    cut = _is_cut(plan, node)
    if cut is None:
        return "missing"
    if cut:
        return "cut"
    told = output_of([*inside(plan.name, node), "tc", "-j", "qdisc", "show", "dev", NODE_DEVICE])
    queues: list[dict[str, Any]] = json.loads(told or "[]")
    rates = [each["options"]["rate"] * 8 for each in queues if each["kind"] == "tbf"]
    return f"{rates[0] / 1e6:g} Mbit/s" if rates else "unshaped"


def remove_devices(name: str) -> None:
    """Delete a lab's bridge and links, whatever is left of them."""
    for device in devices_of(name):
        output_of(["ip", "link", "del", "dev", device])


def devices_of(name: str) -> list[str]:
    """This machine's network devices that belong to a lab."""
    prefix = link_prefix(name)
    links = [each for each in _devices() if each.startswith(prefix) and each.removeprefix(prefix).isdigit()]
    return links + [each for each in _devices() if each == bridge_of(name)]


def _is_cut(plan: LabPlan, node: str) -> bool | None:
    """None where there is no such link."""
    told = output_of(["ip", "-o", "link", "show", "dev", plan.link(node)])
    return None if told is None else "UP" not in told.partition("<")[2].partition(">")[0].split(",")


def _devices() -> list[str]:
    lines = obey(["ip", "-o", "link", "show"]).splitlines()
    return [line.split(": ")[1].partition("@")[0] for line in lines]
