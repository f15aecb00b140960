"""The pooling of a sentence-transformers model, by its configuration, and a check of the workload's against it.

    pooling_of(manifest)                    # "first"; None: the folder names none
    check_pooling(context, workload)

Such a model was trained with one pooling mode; vectors pooled otherwise are useless without looking wrong. So a
workload that differs from the model's `1_Pooling/config.json` is rejected.
"""

from pathlib import Path
from typing import Any

from configs.common.files.reading import read_json_object
from configs.common.printable import printable
from configs.plans.model_manifest import ModelManifest
from configs.workloads.encode import EncodeWorkload, Pooling
from engine.context import Context
from engine.models.weights import required_manifest

_WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


def pooling_of(manifest: ModelManifest) -> Pooling | None:
    """Return the pooling that the model's folder names, None if it names none. Raises ValueError if not supported."""
    path = Path(manifest.folder) / "1_Pooling" / "config.json"
    if not manifest.folder or not path.is_file():
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
        f"(1_Pooling/config.json), which is not computed; use a model that pools by mean or first"
    )


def check_pooling(context: Context, workload: EncodeWorkload) -> None:
    """Raise ValueError if the model's folder names another pooling than the workload's, or an unsupported one."""
    manifest = required_manifest(context)
    wanted = pooling_of(manifest)
    if wanted is not None and workload.pooling != wanted:
        raise ValueError(
            f"workload.pooling: {workload.pooling} contradicts {manifest.identity}, whose 1_Pooling/config.json wants "
            f"{wanted}; use pooling: {wanted}"
        )


def _wanted(said: dict[str, Any]) -> tuple[str, ...]:
    """Return the enabled pooling modes: older files have a flag for each mode, newer ones a name."""
    named = said.get("pooling_mode")
    if isinstance(named, str):
        return ({"cls": "first"}.get(named, named),)
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
    return tuple(_WAYS.get(key, key.removeprefix("pooling_mode_")) for key in chosen)
