"""`rankwise load` against a server of known answers: generator, samples, figures, table, JSON."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.load.server import Script, serving
from configs.common.files.reading import read_model
from configs.load.job import LoadJob
from flows.cli.load.request import ShapeOptions, made_request
from flows.cli.load.run import new_folder
from flows.cli.main import app
from tests.support.run_folders.studies import RANKWISE


@pytest.fixture
def script() -> Script:
    """Slow enough that a busy machine does not make the generator the bottleneck: a tenth of the TTFT is allowed."""
    return Script(first_seconds=0.5, chunk_seconds=0.01)


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def load(*arguments: str, seed: str | None = "0") -> Result:
    given = () if seed is None else ("--seed", seed)
    return CliRunner().invoke(app, ["load", *arguments, "--model", "m", *given])


SHORT = ("--new-tokens", "3", "--prompt-tokens", "5", "--exact")


def test_a_run_prints_one_table_and_keeps_its_samples(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # Of a TTFT of 1 s the generator may be late by 100 ms, beside whatever else the machine does.
    with serving(Script(first_seconds=1.0, chunk_seconds=0.01)) as url:
        done = load(url, "--rate", "40", "--duration", "8", *SHORT, "--ttft", "5", "--out", str(out))
    assert done.exit_code == 0, done.output
    for text in ("TTFT", "TPOT without the first token", "TPOT with the first token", "ITL", "goodput", "verdict: "):
        assert text in done.stdout
    data = json.loads((out / "load.json").read_text())
    assert data["latencies"]["ttft"]["p50"]["seconds"] == pytest.approx(1.005, abs=0.1)
    assert data["latencies"]["tpot"]["p50"]["seconds"] == pytest.approx(0.0115, abs=0.008)
    assert data["rates"]["requested_per_second"] == 40
    assert data["rates"]["achieved_per_second"] == pytest.approx(40, rel=0.35)
    assert data["requests"]["completed"] == data["requests"]["due"] > 50
    assert data["checks"]["lengths_held_share"] == data["checks"]["counts_agree_share"] == 1
    assert data["rates"]["goodput_share"] == 1
    assert (out / "samples.npz").is_file() and (out / "run.json").is_file()


@pytest.mark.slow
def test_answers_are_greedy_unless_a_temperature_is_given(tmp_path: Path, script: Script, url: str) -> None:
    for given in ((), ("--temperature", "0.7", "--field", "top_p=0.9")):
        assert load(url, "--rate", "20", "--requests", "2", *SHORT, *given, "--out", str(tmp_path / str(given))).output
    sent = [(body["temperature"], body.get("top_p")) for body, _ in script.seen or ()]
    assert sent == [(0.0, None)] * 2 + [(0.7, 0.9)] * 2


def test_json_is_what_is_written(tmp_path: Path, url: str) -> None:
    out = tmp_path / "run"
    done = load(url, "--users", "2", "--requests", "12", *SHORT, "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((out / "load.json").read_text())
    again = load(url, "--users", "2", "--requests", "12", "--out", str(out))
    assert again.exit_code == 1 and "holds a load run already" in again.stderr


def test_a_search_doubles_the_rate_up_to_the_cap(tmp_path: Path, script: Script, url: str) -> None:
    script.first_seconds = 1.0
    done = load(
        url, "--find-max-rate", "--rate", "40", "--e2e", "60", "--share", "0.5", "--requests", "60", "--max-rate", "80",
        "--arrivals", "constant", "--tolerance", "0.5", *SHORT, "--out", str(tmp_path), "--json",
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert done.exit_code == 3 and data["requests_per_second"] is None
    assert data["interval"] == [80.0, None] and "no rate up to 80" in data["reason"]
    assert "run 1: 40.0 requests/s" in done.stderr
    assert (tmp_path / "run-001" / "samples.npz").is_file()


def test_a_server_that_refuses_everything_is_no_result(tmp_path: Path, script: Script, url: str) -> None:
    script.refuse = lambda body, headers: (401, "no token")
    done = load(url, "--rate", "50", "--requests", "5", "--out", str(tmp_path / "run"))
    assert done.exit_code == 3
    assert "verdict: no answers (HTTP 401: no token)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--rate, --users, --trace: expected one of them, got none"),
        (("--rate", "1", "--users", "2"), "got --rate and --users"),
        (("--find-max-rate",), "--find-max-rate: expected an objective"),
        (("--find-max-rate", "--users", "3", "--ttft", "1"), "open loop only"),
        (("--rate", "1", "--new-tokens", "many"), "--new-tokens: got 'many', expected 128, 16..256"),
        (("--rate", "1", "--temperature", "3"), "--temperature: input should be less than or equal to 2, got 3.0"),
        (("--rate", "1", "--field", "top_p"), "--field: got 'top_p', expected KEY=JSON"),
        (("--rate", "1", "--field", "top_p=NaN"), "--field: got 'top_p=NaN'"),
        (("--rate", "0"), "--rate: input should be greater than 0"),
        (("--rate", "1", "--ttft", "0"), "--ttft: "),
        (("--rate", "1", "--requests", "0", "--duration", "0"), "greater than 0, got 0.0; --requests: input"),
        (("--rate", "1", "--prompt-tokens", "0"), "--prompt-tokens: got '0', expected 1 to 1,048,576 tokens"),
        (("--rate", "1", "--new-tokens", "9..3"), "--new-tokens: got '9..3': low: got 9, more than high (3)"),
        (("--rate", "1", "--new-tokens", "lognormal:9000"), "mean: got 9000, more than max (8192)"),
        (("--rate", "1", "--shared-prefix", "5", "--prompts", __file__), "--shared-prefix: random prompts only"),
        (("--rate", "1", "--arrivals", "gamma", "--burstiness", "1e-12"), "--burstiness: "),
        (("--users", "5000"), "--users: got 5,000, expected at most 4,096"),
        (("--users", "5", "--max-rate", "2"), "--users: their rate is the server's speed"),
        (("--rate", "1", "--field", "stream=true"), "--field: stream is set by the generator"),
        (("--rate", "9", "--max-rate", "5"), "--rate: 9 requests/s, above the cap of 5"),
        (("--rate", "1", "--token-variable", "A B"), "--token-variable: got 'A B'"),
        (("--rate", "1", "--vocabulary", "9"), "--vocabulary: got '9'"),
        (("--rate", "1", "--vocabulary", "9..3"), "--vocabulary: got '9..3', expected FROM..TO"),
        (("--trace", "none.jsonl"), "--trace: none.jsonl: expected a file"),
        (("--rate", "1", "--prompts", "none.jsonl"), "--prompts: none.jsonl: expected a file"),
        (("--rate", "1", "--speed", "2"), "--speed: has no effect without --trace"),
        (("--rate", "1", "--burstiness", "0.5"), "--burstiness: has no effect without --arrivals gamma"),
        (("--users", "1", "--arrivals", "gamma"), "--arrivals: has no effect without --rate or --find-max-rate"),
        (("--rate", "1", "--think", "2"), "--think: has no effect without --users or --turns"),
        (("--rate", "1", "--prefixes", "2"), "--prefixes: has no effect without --shared-prefix"),
        (("--rate", "1", "--share", "0.9"), "--share: has no effect without --ttft or --tpot or --e2e"),
        (("--rate", "1", "--ttft", "1", "--max-runs", "9"), "--max-runs: has no effect without --find-max-rate"),
        (("--rate", "1", "--prompts", "p", "--prompt-tokens", "9"), "--prompt-tokens: is of random prompts"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(arguments: tuple[str, ...], message: str) -> None:
    done = load("http://127.0.0.1:9", *arguments)
    assert done.exit_code == 2 and message in done.stderr


def test_a_search_begins_below_a_cap_of_less_than_its_first_rate() -> None:
    shape = ShapeOptions(None, None, None, 1.0, "poisson", 0.5, 0.0)
    contents = {"prompts": None, "turns": 2, "think_seconds": 0.0}
    texts = {"prompt_tokens": "8", "new_tokens": "8", "vocabulary": "10..99"}
    bounds = {"duration_seconds": None, "max_requests": None, "seed": 0}
    endpoint = {"url": "http://127.0.0.1:9", "model": "m"}
    made = made_request(
        endpoint, shape, contents, texts, [], {"max_rate": 0.5}, bounds, {"ttft_seconds": 1.0}, 0.99, (0.05, 9)
    )
    assert made.job.requested_rate == 0.5
    assert made.goal is not None and (made.goal.first_rate, made.goal.max_rate) == (0.5, 0.5)


@pytest.mark.slow
def test_two_commands_send_different_prompts_unless_they_have_a_seed(tmp_path: Path, script: Script, url: str) -> None:
    """The second one was answered from the server's cache of prompts."""
    script.first_seconds = 0.0
    sent = []
    for number, seed in enumerate((None, None, "3", "3")):
        (script.seen or []).clear()
        done = load(url, "--rate", "50", "--requests", "3", *SHORT, "--out", str(tmp_path / str(number)), seed=seed)
        assert done.exit_code in (0, 3), done.output
        sent.append(sorted(body["prompt"] for body, _ in script.seen or ()))
    assert sent[0] != sent[1] and sent[2] == sent[3]
    assert len({read_model(tmp_path / str(number) / "job.json", LoadJob).seed for number in range(4)}) == 3


