"""Weights to many hosts over slow links: python -m benchmarks.clouds.spread [--hosts 8] [--mbit 200] [--files 1,4]

Hosts are namespaces of this machine with sshd in each; every link is shaped in both directions (tc-tbf(8)). One ideal
transfer is the weights' bits over a link's rate. Prints a row for each number of files; exit code 1 where the last host
has its weights verified after more than 1.25 ideal transfers, or more leaves this machine than the weights and 15 %.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clouds.places import end_hosts_when_terminated
from configs.plans.model_manifest import ModelFile, ModelManifest
from configs.targets.target import SshTarget
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import stage_hosts
from tests.support.cluster.ssh_hosts import SshTestHosts, why_no_hosts

MAX_IDEAL_TRANSFERS, MAX_SENT = 1.25, 1.15
_LIMIT_SECONDS = 600.0
_PIECE_BYTES = 1 << 24


@contextmanager
def hosts_up(folder: Path, count: int) -> Iterator[SshTestHosts]:
    """Hosts by SSH, until the end of the block."""
    hosts = SshTestHosts(folder, count)
    try:
        for host in hosts.hosts:
            host.boot()
        yield hosts
    finally:
        hosts.close()


def _shape(hosts: SshTestHosts, mbit: int) -> None:
    """Give every host's link one rate in each direction, by shaping both of its ends where they send."""
    queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    for host in hosts.hosts:
        for place in (
            host.inside("tc", "qdisc", "replace", "dev", "eth0"),
            ["tc", "qdisc", "replace", "dev", host.link],
        ):
            subprocess.run([*place, *queue], check=True)


def _weights(folder: Path, size: int, files: int) -> Path:
    """A model of random bytes in some files; returns its manifest."""
    model = folder / f"model-{files}"
    model.mkdir()
    told = {}
    for number in range(files):
        name, left, digest = f"model-{number}.safetensors", size // files, hashlib.sha256()
        with (model / name).open("wb") as file:
            while left:
                piece = os.urandom(min(left, _PIECE_BYTES))
                digest.update(piece)
                left -= file.write(piece)
        told[name] = ModelFile(sha256=digest.hexdigest(), size_bytes=size // files)
    manifest = ModelManifest(
        identity=f"folder:spread-{files}", source="folder", folder=str(model), files=told, config={}
    )
    path = folder / f"spread-{files}" / "manifest.json"
    path.parent.mkdir()
    path.write_text(manifest.model_dump_json())
    return path


def main() -> int:
    """Spread, print, judge."""
    end_hosts_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--files", default="1,4", help="numbers of files that the weights are in")
    asked = parser.parse_args()
    if (missing := why_no_hosts()) is not None:
        print(missing, file=sys.stderr)
        return 2
    size = asked.megabytes * 10**6
    ideal = 8 * size / (asked.mbit * 1e6)
    late = False
    print("| hosts | weights | link | ideal, s | last verified, s | ideal transfers | sent from here | load |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="rankwise-spread-") as scratch:
        folder = Path(scratch)
        with hosts_up(folder / "hosts", asked.hosts) as hosts:
            target = SshTarget.model_validate(hosts.target())
            wait_for(stage_hosts(target, [], lambda line: None), _LIMIT_SECONDS)
            _shape(hosts, asked.mbit)
            for files in map(int, asked.files.split(",")):
                manifest = _weights(folder, size, files)
                before, began = hosts.sent_bytes(), time.monotonic()
                wait_for(stage_hosts(target, [manifest], lambda line: None), _LIMIT_SECONDS)
                seconds = time.monotonic() - began
                sent = (hosts.sent_bytes() - before) / size
                _check(hosts, manifest)
                print(
                    f"| {asked.hosts} | {asked.megabytes} MB in {files} | {asked.mbit} Mbit/s | {ideal:.1f} | "
                    f"{seconds:.1f} | {seconds / ideal:.3f} | {sent:.3f} x | {os.getloadavg()[0]:.1f} |",
                    flush=True,
                )
                late |= seconds > MAX_IDEAL_TRANSFERS * ideal or sent > MAX_SENT
    return 1 if late else 0


def _check(hosts: SshTestHosts, manifest: Path) -> None:
    """Every host has every file with its hash."""
    told = ModelManifest.model_validate_json(manifest.read_bytes())
    for host in hosts.hosts:
        for name, file in told.files.items():
            path = host.disk / "rankwise" / "models" / manifest.parent.name / "files" / name
            with path.open("rb") as opened:
                assert hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256, path


if __name__ == "__main__":
    sys.exit(main())
