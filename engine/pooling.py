"""How a sentence-transformers model wants its hidden states pooled, against what the workload asks for.

    check_pooling(context, workload)

Such a model was trained with one way of pooling; vectors pooled otherwise are of no use, and nothing about them looks
wrong. So its own `1_Pooling/config.json` counts, and a workload that says otherwise is refused.
"""

import json
from pathlib import Path
from typing import Any

from configs.cell import EncodeWorkload
from engine.context import Context
from engine.weights import the_manifest

_WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


def check_pooling(context: Context, workload: EncodeWorkload) -> None:
    """Raises ValueError where the model's folder wants another pooling than the workload's, or one not computed."""
    manifest = the_manifest(context)
    path = Path(manifest.folder) / "1_Pooling" / "config.json"
    if not manifest.folder or not path.is_file():
        return
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        wanted = _wanted(said)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a JSON object that can be read ({error})") from error
    if wanted not in (("mean",), ("first",)):
        raise ValueError(
            f"workload.pooling: {manifest.identity} wants {' + '.join(wanted) or 'none that is named'} "
            f"(1_Pooling/config.json), which is not computed; use a model that pools by mean or first"
        )
    if workload.pooling != wanted[0]:
        raise ValueError(
            f"workload.pooling: {workload.pooling} contradicts {manifest.identity}, whose 1_Pooling/config.json wants "
            f"{wanted[0]}; use pooling: {wanted[0]}"
        )


def _wanted(said: dict[str, Any]) -> tuple[str, ...]:
    """Names of what is switched on: older files have a switch for each way, newer ones name it."""
    named = said.get("pooling_mode")
    if isinstance(named, str):
        return ({"cls": "first"}.get(named, named),)
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
    return tuple(_WAYS.get(key, key.removeprefix("pooling_mode_")) for key in chosen)
