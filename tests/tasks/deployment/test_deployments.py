"""The whole way on this machine: deployed, rolled out under load, rolled back, scaled; faults leave nothing."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from pathlib import Path

import httpx
import pytest

from configs.plans.model_manifest import ModelManifest
from configs.serving.deployment import Deployment, ServingBundle
from configs.targets.target import LocalTarget
from engine.kernels.quantized import own_path
from tasks.deployment import deploying
from tasks.deployment.bundles import WantedBundle, resolved_model, save_bundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.level_checks import check_levels
from tasks.deployment.places import PlaceError, state
from tasks.deployment.placing import FirstAnswerWrong
from tasks.deployment.rollouts import RolledBack, replace, set_server_count
from tasks.deployment.servers import ServerNotReady, is_ready
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.deployment.targets import parse_target
from tests.support.processes import processes_of
from tests.support.run_folders.studies import wait_until
from tests.support.servers.inference_server import TINY

pytestmark = pytest.mark.slow
RATE = 20.0
MAX_IN_FLIGHT = 64  # a server waits with at most 256 and refuses the next, rightly: that is not what is looked for here
BERT = "synthetic:bert-1m@0"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = tmp_path_factory.mktemp("data")
    return Store(data=data, rented=data / "rented", cache=data / "cache")


def wanted(name: str, model: str = str(TINY), **changes: object) -> WantedDeployment:
    bundle = WantedBundle(model=model, level="balanced", max_length=128, max_sequences=8)
    given: dict[str, object] = {"hours": 0.5, "ready_seconds": 120.0} | changes
    return WantedDeployment(name=name, target=parse_target("local:cpu"), bundle=bundle, **given)  # type: ignore[arg-type]


def key_of(deployment: Deployment) -> str:
    return Path(deployment.key_file).read_text().strip()


@pytest.fixture(scope="module")
def deployed(store: Store) -> Iterator[tuple[Deployment, ServingBundle]]:
    """A deployment that most tests use, and its bundle."""
    said: list[str] = []
    deployment, timing = Deploying(store, wanted("tiny"), said.append, None).deploy()
    assert timing.requests >= 1 and timing.per_second > 0
    yield deployment, store.bundle(deployment)
    assert take_down(store, "tiny", said.append) == 0.0
    assert processes_of(store.folder("tiny")) == [] and not store.folder("tiny").exists()


class Load:
    """Requests at a fixed rate while few enough are unanswered; statuses and answers are counted."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.statuses: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self._url, self._key, self._model = url, key, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()))

    async def _send(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        body = {"model": self._model, "prompt": "import os\n", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, headers=headers, timeout=600, trust_env=False, limits=limits
        ) as client:

            async def one() -> None:
                try:
                    answer = await client.post("/v1/completions", json=body)
                    self.statuses[str(answer.status_code)] += 1
                    if answer.status_code == 200:
                        self.answers[answer.json()["choices"][0]["text"]] += 1
                except httpx.HTTPError as error:
                    self.statuses[type(error).__name__] += 1

            tasks: set[asyncio.Task[None]] = set()
            while not self._stop.is_set():
                if len(tasks) < MAX_IN_FLIGHT:
                    tasks.add(task := asyncio.create_task(one()))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(1 / RATE)
            await asyncio.gather(*tasks)


@contextmanager
def load(deployment: Deployment, model: str) -> Iterator[Load]:
    made = Load(deployment.url, key_of(deployment), model)
    made._thread.start()
    try:
        wait_until(lambda: made.statuses.total() > 5, 60, "the first answers")
        yield made
        before = made.statuses.total()
        wait_until(lambda: made.statuses.total() > before + 20, 60, "answers after it")
    finally:
        made._stop.set()
        made._thread.join()


def other(bundle: ServingBundle, store: Store, **changes: object) -> ServingBundle:
    """The same model under another id; its answers are those that were measured unless a change says otherwise."""
    made = bundle.model_copy(update={"id": os.urandom(6).hex(), **changes})
    save_bundle(made, store.bundles)
    return made


def test_a_rollout_under_load_fails_no_request(store: Store, deployed: tuple[Deployment, ServingBundle]) -> None:
    deployment, bundle = deployed
    before = store.read("tiny")
    assert processes_of(Path(before.servers[0].folder))
    with load(deployment, bundle.model) as sent:
        now = replace(store, "tiny", other(bundle, store), print, watch_seconds=1.0, ready_seconds=120)
    print(f"rollout: {sent.statuses}, {len(sent.answers)} different answers")
    assert set(sent.statuses) == {"200"} and len(sent.answers) == 1
    assert now.url == before.url and now.servers[0].generation > before.servers[0].generation
    assert processes_of(Path(before.servers[0].folder)) == []


def test_a_bundle_that_answers_wrongly_gets_no_traffic(
    store: Store, deployed: tuple[Deployment, ServingBundle]
) -> None:
    deployment, bundle = deployed
    before = store.read("tiny")
    with load(deployment, bundle.model) as sent:
        # Its answers were measured with other weights than those that are placed.
        known = bundle.first_requests[-1]
        wrong = known.model_copy(update={"tokens": (known.tokens[0] + 1, *known.tokens[1:]), "gaps": (0.5,) * 16})
        with pytest.raises(RolledBack, match=r"rolled back before any traffic: .*gets no traffic"):
            replace(store, "tiny", other(bundle, store, first_requests=(wrong,)), print, ready_seconds=120)
    assert set(sent.statuses) == {"200"} and len(sent.answers) == 1
    assert store.read("tiny") == before and is_ready(deployment.url, key_of(deployment))


def test_a_bundle_whose_server_does_not_start_is_rolled_back(
    store: Store, deployed: tuple[Deployment, ServingBundle]
) -> None:
    """Its weights are cut short after they were found."""
    (deployment, bundle), before = deployed, store.read("tiny")
    running = {process.pid for process in processes_of(store.folder("tiny"))}
    model = store.data / "damaged"
    shutil.copytree(TINY, model)
    manifest = ModelManifest.model_validate_json(Path(bundle.manifest).read_bytes())
    (model / "manifest.json").write_text(manifest.model_copy(update={"folder": str(model)}).model_dump_json())
    os.truncate(model / "model.safetensors", 1000)
    damaged = other(bundle, store, manifest=str(model / "manifest.json"))
    with pytest.raises(RolledBack, match="rolled back before any traffic: local: the server does not start: "):
        replace(store, "tiny", damaged, print, ready_seconds=120)
    assert {process.pid for process in processes_of(store.folder("tiny"))} == running and running
    assert store.read("tiny") == before and is_ready(deployment.url, key_of(deployment))


def test_scale_and_a_server_that_is_killed(store: Store, deployed: tuple[Deployment, ServingBundle]) -> None:
    deployment, bundle = deployed
    from tasks.deployment.places import LocalPlace

    two = set_server_count(store, "tiny", 2, print, ready_seconds=120)
    assert len(two.servers) == 2
    place = LocalPlace(store.folder("tiny"), store.cache)
    told = state(place, two.servers[-1].folder)
    assert told is not None and told.pid is not None
    with load(deployment, bundle.model) as sent:
        os.kill(told.pid, signal.SIGKILL)
        again = two.servers[-1].folder
        wait_until(lambda: (now := state(place, again)) is not None and now.starts == 2, 60, "the second start")
    assert sent.statuses["200"] >= sent.statuses.total() - 5  # answers that had begun there may break
    wait_until(lambda: is_ready(f"http://127.0.0.1:{two.servers[-1].local_port}", key_of(deployment)), 120, "it")
    assert len(set_server_count(store, "tiny", 1, print).servers) == 1
    assert is_ready(deployment.url, key_of(deployment))


def test_a_deployment_needs_its_token(store: Store, deployed: tuple[Deployment, ServingBundle]) -> None:
    deployment, bundle = store.read("tiny"), deployed[1]
    body = {"model": bundle.model, "prompt": "x", "max_tokens": 1}
    for url in (deployment.url, f"http://127.0.0.1:{deployment.servers[0].local_port}"):
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 401
    key = key_of(deployment)
    assert Path(deployment.key_file).stat().st_mode & 0o077 == 0
    arguments = [word for process in processes_of(Path(deployment.key_file).parent) for word in process.cmdline()]
    assert {"slurm.supervision.supervisor", "engine.serving.rank", "engine.routing.main"} <= set(arguments)
    assert key not in " ".join(arguments)


@pytest.mark.nightly
def test_a_port_that_is_taken_meanwhile_is_named_and_nothing_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploying, "check_port", lambda port: None)  # it was free when the command began
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises((PlaceError, ServerNotReady), match=f"{port} cannot be listened on"):
            Deploying(store, wanted("port", "synthetic:llama-1m@0", port=port), print, None).deploy()
    assert processes_of(store.folder("port")) == [] and not store.folder("port").exists()


