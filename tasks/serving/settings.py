"""From what a user asks for to a server's settings: model, layout, and how much cache fits.

settings = make_settings(ServerRequest(model="./my-llama", layout=Layout(tp=2)), folder, cache, base)
"""

from dataclasses import dataclass, field
from pathlib import Path

from configs.common.execution import Compression, Dtype, Layout
from configs.serving.settings import ServingLimits, ServingSettings
from engine.planner.serving import AskedSizes, server_sizes
from tasks.checks.layouts import check_layout
from tasks.models.sources import load_manifest
from tasks.planning.inputs import model_spec, planned_model


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
        raise ValueError(f"{model.name}: {architecture.kind.replace('_', '-')}s are not served; use a decoder")
    asked_sizes = AskedSizes(
        layout=asked.layout,
        dtype=asked.dtype,
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
        limits=ServingLimits(max_queue=asked.max_queue),
    )
