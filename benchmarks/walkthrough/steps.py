"""The command lines of `make walkthrough`: the steps/*.yaml beside this file, in the order of their names.

Models are shapes with random weights, from a local server of the hub's API or by name; clouds are local servers of
their APIs with a namespace and sshd behind each instance; the cluster is a lab of two Slurm nodes.
"""

import hashlib
from pathlib import Path
from typing import Literal

import yaml

from configs.common.base import Frozen

DEPLOY_OPTIONS = "--no-verify --hours 0.5 --python $PYTHON_ENV --ssh-from 203.0.113.7/32 --yes"
"""What stands for $DEPLOY_OPTIONS: nodes of the tests have the libraries of this environment."""

Need = Literal["clouds", "cluster", "hub"]


class Step(Frozen):
    """written: as the document has it. run: a shell command. needs: what it runs against, brought up before it.

    group: steps of one group depend on each other and are run in one go. code: the expected exit code.
    text: what the output must have. lines: of the output that the page shows.
    """

    part: str
    written: str
    run: str
    against: str = ""
    needs: tuple[Need, ...] = ()
    group: str = ""
    quick: bool = False
    code: int = 0
    text: str = ""
    lines: int = 12

    @property
    def id(self) -> str:
        """A name that changes with what is run."""
        return hashlib.sha256(self.model_dump_json(include={"run", "needs", "code", "text"}).encode()).hexdigest()[:12]


def all_steps() -> list[Step]:
    """Return the steps in their order."""
    found = []
    for path in sorted(Path(__file__).with_name("steps").glob("*.yaml")):
        document = yaml.safe_load(path.read_text().replace("$DEPLOY_OPTIONS", DEPLOY_OPTIONS))
        found += [Step.model_validate({"part": document["part"], **step}) for step in document["steps"]]
    return found
