"""torchrun's agent, which starts a node's ranks by fork and leaves their exit codes as JSON.

torchrun reports failed ranks in prose only, unless a rank lived long enough to write an error file; a rank that was
killed did not. So the launcher starts torchrun through this module.

    python -m engine.agents.torchrun_agent EXITS_JSON [arguments of torchrun]
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

from engine.agents.preloading import RankStarter, prepare_ranks
from engine.rank.processes import leave
from engine.rank.stores import agent_store

_NEWER_OPTIONS = {"--shutdown-timeout"}
"""Of the options that the launcher passes, those that torch 2.9 lacks."""


def main(arguments: list[str]) -> int:
    """Run torchrun; where ranks failed, leave a list of {rank, pid, exit_code} and return 1.

    Ranks are forked before torchrun has made its store: this process has only imported then.
    """
    exits = Path(arguments[0])
    starter = RankStarter(prepare_ranks(_ranks_here(arguments), Path(arguments[-1])))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
    from torch.distributed.run import get_args_parser, parse_args, run

    # torchrun's own store listens on all interfaces.
    static_tcp_rendezvous.TCPStore = agent_store  # type: ignore[attr-defined,assignment]
    # What torchrun starts ranks by; there is no public way to have it start them by fork without its queues.
    subprocess_handler.Popen = starter  # type: ignore[attr-defined,assignment]
    try:
        run(parse_args(supported(arguments[1:], get_args_parser())))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        seen = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
        ]
        write_exits(exits, seen)
        return 1
    finally:
        starter.dismiss()
    return 0


def supported(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Return the arguments without options, each with a value, that this version of torchrun lacks.

    torch 2.11 has no --shutdown-timeout. Its ranks have longer to end by themselves; the launcher ends them anyway.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    kept = list(arguments)
    for option in _NEWER_OPTIONS - known:
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return kept


def _ranks_here(arguments: list[str]) -> int:
    """How many ranks torchrun is to start, by its own argument."""
    return int(arguments[arguments.index("--nproc-per-node") + 1])


def write_exits(path: Path, failed: list[dict[str, int]]) -> None:
    """Leave {rank, pid, exit_code} of the ranks that failed, for the launcher."""
    print(f"ranks failed: {failed}", file=sys.stderr)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(failed))
    unfinished.replace(path)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
