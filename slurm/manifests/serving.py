"""What a manifest serves, and the command in the container.

what = ContainedServer.of_bundle(bundle)
what.command          # ["serve", "--model", "/bundle/model", ...]: arguments of the image's entrypoint, `rankwise`
"""

import re

from configs.common.base import Frozen
from configs.serving.deployment import ServingBundle
from configs.serving.settings import GROUP_TIMEOUT_SECONDS

PORT = 8000
METRICS_PATH = "/metrics"


def dns_name(text: str, kind: str) -> str:
    """Return a name that Compose and a Service take (RFC 1035): lower-case letters, digits and dashes, a letter first.

    kind: the name of a text without any, and what comes before one that begins with a digit.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or kind
    return (name if name[0].isalpha() else f"{kind}-{name}")[:50].rstrip("-")


def escaped(words: list[str]) -> list[str]:
    """Return the words as Compose and Kubernetes take them, which both replace variables and read `$$` as `$`."""
    return [word.replace("$", "$$") for word in words]


class ContainedServer(Frozen):
    """A server as containers run it.

    model: what `--model` names in the container. weights_bytes: of all its replicas. gpus: of a container.
    """

    name: str
    model: str
    model_in_image: bool
    kind: str
    tp: int
    pp: int
    dp: int
    dtype: str
    compression: str | None
    max_sequences: int
    max_length: int | None
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS
    weights_bytes: int = 0
    gpus: int = 0

    @classmethod
    def of_bundle(cls, bundle: ServingBundle, gpus: int = 0) -> "ContainedServer":
        """Return what a bundle serves; its files lie in the image, a synthetic model is made there."""
        synthetic = bundle.identity.startswith("synthetic:")
        measured = bundle.check.weights_bytes if bundle.check is not None else None
        return cls(
            name=bundle.model,
            model=bundle.identity if synthetic else "/bundle/model",
            model_in_image=not synthetic,
            kind=bundle.kind,
            tp=bundle.layout.tp,
            pp=bundle.layout.pp,
            dp=bundle.layout.dp,
            dtype=bundle.dtype,
            compression="+".join(bundle.compression) or None,
            max_sequences=bundle.max_sequences,
            max_length=bundle.max_length,
            group_timeout_seconds=bundle.group_timeout_seconds,
            weights_bytes=bundle.layout.dp * max(sum(file.size_bytes for file in bundle.files.values()), measured or 0),
            gpus=gpus,
        )

    @property
    def slug(self) -> str:
        """Name that Docker and Kubernetes accept."""
        return dns_name(self.name, "model")

    @property
    def command(self) -> list[str]:
        """The command line of the server, listening on all addresses of its container."""
        words = ["serve", "--model", self.model, "--name", self.name, "--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--tp", str(self.tp), "--pp", str(self.pp), "--dp", str(self.dp), "--dtype", self.dtype]
        words += ["--max-sequences", str(self.max_sequences)]
        words += [] if self.compression is None else ["--compression", self.compression]
        words += [] if self.max_length is None else ["--max-length", str(self.max_length)]
        if self.group_timeout_seconds != GROUP_TIMEOUT_SECONDS:
            words += ["--group-timeout-seconds", f"{self.group_timeout_seconds:g}"]
        return [*words, *(() if self.gpus else ("--device", "cpu"))]