def test_a_server_that_is_never_ready_is_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotReady, match="not ready within 0 s"):
        Deploying(store, wanted("slow", "synthetic:llama-1m@0", ready_seconds=0.01), print, None).deploy()
    assert processes_of(store.folder("slow")) == [] and not store.folder("slow").exists()


def test_a_level_beyond_a_tight_bound_is_refused_and_a_milder_one_deployed(store: Store) -> None:
    said: list[str] = []
    asked = replace_fields(
        wanted("bounded"), bundle=WantedBundle(model=BERT, level="aggressive", max_loss=1e-5, max_length=64)
    )
    deployment, _ = Deploying(store, asked, said.append, None).deploy()
    made = store.bundle(deployment)
    refused = {check.level: check for check in made.checks}["aggressive"]
    if refused.passes:  # this machine has kernels of bytes
        assert refused.refused is not None and made.level in ("balanced", "none")
        assert any("aggressive" in line and "is not deployed" in line for line in said)
    assert take_down(store, "bounded", said.append) == 0.0


SWAPPED = ("half ? eight >> 4 : eight", "half ? eight : eight >> 4")
"""Of the kernel for weights of 4 bits: the two numbers of a byte in the wrong order."""


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler of kernels build one that is wrong; the sources stay as they are."""
    compiler = folder / "cc"
    compiler.write_text(
        f"""#!{sys.executable}
