"""No test touches the user's folders, talks to a Prefect server of theirs, or inherits their settings."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from configs.common.system.collector import collect_seldom
from tests.support.servers.migrated_database import put_database

if TYPE_CHECKING:
    from tests.support.cluster.lab import Lab
    from tests.support.cluster.pbs_lab import PbsLab
    from tests.support.rank_pool import RankPool
    from tests.support.servers.offline_team import OfflineTeam

# The same examples in every run, on machines however slow.
hypothesis.settings.register_profile("rankwise", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("rankwise")

_FOREIGN = ("PREFECT_", "RANKWISE_", "HF_", "HUGGING", "XDG_", "SLURM_", "MASTER_")
for _name in list(os.environ):
    if _name.startswith(_FOREIGN):
        del os.environ[_name]

# Several tests run at once: threads of small linear algebra would spin on each other's cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# The collector would look at half a million objects of libraries and tests, for a sixth of the time.
collect_seldom()

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_OF_ONE_TEAM = (
    "tests/flows/interruptions/test_crashes.py",
    "tests/flows/team/test_automations.py",
    "tests/flows/team/test_deployed.py",
    "tests/flows/team/test_ui.py",
)
"""Files that share the fixture `team`: its server, its worker and its deployments cost a core a minute to start, and a
tenth of a core while they wait."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but those of one team go to one process."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrTeam(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "of one team" if file in _OF_ONE_TEAM else file

    return ByFileOrTeam(config, log) if config.getvalue("dist") == "loadfile" else None


_COLLECTED_BY_NAME = {"slow", "slurm", "nightly"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a marker that a test's file does not name: the Makefile finds the files of these markers by their text."""
    for item in items:
        for marker in _COLLECTED_BY_NAME.intersection(mark.name for mark in item.iter_markers()):
            if f"pytest.mark.{marker}" not in item.path.read_text():
                raise pytest.UsageError(f"{item.nodeid} is {marker}, but its file has no pytest.mark.{marker}")


def pytest_collection_finish() -> None:
    """Let the collector leave alone what all tests share."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data and cache folders of this test session only."""
    base = tmp_path_factory.mktemp("user")
    os.environ["RANKWISE_DATA"] = str(base / "data")
    os.environ["RANKWISE_CACHE"] = str(base / "cache")
    # Tests measure nothing: they need not wait for a study that runs beside them.
    os.environ["RANKWISE_LOCKS"] = str(base)
    os.environ["RANKWISE_CALIBRATE"] = "0"  # a quarter of a minute of each session; tests of it ask for it
    # To start a Prefect server takes ten seconds of a core, to wait for the next run two in two minutes.
    os.environ["RANKWISE_SERVER_LINGER"] = "120"
    put_database(base / "data" / "prefect" / "prefect.db", make=False)
    yield base
    from flows.server.process import read_server

    server = read_server(base / "data" / "prefect")
    if server is not None and server.alive:
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[OfflineTeam]":
    """One Prefect server and Prefect worker for all tests of deployments; use it within `team.inside()`."""
    from tests.support.servers.offline_team import OfflineTeam

    made = OfflineTeam(tmp_path_factory.mktemp("team"))
    try:
        with made.inside():
            made.start_server()
            made.start_worker()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Lab]":
    """One Slurm cluster for all tests that are marked `slurm`; SLURM_CONF names it meanwhile."""
    from tests.support.cluster.lab import lab_for_tests

    with lab_for_tests(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="session")
def pbs(lab: "Lab", tmp_path_factory: pytest.TempPathFactory) -> "Iterator[PbsLab]":
    """OpenPBS on the lab's nodes, for all tests that ask for it; its programs are on PATH meanwhile."""
    from tests.support.cluster.pbs_lab import pbs_for_tests

    with pbs_for_tests(lab.plan, tmp_path_factory.mktemp("pbs")) as made:
        yield made


@pytest.fixture
def seen(record_property: "Callable[[str, object], None]") -> "Callable[..., None]":
    """Notes what was seen, for the table that is printed after all tests."""
    return lambda *columns: record_property("seen", " | ".join(str(column) for column in columns))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [str(value) for report in reports for name, value in report.user_properties if name == "seen"]
    if lines:
        terminalreporter.section("what was seen")
    for line in dict.fromkeys(lines):
        terminalreporter.write_line(f"| {line} |")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch on one thread in this process, for the tests of one file."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool() -> "Iterator[RankPool]":
    """Two gloo ranks for the tests of one file."""
    from tests.support.rank_pool import RankPool

    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    """torch on one thread, unless the test asks for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of compiled kernels: every source is compiled once per mode, and the user's own is left alone."""
    return tmp_path_factory.mktemp("kernels")
