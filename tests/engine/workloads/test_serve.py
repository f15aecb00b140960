"""What a launch that serves keeps of its server's command."""

import sys
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.common.files.reading import read_model
from configs.load.job import Endpoint, LoadJob
from configs.load.objectives import RequestObjectives
from configs.load.samples import FACTS_FILE, SAMPLE_COLUMNS, SAMPLES_FILE
from configs.plans.job import Measurement
from configs.plans.model_manifest import read_model_manifest
from configs.plans.paths import JobPaths
from configs.serving.settings import ServingSettings
from configs.spec.cell import Cell
from configs.spec.engines import TEXT_ONLY, EngineEnvironment
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget
from configs.workloads.serve import ServeWorkload
from engine.workloads.serve import _next_rate, _own_command, _Runs, _served, as_typed, in_fields, shown_command
from engine.workloads.servers.commands import ServerCommand, Wanted
from engine.workloads.servers.process import RunningServer, ServerDiedError
from tasks.models.model_cache import manifest_path
from tasks.models.sources import resolve_model
from tests.support.run_folders.load_runs import made_run, samples_of

RUN = Path("/home/ann/work/runs/s")


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/home/ann", "/home/ann/bin/python /home/ann/work/runs/s/models/a", "~/bin/python <run>/models/a"),
        ("/home/ann", "A=/home/ann B=/home/anna/x", "A=~ B=/home/anna/x"),
        ("/", "/usr/bin/python -m vllm --model /models/a", "/usr/bin/python -m vllm --model /models/a"),
    ],
)
def test_a_command_is_shown_without_the_folders_of_its_user(
    monkeypatch: pytest.MonkeyPatch, home: str, text: str, shown: str
) -> None:
    """With the home `/` of a container every slash was a tilde."""
    monkeypatch.setenv("HOME", home)
    assert shown_command(text, RUN) == shown


def test_a_shown_command_has_the_cache_and_the_device_of_the_cell() -> None:
    """Typed without them, it sized another cache, and took the GPUs of a target with `device: cpu`."""
    settings = ServingSettings(name="m", manifest="", folder="", max_length=64, blocks=8, device="cpu")
    assert " ".join(as_typed(settings, "m", 0.25)).endswith(" --kv-cache-gib 0.25 --device cpu")
    plain = as_typed(settings.model_copy(update={"device": None}), "m", None)
    assert not {"--kv-cache-gib", "--device"} & set(plain)


def test_a_server_lies_in_the_folder_of_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one for temporary files its ranks' logs were gone when they were named, or stayed for good after a kill."""
    model = resolve_model("synthetic:llama-1m@0", None, tmp_path / "cache", tmp_path)
    manifest = manifest_path(model.identity, tmp_path / "cache")
    cell = Cell(model=model.identity, workload=ServeWorkload(prompt_tokens=8, new_tokens=8), target="local")
    wanted = Wanted(cell, read_model_manifest(manifest), EngineEnvironment(), 1234, (0,), False)
    job = SimpleNamespace(cache=str(tmp_path), manifest=str(manifest), measuring=Measuring())
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a launch that is tried again in its folder
        context = SimpleNamespace(job=job, paths=JobPaths(Path("job")), closing=ExitStack())
        with context.closing:
            command = _own_command(wanted, context)  # type: ignore[arg-type]
        path = Path(command.argv[3])
        assert path == tmp_path / "job" / "server" / "settings.json"
        assert Path(read_model(path, ServingSettings).folder) == path.parent and path.parent.is_dir()


