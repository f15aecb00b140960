"""The clouds that nodes can be rented from, by name."""

from configs.hardware.node_names import Cloud
from tasks.providers.rental import Provider

CLOUDS: tuple[Cloud, ...] = ("aws", "gcp", "azure")
BILLED_WHEN_OFF: tuple[Cloud, ...] = ("azure",)
"""There a machine that has powered itself off costs money until somebody deletes it."""
_MAX_RUN_SECONDS = 120 * 24 * 3600


def longest_lease_seconds(cloud: Cloud, hours: float) -> int | None:
    """Return how long nodes of a lease of so many hours live at most, however it is extended; None: without bound.

    Google fixes the end of a machine when it is made: twice the lease, at least an hour more, so that there is room to
    extend, and 120 days at most (https://cloud.google.com/compute/docs/instances/limit-vm-runtime).
    """
    if cloud != "gcp":
        return None
    return min(int(3600 * max(2 * hours, hours + 1)), _MAX_RUN_SECONDS)


def provider_named(name: Cloud) -> Provider:
    """Connect to a cloud with the credentials of its client's own chain. Raises ValueError for one without a module."""
    if name == "aws":
        from tasks.providers.aws.provider import Aws

        return Aws()
    if name == "azure":
        from tasks.providers.azure.provider import Azure

        return Azure()
    if name == "gcp":
        from tasks.providers.gcp.provider import Gcp

        return Gcp()
    raise ValueError(f"{name}: nodes cannot be rented there. Use one of: {', '.join(CLOUDS)}")
