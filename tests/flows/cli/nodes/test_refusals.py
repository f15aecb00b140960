"""`rankwise nodes up` with arguments that no cloud is asked about."""

import pytest
from typer.testing import CliRunner

from flows.cli.main import app


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--hours", "0", "hours: input should be greater than 0, got 0.0\n"),
        ("--ssh-from", "0.0.0.0/0", "ssh_from: got 0.0.0.0/0, which is everybody. Name an address, such as 203.0.113."),
        ("--wait-minutes", "nan", "--wait-minutes: got nan, expected a number above 0\n"),
        ("--max-usd-per-hour", "0", "--max-usd-per-hour: got 0.0, expected a number above 0\n"),
        ("--study", "模型", "--study: got '模型', expected ASCII letters and digits\n"),
        ("--run", "--", "--run: got '--', expected ASCII letters and digits\n"),
        ("--ssh-from", "office", "ssh_from: 'office' does not appear to be an IPv4 or IPv6 network\n"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(option: str, value: str, said: str) -> None:
    words = ["nodes", "up", "aws/g4dn.xlarge", "--ssh-from", "203.0.113.7/32", option, value]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["up", "g4dn.xlarge"],
            "node: got 'g4dn.xlarge', expected a provider and an instance, such as aws/g4dn.xlarge\n",
        ),
        (
            ["up", "gcp:n1-standard-4-t4", "--private"],  # a firewall that admits the public address alone
            "--ssh-from: is needed with --private, because the nodes do not see this machine's public address. Name "
            "the one from which it reaches them, such as 10.0.0.5/32\n",
        ),
        (["extend", "r", "--hours", "0"], "--hours: got 0.0, expected a number above 0 and at most 720\n"),
        (["extend", "r", "--hours", "nan"], "--hours: got nan, expected a number above 0 and at most 720\n"),
    ],
)
def test_a_wrong_argument_is_told_from_a_cloud_that_refuses(words: list[str], said: str) -> None:
    """By the exit code, as of other commands: scripts tried again."""
    done = CliRunner().invoke(app, ["nodes", *words])
    assert (done.exit_code, done.stderr) == (2, said)
