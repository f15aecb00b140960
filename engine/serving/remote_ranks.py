"""The ranks of a server on a node other than its first, started again whenever they end.

    python -m engine.serving.remote_ranks SETTINGS_JSON [PARENT_PID]        # ServingSettings.rendezvous names the node

They meet the ranks of the first node, whose HTTP process starts its own in the same way: when one rank of a server
ends, the others notice, end too, and all meet again at the same address.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from configs.common.files.logs import cut_log
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.system.proc import end_with_parent
from configs.serving.settings import ServerRendezvous, ServingSettings
from engine.rank.processes import LAUNCHER_VARIABLE

_LOOK_SECONDS, _PAUSE_SECONDS, _END_SECONDS = 0.1, 1.0, 5.0


def main(arguments: list[str]) -> int:
    """Keep the ranks running until SIGTERM. Returns the exit code."""
    path = Path(arguments[0]).resolve()
    if len(arguments) > 1:
        end_with_parent(signal.SIGTERM, int(arguments[1]))
    settings = read_model(path, ServingSettings, PLAN_BYTES)
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, end)
    assert settings.rendezvous is not None
    while not stop.is_set():
        processes = _start(settings, settings.rendezvous, path)
        while not stop.is_set() and all(process.poll() is None for process in processes):
            cut_log(_log(settings))
            time.sleep(_LOOK_SECONDS)
        codes = [process.poll() for process in processes]
        _end(processes)
        if not stop.is_set():
            print(f"ranks of node {settings.rendezvous.node} ended with {codes}; starting them again", file=sys.stderr)
            stop.wait(_PAUSE_SECONDS)
    return 0


def _log(settings: ServingSettings) -> Path:
    return Path(settings.folder) / "replica-0.log"


def _start(settings: ServingSettings, meeting: ServerRendezvous, path: Path) -> "list[subprocess.Popen[bytes]]":
    world = settings.layout.tp * settings.layout.pp
    here = world // meeting.nodes
    processes = []
    with _log(settings).open("ab") as log:
        for rank in range(here):
            environment = os.environ | {
                "RANK": str(meeting.node * here + rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(here),
                "MASTER_ADDR": meeting.address,
                "MASTER_PORT": str(meeting.port),
            }
            if settings.device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            environment.pop(LAUNCHER_VARIABLE, None)
            # The socket is of the first rank only.
            socket = Path(settings.folder) / "unused.sock"
            command = [sys.executable, "-m", "engine.serving.rank", str(path), str(socket)]
            processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
    return processes


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
