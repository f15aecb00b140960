"""Eight nodes made ready against one: python -m benchmarks.clouds.ready [--only waits,install] [--rounds 3]

waits: nodes of EC2 (its API on this machine, a namespace with sshd behind each instance) that take 45 s to boot, and
an index of packages that holds a node's pip for 120 s: seconds from the request to code and libraries on every node.
At most 1.2 times those of one node. install: hosts by SSH on the first of which pip installs all that nodes need,
from wheels of this environment, and which hand it on: CPU seconds of this program and of all processes on the hosts,
at most 8.5 times those with one host. The same installation has taken 29 to 66 CPU seconds on one machine, so one
host and eight alternate, and the median of the rounds is judged. Each figure is kept in --results, so that an
interrupted campaign goes on. Exit code 1 where a bar is missed.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import psutil

from benchmarks.clouds import wheels
from benchmarks.clouds.places import end_hosts_when_terminated, why_not
from benchmarks.clouds.spread import hosts_up
from configs.common.base import Frozen
from configs.targets.rented import RentedTarget
from configs.targets.target import SshTarget
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import stage_hosts
from tasks.providers.study_nodes import StudyNodes
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.hosts import CALLER
from tests.support.cluster.ssh_hosts import SshTestHosts

BOOT_SECONDS, INDEX_SECONDS = 45.0, 120.0
MAX_WAITING, MAX_CPU = 1.2, 8.5
_LIMIT_SECONDS = 1200.0


class Ready(Frozen):
    """One row."""

    part: str
    round: int = 0
    nodes: int
    seconds: float
    cpu_seconds: float | None = None
    load: float


class _Index(SimpleHTTPRequestHandler):
    """A folder of wheels as an index of packages, which lets every node wait before its first answer."""

    met: dict[str, threading.Event]

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        """A page of links, or a wheel."""
        if self.client_address[0] not in self.met:
            self.met[self.client_address[0]] = threading.Event()
            time.sleep(INDEX_SECONDS)
            self.met[self.client_address[0]].set()
        self.met[self.client_address[0]].wait()
        super().do_GET()


@contextmanager
def _index(folder: Path) -> Iterator[str]:
    """Serve a folder to the nodes; yields its address."""
    handler = type("Index", (_Index,), {"met": {}})
    server = ThreadingHTTPServer((CALLER, 0), partial(handler, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{CALLER}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _pip(place: str) -> dict[str, str]:
    """Variables with which a node's pip takes wheels from one place alone."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": place,
        "PIP_TRUSTED_HOST": CALLER,
        "PIP_TIMEOUT": "600",
    }


def _waits(folder: Path, nodes: int) -> Ready:
    """Rent nodes and bring them all that a study needs."""
    (folder / "aws").mkdir()
    (folder / "wheels").mkdir()
    wheels.empty_wheels(folder / "wheels")
    with FakeAws(folder / "aws") as aws, _index(folder / "wheels") as address:
        aws.hosts.faults += [{"boot_seconds": BOOT_SECONDS, "environment": _pip(address)} for _ in range(nodes)]
        target = RentedTarget.model_validate(
            {"kind": "aws", "name": "ready", "instance": "c7i.xlarge", "nodes": nodes, "regions": ["us-east-1"],
             "ssh_from": "203.0.113.7/32", "max_usd_per_hour": 50}
        )  # fmt: skip
        rental = StudyNodes(target, "ready", folder / "run", folder / "rented", lambda line: None, lambda: None)
        began = time.monotonic()
        try:
            wait_for(stage_hosts(rental.up(agreed=True), [], lambda line: None), _LIMIT_SECONDS)
            seconds = time.monotonic() - began
        finally:
            rental.give_back()
        assert aws.left() == [], aws.left()
    return Ready(part="waits", nodes=nodes, seconds=seconds, load=os.getloadavg()[0])


