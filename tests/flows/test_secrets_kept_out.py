"""Secrets planted in every source of a run are in no file, output, command line or rank of it."""

import base64
import os
import subprocess
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest

import flows.deployed
import flows.scaling_study
from configs.spec.study import StudyError
from flows.server.local import lease_server
from tasks.prefect_api import stages
from tasks.prefect_api.stages import stage
from tests.support.run_folders.studies import RANKWISE, write_study
from tests.support.servers.migrated_database import put_database

STEM = f"c4n4ry{uuid.uuid4().hex[:12]}"
KEPT_FROM = {"engine.worker", "slurm.forking.fork_parent", "flows.server.process"}
"""Modules of processes whose environments have no secrets."""


def planted() -> dict[str, str]:
    """Variables with a secret in each, by name or by value; some have a prefix of those that records keep."""
    in_url = f"https://user:{STEM}url@127.0.0.1:9"
    return {
        "HF_TOKEN": f"hf_{STEM}{'0' * 16}",
        "AWS_SECRET_ACCESS_KEY": f"{STEM}aws",
        "WANDB_API_KEY": f"{STEM}wandb",
        "MLFLOW_TRACKING_PASSWORD": f"{STEM}mlflow",
        "MLFLOW_TRACKING_URI": in_url,
        "DATABASE_URL": f"postgresql://user:{STEM}db@127.0.0.1:9/db",
        "PREFECT_API_KEY": f"{STEM}key",
        "NCCL_NET_URL": f"https://127.0.0.1:9/x?token={STEM}query",
        "TORCH_HEADER": f"Authorization: Bearer {STEM}bearer",
        "CUDA_CONNECTION": f"host=127.0.0.1 password={STEM}libpq",
        "OMP_TOKEN": f"{STEM}omp",
    }


@contextmanager
def watched() -> Iterator[dict[str, set[str]]]:
    """Sample command lines of all processes, and environments of ranks, for planted secrets."""
    found: dict[str, set[str]] = {"command lines": set(), "environments": set(), "seen": set()}
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    line = process.cmdline()
                    if any(STEM in argument for argument in line):
                        found["command lines"].add(" ".join(line))
                    if seen := KEPT_FROM & set(line):
                        held = {name for name, value in process.environ().items() if STEM in value}
                        found["seen"] |= seen
                        found["environments"] |= held

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("api", [pytest.param("answers", marks=pytest.mark.nightly), "away"])
def test_planted_secrets_appear_nowhere(api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    study = write_study(
        tmp_path,
        workload={"kind": "noop", "seconds": 0.3},
        experiments={
            "grid": {"kind": "sweep", "over": {"label": ["a"]}},
            "failing": {"kind": "sweep", "over": {"fault": ["raise"]}},
        },
    )
    with lease_server() as lease:
        lease.wait_until_healthy()
        port = lease.url.split(":")[2].split("/")[0] if api == "answers" else "9"
        url = f"http://user:{STEM}api@127.0.0.1:{port}/api"
        environment = os.environ | planted() | {"PREFECT_API_URL": url, "RANKWISE_CACHE": str(tmp_path / "cache")}
        command = [RANKWISE, "--debug", "run", str(study), "--no-calibrate"]
        with watched() as found:
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 3, done.stdout + done.stderr
    assert ("measuring without Prefect" in done.stdout) == (api == "away")
    assert STEM not in done.stdout + done.stderr
    # This test's own server is there before the secrets are: seen it would be in any case.
    assert {"engine.worker", "slurm.forking.fork_parent"} <= found["seen"]
    assert found["environments"] == set() and found["command lines"] == set()
    basic = base64.b64encode(f"user:{STEM}api".encode())[:-4]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert STEM.encode() not in content and basic not in content, path
    record = next((tmp_path / "runs" / "s" / "environments").iterdir()).read_text()
    assert "OMP_" in record or "CUDA_" in record or "NCCL_" in record, "variables in force are kept"


def unreachable(*_: object, **__: object) -> NoReturn:
    """As the fetch of a model from a mirror whose address has a password."""
    try:
        raise OSError(f"http://user:{STEM}cause@127.0.0.1:9/x: refused")
    except OSError as error:
        raise ValueError(f"http://user:{STEM}mirror@127.0.0.1:9 cannot be reached") from error


@pytest.mark.parametrize("where", ["task", "flow", "check before the flow"])
def test_what_a_run_raises_is_kept_by_prefect_without_secrets(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In states, logs with tracebacks, events and notifications."""
    spec: Any = SimpleNamespace(id="s", study="s", models=(), targets=())
    monkeypatch.setattr(flows.scaling_study, "_measured", unreachable)
    monkeypatch.setattr(flows.deployed, "check_study", unreachable)
    monkeypatch.setattr(flows.deployed, "tag_run", lambda *_: None)
    calls: dict[str, Callable[[], object]] = {
        "task": lambda: stage("fetch model", "fetch")(unreachable)._as_task.fn(),
        "flow": lambda: flows.scaling_study.measure_study(spec, Path("runs"), Path(), False, False),
        "check before the flow": lambda: flows.deployed._checked_and_measured(spec, Path("runs"), Path(), False, False),
    }
    monkeypatch.setattr(stages, "TaskRunContext", SimpleNamespace(get=lambda: SimpleNamespace(task_run=spec)))
    token = stages._OUTCOMES.set([])
    with pytest.raises(ValueError, match="cannot be reached") as raised:
        calls[where]()
    stages._OUTCOMES.reset(token)
    assert STEM not in "".join(traceback.format_exception(raised.value)), "the cause included"


def test_a_study_that_is_refused_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.deployed, "tag_run", lambda *_: None)
    state = flows.deployed._failed(StudyError([f"engines.vllm.url: http://user:{STEM}pw@host: no such host"]))
    assert state.message == "engines.vllm.url: http://(hidden)@host: no such host"


def test_credentials_of_the_api_are_hidden_in_an_error_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no longer in the environment when the error leaves the run, and have no form that gives them away."""

    @contextmanager
    def stored() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MIRROR_PASSWORD", f"{STEM}stored")
            yield

    def fail(*_: object) -> NoReturn:
        raise ValueError(f"login as user {STEM}stored was refused")

    study: Any = SimpleNamespace(study="s", models=(), targets=())
    for name, replaced in {
        "in_flow_run": lambda: True,
        "flow_run": SimpleNamespace(id=str(uuid.uuid4())),
        "tries": lambda: 1,
        "api_environment": stored,
        "begin_progress": lambda _: None,
        "ApiWatcher": lambda *_: nullcontext(),
        "_run": fail,
    }.items():
        monkeypatch.setattr(flows.scaling_study, name, replaced)
    with pytest.raises(ValueError, match=r"login as user \(hidden\) was refused"):
        flows.scaling_study.measure_study(study, tmp_path, tmp_path, False, False)
