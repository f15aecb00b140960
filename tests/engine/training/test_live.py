"""What training tells live: read back with each library, over real HTTP, and never in training's way."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.training.live import open_live
from engine.training.live import sender as telling
from engine.training.live.metrics import METRIC_PREFIX, METRICS
from engine.training.live.sinks import SINKS
from engine.training.live.streamer import NICE
from engine.training.network import NetworkBytes
from tests.support.patience import patient
from tests.support.run_folders.studies import wait_until
from tests.support.run_folders.wandb_files import offline_records
from tests.support.training.live_streams import LOSSES, context_of, opened, tell

DASHBOARD = Path(__file__).parents[3] / "docs" / "dashboards" / "training.json"
Told = tuple[Path, str, dict[str, Any], str]


def the_only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, found)
    return found[0]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A run folder in which all four were told three steps and an evaluation, and what the endpoint said at the end."""
    folder = tmp_path_factory.mktemp("told")
    patch = pytest.MonkeyPatch()
    patch.setattr(telling, "EVERY_SECONDS", 0.0)
    patch.setenv("HOME", str(folder / "home"))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with opened(folder, "tensorboard", "mlflow", "wandb", "prometheus") as live:
        assert live.wants
        for step, loss in enumerate(LOSSES, 1):
            tell(live, step, loss)
        live.tell(step=3, validation_loss=3.75)
        target = json.loads(the_only(folder, "live/prometheus/*.json").read_text())[0]
        said = scraped(target["targets"][0], until="validation_loss 3.75")
    patch.undo()
    assert not live.wants
    yield folder, said, live.figures(), target["targets"][0]


def scraped(address: str, until: str) -> str:
    """What the endpoint answers as soon as it says so: telling is a matter of milliseconds, but not of none."""
    ends = time.monotonic() + patient(20)
    wanted, value = until.split()
    while True:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=patient(5)) as answer:
            text: str = answer.read().decode()
        if any(line.startswith(METRIC_PREFIX + wanted) and line.endswith(value) for line in text.splitlines()):
            return text
        assert time.monotonic() < ends, text
        time.sleep(0.05)


@pytest.mark.slow
def test_nothing_is_lost_and_the_figures_say_so(told: Told) -> None:
    _, _, figures, _ = told
    assert figures["live_dropped"] == 0
    assert figures["live_cpu_seconds"] > 0


def test_tensorboard_reads_the_curve(told: Told) -> None:
    folder = told[0]
    events = the_only(folder, "live/*/events.out.tfevents.*")
    read = EventAccumulator(str(events.parent)).Reload()  # type: ignore[no-untyped-call]
    assert [(each.step, each.value) for each in read.Scalars("loss")] == list(enumerate(LOSSES, 1))
    assert [each.value for each in read.Scalars("validation_loss")] == [3.75]
    assert {each.value for each in read.Scalars("steps_per_second")} == {2.0}
    assert {each.value for each in read.Scalars("tokens_per_second")} == {2048.0}
    assert {round(each.value, 6) for each in read.Scalars("communication_share")} == {0.2}
    assert set(read.Tags()["scalars"]) == METRICS.keys() - {"step", "device_memory_bytes", "device_power_watts"}


def test_tensorboard_shows_a_measurement_that_was_resumed_once(tmp_path: Path) -> None:
    """The steps after its checkpoint were in the curve twice, one attempt's after the other's."""
    for attempt, steps in enumerate(([1, 2, 3, 4], [3, 4, 5])):
        with SINKS["tensorboard"]({"folder": str(tmp_path)}) as write:
            for step in steps:
                write({"step": step, "loss": float(10 * attempt + step), "time": 1.7e9 + attempt})
        for file in tmp_path.glob("events.out.tfevents.[0-9]*"):
            file.rename(file.with_name(f"events.out.tfevents.a{attempt}"))  # both began in one second
    read = EventAccumulator(str(tmp_path)).Reload()  # type: ignore[no-untyped-call]
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]


def test_mlflow_reads_the_curve_and_the_end(told: Told) -> None:
    folder = told[0]
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/live/mlflow.db")
    experiment = client.get_experiment_by_name("a study")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in curve) == list(enumerate(LOSSES, 1))
    assert run.info.status == "FINISHED"
    assert run.data.params["workload.global_batch_size"] == "8"
    assert run.data.tags["repeat"] == "1"