def _install(folder: Path, nodes: int) -> Ready:
    """Bring hosts code and libraries; the hosts' own pip installs."""
    (folder / "wheels").mkdir()
    wheels.node_wheels(folder / "wheels")
    with hosts_up(folder / "hosts", nodes) as hosts:
        for host in hosts.hosts:
            host.kill_sshd()
            host.environment = _pip(str(folder / "wheels"))
            host.start_sshd()
        target = SshTarget.model_validate(hosts.target(python=None))
        began, cpu = time.monotonic(), _cpu_seconds(hosts)
        wait_for(stage_hosts(target, [], lambda line: None), _LIMIT_SECONDS)
        seconds, cpu = time.monotonic() - began, _cpu_seconds(hosts) - cpu
    return Ready(part="install", nodes=nodes, seconds=seconds, cpu_seconds=cpu, load=os.getloadavg()[0])


def _cpu_seconds(hosts: SshTestHosts) -> float:
    """What this process and all on the hosts have used of the processors, with children that have ended."""
    told = [psutil.Process().cpu_times()]
    for host in hosts.hosts:
        for process in host.processes():
            with suppress(psutil.Error):
                told.append(process.cpu_times())
    return float(sum(each.user + each.system + each.children_user + each.children_system for each in told))


def main() -> int:
    """Make what is missing, print, judge."""
    end_hosts_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="waits,install")
    parser.add_argument("--nodes", default="1,8", help="the first is what the others are held against")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `install`; `waits` is made once")
    parser.add_argument("--results", type=Path, default=Path("cloud-ready.jsonl"))
    asked = parser.parse_args()
    if (missing := why_not()) is not None:
        print(missing, file=sys.stderr)
        return 2
    lines = asked.results.read_text().splitlines() if asked.results.exists() else []
    known = {(row.part, row.round, row.nodes): row for row in map(Ready.model_validate_json, lines)}
    first, *others = [int(count) for count in asked.nodes.split(",")]
    code = 0
    print("| part | round | nodes | seconds | CPU seconds | to one node | load |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for part in asked.only.split(","):
        ratios: dict[int, list[float]] = {nodes: [] for nodes in others}
        for number in range(asked.rounds if part == "install" else 1):
            one = _print_row(_made(part, number, first, known, asked.results), 1.0)
            for nodes in others:
                row = _made(part, number, nodes, known, asked.results)
                ratios[nodes].append(_cost(row) / _cost(one))
                _print_row(row, ratios[nodes][-1])
        for nodes, told in ratios.items():
            bar = MAX_WAITING if part == "waits" else MAX_CPU * nodes / 8
            code |= median(told) > bar
            print(
                f"\n{part}, {nodes} nodes: {median(told):.2f} times one node ({min(told):.2f} to {max(told):.2f}), "
                f"bar {bar:g}",
                flush=True,
            )
    return int(code)


def _made(part: str, number: int, nodes: int, known: dict[tuple[str, int, int], Ready], results: Path) -> Ready:
    """A row that is known, or made now and kept."""
    key = (part, number, nodes)
    if key not in known:
        with tempfile.TemporaryDirectory(prefix="rankwise-ready-") as scratch:
            made = (_waits if part == "waits" else _install)(Path(scratch), nodes)
        known[key] = made.model_copy(update={"round": number})
        with results.open("a") as file:
            file.write(known[key].model_dump_json() + "\n")
    return known[key]


def _cost(row: Ready) -> float:
    """What is held against the bar: CPU seconds where they were counted, else seconds."""
    return row.seconds if row.cpu_seconds is None else row.cpu_seconds


def _print_row(row: Ready, ratio: float) -> Ready:
    used = "" if row.cpu_seconds is None else f"{row.cpu_seconds:.1f}"
    print(
        f"| {row.part} | {row.round + 1} | {row.nodes} | {row.seconds:.1f} | {used} | {ratio:.2f} | {row.load:.1f} |",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
