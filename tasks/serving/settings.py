"""From what a user asks for to a server's settings: model, layout, and how much cache fits.

settings = make_settings(ServerRequest(model="./my-llama", layout=Layout(tp=2)), folder, cache, base)
"""

from dataclasses import dataclass, field
from pathlib import Path

from configs.common.execution import Compression, Dtype, Layout
from configs.common.system.cores import usable_cores
from configs.plans.plan import PlannedModel
from configs.serving.settings import GROUP_TIMEOUT_SECONDS, ServingLimits, ServingSettings
from engine.planner.architecture import Architecture
from engine.planner.families import read_architecture
from engine.planner.serving import AskedSizes, server_sizes
from tasks.checks.layouts import check_layout
from tasks.models.model_cache import load_manifest
from tasks.planning.study_models import model_spec, planned_model

DECODERS = "engine.serving.http.main"
_LENGTH_WITHOUT_POSITIONS = 512
"""Tokens of a text for a model with relative positions that was made for no length; it takes any."""


@dataclass(frozen=True)
class ServerRequest:
    """What a user asks for; None: chosen here. max_length: tokens of a sequence, prompt and answer."""

    model: str
    layout: Layout = field(default_factory=Layout)
    dtype: Dtype = "bfloat16"
    compression: tuple[Compression, ...] = ()
    device: str | None = None
    cores_per_rank: int | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_length: int | None = None
    max_sequences: int = 32
    max_step_tokens: int | None = None
    kv_cache_gib: float | None = None
    prefix_caching: bool = True
    batch_invariant: bool = False
    max_queue: int = ServingLimits().max_queue
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS


def make_settings(asked: ServerRequest, folder: Path, cache: Path, base: Path) -> ServingSettings:
    """Find the model, check the layout and size the cache. folder: for sockets and logs; base: of relative paths.

    Raises ValueError for what cannot be served, naming what could be; TransientFetchError as `resolve_model`.
    """
    spec = model_spec(asked.model, base)
    try:
        model = planned_model(spec, 0, cache, base)
    except ValueError as error:
        raise ValueError(str(error).replace("models[0].id: ", "", 1)) from error
    manifest = load_manifest(Path(model.manifest))
    architecture = check_layout(asked.layout, manifest, model.name)
    if architecture.kind != "decoder":
        return _without_cache(asked, model, architecture, folder)
    asked_sizes = AskedSizes(
        layout=asked.layout,
        dtype=asked.dtype,
        compression=asked.compression,
        device=asked.device,
        cores_per_rank=asked.cores_per_rank,
        max_length=asked.max_length,
        max_sequences=asked.max_sequences,
        max_step_tokens=asked.max_step_tokens,
        kv_cache_gib=asked.kv_cache_gib,
    )
    sizes = server_sizes(asked_sizes, architecture, model.name, cache)
    return ServingSettings(
        name=asked.name or model.name,
        manifest=model.manifest,
        folder=str(folder),
        host=asked.host,
        port=asked.port,
        layout=asked.layout,
        dtype=asked.dtype,
        compression=asked.compression,
        device=asked.device,
        cores_per_rank=sizes.cores_per_rank,
        max_length=sizes.max_length,
        max_sequences=asked.max_sequences,
        max_step_tokens=sizes.max_step_tokens,
        blocks=sizes.blocks,
        prefix_caching=asked.prefix_caching,
        batch_invariant=asked.batch_invariant,
        group_timeout_seconds=asked.group_timeout_seconds,
        limits=ServingLimits(max_queue=asked.max_queue),
    )


def program_of(settings: ServingSettings) -> str:
    """Return the module of the HTTP process: decoders have their own, which batches continuously."""
    manifest = load_manifest(Path(settings.manifest))
    kind = read_architecture(manifest.config, manifest.identity).kind
    return DECODERS if kind == "decoder" else "engine.answering.main"


def only_of_decoders(option: str, model: str, architecture: Architecture) -> ValueError:
    """Return the refusal of an option that says something of decoders alone."""
    kind = f"{architecture.kind.replace('_', '-')}s"
    return ValueError(f"{option}: {model} is one of the {kind}, which one rank serves. Leave it out")


def _without_cache(
    asked: ServerRequest, model: PlannedModel, architecture: Architecture, folder: Path
) -> ServingSettings:
    """Settings for a model that answers whole batches: an encoder or an encoder-decoder.

    Raises ValueError for options that only decoders have.
    """
    for option, given in (
        ("--tp, --pp, --dp", asked.layout.ranks > 1),
        ("--compression", bool(asked.compression)),
        ("--kv-cache-gib", asked.kv_cache_gib is not None),
        ("--max-step-tokens", asked.max_step_tokens is not None),
        ("--no-prefix-caching", not asked.prefix_caching),
        ("--batch-invariant", asked.batch_invariant),
        ("--group-timeout-seconds", asked.group_timeout_seconds != ServerRequest.group_timeout_seconds),
    ):
        if given:
            raise only_of_decoders(option, model.name, architecture)
    limit = architecture.position_limit
    length = asked.max_length or architecture.max_positions or _LENGTH_WITHOUT_POSITIONS
    if limit is not None and length > limit:
        raise ValueError(f"--max-length {length}: {model.name} has {limit} positions")
    return ServingSettings(
        name=asked.name or model.name,
        manifest=model.manifest,
        folder=str(folder),
        host=asked.host,
        port=asked.port,
        dtype=asked.dtype,
        device=asked.device,
        cores_per_rank=asked.cores_per_rank or usable_cores(),
        max_length=length,
        max_sequences=asked.max_sequences,
        max_step_tokens=max(asked.max_sequences, ServingSettings.model_fields["max_step_tokens"].default),
        blocks=1,
        limits=ServingLimits(max_queue=asked.max_queue),
    )
