"""`rankwise serve` and `rankwise generate` as a user runs them."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tests.support.processes import runs
from tests.support.run_folders.studies import RANKWISE
from tests.support.servers.inference_server import TINY, running_server, wait_until

_MODEL = ("--model", str(TINY), "--device", "cpu")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RANKWISE, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """Yield the command, its address once it serves, and the file of what it says."""
    said = folder / "said.txt"
    with said.open("w") as out:
        command = subprocess.Popen(
            [RANKWISE, "serve", *_MODEL, "--port", "0", "--cores-per-rank", "1", *options],
            cwd=folder, stdout=out, stderr=out, text=True,
        )  # fmt: skip
    try:
        wait_until(lambda: "serving at" in said.read_text() or command.poll() is not None, "the server", 90)
        found = re.search(r"serving at (http\S+)/v1", said.read_text())
        assert found, said.read_text()
        yield command, found[1], said
    finally:
        command.kill()
        command.wait()


def answer(url: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny-stdlib", "prompt": "import ", "max_tokens": 3, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(runs(one) for one in processes)


@pytest.mark.slow
@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGKILL])
def test_it_serves_until_it_is_ended_and_leaves_nothing(tmp_path: Path, order: signal.Signals) -> None:
    with serving(tmp_path, "--dtype", "float32", "--compression", "int8") as (command, url, said):
        assert answer(url).status_code == 200
        processes = descendants(command.pid)
        assert len(processes) == 2
        folder = Path(processes[0].cmdline()[-2]).parent
        command.send_signal(order)
        assert command.wait(600) == (0 if order is signal.SIGTERM else -9)
        wait_until(lambda: gone(processes), "all processes to end")
        if order is signal.SIGTERM:
            assert not folder.exists() and "ending" in said.read_text()


@pytest.mark.slow
def test_a_token_is_made_where_others_reach_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as (_, url, said):
        url = url.replace("0.0.0.0", "127.0.0.1")
        key = re.search(r"Bearer (\S+)`", said.read_text())
        assert key and answer(url).status_code == 401 and answer(url, key[1]).status_code == 200


@pytest.mark.slow
def test_generate_prints_what_the_server_answers(tmp_path: Path) -> None:
    prompts = ["def main():\n", "import os\n"]
    with running_server(tmp_path) as server:
        expected = [server.complete(prompt=prompt, max_tokens=12)["choices"][0]["text"] for prompt in prompts]
    options = (*_MODEL, "--dtype", "float32", "--max-tokens", "12")
    text = run("generate", *options, *prompts, folder=tmp_path)
    assert text.returncode == 0, text.stderr
    assert text.stdout == "".join(f"{one}\n" for one in expected)
    raw = run("generate", *options, "--tp", "2", "--json", prompts[0], folder=tmp_path)
    assert json.loads(raw.stdout)["choices"][0]["text"] == expected[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tiny"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "no-such-folder"], "no-such-folder"),
        ([*_MODEL, "--tp", "3"], "--tp 3"),
        ([*_MODEL, "--pp", "9"], "--pp 9"),
        ([*_MODEL, "--dp", "65537"], "--dp"),
        ([*_MODEL, "--max-length", "4096"], "2048 positions"),
        ([*_MODEL, "--kv-cache-gib", "0.001"], "--kv-cache-gib"),
        ([*_MODEL, "--kv-cache-gib", "1000000"], "--kv-cache-gib 1e+06: "),
        ([*_MODEL, "--kv-cache-gib", "inf"], "--kv-cache-gib inf: "),
        ([*_MODEL, "--max-sequences", "64", "--max-step-tokens", "8"], "--max-sequences"),
        ([*_MODEL, "--compression", "int3"], "int3"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], word: str
) -> None:
    said = run("serve", "--port", "0", *arguments, folder=tmp_path)
    assert said.returncode == 2 and word in said.stderr and "Traceback" not in said.stderr, said.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--provider", "aws", "--instance", "g4dn.xlarge", "--tp", "4"], "--tp"),
        (["--instance", "g4dn.xlarge", "--provider", "aws", "--compression", "int8"], "--compression"),
        (["--provider", "aws", "--instance", "g4dn.xlarge", "--no-prefix-caching"], "--prefix-caching"),
        (["--hours", "2"], "--hours"),
        (["--yes"], "--yes"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else None,
)
def test_an_option_without_effect_is_refused(arguments: list[str], word: str) -> None:
    said = CliRunner().invoke(app, ["serve", "--model", str(TINY), *arguments], env={"TERM": "dumb", "COLUMNS": "200"})
    assert said.exit_code == 2 and word in said.output and "--provider" in said.output, said.output


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url, _):
        port = url.rsplit(":", 1)[1]
        said = run("serve", *_MODEL, "--port", port, folder=tmp_path)
    assert said.returncode == 1 and f"127.0.0.1:{port} cannot be listened on" in said.stderr


def test_a_server_without_compiled_kernels_says_so(tmp_path: Path) -> None:
    command = [RANKWISE, "generate", *_MODEL, "--max-tokens", "2", "def main():\n"]
    environment = {**os.environ, "RANKWISE_KERNELS": "off"}
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    warning = "no compiled kernels (linear.c: RANKWISE_KERNELS=off): torch's are used, which are slower"
    assert said.returncode == 0 and warning in said.stderr.splitlines(), said.stderr


@pytest.mark.slow
def test_batch_invariance_is_promised_only_where_it_holds(tmp_path: Path) -> None:
    environment = {**os.environ, "RANKWISE_KERNELS": "off"}
    command = [RANKWISE, "serve", *_MODEL, "--port", "0", "--batch-invariant"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert said.returncode == 1 and "--batch-invariant: attention here is torch's" in said.stderr
