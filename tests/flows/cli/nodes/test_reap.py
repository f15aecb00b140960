"""`rankwise reap --provider`: what cannot be searched is never said to be empty."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.nodes import command as nodes


@pytest.mark.parametrize(
    ("named", "code", "message"),
    [
        ("awss", 2, "--provider: got awss, expected one of: aws, gcp, azure"),
        ("gcp", 1, "gcp could not be asked: credentials are missing or refused"),
    ],
)
def test_a_provider_that_cannot_be_searched_is_no_success(
    named: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "providers_at_hand", lambda: [SimpleNamespace(name="aws")])
    done = CliRunner().invoke(app, ["reap", "--dry-run", "--provider", named])
    assert done.exit_code == code and message in done.output and "removed 0" not in done.output


def test_providers_of_which_none_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that no provider could not be asked, which is that each could."""
    monkeypatch.setattr(nodes, "providers_at_hand", list)
    for command in (["reap", "--dry-run"], ["nodes", "list"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert done.stderr == "no provider could be asked: credentials are missing or refused\n"
