"""Runs of the generator from outside: what ends a search, and what becomes of a job that cannot run."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load.server import Script, serving
from configs.common.files.reading import read_model
from configs.load.arrivals import ConstantArrivals, TraceArrivals
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.load.objectives import RequestObjectives
from configs.load.samples import FACTS_FILE, JOB_FILE, LoadFacts
from reports.load.search import SearchGoal
from tasks.load.run import run_load, search_max_rate
from tests.support.run_folders.studies import wait_until

OBJECTIVES = RequestObjectives(e2e_seconds=60.0, share=0.5)


@pytest.fixture
def script() -> Script:
    return Script(first_seconds=0.4)


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def job(url: str, **fields: object) -> LoadJob:
    whole = {
        "endpoint": Endpoint(url=url, model="m"),
        "arrivals": ConstantArrivals(rate=50),
        "contents": Contents(prompt_tokens=5, new_tokens=2),
        "max_requests": 40,
    }
    return LoadJob.model_validate(whole | fields)


def test_a_generator_that_cannot_send_ends_the_search(tmp_path: Path, url: str) -> None:
    """Two requests at once are allowed; the server holds each for 0.4 s."""
    narrow = job(url, caps=Caps(max_in_flight=2))
    found = search_max_rate(narrow, OBJECTIVES, SearchGoal(0.5, 50.0), tmp_path)
    assert found.estimate is None and not found.probes
    assert "the generator was the bottleneck at 50 requests/s" in found.reason and "not sent" in found.reason


def test_a_folder_of_the_user_is_not_imported(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "engine" / "__init__.py"
    own.parent.mkdir()
    own.write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    run_load(job(url, max_requests=1), tmp_path / "run")
    assert not (tmp_path / "imported").exists()


def test_a_cap_ends_the_search(tmp_path: Path, url: str) -> None:
    found = search_max_rate(job(url, caps=Caps(max_tokens=70)), OBJECTIVES, SearchGoal(0.5, 50.0), tmp_path)
    assert found.estimate is None and "70 tokens asked for" in found.reason


@pytest.mark.slow
def test_runs_of_a_search_have_seeds_of_their_own(tmp_path: Path, script: Script, url: str) -> None:
    script.first_seconds = 1.0
    search_max_rate(job(url), OBJECTIVES, SearchGoal(0.5, 25.0, max_runs=2), tmp_path)
    prompts = [tuple(body["prompt"]) for body, _ in script.seen or ()]
    assert len(prompts) == len(set(prompts)) == 80


def test_a_job_that_the_generator_refuses_is_an_error_in_its_words(tmp_path: Path, url: str) -> None:
    missing = job(url, arrivals=TraceArrivals(file=str(tmp_path / "none.jsonl")))
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        run_load(missing, tmp_path / "run")


def test_a_folder_holds_one_run(tmp_path: Path, url: str) -> None:
    run_load(job(url, max_requests=2), tmp_path)
    with pytest.raises(ValueError, match="holds a load run already"):
        run_load(job(url, max_requests=2), tmp_path)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path, url: str) -> None:
    """The samples of one were kept beside the facts of the other."""
    refused: list[str] = []

    def second() -> None:
        wait_until(lambda: (tmp_path / JOB_FILE).exists())
        with pytest.raises(ValueError, match="another load run writes to it now") as caught:
            run_load(job(url, max_requests=1), tmp_path)
        refused.append(str(caught.value))

    other = threading.Thread(target=second)
    other.start()
    run_load(job(url, max_requests=20), tmp_path)
    other.join()
    assert len(refused) == 1 and read_model(tmp_path / JOB_FILE, LoadJob).max_requests == 20
    assert not (tmp_path / "load.lock").exists()


def test_a_server_that_answers_nothing_ends_the_search(tmp_path: Path, script: Script, url: str) -> None:
    """It would fail at every rate, for as many runs as the search may have."""
    script.refuse = lambda body, headers: (404, "no such model")
    found = search_max_rate(job(url), OBJECTIVES, SearchGoal(0.5, 50.0), tmp_path)
    assert found.estimate is found.high is None and not found.probes
    assert "answered none of 40 requests" in found.reason and "no such model" in found.reason


def test_a_generator_ends_with_the_command_that_was_killed(tmp_path: Path, script: Script, url: str) -> None:
    """It went on to the end of its run, against a server that may cost money."""
    text = job(url, max_requests=None, duration_seconds=40).model_dump_json()
    code = "import sys; from pathlib import Path; from configs.load.job import LoadJob; "
    code += "from tasks.load.run import run_load; run_load(LoadJob.model_validate_json(sys.argv[1]), Path(sys.argv[2]))"
    with subprocess.Popen([sys.executable, "-c", code, text, str(tmp_path)]) as command:
        while not script.seen:
            time.sleep(0.02)
        command.kill()
    while not (tmp_path / FACTS_FILE).exists():
        time.sleep(0.02)
    assert read_model(tmp_path / FACTS_FILE, LoadFacts).capped == "interrupted"
