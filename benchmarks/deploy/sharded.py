"""A model cut over two rented nodes: its answers, one rank killed, and how long until they are right again; as root.

    python -m benchmarks.deploy.sharded [--cloud aws] [--model synthetic:llama-1m@0]

Prints a row; exit code 1 where answers were wrong, did not come back, or something is left.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from benchmarks.clouds.places import end_hosts_when_terminated
from benchmarks.deploy.bench import run_rankwise
from benchmarks.deploy.places import CLOUDS, Target, all_targets
from configs.serving.deployment import Deployment, ServingBundle
from tasks.deployment.first_answers import first_answers
from tasks.deployment.store import Store

_NAME = "cut"
_BACK_SECONDS = 300.0


def main() -> int:
    """Deploy, kill, wait, take down. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cloud", choices=sorted(CLOUDS), default="aws")
    parser.add_argument("--model", default="synthetic:llama-1m@0")
    asked = parser.parse_args()
    end_hosts_when_terminated()
    with tempfile.TemporaryDirectory(prefix="rankwise-sharded-") as name, ExitStack() as stack:
        folder = Path(name)
        os.environ |= {"RANKWISE_DATA": str(folder / "data"), "RANKWISE_CACHE": str(folder / "cache")}
        target = all_targets(stack, folder, {asked.cloud})[asked.cloud]
        problem = _sharded(folder, target, asked.model)
        code, text = run_rankwise(folder, "undeploy", "--all")
        left = target.left()
        print(text.strip())
        print(f"left in {asked.cloud}: {left or 'nothing'}")
    if problem is not None:
        print(problem)
    return 1 if problem or code or left else 0


def _sharded(folder: Path, target: Target, model: str) -> str | None:
    """Returns what went wrong."""
    argv = ["deploy", "--model", model, "--target", target.text, "--nodes", "2", "--sharded", "--name", _NAME]
    began = time.monotonic()
    code, text = run_rankwise(folder, *argv, "--hours", "0.5", "--yes", *target.options)
    print(text.strip())
    if code:
        return f"not deployed: exit code {code}"
    store = Store(folder / "data", folder / "data" / "rented", folder / "cache")
    deployment = store.read(_NAME)
    bundle = store.bundle(deployment)
    deployed = time.monotonic() - began
    if (problem := _problem(deployment, bundle)) is not None:
        return problem
    killed = _kill_rank(target)
    at, refused = time.monotonic(), 0
    while (problem := _problem(deployment, bundle)) is not None or time.monotonic() - at < 1:
        refused += problem is not None
        if time.monotonic() - at > _BACK_SECONDS:
            return f"not back within {_BACK_SECONDS:.0f} s: {problem}"
        if problem is not None and "differs" in problem:
            return f"a wrong answer: {problem}"
        time.sleep(0.5)
    print(
        f"{bundle.model} tp={bundle.layout.tp} over {deployment.nodes} nodes of {target.name}: deployed in "
        f"{deployed:.0f} s, first answers right; killed {killed}; right again after {time.monotonic() - at:.0f} s, "
        f"{refused} requests refused, none answered wrongly"
    )
    return None


def _problem(deployment: Deployment, bundle: ServingBundle) -> str | None:
    try:
        return first_answers(deployment.url, Path(deployment.key_file).read_text().strip(), bundle)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def _kill_rank(target: Target) -> str:
    """End a rank of the second node by SIGKILL; returns its node."""
    machines = target.made.hosts.running()
    assert len(machines) == 2, machines
    ranks = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if "engine.serving.rank" in line or "engine.serving.remote_ranks" in line:
                ranks.append((os.readlink(f"/proc/{process.pid}/ns/uts"), process, line))
        except (psutil.Error, OSError):
            continue
    remote = {space for space, _, line in ranks if "remote_ranks" in line}
    chosen = [process for space, process, line in ranks if space in remote and "remote_ranks" not in line]
    assert chosen, [line for _, _, line in ranks]
    chosen[-1].send_signal(signal.SIGKILL)
    return f"rank process {chosen[-1].pid} of the second node"


if __name__ == "__main__":
    sys.exit(main())
