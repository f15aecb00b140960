"""The agent passes torchrun the options that its version has."""

from argparse import REMAINDER, ArgumentParser

from engine.agents.torchrun_agent import supported


def parser(*options: str) -> ArgumentParser:
    made = ArgumentParser()
    for option in options:
        made.add_argument(option)
    made.add_argument("script", nargs=REMAINDER)
    return made


def test_an_option_that_this_torch_lacks_is_left_out_with_its_value() -> None:
    given = ["--nnodes", "1", "--shutdown-timeout", "2", "--log-dir", "here", "-m", "engine.worker", "job.json"]
    assert supported(given, parser("--nnodes", "--shutdown-timeout", "--log-dir")) == given
    older = supported(given, parser("--nnodes", "--log-dir"))
    assert older == ["--nnodes", "1", "--log-dir", "here", "-m", "engine.worker", "job.json"]
    assert given[2] == "--shutdown-timeout"
