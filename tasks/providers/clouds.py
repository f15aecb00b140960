"""The clouds that nodes can be rented from, by name."""

from configs.hardware.node_names import Cloud
from tasks.providers.rental import Provider

CLOUDS: tuple[Cloud, ...] = ("aws", "gcp", "azure")
BILLED_WHEN_OFF: tuple[Cloud, ...] = ("azure",)
"""There a machine that has powered itself off costs money until somebody deletes it."""


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