@pytest.mark.parametrize("engine", ["rankwise", "transformers", "vllm", "sglang", "llama.cpp"])
def test_a_server_of_every_engine_has_the_time_that_the_study_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It had 300 s, whatever the model: large ones load and compile longer."""
    asked: list[float] = []

    class Server:
        command = ServerCommand(["server"])

        def __init__(self, *_: object) -> None: ...

        def stop(self) -> None: ...

        def wait_until_ready(self, seconds: float) -> float:
            asked.append(seconds)
            return 1.0

    for name in ("command_of", "_own_command"):
        monkeypatch.setattr(f"engine.workloads.serve.{name}", lambda *_: Server.command)
    monkeypatch.setattr("engine.workloads.serve.installation", lambda *_: EngineEnvironment())
    monkeypatch.setattr("engine.workloads.serve.RunningServer", Server)
    prompts = {"prompts": "p.jsonl"} if engine in TEXT_ONLY else {}
    context: Any = SimpleNamespace(
        job=SimpleNamespace(target=None, engines={}, cache=str(tmp_path)), manifest=SimpleNamespace(config={}),
        device=SimpleNamespace(type="cpu"), paths=JobPaths(tmp_path / "run" / "jobs" / "1"), closing=ExitStack(),
    )  # fmt: skip
    for work, seconds in (ServeWorkload(**prompts), 300.0), (ServeWorkload(ready_seconds=2400, **prompts), 2400.0):
        cell = Cell(model="m", engine=engine, workload=work, target="local")  # type: ignore[arg-type]
        _served(SimpleNamespace(cell=cell), context)  # type: ignore[arg-type]
        assert asked.pop() == seconds


def test_a_server_that_is_not_ready_in_time_names_the_field_to_raise(tmp_path: Path) -> None:
    script = "import time; print('Loading shards: 40 %', flush=True); time.sleep(60)"
    server = RunningServer(ServerCommand([sys.executable, "-c", script]), "http://127.0.0.1:9", tmp_path / "log")
    try:
        with pytest.raises(ServerDiedError, match=r"^workload\.ready_seconds: .* within 1 s\. Raise it .*: Loading"):
            server.wait_until_ready(1.0)
    finally:
        server.stop()


def test_a_search_that_cannot_go_on_says_why_in_a_sentence(tmp_path: Path) -> None:
    """It was shown as a list of Python."""
    with pytest.raises(RuntimeError, match=r"^search: FileNotFoundError: .*search\.json"):
        _next_rate(tmp_path)


def test_a_generator_that_writes_much_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe was read at its end alone: after 64 KiB of warnings it stood still until the cell's time limit."""
    stand_in = tmp_path / "python"
    written = "b'warning \\xff\\n' * 30000 + b'arrivals.file: no such file\\n'"
    script = f"import sys; sys.stderr.buffer.write({written}); sys.exit(2)"
    stand_in.write_text(f"#!{sys.executable}\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("engine.workloads.serve.sys.executable", str(stand_in))
    looked = [0]

    def check() -> None:
        looked[0] += 1
        if looked[0] > 60:
            raise ServerDiedError("the generator has stood still for half a minute")

    folder = tmp_path / "run-001"
    folder.mkdir()
    served = SimpleNamespace(server=SimpleNamespace(check=check))
    runs = _Runs(None, None, served, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^load generator: arrivals\.file: no such file$"):
        runs._generate(folder)


def test_the_samples_of_a_search_are_on_disk_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all runs were in memory beside the server that is measured, and twice at the end."""
    due = np.arange(0, 60, 0.1)
    made = [made_run(due, ttft=0.1, tokens=400), made_run(due, ttft=0.2, tokens=300)]
    for number, one in enumerate(made):
        (tmp_path / f"made-{number}").mkdir()
        (tmp_path / f"made-{number}" / FACTS_FILE).write_text(one.facts.model_dump_json())
        np.savez(tmp_path / f"made-{number}" / SAMPLES_FILE, **samples_of([one]))
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nn=${{4##*-00}}\ncp {tmp_path}/made-$((n % 2))/* "$4"\n')
    stand_in.chmod(0o755)
    work = ServeWorkload(find="max_rate", rate=10, objectives=RequestObjectives(ttft_seconds=1.0))
    measurement = Measurement(cell=Cell(model="m", workload=work), repeat=0, attempt=1)
    context = SimpleNamespace(job=SimpleNamespace(target=LocalTarget()), inputs=tmp_path)
    endpoint = Endpoint(url="http://127.0.0.1", model="m")
    served = SimpleNamespace(server=None, endpoint=endpoint, vocabulary=None, exact=True)
    probes = SimpleNamespace(asked_tokens=0, again=lambda seconds, stop: None)
    runs = _Runs(measurement, context, served, tmp_path / "load")  # type: ignore[arg-type]
    monkeypatch.setattr("engine.workloads.serve.sys.executable", str(stand_in))
    tracemalloc.start()
    for number in range(8):
        runs.run(number, 10.0, probes)  # type: ignore[arg-type]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000, "of 13 MB"
    spent = [read_model(path, LoadJob).caps.spent_samples for path in sorted(tmp_path.glob("load/*/job.json"))]
    assert spent[0] == 0 and spent[-1] > 1_500_000, "together they are read again"
    columns = runs.columns()
    whole = samples_of([made[number % 2] for number in range(8)])
    for name in (*SAMPLE_COLUMNS, "run_requests", "run_lag_samples"):
        assert np.array_equal(columns[name], whole[f"0/{name}"], equal_nan=True), name


def test_a_server_that_cannot_be_sized_is_told_in_the_fields_of_a_study(tmp_path: Path) -> None:
    """Each hyphen became an underscore, of the model's name too, and `workload.tp` is no field."""
    model = resolve_model("synthetic:llama-1m@0", None, tmp_path / "cache", tmp_path)
    manifest = manifest_path(model.identity, tmp_path / "cache")
    work = ServeWorkload(prompt_tokens=8, new_tokens=8, kv_cache_gib=1e-7)
    cell = Cell(model=model.identity, workload=work, target="local")
    wanted = Wanted(cell, read_model_manifest(manifest), EngineEnvironment(), 1234, (0,), False)
    context = SimpleNamespace(job=SimpleNamespace(cache=str(tmp_path)))
    with pytest.raises(ValueError, match="the key-value cache") as caught:
        _own_command(wanted, context)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the key-value cache has room for 0 tokens, but one sequence has up to 16; lower workload.max_length, use more "
        "ranks (layout.tp, layout.pp) or raise workload.kv_cache_gib"
    )
    assert in_fields("--max-length 9: my-llama has 8 positions") == "workload.max_length 9: my-llama has 8 positions"
