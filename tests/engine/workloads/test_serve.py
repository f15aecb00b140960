"""What a launch that serves keeps of its server's command."""

from pathlib import Path

import pytest

from engine.workloads.serve import _next_rate, shown_command

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


def test_a_search_that_cannot_go_on_says_why_in_a_sentence(tmp_path: Path) -> None:
    """It was shown as a list of Python."""
    with pytest.raises(RuntimeError, match=r"^search: FileNotFoundError: .*search\.json"):
        _next_rate(tmp_path)
