"""Names of rented nodes, in every spelling that is accepted, parsed in one place.

parse_node_name("aws-g4dn.xlarge")         # aws/g4dn.xlarge; also aws/g4dn.xlarge, aws:g4dn.xlarge
parse_node_name("gcp:n1-standard-4-t4")    # gcp/n1-standard-4+t4: a machine with an attached GPU
"""

import re
from typing import Literal

from configs.common.base import Frozen
from configs.hardware.catalog import HardwareCatalog, catalog

Cloud = Literal["aws", "gcp", "azure"]
_SPELLING = re.compile(r"(?P<provider>aws|gcp|azure)[/:-](?P<instance>[A-Za-z0-9][\w.+-]*)", re.IGNORECASE)


class NodeName(Frozen):
    """A provider and its instance type; attached accelerators behind a `+`."""

    provider: Cloud
    instance: str

    @property
    def full(self) -> str:
        """As the catalog writes it: `provider/instance`."""
        return f"{self.provider}/{self.instance}"


def parse_node_name(text: str, known: HardwareCatalog | None = None) -> NodeName:
    """Return the catalog's name of a node. Raises ValueError with the nearest names."""
    spelled = _SPELLING.fullmatch(text.strip())
    if spelled is None:
        raise ValueError(f"node: got {text!r}, expected a provider and an instance, such as aws/g4dn.xlarge")
    provider, rest = spelled["provider"].lower(), spelled["instance"]
    table = known or catalog()
    machine, plus, attached = rest.partition("+")
    if not plus:
        # n1-standard-4-t4: the longest beginning that is an instance to which the rest can be attached
        for place in (hyphen.start() for hyphen in re.finditer("-", rest)):
            if f"{provider}/{rest[:place]}" in table.names("instances"):
                machine, attached = rest[:place], rest[place + 1 :]
    name = table.name_of("instances", f"{provider}/{machine}")
    full = table.instance(f"{name}+{attached}").name if attached else name
    return NodeName.model_validate({"provider": provider, "instance": full.partition("/")[2]})
