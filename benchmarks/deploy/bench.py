"""Deploy the shapes of bert-base and t5-small at every level on five targets, and take all of it down; as root.

    python -m benchmarks.deploy.bench [--models A,B] [--levels none,balanced] [--targets local,ssh,aws]

The SSH host and the instances behind the clouds' APIs are namespaces of this machine with sshd in each, so speeds are
this machine's; prices are the catalog's. Prints the commands' own tables, and what is left in each provider.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.gcp import FakeGcp
from tests.support.ssh_hosts import SshTestHosts

MODELS = "synthetic:bert-base@0,synthetic:t5-small@0"
INSTANCES = {"aws": "aws:g4dn.xlarge", "gcp": "gcp:n1-standard-4-t4", "azure": "azure:Standard_NC4as_T4_v3"}
CLOUDS: dict[str, Any] = {"aws": FakeAws, "gcp": FakeGcp, "azure": FakeAzure}
RANKWISE = str(Path(sys.executable).with_name("rankwise"))


def main() -> int:
    """Run the table. Returns the exit code: 1 where something failed or is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--levels", default="none,balanced,aggressive")
    parser.add_argument("--targets", default="local,ssh,aws,gcp,azure")
    asked = parser.parse_args()
    if (why := hosts.why_not()) is not None:
        print(why)
        return 1
    wanted = asked.targets.split(",")
    with tempfile.TemporaryDirectory(prefix="rankwise-deploy-") as name, ExitStack() as stack:
        folder = Path(name)
        for each in CLOUDS:
            (folder / each).mkdir()
        clouds = {each: stack.enter_context(CLOUDS[each](folder / each)) for each in CLOUDS if each in wanted}
        targets, options = [INSTANCES[each] for each in clouds], _options(folder)
        if "ssh" in wanted:
            made = SshTestHosts(folder / "ssh", 1)
            stack.callback(made.close)
            made.hosts[0].boot()
            targets.insert(0, f"ssh:{made.hosts[0].address}:{made.hosts[0].port}")
            options += ["--user", "root", "--ssh-key", str(made.base / "key"), "--known-hosts", str(made.known_hosts)]
            options += ["--folder", str(made.base / "node")]
        if "local" in wanted:
            targets.insert(0, "local:cpu")
        code = 0
        for model in asked.models.split(","):
            for level in asked.levels.split(","):
                code = max(code, _one(folder, model, level, targets, options))
        for each, cloud in clouds.items():
            left = cloud.left()
            code = max(code, int(bool(left)))
            print(f"left in {each}: {left or 'nothing'}")
    return code


def _options(folder: Path) -> list[str]:
    return ["--ssh-from", "203.0.113.7/32", "--python", sys.prefix, "--hours", "0.5", "--yes"]


def _one(folder: Path, model: str, level: str, targets: list[str], options: list[str]) -> int:
    """Deploy one model at one level to all targets, list, take all down."""
    began = time.monotonic()
    codes = [
        _rankwise(
            folder, "deploy", "--model", model, "--targets", ",".join(targets), "--optimization", level, *options
        ),
        _rankwise(folder, "deployments"),
        _rankwise(folder, "undeploy", "--all"),
    ]
    print(f"{model} {level}: {time.monotonic() - began:.0f} s, exit codes {codes}", flush=True)
    return max(codes)


def _rankwise(folder: Path, *arguments: str) -> int:
    print(f"$ rankwise {arguments[0]} {' '.join(arguments[1:5])}", flush=True)
    return subprocess.run([RANKWISE, *arguments], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
