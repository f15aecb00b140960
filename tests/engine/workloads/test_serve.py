"""What a launch that serves keeps of its server's command."""

from pathlib import Path

import pytest

from configs.serving.settings import ServingSettings
from engine.workloads.serve import _next_rate, as_typed, shown_command

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


def test_a_search_that_cannot_go_on_says_why_in_a_sentence(tmp_path: Path) -> None:
    """It was shown as a list of Python."""
    with pytest.raises(RuntimeError, match=r"^search: FileNotFoundError: .*search\.json"):
        _next_rate(tmp_path)