import os, pathlib, sys
words = sys.argv[1:]
for place, word in enumerate(words):
    if word.endswith("/quantized.c"):
        source = pathlib.Path(word)
        assert {SWAPPED[0]!r} in source.read_text()
        planted = pathlib.Path({str(folder)!r}, f"{{os.getpid()}}.c")
        planted.write_text(source.read_text().replace({SWAPPED[0]!r}, {SWAPPED[1]!r}))
        words[place : place + 1] = ["-iquote", str(source.parent), str(planted)]
os.execvp("cc", ["cc", *words])
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_a_planted_bad_kernel_is_refused_and_the_milder_level_deployed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own_path() != "avx512_vnni":
        pytest.skip("levels are without passes on this processor")
    monkeypatch.setenv("RANKWISE_KERNELS", "on")
    asked = replace_fields(wanted("levels"), bundle=WantedBundle(model=BERT, level="aggressive", max_length=64))
    model = resolved_model(BERT, store.cache, tmp_path)
    checked, _ = check_levels(
        model, LocalTarget(device="cpu"), ["aggressive"], "bfloat16", tmp_path / "right", store.cache, 0.01, print
    )
    assert checked["aggressive"].passes == ("int4",) and checked["aggressive"].refused is None
    plant(tmp_path, monkeypatch)
    said: list[str] = []
    deployment, _ = Deploying(store, asked, said.append, None).deploy()
    made = store.bundle(deployment)
    by_level = {check.level: check for check in made.checks}
    right, planted = checked["aggressive"].loss, by_level["aggressive"].loss
    print(f"{BERT}: aggressive loses {right:.2g} with its kernel, {planted:.2g} with the planted one")
    assert by_level["aggressive"].refused is not None and made.level == "balanced" and made.compression == ("int8",)
    assert any("aggressive (int4) is not deployed" in line for line in said)
    assert take_down(store, "levels", said.append) == 0.0


def test_an_expired_deployment_ends_by_itself(store: Store) -> None:
    asked = wanted("brief", "synthetic:bert-1m@0", hours=40 / 3600)
    try:
        deployment, _ = Deploying(store, asked, print, None).deploy()
    except (ServerNotReady, FirstAnswerWrong, PlaceError) as error:
        pytest.skip(f"this machine was too busy to deploy in 40 s: {error}")
    wait_until(lambda: not processes_of(store.folder("brief")), 120, "everything to end")
    assert deployment.expires_at <= time.time()
    take_down(store, "brief", print)
