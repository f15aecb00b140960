"""The pooling of a sentence-transformers model, and what it does to texts, by its configuration.

    pooling_of(manifest)                    # "first"; None: the folder names none
    text_rules(folder).applied(text)        # "query: how tall is it"

Such a model was trained with one pooling mode, and with texts of one form; other vectors are useless without looking
wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.common.files.reading import read_json, read_json_object
from configs.common.printable import printable
from configs.plans.model_manifest import MODULES, POOLING, PROMPTS, TEXT_RULES, ModelManifest
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


@dataclass(frozen=True)
class TextRules:
    """What sentence-transformers does to a text before it is tokenised. prompt: put before it, if none is named."""

    prompt: str = ""
    lower: bool = False

    def applied(self, text: str) -> str:
        """Return the text that is tokenised."""
        text = self.prompt + text
        return text.lower() if self.lower else text


def text_rules(folder: Path) -> TextRules:
    """Return the rules that a model's folder names. Raises ValueError for such as are not supported."""
    prompts = _object(folder / PROMPTS)
    name, known = prompts.get("default_prompt_name"), prompts.get("prompts")
    prompt = known.get(name) if isinstance(known, dict) and isinstance(name, str) else None
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"{folder / PROMPTS}: prompts.{printable(str(name), 100)}: expected a text")
    if prompt and _object(folder / POOLING).get("include_prompt") is False:
        raise ValueError(
            f"{folder / POOLING}: include_prompt: false leaves the prompt {printable(prompt, 100)} of {PROMPTS} out of "
            "the mean, which is not computed; use a model that includes it, or none by default"
        )
    return TextRules(prompt or "", _object(folder / TEXT_RULES).get("do_lower_case") is True)


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, bounded=False) if path.is_file() else {}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


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
