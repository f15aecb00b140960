"""`rankwise nodes up` with arguments that no cloud is asked about."""

import pytest
from typer.testing import CliRunner

from flows.cli.main import app


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--hours", "0", "hours: input should be greater than 0, got 0.0\n"),
        ("--ssh-from", "0.0.0.0/0", "ssh_from: got 0.0.0.0/0, which is everybody. Name an address, such as 203.0.113."),
        ("--ssh-from", "office", "ssh_from: 'office' does not appear to be an IPv4 or IPv6 network\n"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(option: str, value: str, said: str) -> None:
    words = ["nodes", "up", "aws/g4dn.xlarge", "--ssh-from", "203.0.113.7/32", option, value]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1
