"""What is deployed: a bundle (what is served, and why it may be), and a deployment (where, until when, at what price).

    bundle = read_model(folder / "bundle.json", ServingBundle, PLAN_BYTES)
    deployment = read_model(folder / "deployment.json", Deployment)

`SupervisedProcess` is one process that a supervisor keeps running (`slurm.supervision`), `FrontConfig` the address
before one or several servers (`engine.routing`).
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common.base import SCHEMA_VERSION, Frozen, content_hash
from configs.common.execution import Compression, Dtype, Layout
from configs.plans.model_manifest import ModelFile, ModelFileName
from configs.serving.settings import GROUP_TIMEOUT_SECONDS

OptimizationLevel = Literal["none", "balanced", "aggressive"]
LEVEL_ORDER: tuple[OptimizationLevel, ...] = ("none", "balanced", "aggressive")
"""From the mildest; a level that is refused falls to the one before it."""
ModelKind = Literal["decoder", "encoder", "encoder_decoder"]


class LevelCheck(Frozen):
    """What measuring one level on the target's hardware came to. None: unknown. speed: throughput over that of none."""

    level: OptimizationLevel
    passes: tuple[str, ...] = Field((), description="what the level is on this hardware; none: unchanged weights")
    weights_bytes: NonNegativeInt | None = None
    throughput: float | None = Field(None, description="tokens or embeddings a second, batch 1")
    speed: float | None = None
    loss: float | None = Field(None, description="relative change of perplexity, or mean cosine distance")
    loss_text: str = ""
    refused: str | None = Field(None, description="why it is not deployed; none: it may be")


class FirstRequest(Frozen):
    """A request whose answer is known from measuring, with which every server is tested before it gets traffic.

    tokens: what a decoder answers greedily; gaps: how much larger its logit was than the next one's, as a share
    of it, so that a difference at a tie is told from a wrong answer. vector: what an encoder answers.
    """

    prompt: str | tuple[int, ...]
    tokens: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    vector: tuple[float, ...] = ()


class ServingBundle(Frozen):
    """Weights, level, settings, and the evidence for them."""

    schema_version: int = SCHEMA_VERSION
    id: str = Field(description="hash of what is served (model, layout, precision, passes) and of the target")
    model: str = Field(description="name in requests")
    identity: str = Field(description="the model, pinned: repository@commit, content hash, or synthetic")
    manifest: str = Field(description="path of the model's manifest.json on this machine")
    kind: ModelKind
    files: dict[ModelFileName, ModelFile] = Field(description="name -> size and SHA-256")
    layout: Layout = Layout()
    dtype: Dtype = "bfloat16"
    asked_level: OptimizationLevel = "none"
    level: OptimizationLevel = "none"
    compression: tuple[Compression, ...] = ()
    checks: tuple[LevelCheck, ...] = ()
    verdict: str = Field("not judged", description="agrees, defect or not judged: layout against transformers")
    verdict_text: str = ""
    fit_text: str = Field("", description="the planner's prediction of memory, against what the target has")
    first_requests: tuple[FirstRequest, ...] = ()
    max_sequences: PositiveInt = 32
    max_length: PositiveInt | None = None
    group_timeout_seconds: PositiveFloat = GROUP_TIMEOUT_SECONDS
    from_run: str | None = None
    created_at: str = ""

    @property
    def check(self) -> LevelCheck | None:
        """That of the deployed level."""
        return next((check for check in self.checks if check.level == self.level), None)


class SupervisedProcess(Frozen):
    """A process that is kept running. `{port}` in argv is replaced by the port.

    Standard output and error go to server.log. settings: file in the folder whose `port` is set too.
    """

    argv: tuple[str, ...] = Field(min_length=1)
    environment: dict[str, str] = {}
    key_file: str | None = Field(None, description="its content becomes RANKWISE_API_KEY of the process")
    settings: str | None = None
    port: int = Field(0, ge=0, le=65535, description="0: any free one, the same at every restart")
    expires_at: float | None = Field(None, description="seconds since 1970, after which the service ends")
    own_address: str | None = Field(None, description="whose interface ranks use towards other nodes; none: no others")
    add_pid: bool = Field(False, description="the supervisor's process id is the last argument")
    drain_seconds: PositiveFloat = 35.0


class ServiceState(Frozen):
    """What a supervisor wrote last."""

    supervisor_pid: int
    pid: int | None = None
    port: int = 0
    starts: NonNegativeInt = 0
    state: Literal["starting", "running", "waiting", "ended"] = "starting"
    since: float = 0.0
    reason: str = Field("", description="why the process ended last")


class RoutedServer(Frozen):
    """One server behind a front. usd_per_hour: None for own machines, which are asked first.

    rented: on nodes of a cloud, which are asked last where their price is unknown.
    max_in_flight: requests at once before the next backend is asked. draining: gets no new requests.
    """

    name: str
    url: str
    key: str | None = None
    usd_per_hour: PositiveFloat | None = None
    rented: bool = False
    max_in_flight: PositiveInt = 32
    draining: bool = False


class FrontConfig(Frozen):
    """An address before servers; read again when it changes."""

    key: str | None = None
    host: str = "127.0.0.1"
    backends: tuple[RoutedServer, ...] = ()
    body_seconds: PositiveFloat = Field(15.0, description="time in which a request's body must have arrived")
    wait_seconds: PositiveFloat = Field(30.0, description="how long a request waits for a backend that is ready")

    @property
    def id(self) -> str:
        """Hash by which a front says which configuration it has taken."""
        return content_hash(self.model_dump())


class BackendState(Frozen):
    """What the front saw of a backend."""

    name: str
    ready: bool = False
    in_flight: NonNegativeInt = 0
    requests: NonNegativeInt = 0
    failures: NonNegativeInt = Field(0, description="5xx and broken answers")


class FrontState(Frozen):
    """Written by the front whenever it changed. config_id: hash of the configuration that is in force."""

    config_id: str = ""
    backends: tuple[BackendState, ...] = ()
    requests: NonNegativeInt = 0
    failed: NonNegativeInt = Field(0, description="answered with 502 or 503 by the front itself")


class PlacedServer(Frozen):
    """One server of a deployment. folder: of the service on the target; tunnel: of its tunnel on this machine."""

    generation: PositiveInt
    bundle: str
    node: int = 0
    folder: str
    port: int
    tunnel: str | None = None
    local_port: int = Field(description="where this machine reaches it")
    peers: tuple[str, ...] = Field((), description="folders of the other nodes' ranks, where it is sharded")


class Deployment(Frozen):
    """Where a bundle is served. rental: name of the rented nodes; none: own machines."""

    schema_version: int = SCHEMA_VERSION
    name: str
    target: str = Field(description="as written: local:cpu, ssh:gpu-a, aws:g4dn.xlarge")
    kind: Literal["local", "ssh", "slurm", "aws", "gcp", "azure"]
    nodes: PositiveInt = 1
    url: str
    front: str = Field(description="folder of the front's service on this machine")
    key_file: str
    bundle: str
    previous: tuple[str, ...] = Field((), description="bundles that it served before")
    servers: tuple[PlacedServer, ...] = ()
    rental: str | None = None
    hosts: str | None = Field(None, description="the target's hosts as JSON (`SshTarget`); none: this machine")
    hosts_folder: str | None = Field(
        None, description="of this deployment on its hosts, or below the folder that a partition shares; none: neither"
    )
    partition: str | None = Field(None, description="of Slurm, and how its nodes are reached, as JSON; none: no jobs")
    usd_per_hour: float | None = Field(None, description="of all nodes; none: unknown, as of own machines")
    began_at: float
    expires_at: float
