"""The kinds of workload: what a study may ask for, and one descriptor for each.

    descriptor_of(cell.workload).unit            # "token"
    kinds_with("takes_prompts")                  # ("generate", "seq2seq", "encode")

A kind is a module with the class of its fields and its `DESCRIPTOR`, and a line in each of the two lists here;
`docs/how-to/add-a-workload-kind.md` is the recipe.
"""

from typing import Annotated

from pydantic import Field

from configs.workloads import communication, encode, generate, noop, preflight, script, seq2seq, serve, train
from configs.workloads.descriptor import Descriptor

Workload = Annotated[
    generate.GenerateWorkload
    | seq2seq.Seq2SeqWorkload
    | encode.EncodeWorkload
    | train.TrainWorkload
    | script.ScriptWorkload
    | serve.ServeWorkload
    | noop.NoopWorkload
    | communication.CommunicationWorkload,
    Field(discriminator="kind"),
]
"""Workloads available in a study."""

AnyWorkload = Annotated[Workload | preflight.PreflightWorkload, Field(discriminator="kind")]
"""What a cell may hold: also the test of nodes, which no study asks for."""

DESCRIPTORS: dict[str, Descriptor] = {
    module.DESCRIPTOR.kind: module.DESCRIPTOR
    for module in (generate, seq2seq, encode, train, serve, script, noop, communication, preflight)
}
STUDIED: dict[str, Descriptor] = {kind: found for kind, found in DESCRIPTORS.items() if found.in_studies}
"""Those that a study may ask for, in the order of messages and tables."""


def descriptor_of(workload: AnyWorkload) -> Descriptor:
    """The descriptor of a workload's kind."""
    return workload.described(DESCRIPTORS[workload.kind])


def kinds_with(feature: str) -> tuple[str, ...]:
    """Kinds that a study may ask for whose descriptor has the feature, a field that is true or not empty."""
    return tuple(kind for kind, found in STUDIED.items() if getattr(found, feature))
