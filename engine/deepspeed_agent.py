"""One node's ranks through DeepSpeed's own launcher, with what torchrun's agent gives beside starting them.

The first node's agent serves the store in which all ranks meet, so that it outlives a rank (and every child of the
memory pass finds it), and each agent hands over the exit codes of its ranks as JSON, which DeepSpeed only logs.

    python -m engine.deepspeed_agent EXITS_JSON [arguments of deepspeed.launcher.launch]
"""

import base64
import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.processes import leave, write_exits

_MEET_SECONDS = 300
_POLL_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """Run the launcher; where ranks failed, leave a list of {rank, pid, exit_code} and return 1."""
    exits = Path(arguments[0])
    parser = ArgumentParser()
    for name in ("--world_info", "--node_rank", "--master_addr", "--master_port"):
        parser.add_argument(name, required=True)
    known, _ = parser.parse_known_args(arguments[1:])
    world = json.loads(base64.urlsafe_b64decode(known.world_info))
    node_rank, nodes = int(known.node_rank), len(world)
    store = _store(known.master_addr, int(known.master_port), serves=node_rank == 0)
    # torch.distributed then takes this store, and none of its first rank's.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = _launch(arguments[1:])
    failed = [
        {"rank": int(process.rank), "pid": process.pid, "exit_code": process.returncode}
        for process in started
        if process.returncode
    ]
    if failed:
        write_exits(exits, failed)
        return 1
    store.add("rankwise/ended", 1)
    while node_rank == 0 and store.add("rankwise/ended", 0) < nodes:  # they may still use it
        time.sleep(_POLL_SECONDS)
    return 0


class _Rank(subprocess.Popen):  # type: ignore[type-arg]
    """A rank's process that knows which one it is. `returncode` stays None where nobody asked for it."""

    started: "list[_Rank]" = []

    def __init__(self, command: list[str], env: dict[str, str], **others: Any) -> None:
        super().__init__(command, env=env, **others)
        self.rank = env["RANK"]
        self.started.append(self)


def _launch(arguments: list[str]) -> list[_Rank]:
    """DeepSpeed's launcher in this process; it leaves by SystemExit where a rank failed. The ranks, all ended."""
    from deepspeed.launcher import launch  # type: ignore[import-untyped]

    launch.subprocess = SimpleNamespace(Popen=_Rank)
    sys.argv = ["deepspeed", *arguments]
    try:
        launch.main()
    except SystemExit:
        if not any(process.returncode for process in _Rank.started):
            raise
    return _Rank.started


def _store(address: str, port: int, serves: bool) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=_MEET_SECONDS)
    return dist.TCPStore(  # type: ignore[attr-defined]  # not in __all__
        address, port, is_master=serves, timeout=limit, wait_for_workers=False
    )


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
