"""Refuse a model of transformers of which some weights are in no file, or of another shape there.

    check_files(manifest)
    model, loaded = auto.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    check_loaded(model, loaded, folder)                     # ValueError names the tensor
    check_loaded(model, loaded, folder, is_head)            # but a new head is initialised

transformers initialises such weights at random and logs it: the answers would be wrong in silence.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from configs.common.files.safetensors_header import header_tensors
from configs.common.printable import printable
from configs.plans.model_manifest import WEIGHT_INDEX, ModelManifest
from engine.models.weights import weight_files

_SINGLE = "model.safetensors"
_COMPUTED = ("inv_freq",)
"""Last part of the names of floating-point buffers that follow from the configuration."""
_CLASSIFIERS = ("classifier", "score")
"""Usual names of a head in a class without a body of its own."""
_MAX_NAME = 100


class WeightsError(ValueError):
    """The files of a model lack weights that it needs, or have others."""


def check_files(manifest: ModelManifest) -> None:
    """Raise ValueError naming a file that is missing or damaged, WeightsError a weight in whole numbers or 8 bits, or
    files of names that transformers does not look for.

    Without a quantization_config transformers takes such numbers as they are, without their scales.
    """
    parts = [part for part in (manifest.config, manifest.config.get("text_config")) if isinstance(part, dict)]
    quantized = any(part.get(key) for part in parts for key in ("quantization_config", "compression_config"))
    files = weight_files(manifest)
    if files[0].name != _SINGLE and not (files[0].parent / WEIGHT_INDEX).is_file():
        raise WeightsError(
            f"{files[0].parent}: transformers reads {_SINGLE}, or the shards that {WEIGHT_INDEX} names, and has "
            f"neither here, but {files[0].name}. Fetch the index, or save the model again"
        )
    for path in files:
        for name, tensor in header_tensors(path).items():
            if name.endswith("weight") and not tensor.is_wide and not quantized:
                raise WeightsError(
                    f"{path}: tensor {printable(name, _MAX_NAME)} is {tensor.dtype}, and config.json has no "
                    "quantization_config that says what it stands for; use a checkpoint of 16 or 32 bits"
                )


def check_loaded(
    model: nn.Module,
    loaded: Mapping[str, Any],
    where: str | Path,
    fresh: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Raise WeightsError naming a tensor that the files lack, or have in another shape.

    loaded: what `from_pretrained` says of the load. Of tied weights the one that is shared counts. fresh: whether a
    tensor may be initialised anew; None: none may.
    """

    def excused(name: str) -> bool:
        return fresh is not None and fresh(model, name)

    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    lacking = {name for name in loaded["missing_keys"] if tied.get(name) not in loaded["missing_keys"]}
    missing = sorted(name for name in lacking if _is_learned(model, name) and not excused(name))
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise WeightsError(
            f"{where}: tensor {printable(missing[0], _MAX_NAME)}{more} is missing, which {type(model).__name__} needs; "
            "fetch or save the model again"
        )
    others = sorted(tuple(one) for one in loaded["mismatched_keys"] if not excused(one[0]))
    if others:
        name, stored, wanted = others[0]
        raise WeightsError(
            f"{where}: tensor {printable(name, _MAX_NAME)} has the shape {tuple(stored)}; config.json asks for "
            f"{tuple(wanted)}"
        )


def is_head(model: nn.Module, name: str) -> bool:
    """Return whether a tensor belongs to the head of a task, and not to the body, which all tasks share.

    A pooler counts as head: it is trained with one.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    if isinstance(getattr(model, prefix, None) if prefix else None, nn.Module):
        return not name.startswith(f"{prefix}.") or is_pooler(model, name)
    find: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    places = [place for place, module in model.named_modules() if module is head]
    return name.partition(".")[0] in (*places, *_CLASSIFIERS)


def is_pooler(model: nn.Module, name: str) -> bool:
    """Return whether a tensor belongs to the pooler of an encoder."""
    return "pooler" in name.split(".")


def _is_learned(model: nn.Module, name: str) -> bool:
    """Whether a tensor has values of its own: a parameter, or a buffer such as a running mean."""
    buffer = dict(model.named_buffers()).get(name)
    return buffer is None or (buffer.is_floating_point() and name.rpartition(".")[2] not in _COMPUTED)
