"""What transformers knows of a text model whose family this engine lacks.

    model = text_model(context, "generate")       # ModelConfig, or what transformers' own configuration says

Peers run whatever transformers' automatic classes load; only our own engine needs to understand every option.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.families.config import ModelConfig
from configs.families.positions import LIMIT_KEYS, are_distances, source_positions, unused_positions
from configs.families.sizes import ModelForm, Positions
from engine.context import Context
from engine.models.text_model import TextModel
from engine.models.weights import check_kind, required_manifest
from engine.peers.folder_model import WorkKind, start_token

_KINDS: dict[WorkKind, ModelForm] = {"generate": "decoder", "seq2seq": "encoder_decoder", "encode": "encoder"}
_MAX_REASON = 200


@dataclass(frozen=True)
class PeerModel:
    """`engine.models.text_model.TextModel` by transformers' configuration; what it does not say is no limit."""

    family: str
    kind: ModelForm
    vocabulary: int
    positions: Positions
    max_positions: int
    max_source_positions: int
    windows: tuple[int | None, ...]
    start_token: int


def text_model(context: Context, work: WorkKind) -> TextModel:
    """Return the launch's model as its prompts need it.

    Raises ValueError for a model of another kind, and for one that transformers cannot load.
    """
    manifest = required_manifest(context)
    try:
        ModelConfig.parse(manifest.config)
    except (ValueError, KeyError, TypeError, AttributeError):  # not of this engine
        return _by_transformers(Path(manifest.folder), work, manifest.identity)
    return check_kind(context, work)


def _by_transformers(folder: Path, work: WorkKind, identity: str) -> PeerModel:
    import transformers
    from transformers import AutoConfig

    version = transformers.__version__
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a library that validates has errors of its own
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ValueError(f"{identity}: transformers {version} cannot read config.json: {reason}") from error
    able = [kind for kind in _KINDS if type(config) in _mapping(kind)]
    if work == "generate" and config.is_encoder_decoder:
        able = [kind for kind in able if kind != "generate"]
    if work not in able:
        use = f"use {' or '.join(kind for kind in able)}" if able else "use another model"
        raise ValueError(
            f"workload.kind: {identity} ({config.model_type}) has no {work} model in transformers {version}; {use}"
        )
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ValueError(f"{identity}: config.json: vocab_size: got {vocabulary!r}, expected the number of tokens")
    most, source = _limits(text)
    start = start_token(config)
    if work == "seq2seq" and start is None:
        raise ValueError(
            f"{identity}: config.json names neither decoder_start_token_id nor bos_token_id, so an answer has no first "
            "token. Set decoder_start_token_id, of a multilingual model to its target language's token"
        )
    return PeerModel(
        family=str(config.model_type),
        kind=_KINDS[work],
        vocabulary=vocabulary,
        positions="relative" if most is None else "learned",
        max_positions=most or 0,
        max_source_positions=source or 0,
        windows=_windows(text),
        start_token=start or 0,
    )


def _limits(text: Any) -> tuple[int | None, int | None]:
    """Return the most tokens of a sequence, and of an encoder-decoder's source; None: no limit, or none is said."""
    said = text.to_dict()
    found = (getattr(text, name, None) for name in LIMIT_KEYS)
    limit = next((value for value in found if isinstance(value, int) and value > 0), None)
    if limit is None or are_distances(said):
        return None, None
    most, source = limit - unused_positions(said), source_positions(said)
    return most, most if source is None else source


def _mapping(work: WorkKind) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING

    return {
        "generate": MODEL_FOR_CAUSAL_LM_MAPPING,
        "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "encode": MODEL_MAPPING,
    }[work]


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not isinstance(window, int) or (types is None and not getattr(config, "use_sliding_window", True)):
        return (None,)
    if types is None:
        return (window,)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
