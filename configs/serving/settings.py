"""Settings of a server: the file that its HTTP process and its ranks read.

settings = read_model(path, ServingSettings, PLAN_BYTES)
"""

import os

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.common.execution import Compression, Dtype, Layout

API_KEY_VARIABLE = "RANKWISE_API_KEY"
"""Environment variable with the bearer token of a server's requests."""
BLOCK_POSITIONS = 16
"""Positions of a block of the key-value cache."""
GROUP_TIMEOUT_SECONDS = 20.0
"""That ranks wait for each other, where nobody says otherwise."""


def own_api_key() -> str | None:
    """Return the token in this process's environment; None without one. A header's value has no blanks around it."""
    return os.environ.get(API_KEY_VARIABLE, "").strip() or None


class ServingLimits(Frozen):
    """What one request, and all together, may ask for."""

    max_queue: PositiveInt = Field(256, description="requests that wait; a further one is answered 429")
    max_body_bytes: PositiveInt = Field(4 << 20, description="size of a request")
    max_choices: PositiveInt = Field(16, description="answers to one request, over all prompts and `n`")
    request_seconds: PositiveFloat = Field(600.0, description="time of a request, its wait included")
    body_seconds: PositiveFloat = Field(15.0, description="time in which a request's body must have arrived")
    drain_seconds: NonNegativeFloat = Field(30.0, description="time for requests in progress after SIGTERM")


class ServerRendezvous(Frozen):
    """Where the ranks of one server meet that are on several nodes; each node has as many of them.

    node: this one's number; the HTTP process runs on node 0. address: node 0's, as the others reach it.
    """

    nodes: PositiveInt
    node: int = Field(ge=0)
    address: str
    port: int = Field(ge=1024, le=65535)


class ServingSettings(Frozen):
    """A server of one model: `layout.dp` replicas of `layout.tp` x `layout.pp` ranks."""

    schema_version: int = SCHEMA_VERSION
    name: str = Field(description="the model's name in requests")
    manifest: str = Field(description="path of the model's manifest.json")
    folder: str = Field(description="folder of sockets and logs")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    layout: Layout = Layout()
    dtype: Dtype = "bfloat16"
    compression: tuple[Compression, ...] = ()
    device: str | None = Field(None, pattern="^cpu$")
    first_device: int | None = Field(
        None, ge=0, description="place of its first GPU among the machine's, which other servers share; none: all"
    )
    cores_per_rank: PositiveInt = 1
    max_length: PositiveInt = Field(description="tokens of a sequence, prompt and answer")
    max_sequences: PositiveInt = Field(32, description="sequences that are computed at once, in each replica")
    max_step_tokens: PositiveInt = Field(160, description="tokens of a step; what decoding leaves goes to prompts")
    blocks: PositiveInt = Field(description="blocks of the key-value cache of each replica")
    block: PositiveInt = BLOCK_POSITIONS
    prefix_caching: bool = True
    batch_invariant: bool = Field(False, description="refuse to start where company could change a request's bits")
    group_timeout_seconds: PositiveFloat = Field(
        GROUP_TIMEOUT_SECONDS,
        description="time limit of one collective; a replica that computes no step for three of them hangs",
    )
    limits: ServingLimits = ServingLimits()
    rendezvous: ServerRendezvous | None = Field(None, description="none: all ranks are on this machine")
