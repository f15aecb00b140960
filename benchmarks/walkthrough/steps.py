"""The command lines of `make walkthrough`, from steps.yaml.

Models are small shapes with random weights, because the machine has no hub; clouds are local servers of their APIs with
a namespace and sshd behind each instance; hosts are this machine.
"""

from pathlib import Path

import yaml

from configs.common.base import Frozen

DEPLOY_OPTIONS = "--no-verify --hours 0.5 --python $PYTHON_ENV --ssh-from 203.0.113.7/32 --yes"
"""What stands for $DEPLOY_OPTIONS: nodes of the tests have the libraries of this environment."""


class Step(Frozen):
    """written: as the document has it. run: a shell command. code: the expected exit code; -1: any."""

    part: str
    written: str
    run: str
    against: str = ""
    clouds: bool = False
    quick: bool = False
    code: int = 0
    lines: int = 12


def all_steps() -> list[Step]:
    """Return the steps in their order."""
    text = Path(__file__).with_name("steps.yaml").read_text()
    return [Step.model_validate(step) for step in yaml.safe_load(text.replace("$DEPLOY_OPTIONS", DEPLOY_OPTIONS))]
