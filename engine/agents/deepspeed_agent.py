"""Start one node's ranks through DeepSpeed's launcher, with the additional services of torchrun's agent.

The first node's agent serves the rendezvous store, so that it outlives a rank (and every child of the memory pass finds
it), and each agent writes the exit codes of its ranks as JSON, which DeepSpeed only logs.

    python -m engine.agents.deepspeed_agent EXITS_JSON [arguments of deepspeed.launcher.launch]
"""

import base64
import json
import os
import sys
import time
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from engine.agents.preloading import RankStarter, prepare_ranks
from engine.agents.torchrun_agent import write_exits
from engine.rank.processes import leave
from engine.rank.stores import join_store, serve_store

_MEET_SECONDS = 300
_POLL_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """Run the launcher; if ranks failed, write a list of {rank, pid, exit_code} and return 1."""
    exits = Path(arguments[0])
    parser = ArgumentParser()
    for name in ("--world_info", "--node_rank", "--master_addr", "--master_port"):
        parser.add_argument(name, required=True)
    known, _ = parser.parse_known_args(arguments[1:])
    world = json.loads(base64.urlsafe_b64decode(known.world_info))
    node_rank, nodes = int(known.node_rank), len(world)
    # Before there is a store, whose threads a fork would not copy.
    starter = RankStarter(prepare_ranks(len(list(world.values())[node_rank]), Path(arguments[-1])))
    store = (serve_store if node_rank == 0 else join_store)(
        known.master_addr, int(known.master_port), timedelta(seconds=_MEET_SECONDS)
    )
    # torch.distributed then uses this store, instead of one of the first rank.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    _launch(arguments[1:], starter)
    failed = [
        {"rank": rank, "pid": process.pid, "exit_code": process.returncode}
        for rank, process in starter.started.items()
        if process.returncode
    ]
    if failed:
        write_exits(exits, failed)
        return 1
    store.add("rankwise/ended", 1)
    while node_rank == 0 and store.add("rankwise/ended", 0) < nodes:  # others may still use it
        time.sleep(_POLL_SECONDS)
    return 0


def _launch(arguments: list[str], starter: RankStarter) -> None:
    """DeepSpeed's launcher in this process, until all ranks ended; it leaves by SystemExit where one failed."""
    from deepspeed.launcher import launch  # type: ignore[import-untyped]

    launch.subprocess = SimpleNamespace(Popen=starter)
    sys.argv = ["deepspeed", *arguments]
    try:
        launch.main()
    except SystemExit:
        if not any(process.returncode for process in starter.started.values()):
            raise
    finally:
        starter.dismiss()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