def test_a_missing_token_is_named(tmp_path: Path, url: str) -> None:
    done = load(url, "--rate", "1", "--token-variable", "NO_SUCH_TOKEN", "--out", str(tmp_path / "run"))
    assert done.exit_code == 1 and "NO_SUCH_TOKEN is not set" in done.stderr


def test_an_address_with_a_password_is_refused_without_it() -> None:
    done = load("http://me:hunter22@127.0.0.1:9", "--rate", "1")
    assert done.exit_code == 2 and "hunter22" not in done.output


@pytest.mark.slow
def test_an_interrupted_run_says_where_its_samples_are(tmp_path: Path, script: Script, url: str) -> None:
    """It spoke of launches and measurements, of which there are none."""
    out = tmp_path / "out"
    arguments = ["load", url, "--model", "m", "--users", "2", "--duration", "600", *SHORT, "--out", str(out)]
    with subprocess.Popen([RANKWISE, *arguments], stderr=subprocess.PIPE, text=True) as command:
        while not script.seen:
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=600)
    assert (command.returncode, said) == (1, f"interrupted: the samples so far are in {out}\n")
    assert (out / "samples.npz").is_file()


def test_two_commands_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    wanted = tmp_path / "load" / "20260101-000000"
    names = [new_folder(wanted).name for _ in range(3)]
    assert names == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "load").write_text("a file")
    with pytest.raises(OSError, match="load"):
        new_folder(tmp_path / "load" / "20260101-000000")
