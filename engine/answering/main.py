"""The HTTP process of a server of encoders and encoder-decoders; ends with its parent, if given.

    python -m engine.answering.main SETTINGS_JSON [PARENT_PID]

As `engine.serving.http.main`: the token from RANKWISE_API_KEY, one line {"ready": ...} on standard output, SIGTERM
finishes what has begun.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import uvicorn

from configs.common.files.logs import cut_log
from configs.families.config import ModelConfig
from configs.plans.model_manifest import read_model_manifest
from configs.plans.pooling import TextRules, text_rules
from configs.serving.settings import ServingSettings, own_api_key
from engine.answering.app import AnsweringServer, Figures, answering_app
from engine.answering.computing import Computing
from engine.answering.rank import encodes
from engine.serving.http.listening import listen, listener_url, run_http, send_rest
from engine.serving.http.model import ServedModel
from engine.serving.http.protocol import ApiProtocol

_LOOK_SECONDS, _MAX_FAILED_STARTS = 0.1, 3


async def serve(settings: ServingSettings, path: Path) -> int:
    """Serve until a signal ends it. Returns the exit code: 1 where the model cannot be loaded."""
    listener = listen(settings.host, settings.port)
    manifest = read_model_manifest(Path(settings.manifest))
    config = ModelConfig.parse(manifest.config)
    limits = settings.limits
    computing = Computing(path, Path(settings.folder) / "rank.log", limits.max_queue, limits.request_seconds)
    model, figures = ServedModel.read(settings), Figures(settings.name)
    rules = text_rules(Path(manifest.folder)) if encodes(config) and manifest.folder else TextRules()
    service = AnsweringServer(settings, model, computing, figures, own_api_key(), encodes=encodes(config), rules=rules)
    http = uvicorn.Server(
        uvicorn.Config(
            answering_app(service),
            http=ApiProtocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,  # longer than clients keep a connection, which else meets one that just closes
        )
    )
    stop, now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())
    await computing.start()
    listening = asyncio.create_task(http._serve(sockets=[listener]))
    told, code = False, 0
    while not stop.is_set() and not code:
        if computing.failures >= (_MAX_FAILED_STARTS if computing.was_ready else 1):
            print(f"the model cannot be loaded; see {computing.log}", file=sys.stderr)
            code = 1
        if not told and computing.ready and http.started:
            about = {"url": listener_url(listener), "replicas": [computing.about]}
            print(json.dumps({"ready": about}), flush=True)
            told = True
        cut_log(computing.log)
        await asyncio.sleep(_LOOK_SECONDS)
    service.draining = True
    end = time.monotonic() + settings.limits.drain_seconds
    while service.in_progress and time.monotonic() < end and not now.is_set():
        await asyncio.sleep(_LOOK_SECONDS)
    await send_rest(http, listening, end, now)
    await computing.stop()
    http.should_exit = http.force_exit = True
    await asyncio.gather(listening, return_exceptions=True)
    return code


def main(arguments: list[str]) -> int:
    """Run the HTTP process. Returns the exit code."""
    return run_http(arguments, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