def test_wandb_offline_file_holds_the_curve(told: Told) -> None:
    folder = told[0]
    records = list(offline_records(the_only(folder, "live/*/wandb/offline-run-*/run-*.wandb")))
    run = next(each.run for each in records if each.WhichOneof("record_type") == "run")
    assert run.project == "a study"
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["loss"]) for row in history if "loss" in row] == list(enumerate(LOSSES, 1))
    assert [row["validation_loss"] for row in history if "validation_loss" in row] == [3.75]
    assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_knows_its_own_file(told: Told) -> None:
    folder = told[0]
    run = the_only(folder, "live/*/wandb/offline-run-*")
    command = [str(Path(sys.executable).parent / "wandb"), "sync", "--dry-run", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | home(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.name in done.stdout + done.stderr


def home(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder / "other_home"), "WANDB_DIR": str(folder), "WANDB_ERROR_REPORTING": "false"}


def test_prometheus_reads_each_metric_with_its_labels(told: Told) -> None:
    families = {family.name: family for family in text_string_to_metric_families(told[1])}
    assert families.keys() == {METRIC_PREFIX + name for name in METRICS}
    samples = {name: [sample.value for sample in family.samples] for name, family in families.items()}
    assert samples[METRIC_PREFIX + "loss"] == [3.25]
    assert samples[METRIC_PREFIX + "step"] == [3]
    assert samples[METRIC_PREFIX + "memory_bytes"][0] > 1e6
    assert samples[METRIC_PREFIX + "device_memory_bytes"] == samples[METRIC_PREFIX + "device_power_watts"] == []
    (sample,) = families[METRIC_PREFIX + "loss"].samples
    assert sample.labels == {
        "study": "a study",
        "cell": "dp=2, float32, train batch 8 x 128",
        "repeat": "1",
        "node": "0",
    }


def test_another_node_tells_of_its_hardware_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node's first rank: no loss and no rates, which the first node tells, and no part in MLflow's file."""
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    context = context_of(tmp_path, ("tensorboard", "mlflow", "prometheus"), rank=1, nodes=2)
    with open_live(context.job.measurements[0], context) as live:
        tell(live, 1, 4.0)
        file = the_only(tmp_path, "live/prometheus/*.json")
        assert file.stem.endswith("-r1-node1")
        said = scraped(json.loads(file.read_text())[0]["targets"][0], until="step 1.0")
    families = {family.name: family.samples for family in text_string_to_metric_families(said)}
    told = {name.removeprefix(METRIC_PREFIX): samples for name, samples in families.items() if samples}
    traffic = {f"network_{way}_bytes_per_second" for way in ("sent", "received")}
    assert told.keys() == {"step", "memory_bytes"} | traffic
    assert told["step"][0].labels["node"] == "1"
    assert list(tmp_path.glob("live/*-node1/events.*")) and not list(tmp_path.rglob("mlflow.db"))


def test_the_traffic_of_a_node_is_that_since_the_last_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter(
        [NetworkBytes(0, 0, 0), NetworkBytes(1_000_000, 2_000_000, 7), NetworkBytes(1_000_000, 2_500_000, 9)]
    )
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(telling, "network_bytes", lambda: next(counters))
    with opened(tmp_path, "tensorboard") as live:
        tell(live, 1, 4.0)
        tell(live, 2, 3.5)
    read = EventAccumulator(str(next(tmp_path.glob("live/*")))).Reload()  # type: ignore[no-untyped-call]
    sent, received = (
        [each.value for each in read.Scalars(f"network_{way}_bytes_per_second")] for way in ("sent", "received")
    )
    assert received[0] == pytest.approx(2 * sent[0]) and sent[0] > 0
    assert sent[1] == 0 and received[1] > 0


def test_the_endpoint_ends_with_the_measurement(told: Told) -> None:
    folder, _, _, address = told
    assert not list(folder.glob("live/prometheus/*.json"))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=patient(5))


def test_nothing_is_written_at_home(told: Told) -> None:
    assert not (told[0] / "home").exists() or not [path for path in (told[0] / "home").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("sinks", "rank", "measuring_pass"),
    [((), 0, "timed"), (("tensorboard",), 1, "timed"), (("tensorboard",), 0, "memory")],
)
def test_nobody_listens(tmp_path: Path, sinks: tuple[str, ...], rank: int, measuring_pass: str) -> None:
    context = context_of(tmp_path, sinks, rank, measuring_pass)
    live = open_live(context.job.measurements[0], context)
    assert not live.wants
    tell(live, 1, 2.0)
    live.close()
    assert live.figures() == {}
    assert not (tmp_path / "live").exists()


def test_a_stopped_streamer_is_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(telling, "CLOSE_SECONDS", 0.5)
    live = opened(tmp_path, "prometheus")
    assert live._process is not None
    os.kill(live._process.pid, signal.SIGSTOP)
    slowest = 0.0
    for step in range(2000):
        began = time.thread_time()
        tell(live, step, 1.0)
        slowest = max(slowest, time.thread_time() - began)
    began = time.monotonic()
    live.close()
    assert time.monotonic() - began < patient(60)
    dropped = live.figures()["live_dropped"]
    assert isinstance(dropped, int) and 500 < dropped < 2000
    assert slowest < 0.05
    assert "not written within" in capfd.readouterr().err


def test_a_dead_streamer_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    live = opened(tmp_path, "prometheus")
    assert live._process is not None
    os.kill(live._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, live._process.pid, os.WEXITED | os.WNOWAIT)
    for step in range(5):
        tell(live, step, 1.0)
    assert not live.wants
    live.close()
    assert capfd.readouterr().err.count("nothing more is told") == 1


def test_jobs_that_begin_at_once_share_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen none; one is the first to create it."""
    context = context_of(tmp_path, ("mlflow",))
    about = telling._about(context.job.measurements[0], context)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with SINKS["mlflow"](about):
        pass
    asked, real = [], MlflowClient.get_experiment_by_name

    def too_early(client: MlflowClient, name: str) -> Any:
        asked.append(name)
        return real(client, name) if len(asked) > 1 else None

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", too_early)
    with SINKS["mlflow"](about) as write:
        write({"step": 1, "loss": 4.0, "time": 1.0})
    client = MlflowClient(tracking_uri=f"sqlite:///{about['root']}/mlflow.db")
    experiment = client.get_experiment_by_name("a study")
    assert experiment is not None and len(client.search_runs([experiment.experiment_id])) == 2


@pytest.mark.slow
def test_a_failing_sink_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////dev/null/mlflow.db")  # below what is no folder
    live = opened(tmp_path, "mlflow", "tensorboard")
    for step, loss in enumerate(LOSSES, 1):
        tell(live, step, loss)
    live.close()
    assert capfd.readouterr().err.count("mlflow is given up") == 1
    assert live.figures()["live_dropped"] == len(LOSSES)
    read = EventAccumulator(str(next(tmp_path.glob("live/*")))).Reload()  # type: ignore[no-untyped-call]
    assert [each.value for each in read.Scalars("loss")] == LOSSES


def test_the_streams_end_with_a_killed_rank(tmp_path: Path) -> None:
    context = context_of(tmp_path, ("prometheus",))
    about = telling._about(context.job.measurements[0], context) | {"open_seconds": 30.0}
    command = [sys.executable, "-m", "engine.training.live.streamer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(about).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["said"] == "opened"
        assert list(tmp_path.glob("live/prometheus/*.json"))
        process.stdin.close()  # what the kernel does for a rank that was killed
        assert process.wait(600) == 0
    assert not list(tmp_path.glob("live/prometheus/*.json"))


def test_every_thread_of_the_streams_yields_to_training(tmp_path: Path) -> None:
    """Linux keeps the priority by thread: the libraries' own, which do the work, had that of the ranks."""
    with opened(tmp_path, "tensorboard", "wandb") as live:
        assert live._process is not None
        tell(live, 1, 4.0)
        first = psutil.Process(live._process.pid)

        def priorities() -> set[int]:
            found: set[int] = set()
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, ProcessLookupError):  # a library's short-lived one
                    found |= {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}
            return found

        wait_until(lambda: priorities() == {max(NICE, os.getpriority(os.PRIO_PROCESS, 0))}, 60, "all yield")


def test_the_streamer_needs_no_torch() -> None:
    code = "import sys, engine.training.live.streamer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def dashboard() -> dict[str, Any]:
    run_progress: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return run_progress


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """The model of a dashboard, as far as provisioning reads it (grafana.com: dashboard JSON model)."""
    run_progress = dashboard()
    assert run_progress["uid"] and run_progress["title"] and run_progress["schemaVersion"] >= 36
    panels, cells = run_progress["panels"], set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        covered = {(x, y) for x in across for y in down}
        assert place["x"] + place["w"] <= 24 and not covered & cells, panel["title"]
        cells |= covered
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    variables = {each["name"]: each["type"] for each in run_progress["templating"]["list"]}
    assert variables == {"datasource": "datasource", "study": "query", "cell": "query"}


def test_the_dashboard_shows_each_metric_and_no_other() -> None:
    named = re.findall(rf"\b{METRIC_PREFIX}\w+|\b[a-z]+_[a-z_]+(?={{)", " ".join(queries()))
    assert set(named) == {METRIC_PREFIX + name for name in METRICS}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here: apt-get install prometheus")
def test_a_prometheus_server_answers_each_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": "rankwise", "file_sd_configs": [{"files": [f"{tmp_path}/live/prometheus/*.json"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/db"]
    with (
        opened(tmp_path, "prometheus") as live,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log) as server,
    ):
        try:
            tell(live, 1, 2.0)
            live.tell(step=1, validation_loss=2.5)
            ends = time.monotonic() + patient(60)
            while not answered(address, f"{METRIC_PREFIX}validation_loss"):
                assert time.monotonic() < ends and server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
            for panel in dashboard()["panels"]:
                asked = [
                    target["expr"].replace("$study", "a study").replace("$cell", ".*") for target in panel["targets"]
                ]
                without_gpus = panel["title"] == "Accelerator power"
                assert any(answered(address, query) for query in asked) != without_gpus, panel["title"]
        finally:
            server.terminate()


def answered(address: str, query: str) -> list[Any]:
    """What a Prometheus server answers to an instant query; nothing while it is not up."""
    asked = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(asked, timeout=patient(5)) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
    return result
