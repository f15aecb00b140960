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
