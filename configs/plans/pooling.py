"""The pooling of a sentence-transformers model, by its configuration.

    pooling_of(manifest)                    # "first"; None: the folder names none

Such a model was trained with one pooling mode; vectors pooled otherwise are useless without looking wrong.
"""

from pathlib import Path
from typing import Any

from configs.common.files.reading import read_json, read_json_object
from configs.common.printable import printable
from configs.plans.model_manifest import MODULES, POOLING, ModelManifest
from configs.workloads.encode import Pooling

_COMPUTED = ("Transformer", "Pooling", "Normalize", "Dropout")
_WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


def pooling_of(manifest: ModelManifest) -> Pooling | None:
    """Return the pooling that the model's folder names, None if it names none.

    Raises ValueError if it is not supported, or if the model has a further part, such as a dense layer over vectors.
    """
    if not manifest.folder:
        return None
    _check_modules(Path(manifest.folder) / MODULES, manifest.identity)
    path = Path(manifest.folder) / POOLING
    if not path.is_file():
        return None
    try:
        wanted = _wanted(read_json_object(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if wanted == ("mean",):
        return "mean"
    if wanted == ("first",):
        return "first"
    raise ValueError(
        f"workload.pooling: {manifest.identity} wants {printable(' + '.join(wanted), 200) or 'none that is named'} "
        f"({POOLING}), which is not computed; use a model that pools by mean or first"
    )


def _check_modules(path: Path, identity: str) -> None:
    try:
        modules = read_json(path) if path.is_file() else []
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    for module in modules if isinstance(modules, list) else []:
        kind = module.get("type") if isinstance(module, dict) else None
        if isinstance(kind, str) and kind.rpartition(".")[2] not in _COMPUTED:
            raise ValueError(
                f"{identity}: {MODULES} names a part {printable(kind, 100)}, which is not computed, and without it the "
                f"vectors are others; use a model of {', '.join(_COMPUTED[:2])} and {_COMPUTED[2]} alone"
            )


def _wanted(said: dict[str, Any]) -> tuple[str, ...]:
    """Return the enabled pooling modes: older files have a flag for each mode, newer ones a name."""
    named = said.get("pooling_mode")
    if isinstance(named, str):
        return ({"cls": "first"}.get(named, named),)
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
    return tuple(_WAYS.get(key, key.removeprefix("pooling_mode_")) for key in chosen)
