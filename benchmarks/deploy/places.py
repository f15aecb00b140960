"""What is deployed to: this machine, a host by SSH, and an instance of each cloud behind a local server of its API.

with ExitStack() as stack:
    targets = all_targets(stack, folder, {"local", "ssh", "aws"})
    targets["aws"].text, targets["aws"].options, targets["aws"].left()
"""

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.gcp import FakeGcp
from tests.support.cluster.ssh_hosts import SshTestHosts

MODELS = ("synthetic:bert-109m@0", "synthetic:t5-61m@0")
"""The shapes of bert-base-uncased and t5-small, with random weights."""
LEVELS = ("none", "balanced", "aggressive")
TARGETS = ("local", "ssh", "aws", "gcp", "azure")
INSTANCES = {"aws": "aws:g4dn.xlarge", "gcp": "gcp:n1-standard-4-t4", "azure": "azure:Standard_NC4as_T4_v3"}
CLOUDS: dict[str, Any] = {"aws": FakeAws, "gcp": FakeGcp, "azure": FakeAzure}


@dataclass(frozen=True)
class Target:
    """text: of --target. options: of the command line. left: what it still has, asked of itself."""

    name: str
    text: str
    options: tuple[str, ...]
    left: Callable[[], list[str]]
    made: Any = None


def all_targets(stack: ExitStack, folder: Path, names: set[str]) -> dict[str, Target]:
    """Bring up the named targets until the stack ends. Raises SystemExit naming what is missing here."""
    if names - {"local"} and (why := hosts.why_not()) is not None:
        raise SystemExit(why)
    nodes = ("--python", sys.prefix)
    found = {"local": Target("local", "local:cpu", (), list)}
    if "ssh" in names:
        shutil.rmtree(folder / "ssh", ignore_errors=True)
        made = SshTestHosts(folder / "ssh", 1)
        stack.callback(made.close)
        host = made.hosts[0]
        host.boot()
        options = ("--user", "root", "--ssh-key", str(made.base / "key"), "--known-hosts", str(made.known_hosts),
                   "--folder", str(made.base / "node"), *nodes)  # fmt: skip
        found["ssh"] = Target("ssh", f"ssh:{host.address}:{host.port}", options, host.job_processes, made)
    for name in TARGETS:
        if name in names and name in CLOUDS:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
            cloud = stack.enter_context(CLOUDS[name](folder / name))
            found[name] = Target(name, INSTANCES[name], ("--ssh-from", "203.0.113.7/32", *nodes), cloud.left, cloud)
    return found
