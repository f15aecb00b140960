"""When a tunnel to a server that starts is given up."""

from pathlib import Path

import pytest

from configs.serving.deployment import ServiceState
from tasks.deployment import placing
from tasks.deployment.places import LocalPlace
from tasks.deployment.placing import TunnelWatch
from tasks.deployment.servers import AWAY_SECONDS, ServerNotReady

NOBODY = "exit code 255: ssh: connect to host 10.0.0.1 port 22: Connection refused"


class Clock:
    """Replaces the module `time` there."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


def test_a_machine_that_is_away_is_waited_for_and_a_refusal_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(), ServiceState(supervisor_pid=1)
    monkeypatch.setattr(placing, "time", clock)
    monkeypatch.setattr(placing, "state", lambda place, folder: told)
    watch = TunnelWatch(LocalPlace(tmp_path, tmp_path), "tunnel")

    def becomes(seconds: float, **changes: object) -> None:
        nonlocal told
        clock.now += seconds
        told = told.model_copy(update={"since": clock.now, **changes})

    for starts in range(1, 9):  # away for 3 s and more, as the first starts follow fast
        becomes(0.6, starts=starts, state="waiting", reason=NOBODY)
        watch.check()
    becomes(1, starts=9, state="running")
    clock.now += 16
    watch.check()  # it stands
    becomes(300, starts=10, state="waiting")
    watch.check()  # lost again, a while later: waited for anew
    becomes(AWAY_SECONDS - 1, starts=14)
    watch.check()
    becomes(2, starts=14)
    with pytest.raises(ServerNotReady, match=r"no SSH tunnel to the server's machine: exit code 255: .* refused"):
        watch.check()
    refused = TunnelWatch(LocalPlace(tmp_path, tmp_path), "tunnel")
    becomes(1, starts=4, reason="exit code 255: Permission denied (publickey).")
    refused.check()
    becomes(1, starts=5)
    with pytest.raises(ServerNotReady, match="Permission denied"):
        refused.check()
