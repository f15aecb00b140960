"""Installing a lab's packages enables no service, by Debian's own tools on a root folder of the test."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "slurm" / "lab" / "without_services.sh"
NEW = ("slurmctld", "slurmd", "slurmdbd", "mariadb")
UNIT = """[Unit]
Description={0}
[Service]
ExecStart=/bin/true
[Install]
WantedBy=multi-user.target
Alias={0}d.service
"""
INIT = """#!/bin/sh
### BEGIN INIT INFO
# Provides: {0}
# Required-Start:
# Required-Stop:
# Default-Start: 2 3 4 5
# Default-Stop: 0 1 6
### END INIT INFO
"""
# What debhelper adds to a package's postinst.
INSTALL = "set -e; for unit in {}; do deb-systemd-helper enable $unit.service; update-rc.d $unit defaults; done"

pytestmark = pytest.mark.skipif(shutil.which("deb-systemd-helper") is None, reason="not Debian")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the packages' units and init scripts; munge was installed, and is enabled, before."""
    for folder in ("lib/systemd/system", "etc/systemd/system", "etc/init.d", "usr/sbin", "var/lib/systemd"):
        (tmp_path / folder).mkdir(parents=True)
    for level in "0123456S":
        (tmp_path / f"etc/rc{level}.d").mkdir()
    for name in (*NEW, "munge"):
        (tmp_path / f"lib/systemd/system/{name}.service").write_text(UNIT.format(name))
        script = tmp_path / "etc/init.d" / name
        script.write_text(INIT.format(name))
        script.chmod(0o755)
    run(tmp_path, "sh", "-c", INSTALL.format("munge"))
    return tmp_path


def run(root: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = os.environ | {"DPKG_ROOT": str(root), "DPKG_MAINTSCRIPT_PACKAGE": "any", "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def enabled(root: Path) -> set[str]:
    """Names of services that a boot of this root would start, under systemd or System V init."""
    wanted = {link.name.removesuffix(".service") for link in root.glob("etc/systemd/system/*.wants/*")}
    aliases = {link.name.removesuffix(".service") for link in root.glob("etc/systemd/system/*.service")}
    return wanted | aliases | {link.name[3:] for link in root.glob("etc/rc[2-5].d/S*")}


def test_new_services_are_disabled_and_an_enabled_one_stays(root: Path) -> None:
    before = enabled(root)
    assert "munge" in before
    plain = run(root, "sh", "-c", INSTALL.format("slurmd"))
    assert plain.returncode == 0 and "slurmd" in enabled(root), "the packages do enable their services"
    for link in (*root.glob("etc/systemd/system/**/slurmd*"), *root.glob("etc/rc?.d/*slurmd")):
        link.unlink()

    done = run(root, "sh", str(SCRIPT), "sh", "-c", INSTALL.format(" ".join(NEW)))
    assert done.returncode == 0, done.stderr
    assert enabled(root) == before
    assert not (root / "usr/sbin/policy-rc.d").exists()
    upgrade = [run(root, "deb-systemd-helper", "--quiet", "was-enabled", f"{name}.service") for name in (*NEW, "munge")]
    assert [done.returncode for done in upgrade] == [1] * len(NEW) + [0], "an upgrade keeps it so"


def test_services_are_denied_meanwhile_and_a_failed_installation_leaves_none(root: Path) -> None:
    before = enabled(root)
    look = f"{root}/usr/sbin/policy-rc.d munge start; echo policy $?; "
    done = run(root, "sh", str(SCRIPT), "sh", "-c", look + INSTALL.format("mariadb") + "; exit 7")
    assert (done.returncode, done.stdout.splitlines()[0]) == (7, "policy 101")
    assert enabled(root) == before
