"""The process of a front.

    python -m engine.routing.main FRONT_JSON STATE_JSON PORT        # configs.serving.deployment.FrontConfig

SIGTERM: no new connections, requests in progress have 30 s.
"""

import asyncio
import signal
import sys
from pathlib import Path

import uvicorn

from configs.common.files.reading import read_model
from configs.common.system.open_files import allow_connections
from configs.serving.deployment import FrontConfig
from engine.routing.front import Front
from engine.serving.http.protocol import ApiProtocol

_DRAIN_SECONDS = 30


def main(arguments: list[str]) -> int:
    """Serve until a signal ends it. Returns the exit code."""
    allow_connections()
    config, state, port = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    host = read_model(config, FrontConfig).host
    return asyncio.run(serve(Front(config, state), host, port))


async def serve(front: Front, host: str, port: int) -> int:
    """Answer requests until SIGTERM or SIGINT."""
    await front.begin()
    http = uvicorn.Server(
        uvicorn.Config(
            front,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=ApiProtocol,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            timeout_keep_alive=30,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, http)
    try:
        await http._serve()  # without uvicorn's signal handlers, which raise the signal again
    except SystemExit:
        print(f"{host}:{port} cannot be listened on", file=sys.stderr)
        return 1
    finally:
        await front.end()
    return 0


def _stop(http: uvicorn.Server) -> None:
    http.force_exit = http.should_exit
    http.should_exit = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
