"""Whether our engine can split a model in a layout, before anything is started.

check_layout(Layout(tp=2), manifest, "my-model")        # ValueError names the option and what would work
"""

from configs.common.execution import Layout
from configs.plans.model_manifest import ModelManifest
from engine.planner.architecture import Architecture
from engine.planner.choice.search import divisors
from engine.planner.families import READERS, read_architecture


def check_layout(layout: Layout, manifest: ModelManifest, name: str) -> Architecture:
    """Return the model's architecture. Raises ValueError for a model or a layout that the engine lacks."""
    kind = manifest.config.get("model_type")
    if kind not in READERS:
        raise ValueError(f"{name}: config.json has the unknown model_type {kind!r}")
    architecture = read_architecture(manifest.config, name)
    if architecture.kind == "vision":
        raise ValueError(f"{name}: {kind} is an image model, but only text models are supported")
    shared = architecture.kv_heads  # the width of the feed-forward may be shared out unevenly
    degrees = [degree for degree in divisors(architecture.heads) if shared % degree == 0 or degree % shared == 0]
    if layout.tp not in degrees:
        heads = f"{architecture.heads} attention heads ({architecture.kv_heads} of keys and values)"
        raise ValueError(
            f"--tp {layout.tp}: {heads} of {name} are not divisible by {layout.tp} ranks; "
            f"use one of: {', '.join(map(str, degrees))}"
        )
    # Each stage of an encoder-decoder holds layers of both.
    layers = min(architecture.layers, architecture.decoder_layers or architecture.layers)
    if layout.pp > layers:
        raise ValueError(f"--pp {layout.pp}: {name} has {layers} layers. Use at most {layers}")
    return architecture
