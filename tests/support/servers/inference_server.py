"""A real server of the shipped tiny model for tests: its HTTP process and its ranks.

with running_server(tmp_path, tp=2) as server:
    server.complete(prompt="def ", max_tokens=8)
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from configs.common.execution import Layout
from configs.serving.settings import ServingLimits
from tasks.serving.process import ServerProcess
from tasks.serving.settings import ServerRequest, make_settings
from tests.support.patience import wait_for

TINY = Path(__file__).parents[3] / "configs" / "models" / "tiny-stdlib"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


class RunningServer:
    """A server, its URL and a client of it."""

    def __init__(self, process: ServerProcess, url: str, about: dict[str, Any], key: str | None) -> None:
        self.process, self.url, self.about, self.key = process, url, about, key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Send a request for the served model."""
        return self.client.post(path, json={"model": "tiny", **fields})

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the answer to a completion request, greedy unless it says otherwise."""
        answer = self.post(**{"temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def tokens(self, **fields: Any) -> list[int]:
        """Return the token ids of the only answer."""
        return list(self.complete(return_token_ids=True, **fields)["choices"][0]["token_ids"])

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, which must end as one."""
        body = {"model": "tiny", "temperature": 0, "stream": True, **fields}
        with self.client.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200, stream.read()
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Return the sums of metrics over their labels, all of one moment."""
        lines = self.client.get("/metrics").text.splitlines()
        return [
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
            for name in names
        ]

    def wait_until_idle(self) -> None:
        """Wait until no request has a slot, a place in the queue or a block. Raises AssertionError if that never is.

        A request of a client that went away may not have begun yet: what one look finds says nothing about the next.
        """
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(self.metrics(*(f"vllm:{name}" for name in names))), "slots and blocks to be free")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, the first rank of the first replica first."""
        return sorted(psutil.Process(self.process.pid).children(), key=lambda process: process.pid)


def wait_until(done: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for a condition. Raises AssertionError naming it."""
    wait_for(done, what, seconds, pause=0.02)


@contextmanager
def running_server(
    folder: Path, dp: int = 1, tp: int = 1, pp: int = 1, key: str | None = None, **fields: Any
) -> Iterator[RunningServer]:
    """Yield a server of the tiny model with a chat template, in float32; fields: of the request or of its limits."""
    model = folder / "tiny"
    if not model.exists():
        shutil.copytree(TINY, model)
        written = {"chat_template": CHAT_TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
        (model / "tokenizer_config.json").write_text(json.dumps(written))
    limits = {name: fields.pop(name) for name in list(fields) if name in ServingLimits.model_fields}
    asked = ServerRequest(
        model=str(model),
        layout=Layout(dp=dp, tp=tp, pp=pp),
        device="cpu",
        port=0,
        cores_per_rank=1,
        **{"dtype": "float32", "max_sequences": 8, "max_length": 512, **fields},
    )
    # A socket's path has at most 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="rw-serve-", dir="/tmp"))
    try:
        settings = make_settings(asked, place, folder / "cache", Path.cwd())
        settings = settings.model_copy(
            update={"limits": settings.limits.model_copy(update=limits), "group_timeout_seconds": 60.0}
        )
        with ServerProcess(settings, key) as process:
            about = process.wait_until_ready()
            running = RunningServer(process, about["url"], about, key)
            with running.client:
                yield running
        assert not [
            one for one in psutil.process_iter(["cmdline"]) if str(place) in " ".join(one.info["cmdline"] or ())
        ]
    finally:
        for log in place.glob("*.log"):
            print(log.name, log.read_text()[-3000:])
        shutil.rmtree(place)
