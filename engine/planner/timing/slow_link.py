"""Predict decode on small computers that share a model by tensor parallelism over Ethernet.

    milliseconds = token_milliseconds(cluster, constants)

A token takes: reading a share of the weights, a part of each layer that is not shared, and the exchange. In each layer
the root sends its workers three hidden vectors and one of the feed-forward's width, and gathers five slices of hidden
vectors (counted: 1,112, 2,830 and 6,008 kB of Llama 2 7B on 2, 4 and 8 devices; the formula has 1,114, 2,843 and
6,032). Over more than four devices the messages to one port collide, and the switch drops packets that TCP sends again;
the longer the messages, the more. That `collisions` is unknown before a row with more than four devices is measured, so
its prior is wide.
"""

from dataclasses import dataclass

from engine.planner.architecture import Architecture
from engine.planner.fitting.few import Constants, FewConstants

_CALM = 4  # devices that a switch's port serves without drops: from the published rows
_REFERENCE_BYTES = 6e6
_GROWTH = 0.25  # of collisions with the bytes of a token: from the published rows
_SENT, _GATHERED = 3, 5
_SCATTER = 0.1


@dataclass(frozen=True)
class LinkedDevices:
    """weight_bytes, sync_bytes: of one number as stored and as sent."""

    architecture: Architecture
    devices: int
    bytes_per_second: float  # of a device's memory, by its data sheet
    link_bytes_per_second: float
    weight_bytes: float
    sync_bytes: float


def exchanged_bytes(cluster: LinkedDevices) -> float:
    """Return the bytes that the root sends and receives for a token."""
    architecture, workers = cluster.architecture, cluster.devices - 1
    vectors = _SENT * architecture.hidden + architecture.feed_forward
    gathered = _GATHERED * architecture.hidden / cluster.devices
    return architecture.layers * workers * (vectors + gathered) * cluster.sync_bytes


def token_milliseconds(cluster: LinkedDevices, constants: Constants) -> float:
    """Return the milliseconds of one token."""
    return computing_milliseconds(cluster, constants) + exchange_milliseconds(cluster, constants)


def computing_milliseconds(cluster: LinkedDevices, constants: Constants) -> float:
    """Return the milliseconds of computation."""
    held = sum(weight.size * weight.products for weight in cluster.architecture.weights) / cluster.devices
    reading = held * cluster.weight_bytes / (cluster.bytes_per_second * constants["memory"])
    return 1e3 * (reading + cluster.architecture.layers * constants["layer_seconds"])


def exchange_milliseconds(cluster: LinkedDevices, constants: Constants) -> float:
    """Return the milliseconds of waiting for the network."""
    if cluster.devices == 1:
        return 0.0
    moved = exchanged_bytes(cluster)
    crowd = max(0, cluster.devices - _CALM) / _CALM
    slower: float = 1 + constants["collisions"] * crowd * (moved / _REFERENCE_BYTES) ** _GROWTH
    line = moved / (cluster.link_bytes_per_second * constants["link"])
    return 1e3 * (line * slower + cluster.architecture.layers * constants["message_seconds"])


SLOW_LINK: FewConstants[LinkedDevices] = FewConstants(
    priors={
        "memory": (0.75, 0.3),
        "layer_seconds": (5e-3, 0.5),
        "link": (0.9, 0.1),
        "message_seconds": (5e-4, 0.7),  # a layer's messages: their round trips through TCP and a switch
        "collisions": (3.0, 1.0),
    },
    formula=token_milliseconds,
    scatter=lambda _: _SCATTER,
)
