"""What a launch that serves keeps of its server's command."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.files.reading import read_model
from configs.plans.model_manifest import read_model_manifest
from configs.plans.paths import JobPaths
from configs.serving.settings import ServingSettings
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment
from configs.spec.measuring import Measuring
from configs.workloads.serve import ServeWorkload
from engine.workloads.serve import _next_rate, _own_command, as_typed, shown_command
from engine.workloads.servers.commands import Wanted
from tasks.models.model_cache import manifest_path
from tasks.models.sources import resolve_model

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


def test_a_search_that_cannot_go_on_says_why_in_a_sentence(tmp_path: Path) -> None:
    """It was shown as a list of Python."""
    with pytest.raises(RuntimeError, match=r"^search: FileNotFoundError: .*search\.json"):
        _next_rate(tmp_path)
