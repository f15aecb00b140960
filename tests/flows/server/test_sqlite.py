"""Prefect's server on SQLite answers whoever writes beside others, and never refuses them for that."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from flows.server.local import prefect_api
from tests.support.servers.migrated_database import put_database

WRITERS, RUNS = 8, 40


@pytest.mark.slow
def test_many_writers_are_all_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with prefect_api() as api, httpx.Client(base_url=api.url, timeout=600, trust_env=False) as client:
        flow = client.post("/flows/", json={"name": "many writers"}).raise_for_status().json()["id"]

        def write(number: int) -> tuple[int, ...]:
            run = {"flow_id": flow, "name": f"run {number}", "state": {"type": "PENDING"}}
            made = client.post("/flow_runs/", json=run)
            if made.status_code != 201:
                return (made.status_code,)
            task = {"flow_run_id": made.json()["id"], "task_key": "t", "dynamic_key": str(uuid4())}
            return made.status_code, client.post("/task_runs/", json=task).status_code

        with ThreadPoolExecutor(WRITERS) as writers:
            answers = Counter(writers.map(write, range(RUNS)))
        count = client.post("/task_runs/count", json={}).raise_for_status().json()
    assert answers == {(201, 201): RUNS}
    assert count == RUNS
